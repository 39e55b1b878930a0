"""From groups to rollouts that the trainer can use, tagged with the policy versions that sampled
them: the inference servers note every completion, and are asked for it here. What cannot be used is
left out and counted.

`AtroposSource` and `ReplaySource` each have one `Intake`. A `RejectedGroup` is dropped and counted:
one bad group must not end a run of days. If most groups of an environment are rejected for a reason
that only the user can correct, a `RolloutError` ends the run.
"""

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trl_atropos.errors import RolloutError, ServerError
from trl_atropos.protocol import Note, SamplingSettings, completion_key
from trl_atropos.rollouts.api import label_of
from trl_atropos.rollouts.rollout import Rollout, group_statistics
from trl_atropos.rollouts.wire import RejectedGroup, ScoredGroup
from trl_atropos.server_client import ServerClient, at_once

logger = logging.getLogger(__name__)

SingleRowGroups = Literal["refuse", "raw", "zero"]

TEMPERATURE_TOLERANCE = 1e-6
# of an environment; if most of them are rejected for one reason, its settings are wrong
LAST_GROUPS = 32
ENOUGH_GROUPS = 8  # fewer say nothing
REJECTED, TOO_LONG, UNTRAINED, EVALUATION = REASONS = (
    "rejected",
    "too_long",
    "untrained",
    "evaluation",
)
"""Why a rollout is left out: its group is malformed, it has too many tokens, its mask leaves none
to train on, or the environment marked its group as an evaluation."""


