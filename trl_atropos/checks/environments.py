"""One environment of a recipe: its Python is asked what is installed there, and its script is read, not run."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trl_atropos.checks.finding import Finding
from trl_atropos.checks.versions import requirement
from trl_atropos.environment_code import UNKNOWN, EnvironmentCode, read_class, read_environment
from trl_atropos.environments import EnvironmentSpec
from trl_atropos.flags import stated_flags

PYTHON_DEADLINE = 60.0  # seconds; a cold start from a network disk takes some
PROBE = """
import importlib.metadata, importlib.util, json, sys
told = {}
for name in ("transformers", "atroposlib"):
    try:
        told[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        told[name] = None
for name, wanted in (("module", sys.argv[1]), ("library", "atroposlib")):
    try:
        told[name] = importlib.util.find_spec(wanted).origin if wanted else ""
    except Exception:  # it may import the package that the module is in
        told[name] = None
print(json.dumps(told))
"""


@dataclass
class Environment:
    """
    What is known of an environment. A setting that is computed somewhere is in none of the mappings.

    Attributes:
        spec: Its entry in the recipe.
        argv: Its command.
        code: What its script tells.
        path: Of the script; `None` if it is no Python script that can be read.
        settings: Of its config, as far as they are known: Atropos' defaults, its own, the script's, its file's and the
            command's, the last one in force.
        server: The same of the inference server that it samples from, unless the recipe states `servers`.
        explicit: Names of the settings that are stated somewhere, and not Atropos' defaults.
        flags: `env.` and `openai.` flags of its command.
        findings: What was found on the way.
    """

    spec: EnvironmentSpec
    argv: list[str]
    code: EnvironmentCode = field(default_factory=EnvironmentCode)
    path: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    explicit: set[str] = field(default_factory=set)
    flags: dict[str, str] = field(default_factory=dict)
    unknown_flags: list[str] = field(default_factory=list)
    transformers: str | None = None
    findings: list[Finding] = field(default_factory=list)

    def tell(self, name: str, what: str, seen: str, fix: str, **level: str) -> Finding:
        return Finding(name, f"Environment {self.spec.name!r}: {what}", seen, fix, **level)

    def number(self, name: str) -> float | None:
        """A setting that is a number; `None` if it is not known, or something else."""
        try:
            return float(self.settings[name])
        except (KeyError, TypeError, ValueError):
            return None

    def whole(self, name: str) -> int | None:
        number = self.number(name)
        return None if number is None else int(number)

    @property
    def server_types(self) -> list[str]:
        """As far as they are known."""
        if self.spec.servers is not None:
            return [entry.get("server_type", "vllm") for entry in self.spec.servers]
        return [self.server["server_type"]] if "server_type" in self.server else []


def read(spec: EnvironmentSpec, values: dict[str, str]) -> Environment:
    """`values` are those of the placeholders of its command."""
    one = Environment(spec, spec.argv(values))
    stated = stated_flags(one.argv)
    theirs = ("--env.", "--openai.")
    one.flags = {name.removeprefix("--"): value for name, value in stated.items() if name.startswith(theirs)}
    library = None
    if "python" in os.path.basename(one.argv[0]):
        library = _ask_python(one)
    _settle(one, library, _own_file(one, stated))
    return one


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer in {PYTHON_DEADLINE:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
    return str(error)


def _ask_python(one: Environment) -> str | None:
    """Where its Atropos is, and its script, read; `None` if it has none."""
    argv, spec = one.argv, one.spec
    kind, script = _script(argv)
    env = {**os.environ, **{name: str(value) for name, value in spec.env.items()}}
    command = [argv[0], "-c", PROBE, script if kind == "module" else ""]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, cwd=spec.cwd, timeout=PYTHON_DEADLINE, check=True
        )
        told = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        what = "its Python cannot be asked what is installed there"
        one.findings.append(one.tell("environment-python", what, f"{argv[0]}: {_why(error)}", "Correct its `python`."))
        return None
    one.transformers = told["transformers"]
    _library(one, told["atroposlib"])
    if kind == "module" and told["module"] is None:
        what, seen = "its Python does not find the module that it runs", f"{script} in {argv[0]}"
        one.findings.append(one.tell("environment-script", what, seen, "Correct its `command` or `cwd`."))
    path = told["module"] if kind == "module" else script and os.path.join(spec.cwd or "", script)
    if path and not os.path.isfile(path):
        what = "there is no such script"
        one.findings.append(one.tell("environment-script", what, path, "Correct its `command` or `cwd`."))
    elif path:
        with contextlib.suppress(OSError, SyntaxError, ValueError):  # its own Python will say what is wrong
            one.code, one.path = read_environment(Path(path).read_text(encoding="utf-8")), path
    return told["library"] and os.path.dirname(told["library"])


def _library(one: Environment, version: str | None) -> None:
    wanted, python = requirement("atroposlib"), one.argv[0]
    if version is not None and (wanted is None or wanted.specifier.contains(version, prereleases=True)):
        return
    pinned = f"atroposlib{wanted.specifier if wanted else ''}"
    what = "the Atropos that is installed for its Python is of another version" if version else "it has no Atropos"
    fix = (
        f'Install it (`{python} -m pip install "{pinned}"`), or name the Python of another virtual environment as '
        "`python` of this entry."
    )
    seen = f"atroposlib {version}" if version else f"atroposlib is not installed for {python}"
    one.findings.append(one.tell("environment-atroposlib", what, seen, fix))


def _script(argv: list[str]) -> tuple[str, str]:
    """("file", path) or ("module", name) of what a Python command line runs; the name may be empty."""
    words = iter(argv[1:])
    for word in words:
        if word == "-m":
            return "module", next(words, "")
        if word in ("-X", "-W"):
            next(words, "")
        elif not word.startswith("-"):
            return "file", word
    return "file", ""


def _own_file(one: Environment, stated: dict[str, str]) -> dict[str, Any]:
    """The configuration file that the command names."""
    path = stated.get("--config")
    if path is None or one.spec.servers is not None:  # or else it is the one that the run writes
        return {}
    try:
        content = yaml.safe_load(Path(one.spec.cwd or "", path).read_text(encoding="utf-8")) or {}
        if isinstance(content, dict) and isinstance(content.get("env", {}), dict):
            return content
        error = "no mapping"
    except (OSError, UnicodeError, yaml.YAMLError) as problem:
        error = " ".join(str(problem).split())
    what = "its `--config` cannot be read as YAML"
    one.findings.append(one.tell("environment-config", what, f"{path}: {error}", "Correct the file or its name."))
    return {}


def _settle(one: Environment, library: str | None, file: dict[str, Any]) -> None:
    """Puts the settings together, in the order in which Atropos' command line does."""
    code = one.code
    servers = file.get("openai") or {}
    own = {name: value for name, value in file.get("env", {}).items() if value is not None}
    flags = {name.removeprefix("env."): value for name, value in one.flags.items() if name.startswith("env.")}
    of_server = {name.removeprefix("openai."): value for name, value in one.flags.items() if "openai." in name}
    fields, server_fields = {}, {}
    if library is not None and code.fields is not None:
        base = _class(library, "base.py", "BaseEnvConfig")
        server_fields = _class(library, "server_handling/server_baseline.py", "APIServerConfig")
        fields = base | code.fields
        known = {f"env.{name}" for name in fields} | {f"openai.{name}" for name in server_fields}
        one.unknown_flags = [name for name in one.flags if base and name not in known]
    stated = code.settings | own | flags
    one.explicit = set(code.fields or {}) | set(stated)
    one.settings = _known(fields | stated)
    if isinstance(servers, dict):  # a list has several, which need not be alike
        defaults = server_fields if code.servers or code.single_server else {}
        one.server = _known(defaults | code.server_settings | servers | of_server)


def _class(library: str, file: str, name: str) -> dict[str, Any]:
    try:
        return read_class(Path(library, "envs", file).read_text(encoding="utf-8"), name)
    except (OSError, SyntaxError, ValueError):  # of another version, which has no such file
        return {}


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not UNKNOWN}


def of_recipe(recipe) -> Iterator[Environment]:
    for spec in recipe.environments:
        yield read(spec, recipe.placeholders())
