"""The trainer's end of the server's control routes: one call per route, each with a deadline.

Every failure is a `ServerError` that names the server, the phase of the publish and the way out.
"""

import http.client
import json
import logging
import time
from urllib.parse import urlsplit

import requests

from trl_atropos.errors import ServerError, ServerTimeout
from trl_atropos.protocol import (
    PROTOCOL_VERSION,
    ROUTE_PREFIX,
    TOKEN_VARIABLE,
    Attachment,
    LoadReply,
    ParameterSpec,
    ServerInfo,
    environment_token,
)

logger = logging.getLogger(__name__)

RESTART_TIMEOUT = 1800.0  # seconds: requests in flight are drained, and a large model takes minutes to load


class ServerClient:
    """
    Args:
        url (`str`): Base URL of the server, without `/v1`.
        timeout (`float`): Seconds that any one call may take.
        token (`str`, *optional*): The control token. Defaults to the environment variable `TRL_ATROPOS_TOKEN`.
    """

    def __init__(self, url: str, timeout: float, token: str | None = None):
        self.url = url
        self.timeout = timeout
        self.restart_timeout = max(timeout, RESTART_TIMEOUT)
        self.token = token if token is not None else environment_token()
        self.session = requests.Session()
        self.session.trust_env = False  # a proxy of the environment must not see the token
        self._lease: tuple[http.client.HTTPConnection, http.client.HTTPResponse] | None = None

    # ------------------------------------------------------------------------------------------------------- calls

    def info(self) -> ServerInfo:
        reply = self._call("GET", "/info", "asking the server what it is")
        if reply.get("protocol") != PROTOCOL_VERSION:
            raise ServerError(
                f"The server at {self.url} speaks protocol {reply.get('protocol')}, this trainer {PROTOCOL_VERSION}",
                fix="Install the same version of trl_atropos on both sides.",
                code="server-version",
            )
        return ServerInfo.model_validate(reply)

    def attach(self, specs: list[ParameterSpec]) -> Attachment:
        body = {"parameters": [spec.model_dump() for spec in specs]}
        return Attachment.model_validate(self._call("POST", "/attach", "attaching to the server's memory", body))

    def pause(self, clear_cache: bool = True, in_place: bool = False) -> None:
        """
        Stops sampling after the running step. Requests in flight stay.

        Args:
            clear_cache (`bool`): Requests in flight recompute what they cached, with the new weights.
            in_place (`bool`): This process will write into the server's memory, so that its death would leave the
                weights torn.
        """
        body = {"clear_cache": clear_cache, "in_place": in_place}
        self._call("POST", "/pause", "pausing the server", body)

    def drain(self) -> None:
        """Pauses a front, which first lets the requests in flight end."""
        self._call("POST", "/pause", "waiting for the requests in flight to end", {}, self.restart_timeout)

    def resume(self, policy_version: int) -> None:
        self._call("POST", "/resume", "resuming the server", {"policy_version": policy_version})

    def open_channel(self, specification: dict) -> None:
        """Lets the server's workers join a channel of `trl_atropos.channel`."""
        self._call("POST", "/channel", "opening a channel to the server's workers", specification)

    def load_weights(self, tensors: list[ParameterSpec]) -> LoadReply:
        """Lets the server receive one message and load it. Returns when it has."""
        body = {"tensors": [tensor.model_dump() for tensor in tensors]}
        return LoadReply.model_validate(self._call("POST", "/weights/load", "loading weights into the server", body))

    def finish_weights(self) -> list[str]:
        """Ends a transfer of weights. Returns vLLM's names of parameters that nothing was loaded into."""
        return self._call("POST", "/weights/finish", "finishing the server's weights", {})["missing"]

    def set_up_adapter(self, tensors: list[ParameterSpec], config: dict) -> str | None:
        """Announces an adapter. Returns why the server cannot serve it, if so."""
        body = {"tensors": [tensor.model_dump() for tensor in tensors], "config": config}
        return self._call("POST", "/adapter/setup", "setting up the adapter", body)["refused"]

    def load_adapter(self) -> LoadReply:
        """Lets the server receive the adapter's next version. Returns when it has."""
        return LoadReply.model_validate(self._call("POST", "/adapter/load", "loading the adapter", {}))

    def swap_adapter(self, name: str, path: str) -> float:
        """Loads the adapter in `path` under `name`, in place of the one there if any. Returns the seconds taken."""
        started = time.monotonic()
        phase = f"loading the adapter in {path}"
        self._vllm("/v1/unload_lora_adapter", phase, {"lora_name": name}, may_be_absent=True)
        self._vllm("/v1/load_lora_adapter", phase, {"lora_name": name, "lora_path": path})
        return time.monotonic() - started

    def oldest_version_in_flight(self) -> int:
        return self.info().oldest_version_in_flight

    def restart(self, path: str) -> float:
        """Lets the front start its engine again on the checkpoint in `path`. Returns the seconds that it took."""
        body = {"model": path}
        return self._call("POST", "/restart", f"restarting on {path}", body, self.restart_timeout)["restart_s"]

    def sleep(self, level: int) -> None:
        self._call("POST", "/sleep", "putting the server to sleep", {"level": level})

    def wake(self, tag: str) -> None:
        """Takes memory again: first `"weights"`, then `"kv_cache"`."""
        self._call("POST", "/wake", f"waking the server ({tag})", {"tags": [tag]})

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname

    def sample(
        self,
        prompt_ids: list[int],
        num_tokens: int,
        temperature: float,
        num_samples: int = 1,
        phase: str = "sampling the probe",
    ) -> list[tuple[list[int], list[float]]]:
        """Samples continuations. Returns the ids and log-probabilities of each, of length `num_tokens`."""
        body = {
            "prompt": {"prompt_token_ids": prompt_ids},
            "n": num_samples,
            "max_tokens": num_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "logprobs": 0,
        }
        reply = self._request("POST", "/generate", phase, body)
        return [
            (tokens, [next(iter(entry[0].values())) for entry in entries])
            for tokens, entries in zip(reply["token_ids"], reply["logprobs"], strict=True)
        ]

    # ------------------------------------------------------------------------------------------------------- lease

    def hold_lease(self) -> None:
        """Opens the response whose end tells the server that this process is gone. Does nothing if it is open."""
        if self._lease is not None:
            return
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=self.timeout)
        try:
            connection.request("POST", f"{ROUTE_PREFIX}/lease", headers=self._headers())
            response = connection.getresponse()
            text = response.read(len(b"held\n")) if response.status == 200 else response.read()
        except TimeoutError as error:
            raise ServerTimeout(self._late("taking the lease", self.timeout)) from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(self._unreachable("taking the lease", error)) from error
        if response.status != 200:
            raise self._refused("taking the lease", response.status, text.decode())
        self._lease = (connection, response)

    def release_lease(self) -> None:
        """Closes the lease. If the server is paused at this moment, it takes its weights for torn and leaves."""
        if self._lease is not None:
            connection, response = self._lease
            self._lease = None
            response.close()
            connection.close()

    # ----------------------------------------------------------------------------------------------------- plumbing

    def _call(
        self, method: str, route: str, phase: str, body: dict | None = None, timeout: float | None = None
    ) -> dict:
        return self._request(method, ROUTE_PREFIX + route, phase, body, timeout)

    def _vllm(self, path: str, phase: str, body: dict, may_be_absent: bool = False) -> None:
        """One of vLLM's own routes for adapters, which answer in plain text."""
        response = self._send("POST", path, phase, body, self.timeout)
        absent = response.status_code == 404 and "NotFoundError" in response.text  # else the route itself is
        if absent and may_be_absent:
            return
        if response.status_code == 404 and not absent:
            raise ServerError(
                f"The server at {self.url} has no route {path}: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in "
                "its environment, or by `trl-atropos serve --vllm_mode lora`."
            )
        if absent:
            raise ServerError(
                f"The server at {self.url} cannot read {body['lora_path']}: the trainer's `output_dir` must be "
                "readable where the server runs, under the same path."
            )
        if response.status_code != 200:
            raise ServerError(
                f"{self._refused(phase, response.status_code, response.text)} If vLLM cannot serve such an adapter, "
                "change it, or use `vllm_mode: server`, which sends merged weights."
            )

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}", "content-type": "application/json"}

    def _request(self, method: str, path: str, phase: str, body: dict | None, timeout: float | None = None) -> dict:
        response = self._send(method, path, phase, body, timeout or self.timeout)
        if response.status_code != 200:
            raise self._refused(phase, response.status_code, response.text)
        try:
            return response.json()
        except ValueError as error:
            raise self._stranger(f"{method} {path} gave {response.text[:80]!r}") from error

    def _send(self, method: str, path: str, phase: str, body: dict | None, timeout: float) -> requests.Response:
        data = None if body is None else json.dumps(body)
        try:
            return self.session.request(method, self.url + path, data=data, headers=self._headers(), timeout=timeout)
        except requests.Timeout as error:
            raise ServerTimeout(self._late(phase, timeout)) from error
        except requests.RequestException as error:
            raise ServerError(self._unreachable(phase, error)) from error

    def _late(self, phase: str, timeout: float) -> str:
        return (
            f"The server at {self.url} did not answer within {timeout:.0f} s while {phase}. It hangs or is "
            "overloaded: look at its log, or raise `publish_timeout`."
        )

    def _unreachable(self, phase: str, error: Exception) -> str:
        return (
            f"The server at {self.url} cannot be reached while {phase} ({type(error).__name__}). If it was running, "
            "it died: look at its log. If it runs elsewhere, check `vllm_server_base_url`; start one with "
            "`trl-atropos serve MODEL`, or let the recipe start it with `start_vllm: true`."
        )

    def _stranger(self, answer: str) -> ServerError:
        return ServerError(
            f"The server at {self.url} has no control routes ({answer}), so its weights cannot be kept in step",
            fix="Start it with `trl-atropos serve MODEL` in place of `vllm serve MODEL`; if it is something else "
            "altogether, correct `vllm_server_base_url`.",
            code="not-our-server",
        )

    def _refused(self, phase: str, status: int, text: str) -> ServerError:
        try:
            message = json.loads(text)["error"]
            message = message["message"] if isinstance(message, dict) else message  # as vLLM's own routes answer
        except (ValueError, KeyError, TypeError):
            message = text[:300]
        if status == 401:
            return ServerError(
                f"The server at {self.url} refused the control token",
                fix=f"Set {TOKEN_VARIABLE} to the value that the server was started with; `trl-atropos serve` prints "
                "it where it is not set.",
                code="server-token",
            )
        if status in (404, 405, 501):
            return self._stranger(f"HTTP {status}")
        return ServerError(f"The server at {self.url} failed while {phase} (HTTP {status}): {message}")
