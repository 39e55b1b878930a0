"""The Atropos environment of an `agent` entry (docs/agents.md): each episode is a command in a
folder of its own, which knows a session's URL, and a score of what it left.

`environment_site/run.py` runs this file as a script. Agent and score have processes of their own,
without anything of this package and with no variable of the run but those that the entry lists.
"""

import asyncio
import json
import os
import pwd
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

from trl_atropos.agents.agent_process import FAILED, AgentRun, run_agent
from trl_atropos.agents.agent_tasks import read_tasks
from trl_atropos.agents.episode_environment import (
    NO_CALL,
    EpisodeEnvironment,
    EpisodeResult,
)
from trl_atropos.agents.function_pool import FunctionFailed, FunctionPool
from trl_atropos.environment_kinds import KEY_VARIABLES, PLACEHOLDER, AgentEntry
from trl_atropos.errors import AtroposTrainingError
from trl_atropos.protocol import SessionReply
from trl_atropos.session_client import OpenSession

API_KEY = "any"  # the session's URL is the key
TASK_FILE = "task.json"
SCORE_FAILED = "score_failed"
LONGEST_LINE = 200  # characters of the last line that an agent printed, in a reason
MESSAGE_TAIL = 4000  # characters of what an agent printed, in the report


class AgentEnvironment(EpisodeEnvironment):
    """The environment of an `agent` entry."""

    name = "agent"
    entry_class = AgentEntry

    async def open(self) -> None:
        self.variables = self.entry.variables(os.environ)
        self.score = FunctionPool(self.entry.score, self.entry.python, self.variables)
        await self.score.start()
        self.folders = tempfile.mkdtemp(prefix="episodes-")
        # A user who is in none of the episodes. The run's own (None) can be in all of them.
        self.users: asyncio.Queue[str | None] = asyncio.Queue()
        for user in self.entry.users or [None] * self.entry.episodes_at_once:
            self.users.put_nowait(user)
        if self.entry.users:
            _let_pass(self.folders)

    async def read_tasks(self) -> list[Any]:
        return await read_tasks(self.entry, self.variables)

    async def run_episode(self, task: Any, session: OpenSession) -> EpisodeResult:
        folder = tempfile.mkdtemp(prefix="episode-", dir=self.folders)
        user = await self.users.get()
        try:
            command = self._command(task, session, folder)
            if user is not None:
                _give_away(folder, user)
            run = await run_agent(
                command,
                env=self._variables(session, user, folder),
                folder=folder,
                timeout=self.entry.timeout,
                max_output=self.entry.max_output,
                user=user,
            )
            reply = await session.end()  # it has ended, and no call of it comes any more
            return await self._result(task, folder, run, reply)
        finally:
            self.users.put_nowait(user)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    # ----------------------------------------------------------------------------------- the agent

    def _command(self, task: Any, session: OpenSession, folder: str) -> list[str]:
        """Returns the words of the command. Writes the task to its file, if a word names that."""
        python = self.entry.python or sys.executable
        values = {
            "task_file": os.path.join(folder, TASK_FILE),
            "base_url": session.openai,
            "api_key": API_KEY,
            "folder": folder,
            "python": python,
        }
        words = []
        for word in self.entry.command:
            if "{task_file}" in word:
                Path(values["task_file"]).write_text(json.dumps(task))
            words.append(filled_in(word, task, values))
        if words[0] == "python":
            words[0] = python
        return words

    def _variables(self, session: OpenSession, user: str | None, folder: str) -> dict[str, str]:
        """Returns all variables of an agent."""
        variables = dict(self.variables)
        if user is not None and "HOME" not in self.entry.env:
            variables["HOME"] = folder if user.isdigit() else pwd.getpwnam(user).pw_dir
        urls = {"OPENAI_BASE_URL": session.openai, "ANTHROPIC_BASE_URL": session.anthropic}
        return variables | urls | dict.fromkeys(KEY_VARIABLES, API_KEY)

    # ----------------------------------------------------------------------------------- the score

    async def _result(
        self, task: Any, folder: str, run: AgentRun, reply: SessionReply
    ) -> EpisodeResult:
        """Returns the result of an episode whose agent has ended: of one that ended well and has
        called the model, with a score."""
        completions = self._completions(reply)
        result = EpisodeResult(messages=_messages(run, reply, completions))
        if run.failure is not None:
            result.outcome = run.failure
            result.reason = f"{run.reason}, after {_calls(reply)}{_last_words(run)}"
            return result
        if not reply.counts.get("tokens", 0):
            result.outcome = NO_CALL
            result.reason = (
                f"{run.reason}, without having called the model (does it read OPENAI_BASE_URL or "
                f"ANTHROPIC_BASE_URL?){_last_words(run)}"
            )
            return result
        request = {
            "call": "score",
            "task": task,
            "folder": folder,
            "output": run.output,
            "episode": {
                "seconds": run.seconds,
                "calls": reply.counts["calls"],
                "tokens": reply.counts["tokens"],
                "completions": completions,
                "errors": run.errors,
            },
        }
        try:
            value = await self.score.call(request, self.entry.timeout)
        except FunctionFailed as error:
            result.outcome = SCORE_FAILED
            result.reason = error.what
            result.error = error
            result.may_score_0 = False
            return result
        result.score = value["score"]
        result.parts = value["parts"]
        return result

    def _completions(self, reply: SessionReply) -> list[str]:
        """Returns the text of each completion, in the order of the calls."""
        texts = []
        for call in reply.calls:
            tokens: list[int] = []
            if call.segment >= 0:
                segment = reply.segments[call.segment]
                for start, end in segment.sampled:
                    tokens += segment.tokens[start:end]
            texts.append(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return texts


def filled_in(word: str, task: Any, values: dict[str, str]) -> str:
    """Returns a word of a command with the values of its placeholders: `{task[question]}` is one
    entry of the task, `{{task}}` is the text `{task}`."""

    def value_of(placeholder: Any) -> str:
        if placeholder["literal"] is not None:
            return f"{{{placeholder['literal']}}}"
        if placeholder["name"] != "task":
            return values[placeholder["name"]]
        if placeholder["key"] is None:
            return _text(task)
        return _text(_entry_of(task, placeholder["key"]))

    return PLACEHOLDER.sub(value_of, word)


def _entry_of(task: Any, key: str) -> Any:
    if isinstance(task, dict) and key in task:
        return task[key]
    what = f"A task has no entry {key!r}, which the agent's command names"
    fix = f"Correct `{{task[{key}]}}` in `command`, or write `{{task}}` for the whole task."
    raise AtroposTrainingError(what, _text(task)[:200], fix)


def _text(value: Any) -> str:
    """Returns a text as it is, and anything else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _calls(reply: SessionReply) -> str:
    """Returns `1 call` or `2 calls`."""
    calls = reply.counts.get("calls", 0)
    return "1 call" if calls == 1 else f"{calls} calls"


def _last_words(run: AgentRun) -> str:
    """Returns the last line that an agent has printed, as the end of a sentence. `run.reason` has
    that of an agent that failed with an error."""
    if run.failure == FAILED and run.errors:
        return ""
    lines = f"{run.errors}\n{run.output}".strip().splitlines()
    if not lines:
        return "; it printed nothing"
    return f"; it printed last: {lines[-1][:LONGEST_LINE]}"


def _messages(run: AgentRun, reply: SessionReply, completions: list[str]) -> list[dict[str, str]]:
    """Returns what the report and `try` show of an episode, as messages."""
    calls = reply.counts.get("calls", 0)
    tokens = reply.counts.get("tokens", 0)
    summary = f"{run.seconds:.1f} s, {calls} calls, {tokens} sampled tokens: {run.reason}"
    messages = [{"role": "episode", "content": summary}]
    for role, text in (("output", run.output), ("errors", run.errors)):
        if text:
            messages.append({"role": role, "content": text[-MESSAGE_TAIL:]})
    for call, completion in zip(reply.calls, completions, strict=True):
        marked = ""
        if call.reason is not None:
            marked = f", not recomputed ({call.reason})"
        text = f"{call.route}, {call.finish}{marked}: {completion[-MESSAGE_TAIL:]}"
        messages.append({"role": f"call {call.call + 1}", "content": text})
    return messages


# ----------------------------------------------------------------------------------- another user


def _let_pass(folder: str) -> None:
    """Lets other users reach what is theirs below a folder, without seeing what else is there."""
    os.chmod(folder, 0o711)
    parent = os.path.dirname(folder)
    mode = stat.S_IMODE(os.stat(parent).st_mode)
    if mode == 0o700:  # the temporary folder of this environment alone
        os.chmod(parent, 0o711)


def _give_away(folder: str, user: str) -> None:
    """Makes another user the owner of a folder and what is in it."""
    owner = group = 0
    if user.isdigit():
        owner = group = int(user)
    else:
        entry = pwd.getpwnam(user)
        owner = entry.pw_uid
        group = entry.pw_gid
    for path in (folder, *Path(folder).iterdir()):
        os.chown(path, owner, group)


if __name__ == "__main__":
    AgentEnvironment.cli()
