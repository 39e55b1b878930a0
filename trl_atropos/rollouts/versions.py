"""Which policy versions sampled a rollout: asked of the inference servers, which note every completion, never guessed.

`AtroposSource` tags the rollouts of each pulled batch here, before they are kept or dropped for their staleness. The
servers also tell with which settings a completion was sampled, which `SettingsCheck` compares with those of the
trainer, and what they refused to sample.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import requests
from pydantic import ValidationError

from trl_atropos.errors import RolloutError
from trl_atropos.protocol import (
    ROUTE_PREFIX,
    Note,
    RefusalsReply,
    SamplingSettings,
    VersionsQuery,
    VersionsReply,
    completion_key,
)
from trl_atropos.rollouts.intake import TEMPERATURE_TOLERANCE
from trl_atropos.rollouts.row import Rollout

logger = logging.getLogger(__name__)

REFUSALS_TIMEOUT = 5.0  # seconds
TOLD_REASONS = 3


class VersionBook:
    """
    Args:
        urls: of all inference servers, without `/v1`; each rollout may come from any of them.
        token: the control token.
        timeout: seconds that a server may take to answer. The rollouts of one that does not, or does not know the
            question, stay of unknown version, and the log says so once.
        temperature: that the trainer scores tokens at; without it, the settings of rollouts are not compared.
    """

    def __init__(self, urls: Sequence[str], token: str, timeout: float, temperature: float | None = None):
        self._urls = [url.rstrip("/") for url in urls]
        self._token = token
        self._timeout = timeout
        self._warned: set[str] = set()
        self._settings = None if temperature is None else SettingsCheck(SamplingSettings(temperature))

    def tag(self, rollouts: list[Rollout]) -> None:
        """
        Sets `policy_version` and `newest_version` of each rollout: the oldest version that sampled any token of it,
        and the version at its last sampled token. Both are None if a turn of it is unknown: its log-probabilities are
        missing, something has changed it on its way, or another server sampled it.

        Raises:
            RolloutError: see `SettingsCheck`.
        """
        turns = [turn_keys(rollout) for rollout in rollouts]
        notes = self._notes({key for keys in turns for key in keys or ()})
        sampled: dict[str | int | None, set[SamplingSettings]] = defaultdict(set)  # by environment, named or not
        for rollout, keys in zip(rollouts, turns, strict=True):
            found = [notes[key] for key in keys if key in notes] if keys else []
            known = bool(keys) and len(found) == len(keys)
            rollout.policy_version = min(note.span[0] for note in found) if known else None
            rollout.newest_version = found[-1].span[1] if known else None
            sampled[rollout.environment or rollout.env_id].update(note.settings for note in found)
        if self._settings is not None:
            for environment, settings in sampled.items():
                self._settings.check(environment, settings)

    def refusals(self) -> str:
        """What the servers have refused to sample, for a run that waits for rollouts; empty if nothing was."""
        return " ".join(filter(None, map(self._refusals_of, self._urls)))

    def _refusals_of(self, url: str) -> str:
        try:
            reply = self._request("GET", url, "/refusals", REFUSALS_TIMEOUT)
            refusals = RefusalsReply.model_validate_json(reply.content)
        except (requests.RequestException, ValidationError):
            return ""  # it is gone or hangs, which others notice and say
        if not refusals.total:
            return ""
        told = "; ".join(
            f'{one.count} times, the last time {one.seconds_ago:.0f} s ago: "{one.message}"'
            for one in refusals.latest[:TOLD_REASONS]
        )
        return (
            f"The server at {url} has refused {refusals.total} requests since it was started ({told}). Correct what "
            "the environment asks for; where its prompts are too long for the server, shorten them, or give the "
            "server a larger `--max-model-len` (`vllm_args`)."
        )

    def _notes(self, keys: Iterable[bytes]) -> dict[bytes, Note]:
        """What the servers together know of `keys`. Of a key that two of them know, the older versions."""
        asked = list(keys)
        if not asked or not self._urls:
            return {}
        body = VersionsQuery(keys=[key.hex() for key in asked]).model_dump_json()
        with ThreadPoolExecutor(len(self._urls)) as pool:
            answers = list(pool.map(lambda url: self._ask(url, body, len(asked)), self._urls))
        notes: dict[bytes, Note] = {}
        for answer in answers:
            for key, note in zip(asked, answer):
                if note is not None:
                    notes[key] = note.merged(notes.get(key, note))
        return notes

    def _ask(self, url: str, body: str, count: int) -> Sequence[Note | None]:
        """One server's answer; nothing if it gives none."""
        try:
            reply = self._request("POST", url, "/versions", self._timeout, body)
            problem = f"it answered {reply.status_code} {reply.text[:200]!r}"
            notes = VersionsReply.model_validate_json(reply.content).notes() if reply.status_code == 200 else ()
            if len(notes) == count:
                return notes
        except requests.RequestException as error:
            problem = f"{type(error).__name__}: {error}"
        except ValidationError:
            pass
        if url not in self._warned:
            self._warned.add(url)
            logger.warning(
                "The server at %s does not tell which policy versions sampled its rollouts, so their staleness is "
                "unknown (%s). Start it with `trl-atropos serve` of the version that the trainer has, with the same "
                "token. This is said once.",
                url,
                problem,
            )
        return ()

    def _request(
        self, method: str, url: str, route: str, timeout: float, body: str | None = None
    ) -> requests.Response:
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/json"}
        # A connection of its own, since a server may close an idle one just as it is used again.
        with requests.Session() as session:
            session.trust_env = False  # a proxy of the environment must not see the token
            return session.request(method, f"{url}{ROUTE_PREFIX}{route}", data=body, headers=headers, timeout=timeout)


