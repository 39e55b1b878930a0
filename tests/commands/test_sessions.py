"""`trl-atropos sessions` and the client of sessions, with a real server."""

import asyncio
import subprocess
import sys

import pytest

from tests.server.sessions import COMPLETIONS, Client
from trl_atropos.commands.sessions import sessions
from trl_atropos.errors import ServerError
from trl_atropos.protocol import TOKEN_VARIABLE
from trl_atropos.server_client import ServerClient
from trl_atropos.services.addresses import free_port
from trl_atropos.session_client import SessionClient

pytestmark = pytest.mark.server


@pytest.fixture
def token(server, monkeypatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, server.token)


def run(capsys, *words: str) -> str:
    sessions(list(words))
    return capsys.readouterr().out


def test_sessions_are_listed_shown_and_ended(server, token, capsys):
    client = Client(server)
    whole = {"ignore_eos": True}  # one token in 258 would be the end
    client.post(COMPLETIONS, prompt=[64, 65], n=2, max_tokens=3, **whole)
    client.post(COMPLETIONS, prompt=[64, 66], max_tokens=2, logit_bias={"5": 1}, **whole)
    shown_id = client.id[:8]
    at = ("--url", server.url)
    (line,) = [line for line in run(capsys, *at).splitlines() if line.startswith(shown_id)]
    assert line.split()[5:] == ["2", "8", "0", "open", "at", server.url]
    shown = run(capsys, "show", shown_id, *at)
    version = ServerClient(server.url, 10, server.token).info().policy_version
    assert shown.splitlines() == [
        f"0: at 0, sees 2, samples 3 (version {version}), length",
        f"  1: at 2, sees 0, samples 3 (version {version}), length",
        f"  2: at 1, sees 1, samples 2 (version {version}), length, not to be recomputed: logit_bias",
        "open: calls 2, completions 3, tokens 8, marked/logit_bias 2, context 3, in_flight 0",
    ]
    assert client.id not in run(capsys, *at) + shown
    assert run(capsys, "end", *at, shown_id) == f"Ended {shown_id}: 2 calls, 8 sampled tokens.\n"
    assert client.post().status_code == 410


@pytest.mark.parametrize(
    ("words", "token", "told"),
    [
        (["show", "nobody"], None, "0 sessions have an id that begins with 'nobody'"),
        (["list"], "wrong", f"Set {TOKEN_VARIABLE} to the token that the server was started with"),
    ],
)
def test_command_says_what_is_wrong(server, monkeypatch, words, token, told):
    monkeypatch.setenv(TOKEN_VARIABLE, token or server.token)
    with pytest.raises(SystemExit, match=told):
        sessions([*words, "--url", server.url])


def test_command_without_a_server_says_so(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "any")
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SystemExit, match=f"The server at {url} gave no answer about sessions"):
        sessions(["list", "--url", url])
    with pytest.raises(SystemExit, match="2"):
        sessions(["show"])


def test_new_session_goes_to_the_freest_server(server, token):
    """The second server is not there: no session goes to it either."""
    gone = f"http://127.0.0.1:{free_port()}"

    async def work() -> list[str]:
        client = SessionClient([f"{server.url}/v1", gone], timeout=10)
        opened = [await client.open() for _ in range(3)]
        trees = [await session.end() for session in opened]
        assert [tree.ended for tree in trees] == ["deleted"] * 3
        with pytest.raises(ServerError, match=gone):
            await SessionClient([gone], timeout=10).open()
        return [session.url for session in opened]

    assert asyncio.run(work()) == [server.url] * 3


class Loads(SessionClient):
    """A client of servers that are so busy."""

    loads = {"http://a": 3, "http://b": 0, "http://c": 1}

    async def _load(self, url: str) -> int:
        return self.loads[url]


def test_sessions_are_spread_by_load_and_by_those_just_opened():
    client = Loads(list(Loads.loads), token="any")
    chosen = []
    for _ in range(4):
        url = asyncio.run(client._freest())
        client._open[url] += 1
        chosen.append(url)
    assert chosen[0] == "http://b" and set(chosen) == {"http://b", "http://c"}


def test_session_ends_behind_its_block_whatever_happens(server, token):
    async def work():
        with pytest.raises(KeyError):
            async with SessionClient([server.url]).session(max_calls=1) as session:
                assert session.openai == f"{session.anthropic}/v1"
                raise KeyError
        return await session.read()

    assert asyncio.run(work()).ended == "deleted"


def test_client_of_sessions_imports_no_torch():
    code = "import sys, trl_atropos.session_client; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
