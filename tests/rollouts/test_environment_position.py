"""Environments of the recipes, of a run that goes on or started again themselves, ask other questions than before."""

import asyncio
import importlib
import json
import time
from typing import Any

import pytest
from atroposlib.envs.base import BaseEnv

from tests.miniature_model import REASONING_GYM
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
    """Starts sources, each the next life of one run, at an API that knows of nothing, and lets environments in."""
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


def asked(recipe: str, source: AtroposSource, url: str, settings: dict[str, Any], number: int) -> list[Any]:
    """What an environment that is started now asks for first. The source goes on asking for batches, as in a run."""
    module = importlib.import_module(f"recipes.{recipe}.environment")
    environment: type[BaseEnv] = getattr(module, ENVIRONMENTS[recipe])
    config, servers = environment.config_init()
    config = config.model_copy(update={"rollout_server_url": url, "group_size": GROUP, "seed": 42, **settings})
    servers = [server.model_copy(update={"model_name": config.tokenizer_name}) for server in servers]

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
def test_an_environment_goes_on_where_the_run_is(recipe, api, start, tiny_model, tmp_path):
    if recipe == "reasoning_gym" and REASONING_GYM is None:
        pytest.skip("reasoning-gym is not installed")
    lines = [json.dumps({"question": f"{number}?", "answer": f"#### {number}"}) for number in range(50)]
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
