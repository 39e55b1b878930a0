"""`trl-atropos serve`: which flags reach vLLM in each mode, and which of the user's are refused."""

import os
import socket
import stat
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from transformers import Qwen3Config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from trl_atropos.check.launch import Plan, case_of
from trl_atropos.errors import RecipeError
from trl_atropos.flags import SHORT_NAMES, parallel, server_flags, stated_flags
from trl_atropos.protocol import TOKEN_VARIABLE, environment_token, hide_token
from trl_atropos.recipe import parse
from trl_atropos.server.launch import main, ready_text, set_up_token, vllm_arguments
from trl_atropos.services.addresses import free_port

ADAPTER_MODES = ("nccl_lora", "lora")
PUBLISHING_MODES = ("colocate", "server", *ADAPTER_MODES)


def flags(*given: str, cpu: bool = True, mode: str = "colocate") -> dict[str, str]:
    return stated_flags(vllm_arguments("m", list(given), cpu=cpu, mode=mode))


@pytest.mark.parametrize("mode", PUBLISHING_MODES)
@pytest.mark.parametrize("cpu", [True, False])
def test_every_mode_has_control_routes_and_logprobs(mode, cpu):
    stated = flags(cpu=cpu, mode=mode)
    assert stated["--model"] == "m"
    assert stated["--middleware"] == "trl_atropos.server.control.Control"
    assert stated["--worker-extension-cls"] == "trl_atropos.server.extension.WorkerExtension"
    assert stated["--logprobs-mode"] == "processed_logprobs"
    assert (stated["--host"], stated["--port"]) == ("127.0.0.1", "9001")


@pytest.mark.parametrize(
    "given", [["-tp", "2"], ["-tp=2"], ["--tensor_parallel_size", "2"]], ids=" ".join
)
def test_flag_spellings_are_read_alike(given, tmp_path):
    folder = tmp_path / "model"
    Qwen3Config().save_pretrained(folder)
    argv = [
        "--model_name_or_path",
        str(folder),
        "--max_steps",
        "1",
        "--output_dir",
        str(tmp_path / "run"),
    ]
    recipe = parse([*argv, "--use_cpu", "true", "--bf16", "false"])
    services = replace(recipe.services, vllm_args=given, start_vllm=True)
    recipe = replace(recipe, services=services)
    case = case_of(recipe, Plan("cuda", 80 << 30))
    assert parallel(recipe.vllm_flags()) == (2, "--tensor-parallel-size 2")
    assert (case.whole("tensor-parallel-size", 1), case.shares_weights) == (2, False)


def test_server_flags_are_one_quoted_argument():
    argv = [
        "--model_name_or_path",
        "m",
        "--max_steps",
        "1",
        "--output_dir",
        "run",
        "--use_cpu",
        "true",
    ]
    recipe = parse([*argv, "--bf16", "false", "--vllm_args", "--max-num-seqs 8 --enforce-eager"])
    assert recipe.services.vllm_args == ["--max-num-seqs", "8", "--enforce-eager"]


def test_short_flag_names_match_vllm():
    arguments = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    theirs = {
        one: action.dest
        for one, action in arguments._option_string_actions.items()
        if not one.startswith("--") and one != "-h"
    }
    ours = {one: long.removeprefix("--").replace("-", "_") for one, long in SHORT_NAMES.items()}
    looked_for = {
        *ours.values(),
        "dtype",
        "enable_lora",
        "gpu_memory_utilization",
        "host",
        "kv_cache_memory_bytes",
    }
    looked_for |= {
        "max_cpu_loras",
        "max_lora_rank",
        "max_loras",
        "max_model_len",
        "max_num_batched_tokens",
        "port",
    }
    looked_for |= {
        "speculative_config",
        "chat_template",
        "max_num_seqs",
        "seed",
        "served_model_name",
        "tokenizer",
    }
    assert {one: long for one, long in theirs.items() if long in looked_for}.items() <= ours.items()
    assert theirs.keys() >= {"-tp", "-pp", "-dp"}


