"""The trainer's connections to a server, seen from the other end by a plain socket."""

import socket
import threading
from collections.abc import Iterator

import pytest

from trl_atropos.errors import ServerError, ServerTimeout
from trl_atropos.protocol import LEASE_BEGINNING
from trl_atropos.server_client import ServerClient

WAIT = 20.0  # seconds
LEASE_RESPONSE = (
    b"HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    b"%x\r\n%s\r\n" % (len(LEASE_BEGINNING), LEASE_BEGINNING)
)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT)
        yield listener


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def accepted(listener: socket.socket) -> socket.socket:
    """Returns the next connection."""
    connection, _ = listener.accept()
    connection.settimeout(WAIT)
    return connection


def read_request(connection: socket.socket) -> bytes:
    """Returns a request with its body, which may come in two pieces: a connection that is closed
    with unread bytes is reset."""
    content = b""
    while not content.endswith(b"}"):
        content += connection.recv(4096)
    return content


def read_until_closed(connection: socket.socket) -> bytes:
    """Returns all that comes before the other side closes the connection."""
    content = b""
    while chunk := connection.recv(4096):
        content += chunk
    return content


def test_environment_proxy_is_not_used(listener, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:1")  # an address that nobody has
    client = ServerClient(url_of(listener), 0.5, "secret")
    with pytest.raises(ServerTimeout):
        client.pause()
    request = read_until_closed(accepted(listener))
    assert request.startswith(b"POST /trl_atropos/pause HTTP/1.1\r\n")
    assert b"authorization: Bearer secret\r\n" in request


def test_unanswered_call_closes_its_connection(listener):
    client = ServerClient(url_of(listener), 0.5, "secret")
    with pytest.raises(ServerTimeout, match="did not answer within 0 s while pausing") as caught:
        client.pause()
    read_until_closed(accepted(listener))  # or the server would go on for nobody
    assert caught.value is not None  # which keeps the frames of the call until here


def test_cut_answer_raises_error(listener):
    def answer() -> None:
        with accepted(listener) as connection:
            read_request(connection)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(ServerError, match=r"cannot be reached while pausing .*IncompleteRead"):
        ServerClient(url_of(listener), WAIT, "secret").pause()
    thread.join(WAIT)


def test_lease_stays_open_until_released(listener):
    client = ServerClient(url_of(listener), WAIT, "secret")
    thread = threading.Thread(target=client.hold_lease)
    thread.start()
    with accepted(listener) as connection:
        connection.recv(4096)
        connection.sendall(LEASE_RESPONSE)
        thread.join(WAIT)
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        client.hold_lease()  # does nothing: nobody would answer
        client.release_lease()
        connection.settimeout(WAIT)
        assert read_until_closed(connection) == b""
