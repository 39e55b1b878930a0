"""Puts log-probabilities of sampled tokens into the answers of vLLM's own OpenAI routes.

These routes make an object for each token, validate it, make a dictionary of it and encode that,
which takes longer than all else that the API server does with a token. For completions whose
log-probabilities came the fast way (`SampledLogprobs`), lists are made into the same JSON here.
All others, such as answers with token ids in place of texts, keep vLLM's own code.

The JSON of a whole answer's log-probabilities is encoded at once and takes the place of a stand-in:

    handler  `create_completion`            begins to collect, in the request's task
             `_create_completion_logprobs`  encodes, and returns a stand-in for vLLM to put in place
    router   `JSONResponse`                 encodes the answer, and replaces the stand-in

Parts of a stream are small, and are made of the objects that vLLM would have made.
"""

import secrets
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from importlib import import_module

import msgspec
from starlette.responses import JSONResponse

from trl_atropos.server.sampled_logprobs import LOWEST_LOGPROB, SampledLogprobs

ROUTES = "vllm.entrypoints.openai"
# begins the text of a stand-in: nobody else can write it
MARK = secrets.token_hex(16)


@dataclass
class Encoded:
    """The log-probabilities of one choice of an answer."""

    stand_in: bytes  # that vLLM's answer has in their place
    content: bytes


# What the answer of this task's request has. `None` if it is no whole answer of a route.
COLLECTED: ContextVar[list[Encoded] | None] = ContextVar("collected", default=None)


def install() -> None:
    """Wraps what makes the answers of vLLM's two routes, in this process, once."""
    # not above: the API server imports these, and no other process needs them
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    if OpenAIServingChat._create_chat_logprobs.__module__ == __name__:
        return
    OpenAIServingChat._create_chat_logprobs = _quick(
        OpenAIServingChat._create_chat_logprobs, _chat_logprobs, _chat_json
    )
    OpenAIServingCompletion._create_completion_logprobs = _quick(
        OpenAIServingCompletion._create_completion_logprobs, _completion_logprobs, _completion_json
    )
    OpenAIServingChat.create_chat_completion = _collecting(
        OpenAIServingChat, OpenAIServingChat.create_chat_completion
    )
    OpenAIServingCompletion.create_completion = _collecting(
        OpenAIServingCompletion, OpenAIServingCompletion.create_completion
    )
    for route in ("chat_completion", "completion"):
        import_module(f"{ROUTES}.{route}.api_router").JSONResponse = Answer


# ---------------------------------------------------------------------------------- whole answers


def _collecting(owner: type, create):
    """Returns a handler's method that answers a request, which collects what is encoded meanwhile.
    Handlers of other routes inherit it and read the answer themselves: theirs is vLLM's own."""

    @wraps(create)
    async def created(serving, request, *args, **options):
        is_whole = type(serving) is owner and not request.stream
        COLLECTED.set([] if is_whole else None)
        return await create(serving, request, *args, **options)

    return created


class Answer(JSONResponse):
    """An answer of a route, in which encoded log-probabilities take the place of stand-ins."""

    def render(self, content) -> bytes:
        body = super().render(content)
        for encoded in COLLECTED.get() or ():
            body = body.replace(encoded.stand_in, encoded.content)
        return body


# --------------------------------------------------------------------------- the log-probabilities


def _quick(create, make, encode):
    """Returns a method of vLLM's that leaves log-probabilities of sampled tokens to `make`, or in a
    whole answer to `encode`."""

    @wraps(create)
    def created(serving, **options):
        sampled = options["top_logprobs"]
        if not isinstance(sampled, SampledLogprobs) or not _takes_texts(serving, options):
            return create(serving, **options)
        texts = sampled.texts()
        if len(texts) != len(options["token_ids"]) or None in texts:
            return create(serving, **options)
        values = [max(value, LOWEST_LOGPROB) for value in sampled.values]
        collected = COLLECTED.get()
        if collected is None:
            return make(texts, values, options)
        stand_in = make([f"{MARK}-{len(collected)}"], [0.0], options)
        stand_in_json = JSONResponse(stand_in.model_dump()).body
        collected.append(Encoded(stand_in_json, encode(texts, values)))
        return stand_in

    created.__module__ = __name__
    return created


def _takes_texts(serving, options: dict) -> bool:
    """Returns whether an answer has the texts of the sampled tokens, and of no other tokens."""
    as_token_ids = options.get("return_as_token_id")
    if as_token_ids is None:
        as_token_ids = serving.return_tokens_as_token_ids
    return not as_token_ids and not options.get("logprob_token_ids")


def _chat_logprobs(texts: list[str], values: list[float], _options: dict):
    """Returns the log-probabilities of a choice of `/v1/chat/completions`."""
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionLogProbs,
        ChatCompletionLogProbsContent,
    )

    content = []
    for text, value in zip(texts, values, strict=True):
        entry = ChatCompletionLogProbsContent.model_construct(
            token=text,
            logprob=value,
            bytes=list(text.encode("utf-8", errors="replace")),
            top_logprobs=[],
        )
        content.append(entry)
    return ChatCompletionLogProbs.model_construct(content=content)


class _ChatToken(msgspec.Struct, gc=False):
    """One token of `/v1/chat/completions`, in vLLM's order of fields."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: tuple = ()


def _chat_json(texts: list[str], values: list[float]) -> bytes:
    """Returns what vLLM encodes `_chat_logprobs` to."""
    content = []
    for text, value in zip(texts, values, strict=True):
        bytes_of_text = list(text.encode("utf-8", errors="replace"))
        content.append(_ChatToken(text, value, bytes_of_text))
    return msgspec.json.encode({"content": content})


def _completion_logprobs(texts: list[str], values: list[float], options: dict):
    """Returns the log-probabilities of a choice of `/v1/completions`."""
    from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs

    fields = _completion_fields(texts, values, options.get("initial_text_offset", 0))
    return CompletionLogProbs.model_construct(**fields)


def _completion_json(texts: list[str], values: list[float]) -> bytes:
    """Returns what vLLM encodes `_completion_logprobs` to."""
    return msgspec.json.encode(_completion_fields(texts, values, 0))


def _completion_fields(texts: list[str], values: list[float], offset: int) -> dict[str, list]:
    """Returns vLLM's fields in vLLM's order. `offset` is that of the first token's text, in
    characters."""
    offsets = []
    entries = []
    for text, value in zip(texts, values, strict=True):
        offsets.append(offset)
        offset += len(text)
        entries.append({text: value})
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": texts,
        "top_logprobs": entries,
    }
