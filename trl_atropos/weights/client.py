"""The trainer's end of the server's control routes: one call per route, each with a deadline.

Every failure is a `ServerError` that names the server, the phase of the publish and the way out.
"""

import http.client
import json
import logging
import os
from urllib.parse import urlsplit

import requests

from trl_atropos.errors import ServerError
from trl_atropos.protocol import PROTOCOL_VERSION, ROUTE_PREFIX, TOKEN_VARIABLE, Attachment, ParameterSpec, ServerInfo

logger = logging.getLogger(__name__)


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
        self.token = token if token is not None else os.environ.get(TOKEN_VARIABLE, "")
        self.session = requests.Session()
        self.session.trust_env = False  # a proxy of the environment must not see the token
        self._lease: tuple[http.client.HTTPConnection, http.client.HTTPResponse] | None = None

    # ------------------------------------------------------------------------------------------------------- calls

    def info(self) -> ServerInfo:
        reply = self._call("GET", "/info", "asking the server what it is")
        if reply.get("protocol") != PROTOCOL_VERSION:
            raise ServerError(
                f"The server at {self.url} speaks protocol {reply.get('protocol')}, this trainer {PROTOCOL_VERSION}. "
                "Install the same version of trl_atropos on both sides."
            )
        return ServerInfo.model_validate(reply)

    def attach(self, specs: list[ParameterSpec]) -> Attachment:
        body = {"parameters": [spec.model_dump() for spec in specs]}
        return Attachment.model_validate(self._call("POST", "/attach", "attaching to the server's memory", body))

    def pause(self, clear_cache: bool = True) -> None:
        """Stops sampling after the running step. Requests in flight stay, and recompute with the new weights."""
        self._call("POST", "/pause", "pausing the server", {"clear_cache": clear_cache})

    def resume(self, policy_version: int) -> None:
        self._call("POST", "/resume", "resuming the server", {"policy_version": policy_version})

    def sample(self, prompt_ids: list[int], num_tokens: int, temperature: float) -> tuple[list[int], list[float]]:
        """Samples `num_tokens` tokens. Returns their ids and log-probabilities, each of length `num_tokens`."""
        body = {
            "prompt": {"prompt_token_ids": prompt_ids},
            "max_tokens": num_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "logprobs": 0,
        }
        reply = self._request("POST", "/generate", "sampling the probe", body)
        (tokens,), (entries,) = reply["token_ids"], reply["logprobs"]
        return tokens, [next(iter(entry[0].values())) for entry in entries]

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
        except OSError as error:
            raise ServerError(self._unreachable("taking the lease", error)) from error
        if response.status != 200:
            raise ServerError(self._refused("taking the lease", response.status, response.read().decode()))
        response.read(len(b"held\n"))
        self._lease = (connection, response)

    def release_lease(self) -> None:
        """Closes the lease. If the server is paused at this moment, it takes its weights for torn and leaves."""
        if self._lease is not None:
            connection, response = self._lease
            self._lease = None
            response.close()
            connection.close()

    # ----------------------------------------------------------------------------------------------------- plumbing

    def _call(self, method: str, route: str, phase: str, body: dict | None = None) -> dict:
        return self._request(method, ROUTE_PREFIX + route, phase, body)

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}", "content-type": "application/json"}

    def _request(self, method: str, path: str, phase: str, body: dict | None) -> dict:
        data = None if body is None else json.dumps(body)
        try:
            response = self.session.request(
                method, self.url + path, data=data, headers=self._headers(), timeout=self.timeout
            )
        except requests.Timeout as error:
            raise ServerError(
                f"The server at {self.url} did not answer within {self.timeout:.0f} s while {phase}. It hangs or is "
                "overloaded: look at its log, or raise `publish_timeout`."
            ) from error
        except requests.RequestException as error:
            raise ServerError(self._unreachable(phase, error)) from error
        if response.status_code != 200:
            raise ServerError(self._refused(phase, response.status_code, response.text))
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(self._stranger(f"{method} {path} gave {response.text[:80]!r}")) from error

    def _unreachable(self, phase: str, error: Exception) -> str:
        return (
            f"The server at {self.url} cannot be reached while {phase} ({type(error).__name__}). If it was running, "
            "it died: look at its log. If it runs elsewhere, check `vllm_server_base_url`; start one with "
            "`trl-atropos serve MODEL`, or let the recipe start it with `start_vllm: true`."
        )

    def _stranger(self, answer: str) -> str:
        return (
            f"The server at {self.url} has no control routes ({answer}), so its weights cannot be kept in step. Start "
            "it with `trl-atropos serve MODEL` in place of `vllm serve MODEL`; if it is something else altogether, "
            "correct `vllm_server_base_url`."
        )

    def _refused(self, phase: str, status: int, text: str) -> str:
        try:
            message = json.loads(text)["error"]
        except (ValueError, KeyError, TypeError):
            message = text[:300]
        if status == 401:
            return (
                f"The server at {self.url} refused the control token. Set {TOKEN_VARIABLE} to the value that the "
                "server was started with; `trl-atropos serve` prints it where it is not set."
            )
        if status in (404, 405, 501):
            return self._stranger(f"HTTP {status}")
        return f"The server at {self.url} failed while {phase} (HTTP {status}): {message}"
