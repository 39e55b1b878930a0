"""An Atropos environment whose episodes are sessions: something of somebody else's runs against the
URL of a session, and what the server has kept of it is one rollout.

A kind of `environment_kinds.py` is a subclass with `open`, `tasks` and `run_episode`. This class
does the rest:

- It hands out the tasks, and knows its place among them after a restart.
- It opens a session for each episode, with the settings of the entry, and ends it behind the
  episode, whatever happened.
- It makes a group of the episodes of a task. Another episode takes the place of one that is
  dropped, up to `group_size` further ones. A group that is still not full is dropped.
- It counts what became of each episode and each sampled token (`accounting.py`).

It runs in an environment's process (`environment_site/run.py`), which we let import no torch beyond
what Atropos itself imports.
"""

import asyncio
import contextlib
import logging
import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from pydantic import Field

from trl_atropos.agents.accounting import Accounting
from trl_atropos.environment_kinds import EpisodeEntry
from trl_atropos.errors import AtroposTrainingError
from trl_atropos.privacy import close_to_others
from trl_atropos.protocol import EVALUATION_KEY, SessionReply
from trl_atropos.rollouts.episodes import NO_LOGPROB, session_episode
from trl_atropos.rollouts.wire_values import MASKED
from trl_atropos.services.environment_metrics import ALL_FAILED
from trl_atropos.session_client import OpenSession, SessionClient

logger = logging.getLogger(__name__)

# Seconds that a session outlives its episode's time, which includes the score's.
SPARE_TIME = 60.0
FIRST_EPISODES = 32  # that say, if all fail, that it is no bad luck
MOST_TOLD = 50  # different reasons of failures that are written to the log
# What became of an episode. The kinds have further words for failures of their own.
ENDED = "ended"  # it has a score
NO_CALL = "no_call"  # it never called the model: there is nothing to train
UNTRAINABLE = "untrainable"  # all that it sampled is marked (`marked_calls`)
TOO_LONG = "too_long"  # for the trainer; Atropos would drop the whole group
CANCELLED = "cancelled"  # by Atropos, which has groups enough
BROKEN = "broken"  # by an exception in this process
GROUP = "group"  # nothing is wrong with it, but its group did not become full


@dataclass
class EpisodeResult:
    """Result of `run_episode`."""

    outcome: str = ENDED  # or a word for the failure, such as `timeout`
    score: float | None = None  # None: it failed
    parts: dict[str, float] = field(default_factory=dict)  # named parts of the score, to be logged
    # What a person may want to read of it: messages for the report's page.
    messages: list[dict[str, str]] = field(default_factory=list)
    reason: str = ""  # why it failed, for people
    error: Exception | None = None  # of somebody else's code
    may_score_0: bool = True  # False: the failure says nothing about the policy


@dataclass
class Episode:
    """An episode that has ended: its result, and what the server has kept of it."""

    result: EpisodeResult
    reply: SessionReply
    item: dict[str, Any] | None  # one item of a group; None if nothing can be trained

    @property
    def is_usable(self) -> bool:
        """Returns whether the episode can be in a group."""
        return self.item is not None and self.result.score is not None

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return self.reply.counts.get("tokens", 0)

    @property
    def trained_tokens(self) -> int:
        """Sampled tokens that are trained."""
        if self.item is None:
            return 0
        masks = [self.item["masks"]]
        for branch in self.item["overrides"]["branches"]:
            masks.append(branch["masks"])
        trained = 0
        for mask in masks:
            trained += sum(value != MASKED for value in mask)
        return trained


class EpisodeConfig(BaseEnvConfig):
    """Settings that a run writes to the environment's file."""

    entry: dict[str, Any] = Field(default={}, description="The kind's entry, parsed before")
    temperature: float = Field(default=1.0, description="That of the trainer")
    seed: int = Field(default=0, description="Seed of the order of tasks")
    state_file: str | None = Field(default=None, description="Keeps how many tasks were given")


