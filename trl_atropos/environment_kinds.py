"""Holds the kinds of environments that this package brings along: an entry of a recipe names one in
place of a script, and has its settings below that name.

    environments:
      - agent: {command: [python, my_agent.py, --task, "{task}"], tasks: tasks.jsonl, ...}

`environment_entry.py` parses the settings with the classes here, and runs the kind's script as if
the entry had named that as its `path`, with the parsed settings as `config: {entry: {...}}`. There,
`agents/` parses them again. All paths are absolute from the first parsing on: they are written as
seen from the recipe's folder. Imports neither torch nor Atropos.
"""

import ast
import os
import pwd
import re
import shlex
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from trl_atropos.errors import RecipeError

SCRIPTS = Path(__file__).resolve().with_name("agents")
INHERIT = "inherit"  # the value of a variable that an agent gets from the run
INHERITED = ("PATH", "HOME", "LANG")  # without being listed
URL_VARIABLES = ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL")
KEY_VARIABLES = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
OWN_VARIABLES = "TRL_ATROPOS_"  # how the names of this package's variables begin
FUNCTION = re.compile(r"(?P<file>.+\.py):(?P<function>\w+)")
# {task[question]} is one entry of a task; {{word}} is the text {word}.
PLACEHOLDER = re.compile(
    r"\{\{(?P<literal>\w+)\}\}|(?<!\$)\{(?P<name>[a-z_]+)(\[(?P<key>[^\]]+)\])?\}"
)
USER_NUMBERS = re.compile(r"(\d+)-(\d+)")  # the first and the last
PLACEHOLDERS = ("task", "task_file", "base_url", "api_key", "folder", "python")

NonEmpty = Annotated[str, Field(min_length=1)]


def _seen_from(info: ValidationInfo, path: str) -> str:
    """Returns a path as absolute. A relative one is seen from the folder in the context."""
    folder = (info.context or {}).get("folder") or os.getcwd()
    return os.path.abspath(os.path.join(folder, os.path.expanduser(path)))


def _absolute_if_path(name: str, info: ValidationInfo) -> str:
    """Returns a program as absolute, unless it is a name that is looked up in PATH."""
    return _seen_from(info, name) if "/" in name else name


def _absolute_function(place: str, info: ValidationInfo) -> str:
    """Returns `FILE.py:FUNCTION` with an absolute path. Raises `ValueError` for another text."""
    function = FUNCTION.fullmatch(place)
    if function is None:
        raise ValueError(f"{place!r} names no function: write `file.py:function`")
    return f"{_seen_from(info, function['file'])}:{function['function']}"


Program = Annotated[NonEmpty, AfterValidator(_absolute_if_path)]
FunctionPlace = Annotated[str, AfterValidator(_absolute_function)]