@pytest.mark.parametrize("mode", ADAPTER_MODES)
def test_adapter_modes_hold_two_versions(mode):
    stated = flags(mode=mode)
    assert "--enable-lora" in stated
    assert (stated["--max-loras"], stated["--max-lora-rank"]) == ("2", "64")


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_other_modes_have_adapters_only_on_request(mode):
    assert not [flag for flag in flags(mode=mode) if "lora" in flag]
    assert flags("--enable-lora", mode=mode)["--max-loras"] == "2"


def test_server_dtype_is_stated_only_on_cpu():
    assert (flags(cpu=True)["--dtype"], flags(cpu=True)["--load-format"]) == (
        "float32",
        "trl_atropos_shared",
    )
    assert not {"--dtype", "--load-format", "--enforce-eager"} & flags(cpu=False).keys()


@pytest.mark.parametrize(
    "given",
    [
        ("--port", "1234"),
        ("--host=0.0.0.0",),
        ("--dtype", "bfloat16"),
        ("--max-loras", "4"),
        ("--max_loras", "4"),
        ("--max-lora-rank=8",),
        ("--enable-lora",),
        ("--no-enforce-eager",),
    ],
    ids=" ".join,
)
def test_user_flags_win_over_defaults(given):
    arguments = vllm_arguments("m", list(given), cpu=True, mode="nccl_lora")
    words = [word.partition("=")[0].replace("_", "-").replace("--no-", "--") for word in arguments]
    flag = given[0].partition("=")[0].replace("_", "-").replace("--no-", "--")
    assert words.count(flag) == 1
    assert arguments[arguments.index(given[0]) :][: len(given)] == list(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--logprobs-mode", "raw_logprobs"],
            "needs `--logprobs-mode processed_logprobs`. Leave the flag out",
        ),
        (
            ["--load_format=dummy"],
            "--load-format dummy: this server needs `--load-format trl_atropos_shared`",
        ),
        (
            ['--speculative-config={"method": "ngram"}'],
            r"--speculative-config: with speculative decoding, .* Leave the flag out\.",
        ),
        (["-sc", "{}"], "--speculative-config: with"),
        (["--speculative_config.method", "ngram"], r"--speculative-config\.method: with"),
        (["--spec-method", "ngram"], "--spec-method: with"),
    ],
)
def test_flag_breaking_run_is_refused(given, message):
    with pytest.raises(RecipeError, match=message):
        vllm_arguments("m", given, cpu=True)


