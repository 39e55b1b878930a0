"""The source's requests to the inference servers: which policy versions sampled a rollout
(`VersionBook`), and when environments may sample (`RequestGate`).

The servers note every completion that they sample. `feed.Feed` asks for these notes when
rollouts have come. `pull.py` closes the gate before a batch comes, and `Feed` opens it when the
policy is new.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from trl_atropos.errors import RolloutError, ServerError
from trl_atropos.protocol import Note, SamplingSettings, completion_key
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.session_metrics import SessionMetrics
from trl_atropos.server_client import ServerClient, at_once

logger = logging.getLogger(__name__)

TOLERANCE = 1e-6  # between two equal sampling settings
REFUSALS_TIMEOUT = 5.0  # seconds
REFUSALS_SHOWN = 3
SETTINGS_SHOWN = 3

EnvironmentLabel = str | int | None
"""An environment's name, or else its number at the API, or None."""


def settings_differ(sampled: float, trainer: float) -> bool:
    """Returns whether a sampling setting, such as the temperature, is not the trainer's.

    The ratio between trainer and sampler is right only if both divide their logits by the same
    temperature.
    """
    return not abs(sampled - trainer) <= TOLERANCE  # true if one of them is nan


@dataclass(eq=False)
class VersionBook:
    """
    Knows which policy versions sampled a rollout, and checks the sampling settings, which the
    servers note too.

    Args:
        urls: all inference servers, without `/v1`. A rollout may come from any of them.
        token: the control token.
        timeout: seconds for one request. If a server takes longer or does not know a rollout, its
            versions are unknown.
        temperature: at which the trainer scores tokens; None = settings are not checked.
    """

    urls: Sequence[str] = ()
    token: str = ""
    timeout: float = 0.0
    temperature: float | None = None

    def __post_init__(self):
        self._clients = [ServerClient(url, self.timeout, self.token) for url in self.urls]
        self.sessions = SessionMetrics(self._clients)
        # environments that have sampled at the trainer's temperature
        self._agreed: set[EnvironmentLabel] = set()
        self._warned_servers: set[str] = set()
        # the settings that the log has warned about, by environment
        self._warned_settings: defaultdict[EnvironmentLabel, set[str]] = defaultdict(set)

    def tag(self, rollouts: list[Rollout]) -> None:
        """
        Sets `policy_version` and `newest_version` of each rollout: the oldest and the newest
        version that sampled any token of it.

        Both are None if one of its turns is unknown: its log-probabilities are missing, something
        has changed it, or another server sampled it.

        Raises:
            RolloutError: no rollout of an environment was sampled at the trainer's temperature.
        """
        if not self.urls:
            return
        keys_of_rollouts = [turn_keys(rollout) for rollout in rollouts]
        all_keys: set[bytes] = set()
        for keys in keys_of_rollouts:
            all_keys.update(keys)
        notes = self._notes(all_keys)
        settings_of: dict[EnvironmentLabel, set[SamplingSettings]] = defaultdict(set)
        for rollout, keys in zip(rollouts, keys_of_rollouts, strict=True):
            turn_notes = [notes[key] for key in keys if key in notes]
            rollout.policy_version = None
            rollout.newest_version = None
            if keys and len(turn_notes) == len(keys):
                rollout.policy_version = min(note.span[0] for note in turn_notes)
                rollout.newest_version = max(note.span[1] for note in turn_notes)
            label = rollout.environment or rollout.env_id
            for note in turn_notes:
                settings_of[label].add(note.settings)
        if self.temperature is None:
            return
        trainer = SamplingSettings(self.temperature)
        for label, settings in settings_of.items():
            self._check_settings(label, settings, trainer)

    def hold_requests(self, held: bool, let_in: float) -> None:
        """Holds new sampling requests (`held`) and admits a fraction (`let_in`) of those waiting,
        on every server."""

        def hold(client: ServerClient) -> None:
            # the publisher reports a server that is gone or hangs
            with suppress(ServerError):
                client.hold(held, let_in)

        at_once(self._clients, hold)

    def refusals(self) -> str:
        """Returns what the servers have refused to sample, for a run that waits for rollouts; empty
        if they refused nothing."""
        texts = [self._refusals_of(client) for client in self._clients]
        return " ".join(text for text in texts if text)

    def _refusals_of(self, client: ServerClient) -> str:
        try:
            refusals = client.refusals(REFUSALS_TIMEOUT)
        except (ServerError, ValueError):
            return ""  # the publisher reports a server that is gone or hangs
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
        """Returns the notes of all servers, by key. If two servers know a key, the older versions
        count."""
        if not keys:
            return {}
        key_list = list(keys)

        def ask(client: ServerClient) -> Sequence[Note | None]:
            return self._notes_of(client, key_list)

        notes: dict[bytes, Note] = {}
        for server_notes in at_once(self._clients, ask):
            for key, note in zip(key_list, server_notes):
                if note is not None:
                    notes[key] = note.merged(notes.get(key, note))
        return notes

    def _notes_of(self, client: ServerClient, keys: list[bytes]) -> Sequence[Note | None]:
        """Returns one server's note of each key, or nothing if it gives no answer."""
        try:
            notes = client.versions(keys)
            if len(notes) == len(keys):
                return notes
            problem = f"it answered for {len(notes)} of {len(keys)} completions"
        except (ServerError, ValueError) as error:
            problem = str(error)
        if client.url not in self._warned_servers:
            self._warned_servers.add(client.url)
            message = (
                "The server at %s does not tell which policy versions sampled its rollouts, so "
                "their staleness is unknown (%s). Start it with `trl-atropos serve` of the version "
                "that the trainer has, with the same token. This is said once."
            )
            logger.warning(message, client.url, problem)
        return ()

    def _check_settings(
        self,
        label: EnvironmentLabel,
        sampled: set[SamplingSettings],
        trainer: SamplingSettings,
    ) -> None:
        """Raises `RolloutError` if no rollout of the environment was sampled at the trainer's
        temperature, which would spoil every step. Warns about other differences, once for each
        setting of an environment."""
        differences = []
        for settings in sorted(sampled):
            difference = _difference(settings, trainer)
            if "temperature" not in difference:
                self._agreed.add(label)
            if difference:
                differences.append(difference)
        if not differences:
            return
        name = f"Environment {label}"
        if label is None:
            name = "An environment"
        if label not in self._agreed:
            raise _wrong_temperature(name, differences[0]["temperature"], trainer.temperature)
        warned = self._warned_settings[label]
        new = [difference for difference in differences if not difference.keys() <= warned]
        if not new:
            return
        warned.update(*new)
        message = (
            "%s sampled some rollouts with %s, where the trainer scores every token at %s and "
            "masks none. So their log-probabilities differ even on the same weights. Leave "
            "these settings out of the environment's requests, or set them to the trainer's "
            "values. This is said once for each setting."
        )
        shown = " or ".join(_shown(difference) for difference in new[:SETTINGS_SHOWN])
        logger.warning(message, name, shown, _shown(trainer.numbers()))


