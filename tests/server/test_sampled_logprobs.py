"""The fast path of log-probabilities: what it hands over, and that it is what vLLM would have."""

import asyncio
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.outputs import LogprobsLists

from tests.forge import FORKED_ENGINES, TRAINER
from trl_atropos.server import plugin, sampled_logprobs
from trl_atropos.server.compat import EngineDeadError
from trl_atropos.server.processes import FAST_LOGPROBS_VARIABLE, SERVER_VARIABLE
from trl_atropos.server.sampled_logprobs import EMPTY, Decoder, SampledLogprobs, TextAtTheEnd

TOKENS = [64, 65, 66, 67, 68]
VALUES = [-0.5, -1.25, -2.0, -0.125, -4.0]


@pytest.fixture(scope="module")
def tokenizer(server_model):
    """The quickstart's, over bytes: most texts of single tokens are parts of characters."""
    return AutoTokenizer.from_pretrained(server_model)


def new_request(name: str, **fields) -> SimpleNamespace:
    """A request as the output processor gets it."""
    params = SamplingParams(**{"output_kind": RequestOutputKind.FINAL_ONLY} | fields)
    return SimpleNamespace(
        request_id=name,
        external_req_id=name,
        sampling_params=params,
        prompt_token_ids=[1, 2],
        prompt_embeds=None,
        lora_request=None,
        arrival_time=0.0,
        resumable=False,
    )


class Queue(list):
    put = list.append


@pytest.fixture
def processor(tokenizer) -> OutputProcessor:
    sampled_logprobs.install()
    return OutputProcessor(tokenizer, log_stats=False)


def add(processor: OutputProcessor, name: str, **fields) -> Queue:
    queue = Queue()
    state = RequestState.from_new_request(
        tokenizer=processor.tokenizer,
        request=new_request(name, **fields),
        prompt=None,
        parent_req=None,
        request_index=0,
        queue=queue,
        log_stats=False,
        stream_interval=1,
    )
    processor.request_states[name] = state
    processor.external_req_ids[name].append(name)
    return queue


def vector(*values: float) -> LogprobsLists:
    return LogprobsLists(EMPTY, np.array(values, np.float32), EMPTY, None)


def step(*names: str, token: int = 64, ends: bool = False, logprobs=None) -> list[EngineCoreOutput]:
    """The outputs of one step, one token for each request; the first has `logprobs`."""
    outputs = []
    for name in names:
        reason = FinishReason.LENGTH if ends else None
        outputs.append(EngineCoreOutput(name, [token], logprobs, finish_reason=reason))
        logprobs = None
    return outputs


def test_vector_goes_to_requests_in_order(processor):
    first, second, silent = (
        add(processor, "a", logprobs=0),
        add(processor, "b", logprobs=0),
        add(processor, "c"),
    )
    processor.process_outputs(step("a", "c", "b", logprobs=vector(-0.5, -9.0, -1.25)))
    outputs = step("a", "c", "b", ends=True, logprobs=vector(-2.0, -9.0, -4.0))
    processor.process_outputs(outputs)
    assert first[0].outputs[0].logprobs.values == [-0.5, -2.0]
    assert second[0].outputs[0].logprobs.values == [-1.25, -4.0]
    assert second[0].outputs[0].cumulative_logprob == -5.25
    assert silent[0].outputs[0].logprobs is None


def test_step_may_come_in_pieces(processor):
    """vLLM hands over 128 outputs at a time; the first piece has the vector."""
    queues = [add(processor, name, logprobs=0) for name in "abc"]
    outputs = step(*"abc", ends=True, logprobs=vector(*VALUES[:3]))
    processor.process_outputs(outputs[:2])
    processor.process_outputs(outputs[2:])
    assert [queue[0].outputs[0].logprobs.values for queue in queues] == [[v] for v in VALUES[:3]]


def test_aborted_request_keeps_its_place_in_vector(processor):
    queue = add(processor, "b", logprobs=0)
    processor.process_outputs(step("gone", "b", ends=True, logprobs=vector(-0.5, -1.25)))
    assert queue[0].outputs[0].logprobs.values == [-1.25]


def test_request_for_more_keeps_vllms_path(processor):
    more, queue = add(processor, "more", logprobs=1), add(processor, "b", logprobs=0)
    more_output, output = step("more", "b", ends=True)
    more_output.new_logprobs = LogprobsLists(
        np.array([[64, 70]]), np.array([[-3.0, -0.5]], np.float32), np.array([2]), None
    )
    output.new_logprobs = vector(-1.25)
    processor.process_outputs([more_output, output])
    (entry,) = more[0].outputs[0].logprobs
    assert {token: value.logprob for token, value in entry.items()} == {64: -3.0, 70: -0.5}
    assert queue[0].outputs[0].logprobs.values == [-1.25]