@pytest.mark.parametrize(
    ("given", "variable", "size"),
    [
        ([], None, str(1 << 30)),
        ([], "4", None),  # vLLM reads the variable
        (["--gpu-memory-utilization", "0.3"], None, None),
        (["--kv_cache_memory_bytes=5"], None, "5"),
    ],
)
def test_cpu_server_has_cache_of_stated_size(given, variable, size, monkeypatch):
    """Or of a usual one: vLLM by itself claims almost all memory of the machine."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if variable:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", variable)
    stated = server_flags(vllm_arguments("m", given, cpu=True))
    assert stated.get("--kv-cache-memory-bytes") == size
    assert "--kv-cache-memory-bytes" not in flags(cpu=False)


def test_required_flag_is_not_repeated():
    given = ["--logprobs-mode", "processed_logprobs"]
    assert vllm_arguments("m", given, cpu=True).count("--logprobs-mode") == 1


def test_missing_vllm_is_told_with_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(
        SystemExit,
        match=r'^trl-atropos serve: vLLM is not installed for .*pip install "trl_atropos',
    ):
        main(["m"])


def test_generated_token_is_readable_by_user_only(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "trl_atropos" / "token-9001"
    for _ in range(2):  # the second server's replaces the first's
        monkeypatch.setenv(TOKEN_VARIABLE, "")
        assert environment_token() == ""
        told = ready_text("0.0.0.0", "9001", "lora", set_up_token("9001"))
        assert len(os.environ[TOKEN_VARIABLE]) > 20
        assert (stat.S_IMODE(file.stat().st_mode), file.read_text()) == (
            0o600,
            os.environ[TOKEN_VARIABLE],
        )
        ready, *command = told.splitlines()[1:]
        url = f"http://{socket.gethostname()}:9001"
        assert f"ready at {url}, vllm_mode lora, token in {file}; next:" in ready
        assert [line.endswith(" \\") for line in command] == [True, True, False]
        words = " ".join(command).replace("\\", "").split()
        assert " ".join(words) == (
            f"{TOKEN_VARIABLE}=$(cat {file}) trl-atropos train RECIPE --vllm_mode lora "
            f"--start_vllm false --vllm_server_base_url {url}"
        )
        file.chmod(0o644)
    monkeypatch.setenv(TOKEN_VARIABLE, "mine")
    told = ready_text("127.0.0.1", "9001", "lora", set_up_token("9001"))
    assert f"token in {TOKEN_VARIABLE}; next:\n  trl-atropos train " in told
    assert "ready at http://[::1]:9001, " in ready_text("::1", "9001", "lora", None)


def test_hidden_token_is_known_to_its_process_alone(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "mine")
    hide_token()
    assert environment_token() == "mine"
    inherited = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    assert TOKEN_VARIABLE not in inherited
    hide_token()  # of a second run in the same process
    assert environment_token() == "mine"
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    assert environment_token() == "another"


def test_useless_api_key_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"--api-key .* would protect nothing. Leave it out"):
        vllm_arguments("m", ["--api-key", "secret"], cpu=True)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with pytest.raises(ValueError, match="unset the variable"):
        vllm_arguments("m", [], cpu=True)


def test_ready_line_tells_url_and_next_command(server):
    deadline = time.monotonic() + 10
    while "ready" not in (log := server.log.read_text()):
        assert time.monotonic() < deadline, log
        time.sleep(0.1)
    ready = log.partition("trl-atropos serve: ready at ")[2]
    assert ready.startswith(
        f"{server.url}, vllm_mode colocate, token in {TOKEN_VARIABLE}; next:\n"
        "  trl-atropos train RECIPE "
    )
    assert server.token not in log


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("./no/model", r"the model folder \./no/model does not exist \(looked in /.*\)\. Name the"),
        (".", r"the folder \. holds no model: it has no config\.json\. Name the folder"),
    ],
)
def test_folder_without_model_is_refused(model, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for mode in ("colocate", "restart"):
        with pytest.raises(SystemExit, match=f"trl-atropos serve: {told}"):
            main([model, "--vllm_mode", mode])


@pytest.mark.parametrize(("port", "told"), [("", "is already in use"), ("99999", "port must be")])
def test_port_that_cannot_be_used_is_refused(port, told, tmp_path, monkeypatch):
    """And the token of the server that listens there stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = port or str(taken.getsockname()[1])
        said = rf"port {port} on 127\.0\.0\.1 .*{told}.*another .*`--port`"
        with pytest.raises(SystemExit, match=said):
            main(["model", "--port", port])
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_before_vllm_takes_it_ends_with_130(monkeypatch, capsys):
    def interrupted(*_args) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trl_atropos.server.launch.unknown_flags", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["model"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "\ntrl-atropos serve: stopped by Ctrl-C.\n"


def test_unknown_mode_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["m", "--vllm_mode", "banana"])
    assert "choose from" in capsys.readouterr().err


def test_restart_mode_becomes_front(tmp_path):
    """Which alone knows a drain timeout."""
    command = [
        sys.executable,
        "-m",
        "trl_atropos.server.launch",
        "m",
        "--vllm_mode",
        "restart",
        "--port",
        str(free_port()),
        "--drain_timeout",
        "soon",
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert (
        "--vllm_mode restart: error: argument --drain_timeout: invalid float value: 'soon'"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("token", "told"),
    [
        ("secret\n", "a space or line break at place 7 of 7"),
        ("schlüssel", "a control or non-ASCII character at place 5"),
    ],
)
@pytest.mark.parametrize("mode", ["colocate", "restart"])
def test_token_unfit_for_header_is_refused_unshown(mode, token, told, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(
        SystemExit, match=f"{TOKEN_VARIABLE} has {told}.* Set it to letters and digits"
    ) as refused:
        main(["model", "--vllm_mode", mode])
    assert token.strip() not in str(refused.value)
