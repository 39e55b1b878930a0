"""The probe: after a publish, does the server sample from the weights that the trainer has?

The server *samples* a continuation of a fixed prompt and the trainer scores the same tokens. Scoring on the server
(`prompt_logprobs`) would not do, because vLLM bypasses the prefix cache for it and cannot see stale keys and values.
The prompt is longer than one KV block, so that the block of the last probe is in the cache: if it outlived the change
of the weights, the log-probabilities differ. Torn, lost or detached weights differ by themselves.
"""

import logging
from dataclasses import dataclass

import torch

from trl_atropos.errors import ProbeError
from trl_atropos.weights.client import ServerClient

logger = logging.getLogger(__name__)

NUM_SAMPLED = 8  # tokens per probe
TAIL = 16  # prompt tokens after the first full KV block


@dataclass(frozen=True)
class Tolerance:
    """Bounds on |server - trainer| in nats. 16-bit arithmetic reaches 0.1 on single tokens honestly."""

    max_abs: float
    mean_abs: float

    @classmethod
    def for_dtype(cls, *dtypes: torch.dtype) -> "Tolerance":
        if all(dtype in (torch.float32, torch.float64) for dtype in dtypes):
            return cls(max_abs=1e-4, mean_abs=1e-4)
        return cls(max_abs=0.2, mean_abs=5e-3)


@dataclass(frozen=True)
class ProbeResult:
    max_abs_diff: float  # nats
    mean_abs_diff: float  # nats


class Probe:
    """
    Args:
        client (`ServerClient`): The server that samples.
        temperature (`float`): Temperature of the run, applied on both sides.
        tolerance (`Tolerance`): Beyond it, `run` raises.
        block_size (`int`): Tokens per KV block of the server.
        max_model_len (`int`): Longest sequence of the server in tokens.
        vocab_size (`int`): The prompt's ids are drawn below it.
    """

    def __init__(
        self,
        client: ServerClient,
        temperature: float,
        tolerance: Tolerance,
        block_size: int,
        max_model_len: int,
        vocab_size: int,
    ):
        self.client = client
        self.temperature = temperature
        self.tolerance = tolerance
        length = min(block_size + TAIL, max_model_len - NUM_SAMPLED)
        if length <= block_size:
            logger.warning(
                "The server's max_model_len of %d tokens leaves no room for a prompt beyond one KV block of %d: the "
                "probe cannot see stale prefixes. Start the server with --max-model-len %d or more.",
                max_model_len,
                block_size,
                block_size + TAIL + NUM_SAMPLED,
            )
        generator = torch.Generator().manual_seed(0)
        self.prompt_ids = torch.randint(vocab_size, (max(length, 1),), generator=generator).tolist()

    def run(self, model: torch.nn.Module, policy_version: int) -> ProbeResult:
        """Compares once. Raises `ProbeError` with both sides' numbers if the tolerance is breached."""
        served = self.client.info().policy_version
        if served != policy_version:
            raise ProbeError(
                f"The server samples from policy version {served} but the trainer is at {policy_version}: a publish "
                "was lost, or another trainer writes to this server."
            )
        tokens, sampled = self.client.sample(self.prompt_ids, NUM_SAMPLED, self.temperature)
        scored = self._score(model, tokens)
        difference = (torch.tensor(sampled, dtype=torch.float64) - scored).abs()
        result = ProbeResult(difference.max().item(), difference.mean().item())
        # The negation also catches NaN.
        if not (result.max_abs_diff <= self.tolerance.max_abs and result.mean_abs_diff <= self.tolerance.mean_abs):
            worst = int(difference.nan_to_num(nan=float("inf")).argmax())
            raise ProbeError(
                f"After publishing policy version {policy_version}, the server and the trainer disagree: token "
                f"{tokens[worst]} has log-probability {sampled[worst]:.6f} on the server and {scored[worst]:.6f} in "
                f"the trainer (max difference {result.max_abs_diff:.2e}, mean {result.mean_abs_diff:.2e}, allowed "
                f"{self.tolerance.max_abs:.0e} and {self.tolerance.mean_abs:.0e}). The server does not sample from "
                "the weights that are trained: do not trust rollouts since the last good probe."
            )
        return result

    @torch.no_grad()
    def _score(self, model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
        """Log-probabilities of `tokens` after the prompt under `model`, float64, shape (num_tokens,)."""
        device = next(model.parameters()).device
        ids = torch.tensor([self.prompt_ids + tokens], device=device)
        training = model.training
        model.eval()  # dropout would differ from the server
        try:
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        finally:
            model.train(training)
        logits = logits[0, len(self.prompt_ids) - 1 : -1].float() / self.temperature
        logps = logits.log_softmax(-1).gather(1, torch.tensor(tokens, device=device)[:, None])
        return logps[:, 0].double().cpu()
