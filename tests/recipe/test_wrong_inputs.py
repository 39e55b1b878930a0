"""What newcomers get wrong, and what they are told: one message with cause and fix, and nothing is
left over.

Mistakes in the recipe are tried on the parser, the others on the main job: some through `accelerate
launch`, most in
a fork of a process that has done the slow imports (`Forge`), which runs the same `main`.
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

import psutil
import pytest
import requests
import yaml

from recipes.quickstart.make_model import byte_tokenizer, make_model
from tests import server_process
from tests.forge import FORKED_ENGINES, TRAINER
from tests.server_process import free_port
from trl_atropos.errors import AtroposTrainingError
from trl_atropos.protocol import TOKEN_VARIABLE
from trl_atropos.recipe import PARTS, RecipeError, _load_checked, parse
from trl_atropos.recipe_checks import check_files

ROOT = Path(__file__).resolve().parents[2]
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

    for name, change in (
        ("unknown_to_transformers", {"model_type": "my_own"}),
        ("unknown_to_vllm", {"architectures": ["MyOwnForCausalLM"]}),
    ):
        shutil.copytree(folder / "model", folder / name)
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | change))

    (folder / "empty").mkdir()
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
def vllm(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A vLLM server on `models/model`. No run here takes a step, so that its weights stay those of
    the checkpoint."""
    port = free_port()
    # fmt: off
    command = [
        sys.executable, "-m", "trl_atropos.server.launch", str(models / "model"),
        "--port", str(port), "--max-model-len", "512", "--dtype", "float32",
    ]
    # fmt: on
    url = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("vllm") / "log"
    with service(command, f"{url}/health", log, **SERVER_ENVIRONMENT, **{TOKEN_VARIABLE: TOKEN}):
        yield url


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


# ------------------------------------------------------------------- mistakes that the parser finds


def one_environment(command: str = f"{ENVIRONMENT}", **fields: Any) -> dict[str, Any]:
    return {"environments": [{"name": "mine", "command": command, **fields}]}


