"""Answers of vLLM's OpenAI routes with log-probabilities of sampled tokens: as vLLM makes them."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
from starlette.responses import JSONResponse
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion import api_router as chat_router
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion import api_router as completion_router
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponse,
    CompletionResponseChoice,
)
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from trl_atropos.server import openai_logprobs
from trl_atropos.server.sampled_logprobs import Decoder, SampledLogprobs

openai_logprobs.install()
CHAT = OpenAIServingChat._create_chat_logprobs
COMPLETION = OpenAIServingCompletion._create_completion_logprobs


@pytest.fixture(scope="module")
def tokenizer(server_model):
    return AutoTokenizer.from_pretrained(server_model)


def sampled(tokenizer, with_texts: bool = True) -> tuple[list[int], SampledLogprobs]:
    """300 random bytes, and characters of several of them; one value is minus infinity."""
    tokens = np.random.default_rng(0).integers(0, 256, 300).tolist()
    tokens += tokenizer("a \u20ac \u6f22", add_special_tokens=False)["input_ids"]
    detokenizer = IncrementalDetokenizer()
    detokenizer.update(tokens, False)
    values = np.random.default_rng(1).normal(-2, 1, len(tokens)).tolist()
    values[7] = -float("inf")
    decoder = Decoder(tokenizer) if with_texts else None
    return tokens, SampledLogprobs(detokenizer, decoder, values)


def serving(create) -> object:
    """An instance of vLLM's class with the one attribute that the method reads."""
    owner = OpenAIServingChat if create is CHAT else OpenAIServingCompletion
    instance = owner.__new__(owner)
    instance.return_tokens_as_token_ids = False
    return instance


@pytest.mark.parametrize(
    "options",
    [
        {"num_output_top_logprobs": 0},
        {"num_output_top_logprobs": 0, "return_as_token_id": True},
        {"num_output_top_logprobs": 0, "logprob_token_ids": [1]},
        {"num_output_top_logprobs": 0, "part": slice(3, 9)},
    ],
)
@pytest.mark.parametrize("create", [CHAT, COMPLETION])
def test_answer_is_vllms_own(tokenizer, create, options):
    options = dict(options)
    tokens, logprobs = sampled(tokenizer)
    part = options.pop("part", slice(None))
    if create is COMPLETION and part != slice(None):
        options["initial_text_offset"] = 17
    tokens, logprobs = tokens[part], logprobs[part]
    common = {"token_ids": tokens, "tokenizer": tokenizer, **options}
    quick = create(serving(create), top_logprobs=logprobs, **common)
    own = create.__wrapped__(serving(create), top_logprobs=list(logprobs), **common)
    assert type(quick) is type(own)
    assert quick.model_dump() == own.model_dump()
    assert quick.model_dump_json(exclude_unset=True) == own.model_dump_json(exclude_unset=True)


@pytest.mark.parametrize("create", [CHAT, COMPLETION])
def test_tokens_without_texts_are_left_to_vllm(tokenizer, create):
    tokens, logprobs = sampled(tokenizer, with_texts=False)
    common = {"token_ids": tokens, "tokenizer": tokenizer, "num_output_top_logprobs": 0}
    quick = create(serving(create), top_logprobs=logprobs, **common)
    own = create.__wrapped__(serving(create), top_logprobs=list(logprobs), **common)
    assert quick == own


@pytest.mark.parametrize("create", [CHAT, COMPLETION])
def test_other_logprobs_are_left_to_vllm(tokenizer, create):
    tokens, logprobs = sampled(tokenizer)
    common = {"token_ids": tokens, "tokenizer": tokenizer, "num_output_top_logprobs": 0}
    quick = create(serving(create), top_logprobs=list(logprobs), **common)
    assert quick == create.__wrapped__(serving(create), top_logprobs=list(logprobs), **common)


HANDLERS = {
    CHAT: (OpenAIServingChat, "create_chat_completion"),
    COMPLETION: (OpenAIServingCompletion, "create_completion"),
}


