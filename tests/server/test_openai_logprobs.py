"""Answers of vLLM's OpenAI routes with log-probabilities of sampled tokens: as vLLM makes them."""

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
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


def test_second_installation_does_nothing():
    openai_logprobs.install()
    assert OpenAIServingChat._create_chat_logprobs is CHAT
