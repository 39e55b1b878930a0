"""`trl-atropos check`: what is wrong with a recipe and its environments, found without starting anything."""

import contextlib
import http.server
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
import requests
import torch
import uvicorn
import yaml

from tests.check_desk import FLAGS, HEADER, LISTED, Desk
from tests.check_mistakes import COMPUTED, DDP, GPU, INHERITED, MISTAKES, PLAIN, SINGLE, SINGLE_BY_NAME, TOKENIZES
from tests.server_process import free_port
from trl_atropos.check import check, examine, main
from trl_atropos.checks.disk import _checkpoints
from trl_atropos.checks.finding import ERROR
from trl_atropos.environment_code import read_environment
from trl_atropos.protocol import TOKEN_VARIABLE
from trl_atropos.recipe import RecipeError, parse

ROOT = Path(__file__).parents[1]


@pytest.fixture
def desk(tiny_model, tmp_path, monkeypatch) -> Desk:
    """Its folder is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; otherwise a server takes most of the machine
    for name in ("NO_COLOR", "WANDB_API_KEY", "WANDB_MODE", TOKEN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return Desk(tmp_path, tiny_model)


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_the_one_finding(mistake, desk, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    report = examine(mistake.plant(desk))
    [found] = report.findings
    assert (found.name, found.level) == (mistake.name, mistake.level)
    assert mistake.seen.replace("{folder}", str(desk.folder)).replace("{model}", str(desk.model)) in found.seen
    assert mistake.fix in found.fix
    assert report.exit_code == (mistake.level == ERROR)


def test_a_recipe_without_a_mistake_has_no_findings_and_leaves_nothing_behind(desk):
    assert check(desk.recipe(start_atropos=True, start_vllm=True)) == []
    assert sorted(os.listdir(desk.folder)) == ["environment.py", "recipe.yaml"]


def test_the_quickstarts_recipe_has_no_findings(tmp_path, monkeypatch):
    from recipes.quickstart.make_model import make_model

    make_model(str(tmp_path / "model"), 0)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # as the recipe's `env` does when it is run
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    argv = ["--config", "recipes/quickstart/colocate.yaml", "--model_name_or_path", str(tmp_path / "model")]
    argv += ["--output_dir", str(tmp_path / "run"), "--atropos_url", urls[0], "--vllm_server_base_url", urls[1]]
    assert check([*argv, "--use_cpu", "true", "--bf16", "false", "--report_to", "none"]) == []


def test_a_batch_has_the_rows_of_all_processes(desk):
    argv = desk.recipe(per_device_train_batch_size=4, vllm_mode="server")
    assert check([*argv, "--num_processes", "2"]) == []
    [found] = examine([*argv, "--num_processes", "3"]).findings
    assert (found.name, found.seen) == ("group-size", "group_size: 8, a generation batch of 12 rows")


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"save_steps": 150}, 2),  # and the last step's
        ({"save_steps": 100}, 2),
        ({"save_steps": 0.1}, 10),
        ({"save_steps": 0}, 1),
        ({"save_steps": 1, "save_total_limit": 3}, 4),  # an old one is removed when the new one is there
        ({"save_strategy": "no"}, 0),
    ],
)
def test_the_checkpoints_of_a_run_are_counted(settings, number):
    usual = {"max_steps": 200, "save_strategy": "steps", "save_total_limit": None}
    assert _checkpoints(SimpleNamespace(**{**usual, **settings})) == number


def test_a_file_of_accelerate_may_leave_its_numbers_open(desk):
    (desk.folder / "launch.yaml").write_text("num_machines: null\nnum_processes: null\n")
    assert check(desk.recipe(options=("--config_file", "launch.yaml"))) == []
    (desk.folder / "launch.yaml").write_text("num_processes: auto\n")
    (finding,) = check(desk.recipe(options=("--config_file", "launch.yaml")))
    assert "`--config_file` cannot be read as accelerate's YAML" in finding and "'auto'" in finding


def test_processes_are_shared_out_over_machines(desk):
    assert check([*desk.recipe(**GPU), *DDP, "--num_machines", "2"]) == []


def test_findings_of_all_kinds_are_told_at_once_and_errors_first(desk):
    flags = desk.without_flag("--env.rollout_server_url")
    report = examine(desk.recipe(SINGLE, flags, resume_from_checkpoint="checkpoint-7", top_p=0.9))
    assert [one.name for one in report.findings] == ["checkpoint", "single-server", "environment-api", "dead-setting"]


def test_the_settings_of_overlays_are_the_recipes(desk):
    (desk.folder / "overlay.yaml").write_text("rollout_timeout: -2\n")
    [found] = examine([*desk.recipe(), "--overlay", "overlay.yaml"]).findings
    assert found.seen == "rollout_timeout: -2"


def test_what_the_hub_says_is_not_taken_for_the_way_out(desk):
    [found] = examine([*desk.recipe(), "--model_name_or_path", "nobody/nothing"]).findings
    assert found.name == "model" and found.what.startswith("The model 'nobody/nothing' cannot be loaded: ")
    assert found.fix.startswith("Set `model_name_or_path` to a folder")


# ----------------------------------------------------------------------------------- what an environment's code tells


@pytest.mark.parametrize("source", [SINGLE, SINGLE_BY_NAME, INHERITED], ids=["returned", "named", "inherited"])
def test_a_single_server_config_is_found_with_its_line(source, desk):
    code, found = read_environment(HEADER + source), examine(desk.recipe(source)).findings
    assert [one.seen for one in found if one.name == "single-server"] == [f"environment.py:{code.single_server}"]


@pytest.mark.parametrize("source", [LISTED, COMPUTED], ids=["a list", "unknown"])
def test_servers_that_are_a_list_or_cannot_be_known_are_no_finding(source, desk):
    assert check(desk.recipe(source)) == []


def test_servers_in_the_recipe_mend_a_single_server_config(desk):
    assert check(desk.recipe(SINGLE, PLAIN, {"servers": [{"base_url": "{vllm_url}/v1"}]})) == []


def test_tokenizing_with_transformers_4_is_no_finding(desk):
    assert check(desk.recipe(TOKENIZES + LISTED, entry={"python": desk.python(transformers="4.57.1")})) == []


@pytest.mark.parametrize(
    ("call", "wrong"),
    [("x, tokenize=True", True), ("x", True), ("x, tokenize=False", False), ("x, return_dict=False", False)],
)
def test_chat_templates_are_found_only_where_token_ids_are_expected(call, wrong):
    assert bool(read_environment(f"tokens = tokenizer.apply_chat_template({call})").tokenizes) is wrong


def test_a_module_is_read_like_a_script(desk):
    [found] = examine(desk.recipe(SINGLE, entry={"command": f"{{python}} -u -m environment serve {FLAGS}"})).findings
    assert found.name == "single-server"


def test_flags_and_the_environments_own_file_come_before_the_source(desk):
    source = desk.changed(group_size=3, total_steps=5)
    (desk.folder / "own.yaml").write_text(yaml.safe_dump({"env": {"group_size": 4}}))
    assert check(desk.recipe(source, f"{FLAGS} --config own.yaml --env.total_steps -1")) == []


def test_settings_that_are_computed_are_no_finding(desk):
    source = desk.changed(group_size=3).replace("group_size=3", "group_size=2 + 1")
    source = source.replace("        return", "        config.total_steps = number()\n        return")
    assert check(desk.recipe(source.replace("total_steps=-1", "total_steps=5"))) == []


def test_flags_of_a_configuration_of_another_file_are_not_judged(desk):
    source = "from elsewhere import Other\n" + LISTED.replace("= BaseEnvConfig(", "= Other.Config(")
    assert check(desk.recipe(source, f"{FLAGS} --env.weight 2")) == []


@pytest.mark.parametrize("flag", ["--openai.base_url http://a/v1", "--config own.yaml"])
def test_servers_and_flags_that_contradict_them_are_refused(flag, desk):
    with pytest.raises(RecipeError, match=r"has both `servers` and --(openai.base_url|config) in its command"):
        parse(desk.recipe(flags=flag, entry={"servers": [{}]}))


@pytest.mark.slow
def test_servers_are_written_as_a_file_that_a_real_environment_samples_from(desk, tiny_model):
    """Atropos' own command line reads the file: an environment whose `config_init` returns a single server."""
    source = SINGLE.replace("Mine.cli()", "") + (
        "    async def env_manager(self):\n"
        "        import json\n"
        "        servers = [server.config for server in self.server.servers]\n"
        "        told = [[one.base_url, one.model_name, one.server_type, one.timeout] for one in servers]\n"
        "        open('told.json', 'w').write(json.dumps(told))\n"
        "    setup = evaluate = get_next_item = env_manager\n"
        "Mine.cli()\n"
    )
    recipe = parse(desk.recipe(source, f"--slurm false {PLAIN}", {"servers": [{"timeout": 77}]}))
    [spec] = recipe.environments
    spec.write_servers(recipe.placeholders())
    subprocess.run(spec.argv(recipe.placeholders()), check=True, timeout=100, capture_output=True)
    url = f"{recipe.training.vllm_server_urls[0]}/v1"
    assert json.loads(Path("told.json").read_text()) == [[url, str(tiny_model), "vllm", 77]] * 2


