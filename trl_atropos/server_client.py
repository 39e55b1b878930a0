"""The trainer's side of HTTP to the inference servers: one method per route, each with a deadline.

`ServerClient` talks to one server, `Servers` to all servers of a run on behalf of all ranks. Every
failure is a `ServerError` that names the server, what was being done, and the way out.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from accelerate import PartialState

from trl_atropos.activity import activity
from trl_atropos.distributed import on_main, together
from trl_atropos.errors import AttachError, ServerError, ServerTimeout
from trl_atropos.protocol import (
    LEASE_BEGINNING,
    PROTOCOL_VERSION,
    ROUTE_PREFIX,
    TOKEN_VARIABLE,
    Attachment,
    EvaluationReply,
    FingerprintsReply,
    LoadReply,
    Note,
    ParameterSpec,
    RefusalsReply,
    ServerInfo,
    TraceQuery,
    VersionsQuery,
    VersionsReply,
    environment_token,
    reason_in,
)

# seconds: requests in flight are drained, and a large model takes minutes to load
RESTART_TIMEOUT = 1800.0
# seconds in which a working server samples one token, even behind many other requests
TOKEN_TIMEOUT = 20.0
LOAD_ADAPTER = "/v1/load_lora_adapter"  # vLLM's own routes, which the mode `lora` opens
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"


class Reply(NamedTuple):
    """A server's response."""

    status: int
    text: str

    @classmethod
    def read(cls, response: HTTPResponse) -> "Reply":
        return cls(response.status, response.read().decode(errors="replace"))


