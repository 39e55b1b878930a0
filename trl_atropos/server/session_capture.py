"""Keeps what the calls of a session sample, inside of the engine's client.

`sampling.py` makes one `Capture` for each request of a session that reaches the engine. It changes
the request's parameters: the log-probability of each sampled token always comes, seeds never go to
the engine, and the session's own settings override the client's. When a completion ends, it is
read from vLLM's own state of the request, which has all tokens that the engine has delivered: also
those of a call whose client went away before the first of them was sent.
"""

import copy
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.outputs import RequestOutput

from trl_atropos.protocol import (
    Note,
    SamplingSettings,
    SessionSettings,
    Span,
    completion_key,
)
from trl_atropos.server import compat
from trl_atropos.server.plane import ControlPlane, History, Refused
from trl_atropos.server.sampled_logprobs import LOWEST_LOGPROB
from trl_atropos.server.session_reuse import Decode, with_sampled_ids
from trl_atropos.server.sessions import Call
from trl_atropos.server.token_tree import VersionSpan

GREEDY = 1e-5  # temperatures below count as 0 for vLLM
# Settings whose log-probabilities the trainer computes, too: it divides logits by a temperature.
COMPUTED_BY_TRAINER = {"temperature"}

# What vLLM's prompt has for each of its tokens, if anybody asked for that.
OF_RENDERED_TOKENS = {"prompt_token_offsets", "assistant_tokens_mask"}


def params_for(call: Call, params: SamplingParams) -> tuple[SamplingParams, bool]:
    """Returns the parameters that a request of a session is sampled with, and whether they ask for
    log-probabilities that the client has not asked for. The given ones stay as they are: one of
    vLLM's routes uses them again."""
    params = copy.copy(params)
    _override(params, call.session.query.settings)
    params.seed = None
    # The sampled token is among those of `logprob_token_ids`, which a `logprobs` would contradict.
    forced = params.logprobs is None and not params.logprob_token_ids
    if forced:
        params.logprobs = 0
        # Those of a prompt would lose their texts, too: see `leave_logprobs_without_text`.
        params.flat_logprobs = params.prompt_logprobs is None
    return params, forced


def _override(params: SamplingParams, settings: SessionSettings) -> None:
    """Sets those fields of a request that the session decides."""
    for name, value in settings.model_dump(exclude_none=True).items():
        if name == "max_tokens":
            value = min(value, params.max_tokens or value)
        setattr(params, name, value)
    if params.temperature < GREEDY:  # as vLLM does when it is made
        params.top_p = 1.0
        params.top_k = 0
        params.min_p = 0.0


def prompt_for(call: Call, prompt: Any, decode: Decode, longest: int) -> Any:
    """
    Returns what a request of a session samples from: vLLM's prompt, or if the session re-uses
    sampled ids, one with these.

    Args:
        call: that the request belongs to.
        prompt: as vLLM's route has rendered it.
        decode: of the server's tokenizer.
        longest: the server's `max_model_len`, in tokens. A prompt that would be as long stays.
    """
    # a prompt with images has their places beside its tokens
    if not call.reuses or not isinstance(prompt, dict) or prompt.get("type") != "token":
        return prompt
    rendered = np.array(prompt["prompt_token_ids"], dtype=np.int32)
    tokens, changed = with_sampled_ids(call.session.tree, rendered, decode)
    if not changed or len(tokens) >= longest:
        return prompt
    call.session.counts["reused"] += changed
    kept = {name: value for name, value in prompt.items() if name not in OF_RENDERED_TOKENS}
    return kept | {"prompt_token_ids": tokens.tolist()}


def reason_against(settings: SamplingSettings) -> str | None:
    """Returns why the trainer cannot compute the log-probabilities again of tokens that were
    sampled with these settings: the name of the first such setting. `None`: it can."""
    if settings.temperature < GREEDY:
        return "temperature 0"
    if settings.reshaped_by:
        return settings.reshaped_by[0]
    usual = SamplingSettings()
    for name, value in settings.numbers().items():
        if name not in COMPUTED_BY_TRAINER and value != getattr(usual, name):
            return name
    return None


@dataclass
class Sampled:
    """A completion's tokens and log-probabilities, by vLLM's names."""

    token_ids: list[int]
    logprobs: Any


