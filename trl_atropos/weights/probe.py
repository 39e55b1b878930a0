"""The probe: after a publish, does the server sample from the weights that the trainer has?

The server *samples* a continuation of a fixed prompt and the trainer scores the same tokens. Scoring on the server
(`prompt_logprobs`) would not do, because vLLM bypasses the prefix cache for it and cannot see stale keys and values.
The prompt is longer than one KV block, so that the block of the last probe is in the cache: if it outlived the change
of the weights, the log-probabilities differ. Torn, lost or detached weights differ by themselves.

Those faults persist, and show on most tokens. Rounding does not: where a residual stream nearly cancels before it is
normalised, one token in many thousands differs a thousand times more than the others. So if single tokens alone are
beyond the tolerance, the server samples once more, and only a second breach counts.

Before the first step nothing can have been lost yet: what differs then is how vLLM and Transformers compute the model.
That may also begin at some length only, so the run's longest sequences are looked at once (`Probe.run_far`).
"""

import inspect
import logging
import math
import time
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from trl_atropos.errors import ProbeError, ServerError
from trl_atropos.weights import ranks
from trl_atropos.weights.servers import Servers

logger = logging.getLogger(__name__)

NUM_SAMPLED = 8  # tokens per sample
NUM_SAMPLES = 4  # per probe, at the same time
TAIL = 16  # prompt tokens after the first full KV block
FAR_SAMPLED = 16  # tokens that continue a long prompt, once: four rows of it would take four times the memory
FAR_STEP = 32  # tokens to within which the length is found from which on both sides differ
MAX_SHARE = 0.02  # of a run's time on a GPU that probes may take, where the configuration does not say how often
RARE = 0.1  # share of the probes above which single tokens beyond the tolerance are no rounding any more
SOME = 3  # such probes before that is said

CURES = (
    "What has helped: the same dtype on both sides, `attn_implementation: eager`, a server's `--max-model-len` within "
    "`original_max_position_embeddings` (longrope), other versions of vLLM or Transformers. `probe_every_n_steps: 0` "
    "trains all the same, with importance ratios that are off by as much."
)


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
            return cls(max_abs=0.2, mean_abs=3e-2) if device == "cpu" else cls(max_abs=0.6, mean_abs=0.15)
        if device == "cpu":
            return cls(max_abs=1e-4, mean_abs=1e-4)
        return cls(max_abs=2e-2, mean_abs=2e-3)  # vLLM's attention kernels multiply float32 in TF32 (2e-3 was seen)

    def after(self, first: ProbeResult) -> "Tolerance":
        """
        The bounds for the probes after the first, which shows the model's own rounding: three times that.

        Rounding in 16 bits grows with the logits, and those of a policy that becomes sure of itself grow: from 2e-3
        nats in the mean to 5e-3 within 120 steps of the quickstart on a GPU. So the bounds stay above 0.2 and 3e-2.
        """
        return Tolerance(
            max_abs=min(self.max_abs, max(0.2, 3 * first.max_abs_diff)),
            mean_abs=min(self.mean_abs, max(3e-2, 3 * first.mean_abs_diff)),
        )


class Outlier(ProbeError):
    """Single tokens are beyond the tolerance, the mean is not."""


@dataclass
class Schedule:
    """
    After which publishes the probe runs: always after the first and the last one.

    Args:
        every (`int`, *optional*): Publishes between two probes; 0 for none. By default every one on the CPU, and on a
            GPU as often as probes take at most `MAX_SHARE` of the time.
        device (`str`): Of the servers, "cpu" or "cuda".
    """

    every: int | None
    device: str = "cpu"
    publishes: int = 0
    seconds: float = 0.0  # that the last probe took
    ended: float = -math.inf  # when it did, in seconds

    def due(self, now: float, last: bool) -> bool:
        """Whether the publish that ended at `now` is to be probed. Counts it."""
        self.publishes += 1
        if self.every == 0:
            return False
        if last or self.publishes == 1:
            return True
        if self.every is None and self.device != "cpu":
            return now - self.ended >= self.seconds / MAX_SHARE
        return (self.publishes - 1) % (self.every or 1) == 0

    def ran(self, began: float, ended: float) -> None:
        self.seconds, self.ended = ended - began, ended


