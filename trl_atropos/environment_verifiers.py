"""Holds the kind `verifiers`: an entry of a recipe names a taskset of verifiers 0.4 in place of a
script (docs/other-environments.md).

    environments:
      - verifiers: {id: my-env, args: {taskset: {...}}, python: /venv/bin/python}

`environment_entry.py` parses the settings with the class here. `agents/verifiers_environment.py`
runs them, and `verifiers_site/` in the interpreter that the entry names.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from trl_atropos.environment_kinds import EpisodeEntry, NonEmpty
from trl_atropos.errors import RecipeError

WORKER = str(Path(__file__).resolve().parent / "verifiers_site" / "verifiers_worker.py")
LOAD_TIMEOUT = 600.0  # seconds that a taskset may take to load what it needs
SHOWN = 300  # characters of a message of verifiers


class VerifiersEntry(EpisodeEntry):
    """
    A taskset of verifiers 0.4, which verifiers itself loads, plays and scores.

    Attributes:
        id: Name of the taskset, as verifiers has it: that of its package.
        args: Settings of verifiers' `[env]` block, such as `{taskset: {split: train}, agent:
            {max_turns: 4}}`.
        select: Which tasks are used, as verifiers' `[select]` block: `{include: {idx: "0:100"}}`.
            An endless taskset has 1,000 tasks.
        python: Interpreter that has verifiers and the taskset; by default the run's own.
    """

    script = "verifiers_environment.py"

    id: NonEmpty
    args: dict[str, Any] = {}
    select: dict[str, Any] = {}

    @property
    def line(self) -> str:
        words = [f"verifiers: {self.id}"]
        for name, value in self.args.items():
            words.append(f"{name}={json.dumps(value)}")
        return " ".join(words)

    @property
    def command(self) -> list[str]:
        """Command of the process that plays the episodes."""
        return [self.python or sys.executable, "-u", WORKER]

    def opening(self, peek: bool) -> dict[str, Any]:
        """Returns the request that opens the taskset, `peek` for a look at its first task alone."""
        return {"taskset": self.id, "args": self.args, "select": self.select, "peek": peek}

    def probe(self, who: str) -> None:
        super().probe(who)
        request = {"id": 1, **self.opening(peek=True)}
        line = json.dumps(request)
        try:
            ended = subprocess.run(
                self.command,
                input=f"{line}\n",
                env=self.variables(os.environ),
                capture_output=True,
                text=True,
                timeout=LOAD_TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            what = f"{who}: taskset {self.id!r} was not loaded within {LOAD_TIMEOUT:.0f} s"
            fix = "See what it loads, or use fewer tasks (`select`)."
            raise RecipeError(what, f"id: {self.id}", fix, "verifiers") from None
        if not ended.stdout.strip():
            errors = ended.stderr.strip() or "nothing"
            *_, last = errors.splitlines()
            what = f"{who}: loading taskset {self.id!r} ended its process with: {last}"
            fix = "Run `python -c 'import verifiers.v1'` with the interpreter in `python`."
            seen = f"exit code {ended.returncode}"
            raise RecipeError(what, seen, fix, "verifiers")
        answer = json.loads(ended.stdout)
        if "refusal" in answer:
            raise refusal_of(who, answer["refusal"])


def refusal_of(who: str, fields: dict[str, str]) -> RecipeError:
    """Returns the error for a request that the worker refuses."""
    what = f"{who}: {fields['what']}"
    if len(what) > SHOWN:
        what = f"{what[:SHOWN]} ..."
    error = RecipeError(what, fields["seen"], fields["fix"], "verifiers")
    if "traceback" in fields:
        error.add_note(fields["traceback"])
    return error
