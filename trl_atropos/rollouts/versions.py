"""Which policy versions sampled a rollout: the inference servers note every completion, and are asked for it here."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from trl_atropos.errors import RolloutError, ServerError
from trl_atropos.protocol import Note, SamplingSettings, completion_key
from trl_atropos.rollouts.intake import TEMPERATURE_TOLERANCE
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.server_client import ServerClient

logger = logging.getLogger(__name__)

REFUSALS_TIMEOUT = 5.0  # seconds
REFUSALS_SHOWN = 3


@dataclass(eq=False)
class VersionBook:
    """Knows which policy versions sampled a rollout. The servers also note the sampling settings, which it checks."""

    urls: Sequence[str]  # of all inference servers, without `/v1`; a rollout may come from any of them
    token: str  # the control token
    timeout: float  # seconds; a server that takes longer or cannot tell leaves its rollouts of unknown version
    temperature: float | None = None  # at which the trainer scores tokens; None = settings are not checked

    def __post_init__(self):
        self._clients = [ServerClient(url, self.timeout, self.token) for url in self.urls]
        self._agreed: set[str | int | None] = set()  # environments that have sampled at the trainer's temperature
        self._warned: set[str | int | None] = set()  # servers and environments

    def tag(self, rollouts: list[Rollout]) -> None:
        """
        Sets `policy_version` and `newest_version` of each rollout: the oldest version that sampled any token of it,
        and the version at its last sampled token. Both are None if a turn of it is unknown: its log-probabilities are
        missing, something has changed it, or another server sampled it. Raises `RolloutError` if no rollout of an
        environment was sampled at the trainer's temperature.
        """
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

    def hold_requests(self, held: bool) -> None:
        """Lets what environments ask of the servers wait from now on, or lets it in."""
        for client in self._clients:
            with suppress(ServerError):  # a server that is gone or hangs is reported by the publisher
                client.hold(held)

    def refusals(self) -> str:
        """What the servers have refused to sample, for a run that waits for rollouts; empty if nothing was."""
        return " ".join(filter(None, map(self._refusals_of, self._clients)))

    def _refusals_of(self, client: ServerClient) -> str:
        try:
            refusals = client.refusals(REFUSALS_TIMEOUT)
        except (ServerError, ValueError):
            return ""  # a server that is gone or hangs is reported by the publisher
        if not refusals.total:
            return ""
        latest = "; ".join(
            f'{refusal.count} times, the last time {refusal.seconds_ago:.0f} s ago: "{refusal.message}"'
            for refusal in refusals.latest[:REFUSALS_SHOWN]
        )
        return (
            f"The server at {client.url} has refused {refusals.total} requests since it was started ({latest}). "
            "Correct what the environment asks for; where its prompts are too long for the server, shorten them, or "
            "give the server a larger `--max-model-len` (`vllm_args`)."
        )

    def _notes(self, keys: set[bytes]) -> dict[bytes, Note]:
        """What the servers together know of `keys`. If two of them know one, the older versions count."""
        if not keys:
            return {}
        asked = list(keys)
        with ThreadPoolExecutor(len(self.urls)) as pool:
            answers = list(pool.map(lambda client: self._ask(client, asked), self._clients))
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
                "The server at %s does not tell which policy versions sampled its rollouts, so their staleness is "
                "unknown (%s). Start it with `trl-atropos serve` of the version that the trainer has, with the same "
                "token. This is said once."
            )
            logger.warning(message, client.url, problem)
        return ()

    def _check_settings(
        self, environment: str | int | None, sampled: set[SamplingSettings], trainer: SamplingSettings
    ) -> None:
        """
        Another temperature ends the run if no rollout of the environment has had the trainer's: that spoils every
        step. Other differences are warned about once per environment.
        """
        differences = [
            {
                name: value
                for name, value in settings._asdict().items()
                if abs(value - getattr(trainer, name)) > TEMPERATURE_TOLERANCE
            }
            for settings in sorted(sampled)
        ]
        if any("temperature" not in different for different in differences):
            self._agreed.add(environment)
        wrong = [different for different in differences if different]
        if not wrong:
            return
        name = "An environment" if environment is None else f"Environment {environment}"
        if environment not in self._agreed:
            seen, ours = wrong[0]["temperature"], trainer.temperature
            remedy = f"Set `temperature: {seen:g}` in the recipe, or have" if seen > 0 else "Have"
            raise RolloutError(
                f"{name} sampled at temperature {seen:g}, as the inference server has noted with every request, and "
                f"the trainer computes log-probabilities at temperature {ours:g}. {remedy} the environment sample at "
                f"{ours:g}: where its configuration says so, its code may ask for another one in each request."
            )
        if environment not in self._warned:
            self._warned.add(environment)
            message = (
                "%s sampled some rollouts with %s, where the trainer scores every token at %s. So their "
                "log-probabilities differ even on the same weights. Leave these settings out of the environment's "
                "requests, or set them to the trainer's values. This is said once."
            )
            logger.warning(message, name, " or ".join(map(_shown, wrong[:3])), _shown(trainer._asdict()))


def _shown(settings: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def turn_keys(rollout: Rollout) -> list[bytes] | None:
    """
    The key of each turn, under which a server noted it. A turn is a run of trained tokens, and its prompt is all
    tokens before it. None if a trained token has no log-probability.
    """
    edges = np.flatnonzero(np.diff(rollout.mask, prepend=False, append=False))
    tokens = np.concatenate([rollout.prompt_ids, rollout.completion_ids])
    offset = len(rollout.prompt_ids)
    keys = []
    for begin, end in edges.reshape(-1, 2).tolist():
        logprobs = rollout.logprobs[begin:end]
        if np.isnan(logprobs).any():
            return None
        keys.append(completion_key(tokens[: offset + begin], tokens[offset + begin : offset + end], logprobs))
    return keys
