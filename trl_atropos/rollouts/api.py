"""The HTTP client of the Atropos API, and the registration of a run as its trainer.

`AtroposClient` retries nothing, because a second try is safe only if the request was not sent: then
it raises `ApiUnreachable`, and otherwise `ReplyLost`. `pull.py` and `source.py` use the client.

`python -m trl_atropos.rollouts.api` runs Atropos' own API with two more routes.
"""

import logging
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.wire import decode_reply
from trl_atropos.rollouts.wire_format import BatchReply

logger = logging.getLogger(__name__)

UNREGISTERED = -1
RETRY_PAUSE = 0.5  # seconds
HEAL_TRIES = 3
MAX_ENVIRONMENTS = 256  # one request for each
BATCH = "/batch"
NAMES = "/environment-names"
REMOVE_STRAYS = "/remove-strays"
# Answers of proxies, by their status.
NO_CREDENTIALS = (401, 403, 407)
TOO_MANY = 429
NOT_CACHED = {"Cache-Control": "no-cache, no-store", "Pragma": "no-cache"}
T = TypeVar("T")


class NoAnswer(RolloutError):
    """The API gave no usable answer to a request."""


class ApiUnreachable(NoAnswer):
    """There is no connection: the request was never sent, so trying again is safe."""


class RateLimited(ApiUnreachable):
    """Something before the API refused the request because there were too many. The API has not
    seen it."""


class ReplyLost(NoAnswer):
    """The request was sent and no usable answer came: a batch that the API handed out in it is
    lost."""


