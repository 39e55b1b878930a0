"""A thin HTTP client of the Atropos API: one method per endpoint, each with a timeout and errors that name the URL.

`AtroposSource` and `registration.py` call it. It retries nothing: whether a second try is safe depends on whether the
request was sent, and the two errors tell that apart.
"""

from typing import Any, Literal, TypeVar

import requests
from pydantic import BaseModel, ValidationError
from urllib3.exceptions import MaxRetryError, NewConnectionError

from trl_atropos.errors import RolloutError

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


class EnvironmentStatus(BaseModel):
    """Of the API's many fields, the one that is wanted: sequences in the largest group that is queued, at least 1."""

    max_group_size: int = 1


class BatchReply(BaseModel):
    """`batch` is None while no batch can be assembled; `status` is "error" when no trainer is registered."""

    batch: list[Any] | None
    status: Literal["error"] | None = None


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
        self._request_timeout = request_timeout
        self._batch_timeout = batch_timeout
        self._session = requests.Session()
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
                f"{self.url} is not an Atropos API: GET / answered {response.status_code} {response.text[:80]!r}. "
                "Set `atropos_url` to the host and port that `python -m atroposlib.cli.run_api` listens on."
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

    def first_environment(self) -> EnvironmentStatus | None:
        """How the first environment stands, or None if none has ever registered, which the API answers by a 500."""
        try:
            response = self._request("GET", "/status-env", self._request_timeout, json={"env_id": 0})
        except ReplyLost:
            return None
        return self._parse(EnvironmentStatus, response)

    def batch(self) -> BatchReply:
        """The next batch. The API forgets it before it answers, so it is delivered at most once."""
        return self._parse(BatchReply, self._request("GET", "/batch", self._batch_timeout))

    def close(self) -> None:
        self._session.close()

    def _request(self, method: str, path: str, timeout: float, json: Any = None) -> requests.Response:
        try:
            response = self._session.request(method, self.url + path, json=json, timeout=timeout)
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
            raise ReplyLost(f"{response.url} answered {response.text[:80]!r}, not a {model.__name__}") from error


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