# ------------------------------------------------------------------------------------------------ what runs already


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
def test_a_port_in_use_is_found(setting, stranger, desk):
    start = "start_atropos" if setting == "atropos_url" else "start_vllm"
    [found] = examine(desk.recipe(**{start: True, setting: stranger})).findings
    port = stranger.rpartition(":")[2]
    assert (found.name, found.level) == ("port-taken", ERROR)
    assert found.seen == f"{setting}: {stranger}, port {port} on 127.0.0.1 is already in use"
    assert found.fix.endswith(f"set `{setting}` to a free port, or use it with `{start}: false`.")


@pytest.mark.parametrize(
    ("setting", "name", "fix"),
    [
        ("atropos_url", "not-atropos", "Set `atropos_url` to the host and port"),
        ("vllm_server_base_url", "not-our-server", "Start it with `trl-atropos serve MODEL`"),
    ],
)
def test_something_else_that_answers_there_is_found(setting, name, fix, stranger, desk):
    [found] = examine(desk.recipe(**{setting: stranger})).findings
    assert (found.name, found.seen) == (name, f"{setting}: {stranger}")
    assert fix in found.fix


def test_the_registration_of_an_earlier_run_is_found(atropos, desk):
    fields = {"wandb_group": "a", "wandb_project": "b", "checkpoint_dir": "", "save_checkpoint_interval": 1}
    fields |= {"batch_size": 16, "max_token_len": 64, "starting_step": 0, "num_steps": 9}
    argv = desk.recipe(atropos_url=atropos)
    assert check(argv) == []
    requests.post(f"{atropos}/register", json=fields, timeout=10).raise_for_status()
    assert check(argv) == []  # it may be for two processes
    argv += ["--num_processes", "1"]
    [found] = examine(argv).findings
    assert (found.name, found.seen) == ("atropos-registered", f"{atropos} has batch_size 16, this run 8")
    assert "Set `reset_atropos: true`" in found.fix
    assert check([*argv, "--reset_atropos", "true"]) == []