class Registration(msgspec.Struct, frozen=True):
    """Body of `POST /register`."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class Info(msgspec.Struct):
    batch_size: int  # of the registered trainer; `UNREGISTERED` before the first registration
    max_token_len: int


class Status(msgspec.Struct):
    current_step: int  # counts assembled batches
    queue_size: int  # groups that are not yet in a batch


class TrainerInfo(msgspec.Struct):
    group: str | None  # `wandb_group` of the registration that the API holds


class EnvironmentStatus(msgspec.Struct):
    # rollouts in the largest group that is queued, from any environment; at least 1
    max_group_size: int = 1
    self_queue_size: int = 0  # groups of this environment in the queue
    # share of a batch that no environment reserves by `min_batch_allocation`
    unallocated_fraction: float = 1.0
    env_weight: float = 1.0  # its share by weight and context length, at least 0.01


class LatestExample(msgspec.Struct):
    tokens: list[list[int]] = []
    env_id: int | None = None


class AtroposClient:
    """
    Sends requests to an Atropos API, each once.

    Args:
        url: root of the API, such as `http://127.0.0.1:8000`.
        request_timeout: seconds for every request but `batch`.
        batch_timeout: seconds for `batch`. Make it long, because a request that is given up loses
            its batch.
    """

    def __init__(self, url: str, request_timeout: float, batch_timeout: float):
        if not url.startswith(("http://", "https://")):
            raise RolloutError(
                f"{url!r} is not the URL of an Atropos API. Write it as http://HOST:PORT."
            )
        self.url = url.rstrip("/")
        self.batch_timeout = batch_timeout
        self._request_timeout = request_timeout
        self._sockets: set[socket.socket] = set()  # of requests in flight

    def greet(self) -> None:
        """Raises `RolloutError` if something other than an Atropos API answers at the URL."""
        status, body = self._request("GET", "/")
        if b"AtroposLib API" not in body:
            raise RolloutError(
                f"{self.url} is not an Atropos API: GET / answered {status} {body[:80]!r}",
                fix="Set `atropos_url` to the host and port that `python -m "
                "atroposlib.cli.run_api` listens on.",
                code="not-atropos",
            )

    def register(self, registration: Registration) -> None:
        """Asks to be the trainer. The API answers alike whether it takes the registration or
        ignores it."""
        self._request("POST", "/register", registration)

    def reset(self) -> None:
        """Discards everything that the API holds: queue, environments and registration."""
        self._request("GET", "/reset_data")

    def info(self) -> Info:
        return self._get("/info", Info)

    def status(self) -> Status:
        return self._get("/status", Status)

    def trainer(self) -> str | None:
        """Returns the `wandb_group` of the registration that the API holds, or None."""
        return self._get("/wandb_info", TrainerInfo).group

    def environment(self, env_id: int) -> EnvironmentStatus | None:
        """Returns None if the API has no environment of that number: it answers 500."""
        # Some builds of the API read the number from the path, 0.4.0 reads it from the body.
        with suppress(ReplyLost):
            return self._get(f"/status-env?env_id={env_id}", EnvironmentStatus, {"env_id": env_id})

    def environments(self) -> list[EnvironmentStatus]:
        """Returns all environments that have registered since the API started, by number."""
        statuses: list[EnvironmentStatus] = []
        while len(statuses) < MAX_ENVIRONMENTS:
            status = self.environment(len(statuses))
            if status is None:
                break
            statuses.append(status)
        return statuses

    def names(self) -> list[str]:
        """Returns the names as which environments registered, by number. Empty if the API does not
        tell them: Atropos' own does not."""
        with suppress(RolloutError):
            return self._get(NAMES, list[str])
        return []

    def remove_strays(self) -> list[int] | None:
        """Has the API of a run remove the groups that keep it from assembling any batch, see
        `_remove_strays`. Returns their sizes, or None if the API cannot: Atropos' own cannot."""
        try:
            _, content = self._request("POST", REMOVE_STRAYS)
            return msgspec.json.decode(content, type=list[int])
        except NoAnswer:
            return []  # the next pull finds out what is wrong
        except (RolloutError, msgspec.MsgspecError):
            return None

    def latest_example(self) -> LatestExample | None:
        """Returns the group that was queued last, or None if the API cannot send it, for example
        because it has a NaN."""
        with suppress(ReplyLost):
            return self._get("/latest_example", LatestExample)

    def disconnect(self, env_id: int) -> None:
        """Has the API forget the weight of an environment and what it reserves of every batch."""
        self._request("POST", "/disconnect-env", {"env_id": env_id})

    def batch(self) -> BatchReply:
        """Returns the next batch. The API forgets a batch before it answers, so each is delivered
        at most once."""
        _, body = self._request("GET", BATCH, timeout=self.batch_timeout)
        try:
            return decode_reply(body)
        except ValueError as error:
            raise ReplyLost(
                f"GET {self.url}/batch answered {body[:80]!r}, which is no batch ({error})"
            ) from error

    def abort(self) -> None:
        """Makes requests of other threads fail with `ReplyLost`."""
        for open_socket in list(self._sockets):
            with suppress(OSError):  # it is closed already
                open_socket.shutdown(socket.SHUT_RDWR)

    def _get(self, path: str, reply: type[T], body: Any = None) -> T:
        _, content = self._request("GET", path, body)
        try:
            return msgspec.json.decode(content, type=reply)
        except msgspec.MsgspecError as error:
            raise ReplyLost(
                f"{self.url}{path} answered {content[:80]!r}, not a {reply.__name__}"
            ) from error

    def _request(
        self, method: str, path: str, body: Any = None, timeout: float | None = None
    ) -> tuple[int, bytes]:
        """Returns status and content of the reply. Uses a new connection, since the API may close
        an idle one just as it is used again. Ignores proxies."""
        request = f"{method} {self.url}{path}"
        connection = self._connect(request, timeout or self._request_timeout)
        open_socket = connection.sock  # the connection drops it when the reply begins
        self._sockets.add(open_socket)
        try:
            content = None
            if body is not None:
                content = msgspec.json.encode(body)
            headers = {"Connection": "close", "Content-Type": "application/json", **NOT_CACHED}
            connection.request(method, self._target(path), content, headers)
            response = connection.getresponse()
            status = response.status
            answer = response.read()
            location = response.getheader("Location", "")
        except TimeoutError as error:
            raise ReplyLost(f"{request} failed within {connection.timeout:g} s: {error}") from error
        except (OSError, HTTPException) as error:
            raise ReplyLost(f"{request} failed: {error!r}") from error
        finally:
            self._sockets.discard(open_socket)
            connection.close()
        if status >= 300 and not _is_another_server(path, status):
            _raise_for_status(status, f"{request} answered {status} {answer[:200]!r}", location)
        return status, answer

    def _connect(self, request: str, timeout: float) -> HTTPConnection:
        url = urlsplit(self.url)
        connection_type = HTTPConnection
        if url.scheme == "https":
            connection_type = HTTPSConnection
        connection = connection_type(url.hostname, url.port, timeout=timeout)
        try:
            connection.connect()
        except OSError as error:
            raise ApiUnreachable(f"{request} failed: {error}") from error
        return connection

    def _target(self, path: str) -> str:
        """Returns the path with a query that no request had before. Many caches do not look at a
        request's headers: only a new URL passes them."""
        separator = "?"
        if "?" in path:
            separator = "&"
        return f"{urlsplit(self.url).path}{path}{separator}unique={uuid.uuid4().hex}"


