"""The servers of a run as one: the same call to each, and an outcome that all ranks share."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from accelerate import PartialState

from trl_atropos.errors import AttachError, ServerError, ServerTimeout
from trl_atropos.protocol import ServerInfo
from trl_atropos.weights import ranks
from trl_atropos.weights.client import ServerClient

TOKEN_TIMEOUT = 20.0  # seconds in which a server that is at work samples one token, behind many other requests too


class Servers:
    """
    Args:
        urls (`list[str]`): Base URL of each server.
        timeout (`float`): Seconds that a server may take for any one step of a publish.
        token (`str`, *optional*): Control token; defaults to `TRL_ATROPOS_TOKEN`.
        client (`type`): How to talk to them.

    Attributes:
        clients (`list[ServerClient]`): Those that this rank talks to: rank 0 to all, or with `one_per_rank` each rank
            to one of its own.
        infos (`list[ServerInfo]`): What each of `clients` is.
        info (`ServerInfo`): What the first server is, on every rank.
    """

    def __init__(
        self, urls: list[str], timeout: float, token: str | None = None, client: type[ServerClient] = ServerClient
    ):
        self.urls = urls
        self.timeout = timeout
        self._token = token
        self._client = client
        self.one_per_rank = False
        self.clients: list[ServerClient] = []
        self.infos: list[ServerInfo] = []
        self.info: ServerInfo | None = None

    def connect(self, one_per_rank: bool = False) -> None:
        """Asks every server what it is. Raises `AttachError` if there are not as many as needed."""
        state = PartialState()
        self.one_per_rank = one_per_rank
        if one_per_rank and len(self.urls) != state.num_processes:
            raise AttachError(
                f"Every process trains the memory of a server of its own, but there are {state.num_processes} "
                f"processes and {len(self.urls)} servers: list one URL per process in `vllm_server_base_url`, or "
                f"start `--num_processes {len(self.urls)}`."
            )
        urls = self.urls if state.is_main_process else []
        if one_per_rank:
            urls = [self.urls[state.process_index]]
        self.clients = [self._client(url, self.timeout, self._token) for url in urls]
        self.infos = self.each(lambda client: client.info())
        self.info = ranks.on_main(lambda: self.infos[0])

    def each(self, call: Callable[[ServerClient], Any]) -> list[Any]:
        """Results of `call` for this rank's clients, at the same time. An error anywhere is raised on all ranks."""
        return ranks.together(lambda: self.each_here(call))

    def each_here(self, call: Callable[[ServerClient], Any]) -> list[Any]:
        """The same, between no ranks."""
        if len(self.clients) < 2:
            return [call(client) for client in self.clients]
        with ThreadPoolExecutor(len(self.clients)) as pool:
            calls = [pool.submit(call, client) for client in self.clients]
        return [done.result() for done in calls]

    def silence(self) -> list[str]:
        """Asks every server of the run for one token. Returns what is wrong with those that give none."""
        clients = [self._client(url, min(self.timeout, TOKEN_TIMEOUT), self._token) for url in self.urls]
        with ThreadPoolExecutor(len(clients)) as pool:
            return [told for told in pool.map(_why_silent, clients) if told]

    def hold_leases(self) -> None:
        """Also makes sure that the servers are still those of `connect`."""
        self.each(lambda client: client.hold_lease())
        for before, now in zip(self.infos, self.each(lambda client: client.info()), strict=True):
            if now.instance != before.instance:
                raise ServerError(
                    f"The server at {self.urls[0]} was restarted since this trainer was built, so that what they "
                    "shared is gone: build the trainer again (its last checkpoint can be resumed)."
                )

    def release_leases(self) -> None:
        """On this rank only: called where other ranks may not come along."""
        for client in self.clients:
            client.release_lease()


def _why_silent(client: ServerClient) -> str:
    """Why a server samples no token; empty if it does."""
    try:
        client.sample([0], 1, temperature=1.0, phase="sampling one token")
    except ServerTimeout:
        return (
            f"The server at {client.url} did not sample one token within {client.timeout:g} s: it hangs or is "
            "overloaded, and environments wait for it. Look at its log; if it hangs, end it, and resume the run from "
            "its last checkpoint."
        )
    except ServerError as error:
        return str(error)
    return ""
