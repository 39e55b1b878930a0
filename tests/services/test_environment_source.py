"""What is read from an environment's script without running it, and what its process does with
it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trl_atropos.environment_entry import RUNNER
from trl_atropos.services.environment_source import _base_names, reshaping_requests, setting_names

IMPORTS = "from atroposlib.envs.base import BaseEnv, BaseEnvConfig\n"
CONFIG = "class MyConfig(BaseEnvConfig):\n    max_new_tokens: int = 64\n"
USES = "class Env(BaseEnv):\n    env_config_cls = MyConfig\n"

KNOWN = {
    "Atropos' own class": (IMPORTS + "class Env(BaseEnv):\n    pass\n", set()),
    "a class of the script": (IMPORTS + CONFIG + USES, {"max_new_tokens"}),
    "a class of a class": (
        IMPORTS
        + CONFIG
        + "class Longer(MyConfig):\n    turns: int = 2\n"
        + USES.replace("MyConfig", "Longer"),
        {"max_new_tokens", "turns"},
    ),
    "one that only `config_init` names": (
        IMPORTS
        + CONFIG.replace("MyConfig", "MyEnvConfig")
        + "class Env(BaseEnv):\n    @classmethod\n"
        "    def config_init(cls):\n        return MyEnvConfig(max_new_tokens=3), []\n",
        {"max_new_tokens"},
    ),
    "annotated, and under other names": (
        "from atroposlib.envs.base import BaseEnv as B, BaseEnvConfig as C\n"
        + CONFIG.replace("BaseEnvConfig", "C")
        + "class Env(B):\n    env_config_cls: type = MyConfig\n",
        {"max_new_tokens"},
    ),
}
UNKNOWN = {
    "a class of another module": IMPORTS + "from mine import MyConfig\n" + USES,
    "a class that descends from one of another module": IMPORTS
    + "from mine import Theirs\nclass MyConfig(Theirs):\n    turns: int = 1\n"
    + USES,
    "an environment of another module": "from mine import Env\nEnv.cli()\n",
    "a class that takes any name": IMPORTS
    + CONFIG
    + "    model_config = {'extra': 'allow'}\n"
    + USES,
    "no Python": "class (\n",
}


@pytest.mark.parametrize("script", KNOWN)
def test_settings_come_from_environment_class(tmp_path, script):
    path = tmp_path / "environment.py"
    source, own = KNOWN[script]
    path.write_text(source)
    assert setting_names(path) == _base_names() | own


@pytest.mark.parametrize("script", UNKNOWN)
def test_settings_untold_by_script_are_unknown(tmp_path, script):
    path = tmp_path / "environment.py"
    path.write_text(UNKNOWN[script])
    assert setting_names(path) is None
    assert setting_names(tmp_path / "missing.py") is None


def test_base_settings_are_those_of_atropos():
    from atroposlib.envs.base import BaseEnvConfig

    assert _base_names() == set(BaseEnvConfig.model_fields)


def test_reshaping_requests_are_found(tmp_path):
    path = tmp_path / "environment.py"
    path.write_text(
        "async def collect_trajectory(self, item):\n    await managed.completion(prompt=item, n=4, "
        "top_p=0.9, top_k=-1, min_p=0.0, temperature=0.7)\n    body = "
        "{'logit_bias': {'5': 1}, 'min_tokens': 3, 'bad_words': None, 'repetition_penalty': 1.0}\n"
        "    await client.create(**body, response_format={'type': 'json_object'}, "
        "top_k=self.top_k)\nclass C:\n    top_p: float = Field(top_p=0.1)\nasync def "
        "evaluate(self):\n    await managed.completion(top_p=0.1, logit_bias={})\n"
    )
    assert [(request.line, request.text) for request in reshaping_requests(path)] == [
        (2, "top_p=0.9"),
        (3, "logit_bias={'5': 1}"),
        (3, "min_tokens=3"),
        (4, "response_format={'type': 'json_object'}"),
    ]


# ------------------------------------------------------------------------ the environment's process

ONE_BY_ONE = """
import asyncio, json, sys
from atroposlib.envs.base import BaseEnv, BaseEnvConfig

class Config(BaseEnvConfig):
    max_new_tokens: int = 64

class Env(BaseEnv):
    env_config_cls = Config
    calls = 0

    @classmethod
    def config_init(cls):
        return Config(), []

    async def collect_trajectory(self, item):
        number, Env.calls = Env.calls, Env.calls + 1
        await asyncio.sleep(0.05 * (3 - number))  # the last one ends first
        rollout = {"tokens": [number] * 3, "masks": [number] * 3, "scores": float(number)}
        rollout["inference_logprobs"] = [-float(number)] * 3
        if number:
            rollout["distill_token_ids"] = [[1]] * 3
        if number % 2:
            rollout["overrides"] = {"rewards": {"odd": number}}
            rollout["messages"] = [{"role": "user", "content": str(number)}]
        return rollout, []

    async def get_next_item(self): ...
    async def evaluate(self): ...

if __name__ == "__main__" and "--config" in sys.argv:
    Env.cli()
env = Env.__new__(Env)
env.config = Config(group_size=4)
print(json.dumps(asyncio.run(env.collect_trajectories({}))[0]))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("environment") / "environment.py"
    path.write_text(ONE_BY_ONE)
    return path


def ran(script: Path, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, RUNNER, str(script), "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_rollouts_collected_one_by_one_keep_logprobs(script):
    group = json.loads(ran(script).stdout.splitlines()[-1])
    assert group["scores"] == [0.0, 1.0, 2.0, 3.0]
    assert group["inference_logprobs"] == [[-0.0] * 3, [-1.0] * 3, [-2.0] * 3, [-3.0] * 3]
    assert "distill_token_ids" not in group  # which not all of them have
    assert group["overrides"] == [{}, {"rewards": {"odd": 1}}, {}, {"rewards": {"odd": 3}}]
    assert [bool(messages) for messages in group["messages"]] == [False, True, False, True]
    assert group["advantages"] == []  # which none of them has


@pytest.mark.slow
def test_unknown_setting_ends_environment_with_hint(script, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"env": {"max_new_token": 24}, "stated": ["max_new_token"]}))
    result = ran(script, "--config", str(config))
    assert result.returncode == 1
    assert (
        "environment: Env has no setting `max_new_token` (under `config:` in the recipe). Did you mean "
        "`max_new_tokens`?" in result.stderr
    )
