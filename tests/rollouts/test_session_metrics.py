"""Counts of sessions are those since the last log, also if a server was started anew."""

from types import SimpleNamespace

from trl_atropos.errors import ServerError
from trl_atropos.rollouts.session_metrics import SessionMetrics


class Client:
    """Tells the counts of each call in turn. `None`: the server is gone."""

    def __init__(self, url: str, *counts: dict[str, int] | None):
        self.url = url
        self.counts = iter(counts)

    def load(self) -> SimpleNamespace:
        counts = next(self.counts)
        if counts is None:
            raise ServerError("gone")
        return SimpleNamespace(counts=counts)


def test_counts_of_servers_are_added_up_since_last_log():
    one = Client("a", {"opened": 2, "tokens": 50}, {"opened": 3, "tokens": 60}, None)
    other = Client("b", {"opened": 1}, {"opened": 1, "marked/temperature 0": 4}, {"opened": 1})
    metrics = SessionMetrics([one, other])
    assert metrics.metrics() == {}
    metrics.read()
    assert metrics.metrics() == {"sessions/opened": 3.0, "sessions/tokens": 50.0}
    metrics.read()
    expected = {"opened": 1.0, "tokens": 10.0, "marked_temperature_0": 4.0}
    assert metrics.metrics() == {f"sessions/{name}": value for name, value in expected.items()}
    metrics.read()
    assert set(metrics.metrics().values()) == {0.0}


def test_sessions_before_the_run_do_not_count():
    metrics = SessionMetrics([Client("a", {"opened": 5, "lost": 1}, {"opened": 7, "lost": 1})])
    metrics.begin()
    assert metrics.metrics() == {}
    metrics.read()
    assert metrics.metrics() == {"sessions/opened": 2.0}


def test_server_started_anew_counts_from_nothing():
    metrics = SessionMetrics([Client("a", {"opened": 5, "tokens": 9}, {"opened": 2, "tokens": 3})])
    metrics.read()
    metrics.metrics()
    metrics.read()
    assert metrics.metrics() == {"sessions/opened": 2.0, "sessions/tokens": 3.0}
