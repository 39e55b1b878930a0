"""What the tests of `trl-atropos check` write recipes with: a folder, and an environment without a fault."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.server_process import free_port

FLAGS = (
    "--env.rollout_server_url {atropos_url} --env.tokenizer_name {model} "
    "--openai.base_url {vllm_url}/v1 --openai.model_name {model}"
)
HEADER = "from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ServerBaseline\n"
LISTED = """
class Mine(BaseEnv):
    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            group_size=8, total_steps=-1, max_token_length=128, wandb_name="mine", use_wandb=False,
            ensure_scores_are_not_same=False,
        )
        return config, [APIServerConfig(server_type="vllm")]
    async def collect_trajectories(self, item):
        pass
Mine.cli()
"""


class Desk:
    """Writes recipes into a folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model

    def recipe(
        self,
        source: str = LISTED,
        flags: str = FLAGS,
        entry: dict[str, Any] | None = None,
        options: tuple[str, ...] = (),
        **settings: Any,
    ) -> list[str]:
        """The command line for a recipe with one environment of this source."""
        (self.folder / "environment.py").write_text(HEADER + source)
        one = {"name": "mine", "command": f"{{python}} environment.py serve {flags}", **(entry or {})}
        urls = {name: f"http://127.0.0.1:{free_port()}" for name in ("atropos_url", "vllm_server_base_url")}
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

    def without_flag(self, flag: str) -> str:
        """The environment's flags but for one and its value."""
        words = FLAGS.split()
        at = words.index(flag)
        return " ".join(words[:at] + words[at + 2 :])

    def changed(self, **settings: Any) -> str:
        """The environment with other settings in its `config_init`."""
        stated = "".join(f", {name}={value!r}" for name, value in settings.items())
        before, _, after = LISTED.partition("BaseEnvConfig(")
        within, _, after = after.partition(")")
        arguments = [one.strip() for one in within.split(",") if one.strip()]
        kept = [one for one in arguments if one.partition("=")[0] not in settings]
        return f"{before}BaseEnvConfig({', '.join(kept)}{stated}){after}"

    def two(self, first: str, second: str, **settings: Any) -> list[str]:
        """A recipe with two environments that differ in their flags."""
        entries = [
            {"name": name, "command": f"{{python}} environment.py serve {FLAGS} {flags}"}
            for name, flags in (("one", first), ("two", second))
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

    def without_template(self) -> str:
        """A copy of the model whose tokenizer has no chat template."""
        copy = self.folder / "copy"
        shutil.copytree(self.model, copy)
        (copy / "chat_template.jinja").unlink()
        return str(copy)

    def python(self, **versions: str | None) -> str:
        """
        A Python in which distributions are installed in other versions, or not at all (`None`), as in another virtual
        environment: this one, with a module before it on the path that answers for them.
        """
        site = self.folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(
            "import importlib.metadata as metadata\n"
            f"versions, usual = {versions!r}, metadata.version\n"
            "def version(name):\n"
            "    if versions.get(name, '') is None:\n"
            "        raise metadata.PackageNotFoundError(name)\n"
            "    return versions.get(name) or usual(name)\n"
            "metadata.version = version\n"
        )
        python = self.folder / "python3"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return str(python)

    def installed(self, name: str, version: str) -> str:
        """A folder in which a package of that version is installed, as far as its metadata tells."""
        folder = self.folder / "older"
        (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
        return str(folder)
