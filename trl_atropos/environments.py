"""One environment of a recipe: how it is started, in which Python, and with which inference servers."""

import os
import shlex
import shutil
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field


class RecipeError(ValueError):
    """
    The recipe or the command line is wrong; the message says where and what to write instead.

    Args:
        what: What happened; all of the message where there is no `fix`.
        fix: The way out, apart from `what` where that quotes a library, whose words may read like one.
    """

    def __init__(self, what: str, fix: str | None = None) -> None:
        super().__init__(what if fix is None else f"{what} {fix}")
        self.what, self.fix = what, fix


class EnvironmentSpec(BaseModel):
    """
    One entry of `environments`.

    Attributes:
        name: Names the service and its log file.
        command: With placeholders, as one line or as a list of words.
        env: Variables.
        cwd: Working directory.
        python: Interpreter that `{python}` stands for; by default the run's own.
        servers: Inference servers, as Atropos' server configs. What is left out is filled in: `base_url`
            `{vllm_url}/v1`, `model_name` `{model}`, `server_type` `vllm`. They are written to a file that is given
            to the command as `--config`, and work whatever the environment's `config_init` returns.
    """

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[\w.-]+$")
    command: str | list[str] = Field(min_length=1)
    env: dict[str, str | int | float] = {}
    cwd: str | None = None
    python: str | None = Field(default=None, min_length=1)
    servers: list[dict[str, Any]] | None = Field(default=None, min_length=1)

    def argv(self, values: dict[str, str]) -> list[str]:
        """The command with its placeholders filled in."""
        try:
            words = shlex.split(self.command) if isinstance(self.command, str) else list(self.command)
        except ValueError as error:
            raise RecipeError(f"The command of environment {self.name!r} is cut short: {error}.") from error
        servers = ["--config", self.servers_file(values)] if self.servers is not None else []
        return [self._fill_in(word, values) for word in words] + servers

    def servers_file(self, values: dict[str, str]) -> str:
        """Where `servers` are written for the environment to read."""
        return os.path.abspath(os.path.join(values["output_dir"], "environments", f"{self.name}.yaml"))

    def filled_servers(self, values: dict[str, str]) -> list[dict[str, Any]]:
        """`servers` with what is usual, and with their placeholders filled in."""
        usual = {"base_url": "{vllm_url}/v1", "model_name": "{model}", "server_type": "vllm", "api_key": "none"}
        return [
            {key: self._fill_in(value, values) if isinstance(value, str) else value for key, value in entry.items()}
            for entry in ({**usual, **stated} for stated in self.servers or [])
        ]

    def write_servers(self, values: dict[str, str]) -> None:
        """Write the configuration file for Atropos' command line."""
        servers = self.filled_servers(values)
        # Of a single one, Atropos ignores the URL unless the environment has a list itself; of two it never does.
        servers = servers * 2 if len(servers) == 1 else servers
        path = self.servers_file(values)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            yaml.safe_dump({"openai": servers}, file, sort_keys=False)

    def check(self, argv: list[str]) -> None:
        """Raises `RecipeError` if its program or its folder is not there, or if its servers are stated twice."""
        if self.cwd is not None and not os.path.isdir(self.cwd):
            raise RecipeError(f"Environment {self.name!r}: its `cwd`, {self.cwd!r}, is no folder. Correct it.")
        program = argv[0] if argv else ""
        place = os.path.join(self.cwd or "", program) if "/" in program else program
        if not shutil.which(place, path=str(self.env["PATH"]) if "PATH" in self.env else None):
            raise RecipeError(
                f"Environment {self.name!r}: there is no program {program!r} to run. Correct its `command`; a Python "
                "script is run by `{python} path/to/script.py`."
            )
        given = [word.partition("=")[0] for word in argv[:-2] if word.startswith(("--openai.", "--config"))]
        if self.servers is not None and given:
            raise RecipeError(
                f"Environment {self.name!r} has both `servers` and {given[0]} in its command, and Atropos takes only "
                "one of them. Remove one; `servers` may have every setting that `--openai.` flags have."
            )

    def _fill_in(self, word: str, values: dict[str, str]) -> str:
        if self.python is not None:
            python = os.path.expanduser(self.python)
            values = {**values, "python": os.path.abspath(python) if "/" in python else python}
        try:
            return word.format_map(values)
        except (KeyError, IndexError, ValueError) as error:
            raise RecipeError(
                f"The entry of environment {self.name!r} has an unknown placeholder ({error}). Known ones: "
                f"{', '.join('{' + name + '}' for name in values)}; write a literal brace twice."
            ) from error
