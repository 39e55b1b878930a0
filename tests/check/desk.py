"""Writes recipes for the tests of `trl-atropos check` and of mistakes: into a folder, with an
environment without a fault."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server_process import free_port
from trl_atropos.check import examine
from trl_atropos.protocol import TOKEN_VARIABLE

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


BASE = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}  # of another model's config
OLD_CLASS = "modeling_baichuan.BaichuanForCausalLM"
OLD_CONFIG = "configuration_baichuan.BaichuanConfig"


def check(argv: list[str]) -> list[str]:
    """Returns what `trl-atropos check` finds."""
    return [str(finding) for finding in examine(argv).findings]


class Desk:
    """Writes recipes into a folder, which is the current one until `monkeypatch` undoes it. Most
    methods return the command line that names the recipe."""

    def __init__(self, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.model = model
        self.monkeypatch = monkeypatch
        monkeypatch.chdir(folder)
        # GiB; otherwise a server takes most of the machine
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        for name in ("NO_COLOR", "WANDB_API_KEY", "WANDB_MODE", TOKEN_VARIABLE):
            monkeypatch.delenv(name, raising=False)

    # ---------------------------------------------------------------------------------- recipes

    def recipe(
        self, entry: dict[str, Any] | None = None, options: tuple[str, ...] = (), **settings: Any
    ) -> list[str]:
        """Writes a recipe with one environment, whose entry has these keys, too. A setting of
        `None` is left out."""
        if not (self.folder / "environment.py").exists():
            (self.folder / "environment.py").write_text(SOURCE)
        entry = entry or {}
        program = {} if "command" in entry else {"path": "environment.py"}
        content = {
            "model_name_or_path": str(self.model),
            "output_dir": str(self.folder / "run"),
            "max_steps": 10,
            "save_strategy": "no",
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "use_cpu": True,
            "environments": [{"name": "mine", **program, **entry}],
            "atropos_url": self.free_url(),
            "vllm_server_base_url": self.free_url(),
            **settings,
        }
        stated = {name: value for name, value in content.items() if value is not None}
        return [*self.written(yaml.safe_dump(stated)), *options]

    def free_url(self) -> str:
        return f"http://127.0.0.1:{free_port()}"

    def written(self, text: str) -> list[str]:
        """Writes this text as the recipe."""
        (self.folder / "recipe.yaml").write_text(text)
        return ["--config", "recipe.yaml"]

    def overlaid(self, text: str) -> list[str]:
        """Writes a good recipe, and this text as its overlay."""
        (self.folder / "overlay.yaml").write_text(text)
        return [*self.recipe(), "--overlay", "overlay.yaml"]

    def launched(self, text: str, **settings: Any) -> list[str]:
        """Writes a recipe, and this text as the file of accelerate."""
        (self.folder / "launch.yaml").write_text(text)
        return self.recipe(options=("--config_file", "launch.yaml"), **settings)

    def evaluated(self, *entries: dict[str, Any], **settings: Any) -> list[str]:
        """Writes a recipe with evaluations, of which the first is called `task`."""
        evaluations = [{"name": "task", "path": "environment.py", **entry} for entry in entries]
        return self.recipe(evaluations=evaluations, **settings)

    def with_variable(self, name: str, value: str, **settings: Any) -> list[str]:
        """Writes a recipe, and sets a variable of the environment."""
        self.monkeypatch.setenv(name, value)
        return self.recipe(**settings)

    def with_source(self, source: str) -> list[str]:
        """Writes a recipe with an environment of this code."""
        (self.folder / "environment.py").write_text(source)
        return self.recipe()

    def tokenizing(self, **versions: str) -> list[str]:
        """Writes a recipe with an environment that calls `tokenize_for_trainer`, in a Python with
        these versions of packages."""
        self.with_source(
            "def f(tokenizer, messages):\n    return tokenize_for_trainer(tokenizer, messages)\n"
        )
        return self.recipe({"python": self.python(**versions)})

    def with_checkpoint(self, run: str, **settings: Any) -> list[str]:
        """Writes a recipe whose output folder was last used by the run `a`, and has a checkpoint of
        `run`."""
        checkpoint = self.folder / "run" / "checkpoint-7"
        checkpoint.mkdir(parents=True, exist_ok=True)
        path = {"args": {}, "attributes": {"path": [[run, 0]]}}
        state = {"global_step": 7, "stateful_callbacks": {"RunPath": path}}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        (self.folder / "run" / ".run.json").write_text(json.dumps({"path": [["a", 0]]}))
        return self.recipe(**settings)

    def configured(self, **config: Any) -> list[str]:
        """Writes a recipe that states settings of its environment."""
        return self.recipe({"config": config})

    def commanded(self, flags: str, **entry: Any) -> list[str]:
        """Writes a recipe with the whole command of its environment."""
        return self.recipe({"command": f"{{python}} environment.py serve {FLAGS} {flags}", **entry})

    def two(self, first: dict[str, Any], second: dict[str, Any], **settings: Any) -> list[str]:
        """Writes a recipe with two environments that differ in their settings."""
        entries = [
            {"path": "environment.py", "name": name, "config": config}
            for name, config in (("one", first), ("two", second))
        ]
        return self.recipe(environments=entries, **settings)

    def with_package(self, name: str, version: str) -> list[str]:
        """Writes a recipe, and makes this version of a package the installed one, as far as its
        metadata tells."""
        metadata = self.folder / "older" / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        self.monkeypatch.setattr(sys, "path", [str(self.folder / "older"), *sys.path])
        return self.recipe()

    # ------------------------------------------------------------------------------- other models

    def empty_folder(self) -> str:
        (self.folder / "empty").mkdir()
        return str(self.folder / "empty")

    def configured_model(self, **config: Any) -> str:
        """Returns a copy of the model's folder, whose config is of a Qwen3 with these fields."""
        copy = self._copied_model()
        (copy / "config.json").write_text(json.dumps(BASE | config))
        return str(copy)

    def old_model(self) -> str:
        """Returns the folder of a model with code of its own, which needs an older Transformers."""
        copy = Path(
            self.configured_model(
                model_type="baichuan",
                architectures=["BaichuanForCausalLM"],
                auto_map={"AutoConfig": OLD_CONFIG, "AutoModelForCausalLM": OLD_CLASS},
            )
        )
        (copy / "configuration_baichuan.py").write_text(
            "from transformers import Qwen3Config\nclass BaichuanConfig(Qwen3Config):\n    "
            "model_type = 'baichuan'\n"
        )
        (copy / "modeling_baichuan.py").write_text(
            "from transformers import top_k_top_p_filtering\n"
        )
        return str(copy)

    def _copied_model(self) -> Path:
        copy = self.folder / "copy"
        shutil.copytree(self.model, copy)
        return copy

    def other_vocabulary(self) -> str:
        """Returns a copy of the model's folder, whose tokenizer has exchanged two letters."""
        copy = self._copied_model()
        tokenizer = json.loads((copy / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
        return str(copy)

    def unsavable(self) -> str:
        """Returns a copy of the model's folder, with a generation config that Transformers loads,
        and refuses to save."""
        copy = self._copied_model()
        (copy / "generation_config.json").write_text(
            json.dumps({"do_sample": False, "temperature": 0.6})
        )
        return str(copy)

    # ------------------------------------------------------------------------------ other Pythons

    def python(self, **versions: str | None) -> str:
        """Returns a Python in which distributions are installed in other versions, or not at all
        (`None`), as in another virtual environment: this one, with a module before it on the path
        that answers for them."""
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

    def broken_python(self) -> str:
        python = self.folder / "python3"
        python.write_text("#!/bin/sh\nexit 3\n")
        python.chmod(0o755)
        return str(python)
