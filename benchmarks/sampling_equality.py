"""`trl-atropos bench sampling --equal TOKENS`: compares the log-probabilities that a request gets
by the fast path with those that vLLM's own path would have given it, bit for bit.

The engine's process keeps the step's arrays (`sampling_witness.py`). From these, vLLM's own classes
make what the request would have got: `LogprobsProcessor` the log-probabilities and texts of single
tokens, `IncrementalDetokenizer` the text. Requests are of many kinds, alone and beside others that
ask for more or for nothing; prompts are computed in parts, requests are preempted and aborted, and
the engine is paused and goes on as in a publish.
"""

import argparse
import asyncio
import gc
import os
import random
import struct
import tempfile
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from trl_atropos.server.processes import SERVER_VARIABLE

PARTS = 256  # tokens that the engine computes in a step, so that longer prompts are cut
BLOCKS = 100  # of the CPU's KV cache: too few for all requests, so that some are preempted
IN_FLIGHT = 96  # requests
LONGEST = 60  # tokens of a completion
PAUSE_EVERY = 0.3  # seconds
# What other requests of the same batches ask for: nobody is there, some ask for five
# log-probabilities a token, some for none.
COMPANIES = {"alone": [], "beside five": [{"logprobs": 5}], "beside none": [{"logprobs": None}]}


@dataclass
class Completion:
    """What a reader got of one completion."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entries: list[tuple] = field(default_factory=list)  # the texts of single tokens
    text: str = ""
    cumulative: float | None = None
    finish_reason: str | None = None


def measure(options: argparse.Namespace) -> dict:
    """Compares until `options.equal` tokens were. Returns counts, by company."""
    from benchmarks.models import dtype, make_model

    # On the CPU, vLLM would otherwise put its worker into a process of its own, and the witness
    # would not see the scheduler.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ[SERVER_VARIABLE] = "1"
    with tempfile.TemporaryDirectory(prefix="trl_atropos_bench_") as name:
        model = options.model
        if model is None:
            model = Path(name, "model")
            make_model(model, options.params, dtype())
        return asyncio.run(_measure(str(model), options.equal))


async def _measure(model: str, tokens: int) -> dict:
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from trl_atropos.server import sampled_logprobs

    sampled_logprobs.install()
    fields = {
        "max_model_len": 512,
        "max_num_batched_tokens": PARTS,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "benchmarks.sampling_witness.Witness",
        "distributed_executor_backend": "uni",
        "gpu_memory_utilization": 0.3,
        "num_gpu_blocks_override": 400,
    }
    if not torch.cuda.is_available():
        fields |= {"dtype": "float32", "enforce_eager": True, "num_gpu_blocks_override": BLOCKS}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model, **fields))
    try:
        refusal = await sampled_logprobs.refusal(engine)
        if refusal is not None:
            raise SystemExit(f"the fast path is not on: {refusal}")
        rows = []
        for company, others in COMPANIES.items():
            rows.append(await _compare(engine, company, others, -(-tokens // len(COMPANIES))))
        return {"rows": rows}
    finally:
        engine.shutdown()
        del engine  # not at the interpreter's end, where vLLM's destructor fails
        gc.collect()


async def _compare(engine, company: str, others: list[dict], tokens: int) -> dict:
    """Asks until so many tokens were sampled, and compares them all."""
    await engine.collective_rpc("seen")  # forget those of earlier
    rng = random.Random(company)
    numbers = count()
    got: dict[str, dict[int, Completion]] = {}
    asked: dict[str, dict] = {}

    sampled = 0  # tokens of requests that have ended

    async def ask_until_enough() -> None:
        nonlocal sampled
        while sampled < tokens:
            number = next(numbers)
            name = f"{company.replace(' ', '-')}-{number}"
            prompt = _prompt(rng, number)
            asked[name] = {"prompt_token_ids": prompt, "fields": _fields(rng, number, others)}
            got[name] = {}
            await _ask(engine, name, asked[name], got[name], _aborted_after(rng, number))
            if _is_compared(asked[name]):
                sampled += sum(len(completion.tokens) for completion in got[name].values())

    publishing = asyncio.create_task(_publish(engine))
    await asyncio.gather(*(ask_until_enough() for _ in range(IN_FLIGHT)))
    publishing.cancel()
    (seen,) = await engine.collective_rpc("seen")
    row = _differences(engine, asked, got, seen["requests"])
    return {"company": company, **row, **seen["counts"], "runner": seen["runner"]}


def _is_compared(question: dict) -> bool:
    """Returns whether a request takes the fast path."""
    return question["fields"]["logprobs"] == 0


def _prompt(rng: random.Random, number: int) -> list[int]:
    """Returns a short or long prompt. Two of three begin alike, so that prefixes are cached."""
    shared = [7] * 40 if number % 3 else []
    length = rng.choice((1, 5, 300))
    return [3, *shared, *(rng.randrange(5, 200) for _ in range(length))]


def _fields(rng: random.Random, number: int, others: list[dict]) -> dict:
    """Returns the fields of a request, of one kind after the other."""
    from vllm.sampling_params import RequestOutputKind

    in_parts = {"output_kind": RequestOutputKind.DELTA}
    kinds = [
        {},
        {"n": 4},
        in_parts,
        {"n": 2} | in_parts,
        {"output_kind": RequestOutputKind.CUMULATIVE},
        {"stop": ["a", "bc"]},
        {"stop": ["a"], "include_stop_str_in_output": True},
        {"top_k": 5, "temperature": 0.7},
        {"temperature": 0.0},
        {"flat_logprobs": True},
        {"prompt_logprobs": 1},
        {"detokenize": False},
        *others,
    ]
    fields = {"logprobs": 0, "max_tokens": rng.randrange(2, LONGEST), "temperature": 1.0}
    return {"output_kind": RequestOutputKind.FINAL_ONLY} | fields | kinds[number % len(kinds)]


def _aborted_after(rng: random.Random, number: int) -> int | None:
    """Returns after how many outputs a reader leaves, or `None` if it stays."""
    return rng.randrange(1, 20) if number % 7 == 2 else None


async def _publish(engine) -> None:
    """Pauses and resumes, as the publishes of a trainer do. The weights stay."""
    from trl_atropos.server import compat

    for number in count():
        await asyncio.sleep(PAUSE_EVERY)
        await compat.pause(engine, clear_cache=bool(number % 2))
        await engine.resume_generation()


async def _ask(
    engine, name: str, question: dict, completions: dict[int, Completion], outputs: int | None
) -> None:
    """Samples, and collects what comes into `completions`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(**question["fields"])
    prompt = {"prompt_token_ids": question["prompt_token_ids"]}
    is_part = params.output_kind is RequestOutputKind.DELTA
    async with aclosing(engine.generate(prompt, params, name)) as stream:
        async for output in stream:
            for new in output.outputs:
                completion = completions.setdefault(new.index, Completion())
                if not is_part:
                    completions[new.index] = completion = Completion()
                _add(completion, new)
            if outputs is not None:
                outputs -= 1
                if outputs == 0:
                    return  # which aborts it


