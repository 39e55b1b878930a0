"""Holds one entry of `environments` or `evaluations` in a recipe: its keys, their checks, and the
command that starts it.

`recipe.parse` reads all entries with `parse_entries`. `train.py`, `check`, `trl-atropos try` and
`services/evaluations.py` get the parsed entries and start them by `start_command` or
`groups_command`. An entry with a `path` is run by a script of `environment_site/`, one with a
`command` as it is written. One that names a kind of this package, such as `agent`
(`environment_kinds.py`), is run as if it had named the kind's script as its `path`.
"""

import difflib
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from trl_atropos.environment_kinds import AgentEntry, EpisodeEntry
from trl_atropos.environment_verifiers import VerifiersEntry
from trl_atropos.errors import RecipeError
from trl_atropos.flags import stated_flags
from trl_atropos.protocol import (
    SESSION_TOKEN_VARIABLE,
    TOKEN_VARIABLE,
    environment_token,
    session_token,
)

SITE = str(Path(__file__).resolve().with_name("environment_site"))
RUNNER = f"{SITE}/run.py"  # runs the script of a `path` in a run
GROUPS_RUNNER = f"{SITE}/groups.py"  # takes it through a number of problems, without a run

# A name of an entry has no "..", hides no file, and does not look like a flag.
NAME = re.compile(r"\w[\w.-]*")
LONGEST_NAME = 200  # bytes; the name of a file may have 255

NonEmpty = Annotated[str, Field(min_length=1)]


