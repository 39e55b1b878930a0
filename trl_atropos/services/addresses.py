"""Addresses that services listen at: free ports, and whether somebody answers."""

import contextlib
import errno
import functools
import itertools
import os
import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from random import SystemRandom
from urllib.parse import urlsplit

from trl_atropos.errors import ServiceError

HEALTH_TIMEOUT = 2.0  # seconds for one question whether a service is ready
FREE_PORTS = range(20_000, 30_000)


def trouble_at(url: str) -> str | None:
    """Returns what a URL does instead of answering 200. Returns `None` if it answers 200. Proxies
    of the environment are ignored: they do not know our 127.0.0.1."""
    address = urlsplit(url)
    kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
    connection = kind(address.hostname, address.port, timeout=HEALTH_TIMEOUT)
    try:
        connection.request("GET", address.path or "/")
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    if status == 200:
        return None
    return f"HTTP status {status}"


def port_of(url: str) -> int:
    """Returns the port of a URL, as `--port` of the service that is to answer there. Raises
    `ServiceError` if it has none."""
    with contextlib.suppress(ValueError):  # no number, or above 65,535
        port = urlsplit(url).port
        if port:
            return port
    fix = "Write it like http://127.0.0.1:8000."
    raise ServiceError(f"{url!r} names no port", url, fix, "port")


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port where nobody listens now. Hardly any other process takes it before you bind
    it: the kernel gives it to no connection by itself, and each process tries ports in an order of
    its own."""
    ports = _ports_of(os.getpid())
    for _ in FREE_PORTS:
        port = next(ports)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    what = f"all ports from {FREE_PORTS[0]} to {FREE_PORTS[-1]} on {host} are in use"
    raise ServiceError(what, fix="End what uses them.")


@functools.cache
def _ports_of(process: int) -> Iterator[int]:
    """Returns the endless order in which a process tries ports. A forked process must not go on
    where its parent is, and `random` would follow the trainer's seed."""
    order = SystemRandom().sample(FREE_PORTS, len(FREE_PORTS))
    return itertools.cycle(order)


def require_free_port(url: str, what: str, fix: str) -> None:
    """Raises `ServiceError`, with `fix`, if the service `what`, such as "the Atropos API", cannot
    listen at `url`."""
    host = urlsplit(url).hostname
    port = port_of(url)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _name, address = addresses[0]
        with socket.socket(family, kind, protocol) as probe:
            # as uvicorn: old connections do not count
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        problem = f"cannot be listened on ({error.strerror})"
        if error.errno == errno.EADDRINUSE:
            problem = "is already in use"
        seen = f"port {port} on {host} {problem}"
        message = f"{seen}, {what} cannot be started there"
        raise ServiceError(message, seen, fix, "port-taken") from error
