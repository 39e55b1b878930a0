"""`trl-atropos check`: what it takes for right, and how it shows its findings.

`tests/recipe/mistakes.py` lists what it finds to be wrong. Here are findings about what runs on the
machine.
"""

import contextlib
import http.server
import inspect
import json
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import uvicorn

from tests import ROOT
from tests.check.desk import SOURCE, Desk, check
from tests.check.traces import traced_once  # noqa: F401 - a fixture
from tests.recipe.mistakes import DDP, GPU
from tests.server_process import free_port
from trl_atropos.check import examine, main
from trl_atropos.check.disk import checkpoints
from trl_atropos.check.launch import LENGTH_WITHOUT_POSITIONS, SHORT_NAMES, UNITS, UTILIZATION
from trl_atropos.environment_entry import RUNNER
from trl_atropos.errors import ERROR, WARNING
from trl_atropos.protocol import TOKEN_VARIABLE
from trl_atropos.recipe import parse


@pytest.fixture
def desk(tiny_model, tmp_path, monkeypatch) -> Desk:
    return Desk(tmp_path, tiny_model, monkeypatch)


def test_good_recipe_has_no_findings_and_leaves_nothing(desk):
    assert check(desk.recipe(start_atropos=True, start_vllm=True)) == []
    assert sorted(os.listdir(desk.folder)) == ["environment.py", "recipe.yaml"]


def test_quickstarts_recipe_has_no_findings(tmp_path, monkeypatch):
    from recipes.quickstart.make_model import make_model

    make_model(str(tmp_path / "model"), 0)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # as the recipe's `env` does when it is run
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    argv = [
        "--config",
        "recipes/quickstart/colocate.yaml",
        "--model_name_or_path",
        str(tmp_path / "model"),
    ]
    argv += [
        "--output_dir",
        str(tmp_path / "run"),
        "--atropos_url",
        urls[0],
        "--vllm_server_base_url",
        urls[1],
    ]
    assert check([*argv, "--use_cpu", "true", "--bf16", "false", "--report_to", "none"]) == []


def test_batch_has_the_rollouts_of_all_processes(desk):
    argv = desk.recipe(
        {"config": {"group_size": 8}}, per_device_train_batch_size=4, vllm_mode="server"
    )
    assert check([*argv, "--num_processes", "2"]) == []
    [finding] = examine([*argv, "--num_processes", "3"]).findings
    assert (finding.code, finding.seen) == (
        "group-size",
        "group_size: 8, a generation batch of 12 rollouts",
    )


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"save_steps": 150}, 2),  # and the last step's
        ({"save_steps": 100}, 2),
        ({"save_steps": 0.1}, 10),
        ({"save_steps": 0}, 1),
        # an old one is removed when the new one is there
        ({"save_steps": 1, "save_total_limit": 3}, 4),
        ({"save_strategy": "no"}, 0),
    ],
)
def test_checkpoints_of_a_run_are_counted(settings, number):
    usual = {"max_steps": 200, "save_strategy": "steps", "save_total_limit": None}
    assert checkpoints(SimpleNamespace(**{**usual, **settings})) == number


def test_accelerates_file_may_leave_its_numbers_open(desk):
    assert check(desk.launched("num_machines: null\nnum_processes: null\n")) == []


def test_processes_are_divided_among_machines(desk):
    assert check([*desk.recipe(**GPU), *DDP, "--num_machines", "2"]) == []


def test_findings_come_at_once_and_errors_first(desk):
    entry = {"config": {"total_steps": 5}, "env": {"ATROPOS_ALLOW_DUMMY_MANAGED_SERVER": "1"}}
    report = examine(desk.recipe(entry, resume_from_checkpoint="checkpoint-7", top_p=0.9))
    assert [finding.code for finding in report.findings] == [
        "checkpoint",
        "dummy-tokens",
        "environment-steps",
        "dead-setting",
    ]


def test_words_of_the_hub_are_a_cause_and_no_fix(desk):
    [finding] = examine([*desk.recipe(), "--model_name_or_path", "nobody/nothing"]).findings
    assert finding.code == "model" and finding.what.startswith(
        "The model 'nobody/nothing' cannot be loaded: "
    )
    assert finding.fix.startswith("Set `model_name_or_path` to a folder")