def _is_another_server(path: str, status: int) -> bool:
    """Returns whether a status says that the server has no page at `/`: then it is no Atropos API,
    as `AtroposClient.greet` reports."""
    return path == "/" and 400 <= status < 500 and status not in (*NO_CREDENTIALS, TOO_MANY)


def _raise_for_status(status: int, answered: str, location: str) -> None:
    """Raises the error that a status above 299 stands for. The API itself answers so with 404, 422
    or 500 only."""
    if status >= 500:
        raise ReplyLost(answered)
    if status == TOO_MANY:
        fix = (
            "The Atropos API limits nobody, so a proxy before it does: exempt this trainer, "
            "which asks about 30 times a second, or set `atropos_url` to the API itself."
        )
        raise RateLimited(answered, fix=fix)
    if status in NO_CREDENTIALS:
        fix = (
            "The Atropos API asks nobody for credentials, so a proxy or another server answers "
            "there: let this trainer pass, or set `atropos_url` to the API itself."
        )
        raise RolloutError(answered, fix=fix)
    if status < 400:
        fix = "Set `atropos_url` to where the API itself answers."
        raise RolloutError(answered, seen=location, fix=fix)
    fix = "The API of atroposlib 0.4 does not: install that version where the API runs."
    raise RolloutError(answered, fix=fix)


def label_of(env_id: int | None, names: Mapping[int, str]) -> str:
    """Returns the text after the word "environment" in a message: its name in `names`, or else its
    number at the API."""
    if env_id is None:
        return "without a number"
    return names.get(env_id) or str(env_id)


def disconnect_command(url: str, env_ids: list[int]) -> str:
    """Returns the shell command that has the API forget an environment."""
    env_id = "ID"
    if len(env_ids) == 1:
        env_id = str(env_ids[0])
    body = f'{{"env_id": {env_id}}}'
    header = "Content-Type: application/json"
    return f"`curl -X POST {url}/disconnect-env -H '{header}' -d '{body}'`"


# -------------------------------------------------------------------------------------- registering