# What is changed in a right recipe, and what the message has to say.
IN_THE_RECIPE = {
    "key_typo": (
        {"learning_rte": 1.0},
        "unknown key `learning_rte`",
        "Did you mean `learning_rate`",
    ),
    "no_model": ({"model_name_or_path": None}, "No model", "Set `model_name_or_path`"),
    "model_folder_missing": (
        {"model_name_or_path": "./modell"},
        r"folder '\./modell' does not exist",
        "make_model.py",
    ),
    "model_is_a_number": ({"model_name_or_path": 7}, "`model_name_or_path` is 7", "quotes"),
    "no_max_steps": ({"max_steps": None}, "`max_steps` is -1", "Set `max_steps`"),
    "max_steps_is_a_word": ({"max_steps": "many"}, "`max_steps`: invalid int value: 'many'"),
    "max_steps_is_a_fraction": ({"max_steps": 2.5}, r"`max_steps` is 2\.5", "whole number"),
    "temperature_is_a_word": ({"temperature": "hot"}, "`temperature`: invalid float value: 'hot'"),
    "temperature_zero": ({"temperature": 0.0}, r"`temperature` is 0\.0", "above 0"),
    "unknown_mode": (
        {"vllm_mode": "colocated"},
        "`vllm_mode` is 'colocated'",
        "one of: colocate, server, nccl_lora",
    ),
    "unknown_transport": (
        {"weight_transport": "rdma"},
        "`weight_transport` is 'rdma'",
        "one of: auto, nccl, gloo",
    ),
    "rare_publishes_of_one_copy": (
        {"sync_every_n_steps": 4},
        "`sync_every_n_steps` is 4",
        "Leave it at 1",
    ),
    "one_server_twice": (
        {
            "vllm_mode": "server",
            "vllm_server_base_url": "http://127.0.0.1:9001,http://127.0.0.1:9001/v1",
        },
        "lists http://127.0.0.1:9001 twice",
        "List each server once",
    ),
    "odd_batch": (
        {"per_device_train_batch_size": 3},
        "has 3 rollouts",
        "must be even",
        "Change `per_device",
    ),
    "evaluation": (
        {"eval_strategy": "steps"},
        "There is nothing to evaluate",
        "List `evaluations`",
    ),
    "bare_no": ({"save_strategy": False}, "`save_strategy` is False", "quotes"),
    "url_without_scheme": (
        {"atropos_url": "localhost:8000"},
        "'localhost:8000', which is not a URL",
        "http://host:port",
    ),
    "url_with_a_bad_port": ({"atropos_url": "http://localhost:80a"}, "80a', which is not a URL"),
    "both_urls_the_same": (
        {"atropos_url": "http://127.0.0.1:9001", "vllm_server_base_url": "http://127.0.0.1:9001"},
        "are both http://127.0.0.1:9001",
        "Give each its own port",
    ),
    "deepspeed": (
        {"deepspeed": "zero2.json"},
        "cannot be sharded",
        "Remove `deepspeed`",
        "`vllm_mode: server`",
    ),
    "fsdp": ({"fsdp": True}, "cannot be sharded", "Remove `fsdp`", "`vllm_mode: server`"),
    "environment_temperature": (
        one_environment(f"{ENVIRONMENT} --env.temperature 0.7"),
        r"'mine' samples at temperature 0\.7 \(--env.temperature\), but `temperature` is 1\.0",
        "Make the two equal",
    ),
    "environment_placeholder": (
        one_environment("{python} env.py --url {atropos}"),
        r"'mine' has an unknown placeholder \('atropos'\)",
        r"\{atropos_url\}",
    ),
    "environment_quote": (
        one_environment("{python} -c 'print"),
        "'mine' is cut short",
        "quotation",
    ),
    "environment_program": (one_environment("pyhton env.py"), "no program 'pyhton'", r"\{python\}"),
    "environment_folder": (one_environment(cwd="/nowhere"), "`cwd`, '/nowhere', is no folder"),
    "environment_key": (
        one_environment(comand="x"),
        "entry 1: comand: Extra inputs",
        "has `path` or `command`",
    ),
    "environments_not_a_list": ({"environments": {"name": "mine"}}, "not a list", "- path"),
    "group_larger_than_batch": (
        one_environment(f"{ENVIRONMENT} --env.group_size 16"),
        "groups of 16 rollouts",
        "only 8 rollouts",
        "Raise `per_device_train_batch_size`",
    ),
    "group_does_not_fill_batch": (
        one_environment(f"{ENVIRONMENT} --env.group_size=3"),
        "groups of 3 rollouts",
        "a multiple of the group size",
    ),
    "replay_path_missing": (
        {"replay_paths": "/nowhere.jsonl"},
        r"/nowhere\.jsonl does not exist",
        "Correct the path",
    ),
    "replay_paths_empty": ({"replay_paths": []}, "`replay_paths` is empty"),
}


def refusal(argv: list[str]) -> str:
    with pytest.raises((RecipeError, AtroposTrainingError)) as refused:
        parse(argv)
    message = str(refused.value)
    assert "\n" not in message
    assert refused.value.fix and message.endswith(refused.value.fix)
    return message