# ------------------------------------------------------------------------------------- environments


def test_tokenizing_with_transformers_4_is_no_finding(desk):
    assert check(desk.tokenizing(transformers="4.57.1")) == []


def test_module_of_a_command_is_found(desk):
    assert check(desk.recipe({"command": "{python} -u -m environment serve"})) == []


def test_environment_file_has_what_the_run_knows(desk):
    recipe = parse(
        desk.recipe(
            {"config": {"weight": 2}}, temperature=0.7, seed=3, per_device_train_batch_size=32
        )
    )
    content = recipe.environment_content(recipe.environments[0])
    assert content["env"] == {
        "rollout_server_url": recipe.training.atropos_url,
        "tokenizer_name": str(desk.model),
        "temperature": 0.7,
        "seed": 3,
        "total_steps": -1,
        "max_batches_offpolicy": 1,
        "max_num_workers": 32,
        "ensure_scores_are_not_same": False,
        "use_wandb": False,
        "wandb_name": "mine",
        "state_file": str(desk.folder / "run/environments/mine.state"),
        "weight": 2,
    }


def test_environment_state_is_kept_for_a_resumed_run(desk):
    recipe = parse(desk.recipe())
    [spec] = recipe.environments
    state = Path(recipe.environment_content(spec)["env"]["state_file"])
    recipe.write_environment_file(spec)
    state.write_text("7")
    recipe.training.resume_from_checkpoint = "run/checkpoint-7"
    recipe.write_environment_file(spec)
    assert state.read_text() == "7"
    recipe.training.resume_from_checkpoint = None
    recipe.write_environment_file(spec)
    assert not state.exists()


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ("max_new_tokens: int = Field(default=40, ge=1)", 40),
        ("max_new_tokens: int = 40\n    max_token_length: int = 90", 40),
        ("max_new_tokens: int = 40\n    max_turns: int = 2\n    max_token_length: int = 90", 90),
        ("max_new_tokens: int = 40\n    max_turns: int = 2", None),
        ("max_new_tokens: int = Field(default_factory=f)", None),
        ("max_new_tokens = oh no", None),
    ],
)
def test_longest_completion_is_read_from_the_script(settings, limit, desk):
    argv = desk.recipe(loss_type="dr_grpo", max_completion_length=95, max_sequence_length=120)
    (desk.folder / "environment.py").write_text(f"class Config:\n    {settings}\n")
    wanted = (
        [("loss-divisor", f"max_completion_length: 95, mine: at most {limit} tokens")]
        if limit
        else []
    )
    found = [(finding.code, finding.seen) for finding in examine(argv).findings]
    assert [finding for finding in found if finding[0] != "environment-syntax"] == wanted


def test_report_is_no_wider_than_the_terminal(desk, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    argv = desk.recipe(
        start_vllm=True,
        options=("--device_memory_gb", "1"),
        gradient_checkpointing=False,
        top_p=0.9,
    )
    _, text = shown(argv, monkeypatch)
    assert "[memory]" in text and max(map(len, text.splitlines())) <= 60


def test_stated_settings_of_an_environment_win(desk):
    argv = desk.configured(max_batches_offpolicy=2, use_wandb=True, wandb_name="other")
    recipe = parse(argv)
    settings = recipe.environment_content(recipe.environments[0])["env"]
    assert (settings["use_wandb"], settings["wandb_name"]) == (True, "other")
    assert (settings["max_batches_offpolicy"], settings["max_num_workers"]) == (2, 16)


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("games/environment.py", "games"),
        ("games/chess.py", "chess"),
        ({"path": "environment.py", "cwd": "games"}, "games"),
        ({"path": "games/chess.py", "name": "mine"}, "mine"),
        ({"path": "games/chess.py", "name": "größe-2.b"}, "größe-2.b"),
        (".games/environment.py", "games"),
    ],
)
def test_environment_is_called_like_script_or_folder(entry, name, desk):
    for folder in ("games", ".games"):
        (desk.folder / folder).mkdir()
        for file in ("chess.py", "environment.py"):
            (desk.folder / folder / file).touch()
    recipe = parse(desk.recipe(environments=[entry]))
    [spec] = recipe.environments
    file = os.path.abspath(f"run/environments/{name}.yaml")
    assert recipe.environment_command(spec) == [
        sys.executable,
        RUNNER,
        spec.path,
        "serve",
        "--config",
        file,
    ]


