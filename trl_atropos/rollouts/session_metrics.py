"""Counts what the sessions of the inference servers have sampled, for a run's log
(docs/sessions.md).

`Feed` asks the servers whenever rollouts have come. A run without sessions logs nothing of it.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from trl_atropos.errors import ServerError
from trl_atropos.protocol import SESSION_METRICS
from trl_atropos.rollouts.reward_parts import Count
from trl_atropos.server_client import ServerClient, at_once


class SessionMetrics:
    """
    Counts of all sessions of some servers since the run began.

    Args:
        clients: of the servers.
    """

    def __init__(self, clients: Sequence[ServerClient]):
        self._clients = clients
        self._known: dict[str, dict[str, int]] = {}  # counts of each server, by its URL
        # Both threads of the source use what follows, and hold `_changing` to do so.
        self._changing = threading.Lock()
        self._new: Counter[str] = Counter()  # since the last call of `metrics`
        self._names: set[str] = set()  # of all counts so far

    def begin(self) -> None:
        """Begins to count: what the servers have counted before is not of this run."""
        self.read()
        with self._changing:
            self._new = Counter()
            self._names = set()

    def read(self) -> None:
        """Asks the servers. One that is gone or hangs is reported by the publisher."""

        def ask(client: ServerClient) -> None:
            with suppress(ServerError, ValueError):
                self._take(client.url, client.load().counts)

        at_once(self._clients, ask)

    def _take(self, url: str, counts: dict[str, int]) -> None:
        before = self._known.get(url, {})
        self._known[url] = counts
        if counts.get("opened", 0) < before.get("opened", 0):
            before = {}  # The server was started anew, and counts from 0.
        with self._changing:
            for name, count in counts.items():
                added = count - before.get(name, 0)
                if added:
                    self._names.add(name)
                    self._new[name] += added

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call: `sessions/opened`, `sessions/ended_REASON`, and of
        sessions that have ended `sessions/calls`, `sessions/completions`, `sessions/tokens`
        (sampled), `sessions/context` (tokens of prompts that were kept), `sessions/marked_REASON`
        (tokens that the trainer cannot compute again), `sessions/refused_REASON` (requests) and
        `sessions/reused` (answers whose sampled ids were put back). Nothing before the first
        session of the run."""
        with self._changing:
            new = self._new
            self._new = Counter()
            return {_metric(name): Count(new[name]) for name in sorted(self._names)}


def _metric(name: str) -> str:
    """Returns the name of a count as a metric: `sessions/marked_temperature_0` for
    `marked/temperature 0`."""
    return SESSION_METRICS + name.replace("/", "_").replace(" ", "_")
