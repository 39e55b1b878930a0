"""The trainer's side of HTTP to the inference servers: one method per route, each with a deadline.

`ServerClient` talks to one server, `Servers` to all servers of a run on behalf of all ranks. Every
failure is a `ServerError` that names the server, what was being done, and the way out.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from accelerate import PartialState

from trl_atropos.distributed import on_main, together
from trl_atropos.errors import AttachError, ServerError, ServerTimeout
from trl_atropos.protocol import (
    PROTOCOL_VERSION,
    ROUTE_PREFIX,
    TOKEN_VARIABLE,
    Attachment,
    EvaluationReply,
    FingerprintsReply,
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
HELD = b"held\n"  # what the response of a lease begins with


class ServerClient:
    """One server, by its URL without `/v1`. A call may take `timeout` seconds. `token` may be in
    the environment."""

    def __init__(self, url: str, timeout: float, token: str | None = None):
        self.url = url.rstrip("/")
        self.host = urlsplit(url).hostname
        self.timeout = timeout
        self.session = requests.Session()
        self.session.trust_env = False  # a proxy of the environment must not see the token
        self.token = token if token is not None else environment_token()
        # A connection for each call: a server may close an idle one at the moment in which it is
        # used again.
        self.session.headers.update(
            {"authorization": f"Bearer {self.token}", "connection": "close"}
        )
        self._lease: requests.Response | None = None

    def info(self) -> ServerInfo:
        reply = self._call("/info", "asking the server what it is")
        if reply.get("protocol") != PROTOCOL_VERSION:
            what = (
                f"The server at {self.url} speaks protocol {reply.get('protocol')}, this "
                f"trainer {PROTOCOL_VERSION}"
            )
            raise ServerError(
                what, fix="Install the same trl_atropos on both sides.", code="server-version"
            )
        return ServerInfo.model_validate(reply)

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
        reply = self._generate(
            prompt_ids, num_tokens, phase, n=num_samples, temperature=temperature, logprobs=0
        )
        return [
            (tokens, [next(iter(entry[0].values())) for entry in entries])
            for tokens, entries in zip(reply["token_ids"], reply["logprobs"], strict=True)
        ]

    def cached_tokens(self, prompt_ids: list[int]) -> int:
        """Samples one token. Returns how many tokens of the prompt came from the cache. They are
        all in it then."""
        return self._generate(prompt_ids, 1, "asking what is cached")["cached_tokens"]

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

    def versions(self, keys: list[bytes]) -> list[Note | None]:
        """What the server has noted of the completions with these keys."""
        body = VersionsQuery(keys=[key.hex() for key in keys]).model_dump()
        reply = self._call("/versions", "asking which versions sampled rollouts", body)
        return VersionsReply.model_validate(reply).notes()

    def evaluation(self, key: str) -> EvaluationReply:
        """What was sampled under an API key that begins with `protocol.EVALUATION_KEY`."""
        reply = self._call(
            "/evaluation", "asking which versions sampled an evaluation", {"key": key}
        )
        return EvaluationReply.model_validate(reply)

    def refusals(self, timeout: float) -> RefusalsReply:
        reply = self._call("/refusals", "asking what it has refused", timeout=timeout)
        return RefusalsReply.model_validate(reply)

    def why_silent(self) -> str:
        """Asks for one token. Returns what is wrong if none comes, and an empty text if one
        does."""
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

    def pause(self, clear_cache: bool = True, in_place: bool = False) -> None:
        """Stops sampling after the running step. Requests in flight stay; with `clear_cache`, they
        recompute what they cached. With `in_place`, this process will write into the server's
        memory: its death would tear the weights."""
        self._call(
            "/pause", "pausing the server", {"clear_cache": clear_cache, "in_place": in_place}
        )

    def resume(self, policy_version: int) -> None:
        self._call("/resume", "resuming the server", {"policy_version": policy_version})

    def hold(self, held: bool, let_in: float) -> None:
        """Lets requests for samples wait that come from now on, or not, and lets in this share of
        those that do. What is in flight goes on, and what this client samples."""
        phase = "holding requests back" if held else "letting requests in"
        self._call("/hold", phase, {"held": held, "let_in": let_in})

    def sleep(self, level: int) -> None:
        self._call("/sleep", "putting the server to sleep", {"level": level})

    def wake(self, tag: str) -> None:
        """Takes memory again: first `"weights"`, then `"kv_cache"`."""
        self._call("/wake", f"waking the server ({tag})", {"tags": [tag]})

    def attach(self, specs: list[ParameterSpec]) -> Attachment:
        body = {"parameters": [spec.model_dump() for spec in specs]}
        return Attachment.model_validate(
            self._call("/attach", "attaching to the server's memory", body)
        )

    def open_channel(self, specification: dict) -> None:
        """Lets the server's workers join a channel of `trl_atropos.tensors.channel`."""
        self._call("/channel", "opening a channel to the server's workers", specification)

    def load_weights(self, tensors: list[ParameterSpec]) -> None:
        """Lets the server receive one message and load it. Returns when it has. It knows the
        message from then on."""
        body = {"tensors": [tensor.model_dump() for tensor in tensors]}
        self._call("/weights/load", "loading weights into the server", body)

    def load_weights_again(self, messages: list[int]) -> None:
        """The same for messages that it knows, by their numbers. The last one finishes the
        transfer."""
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
        """Lets the server receive the adapter's next version. Returns when it has."""
        self._call("/adapter/load", "loading the adapter", {})

    def trace(self, of: str, specs: list[ParameterSpec]) -> dict[str, str]:
        """Lets the server find its memory of the trainer's `"weights"` or of the `"adapter"` that
        it serves. Returns why parameters have no fingerprint, by name."""
        body = TraceQuery(of=of, parameters=specs).model_dump()
        return self._call("/fingerprints/trace", f"finding where the server keeps the {of}", body)[
            "refused"
        ]

    def fingerprints(self, of: str) -> FingerprintsReply:
        """Of what was traced."""
        return FingerprintsReply.model_validate(
            self._call("/fingerprints", f"comparing the {of} bit for bit", {"of": of})
        )

    def swap_adapter(self, name: str, path: str) -> None:
        """Loads the adapter in `path` under `name`, in place of the one there if any."""
        phase = f"loading the adapter in {path}"
        for route, body in (
            ("/v1/unload_lora_adapter", {"lora_name": name}),
            ("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}),
        ):
            response = self._send("POST", route, phase, body)
            # vLLM answers 404 for a route that it was not told to have, too, but then without an
            # error of this type.
            absent = response.status_code == 404 and "NotFoundError" in response.text
            if response.status_code == 200 or (absent and "lora_path" not in body):
                continue
            fix = (
                "If vLLM cannot serve it, change it, or use `vllm_mode: server`, which sends "
                "merged weights."
            )
            if absent:
                fix = (
                    "The trainer's `output_dir` must be readable where the server runs, under "
                    "the same path."
                )
            elif response.status_code == 404:
                fix = "Start it by `trl-atropos serve --vllm_mode lora`."
            why = f"{route} gave HTTP {response.status_code}: {reason_in(response.text)}"
            raise ServerError(f"The server at {self.url} failed while {phase} ({why})", fix=fix)

    def drain(self) -> None:
        """Pauses a front, which first lets the requests in flight end."""
        self._call(
            "/pause", "waiting for the requests in flight", {}, max(self.timeout, RESTART_TIMEOUT)
        )

    def restart(self, path: str) -> None:
        """Lets a front start its engine again on the checkpoint in `path`. Returns when it has."""
        self._call(
            "/restart", f"restarting on {path}", {"model": path}, max(self.timeout, RESTART_TIMEOUT)
        )

    def hold_lease(self) -> None:
        """Opens the response whose end tells the server that this process is gone. Does nothing if
        it is open."""
        if self._lease is None:
            response = self._send(
                "POST", f"{ROUTE_PREFIX}/lease", "taking the lease", stays_open=True
            )
            if response.status_code != 200:
                raise self._refused("taking the lease", response)
            self._lease = response

    def release_lease(self) -> None:
        """Closes the lease. A server that is paused at this moment ends, because its weights may be
        torn."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _call(
        self, route: str, phase: str, body: dict | None = None, timeout: float | None = None
    ) -> dict:
        """The JSON that the server answers to a POST of `body`, or to a GET. `phase` says in
        messages what is done."""
        method = "GET" if body is None else "POST"
        path = route if route == "/generate" else ROUTE_PREFIX + route
        response = self._send(method, path, phase, body, timeout)
        if response.status_code != 200:
            raise self._refused(phase, response)
        try:
            return response.json()
        except ValueError as error:
            raise self._stranger(f"{method} {path} gave {response.text[:80]!r}") from error

    def _send(
        self,
        method: str,
        path: str,
        phase: str,
        body: dict | None = None,
        timeout: float | None = None,
        stays_open: bool = False,
    ) -> requests.Response:
        """The response; with `stays_open`, only its beginning is read."""
        timeout = timeout or self.timeout
        try:
            response = self.session.request(
                method, self.url + path, json=body, timeout=timeout, stream=stays_open
            )
            if stays_open and response.status_code == 200:
                response.raw.read(len(HELD))
        except (requests.Timeout, urllib3.exceptions.TimeoutError) as error:
            what = f"The server at {self.url} did not answer within {timeout:.0f} s while {phase}"
            fix = "It hangs or is overloaded: look at its log, or raise `publish_timeout`."
            raise ServerTimeout(what, fix=fix) from error
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            what = (
                f"The server at {self.url} cannot be reached while {phase} ({type(error).__name__})"
            )
            fix = (
                "If it died, look at its log; if it runs elsewhere, check "
                "`vllm_server_base_url`; if there is none, "
            )
            fix += "start it by `trl-atropos serve MODEL` or `start_vllm: true`."
            raise ServerError(what, fix=fix) from error
        return response

    def _stranger(self, answer: str) -> ServerError:
        fix = (
            "Start it with `trl-atropos serve MODEL`, not `vllm serve`, or correct "
            "`vllm_server_base_url`."
        )
        what = f"The server at {self.url} has no control routes ({answer})"
        return ServerError(what, fix=fix, code="not-our-server")

    def _refused(self, phase: str, response: requests.Response) -> ServerError:
        status = response.status_code
        if status == 401:
            fix = (
                f"Set {TOKEN_VARIABLE} to the server's, of which `trl-atropos serve` says where "
                "it is."
            )
            return ServerError(
                f"The server at {self.url} refused the control token", fix=fix, code="server-token"
            )
        if status in (404, 405, 501):
            return self._stranger(f"HTTP {status}")
        return ServerError(
            f"The server at {self.url} failed while {phase} (HTTP {status}): "
            f"{reason_in(response.text)}"
        )


def at_once(clients: list[ServerClient], call: Callable[[ServerClient], Any]) -> list[Any]:
    """What a call of each client returns, made of all of them at the same time. Raises the first
    error when all have ended."""
    if len(clients) < 2:
        return [call(client) for client in clients]
    with ThreadPoolExecutor(len(clients)) as pool:
        calls = [pool.submit(call, client) for client in clients]
    return [done.result() for done in calls]


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
    # those that this rank talks to
    clients: list[ServerClient] = field(default_factory=list, init=False)
    infos: list[ServerInfo] = field(default_factory=list, init=False)  # what each of `clients` is
    # what the first server is, on every rank
    info: ServerInfo | None = field(default=None, init=False)
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
        urls = (
            [self.urls[state.process_index]]
            if one_per_rank
            else self.urls
            if state.is_main_process
            else []
        )
        self.clients = [self.client(url, self.timeout, self.token) for url in urls]
        self.infos = self.each(lambda client: client.info())
        self.info = on_main(lambda: self.infos[0])

    def each(self, call: Callable[[ServerClient], Any]) -> list[Any]:
        """Calls all of this rank's clients at the same time. All ranks call this; an error on one
        is raised on all."""
        return together(lambda: self.each_here(call))

    def each_here(self, call: Callable[[ServerClient], Any]) -> list[Any]:
        """As `each`, on this rank alone."""
        return at_once(self.clients, call)

    def on_connected_ranks(self, call: Callable[[], Any]) -> None:
        """Makes a call on those ranks that talk to a server. All ranks call this; an error on one
        is raised on all."""
        together(lambda: call() if self.clients else None)

    def each_in_background(self, call: Callable[[ServerClient], Any]) -> Future[list[Any]]:
        """As `each_here`, after all that this was given before."""
        return self._thread.submit(self.each_here, call)

    def silence(self) -> list[str]:
        """Asks every server of the run for one token. Returns what is wrong with those that give
        none."""
        clients = [
            self.client(url, min(self.timeout, TOKEN_TIMEOUT), self.token) for url in self.urls
        ]
        return [wrong for wrong in at_once(clients, lambda client: client.why_silent()) if wrong]

    def hold_leases(self) -> None:
        """Also makes sure that the servers are still those of `connect`."""
        self.each(lambda client: client.hold_lease())
        for before, now in zip(self.infos, self.each(lambda client: client.info()), strict=True):
            if now.instance != before.instance:
                what = f"The server at {self.urls[0]} was restarted since this trainer was built"
                raise ServerError(
                    what, fix="So build the trainer again (its last checkpoint can be resumed)."
                )

    def release_leases(self) -> None:
        """On this rank only: called where other ranks may not come along."""
        for client in self.clients:
            client.release_lease()
