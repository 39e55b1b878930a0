"""Environments of the recipes, of a run that goes on or started again themselves, ask other
questions than before."""

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from atroposlib.envs.base import BaseEnv

from tests import ROOT
from tests.end_to_end.miniature_model import REASONING_GYM
from tests.rollouts.conftest import Api, make_group
from trl_atropos.rollouts.source import AtroposSource

GROUP, BATCH = 2, 4
ENVIRONMENTS = {
    "quickstart": "FirstLetterEnv",
    "gsm8k": "GSM8KEnv",
    "tool_use": "ToolUseEnv",
    "reasoning_gym": "ReasoningGymEnv",
    "own_environment": "OwnEnv",
}


@pytest.fixture
def start(api: Api, run_info):
    """Starts sources, each the next life of one run, at an API that knows of nothing, and lets
    environments in."""
    opened = []

    def begin(state: dict | None = None) -> AtroposSource:
        api.reset()
        source = AtroposSource(api.url)
        opened.append(source)
        source.start(run_info(state=state, batch_size=BATCH))
        let_in(api, source)
        return source

    yield begin
    for source in opened:
        source.close()


def let_in(api: Api, source: AtroposSource) -> None:
    other = {"max_token_length": 64, "desired_name": "other", "weight": 1.0, "group_size": GROUP}
    deadline = time.monotonic() + 30
    while api.post("/register-env", other)["status"] != "success":
        assert time.monotonic() < deadline
        source.poll(BATCH, 0.2)  # what is in the spool first, and then the API is asked


