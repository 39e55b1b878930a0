"""The Atropos environment of a `verifiers` entry (docs/other-environments.md): each episode is one
of a taskset of verifiers, whose client is a session's URL.

`environment_site/run.py` runs this file as a script. The taskset has a process of its own, in the
interpreter that the entry names and with no variable of the run but those that the entry lists
(`verifiers_site/verifiers_worker.py`). All episodes are played in that process, side by side.
"""

import asyncio
import os
import tempfile
from typing import Any

from trl_atropos.agents.episode_environment import EpisodeEnvironment, EpisodeResult
from trl_atropos.agents.line_process import LineProcess, ProcessEnded
from trl_atropos.environment_verifiers import LOAD_TIMEOUT, VerifiersEntry, refusal_of
from trl_atropos.session_client import OpenSession

LATE = 30.0  # seconds after its time-out in which verifiers may still tidy up an episode
TASKSET_ENDED = "taskset_ended"  # its process has, in the midst of the episode
# Failures that say nothing about the policy, in the words of `verifiers_episodes.py`.
NOT_OF_THE_POLICY = (
    TASKSET_ENDED,
    "bad_score",
    "interception_error",
    "sandbox_error",
    "several_traces",
    "task_error",
    "toolset_error",
    "tunnel_error",
)


class VerifiersEnvironment(EpisodeEnvironment):
    """The environment of a `verifiers` entry."""

    name = "verifiers"
    entry_class = VerifiersEntry

    async def open(self) -> None:
        self.variables = self.entry.variables(os.environ)
        self.folder = tempfile.mkdtemp(prefix="verifiers-")
        self.restarting = asyncio.Lock()
        self.process, self.taskset = await self._start()

    async def read_tasks(self) -> list[int]:
        """Returns the places of the tasks in the taskset."""
        return list(range(self.taskset["tasks"]))

    async def run_episode(self, task: int, session: OpenSession) -> EpisodeResult:
        process = await self._living_process()
        timeout = self.entry.timeout
        request = {"task": task, "base_url": session.openai, "timeout": timeout}
        try:
            answer = await process.ask(request, timeout + LATE)
        except ProcessEnded as error:
            reason = f"Taskset {self.entry.id!r}: {error}"
            return EpisodeResult(TASKSET_ENDED, reason=reason, may_score_0=False)
        if "refusal" in answer:
            raise refusal_of(f"Task {task} of {self.entry.id!r}", answer["refusal"])
        return result_of(answer["value"])

    async def _living_process(self) -> LineProcess:
        """Returns the taskset's process, a new one if the last one has ended."""
        async with self.restarting:
            if not self.process.is_alive:
                self.process, self.taskset = await self._start()
            return self.process

    async def _start(self) -> tuple[LineProcess, dict[str, Any]]:
        """Starts a process that opens the taskset. Returns it, and what the taskset has. Raises
        `RecipeError`."""
        process = await LineProcess.start(self.entry.command, self.variables, self.folder)
        try:
            answer = await process.ask(self.entry.opening(peek=False), LOAD_TIMEOUT)
        except ProcessEnded as error:
            fields = {
                "what": f"Loading taskset {self.entry.id!r}: {error}",
                "seen": f"id: {self.entry.id}",
                "fix": "See the environment's log.",
            }
            answer = {"refusal": fields}
        if "refusal" in answer:
            await process.end()
            raise refusal_of("Environment", answer["refusal"])
        return process, answer["value"]


def result_of(value: dict[str, Any]) -> EpisodeResult:
    """Returns the result of an episode in the terms of `EpisodeEnvironment`."""
    result = EpisodeResult(parts=value["parts"], messages=value["messages"])
    if value["failure"]:
        result.outcome = value["failure"]
        result.reason = value["reason"]
        result.may_score_0 = value["failure"] not in NOT_OF_THE_POLICY
    else:
        result.score = value["score"]
    return result


if __name__ == "__main__":
    VerifiersEnvironment.cli()