def num_positions(config: PreTrainedConfig) -> float:
    """Tokens of the longest sequence that a model has positions for."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)  # ALiBi's and state-space models have none
    rope = getattr(text, "rope_parameters", None) or {}  # nor has every model a rotary embedding
    return math.inf if positions is None else positions * max(1.0, rope.get("factor") or 1.0)


class Probe:
    """
    Args:
        servers (`Servers`): Those that sample.
        temperature (`float`): Temperature of the run, applied on both sides.
        tolerance (`Tolerance`): Beyond it, `run` raises.
        block_size (`int`): Tokens per KV block of the server.
        max_model_len (`int`): Longest sequence of the server in tokens.
        vocab_size (`int`): The prompt's ids are drawn below it.
        model (`PreTrainedModel`): What will be scored with, without wrappers and adapters.
        one_memory (`bool`): Server and trainer compute from the same memory, so that their weights cannot differ
            before the first step.
    """

    def __init__(
        self,
        servers: Servers,
        temperature: float,
        tolerance: Tolerance,
        block_size: int,
        max_model_len: int,
        vocab_size: int,
        model: PreTrainedModel,
        one_memory: bool,
    ):
        self.servers = servers
        self.temperature = temperature
        self.tolerance = self._allowed = tolerance
        self.vocab_size = vocab_size
        self.one_memory = one_memory
        self._skips_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._first: ProbeResult | None = None
        self._runs = self._runs_with_outliers = 0
        length = min(block_size + TAIL, max_model_len - NUM_SAMPLED)
        if length <= block_size:
            logger.warning(
                "The server's max_model_len of %d tokens leaves no room for a prompt beyond one KV block of %d: the "
                "probe cannot see stale prefixes. Start the server with --max-model-len %d or more.",
                max_model_len,
                block_size,
                block_size + TAIL + NUM_SAMPLED,
            )
        self.prompt_ids = self._prompt(max(length, 1), seed=0)

    def _prompt(self, length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.vocab_size, (length,), generator=generator).tolist()

    # --------------------------------------------------------------------------------------------- after each publish

    def run(self, model: torch.nn.Module, policy_version: int) -> ProbeResult:
        """
        Compares on every rank: a sharded model needs all of them to score.

        Raises:
            ProbeError: The tolerance is breached by some server, by single tokens twice; the message has both sides'
                numbers.
        """
        served = self.servers.each(lambda client: client.info().policy_version)
        ranks.together(lambda: self._check_versions(served, policy_version))
        self._runs += 1
        try:
            result = self._look(model, policy_version, self.prompt_ids, self.tolerance)
        except Outlier as outlier:  # on every rank, where it is raised on any
            first, again = outlier.result, self._look(model, policy_version, self.prompt_ids, self.tolerance)
            self._tell(first, again, policy_version)
            result = ProbeResult(
                max(first.max_abs_diff, again.max_abs_diff), max(first.mean_abs_diff, again.mean_abs_diff)
            )
        if self._first is None:
            self._first = result
            self.tolerance = self.tolerance.after(result)
        return result

    def _tell(self, first: ProbeResult, again: ProbeResult, policy_version: int) -> None:
        """Warns of single tokens beyond the tolerance, until it is clear that the model brings them with it."""
        often = self._often()
        self._runs_with_outliers += 1
        if often:
            return
        logger.warning(
            "A token of the probe of policy version %d differed by %.2e nats between server and trainer (mean of all "
            "%.2e, allowed %.0e and %.0e), but none when the server sampled again (at most %.2e). %s",
            *(policy_version, first.max_abs_diff, first.mean_abs_diff),
            *(self.tolerance.max_abs, self.tolerance.mean_abs, again.max_abs_diff),
            f"{self._runs_with_outliers} of {self._runs} probes had such tokens, too many for rounding alone: vLLM "
            "and Transformers compute this model differently, or, if it began in mid-run, the policy has grown "
            f"ill-conditioned (lower `learning_rate`). {CURES} This is said once."
            if self._often()
            else "One in thousands may, where rounding errors are multiplied; more often, it would not be rounding.",
        )

    def _often(self) -> bool:
        return self._runs_with_outliers >= SOME and self._runs_with_outliers > RARE * self._runs

    # ------------------------------------------------------------------------------------------- once, before training

    def run_far(self, model: torch.nn.Module, policy_version: int, longest: int, seconds: float) -> str | None:
        """
        Compares the continuation of a prompt that makes a sequence of `longest` tokens, or of as many as both sides
        can take within half of a server's deadline and the trainer's memory. Call after a first `run`.

        Args:
            seconds (`float`): What that took.

        Returns what is wrong, if so, with the length from which on.
        """
        agreed, beyond, problem = len(self.prompt_ids) + NUM_SAMPLED, 0, None
        while problem is None and agreed < longest:
            # A sequence twice as long takes at most four times as long.
            length = min(longest, int(agreed * math.sqrt(self.servers.timeout / 2 / seconds)))
            if length < min(longest, 2 * agreed):
                break
            began = time.perf_counter()
            try:
                problem = self._differs(model, policy_version, length)
            except torch.OutOfMemoryError:  # then training on such a sequence would fail, too, if one came
                break
            seconds = ranks.on_main(lambda began=began: time.perf_counter() - began)
            agreed, beyond = (length, 0) if problem is None else (agreed, length)
        if problem is None:
            logger.info("Server and trainer agree on sequences of %d tokens (at most %d may come)", agreed, longest)
            return None
        while beyond - agreed > FAR_STEP:
            middle = (agreed + beyond) // 2
            found = self._differs(model, policy_version, middle)
            agreed, beyond, problem = (middle, beyond, problem) if found is None else (agreed, middle, found)
        return (
            f"Server and trainer agree on sequences of up to {agreed} tokens, but not from {beyond} tokens on (at "
            f"most {longest} may come): {problem} The weights are the same, so vLLM and Transformers compute longer "
            "sequences of this model differently, mostly because of a window or a rotary embedding. Set "
            f"`max_sequence_length: {agreed}`, which drops longer rollouts, and start the server with "
            f"`--max-model-len {agreed}`, which ends them there."
        )

    def _differs(self, model: torch.nn.Module, policy_version: int, length: int) -> str | None:
        """By how much server and trainer differ at the end of a sequence of `length` tokens, if beyond tolerance."""
        prompt_ids, seen = self._prompt(length - FAR_SAMPLED, seed=1), ""
        for _ in range(2):  # as in `run`, single tokens count when they come again
            try:
                self._look(model, policy_version, prompt_ids, self._allowed, 1, FAR_SAMPLED)
            except Outlier as outlier:
                seen = outlier.seen
            except ProbeError as error:
                return error.seen
            except ServerError as error:
                self.servers.each(lambda client: client.info())  # raises if a server is gone
                return f"{error}."
            else:
                return None
        return seen

    # ------------------------------------------------------------------------------------------------------ comparison

    def _look(
        self,
        model: torch.nn.Module,
        policy_version: int,
        prompt_ids: list[int],
        tolerance: Tolerance,
        num_samples: int = NUM_SAMPLES,
        num_tokens: int = NUM_SAMPLED,
    ) -> ProbeResult:
        samples = self.servers.each(
            lambda client: client.sample(prompt_ids, num_tokens, self.temperature, num_samples)
        )
        if not self.servers.one_per_rank:
            samples = ranks.on_main(lambda: samples)
        tokens = [tokens for rows in samples for tokens, _ in rows]
        scored = ranks.together(lambda: self._score(model, prompt_ids, tokens))
        scored = scored.view(len(samples), num_samples, num_tokens)
        results = ranks.together(lambda: self._compare(samples, scored, tolerance, policy_version))
        return ProbeResult(*(max(column) for column in zip(*results, strict=True)))

    def _check_versions(self, served: list[int], policy_version: int) -> None:
        for client, version in zip(self.servers.clients, served, strict=True):
            if version != policy_version:
                raise ProbeError(
                    f"The server at {client.url} samples from policy version {version} but the trainer published "
                    f"{policy_version}: a publish was lost, or another trainer writes to this server."
                )

    def _compare(
        self, samples: list, scored: torch.Tensor, tolerance: Tolerance, policy_version: int
    ) -> list[tuple[float, float]]:
        """Largest and mean difference for each server. `scored`: float64, (num_servers, num_samples, num_tokens)."""
        results = []
        for rows, expected in zip(samples, scored, strict=True):
            tokens = [token for row, _ in rows for token in row]
            sampled = torch.tensor([logps for _, logps in rows], dtype=torch.float64)
            difference = (sampled - expected).abs().flatten()
            largest, mean = difference.max().item(), difference.mean().item()
            results.append((largest, mean))
            # The negations also catch NaN.
            if not (largest <= tolerance.max_abs and mean <= tolerance.mean_abs):
                worst = int(difference.nan_to_num(nan=float("inf")).argmax())
                seen = (
                    f"token {tokens[worst]} has log-probability {sampled.flatten()[worst]:.6f} on the server and "
                    f"{expected.flatten()[worst]:.6f} in the trainer (max difference {largest:.2e}, mean {mean:.2e}, "
                    f"allowed {tolerance.max_abs:.0e} and {tolerance.mean_abs:.0e})."
                )
                problem = (Outlier if mean <= tolerance.mean_abs else ProbeError)(
                    f"After publishing policy version {policy_version}, the server and the trainer disagree: {seen} "
                    f"{self._meaning(expected)}"
                )
                problem.result, problem.seen = ProbeResult(largest, mean), seen
                raise problem
        return results

    def _meaning(self, expected: torch.Tensor) -> str:
        """What it means that both sides differ."""
        if expected.isnan().any():
            return (
                "The trainer's own model computes NaN: its weights are not finite (a diverged run: lower "
                "`learning_rate`, resume from a checkpoint before it), or its dtype overflows (`dtype: float32`)."
            )
        if self._first is not None:
            return (
                "The server does not sample from the weights that are trained: do not trust rollouts since the last "
                "good probe."
            )
        if self.one_memory:
            return (
                "No step was taken yet, and both compute from one memory, so the weights are equal bit for bit: it is "
                f"vLLM and Transformers that compute this model differently. {CURES}"
            )
        return (
            "No step was taken yet: either the server has other weights than the trainer (with an adapter, of the "
            "base model: start both on the same one), or vLLM and Transformers compute this model differently. "
            f"{CURES}"
        )

    @torch.no_grad()
    def _score(self, model: torch.nn.Module, prompt_ids: list[int], tokens: list[list[int]]) -> torch.Tensor:
        """Log-probabilities of each row of `tokens` after the prompt under `model`, float64, on the CPU."""
        device = next(model.parameters()).device
        ids = torch.tensor([prompt_ids + row for row in tokens], device=device)
        num_logits = len(tokens[0]) + 1
        keep = {"logits_to_keep": num_logits} if self._skips_logits else {}  # those of all tokens may fill a device
        training = model.training
        model.eval()  # dropout would differ from the server
        try:
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **keep).logits
        finally:
            model.train(training)
        logits = logits[:, -num_logits:-1].float() / self.temperature
        chosen = torch.tensor(tokens, device=device)[:, :, None]
        return logits.log_softmax(-1).gather(2, chosen)[:, :, 0].double().cpu()