class EnvironmentSpec(BaseModel):
    """
    One entry of `environments`. A text alone is the `path`.

    Attributes:
        path: Script of the environment, relative to `cwd`. It is run as `{python} PATH serve
            --config FILE` would be.
        config: Settings of the environment. They win over those that the run writes to that file.
        command: Whole command in place of `path`, with placeholders, as one line or a list of
            words.
        agent: Command of an agent, its tasks and its score, in place of `path` (docs/agents.md).
        verifiers: Taskset of verifiers, in place of `path` (docs/other-environments.md).
        name: Name of the service and of its log file. Defaults to the script's name, or to the
            name of its folder if the script is called `environment.py`; for an agent, to `agent`.
        env: Variables of its process.
        cwd: Folder in which it is started; by default that of the run.
        python: Interpreter that `{python}` stands for; by default the run's own.
        servers: Inference servers, as Atropos' server configs. Their `base_url`, `model_name` and
            `server_type` are by default those of the run. A `command` gets them as the file
            `--config`.
    """

    model_config = ConfigDict(extra="forbid")

    # keys below which a kind of this package has its settings
    KINDS: ClassVar = ("agent", "verifiers")
    SCRIPT_KEYS: ClassVar = ("env", "cwd", "python", "servers")  # not of those kinds

    path: NonEmpty | None = None
    config: dict[str, Any] = {}
    command: str | list[str] | None = Field(default=None, min_length=1)
    agent: AgentEntry | None = None
    verifiers: VerifiersEntry | None = None
    name: str = ""
    env: dict[str, str | int | float] = {}
    cwd: str | None = None
    python: NonEmpty | None = None
    servers: list[dict[str, Any]] | None = Field(default=None, min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _read_text_as_path(cls, entry: Any) -> Any:
        if isinstance(entry, str):
            return {"path": entry}
        return entry

    @model_validator(mode="after")
    def _check_keys_together(self) -> "EnvironmentSpec":
        starts = self.start_keys()
        stated = [key for key in starts if getattr(self, key) is not None]
        if len(stated) != 1:
            raise ValueError(
                f"it needs one of {_quoted(starts)}, and has {' and '.join(stated) or 'none'}"
            )
        if self.kind is not None:
            self._use_kind(stated[0], self.kind)
        if self.path is None and not self.name:
            raise ValueError("an entry with a `command` needs a `name`")
        if self.path is None and self.config:
            raise ValueError(
                "`config` goes with `path`; a `command` has flags, such as `--env.group_size 8`"
            )
        if not self.name:
            self.name = self._usual_name()
        length = len(os.fsencode(self.name))
        if not NAME.fullmatch(self.name) or length > LONGEST_NAME:
            raise ValueError(
                f"files and folders get its name, and {self.name!r} is none for them: set `name` "
                f"to letters, digits and any of - _ ., of at most {LONGEST_NAME} bytes, and with "
                "no - or . at its start"
            )
        return self

    @classmethod
    def start_keys(cls) -> tuple[str, ...]:
        """Returns the keys of which each entry has one: they say what is started."""
        return ("path", "command", *cls.KINDS)

    @property
    def kind(self) -> EpisodeEntry | None:
        """Settings of the kind of this package that the entry names, or None if it names none."""
        for key in self.KINDS:
            settings = getattr(self, key)
            if settings is not None:
                return settings
        return None

    def _use_kind(self, key: str, kind: EpisodeEntry) -> None:
        """Fills in the script of a kind, and its settings as the script's `config`."""
        for name in self.SCRIPT_KEYS:
            if name in self.model_fields_set:
                raise ValueError(f"`{name}` does not go with `{key}`, which has its own settings")
        self.name = self.name or key
        self.path = kind.path
        self.config = {
            "entry": kind.model_dump(mode="json"),
            "group_size": kind.group_size,
            **self.config,
        }

    def _usual_name(self) -> str:
        script = self.script.absolute()
        name = script.stem
        if name == "environment":
            name = script.parent.name
        return re.sub(r"[^\w.-]", "_", name).lstrip(".-")

    @property
    def script(self) -> Path:
        """Script of an entry with a `path`, seen from the folder of the run."""
        return Path(self.cwd or "", self.path)

    @property
    def line(self) -> str:
        """Command as you would type it, without what the run fills in."""
        if self.kind is not None:
            return self.kind.line
        if isinstance(self.command, str):
            return self.command
        if self.command is not None:
            return " ".join(self.command)
        words = [f"python {self.path} serve"]
        for name, value in self.config.items():
            words.append(f"--env.{name} {shlex.quote(str(value))}")
        return " ".join(words)

    def variables(self, **further: str) -> dict[str, str]:
        """Returns the variables of its process: those of `env` and `further`, and a `PYTHONPATH` by
        which its Python loads `environment_site/sitecustomize.py`. The control token is hidden; in
        its place, there is the one that opens sessions and does nothing else."""
        variables = {TOKEN_VARIABLE: "", **further}
        control_token = environment_token()
        if control_token:
            variables[SESSION_TOKEN_VARIABLE] = session_token(control_token)
        for name, value in self.env.items():
            variables[name] = str(value)
        usual_path = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        folders = f"{SITE}{os.pathsep}{usual_path}"
        variables["PYTHONPATH"] = folders.rstrip(os.pathsep)
        return variables

    # ------------------------------------------------------------------------------------ commands

    def start_command(self, placeholders: Mapping[str, str]) -> list[str]:
        """Returns the command that starts the environment in a run. The caller appends `--config
        FILE`. Raises `RecipeError` for an unknown placeholder."""
        if self.path is not None:
            return [self.fill_in("{python}", placeholders), RUNNER, self.path, "serve"]
        return [self.fill_in(word, placeholders) for word in self.command_words()]

    def groups_command(
        self, kind: Literal["process", "evaluate"], placeholders: Mapping[str, str]
    ) -> list[str]:
        """Returns the command that takes the script of a `path` through its first problems
        (`environment_site/groups.py`). The caller appends `--config FILE`."""
        return [self.fill_in("{python}", placeholders), GROUPS_RUNNER, self.path, kind]

    def script_in(self, command: list[str]) -> str:
        """Returns the script that the filled-in `command` runs, or an empty text if it names
        none."""
        if self.path is not None:
            return self.path
        for word in command[1:]:
            if word.endswith(".py"):
                return word
        return ""

    def command_words(self) -> list[str]:
        """Returns the words of `command`, with its placeholders. Raises `RecipeError` for a quote
        that does not end."""
        if not isinstance(self.command, str):
            return self.command
        try:
            return shlex.split(self.command)
        except ValueError as error:
            what = f"The command of environment {self.name!r} is cut short: {error}"
            fix = "Correct its quotes."
            raise RecipeError(what, self.command, fix, "environment-command") from error

    def fill_in(self, text: str, placeholders: Mapping[str, str]) -> str:
        """Returns `text` with the values of its placeholders. An entry's own `python` wins."""
        values = dict(placeholders)
        if self.python is not None:
            values["python"] = os.path.expanduser(self.python)
            if "/" in values["python"]:  # not a name that is looked up in PATH
                values["python"] = os.path.abspath(values["python"])
        try:
            return text.format_map(values)
        except (KeyError, IndexError, ValueError) as error:
            what = f"The entry of environment {self.name!r} has an unknown placeholder ({error})"
            known = ", ".join(f"{{{name}}}" for name in values)
            fix = f"Known ones: {known}; write a literal brace twice."
            raise RecipeError(what, f"{error} in {text}", fix, "environment-command") from error


class EvaluationSpec(EnvironmentSpec):
    """
    One entry of `evaluations`: an environment that is run beside the training. Nothing of it is
    trained on.

    Attributes:
        problems: How many problems are sampled: the first that the environment gives. By default,
            the environment's own `evaluate` runs instead.
        samples: Rollouts of each problem, for pass@k.
        temperature: Sampling temperature; by default that of the run.
        passes_above: A rollout with a score above this has solved its problem.
        every: Optimizer steps between two evaluations; by default `eval_steps`. One more is made
            before the first step and one after the last.
    """

    problems: int | None = Field(default=None, ge=1)
    samples: int = Field(default=1, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    passes_above: float = Field(default=0.5, allow_inf_nan=False)
    every: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_keys_of_evaluation(self) -> "EvaluationSpec":
        if self.path is None:
            kinds = _quoted(self.KINDS)
            raise ValueError(f"an evaluation needs a `path`, or one of {kinds}")
        if self.kind is not None:
            if self.problems is None:
                raise ValueError("it needs `problems`: how many tasks are tried")
            self.config["group_size"] = self.samples
        stated = {"samples", "temperature", "passes_above"} & self.model_fields_set
        if self.problems is None and stated:
            raise ValueError(
                f"`{min(stated)}` goes with `problems`; an environment's own `evaluate` has its "
                "`config`"
            )
        if self.temperature == 0 and self.samples > 1:
            raise PydanticCustomError(
                "greedy",
                "at temperature 0 all samples of a problem are the same",
                {"fix": "Set `samples: 1`, or a `temperature` above 0."},
            )
        return self


# ------------------------------------------------------------------------------ parsing and checks

Spec = TypeVar("Spec", bound=EnvironmentSpec)


def parse_entries(
    setting: str, entries: Any, kind: type[Spec], folder: str | None = None
) -> list[Spec]:
    """Returns the parsed entries of `setting`, which is `environments` or `evaluations`. `folder`
    is that of the recipe, from which paths of an `agent` are seen. Raises `RecipeError` for the
    first mistake in the first entry that is wrong, with the entry's others as `further`."""
    code = f"{setting.removesuffix('s')}-entry"
    if isinstance(entries, dict) and entries:
        what = f"`{setting}` is one mapping, not a list"
        raise RecipeError(what, str(entries), "Begin each entry with `- path: ...`.", code)
    parsed = []
    for number, entry in enumerate(entries or [], start=1):
        try:
            parsed.append(kind.model_validate(entry, context={"folder": folder}))
        except ValidationError as error:
            errors = []
            for complaint in _complaints(error):
                what = f"`{setting}` entry {number}: {_message_of(complaint)}"
                fix = complaint.get("ctx", {}).get("fix") or _usual_fix(kind, complaint)
                errors.append(RecipeError(what, str(entry), fix, code))
            first, *further = errors
            first.further = further
            raise first from error
    names = [spec.name for spec in parsed]
    if len(set(names)) != len(names):
        seen = ", ".join(names)
        what = f"`{setting}` names must differ, but they are: {seen}"
        raise RecipeError(what, seen, "Give each entry a `name`.", code)
    return parsed


def _message_of(complaint: Any) -> str:
    """Returns a complaint of pydantic, such as `samples: Input should be greater than 0`."""
    message = complaint["msg"].removeprefix("Value error, ")
    return ": ".join([*map(str, complaint["loc"]), message])


def _complaints(error: ValidationError) -> list[Any]:
    """Returns pydantic's complaints, one for each setting: a value that may be of several types has
    one for each. Unknown keys come first, and then nothing is said of missing ones, because a
    misspelt key is missing, too."""
    by_setting: dict[tuple, Any] = {}
    for complaint in error.errors():
        by_setting.setdefault(complaint["loc"][:2], complaint)
    complaints = list(by_setting.values())
    unknown = [complaint for complaint in complaints if complaint["type"] == "extra_forbidden"]
    others = []
    for complaint in complaints:
        is_missing = complaint["type"] == "missing"
        if complaint not in unknown and not (is_missing and unknown):
            others.append(complaint)
    return unknown + others


def _usual_fix(kind: type[EnvironmentSpec], complaint: Any) -> str:
    """Returns which keys there are where a complaint of pydantic is."""
    key, *inner = complaint["loc"] or [None]
    if key in kind.KINDS and inner:
        settings = _settings_class(kind, key)
        close = difflib.get_close_matches(str(inner[0]), settings.model_fields, n=1)
        if complaint["type"] == "extra_forbidden" and close:
            return f"Did you mean `{close[0]}`?"
        return f"`{key}` may have: {_quoted(settings.model_fields)}."
    return (
        "An entry is the path of a script, or has one of "
        f"{_quoted(kind.start_keys())}. It may have: {_quoted(kind.model_fields)}."
    )


def _settings_class(kind: type[EnvironmentSpec], key: str) -> type[BaseModel]:
    """Returns the class of the settings below a key of `KINDS`."""
    settings, _none = get_args(kind.model_fields[key].annotation)
    return settings


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def require_program(spec: EnvironmentSpec, command: list[str]) -> None:
    """Raises `RecipeError` if the folder, program or script is missing that the filled-in `command`
    of an entry needs, or if the entry states its servers twice."""
    who = f"Environment {spec.name!r}"
    if spec.kind is not None:
        spec.kind.require(who)
    if spec.cwd is not None and not os.path.isdir(spec.cwd):
        what = f"{who}: its `cwd`, {spec.cwd!r}, is no folder"
        fix = "Name a folder that exists, or leave `cwd` out for the folder of the run."
        raise RecipeError(what, f"cwd: {spec.cwd}", fix, "environment-program")
    _require_executable(who, spec, command[0] if command else "")
    if spec.path is not None:
        _require_script(who, spec)
    elif spec.servers is not None:
        _require_no_servers_in_command(who, spec)


def _require_executable(who: str, spec: EnvironmentSpec, program: str) -> None:
    """Raises `RecipeError` if the program of an entry cannot be run."""
    place = program
    if "/" in program:
        place = os.path.join(spec.cwd or "", program)
    if shutil.which(place, path=spec.env.get("PATH")):
        return
    if os.path.isdir(place):
        what = f"{who}: {program!r} is a folder, and no program to run"
        python = os.path.join(program, "bin", "python")
        fix = f"If it is a virtual environment, name its Python: {python}."
    elif os.path.isfile(place):
        what = f"{who}: you may not execute {program!r}"
        fix = f"Run `chmod +x {place}`, or name another program."
    else:
        what = f"{who}: there is no program {program!r} to run"
        fix = "Correct its `command`, such as `{python} path/to/script.py`."
        if spec.path is not None:
            fix = "Correct its `python`."
    raise RecipeError(what, program, fix, "environment-program")


def _require_no_servers_in_command(who: str, spec: EnvironmentSpec) -> None:
    """Raises `RecipeError` if the command of an entry with `servers` states servers, too."""
    for flag in stated_flags(spec.command_words()):
        if flag.startswith(("--openai.", "--config")):
            what = (
                f"{who} has both `servers` and {flag} in its command, and Atropos takes only one "
                "of them"
            )
            fix = "Remove one; `servers` may have every setting that `--openai.` flags have."
            raise RecipeError(what, flag, fix, "environment-command")


def _require_script(who: str, spec: EnvironmentSpec) -> None:
    """Raises `RecipeError` if the script of an entry cannot be read."""
    seen = f"path: {spec.path}"
    script = spec.script
    if script.is_dir():
        what = f"{who}: {spec.path!r} is a folder, not a script"
        fix = "Name the script in it"
        scripts = sorted(script.glob("*.py"))
        if scripts:
            fix += f", such as `path: {Path(spec.path, scripts[0].name)}`"
        raise RecipeError(what, seen, f"{fix}.", "environment-script")
    if not script.is_file():
        what = f"{who}: there is no script {spec.path!r}"
        raise RecipeError(what, seen, "Correct its `path` or `cwd`.", "environment-script")
    if not os.access(script, os.R_OK):
        what = f"{who}: you may not read its script {spec.path!r}"
        raise RecipeError(what, seen, f"Run `chmod +r {script}`.", "environment-script")
