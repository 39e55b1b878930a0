"""What the body of a request becomes, and what is told of log-probabilities, in vLLM's own classes.
Without a server: what one samples is in `test_generate.py`."""

import json
import math

import pytest
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from trl_atropos.server.plane import Refused
from trl_atropos.server.sampling import (
    LOWEST_LOGPROB,
    _sampled_logprobs,
    _settings_of,
    parse,
)


def completion(positions: list[dict[int, float]], flat: bool) -> CompletionOutput:
    """Log-probabilities by token at each position. The first token of each is the one that was
    sampled."""
    logprobs = FlatLogprobs() if flat else []
    for position in positions:
        logprobs.append({token: Logprob(value) for token, value in position.items()})
    tokens = [next(iter(position)) for position in positions]
    return CompletionOutput(
        index=0, text="", token_ids=tokens, cumulative_logprob=None, logprobs=logprobs
    )


@pytest.mark.parametrize("flat", [True, False])
def test_logprob_is_of_sampled_not_likeliest_token(flat):
    positions = [{5: -3.0, 7: -0.1}, {7: -0.25, 5: -2.0}, {9: -math.inf, 5: 0.0}]
    assert _sampled_logprobs(completion(positions, flat)) == [-3.0, -0.25, LOWEST_LOGPROB]


@pytest.mark.parametrize("flat", [True, False])
def test_nan_logprob_is_server_error(flat):
    with pytest.raises(Refused, match="computed NaN as a log-probability") as refused:
        _sampled_logprobs(completion([{5: -1.0}, {5: math.nan}], flat))
    assert refused.value.status == 500


@pytest.mark.parametrize(("asked", "noted"), [(-1, 0), (0, 0), (20, 20)])
def test_disabled_top_k_is_noted_as_0(asked, noted):
    settings = _settings_of(SamplingParams(temperature=0.5, top_k=asked, min_p=0.1), ())
    assert (settings.temperature, settings.top_k, settings.min_p) == (0.5, noted, 0.1)


def parsed(**body) -> tuple[dict, SamplingParams]:
    return parse(json.dumps(body).encode())


def test_body_becomes_prompt_and_sampling_params():
    """What an OpenAI client sends along, which environments cannot leave out, is ignored."""
    prompt, params = parsed(
        prompt="abc=", model="any", stream=True, user="me", temperature=0.5, logprobs=0
    )
    assert prompt == {"prompt": "abc="}
    assert (params.temperature, params.logprobs) == (0.5, 0)
    assert params.output_kind is RequestOutputKind.FINAL_ONLY and params.flat_logprobs
    prompt, _ = parsed(prompt={"prompt_token_ids": [0, 2**31 - 1]})
    assert prompt == {"prompt_token_ids": [0, 2**31 - 1]}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"prompt": {"prompt_token_ids": [-1]}}, "prompt_token_ids"),
        ({"prompt": {"prompt_token_ids": [2**31]}}, "prompt_token_ids"),
        ({"prompt": {"prompt_token_ids": [1], "multi_modal_data": {}}}, "multi_modal_data"),
        ({"prompt": "a", "output_kind": 0}, "unknown sampling parameters: output_kind"),
        (
            {"prompt": "a", "_all_stop_token_ids": [1]},
            "unknown sampling parameters: _all_stop_token_ids",
        ),
        (
            {"prompt": "a", "structured_outputs": {"regexp": "a"}},
            "parameters: structured_outputs.regexp",
        ),
        (
            {"prompt": "a", "structured_outputs": {"_backend": "x"}},
            "parameters: structured_outputs._backend",
        ),
        ({"prompt": "a", "seed": 2**64}, "`seed` is 18446744073709551616"),
        ({"temperature": 1.0}, "`prompt` must be a string or"),
    ],
)
def test_forbidden_field_is_refused_by_name(body, told):
    with pytest.raises(Refused) as refused:
        parsed(**body)
    assert told in str(refused.value) and refused.value.status == 400
