"""Requests that another thread can end: `AtroposClient.abort`, so that a run does not wait for a reply at its end."""

import socket
import weakref
from contextlib import suppress
from typing import Any

from requests.adapters import HTTPAdapter


class AbortableAdapter(HTTPAdapter):
    """Remembers its open sockets. Mount it on a `requests.Session`."""

    def __init__(self) -> None:
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        classes = self.poolmanager.pool_classes_by_scheme
        self.poolmanager.pool_classes_by_scheme = {name: self._watched(pool) for name, pool in classes.items()}

    def _watched(self, pool: type) -> type:
        sockets = self._sockets

        class Connection(pool.ConnectionCls):
            def connect(self) -> None:
                super().connect()
                sockets.add(self.sock)

        return type(pool.__name__, (pool,), {"ConnectionCls": Connection})

    def abort(self) -> None:
        """Ends every request that is under way: it fails as if the other side had hung up."""
        for open_socket in list(self._sockets):
            with suppress(OSError):  # it is closed already
                open_socket.shutdown(socket.SHUT_RDWR)
