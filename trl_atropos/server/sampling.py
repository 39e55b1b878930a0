"""What environments ask of the inference server: `POST /generate`, and vLLM's own routes that
sample.

`Sampling` replaces the `generate` method of vLLM's engine client, which all of these routes call.
So it sees every request: one that arrives in a pause waits and begins with the next policy version,
each samples from the policy whatever model it names, and the ledger notes which versions sampled
each completion.

`/generate` is the route that an Atropos environment with `server_type: vllm` samples from. Request:
`{"prompt": {"prompt_token_ids": [...]} or str, "logprobs": 0, ...}` and any field of vLLM's
`SamplingParams`. Response: `{"text": [n], "prompt": str, "finish_reasons": [n], "logprobs":
[n][tokens][1] {"<token id>": float}, "prompt_token_ids": [...], "token_ids": [n][tokens]}`, as
atroposlib 0.4.0 reads it in `envs/server_handling/vllm_server.py`, and with `prompt_logprobs: k`
also `"prompt_logprobs": [null, {"<token id>": float, ...}, ...]`.
"""

import dataclasses
import logging
import math
import re
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from trl_atropos.protocol import RESHAPING_FIELDS, Note, SamplingSettings, Span, completion_key
from trl_atropos.server import compat
from trl_atropos.server.plane import (
    EVALUATION,
    ControlPlane,
    History,
    Refused,
    answer,
    while_connected,
)

logger = logging.getLogger("vllm.trl_atropos")

LOWEST_LOGPROB = -9999.0  # what vLLM's own routes send for minus infinity, which JSON cannot hold

IGNORED_FIELDS = ("model", "stream", "user")  # of the OpenAI protocol: environments send them along
# Fields that vLLM sets itself (it marks others by an underscore), and one that replays tokens no
# policy has sampled.
REFUSED_FIELDS = {
    "output_kind",
    "output_text_buffer_length",
    "skip_clone",
    "trace_decode_token_ids",
}
FIELDS = {
    name for name in SamplingParams.__struct_fields__ if not name.startswith("_")
} - REFUSED_FIELDS
STRUCTURED_FIELDS = {
    field.name for field in dataclasses.fields(StructuredOutputsParams) if field.init
}

# The engine's reason to end a completion, and one of the two that the environments' client knows.
FINISHED = {"stop": "stop", "length": "length", "repetition": "stop"}

compat.leave_logprobs_without_text()


