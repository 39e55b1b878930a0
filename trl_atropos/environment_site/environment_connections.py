"""Makes Atropos' clients keep their connections.

Atropos opens a connection for each request to an inference server and to the API, and closes it
behind the answer. A group of short rollouts has two of them, and opening them takes a quarter of
the environment's time. Here, requests of one event loop take a connection that is open and idle, if
there is one.

Standard library and what Atropos itself imports only.
"""

import asyncio
import sys

import aiohttp

# Seconds after which an idle connection is closed. Less than the 5 after which uvicorn, on which
# vLLM's servers and the API run, closes it: a request that is sent just then would be lost.
IDLE = 2.0


class KeptConnections:
    """Stands in for the module `aiohttp`. Sessions that are opened by it leave their connections to
    the next ones."""

    def __getattr__(self, name):
        return getattr(aiohttp, name)

    def ClientSession(self, **options):
        return aiohttp.ClientSession(connector=_connector(), connector_owner=False, **options)


def keep_connections(base):
    """Makes `base`, Atropos' `BaseEnv`, keep its connections to the API."""
    sys.modules[base.__module__].aiohttp = KeptConnections()


def _connector():
    """Returns what keeps the connections of this event loop, and lives as long as it."""
    loop = asyncio.get_running_loop()
    if not hasattr(loop, "trl_atropos_connector"):
        # as many connections as there are requests, as with sessions of their own
        loop.trl_atropos_connector = _Connector(limit=0, keepalive_timeout=IDLE)
    return loop.trl_atropos_connector


class _Connector(aiohttp.TCPConnector):
    def __del__(self, *_):
        """Says nothing: the last idle connections end with the process."""