class ServerClient:
    """Client of one server, for calls that may take `timeout` seconds each.

    Args:
        url: of the server, without `/v1`.
        timeout: seconds.
        token: of the control routes; by default, the one in the environment.
    """

    def __init__(self, url: str, timeout: float, token: str | None = None):
        self.url = url.rstrip("/")
        self.host = urlsplit(url).hostname
        self.timeout = timeout
        self.token = environment_token() if token is None else token
        self._lease: HTTPResponse | None = None

    # --------------------------------------------------------------------- what the server knows

    def info(self) -> ServerInfo:
        """Returns the server's properties and state. Raises `ServerError` if it speaks another
        protocol."""
        reply = self._call("/info", "asking the server what it is")
        protocol = reply.get("protocol")
        if protocol != PROTOCOL_VERSION:
            raise ServerError(
                f"The server at {self.url} speaks protocol {protocol}, this trainer "
                f"{PROTOCOL_VERSION}",
                fix="Install the same trl_atropos on both sides.",
                code="server-version",
            )
        return ServerInfo.model_validate(reply)

    def versions(self, keys: list[bytes]) -> list[Note | None]:
        """Returns the server's notes about the completions with these keys."""
        body = VersionsQuery(keys=[key.hex() for key in keys]).model_dump()
        reply = self._call("/versions", "asking which versions sampled rollouts", body)
        return VersionsReply.model_validate(reply).notes()

    def evaluation(self, key: str) -> EvaluationReply:
        """Returns the versions that sampled under an API key, which begins with
        `protocol.EVALUATION_KEY`."""
        phase = "asking which versions sampled an evaluation"
        return EvaluationReply.model_validate(self._call("/evaluation", phase, {"key": key}))

    def load(self) -> LoadReply:
        """Returns how busy the server is, and what its sessions have sampled."""
        return LoadReply.model_validate(self._call("/load", "asking about its sessions"))

    def refusals(self, timeout: float) -> RefusalsReply:
        """Returns the requests that the server answered with an error, by reason."""
        reply = self._call("/refusals", "asking what it has refused", timeout=timeout)
        return RefusalsReply.model_validate(reply)

    # ------------------------------------------------------------------------------------- sampling

    def sample(
        self,
        prompt_ids: list[int],
        num_tokens: int,
        temperature: float,
        num_samples: int = 1,
        phase: str = "sampling the probe",
    ) -> list[tuple[list[int], list[float]]]:
        """Samples continuations. Returns the token ids and the log-probabilities of each,
        `num_tokens` of both."""
        settings = {"n": num_samples, "temperature": temperature, "logprobs": 0}
        reply = self._generate(prompt_ids, num_tokens, phase, **settings)
        samples = []
        for tokens, entries in zip(reply["token_ids"], reply["logprobs"], strict=True):
            # each entry is `[{"<token id>": logprob}]`
            logprobs = [next(iter(entry[0].values())) for entry in entries]
            samples.append((tokens, logprobs))
        return samples

    def cached_tokens(self, prompt_ids: list[int]) -> int:
        """Samples one token. Returns how many tokens of the prompt came from the cache. Afterwards
        the whole prompt is in it."""
        return self._generate(prompt_ids, 1, "asking what is cached")["cached_tokens"]

    def why_silent(self) -> str:
        """Asks for one token. Returns an empty text if it comes, and otherwise what is wrong."""
        try:
            self.sample([0], 1, temperature=1.0, phase="sampling one token")
        except ServerTimeout:
            return (
                f"The server at {self.url} did not sample one token within {self.timeout:g} s: it "
                "hangs or is overloaded. Look at its log; if it hangs, end it, and resume the run "
                "from its last checkpoint."
            )
        except ServerError as error:
            return str(error)
        return ""

    def hold(self, held: bool, let_in: float) -> None:
        """Holds new sampling requests (`held`) and admits a fraction (`let_in`) of those waiting.
        Requests in flight go on, and so do this client's."""
        phase = "holding requests back" if held else "letting requests in"
        self._call("/hold", phase, {"held": held, "let_in": let_in})

    def _generate(
        self, prompt_ids: list[int], num_tokens: int, phase: str, **settings: Any
    ) -> dict:
        body = {
            "prompt": {"prompt_token_ids": prompt_ids},
            "max_tokens": num_tokens,
            "ignore_eos": True,
            **settings,
        }
        return self._call("/generate", phase, body)

    # ------------------------------------------------------------------------------------ a publish

    def hold_lease(self) -> None:
        """Opens the response whose end tells the server that this process is gone. Does nothing if
        it is open."""
        if self._lease is not None:
            return
        phase = "taking the lease"
        with self._failures_named(phase, self.timeout):
            response = self._open("POST", f"{ROUTE_PREFIX}/lease", None, self.timeout)
            try:
                if response.status != 200:
                    raise self._refused(phase, Reply.read(response))
                response.read(len(LEASE_BEGINNING))
            except BaseException:
                response.close()
                raise
        self._lease = response

    def release_lease(self) -> None:
        """Closes the lease. A server that is paused at this moment ends, because its weights may be
        torn."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def pause(self, clear_cache: bool = True, in_place: bool = False) -> None:
        """Stops sampling after the running step. Requests in flight stay; with `clear_cache`, they
        recompute what they cached. With `in_place`, this process will write into the server's
        memory: its death would tear the weights."""
        body = {"clear_cache": clear_cache, "in_place": in_place}
        self._call("/pause", "pausing the server", body)

    def drain(self) -> None:
        """Pauses a front, which first lets the requests in flight end."""
        timeout = max(self.timeout, RESTART_TIMEOUT)
        self._call("/pause", "waiting for the requests in flight", {}, timeout)

    def resume(self, policy_version: int) -> None:
        """Lets requests in again. They sample from `policy_version`."""
        self._call("/resume", "resuming the server", {"policy_version": policy_version})

    def restart(self, path: str) -> None:
        """Restarts a front's engine on the checkpoint in `path`. Returns when it serves."""
        timeout = max(self.timeout, RESTART_TIMEOUT)
        self._call("/restart", f"restarting on {path}", {"model": path}, timeout)

    def sleep(self, level: int) -> None:
        """Makes the server give its device's memory back. `level` is vLLM's sleep level."""
        self._call("/sleep", "putting the server to sleep", {"level": level})

    def wake(self, tag: str) -> None:
        """Takes memory again: first `"weights"`, then `"kv_cache"`."""
        self._call("/wake", f"waking the server ({tag})", {"tags": [tag]})

    def attach(self, specs: list[ParameterSpec]) -> Attachment:
        """Returns handles of the server's memory, and the place of each parameter in it."""
        body = {"parameters": [spec.model_dump() for spec in specs]}
        reply = self._call("/attach", "attaching to the server's memory", body)
        return Attachment.model_validate(reply)

    def open_channel(self, specification: dict) -> None:
        """Makes the server's workers join a channel of `trl_atropos.tensors.channel`."""
        self._call("/channel", "opening a channel to the server's workers", specification)

    def load_weights(self, tensors: list[ParameterSpec]) -> None:
        """Makes the server receive one message and load it, and returns afterwards. The server
        knows the message from then on."""
        body = {"tensors": [tensor.model_dump() for tensor in tensors]}
        self._call("/weights/load", "loading weights into the server", body)

    def load_weights_again(self, messages: list[int]) -> None:
        """Makes the server receive messages that it knows, by their numbers. The last one finishes
        the transfer."""
        self._call("/weights/again", "loading weights into the server", {"messages": messages})

    def finish_weights(self) -> list[str]:
        """Ends a transfer of weights. Returns vLLM's names of the parameters that nothing was
        loaded into."""
        return self._call("/weights/finish", "finishing the server's weights", {})["missing"]

    def set_up_adapter(self, tensors: list[ParameterSpec], config: dict) -> str | None:
        """Announces an adapter. Returns why the server cannot serve it, or `None` if it can."""
        body = {"tensors": [tensor.model_dump() for tensor in tensors], "config": config}
        return self._call("/adapter/setup", "setting up the adapter", body)["refused"]

    def load_adapter(self) -> None:
        """Makes the server receive the adapter's next version, and returns afterwards."""
        self._call("/adapter/load", "loading the adapter", {})

    def swap_adapter(self, name: str, path: str) -> None:
        """Loads the adapter in `path` under `name`. An adapter of that name is replaced."""
        phase = f"loading the adapter in {path}"
        reply = self._send("POST", UNLOAD_ADAPTER, phase, {"lora_name": name})
        if reply.status != 200 and not _lacks_adapter(reply):
            raise self._adapter_refused(UNLOAD_ADAPTER, phase, reply)
        body = {"lora_name": name, "lora_path": path}
        reply = self._send("POST", LOAD_ADAPTER, phase, body)
        if reply.status != 200:
            raise self._adapter_refused(LOAD_ADAPTER, phase, reply)

    # ---------------------------------------------------------------------- the proof of a publish

    def trace(self, of: str, specs: list[ParameterSpec]) -> dict[str, str]:
        """Makes the server find its memory of the trainer's `"weights"` or of the `"adapter"` that
        it serves. Returns why parameters have no fingerprint, by name."""
        body = TraceQuery(of=of, parameters=specs).model_dump()
        phase = f"finding where the server keeps the {of}"
        return self._call("/fingerprints/trace", phase, body)["refused"]

    def fingerprints(self, of: str) -> FingerprintsReply:
        """Returns the fingerprints of the parameters that `trace` was given."""
        reply = self._call("/fingerprints", f"comparing the {of} bit for bit", {"of": of})
        return FingerprintsReply.model_validate(reply)

    # ----------------------------------------------------------------------------------------- HTTP

    def _call(
        self, route: str, phase: str, body: dict | None = None, timeout: float | None = None
    ) -> dict:
        """Returns what a route answers to a POST of `body`, or to a GET. Messages say by `phase`
        what was being done."""
        method = "GET" if body is None else "POST"
        path = route if route == "/generate" else ROUTE_PREFIX + route
        reply = self._send(method, path, phase, body, timeout)
        if reply.status != 200:
            raise self._refused(phase, reply)
        try:
            return json.loads(reply.text)
        except ValueError as error:
            raise self._stranger(f"{method} {path} gave {reply.text[:80]!r}") from error

    def _send(
        self,
        method: str,
        path: str,
        phase: str,
        body: dict | None = None,
        timeout: float | None = None,
    ) -> Reply:
        """Sends a request and returns the whole response, whatever its status."""
        timeout = timeout or self.timeout
        with (
            self._failures_named(phase, timeout),
            self._open(method, path, body, timeout) as response,
        ):
            return Reply.read(response)

    def _open(self, method: str, path: str, body: dict | None, timeout: float) -> HTTPResponse:
        """Returns a response of which only the head was read. Each request has a connection of its
        own: a server may close an idle one just as it is used again. Proxies of the environment are
        ignored: they must not see the token."""
        address = urlsplit(self.url)
        kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
        port = address.port or kind.default_port
        connection = kind(address.hostname, port, timeout=timeout)
        headers = {"authorization": f"Bearer {self.token}", "connection": "close"}
        content = None
        if body is not None:
            content = json.dumps(body).encode()
            headers["content-type"] = "application/json"
        try:
            connection.request(method, address.path + path, content, headers)
            return connection.getresponse()
        except BaseException:
            connection.close()  # at once: the error keeps this frame, and the server would go on
            raise

    @contextmanager
    def _failures_named(self, phase: str, timeout: float) -> Iterator[None]:
        """Turns errors of the connection into `ServerError`."""
        try:
            yield
        except TimeoutError as error:
            raise ServerTimeout(
                f"The server at {self.url} did not answer within {timeout:.0f} s while {phase}",
                fix="It hangs or is overloaded: look at its log, or raise `publish_timeout`.",
            ) from error
        except (OSError, HTTPException) as error:
            raise ServerError(
                f"The server at {self.url} cannot be reached while {phase} "
                f"({type(error).__name__})",
                fix="If it died, look at its log; if it runs elsewhere, check "
                "`vllm_server_base_url`; if there is none, start it by `trl-atropos serve MODEL`, "
                "in a recipe by `start_vllm: true`, or from Python by "
                "`trl_atropos.start_services`.",
            ) from error

    def _refused(self, phase: str, reply: Reply) -> ServerError:
        """Returns the error for a response with another status than 200."""
        if reply.status == 401:
            return ServerError(
                f"The server at {self.url} refused the control token",
                fix=f"Set {TOKEN_VARIABLE} to the server's: `trl-atropos serve` says where it is.",
                code="server-token",
            )
        if reply.status in (404, 405, 501):
            return self._stranger(f"HTTP {reply.status}")
        return ServerError(
            f"The server at {self.url} failed while {phase} (HTTP {reply.status}): "
            f"{reason_in(reply.text)}"
        )

    def _stranger(self, answer: str) -> ServerError:
        """Returns the error for a server that does not have our routes."""
        return ServerError(
            f"The server at {self.url} has no control routes ({answer})",
            fix="Start it with `trl-atropos serve MODEL`, not `vllm serve`, or correct "
            "`vllm_server_base_url`.",
            code="not-our-server",
        )

    def _adapter_refused(self, route: str, phase: str, reply: Reply) -> ServerError:
        """Returns the error for a response of vLLM's own routes for adapters."""
        if route == LOAD_ADAPTER and _lacks_adapter(reply):
            fix = (
                "The trainer's `output_dir` must be readable where the server runs, under the same "
                "path."
            )
        elif reply.status == 404:
            fix = "Start it by `trl-atropos serve --vllm_mode lora`."
        else:
            fix = (
                "If vLLM cannot serve it, change it, or use `vllm_mode: server`, which sends "
                "merged weights."
            )
        why = f"{route} gave HTTP {reply.status}: {reason_in(reply.text)}"
        return ServerError(f"The server at {self.url} failed while {phase} ({why})", fix=fix)