@dataclass(eq=False)
class Intake:
    """
    Turns groups into rollouts. One thread may admit groups while another asks for the metrics.

    Args:
        max_sequence_length: longest prompt plus completion that the trainer takes, in tokens.
        temperature: the sampling temperature by which the trainer divides its logits.
        single_row_groups: what to do with a group of one, which has no mean to compare with:
            `"refuse"` raises, `"raw"` takes the score as the advantage, `"zero"` sets the advantage
            to 0.
        vocab_size: how many token ids the model knows; None = token ids are not checked.
        names: of environments by their numbers.
    """

    max_sequence_length: int
    temperature: float
    single_row_groups: SingleRowGroups
    vocab_size: int | None = None
    names: Callable[[], Mapping[int, str]] = dict

    def __post_init__(self):
        self.next_group = 0  # number of the next group
        # By environment, of each of its last groups, for which of the reasons that end a run it was
        # rejected.
        self._recent: defaultdict[int | None, deque[str]] = defaultdict(
            lambda: deque(maxlen=LAST_GROUPS)
        )
        self._warned: set[str] = set()
        self._counts: Counter[str] = Counter()  # of the whole run
        self._reported: Counter[str] = Counter()  # what `metrics` has returned of them

    @property
    def total_dropped(self) -> Counter[str]:
        """Rollouts that were left out so far, by reason."""
        return Counter({reason: self._counts[reason] for reason in REASONS})

    def admit(self, groups: Iterable[ScoredGroup | RejectedGroup]) -> list[Rollout]:
        """The usable rollouts of `groups`, in order. A bad group is dropped, counted, and warned
        about once per kind. Raises `RolloutError` if most groups of an environment are bad for one
        reason that the user has to correct."""
        rollouts: list[Rollout] = []
        names = self.names()
        for group in groups:
            label = label_of(group.env_id, names)
            rejection = None
            try:
                if isinstance(group, RejectedGroup):
                    raise group
                if group.group_overrides.evaluation:
                    self._counts[EVALUATION] += group.size
                    continue
                rollouts += self._admit_group(group, label, names.get(group.env_id))
            except RejectedGroup as error:
                rejection = error
                self._counts.update({"groups": 1, REJECTED: group.size})
                message = "Dropped a group that cannot be trained on: %s (environment %s)."
                self._warn_once(error.kind, message, error, label)
            self._end_if_most_are_rejected(group.env_id, rejection, label)
        return rollouts

    def _end_if_most_are_rejected(
        self, env_id: int | None, rejection: RejectedGroup | None, label: str
    ) -> None:
        """Notes a group that came in, and raises `RolloutError` if most of the environment's last
        groups were rejected as it was. A single one is an accident."""
        ends_runs = rejection is not None and bool(rejection.fix)
        recent = self._recent[env_id]
        recent.append(rejection.kind if ends_runs else "")
        if not ends_runs or len(recent) < ENOUGH_GROUPS:
            return
        count = recent.count(rejection.kind)
        if 2 * count > len(recent):
            what = (
                f"Of the last {len(recent)} groups of environment {label}, {count} cannot be "
                "trained on"
            )
            raise RolloutError(f"{what}: {rejection}", fix=rejection.fix)

    def _admit_group(
        self, group: ScoredGroup, label: str, environment: str | None
    ) -> list[Rollout]:
        rollouts = self.rollouts_of(group, label)
        lengths = [len(tokens) for tokens in group.tokens]
        too_long = sum(length > self.max_sequence_length for length in lengths)
        untrained = len(lengths) - len(rollouts) - too_long
        if too_long:
            message = (
                "Dropped a rollout of %d tokens from environment %s: at most %d fit. Sample "
                "shorter ones."
            )
            self._warn_once("too long", message, max(lengths), label, self.max_sequence_length)
        if untrained:
            message = "Dropped a rollout from environment %s: its mask leaves no token to train on."
            self._warn_once("untrained", message, label)
        for rollout in rollouts:
            rollout.group, rollout.arrived, rollout.environment = (
                self.next_group,
                time.time(),
                environment,
            )
            if not rollout.sft:
                self._counts["tokens"] += int(rollout.mask.sum())
                self._counts["unknown"] += int(np.isnan(rollout.logprobs[rollout.mask]).sum())
        self.next_group += bool(rollouts)
        self._counts.update({TOO_LONG: too_long, UNTRAINED: untrained})
        return rollouts

    def rollouts_of(self, group: ScoredGroup, label: str) -> list[Rollout]:
        """
        The rollouts of one group, in its order. Those that are too long or have no trained token
        are left out; their scores still count in the group's mean and standard deviation. Messages
        call the environment `label`.

        Raises:
            RejectedGroup: this group cannot be trained on: unknown token ids, another temperature,
                images, placeholder tokens, or a group of one under `"refuse"`.
        """
        _refuse(group, label, self.temperature, self.vocab_size)
        # Token-level advantages are final, and supervised rollouts have none: such a group of one
        # needs no mean.
        single = len(group.tokens) == 1 and group.advantages[0] is None and not group.asks("sft", 0)
        if single and self.single_row_groups == "refuse":
            reason = (
                f"environment {label} sent a group of 1 rollout, which has no group mean to "
                "compare its score "
            )
            fix = (
                "Set `single_row_groups` to 'raw' (the score is the advantage) or 'zero' (do not "
                "learn from it), or "
            )
            fix += "give the environment a `group_size` of at least 2."
            raise RejectedGroup(f"{reason}({group.scores[0]}) with", "group of one", fix)
        mean, std = group_statistics(group.scores)
        fitting = [
            i for i, tokens in enumerate(group.tokens) if len(tokens) <= self.max_sequence_length
        ]
        rollouts = [
            rollout for i in fitting if (rollout := _rollout(group, i, mean, std)) is not None
        ]
        for rollout in rollouts if single else []:
            rollout.raw_advantage = self.single_row_groups == "raw"
            rollout.group_mean = 0.0 if rollout.raw_advantage else mean
            rollout.zero_advantage |= self.single_row_groups == "zero"
        return rollouts

    def _warn_once(self, kind: str, message: str, *values: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(message + " Later ones are only counted in the metrics.", *values)

    def metrics(self) -> dict[str, float]:
        """Counts since the last call: `rollouts/rejected_groups`; of rollouts,
        `rollouts/dropped_rejected`, `_too_long`, `_untrained` and `_evaluation`; and
        `rollouts/unknown_logprobs`, the share of trained tokens whose log-probability the
        environment did not send (left out when no token came in)."""
        counts = self._counts.copy()
        new = counts - self._reported
        self._reported = counts
        metrics = {"rollouts/rejected_groups": float(new["groups"])}
        metrics |= {f"rollouts/dropped_{reason}": float(new[reason]) for reason in REASONS}
        if new["tokens"]:
            metrics["rollouts/unknown_logprobs"] = new["unknown"] / new["tokens"]
        return metrics


def _rollout(group: ScoredGroup, i: int, mean: float, std: float) -> Rollout | None:
    """Rollout `i` of the group, or None if it has no token to train on."""
    trained = np.flatnonzero(group.trained[i])
    # the first token has nothing before it to be predicted from
    if not len(trained) or trained[-1] == 0:
        return None
    first = max(1, int(trained[0]))
    # A masked tail changes no loss, and TRL would take a completion that does not end in EOS for a
    # truncated one.
    part = slice(first, int(trained[-1]) + 1)
    mask = group.trained[i][part]
    logprobs = group.logprobs[i]
    advantages = group.advantages[i]
    teacher_ids = group.distill_ids[i]
    teacher_logprobs = group.distill_logprobs[i]
    distil = teacher_ids is not None and bool((teacher_ids[part] >= 0).any())
    sft = group.asks("sft", i)
    known = logprobs is not None and not sft
    return Rollout(
        prompt_ids=group.tokens[i][:first],
        completion_ids=group.tokens[i][part],
        mask=mask,
        logprobs=np.where(
            mask, logprobs[part] if known else np.float32(np.nan), np.float32(np.nan)
        ),
        score=group.scores[i],
        group_mean=mean,
        group_std=std,
        token_advantages=advantages[part].astype(np.float32)
        if advantages is not None and not sft
        else None,
        zero_advantage=group.asks("set_advantage_to_zero", i),
        env_id=group.env_id,
        sft=sft,
        distill_ids=teacher_ids[part] if distil else None,
        distill_logprobs=teacher_logprobs[part] if distil else None,
        messages=group.messages[i],
    )


def _refuse(group: ScoredGroup, label: str, temperature: float, vocab_size: int | None) -> None:
    """Raises `RejectedGroup` if a well-formed group has something that this trainer cannot train
    on."""
    if _has_content(group.images):
        reason = (
            f"environment {label} sent `images`, and training is text only: the policy would "
            "not see them"
        )
        raise RejectedGroup(reason, "images", "Use an environment that sends no images.")
    # Atropos sends 0, 1, 2, ... for every rollout when the inference server gives it no token ids.
    length = len(group.tokens[0])
    placeholder = np.arange(length)
    if (
        len(group.tokens) > 1
        and length > 1
        and all(np.array_equal(ids, placeholder) for ids in group.tokens)
    ):
        reason = (
            f"environment {label} sent placeholder tokens (0 to {length - 1}) in all its rollouts: "
        )
        fix = "Sample through a managed server with `--openai.server_type vllm`, and unset "
        fix += "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER."
        raise RejectedGroup(
            f"{reason}its inference server gives no token ids", "placeholder tokens", fix
        )
    of_teachers = [ids for ids in group.distill_ids if ids is not None]
    highest = max(int(ids.max(initial=0)) for ids in [*group.tokens, *of_teachers])
    # beyond the embedding: torch would end the trainer
    if vocab_size is not None and highest >= vocab_size:
        reason = (
            f"environment {label} sent token id {highest}, and the model knows {vocab_size} "
            "ids (0 to "
        )
        fix = (
            "The environment's tokenizer is not the model's: start the environment on the "
            "tokenizer of the trained "
        )
        fix += "model (`--env.tokenizer_name`)."
        raise RejectedGroup(f"{reason}{vocab_size - 1})", "unknown tokens", fix)
    # The ratio between trainer and sampler is only right if both divide their logits by the same
    # temperature.
    trainer = f"and the trainer computes log-probabilities at temperature {temperature}"
    for seen in (asked.temperature for asked in (group.group_overrides, *group.overrides)):
        if seen is not None and abs(seen - temperature) > TEMPERATURE_TOLERANCE:
            reason = f"environment {label} sampled at temperature {seen} (an override), {trainer}"
            raise RejectedGroup(reason, "temperature")
    seen = group.generation_params.temperature
    if seen is not None and abs(seen - temperature) > TEMPERATURE_TOLERANCE:
        fix = (
            f"Set `temperature: {seen}` in the recipe, or sample at {temperature} in the "
            "environment."
        )
        reason = f"environment {label} sampled at temperature {seen}, {trainer}"
        raise RejectedGroup(reason, "temperature in `generation_params`", fix)


def _has_content(images: Any) -> bool:
    """Whether `images` has anything but empty lists, at any depth."""
    left = [images]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif value:
            return True
    return False


# --------------------------------------------------------------- which policy versions sampled them

REFUSALS_TIMEOUT = 5.0  # seconds
REFUSALS_SHOWN = 3


@dataclass(eq=False)
class VersionBook:
    """Knows which policy versions sampled a rollout. The servers also note the sampling settings,
    which it checks."""

    # of all inference servers, without `/v1`; a rollout may come from any of them
    urls: Sequence[str]
    token: str  # the control token
    # seconds; a server that takes longer or cannot tell leaves its rollouts of unknown version
    timeout: float
    # at which the trainer scores tokens; None = settings are not checked
    temperature: float | None = None

    def __post_init__(self):
        self._clients = [ServerClient(url, self.timeout, self.token) for url in self.urls]
        # environments that have sampled at the trainer's temperature
        self._agreed: set[str | int | None] = set()
        self._warned: set[str] = set()  # servers
        # Of each environment, the settings that were warned about.
        self._warned_of: defaultdict[str | int | None, set[str]] = defaultdict(set)

    def tag(self, rollouts: list[Rollout]) -> None:
        """Sets `policy_version` and `newest_version` of each rollout: the oldest version that
        sampled any token of it, and the version at its last sampled token. Both are None if a turn
        of it is unknown: its log-probabilities are missing, something has changed it, or another
        server sampled it. Raises `RolloutError` if no rollout of an environment was sampled at the
        trainer's temperature."""
        if not self.urls:
            return
        turns = [turn_keys(rollout) for rollout in rollouts]
        notes = self._notes({key for keys in turns for key in keys or ()})
        sampled: dict[str | int | None, set[SamplingSettings]] = defaultdict(set)  # by environment
        for rollout, keys in zip(rollouts, turns, strict=True):
            found = [notes[key] for key in keys if key in notes] if keys else []
            known = bool(keys) and len(found) == len(keys)
            rollout.policy_version = min(note.span[0] for note in found) if known else None
            rollout.newest_version = found[-1].span[1] if known else None
            sampled[rollout.environment or rollout.env_id].update(note.settings for note in found)
        if self.temperature is not None:
            for environment, settings in sampled.items():
                self._check_settings(environment, settings, SamplingSettings(self.temperature))

    def hold_requests(self, held: bool, let_in: float) -> None:
        """Lets what environments ask of the servers wait from now on, or not, and lets in this
        share of what waits."""

        def hold(client: ServerClient) -> None:
            # a server that is gone or hangs is reported by the publisher
            with suppress(ServerError):
                client.hold(held, let_in)

        at_once(self._clients, hold)

    def refusals(self) -> str:
        """What the servers have refused to sample, for a run that waits for rollouts; empty if
        nothing was."""
        return " ".join(filter(None, map(self._refusals_of, self._clients)))

    def _refusals_of(self, client: ServerClient) -> str:
        try:
            refusals = client.refusals(REFUSALS_TIMEOUT)
        except (ServerError, ValueError):
            return ""  # a server that is gone or hangs is reported by the publisher
        if not refusals.total:
            return ""
        latest = "; ".join(
            f"{refusal.count} times, the last time {refusal.seconds_ago:.0f} s ago: "
            f'"{refusal.message}"'
            for refusal in refusals.latest[:REFUSALS_SHOWN]
        )
        return (
            f"The server at {client.url} has refused {refusals.total} requests since it was "
            f"started ({latest}). Correct what the environment asks for; where its prompts are too "
            "long for the server, shorten them, or give the server a larger `--max-model-len` "
            "(`vllm_args`)."
        )

    def _notes(self, keys: set[bytes]) -> dict[bytes, Note]:
        """What the servers together know of `keys`. If two of them know one, the older versions
        count."""
        if not keys:
            return {}
        asked = list(keys)
        answers = at_once(self._clients, lambda client: self._ask(client, asked))
        notes: dict[bytes, Note] = {}
        for answer in answers:
            for key, note in zip(asked, answer):
                if note is not None:
                    notes[key] = note.merged(notes.get(key, note))
        return notes

    def _ask(self, client: ServerClient, keys: list[bytes]) -> Sequence[Note | None]:
        """The answer of one server; empty if it gives none."""
        try:
            notes = client.versions(keys)
            if len(notes) == len(keys):
                return notes
            problem = f"it answered for {len(notes)} of {len(keys)} completions"
        except (ServerError, ValueError) as error:
            problem = str(error)
        if client.url not in self._warned:
            self._warned.add(client.url)
            message = (
                "The server at %s does not tell which policy versions sampled its rollouts, so "
                "their staleness is unknown (%s). Start it with `trl-atropos serve` of the version "
                "that the trainer has, with the same token. This is said once."
            )
            logger.warning(message, client.url, problem)
        return ()

    def _check_settings(
        self,
        environment: str | int | None,
        sampled: set[SamplingSettings],
        trainer: SamplingSettings,
    ) -> None:
        """Raises `RolloutError` if no rollout of the environment was sampled at the trainer's
        temperature, which would spoil every step. Warns about other differences, once for each
        setting of an environment."""
        differences = [_difference(settings, trainer) for settings in sorted(sampled)]
        if any("temperature" not in different for different in differences):
            self._agreed.add(environment)
        wrong = [different for different in differences if different]
        if not wrong:
            return
        name = "An environment" if environment is None else f"Environment {environment}"
        if environment not in self._agreed:
            seen = wrong[0]["temperature"]
            ours = trainer.temperature
            remedy = f"Set `temperature: {seen:g}` in the recipe, or have" if seen > 0 else "Have"
            raise RolloutError(
                f"{name} sampled at temperature {seen:g}, as the inference server has noted with "
                "every request, and the trainer computes log-probabilities at temperature "
                f"{ours:g}. {remedy} the environment sample at {ours:g}: where its configuration "
                "says so, its code may ask for another one in each request."
            )
        warned_of = self._warned_of[environment]
        new = [different for different in wrong if not different.keys() <= warned_of]
        if new:
            warned_of.update(*new)
            message = (
                "%s sampled some rollouts with %s, where the trainer scores every token at %s and "
                "masks none. So their log-probabilities differ even on the same weights. Leave "
                "these settings out of the environment's requests, or set them to the trainer's "
                "values. This is said once for each setting."
            )
            logger.warning(
                message, name, " or ".join(map(_shown, new[:3])), _shown(trainer.numbers())
            )


def _difference(settings: SamplingSettings, trainer: SamplingSettings) -> dict[str, float | None]:
    """Returns the settings that are not the trainer's, by name: numbers with their values, other
    fields with None."""
    different: dict[str, float | None] = {}
    for name, value in settings.numbers().items():
        if abs(value - getattr(trainer, name)) > TEMPERATURE_TOLERANCE:
            different[name] = value
    for name in settings.reshaped_by:
        different[name] = None
    return different


def _shown(settings: Mapping[str, float | None]) -> str:
    return ", ".join(
        name if value is None else f"{name} {value:g}" for name, value in settings.items()
    )


def turn_keys(rollout: Rollout) -> list[bytes] | None:
    """The key of each turn, under which a server noted it. A turn is a run of trained tokens, and
    its prompt is all tokens before it. None if a trained token has no log-probability."""
    edges = np.flatnonzero(np.diff(rollout.mask, prepend=False, append=False))
    tokens = np.concatenate([rollout.prompt_ids, rollout.completion_ids])
    offset = len(rollout.prompt_ids)
    keys = []
    for begin, end in edges.reshape(-1, 2).tolist():
        logprobs = rollout.logprobs[begin:end]
        if np.isnan(logprobs).any():
            return None
        keys.append(
            completion_key(
                tokens[: offset + begin], tokens[offset + begin : offset + end], logprobs
            )
        )
    return keys
