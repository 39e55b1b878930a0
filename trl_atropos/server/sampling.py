"""Serves the sampling requests of environments: `POST /generate` and vLLM's own sampling routes.

`control.py` makes one `Sampling`, which replaces the `generate` method of vLLM's engine client. All
of these routes call that method, so `Sampling` sees every request. A request that arrives in a
pause waits and begins with the next policy version. Each samples from the policy, whatever model it
names. The ledger of `plane.py` notes which versions sampled each completion.

An Atropos environment with `server_type: vllm` samples from `/generate`. Request:
`{"prompt": {"prompt_token_ids": [...]} or str, "logprobs": 0, ...}` and any field of vLLM's
`SamplingParams`. Response: `{"text": [n], "prompt": str, "finish_reasons": [n], "logprobs":
[n][tokens][1] {"<token id>": float}, "prompt_token_ids": [...], "token_ids": [n][tokens]}`, as
atroposlib 0.4.0 reads it in `envs/server_handling/vllm_server.py`, and with `prompt_logprobs: k`
also `"prompt_logprobs": [null, {"<token id>": float, ...}, ...]`.

With the header `x-trl-atropos-answer: numbers`, no text is made, and `"sampled_logprobs":
[n][tokens]` has what `logprobs` would have. That is a tenth of the work for who reads it.
`environment_site/environment_sampling.py` asks for it.
"""

import dataclasses
import logging
import math
import re
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from trl_atropos.protocol import (
    ANSWER_HEADER,
    NUMBERS,
    RESHAPING_FIELDS,
    Note,
    SamplingSettings,
    Span,
    completion_key,
)
from trl_atropos.server import compat, openai_logprobs, sampled_logprobs
from trl_atropos.server.plane import (
    EVALUATION,
    ControlPlane,
    History,
    Refused,
    answer,
    while_connected,
)
from trl_atropos.server.sampled_logprobs import LOWEST_LOGPROB, SampledLogprobs
from trl_atropos.server.session_capture import Capture, Sampled, params_for, prompt_for
from trl_atropos.server.sessions import CALL, Call

logger = logging.getLogger("vllm.trl_atropos")

IGNORED_FIELDS = ("model", "stream", "user")  # of the OpenAI protocol: environments send them along
# vLLM sets these fields itself (it marks others by an underscore). The last one replays tokens that
# no policy has sampled.
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

# Fields that every request has and that `SamplingSettings` begins with, in its order.
NUMERIC_FIELDS = tuple(SamplingSettings().numbers())
# The installed vLLM may lack some.
RESHAPING = tuple(name for name in RESHAPING_FIELDS if name in FIELDS)

# The engine's reason to end a completion -> one of the two that the environments' client knows.
FINISHED = {"stop": "stop", "length": "length", "repetition": "stop"}

# Patches of vLLM at import, because they must stand before the first request. `parse` sets
# `flat_logprobs` in every `/generate` request, and the first patch leaves out texts only for those.
# The second one comes after it and serves most requests in its place, the last one their answers.
compat.leave_logprobs_without_text()
sampled_logprobs.install()
compat.keep_watched_states()
openai_logprobs.install()


