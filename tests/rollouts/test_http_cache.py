"""A real Atropos API behind an HTTP cache or another proxy: no batch is trained twice, and the
advice is right."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
import requests

from tests.rollouts.conftest import Api, make_group
from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.source import AtroposSource, RunInfo

WAIT = 30.0  # seconds, for what is already on its way
LIFETIME = 0.2  # seconds that a cache keeps an answer


@contextmanager
def proxy(
    api: Api, refuses: int = 0, keeps: str = "", obeys: bool = False, by_query: bool = False
) -> Iterator[str]:
    """
    The URL of a proxy before the API.

    Args:
        refuses: a status with which it answers every request; 0 = none.
        keeps: answers to `GET`s of which paths it caches, by their beginning.
        obeys: whether it does not answer from its cache if the request says `no-cache` or
        `no-store`. by_query: whether the query is part of its key.
    """
    answers: dict[str, tuple[float, bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            key = self.path if by_query else urlsplit(self.path).path
            asked_not_to = obeys and "no-" in self.headers.get("Cache-Control", "")
            came, body = answers.get(key, (0.0, b""))
            if (
                not keeps
                or not key.startswith(keeps)
                or asked_not_to
                or time.monotonic() - came > LIFETIME
            ):
                answer = requests.get(api.url + self.path, data=self._body(), timeout=WAIT)
                body = answer.content
                answers[key] = (time.monotonic(), body)
            self._answer(body)

        def do_POST(self) -> None:
            headers = {"Content-Type": "application/json"}
            self._answer(
                requests.post(
                    api.url + self.path, data=self._body(), headers=headers, timeout=WAIT
                ).content
            )

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def _answer(self, body: bytes) -> None:
            self.send_response(refuses or 200)
            self.send_header("Location", "https://elsewhere.example/")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextmanager
def source_at(url: str, run: RunInfo, **arguments) -> Iterator[AtroposSource]:
    source = AtroposSource(url, **arguments)
    try:
        source.start(run)
        yield source
    finally:
        source.close()


def polled(source: AtroposSource, rollouts: int) -> list[Rollout]:
    rows = source.poll(rollouts, WAIT)
    assert rows is not None, source.diagnose()
    return rows


OBEDIENT = {"keeps": "/", "obeys": True}
# as nginx, which does not look at the headers of a request
BY_URL = {"keeps": "/", "by_query": True}
BATCHES_ONLY = {"keeps": "/batch"}


@pytest.mark.parametrize(
    ("cache", "told"),
    [(OBEDIENT, False), (BY_URL, False), (BATCHES_ONLY, True)],
    ids=["obedient", "by URL", "batches only"],
)
def test_rows_behind_http_cache_come_once(api, run_info, caplog, cache, told):
    """Batches come one by one, then three at once, of which the API gives out the newest first."""
    with proxy(api, **cache) as url, source_at(url, run_info()) as source:
        scores: list[float] = []
        for first in range(0, 6, 2):
            api.deliver(make_group(first, first), make_group(first + 1, first + 1))
            scores += [row.score for row in polled(source, 4)]
        api.deliver(*[make_group(score, score) for score in range(6, 12)])
        scores += [row.score for row in polled(source, 12)]
        assert scores == [score for score in range(12) for _ in range(2)]
        assert source.poll(4, 2 * LIFETIME) is None
        assert source.state()["books"] == {"trained": 24, "dropped": {}, "lost_with_api": 0}
    assert ("an HTTP cache stands before it" in caplog.text) is told


def test_equal_batches_without_cache_all_come(api, run_info, caplog):
    """One by one, three at once, and again with another between them: only the API's step tells
    them from repeats."""
    equal, other = [make_group(1, 1)] * 2, [make_group(2, 2)] * 2
    with source_at(api.url, run_info()) as source:
        for _ in range(3):
            api.deliver(*equal)
            assert len(polled(source, 4)) == 4
        for burst in (3 * equal, [*equal, *other, *equal], [*other, *equal, *other]):
            api.deliver(*burst)
            assert sorted(row.score for row in polled(source, 12)) == sorted(
                score for group in burst for score in group["scores"]
            )
        assert source.poll(4, LIFETIME) is None
        assert source.state()["books"] == {"trained": 48, "dropped": {}, "lost_with_api": 0}
    assert "HTTP cache" not in caplog.text


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (401, "asks nobody for credentials, so a proxy or another server"),
        (403, "asks nobody for credentials, so a proxy or another server"),
        (407, "asks nobody for credentials, so a proxy or another server"),
        (429, "limits nobody, so a proxy before it does: exempt this trainer"),
        (
            302,
            r"\(seen: https://elsewhere.example/\)\. Set `atropos_url` to where the API itself answers",
        ),
    ],
)
def test_proxy_answer_is_told_with_proxy_advice(
    api, run_info: Callable[..., RunInfo], status, advice
):
    with (
        proxy(api, refuses=status) as url,
        pytest.raises(RolloutError, match=f"answered {status} .*{advice}"),
        source_at(url, run_info(), start_timeout=0.1),
    ):
        pass


def test_mid_run_rate_limit_is_waited_for_then_told(api, run_info):
    with proxy(api) as url, source_at(url, run_info(), api_down_timeout=0.2) as source:
        api.deliver(make_group(1, 1), make_group(2, 2))
        polled(source, 4)
        with proxy(api, refuses=429) as limited:
            source._client.url = limited
            with pytest.raises(RolloutError, match=r"answered 429 .*exempt this trainer"):
                source.poll(4, WAIT)
