"""Which policy versions sampled a row: asked of the inference servers, which note every completion, never guessed.

`AtroposSource` tags the rows of each pulled batch here, before they are kept or dropped for their age.
"""

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import requests
from pydantic import ValidationError

from trl_atropos.protocol import ROUTE_PREFIX, VersionsQuery, VersionsReply, completion_key
from trl_atropos.rollouts.schema import Row

logger = logging.getLogger(__name__)

Span = tuple[int, int]  # the policy versions at a completion's first and at its last token


class VersionBook:
    """
    Args:
        urls: of all inference servers, without `/v1`; each row may come from any of them.
        token: the control token.
        timeout: seconds that a server may take to answer. One that does not, or does not know the question, makes its
            rows unknown, and is warned about once.
    """

    def __init__(self, urls: Sequence[str], token: str, timeout: float):
        self._urls = [url.rstrip("/") for url in urls]
        self._token = token
        self._timeout = timeout
        self._warned: set[str] = set()

    def tag(self, rows: list[Row]) -> None:
        """
        Sets `policy_version` and `newest_version` of each row: the oldest version that sampled any token of it, and
        the version at its last sampled token. Both are None if a turn of it is unknown: its log-probabilities are
        missing, something has changed it on its way, or another server sampled it.
        """
        turns = [turn_keys(row) for row in rows]
        spans = self._spans({key for keys in turns for key in keys or ()})
        for row, keys in zip(rows, turns, strict=True):
            found = [spans[key] for key in keys if key in spans] if keys else []
            known = bool(keys) and len(found) == len(keys)
            row.policy_version = min(begun for begun, _ in found) if known else None
            row.newest_version = found[-1][1] if known else None

    def _spans(self, keys: Iterable[bytes]) -> dict[bytes, Span]:
        """What the servers together know of `keys`. Of a key that two of them know, the older versions."""
        asked = list(keys)
        if not asked or not self._urls:
            return {}
        body = VersionsQuery(keys=[key.hex() for key in asked]).model_dump_json()
        with ThreadPoolExecutor(len(self._urls)) as pool:
            answers = list(pool.map(lambda url: self._ask(url, body, len(asked)), self._urls))
        spans: dict[bytes, Span] = {}
        for answer in answers:
            for key, span in zip(asked, answer):
                if span is not None:
                    known = spans.get(key, span)
                    spans[key] = (min(known[0], span[0]), min(known[1], span[1]))
        return spans

    def _ask(self, url: str, body: str, count: int) -> Sequence[Span | None]:
        """One server's answer; nothing if it gives none."""
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/json"}
        try:
            # A connection of its own, since a server may close an idle one just as it is used again.
            with requests.Session() as session:
                session.trust_env = False  # a proxy of the environment must not see the token
                reply = session.post(
                    f"{url}{ROUTE_PREFIX}/versions", data=body, headers=headers, timeout=self._timeout
                )
            if reply.status_code != 200:
                return self._warn(url, f"it answered {reply.status_code} {reply.text[:200]!r}")
            versions = VersionsReply.model_validate_json(reply.content).versions
        except requests.RequestException as problem:
            return self._warn(url, f"{type(problem).__name__}: {problem}")
        except ValidationError:
            return self._warn(url, f"it answered {reply.text[:200]!r}")
        return versions if len(versions) == count else self._warn(url, f"{len(versions)} answers to {count} questions")

    def _warn(self, url: str, problem: str) -> Sequence[Span | None]:
        if url not in self._warned:
            self._warned.add(url)
            logger.warning(
                "The server at %s does not tell which policy versions sampled its rollouts, so their age is unknown "
                "(%s). Start it with `trl-atropos serve` of the version that the trainer has, with the same token. "
                "This is said once.",
                url,
                problem,
            )
        return ()


def turn_keys(row: Row) -> list[bytes] | None:
    """The key of each turn of a row: of each stretch of trained tokens, with all that comes before it as its prompt.
    None if a trained token has no log-probability."""
    edges = np.flatnonzero(np.diff(row.mask, prepend=False, append=False))
    sequence = np.concatenate([row.prompt_ids, row.completion_ids])
    offset = len(row.prompt_ids)
    keys = []
    for begin, end in edges.reshape(-1, 2).tolist():
        logprobs = row.logprobs[begin:end]
        if np.isnan(logprobs).any():
            return None
        keys.append(completion_key(sequence[: offset + begin], sequence[offset + begin : offset + end], logprobs))
    return keys
