"""Has every request sample from the policy, whichever route it came by, and notes what sampled its completions.

A `Recorder` takes the place of the engine client's `generate`, which is below all of vLLM's routes and our own. Tokens
have a version, not requests: the engine marks what it samples with the number of publishes so far, so that a request
which waited in its queue over a publish is as new as its first token. With a vLLM that has no such marks, a completion
counts from the publish at which its request was admitted, which is never too new, to that at which its answer came.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from functools import lru_cache

from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from trl_atropos.protocol import Note, SamplingSettings, Span, completion_key
from trl_atropos.server.compat import marks_of
from trl_atropos.server.ledger import History, Ledger

LOWEST_LOGPROB = -9999.0  # what vLLM's own routes send for minus infinity, which JSON cannot hold


def sampled_logprobs(completion: CompletionOutput) -> list[float]:
    """The log-probability of each sampled token, as every route sends it."""
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [max(float(entry[token].logprob), LOWEST_LOGPROB) for token, entry in pairs]


def settings_of(params: SamplingParams) -> SamplingSettings:
    named = SamplingSettings(*(getattr(params, name) for name in SamplingSettings._fields))
    return _same(named._replace(top_k=max(0, named.top_k)))  # -1 means 0, all tokens


@lru_cache(maxsize=1024)
def _same(settings: SamplingSettings) -> SamplingSettings:
    """One object for all completions that are sampled alike: the ledger remembers many."""
    return settings


class Recorder:
    """
    Args:
        engine: vLLM's engine client. Its `generate` is replaced.
        history (`History`): What sampled when.
        ledger (`Ledger`): Where completions with log-probabilities are noted. Those that were aborted are not.
        until_open: Returns when no publish is under way, so that who arrives in one begins with the next version.
        policy: Entered while a request samples; gives the adapter that it samples from, None for the model itself.
    """

    def __init__(
        self,
        engine,
        history: History,
        ledger: Ledger,
        until_open: Callable[[], Awaitable[None]],
        policy: Callable[[], AbstractContextManager[LoRARequest | None]],
    ) -> None:
        self._generate = engine.generate
        self._history = history
        self._ledger = ledger
        self._until_open = until_open
        self._policy = policy
        engine.generate = self.generate

    async def generate(self, *args, **kwargs) -> AsyncIterator[RequestOutput]:
        """What the engine client's own does."""
        async with aclosing(self.stream(*args, **kwargs)) as outputs:
            async for output, _ in outputs:
                yield output

    async def stream(
        self,
        prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        **options,
    ) -> AsyncIterator[tuple[RequestOutput, list[Span]]]:
        """
        The same, and the versions of each completion that ends with an output.

        `lora_request` is what the name of a model in the request stands for at one of vLLM's routes. It is not used:
        some of those routes take any name for the base model, which is not what is trained.
        """
        await self._until_open()
        with self._policy() as adapter:
            admitted = self._history.publishes
            adapter_id = None if adapter is None else adapter.lora_int_id
            sampled, settings = _Sampled(sampling_params), settings_of(sampling_params)
            outputs = self._generate(prompt, sampling_params, request_id, lora_request=adapter, **options)
            async with aclosing(outputs):  # else an abandoned request would run on until it is collected
                async for output in outputs:
                    spans = []
                    for completion in output.outputs:
                        sampled.add(completion)
                        span = self._span(completion, admitted, adapter_id) if _is_whole(completion) else None
                        if span is not None:
                            spans.append(span)
                            if sampled.has_logprobs:
                                key = completion_key(output.prompt_token_ids, *sampled.pop(completion.index))
                                self._ledger.note(key, Note(span, settings))
                    yield output, spans

    def _span(self, completion: CompletionOutput, admitted: int, adapter_id: int | None) -> Span | None:
        """None for an adapter that no trainer has published."""
        first, last = marks_of(completion) or (admitted, self._history.publishes)
        begun, ended = (self._history.version(publishes, adapter_id) for publishes in (first, last))
        return None if begun is None or ended is None else (begun, ended)


class _Sampled:
    """The tokens and log-probabilities of the completions of one request, which come whole or in parts."""

    def __init__(self, params: SamplingParams) -> None:
        self.has_logprobs = params.logprobs is not None
        self._in_parts = params.output_kind is RequestOutputKind.DELTA
        self._so_far: defaultdict[int, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))

    def add(self, completion: CompletionOutput) -> None:
        if self.has_logprobs and (self._in_parts or _is_whole(completion)):
            token_ids, logprobs = self._so_far[completion.index]
            token_ids += completion.token_ids
            logprobs += sampled_logprobs(completion)

    def pop(self, index: int) -> tuple[list[int], list[float]]:
        return self._so_far.pop(index)


def _is_whole(completion: CompletionOutput) -> bool:
    return completion.finish_reason not in (None, "abort", "error")