class EpisodeEntry(BaseModel):
    """
    Settings of every kind: how often a task is tried, and what an episode may do. An episode is one
    try, in a session of its own (docs/sessions.md).

    Attributes:
        group_size: Episodes of one task that are compared. An evaluation has `samples` instead.
        timeout: Seconds that an episode may take.
        on_failure: `drop` gives the place of a failed episode to another one of the task; `score_0`
            keeps it with the score 0. One that never called the model is always dropped.
        marked_calls: `drop` leaves out tokens that were sampled in a way that the trainer cannot
            compute again, such as below a JSON schema; `train` trains them as they are.
        max_completion_tokens: Tokens that one completion may have, whatever the client asks for.
        max_calls: Calls of one episode.
        max_tokens: Sampled tokens of one episode.
        reuse: Whether the sampled ids of an answer take the place of its rendered text in later
            prompts of the episode.
        episodes_at_once: Episodes that run side by side.
        python: Interpreter of foreign code; by default the run's own.
        env: Variables of foreign code, besides PATH, HOME and LANG. `inherit` takes the value that
            the run has.
    """

    model_config = ConfigDict(extra="forbid")

    script: ClassVar[str]  # file in `agents/` that runs the kind as an Atropos environment

    group_size: int = Field(8, ge=1)
    timeout: float = Field(600.0, gt=0, allow_inf_nan=False)
    on_failure: Literal["drop", "score_0"] = "drop"
    marked_calls: Literal["drop", "train"] = "drop"
    max_completion_tokens: int | None = Field(None, ge=1)
    max_calls: int = Field(1000, ge=1)
    max_tokens: int = Field(1_000_000, ge=1)
    reuse: bool = False
    episodes_at_once: int = Field(32, ge=1)
    python: Program | None = None
    env: dict[NonEmpty, str | int | float] = {}

    @field_validator("env")
    @classmethod
    def _refuse_own_variables(cls, env: dict[str, Any]) -> dict[str, Any]:
        for name in env:
            if name.startswith(OWN_VARIABLES):
                raise ValueError(f"{name} is the run's own, and no agent gets it: leave it out")
            if name in (*URL_VARIABLES, *KEY_VARIABLES):
                raise ValueError(f"each episode gets a {name} of its own: leave it out")
        return env

    @property
    def path(self) -> str:
        """Script that runs the kind as an Atropos environment."""
        return str(SCRIPTS / self.script)

    @property
    @abstractmethod
    def line(self) -> str:
        """The entry as one line for people."""

    def variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables of foreign code, which is run by a process that has `variables`. If
        the entry names a `python`, programs of its folder come first."""
        chosen = {"PYTHONUNBUFFERED": "1"}  # what it prints is not lost if it is ended
        for name in INHERITED:
            if name in variables:
                chosen[name] = variables[name]
        for name, value in self.env.items():
            chosen[name] = variables.get(name, "") if value == INHERIT else str(value)
        if self.python is not None and "/" in self.python:
            folder = os.path.dirname(self.python)
            chosen["PATH"] = f"{folder}{os.pathsep}{chosen.get('PATH', os.defpath)}"
        return chosen

    def require(self, who: str) -> None:
        """Raises `RecipeError` for the first thing that is missing on this machine, with the others
        as `further`. Runs nothing."""
        mistakes = []
        for check in self._checks(who):
            try:
                check()
            except RecipeError as error:
                mistakes.append(error)
        if mistakes:
            first, *further = mistakes
            first.further = further
            raise first

    def _checks(self, who: str) -> Iterator[Callable[[], None]]:
        """Yields functions, each of which raises `RecipeError` if one thing is missing."""
        for name, value in self.env.items():
            if value == INHERIT:
                yield partial(_require_variable, who, name)
        if self.python is not None:
            yield partial(self._require_program, who, "python", self.python)

    def probe(self, who: str) -> None:
        """Raises `RecipeError` for what only foreign code in its own interpreter can tell. May take
        seconds: `check` and the start of a run ask once."""

    def _require_program(self, who: str, setting: str, program: str) -> None:
        path = self.variables(os.environ).get("PATH", os.defpath)
        if shutil.which(program, path=path) is None:
            what = f"{who}: there is no program {program!r} to run"
            fix = f"Correct `{setting}`. A path is seen from the recipe's folder."
            raise RecipeError(what, f"{setting}: {program}", fix, "environment-program")


class TaskDataset(BaseModel):
    """A data set of the Hub, or a folder that holds one, whose rows are tasks."""

    model_config = ConfigDict(extra="forbid")

    dataset: NonEmpty
    config: str | None = None
    split: NonEmpty = "train"

    @field_validator("dataset")
    @classmethod
    def _find_folder(cls, dataset: str, info: ValidationInfo) -> str:
        if dataset.startswith((".", "/", "~")):
            return _seen_from(info, dataset)
        return dataset


class AgentEntry(EpisodeEntry):
    """
    An agent that nobody edits: a command that knows a URL, and solves a task in a folder.

    Attributes:
        command: Words of the command, or one text, with {task}, {task[KEY]}, {task_file},
            {base_url}, {api_key} and {folder}. It is started in the folder. A word that names a
            file, seen from the recipe's folder, becomes its absolute path.
        tasks: A file of JSON lines, `file.py:function`, or a data set of the Hub.
        score: `file.py:function`, which is called with task, folder, output and episode.
        user: Runs agents as other users: a name, a list of names, or numbers such as
            `60001-60032`. Each episode has one of them for itself. The run must be root's.
        max_output: Bytes that the agent may print. It is ended if it prints more.
    """

    script = "agent_environment.py"

    command: list[NonEmpty] = Field(min_length=1)
    tasks: NonEmpty | TaskDataset
    score: FunctionPlace
    user: NonEmpty | list[NonEmpty] | None = None
    max_output: int = Field(1 << 20, ge=1)

    @field_validator("command", mode="before")
    @classmethod
    def _split_text(cls, command: Any) -> Any:
        if isinstance(command, str):
            return shlex.split(command)
        return command

    @field_validator("command")
    @classmethod
    def _read_words(cls, command: list[str], info: ValidationInfo) -> list[str]:
        program, *words = command
        absolute = [_absolute_if_path(program, info)]
        for word in words:
            path = _seen_from(info, word)
            absolute.append(path if os.path.isfile(path) else word)
        for word in absolute:
            for placeholder in PLACEHOLDER.finditer(word):
                name = placeholder["name"]
                if name is not None and name not in PLACEHOLDERS:
                    known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
                    raise ValueError(
                        f"{{{name}}} is no placeholder; known ones: {known}. Write a literal one "
                        f"as {{{{{name}}}}}"
                    )
        return absolute

    @field_validator("tasks")
    @classmethod
    def _find_tasks(cls, tasks: str | TaskDataset, info: ValidationInfo) -> str | TaskDataset:
        if isinstance(tasks, TaskDataset):
            return tasks
        if FUNCTION.fullmatch(tasks):
            return _absolute_function(tasks, info)
        if tasks.endswith((".jsonl", ".json")):
            return _seen_from(info, tasks)
        return TaskDataset(dataset=tasks)

    @property
    def users(self) -> list[str]:
        """The names or numbers of the users that agents run as; none: that of the run."""
        if self.user is None:
            return []
        if isinstance(self.user, list):
            return self.user
        numbers = USER_NUMBERS.fullmatch(self.user)
        if numbers is None:
            return [self.user]
        first, last = map(int, numbers.groups())
        return [str(number) for number in range(first, last + 1)]

    @property
    def line(self) -> str:
        return f"agent: {shlex.join(self.command)}"

    def _checks(self, who: str) -> Iterator[Callable[[], None]]:
        yield from super()._checks(who)
        if self.command[0] not in ("python", "{python}"):
            yield partial(self._require_program, who, "command", self.command[0])
        yield partial(_require_function, who, "score", self.score)
        if isinstance(self.tasks, str):
            require_place = _require_function if FUNCTION.fullmatch(self.tasks) else _require_file
            yield partial(require_place, who, "tasks", self.tasks)
        if self.user is not None:
            for user in self.users:
                yield partial(self._require_user, who, user)
            yield partial(self._require_root, who)
            yield partial(self._require_hidden_url, who)

    def _require_user(self, who: str, user: str) -> None:
        if user.isdigit():
            return
        try:
            pwd.getpwnam(user)
        except KeyError:
            what = f"{who}: there is no user {user!r} on this machine"
            fix = f"Make it: `useradd --create-home {user}`, or name numbers, as `60001-60032`."
            raise RecipeError(what, f"user: {self.user}", fix) from None

    def _require_root(self, who: str) -> None:
        if os.geteuid() != 0:
            what = f"{who}: only root can run agents as other users, and `user` is {self.user!r}"
            fix = "Start the run as root, for example in a container, or leave `user` out."
            raise RecipeError(what, f"user: {self.user}", fix)

    def _require_hidden_url(self, who: str) -> None:
        if any("{base_url}" in word for word in self.command):
            what = f"{who}: everybody on the machine can read the command line of a process"
            fix = "Have the agent read OPENAI_BASE_URL, in place of {base_url} in its `command`."
            raise RecipeError(f"{what}, with the URL of its session", self.line, fix)


def _require_variable(who: str, name: str) -> None:
    if name not in os.environ:
        what = f"{who}: it inherits the variable {name}, which is not set"
        raise RecipeError(what, f"{name}: {INHERIT}", f"Set {name}, or leave it out.")


def _require_file(who: str, setting: str, path: str) -> None:
    if not os.path.isfile(path):
        what = f"{who}: there is no file {path} for `{setting}`"
        fix = f"Correct `{setting}`: it is seen from the recipe's folder."
        raise RecipeError(what, f"{setting}: {path}", fix, "environment-file")


def _require_function(who: str, setting: str, place: str) -> None:
    """Raises `RecipeError` if a file has no function of that name at its top level. A file whose
    names are imported or made up is believed."""
    path, _, name = place.rpartition(":")
    _require_file(who, setting, path)
    try:
        tree = ast.parse(Path(path).read_text("utf-8"))
    except (SyntaxError, ValueError) as error:
        what = f"{who}: {path} for `{setting}` is no Python: {error}"
        raise RecipeError(what, f"{setting}: {place}", "Correct it.", "environment-file") from error
    functions = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            functions.add(node.name)
        elif not isinstance(node, ast.Import | ast.Expr):
            functions |= _names_bound_by(node)
    if name not in functions:
        what = f"{who}: {path} for `{setting}` has no function {name!r}"
        fix = f"It has: {', '.join(sorted(functions)) or 'none'}."
        raise RecipeError(what, f"{setting}: {place}", fix, "environment-file")


def _names_bound_by(node: ast.AST) -> set[str]:
    """Returns the names that a statement assigns or imports, also below an `if` or `try`."""
    names = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.add(child.id)
        elif isinstance(child, ast.alias):
            names.add(child.asname or child.name)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(child.name)
    return names
