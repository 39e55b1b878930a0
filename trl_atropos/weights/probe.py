"""The probe: after a publish, the server samples and the trainer scores the same tokens.

The server *samples* a continuation of a fixed prompt. Scoring on the server (`prompt_logprobs`)
would not do: vLLM bypasses the prefix cache for it, so that stale keys and values, which earlier
weights have computed, would go unseen. The prompt is longer than one KV block, so that the block of
the last probe is in the cache.

If single tokens alone are beyond the tolerance (`tolerance.py`), the server samples once more, and
only a second breach counts.

Before the first step, a difference is one of how vLLM and Transformers compute the model. It may
begin at some length only, so the run's longest rollouts are compared, too (`Probe.run_longest`,
`probe_lengths.py`), and again by every eighth probe.

The publisher calls `begin` after a publish that `probe_schedule.py` finds due, and `judge` before
the next backward pass.
"""

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from trl_atropos.distributed import on_main, together
from trl_atropos.errors import ProbeError, ServerError
from trl_atropos.server_client import ServerClient, Servers
from trl_atropos.weights.gather import base_model
from trl_atropos.weights.model_setup import num_positions
from trl_atropos.weights.probe_lengths import find_agreement
from trl_atropos.weights.probe_schedule import Schedule
from trl_atropos.weights.tolerance import (
    EXACT,
    NO_TOLERANCE,
    Outlier,
    ProbeResult,
    RoundingWarnings,
    Tolerance,
    rounding_limit,
    rounds_to_16_bits,
)

logger = logging.getLogger(__name__)

NUM_SAMPLED = 8  # tokens per sample
NUM_SAMPLES = 4  # per probe, at the same time
TAIL = 16  # prompt tokens after the first full KV block
# tokens that continue a long prompt, once: four samples of it would take four times the memory
LONG_SAMPLED = 16

CURES = (
    "Try, in this order: the same dtype on both sides; `attn_implementation: eager`; a server's "
    "`--max-model-len` within `original_max_position_embeddings` (longrope); other versions of "
    "vLLM or Transformers. `probe_every_n_steps: 0` trains all the same, with importance ratios "
    "that are off by as much."
)

# For each sample, its token ids and their log-probabilities.
Samples = list[tuple[list[int], list[float]]]


class Plan(NamedTuple):
    """The samples of one probe, and the bounds on their difference."""

    prompt_ids: list[int]
    num_tokens: int
    num_samples: int
    tolerance: Tolerance


