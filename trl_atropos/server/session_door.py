"""Lets the calls of a session in: `POST /s/ID/v1/chat/completions` and a few others.

`control.py` gives each request below `/s` to the `Door`, which checks it, takes out of it what one
client could reach another one by, and passes it on to vLLM's own route. What the door refuses gets
an error that OpenAI's and Anthropic's clients can read. Everything that is sampled meanwhile is
kept by `session_capture.py`, which finds the `Call` in a context variable.

Runs without vLLM.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable

from starlette.responses import JSONResponse

from trl_atropos.protocol import SESSION_PREFIX
from trl_atropos.server.plane import HIDDEN
from trl_atropos.server.sessions import (
    CALL,
    MAX_KEPT,
    NO_SESSION,
    SESSION_ID,
    Call,
    Session,
    Sessions,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
SAMPLES = {CHAT, COMPLETIONS, RESPONSES, MESSAGES}
# An exact list: a path with a slash more would be redirected to the plain route.
METHODS = {
    **dict.fromkeys(SAMPLES, "POST"),
    "/v1/messages/count_tokens": "POST",
    "/v1/models": "GET",
}
# All others are dropped: an API key could be an evaluation's, and others name a request or choose
# where it is computed.
KEPT_HEADERS = {
    b"host",
    b"content-type",
    b"accept",
    b"user-agent",
    b"anthropic-version",
    b"anthropic-beta",
}
# Fields by which a client could reach another one's requests, or choose where and when its own are
# computed.
DROPPED_FIELDS = (
    *("priority", "session_id", "request_id", "cache_salt", "prompt_cache_key"),
    *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "data_parallel_rank"),
)
# Fields that a session does not take -> why
REFUSED_FIELDS = {
    "use_beam_search": "a beam search does not sample, so there is nothing to train on",
    "background": "a session keeps what is sampled while its client waits",
    "previous_response_id": "the store of responses is shared by all clients: send the whole "
    "conversation",
    "prompt_embeds": "a session keeps token ids, and these have none",
}
# Fields that bound the tokens of one completion, in any dialect
LENGTH_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
COMPLETIONS_LENGTH = 16  # tokens that `/v1/completions` samples if its client names no bound
MAX_BODY = 4 << 20  # bytes
BODY_WITHIN = 60.0  # seconds

Serve = Callable[[dict, Callable, Callable], Awaitable[None]]


class CallRefused(Exception):
    """The call is not let in."""

    def __init__(self, status: int, reason: str, message: str, retry: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason  # short: refusals are counted by it
        self.retry = retry  # whether the client may try again as it is


class Door:
    """The ASGI app of all routes below `/s`.

    Args:
        sessions: the server's.
        longest: returns the server's `max_model_len`, in tokens.
        serve: the app that answers the plain routes.
    """

    def __init__(self, sessions: Sessions, longest: Callable[[], int], serve: Serve) -> None:
        self.sessions = sessions
        self.longest = longest
        self.serve = serve

    async def __call__(self, scope, receive, send) -> None:
        """Answers a request. `Sessions.hide` has taken the id out of its path."""
        route = scope["path"].removeprefix(f"{SESSION_PREFIX}/{HIDDEN}")
        session = self.sessions.find(scope.get(SESSION_ID, ""))
        try:
            if session is None:
                raise CallRefused(404, "unknown", NO_SESSION)
            if METHODS.get(route) != scope["method"]:
                raise CallRefused(
                    404,
                    "route",
                    f"a session has no route {scope['method']} {route}: it has "
                    f"{', '.join(METHODS)}",
                )
            await self._let_in(session, route, scope, receive, send)
        except CallRefused as refused:
            counts = self.sessions.counts if session is None else session.counts
            counts[f"refused/{refused.reason}"] += 1
            await _error_of(refused, route)(scope, receive, send)

    async def _let_in(self, session: Session, route: str, scope, receive, send) -> None:
        """Answers a call of a session."""
        require_place(session)
        session.in_flight += 1
        reserved = 0
        try:
            content = await _read(receive)
            call = Call(session, session.counts["calls"], route)
            if METHODS[route] == "POST":
                body = parse(content)
                if route == RESPONSES:
                    body["store"] = False  # which all clients could read from
                content = json.dumps(body).encode()
                if route in SAMPLES:
                    reserved = self._reserve(session, body, route)
                    call.unseen = route == COMPLETIONS and body.get("max_tokens") == 0
                    call.reuses = session.query.reuse and not has_token_ids(body.get("prompt"))
            if route in SAMPLES:
                session.counts["calls"] += 1
            CALL.set(call)
            await self._pass_on(call, content, scope, receive, send)
        finally:
            session.in_flight -= 1
            session.reserved -= reserved
            session.touch()

    def _reserve(self, session: Session, body: dict, route: str) -> int:
        """Sets aside the tokens that a call may sample. Returns their number. Raises `CallRefused`
        if they are more than the session has left."""
        longest = self.longest()
        if session.query.settings.max_tokens is not None:
            longest = min(longest, session.query.settings.max_tokens)
        completions, length = asked_for(body, route, longest)
        asked = completions * length
        left = session.query.max_tokens - session.counts["tokens"] - session.reserved
        if asked > left:
            raise CallRefused(
                429,
                "tokens",
                f"this call may sample {asked} tokens ({completions} completions of {length}), and "
                f"the session has {max(left, 0)} of {session.query.max_tokens} left: ask for fewer "
                "by `max_tokens` or `n`, or open the session with more",
            )
        session.reserved += asked
        return asked

    async def _pass_on(self, call: Call, content: bytes, scope, receive, send) -> None:
        """Has the plain route answer. A session that ends meanwhile answers 410 in its place."""
        messages = [{"type": "http.request", "body": content, "more_body": False}]

        async def replay() -> dict:
            return messages.pop() if messages else await receive()

        has_begun = False

        async def send_unless_ended(message) -> None:
            nonlocal has_begun
            if has_begun or call.session.ended is None:
                has_begun = True
                if message.get("status", 200) >= 400:  # vLLM's own refusal
                    call.session.counts[f"refused/HTTP {message['status']}"] += 1
                await send(message)

        scope["path"] = call.route
        scope["raw_path"] = call.route.encode()
        scope["query_string"] = b""
        scope["headers"] = _kept_headers(scope["headers"], len(content))
        await self.serve(scope, replay, send_unless_ended)
        if not has_begun:
            raise _gone(call.session)


def require_place(session: Session) -> None:
    """Raises `CallRefused` if the session has ended, or takes no further call now."""
    query = session.query
    if session.ended is not None:
        raise _gone(session)
    if session.in_flight >= query.max_in_flight:
        raise CallRefused(
            429,
            "calls at a time",
            f"{session.in_flight} calls of this session are in flight, which is its limit",
            retry=True,
        )
    if session.counts["calls"] >= query.max_calls:
        raise CallRefused(429, "calls", f"this session has made all of its {query.max_calls} calls")
    if session.tree.num_tokens >= MAX_KEPT:
        raise CallRefused(
            429,
            "kept tokens",
            f"this session keeps {session.tree.num_tokens} tokens, with those of its prompts, "
            "which is the limit",
        )


def _gone(session: Session) -> CallRefused:
    return CallRefused(410, "ended", f"this session has ended ({session.ended})")


async def _read(receive) -> bytes:
    """Returns the body of a request. Raises `CallRefused` if it is too large or too slow."""
    content = bytearray()
    more = True
    try:
        async with asyncio.timeout(BODY_WITHIN):
            while more:
                message = await receive()
                content += message.get("body", b"")
                more = message.get("more_body", False)
                if len(content) > MAX_BODY:
                    raise CallRefused(
                        413, "body", f"the body is larger than {MAX_BODY} bytes, which is the limit"
                    )
    except TimeoutError as late:
        message = f"the body did not come within {BODY_WITHIN:g} s"
        raise CallRefused(408, "slow body", message) from late
    return bytes(content)


def parse(content: bytes) -> dict:
    """Returns the body of a call without `DROPPED_FIELDS`. Raises `CallRefused` for a body that is
    no JSON object, or that has one of `REFUSED_FIELDS`."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise CallRefused(400, "no JSON", f"the body must be JSON: {problem}") from problem
    if not isinstance(body, dict):
        raise CallRefused(400, "no JSON", "the body must be a JSON object")
    for name in DROPPED_FIELDS:
        body.pop(name, None)
    for name, why in REFUSED_FIELDS.items():
        value = body.get(name)
        if value is not None and value is not False:
            raise CallRefused(400, name, f"a session does not take `{name}`: {why}")
    return body