def told_by_an_environment(argv: list[str], folder: Path) -> dict:
    """What a real environment is configured with, by Atropos' own command line: it writes that down
    and ends."""
    source = SOURCE + (
        "    async def env_manager(self):\n        import json\n        servers = [server.config "
        "for server in self.server.servers]\n        told = [[one.base_url, one.model_name, "
        "one.server_type, one.timeout] for one in servers]\n        config = "
        "json.loads(self.config.model_dump_json())\n        open('told.json', "
        "'w').write(json.dumps({'servers': told, 'config': config}))\n    setup = evaluate = "
        "get_next_item = env_manager\nMine.cli()\n"
    )
    (folder / "environment.py").write_text(source)
    recipe = parse(argv)
    [spec] = recipe.environments
    recipe.write_environment_file(spec)
    subprocess.run(recipe.environment_command(spec), check=True, timeout=100, capture_output=True)
    return json.loads((folder / "told.json").read_text()) | {
        "url": f"{recipe.training.vllm_server_urls[0]}/v1"
    }


@pytest.mark.slow
def test_real_environment_takes_what_the_run_writes(desk):
    """One whose `config_init` returns a single server, of which Atropos ignores the URL, and has no
    temperature."""
    told = told_by_an_environment(desk.recipe({"config": {"group_size": 4}}), desk.folder)
    assert told["servers"] == [[told["url"], str(desk.model), "vllm", 1200]] * 2
    wanted = {
        "group_size": 4,
        "total_steps": -1,
        "use_wandb": False,
        "wandb_name": "mine",
        "max_num_workers": 8,
    }
    assert {name: told["config"][name] for name in wanted} == wanted


@pytest.mark.full
@pytest.mark.slow
def test_real_environment_takes_the_servers_of_a_command(desk):
    told = told_by_an_environment(desk.commanded("", servers=[{"timeout": 77}]), desk.folder)
    assert told["servers"] == [[told["url"], str(desk.model), "vllm", 77]] * 2


# -------------------------------------------------------------------------------- what runs already