@pytest.mark.server
@pytest.mark.slow
def test_a_running_server_is_asked_whether_it_is_the_runs(server, server_model, desk, monkeypatch):
    def found(**settings) -> list[tuple[str, str]]:
        report = examine(desk.recipe(vllm_server_base_url=server.url, **settings))
        return [(one.name, one.seen) for one in report.findings]

    monkeypatch.setenv(TOKEN_VARIABLE, "wrong")
    assert found() == [("server-token", f"vllm_server_base_url: {server.url}")]
    monkeypatch.setenv(TOKEN_VARIABLE, server.token)
    own = {"model_name_or_path": server_model}
    assert found(**own) == []
    assert found() == [("server-model", f"{server.url} has {server_model}, the run {desk.model}")]
    mode = ("server-mode", f"{server.url}, vllm_mode: lora")
    assert found(vllm_mode="lora", use_peft=True, **own) == [mode]
    [(name, seen)] = found(max_sequence_length=1000, **own)
    assert (name, seen) == ("sequence-length", f"max_sequence_length: 1000, {server.url} has max_model_len 512")


# ---------------------------------------------------------------------------------------------------- the command


def test_the_command_prints_one_json_object_and_nothing_else(desk):
    argv = desk.recipe(top_p=0.9, resume_from_checkpoint="checkpoint-7")
    command = [sys.executable, "-m", "trl_atropos.cli", "check", *argv, "--json"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env, check=False)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert set(told) == {"ok", "findings", "memory", "versions"} and told["ok"] is False
    assert [(one["name"], one["level"]) for one in told["findings"]] == [
        ("checkpoint", "error"),
        ("dead-setting", "warning"),
    ]
    assert told["findings"][1] == {
        "name": "dead-setting",
        "what": "Settings of generation have no effect here, because the environments generate",
        "seen": "top_p: 0.9",
        "fix": "Remove them, and set what they mean in the environment.",
        "level": "warning",
    }
    assert told["memory"]["fits"] and told["memory"]["bytes"]["trainer"]["runtime"] > 0
    assert {"trl", "transformers", "torch", "atroposlib", "trl_atropos"} <= set(told["versions"])


