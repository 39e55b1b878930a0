"""`POST /generate`: the route that an Atropos environment with `server_type: vllm` samples from.

Request: `{"prompt": {"prompt_token_ids": [...]} or str, "logprobs": 0, ...}` and any field of vLLM's `SamplingParams`.
Response: `{"text": [n], "prompt": str, "finish_reasons": [n], "logprobs": [n][tokens][1] {"<token id>": float},
"prompt_token_ids": [...], "token_ids": [n][tokens]}`, and with `prompt_logprobs: k` also `"prompt_logprobs":
[null, {"<token id>": float, ...}, ...]`. The shape is the one that atroposlib 0.4.0 reads in
`envs/server_handling/vllm_server.py`.
"""

import dataclasses
import math
import re
import uuid
from typing import Annotated, Any

import msgspec
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from trl_atropos.protocol import Span
from trl_atropos.server.compat import CLIENT_ERRORS
from trl_atropos.server.recorder import LOWEST_LOGPROB, Recorder, sampled_logprobs

# Fields of the OpenAI protocol that environments send along and that mean nothing here.
IGNORED_FIELDS = ("model", "stream", "user")
# Those that vLLM sets itself. It marks further ones, and some of the structured outputs', by an underscore.
INTERNAL_FIELDS = {"output_kind", "output_text_buffer_length", "skip_clone"}
# It replays tokens that no policy has sampled.
REPLAYING_FIELDS = {"trace_decode_token_ids"}
FIELDS = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
FIELDS -= INTERNAL_FIELDS | REPLAYING_FIELDS
STRUCTURED_FIELDS = {field.name for field in dataclasses.fields(StructuredOutputsParams) if field.init}


class TokenPrompt(msgspec.Struct, forbid_unknown_fields=True):
    prompt_token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


class BadRequest(ValueError):
    """The request itself is at fault; the message goes to the client."""


# The engine's reason to end a completion, and what the environments' client is told, which knows two of them. One that
# repeats itself is stopped if the request asks for it (`repetition_detection`).
FINISHED = {"stop": "stop", "length": "length", "repetition": "stop"}


class NotFinished(RuntimeError):
    """The engine ended the request without a result."""


class NotANumber(RuntimeError):
    """The model computed NaN, which JSON cannot hold."""


def parse(body: bytes) -> tuple[dict, SamplingParams]:
    """
    Returns vLLM's prompt and sampling parameters.

    Every type is checked, as strictly as in the engine process: a value that cannot be decoded there ends the thread
    that listens to requests, and the engine would answer nobody any more.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadRequest(f"the body must be a JSON object: {error}") from error
    for name in IGNORED_FIELDS:
        fields.pop(name, None)
    prompt = fields.pop("prompt", None)
    if isinstance(prompt, dict):
        prompt = {"prompt_token_ids": _convert(prompt, TokenPrompt).prompt_token_ids}
    elif isinstance(prompt, str):
        prompt = {"prompt": prompt}
    else:
        raise BadRequest("`prompt` must be a string or {'prompt_token_ids': [...]}")
    unknown = set(fields) - FIELDS
    if isinstance(fields.get("structured_outputs"), dict):
        unknown |= {f"structured_outputs.{name}" for name in set(fields["structured_outputs"]) - STRUCTURED_FIELDS}
    if unknown:
        raise BadRequest(f"unknown sampling parameters: {', '.join(sorted(unknown))}")
    params = _convert(fields, SamplingParams)
    for name, value in fields.items():
        try:
            msgspec.msgpack.encode(value)  # as it goes to the engine
        except (OverflowError, RecursionError) as error:
            raise BadRequest(f"`{name}` is {value!r:.100}: {error}") from error
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return prompt, params


def _convert(fields: dict[str, Any], kind: Any) -> Any:
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")  # as in "Expected `int`, got `float` - at `$.max_tokens`"
        name = re.search(r"\$\.(\w+)", place)
        if name is None:
            raise BadRequest(what) from error
        raise BadRequest(
            f"{place.replace('$.', '')}: {what[:1].lower()}{what[1:]}. `{name[1]}` is {fields[name[1]]!r:.100}"
        ) from error
    except (RecursionError, *CLIENT_ERRORS) as error:
        raise BadRequest(str(error)) from error


async def generate(recorder: Recorder, body: bytes) -> tuple[dict, list[Span]]:
    """
    Samples. Cancelling the task aborts the request.

    Returns the response, and the policy versions of each completion.
    """
    prompt, params = parse(body)
    result, spans = None, []
    request_id = f"trl-atropos-{uuid.uuid4().hex}"
    try:
        async for output in recorder.stream(prompt, params, request_id):
            result, spans = output
    except CLIENT_ERRORS as error:
        raise BadRequest(str(error)) from error
    completions = sorted(result.outputs, key=lambda completion: completion.index)
    for completion in completions:
        if completion.finish_reason not in FINISHED:
            raise NotFinished(f"the engine ended the request with {completion.finish_reason!r}")
    response = {
        "text": [completion.text for completion in completions],
        "prompt": result.prompt or "",
        "finish_reasons": [FINISHED[completion.finish_reason] for completion in completions],
        "prompt_token_ids": list(result.prompt_token_ids),
        "token_ids": [list(completion.token_ids) for completion in completions],
    }
    if params.logprobs is not None:
        response["logprobs"] = [_logprobs_entries(completion) for completion in completions]
    if params.prompt_logprobs is not None:
        response["prompt_logprobs"] = [
            entry if entry is None else {str(token): _finite(value) for token, value in entry.items()}
            for entry in result.prompt_logprobs
        ]
    return response, spans


def _logprobs_entries(completion) -> list[list[dict[str, float]]]:
    """One entry per token, the sampled token first: the client reads nothing but the first key."""
    pairs = zip(completion.token_ids, sampled_logprobs(completion), strict=True)
    return [[{str(token): _number(logprob)}] for token, logprob in pairs]


def _finite(logprob) -> float:
    return max(_number(float(logprob.logprob)), LOWEST_LOGPROB)


def _number(logprob: float) -> float:
    if math.isnan(logprob):
        raise NotANumber(
            "the model computed NaN as a log-probability: its weights are not finite (a diverged run), its dtype "
            "overflows (start the server with `--dtype float32`), or the sequence is longer than the model can take "
            "(start it with a lower `--max-model-len`)"
        )
    return logprob