def test_engine_on_vllms_path_is_understood(processor):
    queue = add(processor, "a", logprobs=0)
    own = LogprobsLists(np.array([[64]]), np.array([[-0.5]], np.float32), np.array([3]), None)
    processor.process_outputs(step("a", ends=True, logprobs=own))
    completion = queue[0].outputs[0]
    assert completion.logprobs.values == [-0.5] and completion.cumulative_logprob == -0.5


def test_tokens_behind_stop_string_lose_their_values(processor, tokenizer):
    """Several tokens come in one step if drafts were accepted."""
    queue = add(processor, "a", logprobs=0, stop=[tokenizer.decode([66])])
    output = EngineCoreOutput("a", list(TOKENS), vector(*VALUES))
    processor.process_outputs([output])
    completion = queue[0].outputs[0]
    assert completion.token_ids == TOKENS[:3] and completion.logprobs.values == VALUES[:3]
    assert completion.cumulative_logprob == sum(VALUES[:3])


@pytest.mark.parametrize("values", [VALUES[:1], VALUES])
def test_vector_of_wrong_length_is_error(processor, values):
    add(processor, "a", logprobs=0)
    add(processor, "b", logprobs=0)
    processor.process_outputs(step("a", "b", logprobs=vector(*VALUES[:2])))
    with pytest.raises(RuntimeError, match=r"a step's vector was (shorter|longer)"):
        first = EngineCoreOutput("a", [64, 65], vector(*values))
        processor.process_outputs([first])
        processor.process_outputs(step("a", "b", logprobs=vector(*VALUES[:2])))


def test_stream_parts_have_their_own_tokens(processor, tokenizer):
    """Each part's entries are those that vLLM would have made, texts included: they take the tokens
    before the part into account."""
    euro = tokenizer("€ a", add_special_tokens=False)["input_ids"]
    kind = {"logprobs": 0, "output_kind": RequestOutputKind.DELTA}
    queue = add(processor, "a", **kind)
    expected = own_entries(tokenizer, euro)
    for token in euro:
        processor.process_outputs(step("a", token=token, logprobs=vector(-0.5)))
    parts = [list(output.outputs[0].logprobs) for output in queue]
    assert parts == [[entry] for entry in expected]
    # a slow reader gets several parts as one
    whole = queue[0]
    for later in queue[1:]:
        whole.add(later, aggregate=True)
    assert list(whole.outputs[0].logprobs) == expected


def own_entries(tokenizer, tokens: list[int]) -> list[dict]:
    """What vLLM's own path makes of the tokens, without ranks."""
    processor = LogprobsProcessor(tokenizer, [], None, 0.0, 0, None)
    for token in tokens:
        row = np.array([[token]]), np.array([[-0.5]], np.float32), np.array([1])
        processor._update_sample_logprobs(LogprobsLists(*row, None))
    for entry in processor.logprobs:
        for value in entry.values():
            value.rank = None
    return processor.logprobs


def test_token_texts_are_vllms(tokenizer):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, 400).tolist()
    tokens += tokenizer("€ ü 漢字 🙂", add_special_tokens=False)["input_ids"]
    expected = [
        entry[token].decoded_token
        for token, entry in zip(tokens, own_entries(tokenizer, tokens), strict=True)
    ]
    texts = Decoder(tokenizer).texts(tokens, 0)
    assert texts == expected and {"", "€", "🙂"} <= set(texts)


def test_slice_keeps_place_of_its_tokens(tokenizer):
    detokenizer = IncrementalDetokenizer()
    detokenizer.update(TOKENS, False)
    logprobs = SampledLogprobs(detokenizer, None, list(VALUES))
    assert [next(iter(entry)) for entry in logprobs[-2:]] == TOKENS[-2:]
    assert [next(iter(entry)) for entry in logprobs[1:4][1:]] == TOKENS[2:4]
    assert logprobs[-1][TOKENS[-1]].logprob == VALUES[-1] and len(logprobs[:0]) == 0