class SettingsCheck:
    """
    Compares what rollouts were sampled with to what the trainer assumes when it scores them.

    Another temperature ends the run where no rollout of an environment has had the right one: that is a mistake in a
    setting, and costs every step. What else differs, or only at times, is warned about once for each environment.
    """

    def __init__(self, trainer: SamplingSettings):
        self._trainer = trainer
        self._agreed: set[str | int | None] = set()  # environments that have sampled at the trainer's temperature
        self._warned: set[str | int | None] = set()

    def check(self, environment: str | int | None, sampled: set[SamplingSettings]) -> None:
        """Raises `RolloutError` for another temperature. `sampled`: of all rollouts of this environment in a batch."""
        others = sorted(settings for settings in sampled if self._differences(settings))
        if any("temperature" not in self._differences(settings) for settings in sampled):
            self._agreed.add(environment)
        if not others:
            return
        name = "An environment" if environment is None else f"Environment {environment}"
        ours = self._trainer.temperature
        if environment not in self._agreed:
            seen = others[0].temperature
            remedy = f"Set `temperature: {seen:g}` in the recipe, or have" if seen > 0 else "Have"
            raise RolloutError(
                f"{name} sampled at temperature {seen:g}, as the inference server has noted with every request, and "
                f"the trainer computes log-probabilities at temperature {ours:g}. {remedy} the environment sample at "
                f"{ours:g}: where its configuration says so, its code may ask for another one in each request."
            )
        if environment not in self._warned:
            self._warned.add(environment)
            told = " or ".join(_told(self._differences(settings)) for settings in others[:3])
            logger.warning(
                "%s sampled some rollouts with %s, where the trainer scores every token at %s. The log-probabilities "
                "of the two differ even on the same weights, and what is trained is not what was sampled. Leave these "
                "settings out of the environment's requests, or set them to the trainer's values. This is said once.",
                name,
                told,
                _told(self._trainer._asdict()),
            )

    def _differences(self, settings: SamplingSettings) -> dict[str, float]:
        return {
            name: value
            for name, value in settings._asdict().items()
            if abs(value - getattr(self._trainer, name)) > TEMPERATURE_TOLERANCE
        }


def _told(settings: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def turn_keys(rollout: Rollout) -> list[bytes] | None:
    """The key of each turn of a rollout: of each stretch of trained tokens, with all that comes before it as its
    prompt. None if a trained token has no log-probability."""
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
