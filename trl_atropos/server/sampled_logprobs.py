"""Carries the log-probability of each sampled token from vLLM's engine to a request's answer.

A trainer needs one float for each sampled token. A request asks for it by `logprobs=0`, and vLLM's
own path then halves the engine's rate: it cuts three arrays for each request and step, packs and
unpacks them, decodes each token to text, and keeps objects for it that the garbage collector walks
over. The path here sends one vector for each step, and keeps a list of floats for each request:

    engine process  `Scheduler.update_from_output`   takes the vector out of the step's arrays
    API server      `OutputProcessor.process_outputs`  gives each request its value
                    `RequestState.from_new_request`    prepares a request for that

These functions of vLLM are wrapped, not copied. The values are those that vLLM's own path carries,
bit for bit: the same array is read. Requests that ask for more keep vLLM's own path, also beside
others in one batch.

`plugin.py` calls `install` in the engine's process, and `sampling.py` in the server's. Both decide
alike whether the path is wanted and fits the installed vLLM, so that no engine sends what its
server cannot read.
"""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache, wraps
from importlib import import_module
from itertools import islice

import numpy as np
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.outputs import LogprobsLists

from trl_atropos.server.compat import EngineDeadError
from trl_atropos.server.processes import FAST_LOGPROBS_VARIABLE

# What the path relies on, with the arguments or fields that it knows, in vLLM 0.26 to 0.33.
# `module:object` -> names that the object has.
NEEDED_NAMES = {
    "vllm.v1.core.sched.scheduler:Scheduler": ("update_from_output",),
    "vllm.v1.engine.core:EngineCore": ("step",),
    "vllm.v1.engine:EngineCoreOutput": ("request_id", "new_token_ids", "new_logprobs"),
    "vllm.v1.engine:EngineCoreOutputs": ("outputs",),
    "vllm.v1.engine.output_processor:OutputProcessor": ("process_outputs",),
    "vllm.v1.engine.output_processor:RequestState": ("from_new_request",),
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer": (
        "output_token_ids",
        "num_output_tokens",
        "update",
        "get_next_output_text",
    ),
    "vllm.v1.engine.logprobs:LogprobsProcessor": ("_correct_decoded_token",),
    "vllm.v1.outputs:LogprobsLists": (
        "logprob_token_ids",
        "logprobs",
        "sampled_token_ranks",
        "cu_num_generated_tokens",
    ),
}

# The method that `install` adds to the engine: a server asks by it which path the engine takes.
QUESTION = "trl_atropos_sends_vectors"

EMPTY = np.empty(0, np.int32)
# vLLM's own routes send this for minus infinity, which JSON cannot hold.
LOWEST_LOGPROB = -9999.0
CONTEXT = 4  # tokens: a character of UTF-8 has at most as many bytes


def is_on() -> bool:
    """Returns whether the path is wanted in this process. Asked at each step: a process may be a
    fork of one that has imported this, with other variables."""
    return os.environ.get(FAST_LOGPROBS_VARIABLE, "1") != "0"


def missing_names() -> list[str]:
    """Returns the names that the path relies on and that the installed vLLM lacks."""
    missing = []
    for place, names in NEEDED_NAMES.items():
        module, _, attribute = place.partition(":")
        target = getattr(import_module(module), attribute, None)
        for name in names:
            if not hasattr(target, name):
                missing.append(f"{place}.{name}")
    return missing


def install() -> None:
    """Wraps vLLM's functions in this process, once, if the path fits the installed vLLM."""
    if hasattr(EngineCore, QUESTION) or missing_names():
        return
    setattr(EngineCore, QUESTION, _sends_vectors)
    Scheduler.update_from_output = _sending_a_vector(Scheduler.update_from_output)
    OutputProcessor.process_outputs = _reading_vectors(OutputProcessor.process_outputs)
    from_new_request = RequestState.from_new_request.__func__
    RequestState.from_new_request = classmethod(_preparing_for_vectors(from_new_request))


def _sends_vectors(_engine: EngineCore) -> bool:
    """Answers the server's question, in the engine's process."""
    return True


async def refusal(engine) -> str | None:
    """Returns why `engine`, a client of vLLM's engine, does not take this path, or `None` if it
    does. Raises vLLM's `EngineDeadError`, which concerns the whole server."""
    if not is_on():
        return f"it is switched off ({FAST_LOGPROBS_VARIABLE}=0)"
    missing = missing_names()
    if missing:
        return f"the installed vLLM lacks {', '.join(missing)}"
    try:
        await engine.engine_core.call_utility_async(QUESTION)
    except EngineDeadError:
        raise
    except Exception as problem:  # noqa: BLE001 - vLLM raises the base class with the engine's words
        return (
            "the engine's process has not loaded the plugin `trl_atropos` (entry point "
            f"`vllm.general_plugins`: install the package, and leave VLLM_PLUGINS unset): {problem}"
        )
    return None


# ------------------------------------------------------------------------------ the engine process