@pytest.mark.parametrize("stopped", [False, True])
def test_text_at_the_end_is_text_of_each_step(tokenizer, stopped):
    request = new_request("a")
    tokens = tokenizer("a € b", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    own = IncrementalDetokenizer.from_new_request(tokenizer, request)
    late = TextAtTheEnd(IncrementalDetokenizer.from_new_request(tokenizer, request))
    for number, token in enumerate(tokens):
        is_stop = stopped and number == len(tokens) - 1
        own.update([token], is_stop)
        late.update([token], is_stop)
        assert late.num_output_tokens() == own.num_output_tokens()
    assert late.output_token_ids == own.output_token_ids
    assert (
        late.get_next_output_text(True, False) == own.get_next_output_text(True, False) == "a € b"
    )


@pytest.mark.parametrize(
    "fields, is_late",
    [
        ({}, True),
        ({"stop": ["a"]}, False),
        ({"output_kind": RequestOutputKind.DELTA}, False),
        ({"detokenize": False}, False),
    ],
)
def test_text_waits_for_the_end_only_if_nobody_needs_it(processor, fields, is_late):
    add(processor, "a", **fields)
    assert isinstance(processor.request_states["a"].detokenizer, TextAtTheEnd) == is_late


def test_path_is_off_by_its_variable(processor, monkeypatch):
    monkeypatch.setenv(FAST_LOGPROBS_VARIABLE, "0")
    add(processor, "a", logprobs=0)
    assert processor.request_states["a"].logprobs_processor.logprobs == []


@pytest.mark.parametrize("first_rows, expected", [(None, [2.0, 0.0]), ([0, 1, 3], [3.0, 4.0, 0.0])])
def test_engine_takes_values_in_order_of_outputs(first_rows, expected):
    """The rows of a step have another order than its outputs; drafts make several rows a request."""
    values = np.arange(5, dtype=np.float32)[:, None]
    lists = LogprobsLists(EMPTY, values, EMPTY, first_rows)
    num_tokens = 1 if first_rows is None else 2
    outputs = [EngineCoreOutput("c", [64] * num_tokens), EngineCoreOutput("a", [64])]
    row_of = {"a": 0, "b": 1, "c": 2}
    assert sampled_logprobs._sampled_values(lists, outputs, row_of).tolist() == expected


def test_missing_name_leaves_vllm_alone(monkeypatch):
    monkeypatch.setitem(
        sampled_logprobs.NEEDED_NAMES, "vllm.v1.engine.core:EngineCore", ("step", "no_such_name")
    )
    monkeypatch.delattr(EngineCore, sampled_logprobs.QUESTION, raising=False)
    assert sampled_logprobs.missing_names() == ["vllm.v1.engine.core:EngineCore.no_such_name"]
    process_outputs = OutputProcessor.process_outputs
    sampled_logprobs.install()
    assert OutputProcessor.process_outputs is process_outputs
    assert not hasattr(EngineCore, sampled_logprobs.QUESTION)


def engine_that_answers(problem: Exception) -> SimpleNamespace:
    async def call_utility_async(_question):
        raise problem

    return SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=call_utility_async))


def test_missing_plugin_is_told_from_dead_engine():
    unknown = Exception("Call to it failed: 'EngineCoreProc' object has no attribute")
    reason = asyncio.run(sampled_logprobs.refusal(engine_that_answers(unknown)))
    assert "has not loaded the plugin `trl_atropos`" in reason and "no attribute" in reason
    with pytest.raises(EngineDeadError):
        asyncio.run(sampled_logprobs.refusal(engine_that_answers(EngineDeadError())))


@pytest.mark.parametrize(
    "name, variable, patched",
    [("EngineCore_DP0", "1", True), ("EngineCore", "", False), ("MainProcess", "1", False)],
)
def test_plugin_patches_engines_of_our_servers_alone(monkeypatch, name, variable, patched):
    calls = []
    monkeypatch.setattr(plugin, "patch_engine", lambda: calls.append(True))
    monkeypatch.setattr(
        plugin.multiprocessing, "current_process", lambda: SimpleNamespace(name=name)
    )
    monkeypatch.setenv(SERVER_VARIABLE, variable)
    plugin.load()
    assert bool(calls) == patched


@pytest.mark.slow(60)
@pytest.mark.server
def test_values_are_vllms_bit_for_bit(tmp_path):
    """20,000 tokens of requests of all kinds, with publishes, preemptions and aborts."""
    output = tmp_path / "result.json"
    command = ["-m", "trl_atropos.cli", "bench", "sampling", "--equal", "20000"]
    command += ["--output", str(output)]
    done = TRAINER.run(command, os.environ | FORKED_ENGINES, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rows = json.loads(output.read_text())["rows"]
    assert [row["company"] for row in rows] == ["alone", "beside five", "beside none"]
    for row in rows:
        assert row["tokens"] > 6_000 and row["vectors"] > 100
        assert row["wrong_values"] == row["wrong_texts"] == row["wrong_sums"] == 0
    assert sum(row["preemptions"] for row in rows) > 0
    assert rows[1]["steps with 6 values a token"] > 0
