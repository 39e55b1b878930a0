"""What the tests of `trl-atropos check` write recipes with: a folder, and an environment without a
fault."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.server_process import free_port
from trl_atropos.check import examine

FLAGS = "--slurm false --env.rollout_server_url {atropos_url} --env.tokenizer_name {model}"
SOURCE = """
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

class Config(BaseEnvConfig):
    weight: float = 1.0
    max_new_tokens: int | None = None

class Mine(BaseEnv):
    env_config_cls = Config

    @classmethod
    def config_init(cls):
        return Config(group_size=8), APIServerConfig()  # of a single server, Atropos ignores the URL
"""


def check(argv: list[str]) -> list[str]:
    """What `trl-atropos check` finds."""
    return [str(one) for one in examine(argv).findings]


class Desk:
    """Writes recipes into a folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model

    def recipe(
        self, entry: dict[str, Any] | None = None, options: tuple[str, ...] = (), **settings: Any
    ) -> list[str]:
        """The command line for a recipe with one environment, whose entry has these keys, too."""
        if not (self.folder / "environment.py").exists():
            (self.folder / "environment.py").write_text(SOURCE)
        one = {
            "name": "mine",
            **({} if "command" in (entry or {}) else {"path": "environment.py"}),
            **(entry or {}),
        }
        urls = {
            name: f"http://127.0.0.1:{free_port()}"
            for name in ("atropos_url", "vllm_server_base_url")
        }
        content = {
            "model_name_or_path": str(self.model),
            "output_dir": str(self.folder / "run"),
            "max_steps": 10,
            "save_strategy": "no",
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "use_cpu": True,
            "environments": [one],
            **urls,
            **settings,
        }
        (self.folder / "recipe.yaml").write_text(yaml.safe_dump(content))
        return ["--config", "recipe.yaml", *options]

    def with_checkpoint(self, run: str, **settings: Any) -> list[str]:
        """A recipe whose output folder was last used by the run `a`, and has a checkpoint of
        `run`."""
        checkpoint = self.folder / "run" / "checkpoint-7"
        checkpoint.mkdir(parents=True, exist_ok=True)
        path = {"args": {}, "attributes": {"path": [[run, 0]]}}
        state = {"global_step": 7, "stateful_callbacks": {"RunPath": path}}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        (self.folder / "run" / ".run.json").write_text(json.dumps({"path": [["a", 0]]}))
        return self.recipe(**settings)

    def configured(self, **config: Any) -> list[str]:
        """A recipe that states settings of its environment."""
        return self.recipe({"config": config})

    def commanded(self, flags: str, **entry: Any) -> list[str]:
        """A recipe with the whole command of its environment."""
        return self.recipe({"command": f"{{python}} environment.py serve {FLAGS} {flags}", **entry})

    def two(self, first: dict[str, Any], second: dict[str, Any], **settings: Any) -> list[str]:
        """A recipe with two environments that differ in their settings."""
        entries = [
            {"path": "environment.py", "name": name, "config": config}
            for name, config in (("one", first), ("two", second))
        ]
        return self.recipe(environments=entries, **settings)

    def other_vocabulary(self) -> str:
        """A copy of the model whose tokenizer has exchanged two letters."""
        copy = self.folder / "copy"
        shutil.copytree(self.model, copy)
        tokenizer = json.loads((copy / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
        return str(copy)

    def unsavable(self) -> str:
        """A copy of the model with a generation config that Transformers loads, and refuses to
        save."""
        copy = self.folder / "unsavable"
        shutil.copytree(self.model, copy)
        (copy / "generation_config.json").write_text(
            json.dumps({"do_sample": False, "temperature": 0.6})
        )
        return str(copy)

    def python(self, **versions: str | None) -> str:
        """
        A Python in which distributions are installed in other versions, or not at all (`None`), as
        in another virtual environment: this one, with a module before it on the path that answers
        for them.
        """
        site = self.folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(
            "import importlib.metadata as metadata\nfrom types import SimpleNamespace\nversions, "
            f"usual = {versions!r}, metadata.distributions\ndef distributions():\n    yield from "
            "(one for one in usual() if one.name not in versions)\n    yield from "
            "(SimpleNamespace(name=name, version=own) for name, own in versions.items() if own)\n"
            "metadata.distributions = distributions\n"
        )
        python = self.folder / "python3"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return str(python)

    def installed(self, name: str, version: str) -> str:
        """A folder in which a package of that version is installed, as far as its metadata
        tells."""
        folder = self.folder / "older"
        (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
        return str(folder)