class EpisodeEnvironment(BaseEnv):
    """An environment whose episodes are sessions. See the module for what a subclass has."""

    env_config_cls = EpisodeConfig
    entry_class: ClassVar[type[EpisodeEntry]]

    @classmethod
    def cli(cls) -> None:
        close_to_others()  # this process has a token, and foreign programs run beside it
        super().cli()

    @classmethod
    def config_init(cls) -> tuple[EpisodeConfig, list[APIServerConfig]]:
        config = EpisodeConfig(
            total_steps=-1,  # as many as the trainer takes
            max_batches_offpolicy=1,
            ensure_scores_are_not_same=False,
            steps_per_eval=0,
            worker_timeout=-1,  # each episode has a time of its own
            use_wandb=False,
            wandb_name=cls.name,
            include_messages=False,  # the groups bring their own
        )
        return config, [APIServerConfig(server_type="vllm", api_key="none")]

    # ------------------------------------------------------------------- what a kind has of its own

    async def open(self) -> None:
        """Starts what the episodes need. `self.entry` has the settings by now."""

    @abstractmethod
    async def read_tasks(self) -> list[Any]:
        """Returns all tasks, in their order. Each is something that JSON has."""

    @abstractmethod
    async def run_episode(self, task: Any, session: OpenSession) -> EpisodeResult:
        """Runs one episode of a task against the session's URLs, within `self.entry.timeout`, and
        returns its result. May end the session."""

    # ------------------------------------------------------------------------------------- Atropos

    async def setup(self) -> None:
        self.entry = self.entry_class.model_validate(self.config.entry)
        servers = [server.config for server in self.server.servers]
        self.sessions = SessionClient(sorted({server.base_url for server in servers}))
        self.evaluation = None  # key of the evaluation that this process makes
        if servers[0].api_key.startswith(EVALUATION_KEY):
            self.evaluation = servers[0].api_key
        self.slots = asyncio.Semaphore(self.entry.episodes_at_once)
        self.accounting = Accounting()
        self.told: set[str] = set()  # reasons of failures that are in the log
        self.told_all = False  # whether the log says that all fail
        await self.open()
        tasks = await self.read_tasks()
        if not tasks:
            raise ValueError("There are no tasks. Correct `tasks` of the entry")
        # The evaluations of a run try the first tasks, and so do not mix them.
        is_mixed = self.evaluation is None
        seed = self.config.seed if is_mixed else None
        self.tasks = TaskOrder(tasks, seed, self.config.state_file)

    async def get_next_item(self) -> Any:
        number = len(self.tasks)
        if self.evaluation is not None and self.tasks.given == number:
            what = f"The evaluation asks for more than the {number} tasks that there are"
            raise AtroposTrainingError(what, fix=f"Set `problems: {number}`.")
        return self.tasks.next()

    async def collect_trajectories(self, item: Any) -> tuple[dict[str, list] | None, list]:
        episodes: list[Episode] = []  # all that have ended
        kept: list[Episode] = []  # those of the group
        reason = CANCELLED  # why usable ones are not sent
        try:
            kept = await self._full_group(item, episodes)
            reason = GROUP
        finally:
            self._account(episodes, kept, reason)
        if not kept:
            raise failure_of(episodes)
        return self._group_of(kept), []

    async def _full_group(self, task: Any, episodes: list[Episode]) -> list[Episode]:
        """Returns as many usable episodes of a task as a group has, or none if too many failed.
        Appends each that ends to `episodes`."""
        size = self.config.group_size
        while True:
            kept = [episode for episode in episodes if episode.is_usable]
            missing = size - len(kept)
            left = 2 * size - len(episodes)
            if missing == 0:
                return kept
            if missing > left:
                return []
            await _all_of(self._episode(task, episodes) for _ in range(missing))

    def _account(self, episodes: list[Episode], sent: list[Episode], reason: str) -> None:
        """Counts the tokens of episodes, of which some are `sent`. `reason` is why other usable
        ones are not."""
        for episode in episodes:
            if not episode.is_usable:
                self.accounting.drop_tokens(episode.result.outcome, episode.tokens)
            elif sent:
                self.accounting.send_tokens(episode.tokens, episode.trained_tokens)
            else:
                self.accounting.drop_tokens(reason, episode.tokens)
        self.accounting.write()

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Never called: an evaluation of a run goes through tasks (`problems`)."""

    # ------------------------------------------------------------------------------------ episodes

    async def _episode(self, task: Any, episodes: list[Episode]) -> None:
        """Runs one episode in a session, when there is room for it. Appends it to `episodes`."""
        query = self._query()
        async with self.slots, self.sessions.session(**query) as session:
            try:
                result = await self.run_episode(task, session)
            except BaseException as error:
                outcome = BROKEN
                if isinstance(error, asyncio.CancelledError):
                    outcome = CANCELLED
                reply = await session.end()
                episodes.append(self._judged(EpisodeResult(outcome, may_score_0=False), reply))
                raise
            reply = await session.end()
        episodes.append(self._judged(result, reply))

    def _query(self) -> dict[str, Any]:
        """Returns the fields of `protocol.SessionQuery` for an episode."""
        entry = self.entry
        settings = {"temperature": self.config.temperature}
        if entry.max_completion_tokens is not None:
            settings["max_tokens"] = entry.max_completion_tokens
        seconds = entry.timeout + SPARE_TIME
        return {
            "settings": settings,
            "evaluation": self.evaluation,
            "deadline": seconds,
            "silence": seconds,
            "max_calls": entry.max_calls,
            "max_tokens": entry.max_tokens,
            "reuse": entry.reuse,
        }

    def _judged(self, result: EpisodeResult, reply: SessionReply) -> Episode:
        """Returns an episode, after a look whether it can be trained."""
        is_evaluation = self.evaluation is not None  # of which nothing is trained
        train_marked = is_evaluation or self.entry.marked_calls == "train"
        item = session_episode(reply, train_marked=train_marked)
        if item is None and result.outcome == ENDED:
            result.outcome = UNTRAINABLE if reply.counts.get("tokens", 0) else NO_CALL
        elif item is not None and 0 < self.max_token_len <= len(item["tokens"]):
            result.outcome = TOO_LONG
            item = None
        if result.score is None and self._scores_failures() and result.may_score_0:
            result.score = 0.0
        if item is None and is_evaluation:
            item = nothing_sampled()
        self.accounting.count_episode(result.outcome)
        self._tell(result)
        self._tell_if_all_fail(result)
        return Episode(result, reply, item)

    def _tell(self, result: EpisodeResult) -> None:
        """Writes to the log why an episode failed, once for each reason."""
        if result.reason and result.reason not in self.told and len(self.told) < MOST_TOLD:
            self.told.add(result.reason)
            details = "".join(getattr(result.error, "__notes__", ()))
            logger.warning(
                "An episode has failed (%s): %s %s", result.outcome, result.reason, details
            )

    def _tell_if_all_fail(self, result: EpisodeResult) -> None:
        """Writes to the log, once, that all of the first episodes have failed. The run shows that
        line: these episodes are trained, so that nothing else would say it."""
        scores_failures = self.entry.on_failure == "score_0"
        if not scores_failures or self.accounting.failures_alone < FIRST_EPISODES or self.told_all:
            return
        self.told_all = True
        reason = " ".join((result.reason or result.outcome).split())
        logger.warning(
            "%s, %d of %d, and has the score 0 (`on_failure: score_0`). The last one: %s",
            ALL_FAILED,
            FIRST_EPISODES,
            FIRST_EPISODES,
            f"{reason.rstrip('.')}.",
        )

    def _scores_failures(self) -> bool:
        """Returns whether a failed episode has the score 0. In an evaluation, it has: its task is
        not solved."""
        return self.entry.on_failure == "score_0" or self.evaluation is not None

    def _group_of(self, episodes: list[Episode]) -> dict[str, Any]:
        """Returns the group that Atropos sends."""
        names = ("tokens", "masks", "inference_logprobs", "overrides")
        group: dict[str, Any] = {name: [] for name in (*names, "scores", "messages")}
        for episode in episodes:
            for name in names:
                group[name].append(episode.item[name])
            if episode.result.parts:
                group["overrides"][-1]["rewards"] = episode.result.parts
            group["scores"].append(episode.result.score)
            group["messages"].append(episode.result.messages)
        group["generation_params"] = {"temperature": self.config.temperature}
        return group


def nothing_sampled() -> dict[str, Any]:
    """Returns the item of an evaluation's episode of which nothing is known but its score."""
    return {
        "tokens": [0],
        "masks": [MASKED],
        "inference_logprobs": [NO_LOGPROB],
        "overrides": {"branches": []},
    }


