"""The probe: after a publish, does the server sample from the weights that the trainer has?

The server *samples* a continuation of a fixed prompt and the trainer scores the same tokens. Scoring on the server
(`prompt_logprobs`) would not do, because vLLM bypasses the prefix cache for it and cannot see stale keys and values.
The prompt is longer than one KV block, so that the block of the last probe is in the cache: if it outlived the change
of the weights, the log-probabilities differ. Torn, lost or detached weights differ by themselves.

Those faults persist, and show on most tokens. Rounding does not: where a residual stream nearly cancels before it is
normalised, one token in many thousands differs a thousand times more than the others. So if single tokens alone are
beyond the tolerance, the server samples once more, and only a second breach counts.
"""

import logging
from dataclasses import dataclass

import torch

from trl_atropos.errors import ProbeError
from trl_atropos.weights import ranks
from trl_atropos.weights.servers import Servers

logger = logging.getLogger(__name__)

NUM_SAMPLED = 8  # tokens per sample
NUM_SAMPLES = 4  # per probe, at the same time
TAIL = 16  # prompt tokens after the first full KV block


@dataclass(frozen=True)
class ProbeResult:
    max_abs_diff: float  # nats
    mean_abs_diff: float  # nats


@dataclass(frozen=True)
class Tolerance:
    """Bounds on |server - trainer| in nats: on any token, and in the mean."""

    max_abs: float
    mean_abs: float

    @classmethod
    def of(cls, device: str, *dtypes: torch.dtype) -> "Tolerance":
        """What a server on `device` ("cpu" or "cuda") and a trainer may differ by if these dtypes are involved."""
        if any(dtype not in (torch.float32, torch.float64) for dtype in dtypes):
            # Other kernels round otherwise, in every layer. On a GPU, with random weights of Qwen3's shapes and 12
            # nats per token: 0.07 and 0.02 at 0.6B, 0.23 and 0.06 at 8B.
            return cls(max_abs=0.2, mean_abs=5e-3) if device == "cpu" else cls(max_abs=0.6, mean_abs=0.15)
        if device == "cpu":
            return cls(max_abs=1e-4, mean_abs=1e-4)
        return cls(max_abs=2e-2, mean_abs=2e-3)  # vLLM's attention kernels multiply float32 in TF32 (2e-3 was seen)

    def after(self, first: ProbeResult) -> "Tolerance":
        """The bounds for the probes after the first, which shows the model's own rounding: three times that."""
        return Tolerance(
            max_abs=min(self.max_abs, max(0.2, 3 * first.max_abs_diff)),
            mean_abs=min(self.mean_abs, max(5e-3, 3 * first.mean_abs_diff)),
        )


class Outlier(ProbeError):
    """Single tokens are beyond the tolerance, the mean is not."""


