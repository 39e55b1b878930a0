"""What the main job says of a mistake: one message with cause and fix, and nothing is left over.

`mistakes.py` has those of the recipe alone. Here are those that a run finds when it looks for
servers, Atropos and rollouts. Some are made through `accelerate launch`, most in a fork of a
process that has done the slow imports (`Forge`), which runs the same `main`.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from recipes.quickstart.make_model import byte_tokenizer, make_model
from tests import ROOT, server_process
from tests.forge import FORKED_ENGINES, TRAINER
from tests.server_process import Server, free_port, running_server
from trl_atropos.protocol import TOKEN_VARIABLE

pytestmark = pytest.mark.slow
ENVIRONMENT = "{python} recipes/quickstart/environment.py serve --slurm false"
SERVER_ENVIRONMENT = server_process.ENVIRONMENT | FORKED_ENGINES
TOKEN = "the-token-of-the-shared-server"
MARKER = "TRL_ATROPOS_TEST_WRONG_INPUTS"
PATIENCE = 240.0  # seconds for one run on a machine that is busy with other things


# ---------------------------------------------------------------------------------------- processes


def free_url() -> str:
    return f"http://127.0.0.1:{free_port()}"


def marked(marker: str) -> list[str]:
    """The processes that carry a marker in their environment."""
    found = []
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if place.name.isdigit() and marker.encode() in (place / "environ").read_bytes():
                command = (
                    (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                if command:
                    found.append(f"{place.name} {command}")
    return found


@dataclasses.dataclass
class Outcome:
    """How a run ended."""

    code: int
    output: str
    seconds: float
    left: list[str]  # processes that it left running

    @property
    def message(self) -> str:
        """What the user is told, everything from the error line on."""
        return self.output.partition("trl_atropos: error: ")[2].strip()


def run_command(command: list[str], env: dict[str, str], log: Path) -> Outcome:
    """Runs a command from the repository's root, as a user does."""
    marker = uuid.uuid4().hex
    began = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={**os.environ, **env, MARKER: marker},
            start_new_session=True,
        )
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            pytest.fail(f"still running after {PATIENCE:.0f} s:\n{log.read_text()}")
    return Outcome(code, log.read_text(), time.monotonic() - began, marked(marker))


def run_forked(argv: list[str], env: dict[str, str], log: Path) -> Outcome:
    """The main job, with the imports done."""
    marker = uuid.uuid4().hex
    began = time.monotonic()
    job = TRAINER.fork(
        ["-m", "trl_atropos.train", *argv],
        {**os.environ, **SERVER_ENVIRONMENT, **env, MARKER: marker},
        log,
    )
    try:
        code = job.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        pytest.fail(f"still running after {PATIENCE:.0f} s:\n{log.read_text()}")
    # The marker of a fork is not in its /proc/PID/environ, but in that of every program it starts.
    return Outcome(code, log.read_text(), time.monotonic() - began, marked(marker))