class Capture:
    """Keeps what one request to the engine samples. `record` and `close` stand where `sampling.py`
    notes versions for requests of no session.

    Args:
        call: that the request belongs to.
        settings: that it samples with.
        forced: whether the client asked for no log-probabilities.
        plane: the server's.
        history: of the server's policy versions.
        adapter_id: that the request samples with; `None`: the model itself.
        read_logprobs: returns the log-probabilities of a `Sampled`.
    """

    def __init__(
        self,
        call: Call,
        settings: SamplingSettings,
        forced: bool,
        plane: ControlPlane,
        history: History,
        adapter_id: int | None,
        read_logprobs: Callable[[Sampled], list[float]],
    ) -> None:
        session = call.session
        if session.ended is not None:
            raise compat.client_error(f"this session has ended ({session.ended})")
        self.call = call
        self.session = session
        self.settings = settings
        self.forced = forced
        self.plane = plane
        self.history = history
        self.adapter_id = adapter_id
        self.read_logprobs = read_logprobs
        self.publishes_at_start = history.publishes
        # A client can choose the id that its request had so far, and two alike would be one.
        self.request_id = f"session-{secrets.token_hex(8)}"
        self.states = compat.watch_request(self.request_id)
        self.kept: set[int] = set()  # completions that have been kept
        session.requests[self.request_id] = self

    def record(self, output: RequestOutput) -> list[Span]:
        """Keeps the completions that end with this output. Takes out of it what the client has not
        asked for. Returns no versions: those that the answer would name are in the tree."""
        for completion in output.outputs:
            if completion.finish_reason is not None:
                self._keep(completion.index, completion.finish_reason)
            if self.forced:  # some versions of vLLM would show them to a client
                completion.logprobs = None
                completion.cumulative_logprob = None
        return []

    def close(self) -> None:
        """Keeps what the engine has delivered of completions that nobody waits for any more."""
        compat.forget_request(self.request_id)
        try:
            for state in self.states:
                self._keep(state.request_index, "abort")
        finally:
            del self.session.requests[self.request_id]

    def _keep(self, index: int, finish: str) -> None:
        """Keeps the completion with this index, once."""
        if index in self.kept:
            return
        self.kept.add(index)
        (state,) = [state for state in self.states if state.request_index == index]
        tokens = list(state.detokenizer.output_token_ids)
        logprobs = self._logprobs_of(tokens, state)
        versions, are_known = self._versions_of(state, len(tokens))
        reason = reason_against(self.settings)
        if self.call.unseen:
            reason = "unseen"
        elif logprobs is None:
            reason = "NaN"
            logprobs = [LOWEST_LOGPROB] * len(tokens)
        call = {
            "call": self.call.number,
            "route": self.call.route,
            "settings": self.settings._asdict(),
            "finish": finish,
            "reason": reason,
            "versions_known": are_known,
        }
        prompt = np.array(state.prompt_token_ids, dtype=np.int32)
        self.session.keep(call, prompt, tokens, logprobs, versions)
        if versions:
            self._note((versions[0][0], versions[-1][0]), prompt, tokens, logprobs)

    def _note(
        self, span: Span, prompt: np.ndarray, tokens: list[int], logprobs: list[float]
    ) -> None:
        """Notes a completion as those of no session are noted: a trainer asks for it by its key."""
        self.plane.ledger.note(completion_key(prompt, tokens, logprobs), Note(span, self.settings))
        evaluation = self.session.query.evaluation
        if evaluation is not None:
            self.plane.evaluations.note(evaluation, span)

    def _logprobs_of(self, tokens: list[int], state) -> list[float] | None:
        """Returns the log-probability of each token, or `None` if the model computed NaN."""
        try:
            return self.read_logprobs(Sampled(tokens, state.logprobs_processor.logprobs))
        except Refused:
            return None

    def _versions_of(self, state, num_tokens: int) -> tuple[list[VersionSpan], bool]:
        """Returns the versions that sampled the tokens, and whether this is known of each token.

        A vLLM that does not mark tokens knows only the version that the request began with.
        """
        if not num_tokens:
            return [], True
        marks = compat.marks_of_tokens(state)
        are_known = marks is not None or self.history.publishes == self.publishes_at_start
        if marks is None:
            marks = [(self.publishes_at_start, 0, num_tokens)]
        spans: list[VersionSpan] = []
        for publishes, start, end in marks:
            version = self.history.version(publishes, self.adapter_id)
            if spans and spans[-1][0] == version:
                _, start, _ = spans.pop()
            spans.append((version, start, end))
        return spans, are_known
