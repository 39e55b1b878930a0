"""What a session changes in a request's parameters, and what it makes of vLLM's state of a request.
What real requests leave is in `test_sessions.py`."""

from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.sampling_params import SamplingType, StructuredOutputsParams

from trl_atropos.protocol import SamplingSettings, SessionQuery
from trl_atropos.server import compat
from trl_atropos.server.plane import History, Ledger, Refused
from trl_atropos.server.session_capture import Capture, params_for, prompt_for, reason_against
from trl_atropos.server.sessions import Call, Session


def call_with(**settings) -> Call:
    query = SessionQuery.model_validate({"settings": settings})
    return Call(Session("id", query), 0, "/v1/completions")


@pytest.mark.parametrize(
    ("asked", "forced", "logprobs", "flat"),
    [
        ({}, True, 0, True),
        ({"prompt_logprobs": 1}, True, 0, False),  # whose texts flat ones would lose
        ({"logprobs": 0}, False, 0, False),
        ({"logprobs": 5}, False, 5, False),
        ({"logprob_token_ids": [5, 6]}, False, None, False),
    ],
)
def test_logprobs_are_asked_for_unless_they_come_anyway(asked, forced, logprobs, flat):
    given = SamplingParams(**asked)
    params, is_forced = params_for(call_with(), given)
    assert (is_forced, params.logprobs, params.flat_logprobs) == (forced, logprobs, flat)
    assert given == SamplingParams(**asked)  # which vLLM may use for another call


def test_settings_of_session_override_those_of_client():
    given = SamplingParams(temperature=0, max_tokens=50, seed=7, n=1)
    assert given.sampling_type is SamplingType.GREEDY
    params, _ = params_for(call_with(temperature=0.5, top_k=3, max_tokens=9), given)
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.5, 3, 9, None)
    assert params.sampling_type is SamplingType.RANDOM
    params, _ = params_for(call_with(max_tokens=9), SamplingParams(max_tokens=4))
    assert params.max_tokens == 4
    greedy = SamplingParams(temperature=1.0, top_p=0.5, top_k=3, min_p=0.1)
    params, _ = params_for(call_with(temperature=0), greedy)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)


TEXTS = {1: "a", 2: "b", 3: "ab", 9: "u:"}
RENDERED = {"type": "token", "prompt_token_ids": [9, 3, 9], "prompt": "u:abu:"}


def text_of(tokens) -> str:
    return "".join(TEXTS[token] for token in tokens)


def call_after_an_answer() -> Call:
    """Of a session whose model saw "u:" and sampled "a" and "b"."""
    call = call_with()
    call.reuses = True
    call.session.tree.add([9], [1, 2], [-0.5, -0.5], [(0, 0, 2)])
    return call


def test_sampled_ids_take_the_place_of_rendered_ones():
    call = call_after_an_answer()
    of_tokens = {"prompt_token_offsets": [(0, 2), (2, 4), (4, 6)], "assistant_tokens_mask": [0] * 3}
    prompt = prompt_for(call, RENDERED | of_tokens | {"cache_salt": "x"}, text_of, longest=5)
    assert prompt == RENDERED | {"prompt_token_ids": [9, 1, 2, 9], "cache_salt": "x"}
    assert call.session.counts["reused"] == 1


@pytest.mark.parametrize(
    ("prompt", "reuses", "longest"),
    [
        pytest.param(RENDERED, False, 5, id="no reuse"),
        pytest.param(RENDERED, True, 4, id="as long as the model's context"),
        pytest.param(RENDERED | {"type": "multimodal"}, True, 5, id="with images"),
        pytest.param("text", True, 5, id="no tokens"),
    ],
)
def test_other_prompts_stay_as_they_are(prompt, reuses, longest):
    call = call_after_an_answer()
    call.reuses = reuses
    assert prompt_for(call, prompt, text_of, longest) is prompt
    assert "reused" not in call.session.counts


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (SamplingSettings(), None),
        (SamplingSettings(temperature=0.3), None),
        (SamplingSettings(temperature=0.0), "temperature 0"),
        (SamplingSettings(top_p=0.9), "top_p"),
        (SamplingSettings(reshaped_by=("min_tokens", "logit_bias")), "min_tokens"),
    ],
)
def test_reason_names_first_setting_that_trainer_cannot_follow(settings, reason):
    assert reason_against(settings) == reason


class State:
    """As vLLM's state of a request whose tokens were sampled after 0, 1 and 3 publishes."""

    request_index = 0
    prompt_token_ids = (1, 2)
    detokenizer = SimpleNamespace(output_token_ids=[5, 6, 7, 8])
    logprobs_processor = SimpleNamespace(logprobs=None)

    def _weight_version_spans(self):
        parts = [("default", 0, 1), ("1", 1, 2), ("3", 2, 4)]
        return [SimpleNamespace(version=v, start=s, end=e) for v, s, e in parts]


def captured(history: History, read_logprobs=None, publishes: int = 0) -> Session:
    """A session with one completion, in the midst of which some publishes came."""
    call = call_with()
    read = read_logprobs or (lambda sampled: [-0.5] * len(sampled.token_ids))
    plane = SimpleNamespace(ledger=Ledger())
    capture = Capture(call, SamplingSettings(), True, plane, history, None, read)
    for version in range(40, 40 + publishes):
        history.publish(version, None)
    capture.states.append(State())
    capture.close()
    assert not call.session.requests and not compat._states
    return call.session


def test_tokens_have_versions_of_their_marks():
    """The second publish has left the version as it was."""
    history = History(7)
    for version in (7, 8, 9):
        history.publish(version, None)
    (segment,) = captured(history).tree.segments
    assert segment.versions == [(7, 2, 4), (9, 4, 6)]


@pytest.mark.parametrize("publishes", [0, 2])
def test_versions_without_marks_are_the_oldest_and_said_to_be(monkeypatch, publishes):
    monkeypatch.setattr(compat, "NEW", False)
    session = captured(History(7), publishes=publishes)
    assert session.tree.segments[0].versions == [(7, 2, 6)]
    assert [call["versions_known"] for call in session.calls] == [publishes == 0]


def test_completion_with_nan_is_kept_with_that_reason():
    def refuse(_sampled):
        raise Refused("NaN", 500)

    session = captured(History(), refuse)
    assert [call["reason"] for call in session.calls] == ["NaN"]
    assert session.counts["marked/NaN"] == 4


def test_ended_session_samples_no_more():
    call = call_with()
    call.session.ended = "deleted"
    with pytest.raises(compat.CLIENT_ERRORS, match="has ended"):
        Capture(call, SamplingSettings(), True, None, History(), None, None)
    assert not compat._states


def test_every_kind_of_mask_is_a_reason():
    """They are those of `SamplingSettings`, of which a vLLM's new fields are a part by a test."""
    from trl_atropos.server.sampling import _settings_of

    masks = {
        "structured_outputs": StructuredOutputsParams(regex="a"),
        "logit_bias": {5: 1.0},
        "allowed_token_ids": [5],
        "min_tokens": 1,
    }
    for name, value in masks.items():
        settings = _settings_of(SamplingParams(**{name: value}), ())
        assert reason_against(settings) == name
    settings = _settings_of(SamplingParams(), ("the server's logits processor a:B",))
    assert reason_against(settings) == "the server's logits processor a:B"