def answer(create, logprobs: list):
    """vLLM's answer with two choices."""
    usage = UsageInfo(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    choices = []
    for index, of_choice in enumerate(logprobs):
        if create is CHAT:
            message = ChatMessage(role="assistant", content="a \u20ac")
            choice = ChatCompletionResponseChoice(index=index, message=message, logprobs=of_choice)
        else:
            choice = CompletionResponseChoice(index=index, text="a \u20ac", logprobs=of_choice)
        choices.append(choice)
    kind = ChatCompletionResponse if create is CHAT else CompletionResponse
    return kind(id="a", created=1, model="m", choices=choices, usage=usage)


def body_by_route(create, handler: object, stream: bool, make) -> bytes:
    """What vLLM's route would send of the answer that `make` makes in the handler."""
    owner, method = HANDLERS[create]
    route = _route_of(owner, method, make)
    request = SimpleNamespace(stream=stream)

    async def answered() -> bytes:
        response = await route(handler, request)
        router = chat_router if create is CHAT else completion_router
        return router.JSONResponse(content=response.model_dump()).body

    return asyncio.run(answered())


def _route_of(owner: type, method: str, make):
    """The handler's method as it is installed, with `make` in place of vLLM's own."""

    async def own(_serving, _request):
        return make()

    return openai_logprobs._collecting(owner, own)


@pytest.mark.parametrize("create", [CHAT, COMPLETION])
def test_whole_answer_is_vllms_byte_for_byte(tokenizer, create):
    """But for the form of a number: 1e-7 and 1e-07 are one."""
    tokens, logprobs = sampled(tokenizer)
    logprobs.values[3] = -1.5e-7
    common = {"token_ids": tokens, "tokenizer": tokenizer, "num_output_top_logprobs": 0}
    handler = serving(create)

    def quick():
        return answer(create, [create(handler, top_logprobs=logprobs, **common)] * 2)

    own = create.__wrapped__(handler, top_logprobs=list(logprobs), **common)
    expected = JSONResponse(answer(create, [own, own]).model_dump()).body
    body = body_by_route(create, handler, False, quick)
    assert JSONResponse(json.loads(body)).body == expected
    assert body.count(b"-1.5e-7,") + body.count(b"-1.5e-7}") == (2 if create is CHAT else 4)


@pytest.mark.parametrize("create", [CHAT, COMPLETION])
def test_choices_keep_their_own_logprobs(tokenizer, create):
    tokens, logprobs = sampled(tokenizer)
    handler = serving(create)
    common = {"tokenizer": tokenizer, "num_output_top_logprobs": 0}

    def quick():
        made = []
        for part in (slice(0, 5), slice(5, 12)):
            options = {"token_ids": tokens[part], "top_logprobs": logprobs[part], **common}
            made.append(create(handler, **options))
        return answer(create, made)

    first, second = json.loads(body_by_route(create, handler, False, quick))["choices"]
    field = "content" if create is CHAT else "tokens"
    assert len(first["logprobs"][field]) == 5 and len(second["logprobs"][field]) == 7


@pytest.mark.parametrize("create", [CHAT, COMPLETION])
@pytest.mark.parametrize("is_stream", [True, False])
def test_streams_and_other_routes_get_vllms_objects(tokenizer, create, is_stream):
    """Handlers of other routes inherit from these, and read the answer themselves."""
    tokens, logprobs = sampled(tokenizer)
    handler = serving(create)
    if not is_stream:
        handler.__class__ = type("OtherRoute", (type(handler),), {})
    common = {"token_ids": tokens, "tokenizer": tokenizer, "num_output_top_logprobs": 0}
    made = []

    def quick():
        made.append(create(handler, top_logprobs=logprobs, **common))
        return answer(create, made)

    body_by_route(create, handler, is_stream, quick)
    own = create.__wrapped__(handler, top_logprobs=list(logprobs), **common)
    assert made[0].model_dump() == own.model_dump()


def test_second_installation_does_nothing():
    openai_logprobs.install()
    assert OpenAIServingChat._create_chat_logprobs is CHAT