def wait_for_api(call: Callable[[], T], timeout: float, failure: str) -> T:
    """Calls `call` until the API answers it. Raises `RolloutError(failure)` after `timeout`
    seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return call()
        except NoAnswer as error:
            if time.monotonic() >= deadline:
                raise RolloutError(f"{failure} Last try: {error}") from error
        time.sleep(RETRY_PAUSE)


def join(client: AtroposClient, registration: Registration, *, reset: bool) -> Status:
    """
    Registers, and verifies that the API holds this run's batch size and length.

    With `reset`, the API first discards what it holds. Otherwise it keeps the queue of an earlier
    trainer with the same batch size and length.

    Raises:
        NoAnswer: call again.
        RolloutError: it holds another registration, or takes none.
    """
    held = _register(client, registration, reset)
    wanted = Info(registration.batch_size, registration.max_token_len)
    if held != wanted:
        raise RolloutError(
            f"The Atropos API at {client.url} still holds another registration, of "
            f"{client.trainer()}: batch_size {held.batch_size} and max_token_len "
            f"{held.max_token_len}, and this run needs batch_size {wanted.batch_size} and "
            f"max_token_len {wanted.max_token_len} (its longest rollout + 1). If that run is over, "
            "set `reset_atropos: true` (in code `reset_api: true` of the `AtroposSource`) to throw "
            "away the rollouts queued there, or restart the API; restart the environments in both "
            "cases. If it is not, give this run an API of its own (`atropos_url`)."
        )
    return client.status()


def _register(client: AtroposClient, registration: Registration, reset: bool) -> Info:
    """Returns the registration that the API holds after this one has been sent."""
    # If an environment delivers before any trainer has registered, the API ignores every
    # registration, and never hands out what is queued. Another delivery may come between the reset
    # and the registration.
    for _ in range(1 + HEAL_TRIES):
        if reset:
            client.reset()
        client.register(registration)
        held = client.info()
        if held.batch_size != UNREGISTERED:
            return held
        reset = True
        # The API does not tell how many groups it received.
        message = (
            "The Atropos API at %s received groups before any trainer had registered: "
            "resetting it loses them."
        )
        logger.warning(message, client.url)
    raise RolloutError(
        f"The Atropos API at {client.url} does not take a registration: batch_size is "
        f"{UNREGISTERED} after {HEAL_TRIES} resets. Stop the environment of an earlier run "
        "that delivers to it, then restart the API."
    )


# ---------------------------------------------------------------------------- the API of a run


def _remove_strays(state: Any) -> list[int]:
    """
    Removes queued groups that no registered environment would send and whose size does not divide
    the batch, if the API cannot assemble a batch of what is queued. Returns their sizes.

    The API looks at the `group_size` of an environment only if a group has an `env_id`, and a group
    that is in no batch keeps all others waiting.
    """
    from atroposlib.api.utils import grab_exact_from_heterogeneous_queue

    queue = getattr(state, "queue", [])
    batch_size = getattr(state, "batchsize", 0)
    environments = getattr(state, "envs", ())
    sizes = [len(group["tokens"]) for group in queue]
    if sum(sizes) < batch_size:
        return []
    batch, _ = grab_exact_from_heterogeneous_queue(queue, batch_size)
    if batch is not None:
        return []
    known_sizes = {environment["group_size"] for environment in environments}
    strays = []
    kept = []
    for group, size in zip(queue, sizes, strict=True):
        divides_batch = size > 0 and batch_size % size == 0
        if size in known_sizes or divides_batch:
            kept.append(group)
        else:
            strays.append(size)
    state.queue = kept
    return strays


def reading_quickly(read: Callable) -> Callable:
    """Returns the method of a request that reads its JSON. Pydantic's core does it in a sixth of
    the time of Python's reader, and gives the same values. What it refuses is left to `read`."""
    from pydantic_core import from_json

    @wraps(read)
    async def json(request: Any) -> Any:
        with suppress(ValueError):
            return from_json(await request.body())
        return await read(request)

    return json


def main() -> None:
    """Runs Atropos' own API, with its flags, and with two more routes: one tells the names of
    environments, the other removes groups that keep the API from assembling batches. Groups are
    read quickly, and a batch is encoded at once, with `null` for a NaN, for which Atropos would
    lose the batch."""
    from atroposlib.api import app
    from atroposlib.cli import run_api
    from fastapi import Response
    from starlette.requests import Request

    Request.json = reading_quickly(Request.json)

    # All are coroutines, so they run in the event loop, where no group is added at the same time.
    async def names() -> list[str]:
        environments = getattr(app.state, "envs", ())
        return [environment["desired_name"] for environment in environments]

    async def remove_strays() -> list[int]:
        return _remove_strays(app.state)

    # FastAPI goes through an answer number by number before it encodes it: 5 microseconds a token,
    # in which the API answers nobody else.
    [route] = [route for route in app.routes if route.path == BATCH]
    app.routes.remove(route)

    async def batch() -> Response:
        answer = msgspec.json.encode(await route.endpoint())
        return Response(answer, media_type="application/json")

    app.get(BATCH)(batch)
    app.get(NAMES)(names)
    app.post(REMOVE_STRAYS)(remove_strays)
    run_api.main()


if __name__ == "__main__":
    main()