def asked_for(body: dict, route: str, longest: int) -> tuple[int, int]:
    """Returns how many completions a call asks for, and at most how many tokens of each. Raises
    `CallRefused` if these are no integers."""
    lengths = []
    for name in LENGTH_FIELDS:
        length = _integer(body, name)
        if length is not None:
            lengths.append(length)
    if not lengths and route == COMPLETIONS:
        lengths.append(COMPLETIONS_LENGTH)
    # Whatever a client asks for, a completion has at least one token, and fits the model.
    length = max(1, min(max(lengths, default=longest), longest))
    per_prompt = _integer(body, "n")
    completions = 1 if per_prompt is None else max(1, per_prompt)
    return completions * _num_prompts(body.get("prompt")), length


def _integer(body: dict, name: str) -> int | None:
    value = body.get(name)
    if value is None or type(value) is int:
        return value
    raise CallRefused(400, name, f"`{name}` must be an integer (seen: {value!r:.100})")


def _num_prompts(prompt) -> int:
    """Returns how many prompts the field `prompt` has: a text or token ids are one, a list may have
    several of them."""
    if not isinstance(prompt, list):
        return 1
    return max(1, sum(not isinstance(part, int) for part in prompt))


def has_token_ids(prompt) -> bool:
    """Returns whether the field `prompt` has token ids, which a client wants as they are."""
    if not isinstance(prompt, list):
        return False
    return any(isinstance(part, int | list) for part in prompt)


def _kept_headers(headers: list[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    """Returns `KEPT_HEADERS` of a request, with the length of its new body."""
    kept = [(name, value) for name, value in headers if name in KEPT_HEADERS]
    return [*kept, (b"content-length", str(length).encode())]


def _error_of(refused: CallRefused, route: str) -> JSONResponse:
    """Returns the answer to a call that is refused, in its client's dialect."""
    kind = "rate_limit_error" if refused.status == 429 else "invalid_request_error"
    problem = {"type": kind, "message": str(refused), "code": refused.status}
    content = {"error": problem}
    if route.startswith(MESSAGES):
        content["type"] = "error"
    # Both clients would try again after 408, 409, 429 and errors of the server.
    headers = {"x-should-retry": "true" if refused.retry else "false"}
    return JSONResponse(content, refused.status, headers)