class Sampling:
    """The requests of one engine. They wait while `plane` is paused."""

    def __init__(self, engine, plane: ControlPlane) -> None:
        self.plane = plane
        self.policy_version = 0  # that new requests sample from
        # that they sample from; None: from the model itself
        self.adapter: LoRARequest | None = None
        # unfinished requests by adapter, which must not be overwritten
        self.in_flight: Counter[int] = Counter()
        self.history = History()
        # unfinished requests by the version they began with
        self._versions_in_flight: Counter[int] = Counter()
        self._logits_processors = compat.logits_processors(engine.vllm_config)
        self._drops_seeds = compat.dies_of_seeds()
        self._dropped_seed = False  # and said so
        self._engine_generate = engine.generate
        engine.generate = self._generate_below_routes

    @property
    def oldest_version_in_flight(self) -> int:
        # `+` leaves out those with a count of 0
        return min(+self._versions_in_flight, default=self.policy_version)

    def serve(self, policy_version: int, adapter: LoRARequest | None) -> None:
        """Sets what requests sample from once the plane is open."""
        self.policy_version = policy_version
        self.adapter = adapter
        self.history.publish(policy_version, None if adapter is None else adapter.lora_int_id)

    async def generate(self, request: Request, send) -> None:
        """`POST /generate`. Raises vLLM's `EngineDeadError`, which concerns the whole server."""
        work = answer(
            self._completions(await request.body()),
            "a /generate request",
            (compat.EngineDeadError,),
        )
        # its end aborts the request in the engine
        task = await while_connected(work, request.receive)
        if task is not None:
            await task.result()(request.scope, request.receive, send)

    async def _completions(self, body: bytes) -> Response:
        prompt, params = parse(body)
        result = None
        spans = []
        try:
            async for output in self._stream(prompt, params, f"trl-atropos-{uuid.uuid4().hex}"):
                result, spans = output
        except compat.CLIENT_ERRORS as problem:
            raise Refused(str(problem), 400) from problem
        completions = sorted(result.outputs, key=lambda completion: completion.index)
        for completion in completions:
            if completion.finish_reason not in FINISHED:
                raise Refused(
                    f"the engine ended the request with {completion.finish_reason!r}", 503
                )
        reply = {
            "text": [completion.text for completion in completions],
            "prompt": result.prompt or "",
            "finish_reasons": [FINISHED[completion.finish_reason] for completion in completions],
            "prompt_token_ids": list(result.prompt_token_ids),
            "token_ids": [list(completion.token_ids) for completion in completions],
            # of the prompt, which were not computed anew
            "cached_tokens": result.num_cached_tokens or 0,
        }
        if params.logprobs is not None:
            reply["logprobs"] = [
                [
                    [{str(token): value}]
                    for token, value in zip(done.token_ids, _sampled_logprobs(done), strict=True)
                ]
                for done in completions
            ]
        if params.prompt_logprobs is not None:
            reply["prompt_logprobs"] = [
                {str(token): _finite(value.logprob) for token, value in entry.items()}
                if entry
                else None
                for entry in result.prompt_logprobs
            ]
        versions = f"{min(first for first, _ in spans)}-{max(last for _, last in spans)}"
        return JSONResponse(reply, headers={"x-policy-version": versions})

    async def _generate_below_routes(self, *args, **kwargs) -> AsyncIterator[RequestOutput]:
        """Takes the place of the engine client's `generate`."""
        async with aclosing(self._stream(*args, **kwargs)) as outputs:
            async for output, _ in outputs:
                yield output

    async def _stream(
        self,
        prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request=None,
        **options,
    ) -> AsyncIterator[tuple[RequestOutput, list[Span]]]:
        """The engine's outputs, each with the policy versions of the completions that end with it.
        `lora_request`, what a model name stands for, is not used: some of vLLM's routes take any
        name for the base model."""
        if self._drops_seeds and sampling_params.seed is not None:
            sampling_params = self._without_seed(sampling_params)
        await self.plane.until_open()
        version = self.policy_version
        adapter = self.adapter
        admitted = self.history.publishes
        adapter_id = None if adapter is None else adapter.lora_int_id
        noted = sampling_params.logprobs is not None
        settings = self._settings_of(sampling_params)
        in_parts = sampling_params.output_kind is RequestOutputKind.DELTA
        # tokens and log-probabilities so far, by completion
        sampled = defaultdict(lambda: ([], []))
        self._versions_in_flight[version] += 1
        self.in_flight[adapter_id] += 1
        try:
            outputs = self._engine_generate(
                prompt, sampling_params, request_id, lora_request=adapter, **options
            )
            # else an abandoned request would run on until it is collected
            async with aclosing(outputs):
                async for output in outputs:
                    spans = []
                    for completion in output.outputs:
                        whole = completion.finish_reason not in (None, "abort", "error")
                        if noted and (whole or in_parts):
                            tokens, logprobs = sampled[completion.index]
                            tokens += completion.token_ids
                            logprobs += _sampled_logprobs(completion)
                        span = self._span(completion, admitted, adapter_id) if whole else None
                        if span is not None:
                            spans.append(span)
                            if (evaluation := EVALUATION.get()) is not None:
                                self.plane.evaluations.note(evaluation, span)
                            if noted:
                                key = completion_key(
                                    output.prompt_token_ids, *sampled.pop(completion.index)
                                )
                                self.plane.ledger.note(key, Note(span, settings))
                    yield output, spans
        finally:
            self._versions_in_flight[version] -= 1
            self.in_flight[adapter_id] -= 1

    def _without_seed(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters without their seed, and warns of the first."""
        if not self._dropped_seed:
            self._dropped_seed = True
            logger.warning(
                "A request has `seed: %d`. This server leaves out the seeds of all requests, "
                "because vLLM's engine for the CPU ends when the prompt of a seeded request is "
                "computed in parts. Take `seed` out of the environment's requests: equal seeds "
                "would also make equal rollouts.",
                params.seed,
            )
        params = params.clone()
        params.seed = None
        return params

    def _settings_of(self, params: SamplingParams) -> SamplingSettings:
        fields = (name for name in RESHAPING if _reshapes(name, getattr(params, name)))
        return _settings(*NUMBERS_OF(params), (*fields, *self._logits_processors))

    def _span(
        self, completion: CompletionOutput, admitted: int, adapter_id: int | None
    ) -> Span | None:
        """
        The versions at the completion's first and last token; None for an adapter that no trainer
        has published.

        The engine marks each token with the number of publishes so far. With a vLLM without such
        marks, a completion begins with the publish at which its request was admitted, which is
        never too new.
        """
        marks = compat.marks_of(completion) or (admitted, self.history.publishes)
        first, last = (self.history.version(publishes, adapter_id) for publishes in marks)
        return None if first is None or last is None else (first, last)


NUMBERS_OF = attrgetter(*SamplingSettings().numbers())
# Those that the installed vLLM has.
RESHAPING = tuple(name for name in RESHAPING_FIELDS if name in FIELDS)


def _reshapes(name: str, value: Any) -> bool:
    """Returns whether a field of a request changes the distribution: a budget of 0 thinking tokens
    does, too."""
    return value is not None if name == "thinking_token_budget" else bool(value)


# one object for all completions that are sampled alike: the ledger keeps many of them
@lru_cache(maxsize=1024)
def _settings(*values) -> SamplingSettings:
    settings = SamplingSettings(*values)
    return settings._replace(top_k=max(0, settings.top_k))  # -1 means 0, all tokens


def _sampled_logprobs(completion: CompletionOutput) -> list[float]:
    """The log-probability of each sampled token, in nats."""
    # the sampled token is the first of each position
    if isinstance(completion.logprobs, FlatLogprobs):
        values = completion.logprobs.logprobs
        return [_finite(values[start]) for start in completion.logprobs.start_indices]
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [_finite(entry[token].logprob) for token, entry in pairs]


def _finite(logprob: float) -> float:
    if math.isnan(logprob):
        raise Refused(
            "the model computed NaN as a log-probability: its weights are not finite (a diverged "
            "run), its dtype overflows (`--dtype float32`), or the rollout is too long for the "
            "model (a lower `--max-model-len`)",
            500,
        )
    return max(float(logprob), LOWEST_LOGPROB)


class TokenPrompt(msgspec.Struct, forbid_unknown_fields=True):
    prompt_token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


def parse(body: bytes) -> tuple[dict, SamplingParams]:
    """Returns vLLM's prompt and sampling parameters. Every type is checked, as strictly as in the
    engine process: a value that cannot be decoded there ends the thread that listens to
    requests."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as problem:
        raise Refused(f"the body must be a JSON object: {problem}", 400) from problem
    for name in IGNORED_FIELDS:
        fields.pop(name, None)
    prompt = fields.pop("prompt", None)
    if not isinstance(prompt, dict | str):
        raise Refused("`prompt` must be a string or {'prompt_token_ids': [...]}", 400)
    prompt = (
        {"prompt": prompt}
        if isinstance(prompt, str)
        else msgspec.structs.asdict(_convert(prompt, TokenPrompt))
    )
    unknown = set(fields) - FIELDS
    if isinstance(fields.get("structured_outputs"), dict):
        unknown |= {
            f"structured_outputs.{name}"
            for name in set(fields["structured_outputs"]) - STRUCTURED_FIELDS
        }
    if unknown:
        raise Refused(f"unknown sampling parameters: {', '.join(sorted(unknown))}", 400)
    params = _convert(fields, SamplingParams)
    for name, value in fields.items():
        try:
            msgspec.msgpack.encode(value)  # as it goes to the engine
        except (OverflowError, RecursionError) as problem:
            raise Refused(f"`{name}` is {value!r:.100}: {problem}", 400) from problem
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.flat_logprobs = True
    return prompt, params


def _convert(fields: dict[str, Any], kind: Any) -> Any:
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as problem:
        # as in "Expected `int`, got `float` - at `$.max_tokens`"
        name = re.search(r"\$\.(\w+)", str(problem))
        value = "" if name is None else f": `{name[1]}` is {fields[name[1]]!r:.100}"
        raise Refused(f"{problem}{value}".replace("$.", ""), 400) from problem
    except (RecursionError, *compat.CLIENT_ERRORS) as problem:
        raise Refused(str(problem), 400) from problem
