"""Writes the log-probabilities of sampled tokens into the answers of vLLM's own OpenAI routes.

These routes make an object for each token and validate it, which takes longer than all else that
the API server does with a token. For completions whose log-probabilities came the fast way
(`SampledLogprobs`), the same objects are made here from lists, without a validation of what vLLM
itself has made. All others, such as answers with token ids in place of texts, keep vLLM's own code.
"""

from functools import wraps

from trl_atropos.server.sampled_logprobs import LOWEST_LOGPROB, SampledLogprobs


def install() -> None:
    """Wraps what makes the log-probabilities of vLLM's two routes, in this process, once."""
    # not above: the API server imports these, and no other process needs them
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    if OpenAIServingChat._create_chat_logprobs.__module__ == __name__:
        return
    OpenAIServingChat._create_chat_logprobs = _quick(
        OpenAIServingChat._create_chat_logprobs, _chat_logprobs
    )
    OpenAIServingCompletion._create_completion_logprobs = _quick(
        OpenAIServingCompletion._create_completion_logprobs, _completion_logprobs
    )


def _quick(create, create_quickly):
    """Returns a method of vLLM's that leaves log-probabilities of sampled tokens to
    `create_quickly`."""

    @wraps(create)
    def created(serving, **options):
        sampled = options["top_logprobs"]
        if not isinstance(sampled, SampledLogprobs) or not _takes_texts(serving, options):
            return create(serving, **options)
        texts = sampled.texts()
        if len(texts) != len(options["token_ids"]) or None in texts:
            return create(serving, **options)
        values = [max(value, LOWEST_LOGPROB) for value in sampled.values]
        return create_quickly(texts, values, options)

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


def _completion_logprobs(texts: list[str], values: list[float], options: dict):
    """Returns the log-probabilities of a choice of `/v1/completions`."""
    from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs

    offset = options.get("initial_text_offset", 0)
    offsets = []
    entries = []
    for text, value in zip(texts, values, strict=True):
        offsets.append(offset)
        offset += len(text)
        entries.append({text: value})
    return CompletionLogProbs.model_construct(
        text_offset=offsets, token_logprobs=values, tokens=texts, top_logprobs=entries
    )