def _sending_a_vector(update_from_output):
    """Returns the scheduler's method, after which each client's outputs of a step carry one vector.

    With requests a, b and c of one client, of which b asks for five log-probabilities, a's output
    has `new_logprobs` of the values of a and c, b's has its own, and c's has none.
    """

    @wraps(update_from_output)
    def update(scheduler, scheduler_output, model_output, *args, **options):
        lists = model_output.logprobs
        has_values = isinstance(lists, LogprobsLists) and len(lists.sampled_token_ranks)
        if not has_values or not is_on():
            return update_from_output(scheduler, scheduler_output, model_output, *args, **options)
        # before the update, which forgets requests that end
        wide = _requests_for_more(scheduler, scheduler_output, lists)
        if not wide:
            model_output.logprobs = None  # vLLM cuts no slices
        outputs_by_client = update_from_output(
            scheduler, scheduler_output, model_output, *args, **options
        )
        for client_outputs in outputs_by_client.values():
            narrow = []
            for output in client_outputs.outputs:
                if output.new_token_ids and output.request_id not in wide:
                    output.new_logprobs = None
                    narrow.append(output)
            if narrow:
                values = _sampled_values(lists, narrow, model_output.req_id_to_index)
                narrow[0].new_logprobs = LogprobsLists(
                    logprob_token_ids=EMPTY, logprobs=values, sampled_token_ranks=EMPTY
                )
        return outputs_by_client

    return update


def _requests_for_more(scheduler, scheduler_output, lists: LogprobsLists) -> set[str]:
    """Returns the ids of the step's requests that ask for more than the sampled token's
    log-probability."""
    if lists.logprobs.shape[1] == 1:
        return set()
    ids = set()
    for request_id in scheduler_output.num_scheduled_tokens:
        request = scheduler.requests.get(request_id)
        if request is None or request.sampling_params is None:
            continue
        if request.sampling_params.num_logprobs:
            ids.add(request_id)
    return ids


def _sampled_values(lists: LogprobsLists, outputs: list, row_of: dict[str, int]) -> np.ndarray:
    """Returns the log-probabilities of all tokens of `outputs`, one output after the other, in
    float32. A copy: vLLM reuses the array."""
    first_rows = lists.cu_num_generated_tokens
    rows = []
    for output in outputs:
        row = row_of[output.request_id]
        if first_rows is None:  # each request has one token a step
            rows.append(row)
        else:
            first = first_rows[row]
            rows.extend(range(first, first + len(output.new_token_ids)))
    return lists.logprobs[rows, 0]  # vLLM puts the sampled token first


# ---------------------------------------------------------------------------------- the API server


def _reading_vectors(process_outputs):
    """Returns the output processor's method, before which each output's value goes to the request
    that it belongs to. vLLM hands over the outputs of one step in one or several calls, of which
    the first has the vector."""

    @wraps(process_outputs)
    def process(processor, outputs, *args, **options):
        values = getattr(processor, "trl_atropos_values", iter(()))
        for output in outputs:
            count = len(output.new_token_ids)
            if not count:
                continue
            lists = output.new_logprobs
            if lists is not None and len(lists.sampled_token_ranks):
                continue  # vLLM's own arrays
            if lists is not None:
                output.new_logprobs = None
                _require(next(values, None) is None, "a step's vector was longer than its outputs")
                values = iter(lists.logprobs.tolist())
            step_values = list(islice(values, count))
            if not step_values:  # nobody asked
                continue
            _require(len(step_values) == count, "a step's vector was shorter than its outputs")
            state = processor.request_states.get(output.request_id)
            if state is not None:  # else it was aborted
                _hand_over(step_values, output, state.logprobs_processor)
        processor.trl_atropos_values = values
        return process_outputs(processor, outputs, *args, **options)

    return process


def _require(fits: bool, problem: str) -> None:
    """Raises if the vectors do not fit the outputs: every later value would belong to another
    token."""
    if not fits:
        raise RuntimeError(f"log-probabilities: {problem}. Start with `--fast_logprobs false`.")


def _hand_over(values: list[float], output, processor: LogprobsProcessor) -> None:
    """Adds the values of an output's tokens to those of its request, if it asked for them."""
    if processor.num_logprobs is None:
        return
    if len(values) == 1 and isinstance(processor.logprobs, SampledLogprobs):
        processor.logprobs.values.append(values[0])
        processor.cumulative_logprob += values[0]
    else:  # vLLM drops tokens behind a stop string, and then adds what is left
        tokens = np.array(output.new_token_ids, np.int32)
        column = np.array(values, np.float32)
        no_ranks = np.zeros(len(values), np.int32)
        output.new_logprobs = LogprobsLists(
            logprob_token_ids=tokens[:, None],
            logprobs=column[:, None],
            sampled_token_ranks=no_ranks,
        )