class EpisodesFailed(AtroposTrainingError):
    """Too many episodes of a task have failed to make a group."""


def failure_of(episodes: list[Episode]) -> Exception:
    """Returns the error of a group that did not become full."""
    failed = [episode.result for episode in episodes if not episode.is_usable]
    counts = Counter(result.outcome for result in failed)
    reasons = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    what = f"{len(failed)} of {len(episodes)} episodes of a task have failed: {reasons}"
    last = failed[-1]
    error = EpisodesFailed(what, fix=f"The last one: {last.reason or last.outcome}.")
    # where `trl-atropos try` and a run's messages say that it is to be mended
    error.environment_place = getattr(last.error, "environment_place", "its entry in the recipe")
    for note in getattr(last.error, "__notes__", ()):
        error.add_note(note)
    return error


class TaskOrder:
    """
    Hands out tasks, again and again, each pass in an order of its own.

    Args:
        tasks: in the order of their file.
        seed: of the orders; None leaves them as they are.
        state_file: keeps how many were given, so that a run that is resumed goes on behind them.
    """

    def __init__(self, tasks: list[Any], seed: int | None, state_file: str | None) -> None:
        self._tasks = tasks
        self._seed = seed
        self._state_file = state_file
        self._order: list[int] = []
        self._pass = -1  # the number of the pass that `_order` belongs to
        self.given = 0
        if state_file is not None:
            with contextlib.suppress(OSError, ValueError):
                self.given = int(Path(state_file).read_text())

    def __len__(self) -> int:
        return len(self._tasks)

    def next(self) -> Any:
        """Returns the next task."""
        number, place = divmod(self.given, len(self._tasks))
        if number != self._pass:
            self._pass = number
            self._order = list(range(len(self._tasks)))
            if self._seed is not None:
                random.Random(f"{self._seed}, pass {number}").shuffle(self._order)
        self.given += 1
        self._note()
        return self._tasks[self._order[place]]

    def _note(self) -> None:
        if self._state_file is None:
            return
        new = Path(f"{self._state_file}.new")
        new.write_text(str(self.given))
        new.replace(self._state_file)  # so that it is whole whenever this process is killed


async def _all_of(calls: Iterable[Coroutine]) -> list[Any]:
    """Returns the results of calls that run side by side. If one raises, cancels the others, waits
    for their end, and raises the same."""
    tasks = []
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                tasks.append(group.create_task(call))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