@pytest.fixture
def stranger():
    """URL of an HTTP server that is none of ours."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def atropos():
    """URL of a real Atropos API."""
    from atroposlib.api.server import app

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline, "the Atropos API did not start within 30 s"
        time.sleep(0.05)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=30)


@pytest.mark.parametrize("setting", ["atropos_url", "vllm_server_base_url"])
def test_port_in_use_is_found(setting, stranger, desk):
    start = "start_atropos" if setting == "atropos_url" else "start_vllm"
    [finding] = examine(desk.recipe(**{start: True, setting: stranger})).findings
    port = stranger.rpartition(":")[2]
    assert (finding.code, finding.level) == ("port-taken", ERROR)
    assert finding.seen == f"port {port} on 127.0.0.1 is already in use"
    assert finding.fix.endswith(f"set `{setting}` to a free port, or use it with `{start}: false`.")


# A run on a GPU that is not here, whose server somebody else has started.
ON_GPU = ("--device_memory_gb", "80")
FOR_GPU = {
    "use_cpu": False,
    "start_vllm": False,
    "vllm_mode": "server",
    "max_sequence_length": 100,
}


@pytest.mark.parametrize(
    ("setting", "name", "fix"),
    [
        ("atropos_url", "not-atropos", "Set `atropos_url` to the host and port"),
        ("vllm_server_base_url", "not-our-server", "Start it with `trl-atropos serve MODEL`"),
    ],
)
def test_stranger_at_a_url_is_found(setting, name, fix, stranger, desk):
    [finding] = examine(desk.recipe(**{setting: stranger})).findings
    assert (finding.code, finding.level, finding.seen) == (name, WARNING, f"{setting}: {stranger}")
    assert fix in finding.fix
    settings = {setting: stranger, "dtype": "bfloat16"}
    elsewhere = desk.recipe(options=ON_GPU, **FOR_GPU, **settings)
    assert check(elsewhere) == []  # what answers here need not be there


@pytest.mark.parametrize(
    ("settings", "codes"),
    [
        ({}, ["float32"]),
        ({"bf16": True}, []),
        ({"dtype": "bfloat16"}, []),
        ({"tf32": True}, []),
        ({"use_cpu": True}, []),
    ],
)
def test_float32_on_a_gpu_is_found(settings, codes, desk):
    """TRL's default `dtype`, in a mode whose trainer does not take the server's."""
    argv = desk.recipe(options=ON_GPU, **(FOR_GPU | settings))
    found = examine(argv).findings
    assert [finding.code for finding in found] == codes
    assert all(finding.level == WARNING and "`bf16: true`" in finding.fix for finding in found)


def test_atropos_api_that_answers_is_no_finding(atropos, desk):
    assert check(desk.recipe(atropos_url=atropos)) == []


@pytest.mark.server
@pytest.mark.slow
def test_running_server_is_asked_with_the_runs_token(server, server_model, desk, monkeypatch):
    def found() -> list[tuple[str, str]]:
        report = examine(
            desk.recipe(vllm_server_base_url=server.url, model_name_or_path=server_model)
        )
        return [(finding.code, finding.seen) for finding in report.findings]

    monkeypatch.setenv(TOKEN_VARIABLE, "wrong")
    assert found() == [("server-token", f"vllm_server_base_url: {server.url}")]
    monkeypatch.setenv(TOKEN_VARIABLE, server.token)
    assert found() == []


# -------------------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_json_is_one_object_and_nothing_else(desk):
    argv = desk.recipe(top_p=0.9, resume_from_checkpoint="checkpoint-7")
    command = [sys.executable, "-m", "trl_atropos.cli", "check", *argv, "--json"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=env, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "Warning" not in done.stderr  # as TRL's of vLLM's version, which is not imported
    told = json.loads(done.stdout)
    assert set(told) == {"ok", "findings", "memory", "versions"} and told["ok"] is False
    assert [(one["name"], one["level"]) for one in told["findings"]] == [
        ("checkpoint", "error"),
        ("dead-setting", "warning"),
    ]
    assert told["findings"][1] == {
        "name": "dead-setting",
        "what": "A setting has no effect, because the environments generate",
        "seen": "top_p: 0.9",
        "fix": "Set the environment's own, or remove it.",
        "level": "warning",
    }
    assert told["memory"]["fits"] and told["memory"]["bytes"]["trainer"]["runtime"] > 0
    assert {"trl", "transformers", "torch", "atroposlib", "trl_atropos"} <= set(told["versions"])


def shown(argv: list[str], monkeypatch) -> tuple[int, str]:
    """The exit code, and what a terminal shows."""
    ours, theirs = pty.openpty()
    with (
        open(theirs, "w") as terminal,
        monkeypatch.context() as patch,
        pytest.raises(SystemExit) as ended,
    ):
        patch.setattr(sys, "stdout", terminal)
        main(argv)
    data = b""
    with contextlib.suppress(OSError):  # EIO, where the other end is closed and all is read
        while part := os.read(ours, 1 << 16):
            data += part
    os.close(ours)
    return ended.value.code, data.decode().replace("\r", "")


def test_report_without_findings_is_a_green_line(desk, monkeypatch):
    code, text = shown(desk.recipe(), monkeypatch)
    assert (code, text.partition("\n")[0]) == (0, "\033[32mNothing wrong was found.\033[0m")


def test_findings_are_numbered_and_plain_if_wanted(desk, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    code, text = shown(desk.recipe({"config": {"total_steps": 5}}, top_p=0.9), monkeypatch)
    assert code == 1 and "\033" not in text
    assert text.startswith(
        "1. error [environment-steps]\n   Environment 'mine': it ends before the run does.\n"
    )
    assert "\n2. warning [dead-setting]\n" in text
    assert "\n   seen  top_p: 0.9\n   fix   Set the environment's own, or remove it." in text
    assert "\n1 error, 1 warning.\n" in text


def test_warnings_alone_are_no_failure(desk, monkeypatch):
    code, text = shown(desk.recipe(top_p=0.9), monkeypatch)
    assert code == 0 and "No error, 1 warning." in text


TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
OPENS_SESSIONS = f"from trl_atropos.session_client import SessionClient\n{SOURCE}"


@pytest.mark.parametrize(
    ("source", "flags", "codes"),
    [
        (OPENS_SESSIONS, [], ["session-tools", "session-length"]),
        (OPENS_SESSIONS, TOOLS, ["session-length"]),
        (
            OPENS_SESSIONS,
            [*TOOLS[1:], "--max-model-len", "1k"],
            ["session-tools", "session-length"],
        ),
        (f"from trl_atropos import session_client\n{SOURCE}", TOOLS, ["session-length"]),
        (f"import trl_atropos.session_client as s\n{SOURCE}", TOOLS, ["session-length"]),
        (f"from .trl_atropos import session_client\n{SOURCE}", [], []),
        (f"import trl_atropos\n{SOURCE}", [], []),
    ],
)
def test_what_sessions_will_miss_at_the_server_is_a_warning(source, flags, codes, desk):
    (desk.folder / "environment.py").write_text(source)
    findings = examine(desk.recipe(start_vllm=True, vllm_args=flags)).findings
    session_findings = [finding for finding in findings if finding.code.startswith("session-")]
    assert [finding.code for finding in session_findings] == codes
    assert {finding.level for finding in session_findings} <= {"warning"}


def test_long_context_is_enough_for_sessions(desk):
    (desk.folder / "environment.py").write_text(OPENS_SESSIONS)
    flags = ["--max-model-len", "4096", *TOOLS]
    text = str(check(desk.recipe(start_vllm=True, vllm_args=flags)))
    assert "published agents" not in text and "tool calls" not in text
    # without a server of its own, the run does not know the flags
    assert "tool calls" not in str(check(desk.recipe()))


@pytest.mark.parametrize(
    "argv", [["--config"], ["--config", "nowhere.yaml"], ["--nonsense", "1"], ["--devices", "many"]]
)
def test_wrong_command_line_exits_with_2(argv, desk):
    with pytest.raises(SystemExit) as ended:
        main(argv if "--config" in argv else [*desk.recipe(), *argv])
    assert ended.value.code == 2


# ------------------------------------------------------------------------------------------- memory


def test_vllms_defaults_are_those_of_the_estimate():
    from vllm.config import model
    from vllm.engine.arg_utils import EngineArgs, human_readable_int

    assert EngineArgs.gpu_memory_utilization == UTILIZATION
    assert f"default_max_len = {LENGTH_WITHOUT_POSITIONS}\n" in inspect.getsource(model)
    for unit, factor in UNITS.items():
        assert human_readable_int(f"3{unit}") == 3 * factor
    assert model._STR_DTYPE_TO_TORCH_DTYPE.items() >= SHORT_NAMES.items()


def test_memory_is_shown_as_a_table(desk):
    argv = desk.recipe(start_vllm=True, gradient_checkpointing=False)
    table = examine([*argv, "--device_memory_gb", "64"]).memory["table"]
    assert table[0].startswith("Peak memory per process in GiB, estimated (micro-batches of ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_run_in_bfloat16_is_planned_without_a_gpu(desk):
    argv = desk.recipe(bf16=True, use_cpu=False, vllm_mode="server")
    [finding] = examine(argv).findings
    assert (finding.code, finding.seen) == ("no-gpu", "bf16: True")
    report = examine([*argv, "--device_memory_gb", "80"])
    assert report.findings == []
    assert report.memory["table"][0].startswith("Peak memory per device")


def test_missing_config_leaves_out_the_estimate_alone(desk):
    report = examine(
        desk.recipe({"config": {"total_steps": 5}}, model_name_or_path="nobody/nothing")
    )
    assert [finding.code for finding in report.findings] == ["model", "environment-steps"]
    assert report.memory["table"][0].startswith(
        "Memory: no estimate, because the model cannot be loaded"
    )