class Probe:
    """
    Compares servers and trainer on all ranks.

    Args:
        servers (`Servers`): Sample.
        trainer (`AtroposGRPOTrainer`): Scores.
        every (`int`, *optional*): Publishes between two probes, as in `Schedule`.
        one_memory (`bool`): Server and trainer compute from the same memory, so that weights cannot
            differ at the start.
        prove (`Callable`): Compares the weights anew, wherever the servers keep them now. Returns,
            on every rank alike, whether all of them are equal bit for bit. Then a difference on a
            GPU or in 16 bits is rounding up to `rounding_limit`: the log warns of it and the run
            goes on.
    """

    def __init__(
        self,
        servers: Servers,
        trainer: Any,
        every: int | None,
        one_memory: bool,
        prove: Callable[[], bool] = lambda: False,
    ):
        info = servers.info
        args = trainer.args
        self.servers = servers
        self.one_memory = one_memory
        self.prove = prove
        self.schedule = Schedule(every)
        self._trainer = trainer

        computes_in = torch.float32
        if args.bf16 or args.fp16 or args.tf32:  # TF32 rounds as float16 does
            computes_in = torch.bfloat16
        stored_in = next(trainer.model.parameters()).dtype
        self._dtypes = {computes_in, stored_in, getattr(torch, info.dtype)}
        if args.numerics == "bitwise":
            self.tolerance = EXACT
            self._rounds = False
        else:
            self.tolerance = Tolerance.of(info.device, *self._dtypes)
            self._rounds = info.device != "cpu" or rounds_to_16_bits(self._dtypes)
        self._first_tolerance = self.tolerance
        self._roundings = RoundingWarnings()
        self.limit = math.inf  # nats: of rounding, in the mean. Set by the first probe
        self.first: ProbeResult | None = None  # before training, or before a resumed one

        self.policy_version: int | None = None  # of the last probe
        self._runs = 0  # probes that were judged
        self._outliers = 0  # those of them that had outliers
        self._samples: Future | None = None  # of the probe that has begun

        # Tokens of the run's longest rollouts.
        positions = num_positions(base_model(trainer.model).config)
        longest = min(info.max_model_len, positions)
        if args.max_sequence_length:
            longest = min(longest, args.max_sequence_length)
        self._longest = int(longest)
        self._compared_longest = False
        # Has the longest prompt on which both sides agreed before training.
        self._long_plan: Plan | None = None
        length = min(info.block_size + TAIL, info.max_model_len - NUM_SAMPLED)
        self.prompt_ids = self._prompt(max(length, 1), seed=0)
        self._plan = self._short_plan()  # of the probe that has begun

    def begin(self, policy_version: int, long: bool = False) -> None:
        """Lets the servers sample from this version, after a `long` prompt near the run's longest
        rollouts if both sides agreed on one. Returns at once."""
        is_new = policy_version != self.policy_version
        self.policy_version = policy_version
        plan = self._short_plan()
        if long and self._long_plan is not None:
            plan = self._long_plan
        self._plan = plan

        def sample(client: ServerClient) -> Samples:
            self._check_version(client)
            if is_new:
                self._check_cache(client, plan.prompt_ids)
            return self._sample_from(client, plan)

        self._samples = self.servers.each_in_background(sample)

    @property
    def begun(self) -> bool:
        """True from `begin` to `judge`."""
        return self._samples is not None

    def forget(self) -> None:
        """Discards a pending probe and resets the schedule, because a new training starts."""
        self._samples = None
        self.schedule.publishes = 0
        self.schedule.probed = 0
        self.policy_version = None

    def judge(self) -> ProbeResult:
        """Compares what the servers have sampled since `begin`, on every rank. Raises `ProbeError`
        if a server is beyond the tolerance (with single tokens: twice in a row) or samples from
        another policy version."""
        samples = self._samples
        self._samples = None
        self._runs += 1
        outlier = None
        try:
            outlier, result = self._compare_twice(self._plan, samples.result)
            self._roundings.agreed()
        except torch.OutOfMemoryError:
            if self._plan is not self._long_plan:
                raise
            self._long_plan = None  # training has left no room for it
            self.begin(self.policy_version)
            return self.judge()
        except ProbeError as error:
            result = self._rounding_in(error)
        if outlier is not None:
            self._warn_of_outlier(outlier, result)
            result = ProbeResult(*map(max, outlier, result))
        if self.first is None:
            self._set_bounds(result)
        return result

    def run_longest(self) -> None:
        """Compares the run's longest rollout, or the longest that both sides can take within half
        of a server's deadline and the trainer's memory. Call it after a first probe; later calls do
        nothing. Warns if both sides differ, or raises if `max_sequence_length` asks for such
        lengths."""
        if self._compared_longest:
            return
        shortest = len(self.prompt_ids) + NUM_SAMPLED
        agreed, differs_from, problem = find_agreement(
            self._difference_at,
            shortest,
            self._longest,
            self.schedule.seconds,
            self.servers.timeout,
        )
        self._compared_longest = True
        if agreed > shortest:
            self._long_plan = self._plan_of_length(agreed)
        if torch.cuda.is_available():
            # no step may need as much, and the server is on the same device
            torch.cuda.empty_cache()
        if differs_from is None:
            return
        message = (
            f"Server and trainer agree on sequences of up to {agreed} tokens, but not from "
            f"{differs_from} tokens on (at most {self._longest} may come): {problem} vLLM and "
            "Transformers compute longer sequences of this model differently, mostly because of a "
            f"window or a rotary embedding. Set `max_sequence_length: {agreed}`, to drop longer "
            f"rollouts, and start the server with `--max-model-len {agreed}`, to end them there."
        )
        if self._trainer.args.max_sequence_length is not None:
            raise ProbeError(message)
        logger.warning("%s", message)

    def _difference_at(self, length: int) -> str | None:
        """Returns how server and trainer differ at the end of `length` tokens, or `None` within the
        tolerance."""
        plan = self._plan_of_length(length)
        try:
            self._compare_twice(plan, partial(self._sample, plan))
        except ProbeError as error:
            return error.seen
        except ServerError as error:
            self.servers.each(lambda client: client.info())  # raises if a server is gone
            return f"{error}."
        return None

    def _short_plan(self) -> Plan:
        return Plan(self.prompt_ids, NUM_SAMPLED, NUM_SAMPLES, self.tolerance)

    def _plan_of_length(self, length: int) -> Plan:
        prompt_ids = self._prompt(length - LONG_SAMPLED, seed=1)
        return Plan(prompt_ids, LONG_SAMPLED, 1, self._first_tolerance)

    def _prompt(self, length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.servers.info.vocab_size, (length,), generator=generator).tolist()

    # ------------------------------------------------------------------------- sampling and scoring

    def _check_version(self, client: ServerClient) -> None:
        version = client.info().policy_version
        if version != self.policy_version:
            raise ProbeError(
                f"The server at {client.url} samples from policy version {version} but the trainer "
                f"published {self.policy_version}: a publish was lost, or another trainer writes "
                "to this server."
            )

    def _check_cache(self, client: ServerClient, prompt_ids: list[int]) -> None:
        """Raises `ProbeError` if anything that an earlier version has computed for this prompt is
        used again."""
        cached = client.cached_tokens(prompt_ids)
        if cached > 0:
            raise ProbeError(
                f"After publishing policy version {self.policy_version}, the server at "
                f"{client.url} took {cached} tokens of a prompt from its cache, which weights of "
                "another version have computed: its rollouts are of no policy. Start it by "
                "`trl-atropos serve`, without other tools that publish to it."
            )

    def _sample(self, plan: Plan) -> list[Samples]:
        """Returns what all servers of this rank sample now."""
        return self.servers.each_here(lambda client: self._sample_from(client, plan))

    def _sample_from(self, client: ServerClient, plan: Plan) -> Samples:
        temperature = self._trainer.args.temperature
        return client.sample(plan.prompt_ids, plan.num_tokens, temperature, plan.num_samples)

    @torch.no_grad()
    def _score(self, prompt_ids: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """
        Returns log-probabilities of `tokens`, (num_samples, num_tokens), after the prompt, in
        float64 on the CPU.

        Every other probe, from the first on, scores as the trainer does when it trains: all samples
        in one row if it packs rollouts. The others score by TRL's forward pass of each sample.
        """
        model = self._trainer.model
        num_tokens = tokens.shape[1]
        prompts = torch.tensor(prompt_ids).expand(len(tokens), -1)
        ids = torch.cat([prompts, tokens], dim=1).to(next(model.parameters()).device)
        scorer = GRPOTrainer
        if self._runs % 2 == 1:
            scorer = type(self._trainer)
        score = scorer._get_per_token_logps_and_entropies
        training = model.training
        model.eval()  # dropout would differ from the server
        try:
            # Compiled layers would be compiled anew for a batch of this shape.
            with torch.compiler.set_stance("force_eager"):
                logprobs, _, _ = score(self._trainer, model, ids, torch.ones_like(ids), num_tokens)
        finally:
            model.train(training)
        return logprobs.double().cpu()

    # ----------------------------------------------------------------------------------- comparison

    def _compare_twice(
        self, plan: Plan, sample: Callable[[], list[Samples]]
    ) -> tuple[ProbeResult | None, ProbeResult]:
        """Compares what `sample` returns, and new samples after an outlier. Returns (the outlier if
        there was one, the last result)."""
        try:
            return None, self._compare(plan, sample)
        except Outlier as outlier:  # raised on every rank if on any
            return outlier.result, self._compare(plan, partial(self._sample, plan))

    def _compare(self, plan: Plan, sample: Callable[[], list[Samples]]) -> ProbeResult:
        """Returns the largest differences between the trainer and what each server of this rank has
        sampled. Raises `ProbeError`."""
        samples = together(sample)
        if not self.servers.one_per_rank:
            samples = _of_main(samples)
        all_ids = []
        all_logprobs = []
        for server_samples in samples:
            ids, logprobs = zip(*server_samples, strict=True)
            all_ids.append(ids)
            all_logprobs.append(logprobs)
        # These and `scored` have the shape (num_servers, num_samples, num_tokens).
        tokens = torch.tensor(all_ids)
        sampled = torch.tensor(all_logprobs, dtype=torch.float64)
        scored = together(lambda: self._score(plan.prompt_ids, tokens.flatten(0, 1)))
        scored = scored.view_as(sampled)
        return together(lambda: self._check(tokens, sampled, scored, plan.tolerance))

    def _check(
        self,
        tokens: torch.Tensor,
        sampled: torch.Tensor,
        scored: torch.Tensor,
        tolerance: Tolerance,
    ) -> ProbeResult:
        result = ProbeResult.of(sampled, scored)
        if tolerance.admits(result):
            return result
        seen = tolerance.describe_breach(result, tokens, sampled, scored)
        is_outlier = result.mean_abs_diff <= tolerance.mean_abs
        kind = ProbeError
        if is_outlier:
            kind = Outlier
        error = kind(
            f"After publishing policy version {self.policy_version}, the server and the trainer "
            f"disagree: {seen} {self._explain(scored)}"
        )
        error.result = result
        error.seen = seen
        raise error

    def _explain(self, scored: torch.Tensor) -> str:
        """Returns what it means that both sides differ."""
        if scored.isnan().any():
            return (
                "The trainer's own model computes NaN: its weights are not finite (a diverged run: "
                "lower `learning_rate`, resume from a checkpoint before it), or its dtype "
                "overflows (`dtype: float32`)."
            )
        if self.first is not None:
            return (
                "The server does not sample from the weights that are trained: do not trust "
                "rollouts since the last good probe."
            )
        if self.one_memory:
            reason = (
                "both compute from one memory, so the weights are equal bit for bit: it is vLLM "
                "and Transformers that"
            )
        else:
            reason = (
                "either the server has other weights than the trainer (with an adapter, of the "
                "base model: start both on the same one), or vLLM and Transformers"
            )
        return f"No step was taken yet: {reason} compute this model differently. {CURES}"

    # ------------------------------------------------------------------------------------- rounding

    def _set_bounds(self, first: ProbeResult) -> None:
        """Takes the bounds of later probes from the first one, which shows the model's own
        rounding."""
        self.first = first
        self.tolerance = self.tolerance.after(first)
        if self._rounds:
            self.limit = rounding_limit(self._dtypes, _worst(first).mean_abs_diff)
            logger.info(
                "In the first probe, server and trainer differ by %.2e nats (mean %.2e). The run "
                "stops if they ever differ by more than %.2g in the mean, even with equal weights: "
                "so much is no rounding.",
                first.max_abs_diff,
                first.mean_abs_diff,
                self.limit,
            )

    def _rounding_in(self, error: ProbeError) -> ProbeResult:
        """Returns the result in `error` if that is rounding. Raises it otherwise, or
        `FingerprintError` if the weights differ."""
        result = error.result
        may_round = self._rounds and self.first is not None
        is_measured = result is not None and math.isfinite(result.mean_abs_diff)
        if not (may_round and is_measured and self.prove()):
            raise error
        # one token may be nats apart, but hardly in two samples
        if result.mean_abs_diff > self.limit:
            plan = self._plan._replace(tolerance=NO_TOLERANCE)
            again = _worst(self._compare(plan, partial(self._sample, plan)))
            if not again.mean_abs_diff <= self.limit:  # true for NaN
                raise self._no_rounding(result, again) from error
            result = again
        self._warn_of_rounding(result)
        return result

    def _no_rounding(self, result: ProbeResult, again: ProbeResult) -> ProbeError:
        error = ProbeError(
            f"After publishing policy version {self.policy_version}, server and trainer have the "
            "same weights bit for bit, but compute log-probabilities that differ by "
            f"{result.mean_abs_diff:.2e} nats in the mean, and by {again.mean_abs_diff:.2e} in a "
            f"second sample; in the first probe by {self.first.mean_abs_diff:.2e}. More than "
            f"{self.limit:.2g} is no rounding: the server computes another model from these "
            "weights (another scale, table or kernel). Do not trust rollouts since the last good "
            "probe: start the server again, and resume from a checkpoint before it."
        )
        error.result = again
        return error

    def _warn_of_rounding(self, result: ProbeResult) -> None:
        """Warns of a difference between equal weights."""
        if self._roundings.is_new(result.mean_abs_diff):
            logger.warning(
                "Server and trainer have the same weights bit for bit, but compute "
                "log-probabilities that differ by %.2e nats (mean %.2e) in the probe of policy "
                "version %d; in the first probe by %.2e (mean %.2e). Rounding in 16 bits grows "
                "with the logits, as a policy becomes sure of itself. The loss corrects for it; a "
                "lower `learning_rate` slows it down. From a mean of %.2g on, the run stops.",
                result.max_abs_diff,
                result.mean_abs_diff,
                self.policy_version,
                self.first.max_abs_diff,
                self.first.mean_abs_diff,
                self.limit,
            )

    def _warn_of_outlier(self, outlier: ProbeResult, again: ProbeResult) -> None:
        """Warns of single tokens beyond the tolerance: of the first, and when there are twice as
        many."""
        self._outliers += 1
        if self._outliers.bit_count() > 1:
            return
        logger.warning(
            "A token of the probe of policy version %d differed by %.2e nats between server and "
            "trainer (mean of all %.2e, allowed %.0e and %.0e), but none when the server sampled "
            "again (at most %.2e): so in %d of %d probes. One in thousands may, where rounding "
            "errors are multiplied; if there are more, vLLM and Transformers compute this model "
            "differently, or, if they began in mid-run, the policy has grown ill-conditioned "
            f"(lower `learning_rate`). {CURES}",
            self.policy_version,
            outlier.max_abs_diff,
            outlier.mean_abs_diff,
            self.tolerance.max_abs,
            self.tolerance.mean_abs,
            again.max_abs_diff,
            self._outliers,
            self._runs,
        )


def _worst(result: ProbeResult) -> ProbeResult:
    """Returns the largest differences of all ranks, whose servers may be different ones."""
    results = gather_object([result])
    return ProbeResult(*(max(values) for values in zip(*results, strict=True)))


def _of_main(value: Any) -> Any:
    """Returns rank 0's value on every rank."""
    return on_main(lambda: value)