def _preparing_for_vectors(from_new_request):
    """Returns the class method that makes a request's state, for requests that ask for the sampled
    token's log-probability alone with a place for it, and for those that nobody reads before their
    end with a text that is made then."""

    @wraps(from_new_request)
    def prepare(cls, *args, **options):
        state = from_new_request(cls, *args, **options)
        processor = state.logprobs_processor
        if processor is None or not is_on():  # None for a pooling request
            return state
        if _is_read_at_the_end(state):
            state.detokenizer = TextAtTheEnd(state.detokenizer)
        if processor.num_logprobs == 0:
            decoder = None if processor.tokenizer is None else _decoder_of(processor.tokenizer)
            processor.logprobs = SampledLogprobs(state.detokenizer, decoder)
            # The tokens of a prompt get their texts as they come.
            if processor.prompt_logprobs is None:
                processor.tokenizer = None
        return state

    return prepare


def _is_read_at_the_end(state: RequestState) -> bool:
    """Returns whether a request's text is not needed before its end: no stop string is looked for
    in it, and its reader takes only the last output."""
    if state.output_kind is not RequestOutputKind.FINAL_ONLY:
        return False
    stops = getattr(state.detokenizer, "stop", None)  # None: it makes no text
    return stops is not None and not stops


class TextAtTheEnd(IncrementalDetokenizer):
    """Keeps a completion's tokens, and gives them to vLLM's own detokenizer when its text is read.
    One by one, they would take longer."""

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        super().__init__()
        self._detokenizer = detokenizer
        self._is_stopped = False
        self._decoded = 0  # tokens

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> None:
        """Adds tokens. `stop_terminated` says that the last one is a stop token, whose text vLLM
        leaves out."""
        self.token_ids.extend(new_token_ids)
        self._is_stopped = stop_terminated

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """Returns the text of all tokens so far."""
        new_token_ids = self.token_ids[self._decoded :]
        self._decoded = len(self.token_ids)
        self._detokenizer.update(new_token_ids, self._is_stopped)
        return self._detokenizer.get_next_output_text(finished, delta)


class SampledLogprobs(Sequence):
    """The log-probabilities of a completion's sampled tokens, in nats.

    It looks like vLLM's list of one dictionary for each token. An entry is made when somebody reads
    it: `{token id: Logprob(logprob, rank=None, decoded_token)}`.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        decoder: "Decoder | None",
        values: list[float] | None = None,
        start: int = 0,
    ) -> None:
        self.values = [] if values is None else values
        self._start = start  # index of the first value's token in the completion
        self._detokenizer = detokenizer  # has the completion's tokens
        self._decoder = decoder  # None if no texts are wanted
        self._tokens: list[int] = []
        self._texts: list[str | None] = []

    def append(self, entry: dict[int, Logprob]) -> None:
        """Adds a token in vLLM's form, for one of several that came in one step."""
        (logprob,) = entry.values()
        self.values.append(logprob.logprob)

    def extend(self, later: "SampledLogprobs") -> None:
        """Adds the next part of a stream, if its reader takes two parts at once."""
        self.values.extend(later.values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int | slice):
        if isinstance(index, slice):
            start, _, _ = index.indices(len(self.values))
            values = self.values[index]
            return SampledLogprobs(self._detokenizer, self._decoder, values, self._start + start)
        text = self.texts()[index]
        return {self._tokens[index]: Logprob(self.values[index], None, text)}

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return map(self.__getitem__, range(len(self)))

    def texts(self) -> list[str | None]:
        """Returns the text of each token by itself, or `None` for each if no texts are wanted."""
        if len(self._tokens) < len(self.values):
            self._read_tokens()
        return self._texts

    def _read_tokens(self) -> None:
        """Takes the tokens from the detokenizer, and makes their texts."""
        end = self._start + len(self.values)
        tokens = self._detokenizer.output_token_ids[:end]
        self._tokens = tokens[self._start :]
        if self._decoder is None:
            self._texts = [None] * len(self._tokens)
        else:
            self._texts = self._decoder.texts(tokens, self._start)


class Decoder:
    """Makes the texts of single tokens, as vLLM's own path does for each as it comes."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text_of: dict[int, str] = {}  # of a token by itself
        fields = dict.fromkeys(LogprobsProcessor.__dataclass_fields__)
        self._corrector = LogprobsProcessor(**fields | {"tokenizer": tokenizer})

    def texts(self, tokens: list[int], start: int) -> list[str]:
        """Returns the texts of `tokens[start:]`. Those before are the context of a character that
        several tokens make up."""
        texts = []
        for index in range(start, len(tokens)):
            token = tokens[index]
            text = self._text_of.get(token)
            if text is None:
                (text,) = convert_ids_list_to_tokens(self._tokenizer, [token])
                self._text_of[token] = text
            if text.endswith("\ufffd"):  # part of a character
                context = tokens[max(0, index - CONTEXT) : index]
                text = self._corrector._correct_decoded_token(token, context)
            texts.append(text)
        return texts


@lru_cache(maxsize=4)
def _decoder_of(tokenizer) -> Decoder:
    return Decoder(tokenizer)