@contextlib.contextmanager
def service(command: list[str], url: str, log: Path, **env: str) -> Iterator[str]:
    """A service of the tests' own, healthy inside of the block."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={**os.environ, **env},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(requests.RequestException):
                if requests.get(url, timeout=2).status_code == 200:
                    break
            time.sleep(0.2)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Something else than what the run looks for."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


# --------------------------------------------------------------------------------------- the models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: `model`, the quickstart's, and others that do not fit to it."""
    from transformers import AutoModelForCausalLM, FalconConfig, set_seed

    folder = tmp_path_factory.mktemp("models")
    make_model(str(folder / "model"), 42)
    make_model(str(folder / "other_seed"), 1)

    shutil.copytree(folder / "model", folder / "other_tokenizer")
    tokenizer = json.loads((folder / "other_tokenizer/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "other_tokenizer/tokenizer.json").write_text(json.dumps(tokenizer))

    shutil.copytree(folder / "model", folder / "unknown_to_vllm")
    config = json.loads((folder / "unknown_to_vllm/config.json").read_text())
    config["architectures"] = ["MyOwnForCausalLM"]
    (folder / "unknown_to_vllm/config.json").write_text(json.dumps(config))

    set_seed(42)
    falcon = FalconConfig(
        vocab_size=258,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_kv_heads=2,
        new_decoder_architecture=True,
        bos_token_id=None,
        eos_token_id=256,
    )
    AutoModelForCausalLM.from_config(falcon).float().save_pretrained(folder / "falcon")
    byte_tokenizer().save_pretrained(folder / "falcon")
    return folder


# ---------------------------------------------------------------------------------- services to use


@pytest.fixture(scope="module")
def vllm_server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A vLLM server on `models/model`. No run here takes a step, so that its weights stay those of
    the checkpoint."""
    model, logs = models / "model", tmp_path_factory.mktemp("vllm")
    with running_server(model, logs, "--dtype", "float32", token=TOKEN) as server:
        yield server


@pytest.fixture(scope="module")
def vllm(vllm_server: Server) -> str:
    """Its URL."""
    return vllm_server.url


@pytest.fixture(scope="module")
def shared_atropos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "atroposlib.cli.run_api",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with service(
        command, f"http://127.0.0.1:{port}/", tmp_path_factory.mktemp("atropos") / "log"
    ) as url:
        yield url.rstrip("/")


@pytest.fixture
def atropos(shared_atropos: str) -> str:
    """An Atropos API that holds nothing."""
    requests.get(f"{shared_atropos}/reset_data", timeout=10).raise_for_status()
    return shared_atropos


@contextlib.contextmanager
def delivering(
    atropos: str, *groups: dict[str, Any], then: Callable[[], Any] = lambda: None
) -> Iterator[None]:
    """An environment that registers as soon as it may, and delivers these groups once."""

    def deliver() -> None:
        size = len(groups[0]["tokens"]) if groups else 1
        about = {"max_token_length": 512, "desired_name": "fake", "weight": 1.0, "group_size": size}
        while not over.wait(0.1):
            if (
                requests.post(f"{atropos}/register-env", json=about, timeout=10).json()["status"]
                == "success"
            ):
                requests.post(
                    f"{atropos}/scored_data_list", json=groups, timeout=10
                ).raise_for_status()
                then()
                return

    over = threading.Event()
    thread = threading.Thread(target=deliver)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def group(size: int, last_token: int = 70, **fields: Any) -> dict[str, Any]:
    tokens = [[65, 66, 67 + i % 4, last_token] for i in range(size)]
    return {
        "tokens": tokens,
        "masks": [[-100, -100, *sequence[2:]] for sequence in tokens],
        "scores": [float(i % 2) for i in range(size)],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25]] * size,
        "env_id": 0,
        **fields,
    }


# ------------------------------------------------------------------------------------ running a job


@dataclasses.dataclass
class Desk:
    """Where a newcomer sits: writes a recipe and starts it."""

    models: Path
    folder: Path

    def recipe(self, **changes: Any) -> list[str]:
        """A recipe that would be right but for `changes`; `None` leaves a key out. Returns the
        flags that name it."""
        settings = {
            "model_name_or_path": str(self.models / "model"),
            "output_dir": str(self.folder / "run"),
            "max_steps": 3,
            "per_device_train_batch_size": 8,
            "rollout_timeout": 3,
            "gradient_checkpointing": False,
            "report_to": "none",
            "atropos_url": free_url(),
            "vllm_server_base_url": free_url(),
        }
        settings = {
            name: value for name, value in (settings | changes).items() if value is not None
        }
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(settings))
        return ["--config", str(path)]

    def run(self, env: dict[str, str] | None = None, **changes: Any) -> Outcome:
        """Starts the main job as `accelerate launch` starts it, but with the imports done."""
        launched = {
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_MIXED_PRECISION": "no",
            TOKEN_VARIABLE: TOKEN,
        }
        return run_forked(
            self.recipe(**changes), {**launched, **(env or {})}, self.folder / "output"
        )

    def launch(self, *argv: str) -> Outcome:
        """Starts the main job by the command in the README."""
        accelerate = str(Path(sys.executable).with_name("accelerate"))
        # fmt: off
        command = [
            accelerate, "launch", "--quiet", "--config_file", "configs/accelerate/cpu.yaml",
            "-m", "trl_atropos.train", *argv,
        ]
        # fmt: on
        return run_command(
            command, {**SERVER_ENVIRONMENT, TOKEN_VARIABLE: TOKEN}, self.folder / "output"
        )


@pytest.fixture
def desk(models: Path, tmp_path: Path) -> Desk:
    return Desk(models, tmp_path)


def assert_told(outcome: Outcome, *fragments: str, log_shown: bool = False) -> None:
    """One message that has all the fragments (regular expressions); no traceback unless it is the
    end of a log."""
    print(outcome.message)  # `pytest -rP` shows all the messages
    assert outcome.code == 1, outcome.output
    assert outcome.output.count("trl_atropos: error: ") == 1, outcome.output
    message, _, log = outcome.message.partition("\nThe last lines of ")
    assert bool(log) == log_shown, outcome.output
    assert "Traceback" not in outcome.output.partition("\nThe last lines of ")[0], outcome.output
    assert "\n" not in message, outcome.output
    for fragment in fragments:
        assert re.search(fragment, outcome.message), f"{fragment!r} is not in:\n{outcome.message}"
    assert not outcome.left, outcome.left


def one_environment(command: str) -> dict[str, Any]:
    return {"environments": [{"name": "mine", "command": command}]}


# ------------------------------------------------------------- before anything runs, and services


def test_unknown_flag_is_refused(desk):
    """By the command of the README, which shows the message once."""
    argv = ["--config", "recipes/quickstart/colocate.yaml", "--learning_rte", "1"]
    outcome = desk.launch(*argv)
    assert_told(outcome, "Unknown arguments: --learning_rte 1", "Did you mean `learning_rate`")


def test_missing_recipe_is_refused(desk):
    outcome = run_forked(["--config", "recipes/nowhere.yaml"], {}, desk.folder / "output")
    assert_told(outcome, "'recipes/nowhere.yaml' does not exist", "Check `--config`")


@pytest.mark.full  # `tests/weights/test_architectures.py` has the family, with a server alone
def test_weights_that_vllm_reorders_are_copied(desk):
    """It runs all the same, with a second copy of the weights, and says so; what is missing is the
    Atropos API."""
    flags = desk.recipe(
        model_name_or_path=str(desk.models / "falcon"),
        start_vllm=True,
        vllm_args="--max-model-len 64",
    )
    outcome = desk.launch(*flags)
    assert_told(outcome, "No Atropos API answered at")
    assert re.search(
        r"cannot be shared \(\S*query_key_value\.weight: .*Falling back to a copy", outcome.output
    )


def test_architecture_unknown_to_vllm_is_reported(desk):
    outcome = desk.run(model_name_or_path=str(desk.models / "unknown_to_vllm"), start_vllm=True)
    assert_told(
        outcome,
        "vllm ended with exit code 1",
        "MyOwnForCausalLM'] are not supported",
        log_shown=True,
    )
    assert len(outcome.message) < 6000 and outcome.message.count('File "') <= 1


def test_environment_that_crashes_early_is_reported(desk):
    """The crash is told at once: nobody waits for the server first."""
    outcome = desk.run(
        start_vllm=True,
        service_timeout=200,
        **one_environment("""{python} -c 'raise ImportError("no module of mine")'"""),
    )
    assert_told(
        outcome, "environment-mine ended with exit code 1", "no module of mine", log_shown=True
    )


def test_missing_checkpoint_is_refused_before_services(desk):
    outcome = desk.run(resume_from_checkpoint=True, start_vllm=True)
    assert_told(outcome, "`resume_from_checkpoint: True`", "no checkpoint in", "Leave it out")
    assert outcome.seconds < 60 and "Started" not in outcome.output


@pytest.mark.parametrize(
    ("service", "key"), [("atropos", "atropos_url"), ("vllm", "vllm_server_base_url")]
)
def test_port_in_use_is_refused(service, key, desk):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = desk.run(**{f"start_{service}": True, key: f"http://127.0.0.1:{port}"})
    assert_told(
        outcome,
        f"port {port} on 127.0.0.1 is already in use",
        f"`{key}`",
        f"`start_{service}: false`",
    )


# ----------------------------------------------------------------------------------- the server


def test_missing_server_is_reported(desk):
    outcome = desk.run()
    assert_told(
        outcome,
        "cannot be reached",
        "`vllm_server_base_url`",
        "trl-atropos serve MODEL",
        "`start_vllm: true`",
    )


@pytest.mark.parametrize("handler", ["files", "greeter"])
def test_server_without_control_routes_is_refused(handler, desk):
    class Greeter(Silent):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>welcome</html>")

    with http_server({"files": Silent, "greeter": Greeter}[handler]) as url:
        outcome = desk.run(vllm_server_base_url=url)
    assert_told(
        outcome,
        f"{url} has no control routes",
        "trl-atropos serve MODEL",
        "correct `vllm_server_base_url`",
    )


@pytest.mark.parametrize("token", ["wrong", ""])
def test_wrong_control_token_is_refused(token, desk, vllm):
    outcome = desk.run({TOKEN_VARIABLE: token}, vllm_server_base_url=vllm)
    assert_told(outcome, f"{vllm} refused the control token", f"Set {TOKEN_VARIABLE}")


def test_server_of_another_checkpoint_is_refused(desk, vllm):
    outcome = desk.run(
        vllm_server_base_url=vllm, model_name_or_path=str(desk.models / "other_seed")
    )
    assert_told(
        outcome,
        "weights differ",
        "serves another model",
        r"models\d*/model",
        "other_seed",
        "start it again",
    )


def test_server_with_another_tokenizer_is_refused(desk, vllm):
    outcome = desk.run(
        vllm_server_base_url=vllm, model_name_or_path=str(desk.models / "other_tokenizer")
    )
    assert_told(outcome, "other_tokenizer", "different vocabularies", "the same tokenizer")


def test_sequences_longer_than_the_servers_are_refused(desk, vllm):
    outcome = desk.run(vllm_server_base_url=vllm, max_sequence_length=1024)
    assert_told(
        outcome, "`max_sequence_length` is 1024", "max_model_len is 512", "--max-model-len 1024"
    )


def test_dtype_other_than_the_servers_is_refused(desk, vllm):
    outcome = desk.run(vllm_server_base_url=vllm, dtype="bfloat16")
    assert_told(
        outcome,
        "trainer's dtype is bfloat16, the server's float32",
        "set `dtype: float32`",
        "--dtype bfloat16",
    )


def test_sleep_that_the_server_cannot_is_refused(desk, vllm):
    outcome = desk.run(vllm_server_base_url=vllm, vllm_mode="server", vllm_enable_sleep_mode=True)
    assert_told(
        outcome, "`vllm_enable_sleep_mode` is set", "start the server with `--enable-sleep-mode`"
    )


def test_one_memory_of_two_servers_is_refused(desk, vllm):
    outcome = desk.run(vllm_server_base_url=f"{vllm},{free_url()}")
    assert_told(
        outcome, "1 processes and 2 servers", "list one URL per process", "`--num_processes 2`"
    )


# -------------------------------------------------------------------------- Atropos and rollouts


def test_missing_atropos_api_is_reported(desk, vllm):
    outcome = desk.run(vllm_server_base_url=vllm)
    assert_told(
        outcome, "No Atropos API answered at", "refused", "`atropos_url`", "`start_atropos: true`"
    )


def test_stranger_at_atropos_url_is_refused(desk, vllm):
    with http_server(Silent) as url:
        outcome = desk.run(vllm_server_base_url=vllm, atropos_url=url)
    assert_told(outcome, f"{url} is not an Atropos API", "answered 200", "Set `atropos_url`")


def test_registration_of_another_trainer_is_refused(desk, vllm, atropos):
    requests.post(f"{atropos}/register", json=registration(16), timeout=10).raise_for_status()
    outcome = desk.run(vllm_server_base_url=vllm, atropos_url=atropos)
    assert_told(outcome, "batch_size 16 ", "needs batch_size 8 ", "`reset_atropos: true`")


def registration(batch_size: int) -> dict[str, Any]:
    words = {"wandb_group": "g", "wandb_project": "p", "checkpoint_dir": "d"}
    return words | {
        "batch_size": batch_size,
        "max_token_len": 513,
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 9,
    }


def test_missing_environment_is_reported(desk, vllm, atropos):
    outcome = desk.run(vllm_server_base_url=vllm, atropos_url=atropos)
    assert_told(
        outcome,
        r"No batch of 8 rollouts for \d+ s \(`rollout_timeout`\)",
        "No environment has registered",
        f"--env.rollout_server_url {atropos}",
    )


@pytest.mark.parametrize(
    ("groups", "fragments"),
    [
        (
            [group(3)] * 3,
            [
                "holds 3 groups of at most 3 rollouts",
                "cannot assemble exactly 8",
                "a multiple of every",
            ],
        ),
        ([group(4, masks=[[-100] * 4] * 4)] * 2, ["8 without a token to train on", "warnings"]),
    ],
    ids=["wedged", "all_dropped"],
)
def test_groups_that_never_make_a_batch_are_reported(groups, fragments, desk, vllm, atropos):
    """What else there is, and what is said of it, is in `tests/rollouts/test_pull.py`."""
    with delivering(atropos, *groups):
        outcome = desk.run(vllm_server_base_url=vllm, atropos_url=atropos)
    assert_told(outcome, r"No batch of 8 rollouts for \d+ s", *fragments)


def test_hung_server_is_reported(desk, vllm, vllm_server, atropos):
    engine = vllm_server.engine
    try:
        with delivering(atropos, then=engine.suspend):
            outcome = desk.run(vllm_server_base_url=vllm, atropos_url=atropos, publish_timeout=10)
    finally:
        engine.resume()
    silent = rf"No batch of 8 rollouts for \d+ s \(`rollout_timeout`\)\. The server at {vllm} did not sample one token"
    assert_told(outcome, silent, "has an environment, but its queue is empty")


# What an environment sends, and what the message has to say.
ROLLOUTS = {
    "temperature": (
        [group(8, generation_params={"temperature": 0.7})] * 8,
        r"sampled at temperature 0\.7",
        r"at temperature 1\.0",
        r"Set `temperature: 0\.7` in the recipe",
    ),
    "token_ids": (
        [group(8, last_token=300)] * 8,
        "sent token id 300",
        "knows 258 ids",
        "tokenizer",
        "--env.tokenizer_name",
    ),
    "groups_of_one": (
        [group(1)] * 8,
        "a group of 1 rollout",
        "`single_row_groups`",
        "'raw'",
        "'zero'",
        "`group_size`",
    ),
}


@pytest.mark.parametrize("name", ROLLOUTS)
def test_rollouts_that_make_no_sense_are_refused(name, desk, vllm, atropos):
    groups, *fragments = ROLLOUTS[name]
    with delivering(atropos, *groups):
        outcome = desk.run(vllm_server_base_url=vllm, atropos_url=atropos)
    assert_told(outcome, *fragments)


@pytest.mark.full
def test_groups_larger_than_the_batch_are_refused(desk, vllm):
    """The quickstart's environment sends groups of 8; nothing in its command says so."""
    command = (
        f"{ENVIRONMENT} --env.rollout_server_url {{atropos_url}} --env.tokenizer_name {{model}} "
    )
    command += "--openai.base_url {vllm_url}/v1 --openai.model_name {model}"
    outcome = desk.run(
        vllm_server_base_url=vllm,
        start_atropos=True,
        per_device_train_batch_size=4,
        rollout_timeout=PATIENCE,
        **one_environment(command),
    )
    assert_told(
        outcome,
        "environment-mine ended",
        r"group_size \(8\) must be less than batch_size \(4\)",
        log_shown=True,
    )


# ------------------------------------------------------------------------------------ recordings


def recording(folder: Path, *groups: dict[str, Any]) -> str:
    path = folder / "recording.jsonl"
    path.write_text("".join(json.dumps({"batch": [one]}) + "\n" for one in groups))
    return str(path)


def test_empty_recording_is_refused(desk):
    outcome = desk.run(replay_paths=recording(desk.folder))
    assert_told(outcome, "recording.jsonl", "no rollout that can be trained on", "Record another")


def test_recording_that_runs_out_is_reported(desk):
    outcome = desk.run(replay_paths=[recording(desk.folder, group(8))])
    assert_told(outcome, "used up", "8 rollouts, and 0 are left for a batch of 8", "`max_steps`")


def test_recording_of_another_tokenizer_is_refused(desk):
    outcome = desk.run(replay_paths=[recording(desk.folder, *[group(8, last_token=300)] * 8)])
    assert_told(outcome, "sent token id 300", "knows 258 ids")