@pytest.mark.parametrize("name", IN_THE_RECIPE)
def test_a_mistake_in_the_recipe(name, desk):
    changes, *fragments = IN_THE_RECIPE[name]
    message = refusal(desk.recipe(**changes))
    for fragment in fragments:
        assert re.search(fragment, message), f"{fragment!r} is not in:\n{message}"


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("max_steps: [1, 2\n", ["is not valid YAML", "line 1", r"expected ',' or '\]'"]),
        ("- max_steps\n", ["must hold `key: value` lines"]),
        ("temperature:\n", ["`temperature` is None", "leave the line out"]),
    ],
    ids=["syntax", "list", "no_value"],
)
def test_a_file_that_is_no_recipe(text, fragments, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    message = refusal(["--config", str(path)])
    for fragment in [re.escape(str(path)), *fragments]:
        assert re.search(fragment, message), f"{fragment!r} is not in:\n{message}"


@pytest.mark.parametrize(
    ("argv", "fragments"),
    [
        ([], ["No recipe", "--config recipes/quickstart/colocate.yaml"]),
        (["--config"], ["No recipe", "--config recipes/quickstart/colocate.yaml"]),
        (["mine.yaml"], ["No recipe", "--config mine.yaml"]),
        (["--config", "nowhere.yaml"], ["'nowhere.yaml' does not exist", "Check `--config`"]),
        (["--config", sys.executable], ["cannot be read", "Check `--config`"]),
    ],
    ids=["nothing", "no_value", "no_flag", "missing", "binary"],
)
def test_a_command_line_without_a_recipe(argv, fragments):
    message = refusal(argv)
    for fragment in fragments:
        assert fragment in message


def test_every_default_may_be_written_into_a_recipe(desk):
    """The checks of types refuse nothing that is right."""
    defaults = {}
    for part in PARTS:
        for setting in dataclasses.fields(part):
            if setting.default is not dataclasses.MISSING:
                defaults[setting.name] = getattr(setting.default, "value", setting.default)
    defaults |= {"resume_from_checkpoint": False, "fsdp": False, "scale_rewards": False}
    path = desk.recipe(**defaults)[1]
    _load_checked(path, {*defaults, "output_dir", "max_steps"})


def test_sharding_from_the_configuration_of_accelerate(desk, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "Remove `fsdp` from the configuration of `accelerate launch`" in refusal(desk.recipe())


# What a checkpoint's config.json says, and why it is refused before anything is started.
QUANTISED = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "version": "gemm",
    "zero_point": True,
}
UNTRAINABLE = {
    "encoder": (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        "t5 has an encoder",
    ),
    "awq": ({"quantization_config": QUANTISED}, r"are quantised \(awq\)", "`use_peft: true`"),
    "fp8": (
        {"quantization_config": {"quant_method": "fp8"}},
        r"are quantised \(fp8\)",
        "that it was made from",
    ),
    "no_architecture": ({"architectures": None}, "names no architecture", "Add `"),
    "old_code": (
        {
            "model_type": "baichuan",
            "architectures": ["BaichuanForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration_baichuan.BaichuanConfig",
                "AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM",
            },
        },
        r"does not run with transformers \S+ \(cannot import name 'top_k_top_p_filtering'",
        "whose class transformers has",
    ),
    "images": (
        {
            "model_type": "qwen2_5_vl",
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "vision_config": {},
        },
        "no causal language model for qwen2_5_vl, and no processor of images is with it",
        "Take the whole checkpoint",
    ),
}


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_a_model_that_cannot_be_trained_is_refused_before_anything_is_started(name, tmp_path):
    change, *fragments = UNTRAINABLE[name]
    folder = tmp_path / "model"
    byte_tokenizer().save_pretrained(folder)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | change))
    (folder / "configuration_baichuan.py").write_text(
        "from transformers import Qwen3Config\nclass BaichuanConfig(Qwen3Config):\n    model_type "
        "= 'baichuan'\n"
    )
    (folder / "modeling_baichuan.py").write_text("from transformers import top_k_top_p_filtering\n")
    settings = {
        "model_name_or_path": str(folder),
        "output_dir": str(tmp_path / "run"),
        "max_steps": 1,
    }
    settings |= {"use_cpu": True, "trust_remote_code": name == "old_code"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(RecipeError, match="cannot be trained: ") as refused:
        check_files(parse(["--config", str(tmp_path / "recipe.yaml")]))
    for fragment in fragments:
        assert re.search(fragment, str(refused.value)), f"{fragment!r} is not in:\n{refused.value}"
    assert "\n" not in str(refused.value)


# ---------------------------------------------------------------------- mistakes, the whole command


@pytest.mark.parametrize(
    ("argv", "fragments"),
    [
        (
            ["--config", "recipes/nowhere.yaml"],
            ["'recipes/nowhere.yaml' does not exist", "Check `--config`"],
        ),
        (
            ["--config", "recipes/quickstart/colocate.yaml", "--learning_rte", "1"],
            ["Unknown arguments: --learning_rte 1", "Did you mean `learning_rate`"],
        ),
    ],
    ids=["missing_recipe", "unknown_flag"],
)
def test_a_command_that_cannot_start(argv, fragments, desk):
    assert_told(desk.launch(*argv), *fragments)


@pytest.mark.full  # `tests/weights/test_architectures.py` has the family, with a server alone
def test_an_architecture_whose_weights_vllm_reorders(desk):
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


@pytest.mark.slow
def test_an_architecture_that_vllm_does_not_know(desk):
    outcome = desk.run(model_name_or_path=str(desk.models / "unknown_to_vllm"), start_vllm=True)
    assert_told(
        outcome,
        "vllm ended with exit code 1",
        "MyOwnForCausalLM'] are not supported",
        log_shown=True,
    )
    assert len(outcome.message) < 6000 and outcome.message.count('File "') <= 1


def test_an_environment_that_crashes_while_the_server_starts(desk):
    """The crash is told at once: nobody waits for the server first."""
    outcome = desk.run(
        start_vllm=True,
        service_timeout=200,
        **one_environment("""{python} -c 'raise ImportError("no module of mine")'"""),
    )
    assert_told(
        outcome, "environment-mine ended with exit code 1", "no module of mine", log_shown=True
    )


# -------------------------------------------------------- mistakes found before anything is started


def test_a_model_that_cannot_be_downloaded(desk):
    assert_told(
        desk.run(model_name_or_path="nobody/no-such-model"),
        "'nobody/no-such-model' cannot be loaded",
        "(?i)hub|huggingface",
        "Set `model_name_or_path`",
    )


def test_a_model_folder_without_a_model(desk):
    outcome = desk.run(model_name_or_path=str(desk.models / "empty"))
    assert_told(outcome, "empty' cannot be loaded", "config.json", "Set `model_name_or_path`")


def test_an_architecture_that_transformers_does_not_know(desk):
    outcome = desk.run(model_name_or_path=str(desk.models / "unknown_to_transformers"))
    assert_told(outcome, "cannot be loaded", "model type `my_own`")


def test_an_output_dir_that_cannot_be_written(desk):
    file = desk.folder / "a_file"
    file.touch()
    assert_told(
        desk.run(output_dir=str(file / "run")),
        "a_file/run', where nothing can be written",
        "another folder",
    )


def test_resuming_without_a_checkpoint(desk):
    outcome = desk.run(resume_from_checkpoint=True, start_vllm=True)
    assert_told(outcome, "`resume_from_checkpoint: True`", "no checkpoint in", "Leave it out")
    assert outcome.seconds < 60 and "Started" not in outcome.output


@pytest.mark.parametrize(
    ("service", "key"), [("atropos", "atropos_url"), ("vllm", "vllm_server_base_url")]
)
def test_a_port_that_is_in_use(service, key, desk):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = desk.run(**{f"start_{service}": True, key: f"http://127.0.0.1:{port}"})
    assert_told(
        outcome,
        f"port {port} on 127.0.0.1 is already in use",
        f"`{key}`",
        f"`start_{service}: false`",
    )


# ------------------------------------------------------------------------ mistakes about the server


def test_no_server(desk):
    outcome = desk.run()
    assert_told(
        outcome,
        "cannot be reached",
        "`vllm_server_base_url`",
        "trl-atropos serve MODEL",
        "`start_vllm: true`",
    )


@pytest.mark.parametrize("handler", ["files", "greeter"])
def test_a_server_without_control_routes(handler, desk):
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
def test_the_wrong_control_token(token, desk, vllm):
    outcome = desk.run({TOKEN_VARIABLE: token}, vllm_server_base_url=vllm)
    assert_told(outcome, f"{vllm} refused the control token", f"Set {TOKEN_VARIABLE}")


def test_a_server_of_another_checkpoint(desk, vllm):
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


def test_a_server_with_another_tokenizer(desk, vllm):
    outcome = desk.run(
        vllm_server_base_url=vllm, model_name_or_path=str(desk.models / "other_tokenizer")
    )
    assert_told(outcome, "other_tokenizer", "different vocabularies", "the same tokenizer")


def test_sequences_longer_than_the_server_takes(desk, vllm):
    outcome = desk.run(vllm_server_base_url=vllm, max_sequence_length=1024)
    assert_told(
        outcome, "`max_sequence_length` is 1024", "max_model_len is 512", "--max-model-len 1024"
    )


def test_another_dtype_than_the_servers(desk, vllm):
    outcome = desk.run(vllm_server_base_url=vllm, dtype="bfloat16")
    assert_told(
        outcome,
        "trainer's dtype is bfloat16, the server's float32",
        "set `dtype: float32`",
        "--dtype bfloat16",
    )


def test_a_mode_of_adapters_without_an_adapter(desk, vllm):
    outcome = desk.run(vllm_server_base_url=vllm, vllm_mode="nccl_lora")
    assert_told(outcome, "the run has none", "Set `use_peft: true`", "`vllm_mode: colocate`")


def test_a_sleep_mode_that_the_server_was_not_started_with(desk, vllm):
    outcome = desk.run(vllm_server_base_url=vllm, vllm_mode="server", vllm_enable_sleep_mode=True)
    assert_told(
        outcome, "`vllm_enable_sleep_mode` is set", "start the server with `--enable-sleep-mode`"
    )


def test_one_memory_of_two_servers(desk, vllm):
    outcome = desk.run(vllm_server_base_url=f"{vllm},{free_url()}")
    assert_told(
        outcome, "1 processes and 2 servers", "list one URL per process", "`--num_processes 2`"
    )


# -------------------------------------------------------------- mistakes about Atropos and rollouts


def test_no_atropos_api(desk, vllm):
    outcome = desk.run(vllm_server_base_url=vllm)
    assert_told(
        outcome, "No Atropos API answered at", "refused", "`atropos_url`", "`start_atropos: true`"
    )


def test_something_else_at_atropos_url(desk, vllm):
    with http_server(Silent) as url:
        outcome = desk.run(vllm_server_base_url=vllm, atropos_url=url)
    assert_told(outcome, f"{url} is not an Atropos API", "answered 200", "Set `atropos_url`")


def test_an_api_with_another_trainers_registration(desk, vllm, atropos):
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


def test_no_environment(desk, vllm, atropos):
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
def test_groups_that_never_make_a_batch(groups, fragments, desk, vllm, atropos):
    """What else there is, and what is said of it, is in `tests/rollouts/test_pull.py`."""
    with delivering(atropos, *groups):
        outcome = desk.run(vllm_server_base_url=vllm, atropos_url=atropos)
    assert_told(outcome, r"No batch of 8 rollouts for \d+ s", *fragments)


def test_a_server_that_hangs_while_the_run_waits_for_rollouts(desk, vllm, atropos):
    (server,) = [one for one in psutil.process_iter() if vllm.rpartition(":")[2] in cmdline(one)]
    (engine,) = [child for child in server.children() if "EngineCore" in " ".join(cmdline(child))]
    try:
        with delivering(atropos, then=engine.suspend):
            outcome = desk.run(vllm_server_base_url=vllm, atropos_url=atropos, publish_timeout=10)
    finally:
        engine.resume()
    silent = rf"No batch of 8 rollouts for \d+ s \(`rollout_timeout`\)\. The server at {vllm} did not sample one token"
    assert_told(outcome, silent, "has an environment, but its queue is empty")


def cmdline(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


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
def test_rollouts_that_make_no_sense(name, desk, vllm, atropos):
    groups, *fragments = ROLLOUTS[name]
    with delivering(atropos, *groups):
        outcome = desk.run(vllm_server_base_url=vllm, atropos_url=atropos)
    assert_told(outcome, *fragments)


@pytest.mark.slow
def test_an_environment_with_larger_groups_than_the_batch(desk, vllm):
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


# ------------------------------------------------------------------------ mistakes about recordings


def recording(folder: Path, *groups: dict[str, Any]) -> str:
    path = folder / "recording.jsonl"
    path.write_text("".join(json.dumps({"batch": [one]}) + "\n" for one in groups))
    return str(path)


def test_a_recording_with_nothing_in_it(desk):
    outcome = desk.run(replay_paths=recording(desk.folder))
    assert_told(outcome, "recording.jsonl", "no rollout that can be trained on", "Record another")


def test_a_recording_that_runs_out(desk):
    outcome = desk.run(replay_paths=[recording(desk.folder, group(8))])
    assert_told(outcome, "used up", "8 rollouts, and 0 are left for a batch of 8", "`max_steps`")


def test_a_recording_of_another_tokenizer(desk):
    outcome = desk.run(replay_paths=[recording(desk.folder, *[group(8, last_token=300)] * 8)])
    assert_told(outcome, "sent token id 300", "knows 258 ids")