def _add(completion: Completion, new) -> None:
    """Adds what one output has of a completion."""
    completion.tokens += new.token_ids
    completion.text += new.text
    completion.cumulative = new.cumulative_logprob
    completion.finish_reason = new.finish_reason
    for token, entry in zip(new.token_ids, new.logprobs or (), strict=bool(new.logprobs)):
        completion.logprobs.append(entry[token].logprob)
        completion.entries.append(entry[token].decoded_token)


# -------------------------------------------------------------------------------- the comparison


def _differences(engine, asked: dict, got: dict, seen: dict[str, list]) -> dict[str, int]:
    """Returns how much was compared, and how much of it differs."""
    counts = Counter(completions=0, tokens=0, wrong_values=0, wrong_texts=0, wrong_sums=0)
    parts_of = {}
    for name, parts in seen.items():
        parts_of[_external_name(name)] = parts
    for name, completions in got.items():
        if not _is_compared(asked[name]):
            continue
        for index, completion in completions.items():
            parts = parts_of.get((name, index), [[], [], []])
            expected = _expected(engine, asked[name], parts, completion)
            counts["completions"] += 1
            counts["tokens"] += len(completion.tokens)
            counts["wrong_values"] += _num_wrong(completion, expected)
            counts["wrong_texts"] += completion.entries != expected.entries
            counts["wrong_texts"] += completion.text != expected.text
            counts["wrong_sums"] += completion.cumulative != expected.cumulative
    return dict(counts)


def _external_name(internal: str) -> tuple[str, int]:
    """Splits vLLM's own id, such as `2_alone-17-5f3a9c01` of the third completion, or
    `alone-17-5f3a9c01` of the only one."""
    name, _, _ = internal.rpartition("-")
    index, separator, rest = name.partition("_")
    if separator and index.isdecimal():
        return rest, int(index)
    return name, 0


def _expected(engine, question: dict, parts: list[list], completion: Completion) -> Completion:
    """Returns what vLLM's own path makes of the engine's values, of as many tokens as came."""
    from types import SimpleNamespace

    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    length = len(completion.tokens)
    tokens, values, ranks = (part[:length] for part in parts)
    params = SamplingParams(**question["fields"] | {"flat_logprobs": False})
    request = SimpleNamespace(
        sampling_params=params,
        request_id="expected",
        prompt_token_ids=question["prompt_token_ids"],
        prompt_embeds=None,
    )
    tokenizer = engine.get_tokenizer() if params.detokenize else None
    processor = LogprobsProcessor.from_new_request(tokenizer, request)
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    expected = Completion(tokens=tokens)
    for position, token in enumerate(tokens):
        row = LogprobsLists(
            np.array([[token]], np.int32),
            np.array([[values[position]]], np.float32),
            np.array([ranks[position]], np.int32),
            None,
        )
        processor._update_sample_logprobs(row)
        is_last = position == length - 1
        detokenizer.update([token], is_last and _ended_by_token(completion, question))
    for token, entry in zip(tokens, processor.logprobs, strict=True):
        expected.logprobs.append(entry[token].logprob)
        expected.entries.append(entry[token].decoded_token)
    expected.cumulative = processor.cumulative_logprob
    is_finished = completion.finish_reason is not None
    expected.text = detokenizer.get_next_output_text(is_finished, False)
    return expected


def _ended_by_token(completion: Completion, question: dict) -> bool:
    """Returns whether the last token is one that ends a completion: then its text is left out."""
    return completion.finish_reason == "stop" and "stop" not in question["fields"]


def _num_wrong(completion: Completion, expected: Completion) -> int:
    """Returns how many tokens differ, or how many there are if there are not as many values."""
    length = len(completion.tokens)
    if completion.tokens != expected.tokens or len(completion.logprobs) != length:
        return max(1, length)
    wrong = 0
    for value, expected_value in zip(completion.logprobs, expected.logprobs, strict=True):
        wrong += struct.pack("<d", value) != struct.pack("<d", expected_value)
    return wrong