class Sampling:
    """Makes all requests of one engine sample from the policy. They wait while `plane` is
    paused."""

    def __init__(self, engine, plane: ControlPlane) -> None:
        self.plane = plane
        # New requests sample from this version, and with this adapter (None: without one).
        self.policy_version = 0
        self.adapter: LoRARequest | None = None
        # unfinished requests by adapter id: an adapter in use must not be overwritten
        self.in_flight: Counter[int | None] = Counter()
        self.history = History()
        # unfinished requests by the version they began with
        self._versions_in_flight: Counter[int] = Counter()
        self.logits_processors = compat.logits_processors(engine.vllm_config)
        self._drops_seeds = compat.dies_of_seeds()
        self._warned_of_seeds = False
        self._engine = engine
        self._engine_generate = engine.generate
        engine.generate = self._generate_below_routes

    @property
    def oldest_version_in_flight(self) -> int:
        """Oldest version that an unfinished request began with."""
        # `+` leaves out those with a count of 0
        return min(+self._versions_in_flight, default=self.policy_version)

    def serve(self, policy_version: int, adapter: LoRARequest | None) -> None:
        """Sets the version and adapter that requests sample from once the plane is open."""
        self.policy_version = policy_version
        self.adapter = adapter
        self.history.publish(policy_version, _id_of(adapter))

    def begin(self, policy_version: int) -> None:
        """Makes this the version of the weights that the engine has had since its start, or since
        the last call of this. Only while nothing is in flight."""
        self.policy_version = policy_version
        self.history = History(policy_version)

    async def generate(self, request: Request, send) -> None:
        """Answers `POST /generate`. Raises vLLM's `EngineDeadError`, which concerns the whole
        server."""
        body = await request.body()
        only_numbers = request.headers.get(ANSWER_HEADER) == NUMBERS
        completions = self._completions(body, only_numbers)
        work = answer(completions, "a /generate request", (compat.EngineDeadError,))
        # If the client goes away, this cancels the work, which aborts the request in the engine.
        task = await while_connected(work, request.receive)
        if task is not None:
            response = task.result()
            await response(request.scope, request.receive, send)

    async def _completions(self, body: bytes, only_numbers: bool) -> Response:
        """Returns the answer to the body of a `/generate` request."""
        prompt, params = parse(body)
        if only_numbers and not params.stop:  # which is looked for in the text
            params.detokenize = False
        request_id = f"trl-atropos-{uuid.uuid4().hex}"
        try:
            # `parse` has asked for `FINAL_ONLY`: one output has all completions.
            async for output, output_spans in self._stream(prompt, params, request_id):
                result = output
                spans = output_spans
        except compat.CLIENT_ERRORS as problem:
            raise Refused(str(problem), 400) from problem
        reply = _reply(result, params, only_numbers)
        # `_reply` refuses a completion that was ended early, so that each has its span here.
        oldest = min(first for first, _ in spans)
        newest = max(last for _, last in spans)
        # Starlette's own JSON takes five times as long, most of the time of an answer
        content = msgspec.json.encode(reply)
        headers = {"x-policy-version": f"{oldest}-{newest}"}
        return Response(content, headers=headers, media_type="application/json")

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
        """Yields the engine's outputs, each with the policy versions of the completions that end
        with it. `lora_request`, which stands for a model's name, is not used: some of vLLM's routes
        take any name for the base model."""
        if self._drops_seeds and sampling_params.seed is not None:
            sampling_params = self._without_seed(sampling_params)
        await self.plane.until_open()
        version = self.policy_version
        adapter = self.adapter
        adapter_id = _id_of(adapter)
        recorder: _Recorder | Capture = _Recorder(self, sampling_params, adapter_id)
        call = CALL.get()
        if call is not None:
            prompt = prompt_for(
                call, prompt, self._text_of, self._engine.model_config.max_model_len
            )
            sampling_params, recorder = self._captured(call, sampling_params, adapter_id)
            request_id = recorder.request_id
        self._versions_in_flight[version] += 1
        self.in_flight[adapter_id] += 1
        try:
            outputs = self._engine_generate(
                prompt, sampling_params, request_id, lora_request=adapter, **options
            )
            # without `aclosing`, an abandoned request would run on until it is collected
            async with aclosing(outputs):
                async for output in outputs:
                    yield output, recorder.record(output)
        finally:
            recorder.close()
            self._versions_in_flight[version] -= 1
            self.in_flight[adapter_id] -= 1

    def _captured(
        self, call: Call, params: SamplingParams, adapter_id: int | None
    ) -> tuple[SamplingParams, Capture]:
        """Returns the parameters of a session's request, and what keeps its tokens."""
        params, forced = params_for(call, params)
        settings = _settings_of(params, self.logits_processors)
        capture = Capture(
            call, settings, forced, self.plane, self.history, adapter_id, _sampled_logprobs
        )
        return params, capture

    def _text_of(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, special tokens included. A text was rendered before, so
        that there is a tokenizer."""
        return self._engine.tokenizer.decode(tokens, skip_special_tokens=False)

    def _without_seed(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters without their seed. Warns once."""
        if not self._warned_of_seeds:
            self._warned_of_seeds = True
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


def _id_of(adapter: LoRARequest | None) -> int | None:
    return None if adapter is None else adapter.lora_int_id


# ------------------------------------------------------------------------ the request of /generate


class TokenPrompt(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt of token ids, as vLLM takes it."""

    prompt_token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


def parse(body: bytes) -> tuple[dict, SamplingParams]:
    """Returns vLLM's prompt and sampling parameters. Raises `Refused` for a body that is wrong.

    Checks every type as strictly as the engine process does: a value that cannot be decoded there
    ends the thread that listens to requests.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as problem:
        raise Refused(f"the body must be a JSON object: {problem}", 400) from problem
    for name in IGNORED_FIELDS:
        fields.pop(name, None)
    prompt = _parsed_prompt(fields.pop("prompt", None))
    unknown = _unknown_fields(fields)
    if unknown:
        raise Refused(f"unknown sampling parameters: {', '.join(sorted(unknown))}", 400)
    params = _convert(fields, SamplingParams)
    for name, value in fields.items():
        try:
            msgspec.msgpack.encode(value)  # as it goes to the engine
        except (OverflowError, RecursionError) as problem:
            raise Refused(f"`{name}` is {value!r:.100}: {problem}", 400) from problem
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.flat_logprobs = True  # without the tokens' texts, see `leave_logprobs_without_text`
    return prompt, params


def _parsed_prompt(prompt: Any) -> dict:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, dict):
        return msgspec.structs.asdict(_convert(prompt, TokenPrompt))
    raise Refused("`prompt` must be a string or {'prompt_token_ids': [...]}", 400)


def _unknown_fields(fields: dict[str, Any]) -> set[str]:
    unknown = fields.keys() - FIELDS
    structured = fields.get("structured_outputs")
    if isinstance(structured, dict):
        for name in structured.keys() - STRUCTURED_FIELDS:
            unknown.add(f"structured_outputs.{name}")
    return unknown


def _convert(fields: dict[str, Any], kind: Any) -> Any:
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as problem:
        # as in "Expected `int`, got `float` - at `$.max_tokens`"
        message = str(problem)
        path = re.search(r"\$\.(\w+)", message)
        if path is not None:
            name = path[1]
            value = fields[name]
            message += f": `{name}` is {value!r:.100}"
        raise Refused(message.replace("$.", ""), 400) from problem
    except (RecursionError, *compat.CLIENT_ERRORS) as problem:
        raise Refused(str(problem), 400) from problem


# ------------------------------------------------------ versions and settings of every completion


@dataclasses.dataclass
class _Sampled:
    """Collects what one completion has sampled so far."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)


class _Recorder:
    """Notes the versions and settings of one request's completions in the plane's ledger, if the
    request asks for log-probabilities, and the versions of an evaluation's completions."""

    def __init__(self, sampling: Sampling, params: SamplingParams, adapter_id: int | None) -> None:
        self.plane = sampling.plane
        self.history = sampling.history
        self.adapter_id = adapter_id  # that `serve` has published; None: the model itself
        self.publishes_at_start = self.history.publishes
        self.has_logprobs = params.logprobs is not None
        # DELTA brings parts to add up. CUMULATIVE and FINAL_ONLY bring all with the last output.
        self.in_parts = params.output_kind is RequestOutputKind.DELTA
        self.settings = _settings_of(params, sampling.logits_processors)
        self.sampled: defaultdict[int, _Sampled] = defaultdict(_Sampled)  # by completion

    def record(self, output: RequestOutput) -> list[Span]:
        """Notes the completions that end with this output, and returns their versions."""
        spans = []
        for completion in output.outputs:
            is_whole = completion.finish_reason not in (None, "abort", "error")
            if self.has_logprobs and (is_whole or self.in_parts):
                sampled = self.sampled[completion.index]
                sampled.tokens += completion.token_ids
                sampled.logprobs += _sampled_logprobs(completion)
            if is_whole:
                span = self._span(completion)
                self._note(span, output.prompt_token_ids, completion.index)
                spans.append(span)
        return spans

    def close(self) -> None:
        """Does nothing: the notes are complete without requests that were aborted."""

    def _note(self, span: Span, prompt_ids: list[int], index: int) -> None:
        """Notes the completion with this index, which has ended."""
        evaluation = EVALUATION.get()
        if evaluation is not None:
            self.plane.evaluations.note(evaluation, span)
        if self.has_logprobs:
            sampled = self.sampled.pop(index)
            key = completion_key(prompt_ids, sampled.tokens, sampled.logprobs)
            self.plane.ledger.note(key, Note(span, self.settings))

    def _span(self, completion: CompletionOutput) -> Span:
        """
        Returns the versions at the completion's first and last token.

        The engine marks each token with the number of publishes so far. With a vLLM without such
        marks, a completion begins with the publish at which its request was admitted, which is
        never too new.
        """
        marks = compat.marks_of(completion)
        if marks is None:
            marks = (self.publishes_at_start, self.history.publishes)
        first = self.history.version(marks[0], self.adapter_id)
        last = self.history.version(marks[1], self.adapter_id)
        return first, last


def _settings_of(params: SamplingParams, logits_processors: tuple[str, ...]) -> SamplingSettings:
    """Returns the settings that a request samples with."""
    numbers = [getattr(params, name) for name in NUMERIC_FIELDS]
    reshaped_by = []
    for name in RESHAPING:
        value = getattr(params, name)
        if _reshapes(name, value):
            reshaped_by.append(name)
    return _settings(*numbers, (*reshaped_by, *logits_processors))


def _reshapes(name: str, value: Any) -> bool:
    """Returns whether a field of a request changes the distribution."""
    if name == "thinking_token_budget":
        return value is not None  # a budget of 0 tokens does, too
    return bool(value)


# one object for all completions that are sampled alike: the ledger keeps many of them
@lru_cache(maxsize=1024)
def _settings(*values) -> SamplingSettings:
    settings = SamplingSettings(*values)
    return settings._replace(top_k=max(0, settings.top_k))  # -1 means 0, all tokens


def _sampled_logprobs(completion: CompletionOutput | Sampled) -> list[float]:
    """Returns the log-probability of each sampled token, in nats."""
    if isinstance(completion.logprobs, SampledLogprobs):
        return _all_finite(completion.logprobs.values)
    # the sampled token is the first of each position
    if isinstance(completion.logprobs, FlatLogprobs):
        values = completion.logprobs.logprobs
        return [_finite(values[start]) for start in completion.logprobs.start_indices]
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [_finite(entry[token].logprob) for token, entry in pairs]


def _all_finite(values: list[float]) -> list[float]:
    """Does for a list what `_finite` does, a hundred times as fast for a long one."""
    array = np.array(values)
    if np.isnan(array).any() or (array < LOWEST_LOGPROB).any():
        return [_finite(value) for value in values]
    return values


def _finite(logprob: float) -> float:
    if math.isnan(logprob):
        raise Refused(
            "the model computed NaN as a log-probability: its weights are not finite (a diverged "
            "run), its dtype overflows (`--dtype float32`), or the rollout is too long for the "
            "model (a lower `--max-model-len`)",
            500,
        )
    return max(float(logprob), LOWEST_LOGPROB)


# ------------------------------------------------------------------------- the answer of /generate


def _reply(result: RequestOutput, params: SamplingParams, only_numbers: bool) -> dict[str, Any]:
    """Returns the answer's JSON. Raises `Refused` if the engine ended a completion early."""
    completions = sorted(result.outputs, key=attrgetter("index"))
    for completion in completions:
        if completion.finish_reason not in FINISHED:
            raise Refused(f"the engine ended the request with {completion.finish_reason!r}", 503)
    reply = {
        "finish_reasons": [FINISHED[completion.finish_reason] for completion in completions],
        "prompt_token_ids": list(result.prompt_token_ids),
        "token_ids": [list(completion.token_ids) for completion in completions],
        "cached_tokens": result.num_cached_tokens or 0,  # of the prompt, not computed anew
    }
    if not only_numbers:
        reply["text"] = [completion.text for completion in completions]
        reply["prompt"] = result.prompt or ""
    if params.logprobs is not None:
        if only_numbers:
            reply["sampled_logprobs"] = [_sampled_logprobs(each) for each in completions]
        else:
            reply["logprobs"] = [_logprob_entries(completion) for completion in completions]
    if params.prompt_logprobs is not None:
        reply["prompt_logprobs"] = [_prompt_entry(entry) for entry in result.prompt_logprobs]
    return reply


def _logprob_entries(completion: CompletionOutput) -> list[list[dict[str, float]]]:
    """Returns a list for each token, with the log-probability of the sampled one alone."""
    logprobs = _sampled_logprobs(completion)
    entries = []
    for token, logprob in zip(completion.token_ids, logprobs, strict=True):
        entries.append([{str(token): logprob}])
    return entries


def _prompt_entry(entry: dict[int, Logprob] | None) -> dict[str, float] | None:
    if not entry:  # the first token has none
        return None
    return {str(token): _finite(value.logprob) for token, value in entry.items()}
