"""The correction for the sampler, by its formula."""

import math
from types import SimpleNamespace

import pytest
import torch

from trl_atropos.batches.inputs import importance_ratio
from trl_atropos.config import IMPORTANCE_SAMPLING_MODES

LOW, HIGH = 0.5, 2.0
# Three tokens of one rollout that the policy makes 4, 1/4 and 3 times likelier than its sampler
# did. A fourth one is not trained.
RATIOS = (4.0, 0.25, 3.0, 9.0)
EXPECTED = {
    "token_truncate": [2.0, 0.5, 2.0, 1.0],
    "token_mask": [0.0, 0.0, 0.0, 1.0],
    "sequence_truncate": [2.0],  # of 4 * 1/4 * 3
    "sequence_mask": [0.0],
}


def ratio_of(mode: str) -> torch.Tensor:
    settings = SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=LOW,
        vllm_importance_sampling_clip_max=HIGH,
    )
    batch = {
        "completion_mask": torch.tensor([[1, 1, 1, 1]]),
        "tool_mask": torch.tensor([[1, 1, 1, 0]]),
        "sampling_per_token_logps": torch.full((1, 4), -1.0),
    }
    logprobs = torch.tensor([[math.log(ratio) - 1.0 for ratio in RATIOS]])
    return importance_ratio(logprobs, batch, settings)


@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
def test_ratio_keeps_within_its_bounds(mode):
    torch.testing.assert_close(ratio_of(mode), torch.tensor([EXPECTED[mode]]))


@pytest.mark.parametrize("mode", ["token_clip", "turn_mask", "token", ""])
def test_unknown_mode_is_refused(mode):
    with pytest.raises(ValueError, match=rf"is '{mode}': set it to one of token_truncate, .*_mask"):
        ratio_of(mode)