def _lacks_adapter(reply: Reply) -> bool:
    """Returns whether vLLM found no adapter of that name or path. It answers 404 for a route that
    it does not have, too, but then without an error of this type."""
    return reply.status == 404 and "NotFoundError" in reply.text


def at_once(clients: list[ServerClient], call: Callable[[ServerClient], Any]) -> list[Any]:
    """Makes a call on all clients at the same time. Returns their results, or raises the first
    error when all have ended."""
    if len(clients) < 2:
        return [call(client) for client in clients]
    with ThreadPoolExecutor(len(clients)) as pool:
        calls = [pool.submit(call, client) for client in clients]
    return [ended.result() for ended in calls]


@dataclass(eq=False)
class Servers:
    """The servers of a run as one: the same call to each of them, and an outcome that all ranks
    share. The arguments are those of `ServerClient`, and the class that talks to each."""

    urls: list[str]
    timeout: float
    token: str | None = None
    client: type[ServerClient] = ServerClient
    # each rank talks to a server of its own, not rank 0 to all
    one_per_rank: bool = field(default=False, init=False)
    clients: list[ServerClient] = field(default_factory=list, init=False)  # of this rank
    infos: list[ServerInfo] = field(default_factory=list, init=False)  # of the servers of `clients`
    info: ServerInfo | None = field(default=None, init=False)  # of the first server, on every rank
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1), init=False, repr=False
    )

    def connect(self, one_per_rank: bool = False) -> None:
        """Asks every server what it is. Raises `AttachError` if there are not as many servers as
        needed."""
        state = PartialState()
        self.one_per_rank = one_per_rank
        if one_per_rank and len(self.urls) != state.num_processes:
            raise AttachError(
                "Every process trains the memory of a server of its own, but there are "
                f"{state.num_processes} processes and {len(self.urls)} servers: list one URL per "
                f"process in `vllm_server_base_url`, or start `--num_processes {len(self.urls)}`."
            )
        urls = []
        if one_per_rank:
            urls = [self.urls[state.process_index]]
        elif state.is_main_process:
            urls = self.urls
        self.clients = [self.client(url, self.timeout, self.token) for url in urls]
        with activity(f"Asking {', '.join(urls)} what is served there"):
            self.infos = self.each(lambda client: client.info())
        self.info = on_main(lambda: self.infos[0])

    def each(self, call: Callable[[ServerClient], Any]) -> list[Any]:
        """Calls all of this rank's clients at the same time. All ranks call this; an error on one
        is raised on all."""
        return together(lambda: self.each_here(call))

    def each_here(self, call: Callable[[ServerClient], Any]) -> list[Any]:
        """Calls all of this rank's clients at the same time, on this rank alone."""
        return at_once(self.clients, call)

    def each_in_background(self, call: Callable[[ServerClient], Any]) -> Future[list[Any]]:
        """Queues `each_here` behind all calls that this method was given before."""
        return self._thread.submit(self.each_here, call)

    def on_connected_ranks(self, call: Callable[[], Any]) -> None:
        """Makes a call on those ranks that talk to a server. All ranks call this; an error on one
        is raised on all."""

        def call_if_connected() -> None:
            if self.clients:
                call()

        together(call_if_connected)

    def silence(self) -> list[str]:
        """Asks every server of the run for one token. Returns what is wrong with those that give
        none."""
        timeout = min(self.timeout, TOKEN_TIMEOUT)
        clients = [self.client(url, timeout, self.token) for url in self.urls]
        troubles = at_once(clients, lambda client: client.why_silent())
        return [trouble for trouble in troubles if trouble]

    def hold_leases(self) -> None:
        """Takes every server's lease. Raises `ServerError` if a server was restarted since
        `connect`."""
        self.each(lambda client: client.hold_lease())
        infos = self.each(lambda client: client.info())
        for connected, info in zip(self.infos, infos, strict=True):
            if info.instance != connected.instance:
                raise ServerError(
                    f"The server at {self.urls[0]} was restarted since this trainer was built",
                    fix="So build the trainer again (its last checkpoint can be resumed).",
                )

    def release_leases(self) -> None:
        """Closes this rank's leases. Other ranks need not call this."""
        for client in self.clients:
            client.release_lease()