class Probe:
    """
    Args:
        servers (`Servers`): Those that sample.
        temperature (`float`): Temperature of the run, applied on both sides.
        tolerance (`Tolerance`): Beyond it, `run` raises.
        block_size (`int`): Tokens per KV block of the server.
        max_model_len (`int`): Longest sequence of the server in tokens.
        vocab_size (`int`): The prompt's ids are drawn below it.
    """

    def __init__(
        self,
        servers: Servers,
        temperature: float,
        tolerance: Tolerance,
        block_size: int,
        max_model_len: int,
        vocab_size: int,
    ):
        self.servers = servers
        self.temperature = temperature
        self.tolerance = tolerance
        self._first: ProbeResult | None = None
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
        """
        Compares on every rank: a sharded model needs all of them to score.

        Raises:
            ProbeError: The tolerance is breached by some server, by single tokens twice; the message has both sides'
                numbers.
        """
        served = self.servers.each(lambda client: client.info().policy_version)
        ranks.together(lambda: self._check_versions(served, policy_version))
        try:
            result = self._look(model, policy_version)
        except Outlier as outlier:  # on every rank, where it is raised on any
            first, again = outlier.result, self._look(model, policy_version)
            logger.warning(
                "A token of the probe of policy version %d differed by %.2e nats between server and trainer (mean of "
                "all %.2e, allowed %.0e and %.0e). Other tokens did not (at most %.2e), so this is rounding.",
                *(policy_version, first.max_abs_diff, first.mean_abs_diff),
                *(self.tolerance.max_abs, self.tolerance.mean_abs, again.max_abs_diff),
            )
            result = ProbeResult(
                max(first.max_abs_diff, again.max_abs_diff), max(first.mean_abs_diff, again.mean_abs_diff)
            )
        if self._first is None:
            self._first = result
            self.tolerance = self.tolerance.after(result)
        return result

    def _look(self, model: torch.nn.Module, policy_version: int) -> ProbeResult:
        samples = self.servers.each(
            lambda client: client.sample(self.prompt_ids, NUM_SAMPLED, self.temperature, NUM_SAMPLES)
        )
        if not self.servers.one_per_rank:
            samples = ranks.on_main(lambda: samples)
        scored = self._score(model, [tokens for rows in samples for tokens, _ in rows])
        scored = scored.view(len(samples), NUM_SAMPLES, NUM_SAMPLED)
        results = ranks.together(lambda: self._compare(samples, scored, policy_version))
        return ProbeResult(*(max(column) for column in zip(*results, strict=True)))

    def _check_versions(self, served: list[int], policy_version: int) -> None:
        for client, version in zip(self.servers.clients, served, strict=True):
            if version != policy_version:
                raise ProbeError(
                    f"The server at {client.url} samples from policy version {version} but the trainer published "
                    f"{policy_version}: a publish was lost, or another trainer writes to this server."
                )

    def _compare(self, samples: list, scored: torch.Tensor, policy_version: int) -> list[tuple[float, float]]:
        """Largest and mean difference for each server. `scored`: float64, (num_servers, num_samples, num_tokens)."""
        results = []
        for rows, expected in zip(samples, scored, strict=True):
            tokens = [token for row, _ in rows for token in row]
            sampled = torch.tensor([logps for _, logps in rows], dtype=torch.float64)
            difference = (sampled - expected).abs().flatten()
            largest, mean = difference.max().item(), difference.mean().item()
            results.append((largest, mean))
            # The negations also catch NaN.
            if not (largest <= self.tolerance.max_abs and mean <= self.tolerance.mean_abs):
                worst = int(difference.nan_to_num(nan=float("inf")).argmax())
                problem = (Outlier if mean <= self.tolerance.mean_abs else ProbeError)(
                    f"After publishing policy version {policy_version}, the server and the trainer disagree: token "
                    f"{tokens[worst]} has log-probability {sampled.flatten()[worst]:.6f} on the server and "
                    f"{expected.flatten()[worst]:.6f} in the trainer (max difference {largest:.2e}, mean {mean:.2e}, "
                    f"allowed {self.tolerance.max_abs:.0e} and {self.tolerance.mean_abs:.0e}). The server does not "
                    "sample from the weights that are trained: do not trust rollouts since the last good probe."
                )
                problem.result = ProbeResult(largest, mean)
                raise problem
        return results

    @torch.no_grad()
    def _score(self, model: torch.nn.Module, tokens: list[list[int]]) -> torch.Tensor:
        """Log-probabilities of each row of `tokens` after the prompt under `model`, float64, on the CPU."""
        device = next(model.parameters()).device
        ids = torch.tensor([self.prompt_ids + row for row in tokens], device=device)
        training = model.training
        model.eval()  # dropout would differ from the server
        try:
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        finally:
            model.train(training)
        logits = logits[:, len(self.prompt_ids) - 1 : -1].float() / self.temperature
        chosen = torch.tensor(tokens, device=device)[:, :, None]
        return logits.log_softmax(-1).gather(2, chosen)[:, :, 0].double().cpu()