def _wrong_temperature(name: str, sampled: float, trainer: float) -> RolloutError:
    remedy = "Have"  # the trainer cannot score greedy samples
    if sampled > 0:
        remedy = f"Set `temperature: {sampled:g}` in the recipe, or have"
    return RolloutError(
        f"{name} sampled at temperature {sampled:g}, as the inference server has noted with "
        "every request, and the trainer computes log-probabilities at temperature "
        f"{trainer:g}. {remedy} the environment sample at {trainer:g}: where its configuration "
        "says so, its code may ask for another one in each request."
    )


def _difference(settings: SamplingSettings, trainer: SamplingSettings) -> dict[str, float | None]:
    """Returns the settings that are not the trainer's, by name: numbers with their values, other
    fields with None."""
    different: dict[str, float | None] = {}
    for name, value in settings.numbers().items():
        if settings_differ(value, getattr(trainer, name)):
            different[name] = value
    for name in settings.reshaped_by:
        different[name] = None
    return different


def _shown(settings: Mapping[str, float | None]) -> str:
    shown = []
    for name, value in settings.items():
        if value is None:
            shown.append(name)
        else:
            shown.append(f"{name} {value:g}")
    return ", ".join(shown)


def turn_keys(rollout: Rollout) -> list[bytes]:
    """
    Returns the key of each turn, under which a server noted it; none if a trained token has no
    log-probability.

    A turn is a run of trained tokens in one part of the row, and its prompt is all tokens before it
    on the part's path. For example, a rollout without branches has a prompt of 5 tokens and the
    mask `[True, False, True, True]`. It has two turns: completion tokens 0 to 1 and 2 to 4, ends
    excluded, and their prompts have 5 and 7 tokens.
    """
    row = rollout.row
    num_prompt = len(rollout.prompt_ids)
    trained = np.concatenate([np.zeros(num_prompt, bool), rollout.mask])
    logprobs = np.concatenate([np.full(num_prompt, np.nan, np.float32), rollout.logprobs])
    if np.isnan(logprobs[trained]).any():
        return []
    paths = [np.arange(len(row))]
    shared = np.zeros(1, np.int64)
    if rollout.tree is not None:
        paths = rollout.tree.paths
        shared = rollout.tree.shared
    keys = []
    for path, num_shared in zip(paths, shared.tolist()):
        is_turn = trained[path]
        is_turn[:num_shared] = False  # These are turns of the parts before it.
        # Where a turn begins or ends: 5, 6, 7, 9 in the example.
        edges = np.flatnonzero(np.diff(is_turn, prepend=False, append=False))
        for begin, end in edges.reshape(-1, 2).tolist():
            turn = path[begin:end]
            keys.append(completion_key(row[path[:begin]], row[turn], logprobs[turn]))
    return keys


@dataclass(eq=False)
class RequestGate:
    """
    Holds the sampling requests of environments at the servers, so that the next policy samples the
    next batch.

    When the API hands out a batch, environments begin to sample the next one. The gate closes
    before that, and requests wait while the trainer trains. When the policy is new, the gate lets
    in as many requests as one batch needs. Nobody opens it at the end of a run: a server lets in
    all requests when the trainer's lease ends.

    Args:
        versions: the servers.
        batch_size: rollouts per generation batch.
        enabled: False = environments may sample at any time, and the gate does nothing.
    """

    versions: VersionBook
    batch_size: int
    enabled: bool

    def __post_init__(self):
        self.policy_is_new = False  # and no waiting request has been let in since
        self._closed = False

    def close(self) -> None:
        """Holds all requests that come from now on."""
        if self.enabled and not self._closed:
            self.versions.hold_requests(True, 0.0)
            self._closed = True

    def open(self) -> None:
        """Lets in all requests, if the gate is closed."""
        if self._closed:
            self._closed = False
            self.versions.hold_requests(False, 1.0)

    def admit_next_batch(self, rollouts_waiting: int) -> None:
        """Lets in the requests for one batch if the policy is new.

        `rollouts_waiting` have been pulled and not handed out. For example, the API handed out
        three batches at once, and two of them wait here. Environments then ask for three new
        batches, and one third of these requests begins now: what begins now is trained on after
        the two batches that wait.
        """
        if self.policy_is_new and self._closed:
            batches_waiting = rollouts_waiting // self.batch_size
            self.versions.hold_requests(True, 1 / (1 + batches_waiting))
        self.policy_is_new = False
