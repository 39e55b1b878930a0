"""A thin HTTP client of the Atropos API: one method per endpoint, each with a timeout and errors that name the URL.

`AtroposSource` and `registration.py` call it. It retries nothing: whether a second try is safe depends on whether the
request was sent, and the two errors tell that apart.
"""

from typing import Any, TypeVar

import requests
from pydantic import BaseModel, ValidationError
from urllib3.exceptions import HTTPError, MaxRetryError, NewConnectionError

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.decode import BatchReply, decode_reply
from trl_atropos.rollouts.sockets import AbortableAdapter

GREETING = "AtroposLib API"
Reply = TypeVar("Reply", bound=BaseModel)


class ApiUnreachable(RolloutError):
    """No connection: the request was never sent, so trying again is safe."""


class ReplyLost(RolloutError):
    """The request was sent and no usable answer came: whatever the API handed out with it is gone."""


class Registration(BaseModel):
    """The body of `POST /register`; the API demands every field."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class Info(BaseModel):
    """What the API holds about its trainer; -1 and -1 before the first registration."""

    batch_size: int
    max_token_len: int


class Status(BaseModel):
    """`current_step` counts assembled batches, `queue_size` groups not yet in a batch."""

    current_step: int
    queue_size: int


class TrainerInfo(BaseModel):
    """Under which name the trainer registered; None before that. A registration that was ignored does not show."""

    group: str | None


class EnvironmentStatus(BaseModel):
    """How one environment stands, and the queue as it sees it."""

    max_group_size: int = 1  # sequences in the largest group that is queued, whoever sent it; at least 1
    self_queue_size: int = 0  # groups that it has in the queue
    unallocated_fraction: float = 1.0  # of a batch, that no `min_batch_allocation` of anybody reserves
    env_weight: float = 1.0  # its share by weight and context length, at least 0.01


class LatestExample(BaseModel):
    """Of the group that was queued last, what is wanted. It survives a reset of the API."""

    tokens: list[list[int]] = []
    env_id: int | None = None


class AtroposClient:
    """
    Args:
        url: root of the API, such as `http://127.0.0.1:8000`.
        request_timeout: seconds for every request but `batch`.
        batch_timeout: seconds for `batch`, which should be long: giving up on it loses the batch.

    Raises:
        RolloutError: `url` is not an http(s) URL.
    """

    def __init__(self, url: str, request_timeout: float, batch_timeout: float):
        if not url.startswith(("http://", "https://")):
            raise RolloutError(f"{url!r} is not the URL of an Atropos API. Write it as http://HOST:PORT.")
        self.url = url.rstrip("/")
        self.batch_timeout = batch_timeout
        self._request_timeout = request_timeout
        self._session = requests.Session()
        self._adapter = AbortableAdapter()
        self._session.mount("http://", self._adapter)
        self._session.mount("https://", self._adapter)
        # A proxy set up for the internet must not catch requests that stay inside the cluster.
        self._session.trust_env = False
        # The API closes an idle connection, and one it answered 500 on, at any moment. A `GET /batch` that meets that
        # on a reused connection fails like one whose batch was popped and lost; on a new connection it cannot.
        self._session.headers["Connection"] = "close"
        # Compressing megabytes of token ids costs the single-threaded API more than the loopback saves.
        self._session.headers["Accept-Encoding"] = "identity"

    def greet(self) -> None:
        """Raises `RolloutError` if something else than an Atropos API answers at the URL."""
        response = self._request("GET", "/", self._request_timeout)
        if GREETING not in response.text:
            raise RolloutError(
                f"{self.url} is not an Atropos API: GET / answered {response.status_code} {response.text[:80]!r}",
                fix="Set `atropos_url` to the host and port that `python -m atroposlib.cli.run_api` listens on.",
            )

    def register(self, registration: Registration) -> None:
        """Asks to be the trainer. The API answers alike whether it took the registration or ignored it."""
        self._request("POST", "/register", self._request_timeout, json=registration.model_dump()).close()

    def reset(self) -> None:
        """Throws away everything the API holds: queue, environments and registration."""
        self._request("GET", "/reset_data", self._request_timeout).close()

    def info(self) -> Info:
        return self._parse(Info, self._request("GET", "/info", self._request_timeout))

    def status(self) -> Status:
        return self._parse(Status, self._request("GET", "/status", self._request_timeout))

    def trainer(self) -> str | None:
        """The `wandb_group` of the registration that the API took, None if it has taken none."""
        return self._parse(TrainerInfo, self._request("GET", "/wandb_info", self._request_timeout)).group

    def environment(self, env_id: int) -> EnvironmentStatus | None:
        """How an environment stands, or None if there is none of that number, which the API answers by a 500."""
        path = f"/status-env?env_id={env_id}"  # some builds of the API read it here, 0.4.0 in the body
        try:
            response = self._request("GET", path, self._request_timeout, json={"env_id": env_id})
        except ReplyLost:
            return None
        return self._parse(EnvironmentStatus, response)

    def latest_example(self) -> LatestExample | None:
        """The group that was queued last, or None if the API cannot send it, as with a NaN in it."""
        try:
            return self._parse(LatestExample, self._request("GET", "/latest_example", self._request_timeout))
        except ReplyLost:
            return None

    def disconnect(self, env_id: int) -> None:
        """Have the API no longer count on an environment: on its weight and its reserved part of a batch."""
        self._request("POST", "/disconnect-env", self._request_timeout, json={"env_id": env_id}).close()

    def batch(self) -> BatchReply:
        """The next batch. The API forgets it before it answers, so it is delivered at most once."""
        try:
            # Unbuffered by `requests`, which would collect a large reply in pieces of 10 kB.
            with self._request("GET", "/batch", self.batch_timeout, stream=True) as response:
                body = response.raw.read(decode_content=True)
        except (requests.RequestException, HTTPError) as error:
            raise ReplyLost(f"GET {self.url}/batch broke off: {error}") from error
        try:
            return decode_reply(body)
        except ValueError as error:
            raise ReplyLost(f"GET {self.url}/batch answered {body[:80]!r}, which is no batch ({error})") from error

    def abort(self) -> None:
        """Ends the requests of other threads, which fail with `ReplyLost`."""
        self._adapter.abort()

    def close(self) -> None:
        self._session.close()

    def _request(
        self, method: str, path: str, timeout: float, json: Any = None, stream: bool = False
    ) -> requests.Response:
        try:
            response = self._session.request(method, self.url + path, json=json, timeout=timeout, stream=stream)
        except requests.ConnectionError as error:
            kind = ApiUnreachable if _never_sent(error) else ReplyLost
            raise kind(f"{method} {self.url}{path} failed: {_reason(error)}") from error
        except requests.RequestException as error:
            raise ReplyLost(f"{method} {self.url}{path} failed within {timeout:g} s: {error}") from error
        if response.status_code >= 500:
            raise ReplyLost(f"{method} {self.url}{path} answered {response.status_code} {response.text[:80]!r}")
        if response.status_code >= 400 and path != "/":
            raise RolloutError(
                f"{method} {self.url}{path} answered {response.status_code} {response.text[:200]!r}: the server there "
                "does not speak the protocol of atroposlib 0.4. Install that version where the API runs."
            )
        return response

    def _parse(self, model: type[Reply], response: requests.Response) -> Reply:
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            raise ReplyLost(f"{response.url} answered {response.content[:80]!r}, not a {model.__name__}") from error


def _reason(error: requests.ConnectionError) -> str:
    """The innermost of the messages that urllib3 wraps in each other, such as "[Errno 111] Connection refused"."""
    cause = error.args[0] if error.args else error
    cause = cause.reason if isinstance(cause, MaxRetryError) and cause.reason else cause
    return str(cause).removeprefix(f"{cause.__class__.__name__}: ").rpartition("connection: ")[2]


def _never_sent(error: requests.ConnectionError) -> bool:
    """Whether `requests` failed before it had a connection (refused, unknown host, connect timeout)."""
    if isinstance(error, requests.ConnectTimeout):
        return True
    cause = error.args[0]
    return isinstance(cause, MaxRetryError) and isinstance(cause.reason, NewConnectionError)