def train(api: Api, source: AtroposSource, batches: int) -> None:
    for number in range(batches):
        api.deliver(*(make_group(number, number + 1) for _ in range(BATCH // GROUP)))
        assert source.poll(BATCH, 30) is not None


def asked(
    recipe: str, source: AtroposSource, url: str, settings: dict[str, Any], number: int
) -> list[Any]:
    """What an environment that is started now asks for first. The source goes on asking for
    batches, as in a run."""
    module = importlib.import_module(f"recipes.{recipe}.environment")
    environment: type[BaseEnv] = getattr(module, ENVIRONMENTS[recipe])
    config, servers = environment.config_init()
    config = config.model_copy(
        update={"rollout_server_url": url, "group_size": GROUP, "seed": 42, **settings}
    )
    servers = [
        server.model_copy(update={"model_name": config.tokenizer_name}) for server in servers
    ]

    async def ask() -> list[Any]:
        one = environment(config, servers)
        await one.setup()  # and so on, as Atropos' `env_manager` does
        await one.register_env()
        await one.get_server_info()
        await one.get_status()
        await one.env_step_checks()
        return [await one.get_next_item() for _ in range(number)]

    async def poll() -> None:
        while True:
            await asyncio.to_thread(source.poll, BATCH, 0.1)

    async def both() -> list[Any]:
        polling = asyncio.create_task(poll())
        try:
            return await asyncio.wait_for(ask(), 60)
        finally:
            polling.cancel()

    return asyncio.run(both())


@pytest.mark.parametrize("recipe", ENVIRONMENTS)
def test_environment_goes_on_at_step_of_run(recipe, api, start, tiny_model, tmp_path):
    if recipe == "reasoning_gym" and REASONING_GYM is None:
        pytest.skip("reasoning-gym is not installed")
    lines = [
        json.dumps({"question": f"{number}?", "answer": f"#### {number}"}) for number in range(50)
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    settings: dict[str, Any] = {"tokenizer_name": str(tiny_model)}
    settings |= {"dataset": str(tmp_path / "questions.jsonl")} if recipe == "gsm8k" else {}
    source = start()
    first = asked(recipe, source, api.url, settings, 30)
    train(api, source, 1)
    checkpoint = source.state()
    train(api, source, 2)
    started_again = asked(recipe, source, api.url, settings, 8)
    source.close()
    resumed = start(checkpoint)
    of_resumed = asked(recipe, resumed, api.url, settings, 8)
    train(api, resumed, 1)
    api.reset()
    let_in(api, resumed)
    of_other_api = asked(recipe, resumed, api.url, settings, 8)

    batch = BATCH // GROUP
    if recipe in ("gsm8k", "reasoning_gym"):  # one batch may have waited in the queue
        assert started_again == of_resumed == first[4 * batch : 4 * batch + 8]
        assert of_other_api == first[5 * batch : 5 * batch + 8]
    else:
        assert first[:8] not in (started_again, of_resumed, of_other_api)


# -------------------------------------------------------------------------------- a file of its own


@pytest.fixture
def data(tmp_path) -> str:
    lines = [
        json.dumps({"question": f"{number}?", "answer": f"#### {number}"}) for number in range(20)
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "questions.jsonl")


def gsm8k(tiny_model: Path, data: str, **settings: Any) -> BaseEnv:
    from recipes.gsm8k.environment import GSM8KEnv

    config, servers = GSM8KEnv.config_init()
    config = config.model_copy(
        update={"tokenizer_name": str(tiny_model), "dataset": data, "seed": 42, **settings}
    )
    return GSM8KEnv(
        config, [server.model_copy(update={"model_name": str(tiny_model)}) for server in servers]
    )


def next_of(environment: BaseEnv, number: int) -> list[str]:
    async def ask() -> list[Any]:
        await environment.setup()
        return [await environment.get_next_item() for _ in range(number)]

    return [item and item["question"] for item in asyncio.run(ask())]


def test_questions_stay_unrepeated_over_restarts(tiny_model, data, tmp_path):
    state, asked = str(tmp_path / "state"), []
    for number in (1, 7, 0, 20, 12):  # lives of the environment
        asked += next_of(gsm8k(tiny_model, data, state_file=state), number)
    assert asked == next_of(gsm8k(tiny_model, data), 40)  # as in one life
    assert set(asked[:20]) == set(asked[20:]) and len(set(asked[:20])) == 20
    assert asked[:20] != asked[20:]
    (tmp_path / "state").write_text("")  # as a power cut may leave it
    assert next_of(gsm8k(tiny_model, data, state_file=state), 20) == asked[:20]


def test_test_split_is_asked_once_in_order(tiny_model, data, tmp_path):
    (tmp_path / "state").write_text("7")
    environment = gsm8k(tiny_model, data, split="test", state_file=str(tmp_path / "state"))
    assert next_of(environment, 22) == [*(f"{number}?" for number in range(20)), None, None]
    assert (tmp_path / "state").read_text() == "7"


@contextmanager
def serving(config: Path, log: Path) -> Iterator[subprocess.Popen]:
    """The real environment's process, which is killed at the end."""
    command = [sys.executable, "recipes/gsm8k/environment.py", "serve", "--config", str(config)]
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.full
@pytest.mark.slow(30)
def test_killed_environment_skips_questions_in_flight(api, start, tiny_model, data, tmp_path):
    """None is answered: there is no server."""
    source = start()
    nowhere = {
        "base_url": "http://127.0.0.1:9/v1",
        "model_name": str(tiny_model),
        "server_type": "vllm",
        "api_key": "none",
    }
    state, config = tmp_path / "mine.state", tmp_path / "mine.yaml"
    env = {
        "rollout_server_url": api.url,
        "tokenizer_name": str(tiny_model),
        "dataset": data,
        "state_file": str(state),
    }
    env |= {
        "group_size": GROUP,
        "max_num_workers": BATCH // GROUP,
        "use_wandb": False,
        "total_steps": -1,
    }
    config.write_text(yaml.safe_dump({"env": env, "openai": [nowhere, nowhere], "slurm": False}))
    for life in (1, 2):
        log = tmp_path / f"{life}.log"
        with serving(config, log) as process:
            deadline = time.monotonic() + 120
            while not state.exists() or int(state.read_text()) < life * BATCH // GROUP:
                assert time.monotonic() < deadline and process.poll() is None, log.read_text()[
                    -3000:
                ]
                source.poll(BATCH, 0.1)
        assert int(state.read_text()) == life * BATCH // GROUP