def shown(argv: list[str], monkeypatch) -> tuple[int, str]:
    """The exit code, and what a terminal shows."""
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal, monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "stdout", terminal)
        main(argv)
    data = b""
    with contextlib.suppress(OSError):  # EIO, where the other end is closed and all is read
        while part := os.read(ours, 1 << 16):
            data += part
    os.close(ours)
    return ended.value.code, data.decode().replace("\r", "")


def test_a_green_line_says_that_all_is_well(desk, monkeypatch):
    code, text = shown(desk.recipe(), monkeypatch)
    assert (code, text.partition("\n")[0]) == (0, "\033[32mNothing wrong was found.\033[0m")


def test_findings_are_numbered_and_have_no_colours_where_none_are_wanted(desk, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    code, text = shown(desk.recipe(SINGLE, top_p=0.9), monkeypatch)
    assert code == 1 and "\033" not in text
    assert text.startswith("1. error [single-server]\n   Environment 'mine': its `config_init` returns")
    assert "\n2. warning [dead-setting]\n" in text
    assert "\n   seen  top_p: 0.9\n   fix   Remove them, and set what" in text
    assert "\n1 error, 1 warning.\n" in text


def test_warnings_alone_are_no_failure(desk, monkeypatch):
    code, text = shown(desk.recipe(top_p=0.9), monkeypatch)
    assert code == 0 and "No error, 1 warning." in text


@pytest.mark.parametrize(
    "argv", [["--config"], ["--config", "nowhere.yaml"], ["--nonsense", "1"], ["--devices", "many"]]
)
def test_a_wrong_command_line_has_an_exit_code_of_its_own(argv, desk):
    with pytest.raises(SystemExit) as ended:
        main(argv if "--config" in argv else [*desk.recipe(), *argv])
    assert ended.value.code == 2


# ------------------------------------------------------------------------------------------------------------ memory


def test_memory_is_told_as_a_table(desk):
    argv = desk.recipe(start_vllm=True, gradient_checkpointing=False)
    table = examine([*argv, "--device_memory_gb", "64"]).memory["table"]
    assert table[0].startswith("Memory per process at the peak, estimated from the model's config, in GiB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_run_in_bfloat16_on_a_gpu_is_planned_where_there_is_none(desk):
    argv = desk.recipe(bf16=True, use_cpu=False, vllm_mode="server")
    [found] = examine(argv).findings
    assert (found.name, found.seen) == ("no-gpu", "bf16: True")
    report = examine([*argv, "--device_memory_gb", "80"])
    assert report.findings == []
    assert report.memory["table"][0].startswith("Memory per device at the peak")


def test_without_the_models_config_there_is_no_estimate_and_the_rest_is_checked(desk):
    report = examine(desk.recipe(SINGLE, model_name_or_path="nobody/nothing"))
    assert [one.name for one in report.findings] == ["model", "single-server"]
    assert report.memory["table"][0].startswith("Memory: no estimate, which needs the model's config")
