"""The probe: do server and trainer compute the same? Real samples show it after a publish.

The server *samples* a continuation of a fixed prompt and the trainer scores the same tokens.
Scoring on the server (`prompt_logprobs`) would not do: vLLM bypasses the prefix cache for it, so
that stale keys and values, which earlier weights have computed, would go unseen. The prompt is
longer than one KV block, so that the block of the last probe is in the cache.

Lost weights and stale caches show on most tokens. Rounding does not: where a residual stream nearly
cancels before it is normalised, one token in many thousands differs a thousand times more than the
others, an *outlier*. So if single tokens alone are beyond the tolerance, the server samples once
more, and only a second breach counts.

Before the first step, a difference is one of how vLLM and Transformers compute the model. It may
begin at some length only, so the run's longest rollouts are compared (`Probe.run_longest`), and
again by every eighth probe.

All differences are in nats: natural logarithms of probabilities.
"""

import logging
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedConfig, PreTrainedModel
from trl import GRPOTrainer

from trl_atropos.distributed import on_main, together
from trl_atropos.errors import ProbeError, ServerError
from trl_atropos.server_client import ServerClient, Servers
from trl_atropos.weights.gather import base_model

logger = logging.getLogger(__name__)

NUM_SAMPLED = 8  # tokens per sample
NUM_SAMPLES = 4  # per probe, at the same time
TAIL = 16  # prompt tokens after the first full KV block
# tokens that continue a long prompt, once: four samples of it would take four times the memory
LONG_SAMPLED = 16
LENGTH_STEP = 32  # tokens to within which the length is found from which on both sides differ
# Of a run's time on a GPU that probes may take, and publishes between two, where the configuration
# does not say.
MAX_SHARE = 0.02
LEAST_APART = 4
LONG_EVERY = 8  # of so many probes, one is near the run's longest rollouts
# in names of modules' attributes and of a config's fields
DROPOUT = re.compile("dropout|pdrop|layerdrop")
JITTER = re.compile("jitter")  # in names of routers' attributes
NO_NOISE = re.compile("classifier|summary")  # of heads that a language model does not have

CURES = (
    "What has helped: the same dtype on both sides, `attn_implementation: eager`, a server's "
    "`--max-model-len` within `original_max_position_embeddings` (longrope), other versions of "
    "vLLM or Transformers. `probe_every_n_steps: 0` trains all the same, with importance ratios "
    "that are off by as much."
)


class ProbeResult(NamedTuple):
    """Differences between server and trainer, in nats."""

    max_abs_diff: float
    mean_abs_diff: float
    p99_abs_diff: float = 0.0  # of all servers and tokens


class Tolerance(NamedTuple):
    """Bounds on |server - trainer| in nats: on any token, and in the mean."""

    max_abs: float
    mean_abs: float

    @classmethod
    def of(cls, device: str, *dtypes: torch.dtype) -> "Tolerance":
        """What a server on `device` ("cpu" or "cuda") and a trainer may differ by if these dtypes
        are involved."""
        if set(dtypes) <= {torch.float32, torch.float64}:
            # On a GPU, vLLM's attention kernels multiply float32 in TF32 (2e-3 was seen).
            return (
                cls(max_abs=1e-4, mean_abs=1e-4)
                if device == "cpu"
                else cls(max_abs=2e-2, mean_abs=2e-3)
            )
        # Other kernels round otherwise, in every layer. On a GPU, with random weights of Qwen3's
        # shapes and 12 nats per token: 0.07 and 0.02 at 0.6B, 0.23 and 0.06 at 8B.
        return (
            cls(max_abs=0.2, mean_abs=3e-2) if device == "cpu" else cls(max_abs=0.6, mean_abs=0.15)
        )

    def after(self, first: ProbeResult) -> "Tolerance":
        """The bounds for the probes after the first: three times what that has shown of the model's
        own rounding."""
        # Rounding in 16 bits grows with the logits, which grow as a policy becomes sure of itself:
        # hence the floors.
        return Tolerance(
            max_abs=min(self.max_abs, max(0.2, 3 * first.max_abs_diff)),
            mean_abs=min(self.mean_abs, max(3e-2, 3 * first.mean_abs_diff)),
        )


def rounding_limit(dtypes: set[torch.dtype], first_mean: float) -> float:
    """
    Returns by how many nats in the mean equal weights may make server and trainer differ after the
    first probe, whose mean was `first_mean`. Beyond it is no rounding.

    Rounding is a share of the logits, so it grows as a policy becomes sure of itself, from a spread
    of a few nats to tens: by a factor of 2.5 in 120 steps of the quickstart on a GPU, to 0.013 nats
    in 150 steps of the arithmetic recipe. Ten times the first probe, and 0.1 nats in any case, is
    beyond what was seen. It cannot grow for ever: where a token is certain, its log-probability
    hardly depends on the logits. From 0.3 nats on, a ratio of probabilities is off by a third on
    the usual token, so that such rollouts are of no use even if it were rounding.

    The mean decides and not the largest difference: of a sound model, one token in thousands may
    differ by nats, where a sum that nearly cancels is normalised, while other weights, scales or
    positions move nearly all tokens.
    """
    rounds_in_16_bits = not dtypes <= {torch.float32, torch.float64}
    # In TF32, 2e-3 is what the first probe may differ by.
    least, most = (0.1, 0.3) if rounds_in_16_bits else (5e-3, 2e-2)
    return min(most, max(least, 10 * first_mean))


class RoundingWarnings:
    """Decides which differences between equal weights the log mentions: one after a probe within
    the tolerance, and one that is twice or half of the last that was mentioned. A large one must
    not hide smaller ones for ever."""

    def __init__(self):
        # mean difference that was mentioned, unless a probe has agreed since
        self._last: float | None = None

    def agreed(self) -> None:
        self._last = None

    def is_new(self, mean: float) -> bool:
        new = self._last is None or not self._last / 2 <= mean <= 2 * self._last
        if new:
            self._last = mean
        return new


class Plan(NamedTuple):
    """What one probe samples, and by how much it may differ."""

    prompt_ids: list[int]
    num_tokens: int
    num_samples: int
    tolerance: Tolerance


def _worst(result: ProbeResult) -> ProbeResult:
    """The largest differences of all ranks, whose servers may be different ones."""
    results = gather_object([result])
    return ProbeResult(*(max(values) for values in zip(*results, strict=True)))


NO_TOLERANCE = Tolerance(math.inf, math.inf)  # what allows any difference


class Outlier(ProbeError):
    """Single tokens are beyond the tolerance, and the mean is not."""


@dataclass
class Schedule:
    """After which publishes the probe runs: the first, the last, and some between them."""

    every: int | None  # publishes; 0: no probe at all; None: as `MAX_SHARE` allows
    publishes: int = 0
    probed: int = 0  # of these, the last that was probed
    probes: int = 0
    seconds: float = 0.0  # of the trainer's time that its probe took
    ended: float = -math.inf  # when it ended, in seconds

    def due(self, now: float, last: bool) -> bool:
        """Whether the publish that ended at `now` is to be probed. Counts it."""
        self.publishes += 1
        if self.every == 0 or last or self.publishes == 1:
            return self.every != 0
        if self.every is None:
            rested = now - self.ended >= self.seconds / MAX_SHARE
            return rested and self.publishes - self.probed >= LEAST_APART
        return (self.publishes - 1) % self.every == 0

    def ran(self, seconds: float, ended: float) -> None:
        """The probe that was due has taken some seconds of the trainer's time."""
        self.probed = self.publishes
        self.seconds = seconds
        self.ended = ended
        self.probes += 1

    @property
    def long(self) -> bool:
        """Whether a probe that is due now is one of a long prompt. What that takes, the next one
        waits for."""
        return self.probes % LONG_EVERY == LONG_EVERY - 1


def num_positions(config: PreTrainedConfig) -> float:
    """Most tokens that a model has positions for."""
    text = config.get_text_config()
    # ALiBi's and state-space models have none
    positions = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}  # nor has every model a rotary embedding
    return math.inf if positions is None else positions * max(1.0, rope.get("factor") or 1.0)


class Probe:
    """`one_memory`: server and trainer compute from the same memory, so that weights cannot differ
    at the start. `prove` compares the weights anew, wherever the servers keep them now, and returns
    on every rank alike whether all of them are equal bit for bit: then a difference on a GPU or in
    16 bits is rounding up to `rounding_limit`, and the log warns of it while the run goes on."""

    def __init__(
        self,
        servers: Servers,
        trainer: Any,
        every: int | None,
        one_memory: bool,
        prove: Callable[[], bool] = lambda: False,
    ):
        info = servers.info
        model = base_model(trainer.model)
        args = trainer.args
        self.servers = servers
        self.one_memory = one_memory
        self.prove = prove
        self.schedule = Schedule(every)
        compute = torch.bfloat16 if args.bf16 or args.fp16 else torch.float32
        dtypes = (compute, getattr(torch, info.dtype), next(trainer.model.parameters()).dtype)
        exact = args.numerics == "bitwise"
        self.tolerance = self._first_tolerance = (
            Tolerance(0.0, 0.0) if exact else Tolerance.of(info.device, *dtypes)
        )
        self._trainer = trainer
        limits = (
            args.max_sequence_length or math.inf,
            info.max_model_len,
            num_positions(model.config),
        )
        self._longest = int(min(limits))
        self._rounds = not exact and (
            info.device != "cpu" or not set(dtypes) <= {torch.float32, torch.float64}
        )
        self._dtypes = set(dtypes)
        self._roundings = RoundingWarnings()
        self.limit = math.inf  # nats: of rounding, in the mean. Set by the first probe
        self.first: ProbeResult | None = None  # before training, or of what it resumes from
        self.policy_version: int | None = None  # that was probed last
        self._runs = self._outliers = 0  # probes, and probes with outliers
        self._compared_longest = False
        # of the longest prompt on which both sides agreed before training
        self._long_plan: Plan | None = None
        self._samples: Future | None = None  # of the probe that has begun
        length = min(info.block_size + TAIL, info.max_model_len - NUM_SAMPLED)
        self.prompt_ids = self._prompt(max(length, 1), seed=0)
        self._plan = self._short_plan()  # of the probe that has begun

    def _prompt(self, length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.servers.info.vocab_size, (length,), generator=generator).tolist()

    def begin(self, policy_version: int, long: bool = False) -> None:
        """Lets the servers sample from this version, after a `long` prompt near the run's longest
        rollouts if both sides agreed on one. Returns at once."""
        is_new = policy_version != self.policy_version
        self.policy_version = policy_version
        self._plan = plan = (
            self._long_plan if long and self._long_plan is not None else self._short_plan()
        )

        def sample(client: ServerClient) -> list[tuple[list[int], list[float]]]:
            self._check_version(client)
            if is_new:
                self._check_cache(client, plan.prompt_ids)
            return self._sample(client, plan.prompt_ids, plan.num_tokens, plan.num_samples)

        self._samples = self.servers.each_in_background(sample)

    def _short_plan(self) -> "Plan":
        return Plan(self.prompt_ids, NUM_SAMPLED, NUM_SAMPLES, self.tolerance)

    @property
    def begun(self) -> bool:
        return self._samples is not None

    def forget(self) -> None:
        """Of a probe that has begun, and of when probes were due: another training begins."""
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
        plan = self._plan
        sizes = plan.num_samples, plan.num_tokens
        try:
            outlier, result = self._compare_twice(
                plan.prompt_ids, plan.tolerance, *sizes, samples=samples.result
            )
            self._roundings.agreed()
        except torch.OutOfMemoryError:
            if plan is not self._long_plan:
                raise
            self._long_plan = None  # since training began, there is no room for one
            self.begin(self.policy_version)
            return self.judge()
        except ProbeError as error:
            outlier = None
            result = self._rounding_in(error)
        if outlier is not None:
            self._warn_of_outlier(outlier, result)
            result = ProbeResult(*map(max, outlier, result))
        if self.first is None:
            self._set_bounds(result)
        return result

    def _set_bounds(self, first: ProbeResult) -> None:
        """From the first probe, which shows the model's own rounding."""
        self.first = first
        self.tolerance = self.tolerance.after(first)
        if self._rounds:
            self.limit = rounding_limit(self._dtypes, _worst(first).mean_abs_diff)
            logger.info(
                "In the first probe, server and trainer differ by %.2e nats (mean %.2e). The run "
                "stops if they ever differ by more than %.2g in the mean, even with equal weights: "
                "so much is no rounding.",
                *(*first[:2], self.limit),
            )

    def _rounding_in(self, error: ProbeError) -> ProbeResult:
        """What `error` says, if that is rounding. Raises it otherwise, or `FingerprintError` if the
        weights differ."""
        first = self.first
        result = error.result
        known = first is not None and result is not None and math.isfinite(result.mean_abs_diff)
        if not (known and self._rounds and self.prove()):
            raise error
        # one token may be nats apart, but hardly in two samples
        if result.mean_abs_diff > self.limit:
            plan = self._plan
            sample = self._sampler(plan.prompt_ids, plan.num_tokens, plan.num_samples)
            again = _worst(self._compare(plan.prompt_ids, NO_TOLERANCE, sample))
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

    def _check_version(self, client: ServerClient) -> None:
        version = client.info().policy_version
        if version != self.policy_version:
            raise ProbeError(
                f"The server at {client.url} samples from policy version {version} but the trainer "
                f"published {self.policy_version}: a publish was lost, or another trainer writes "
                "to this server."
            )

    def _check_cache(self, client: ServerClient, prompt_ids: list[int]) -> None:
        """An earlier version has computed the same prompt: nothing of that may be used again."""
        if (cached := client.cached_tokens(prompt_ids)) > 0:
            raise ProbeError(
                f"After publishing policy version {self.policy_version}, the server at "
                f"{client.url} took {cached} tokens of a prompt from its cache, which weights of "
                "another version have computed: its rollouts are of no policy. Start it by "
                "`trl-atropos serve`, without other tools that publish to it."
            )

    def _warn_of_rounding(self, result: ProbeResult) -> None:
        """Warns of a difference between equal weights."""
        if self._roundings.is_new(result.mean_abs_diff):
            logger.warning(
                "Server and trainer have the same weights bit for bit, but compute "
                "log-probabilities that differ by %.2e nats (mean %.2e) in the probe of policy "
                "version %d; in the first probe by %.2e (mean %.2e). Rounding in 16 bits grows "
                "with the logits, as a policy becomes sure of itself. The loss corrects for it; a "
                "lower `learning_rate` slows it down. From a mean of %.2g on, the run stops.",
                *(*result[:2], self.policy_version, *self.first[:2], self.limit),
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
            *(
                self.policy_version,
                *outlier[:2],
                *self.tolerance,
                again.max_abs_diff,
                self._outliers,
                self._runs,
            ),
        )

    def run_longest(self) -> None:
        """Once, after a first probe: compares the run's longest rollout, or what both sides can
        take within half of a server's deadline and the trainer's memory. Warns, or raises where
        `max_sequence_length` asks for such lengths.
        """
        agreed = len(self.prompt_ids) + NUM_SAMPLED
        differs = None
        problem = None
        seconds = on_main(lambda: self.schedule.seconds)  # all ranks must compare the same lengths
        while (
            not self._compared_longest
            and (length := self._next_length(agreed, differs, seconds)) is not None
        ):
            began = time.perf_counter()
            try:
                found = self._problem_at(length)
            # training on such a rollout would fail, too, if one came
            except torch.OutOfMemoryError:
                break
            seconds = on_main(lambda began=began: time.perf_counter() - began)
            if found is None:
                agreed = length
            else:
                differs = length
                problem = found
        self._compared_longest = True
        if agreed > len(self.prompt_ids) + NUM_SAMPLED:
            prompt_ids = self._prompt(agreed - LONG_SAMPLED, seed=1)
            self._long_plan = Plan(prompt_ids, LONG_SAMPLED, 1, self._first_tolerance)
        if torch.cuda.is_available():
            # no step may need as much, and the server is on the same device
            torch.cuda.empty_cache()
        if problem is None:
            return
        message = (
            f"Server and trainer agree on sequences of up to {agreed} tokens, but not from "
            f"{differs} tokens on (at most {self._longest} may come): {problem} vLLM and "
            "Transformers compute longer sequences of this model differently, mostly because of a "
            f"window or a rotary embedding. Set `max_sequence_length: {agreed}`, to drop longer "
            f"rollouts, and start the server with `--max-model-len {agreed}`, to end them there."
        )
        if self._trainer.args.max_sequence_length is not None:
            raise ProbeError(message)
        logger.warning("%s", message)

    def _next_length(self, agreed: int, differs: int | None, seconds: float) -> int | None:
        """The length to compare after one that took some seconds: longer until both sides differ,
        then in between."""
        if differs is not None:
            return (agreed + differs) // 2 if differs - agreed > LENGTH_STEP else None
        # A rollout twice as long takes at most four times as long.
        length = min(self._longest, int(agreed * math.sqrt(self.servers.timeout / 2 / seconds)))
        return (
            length if agreed < self._longest and length >= min(self._longest, 2 * agreed) else None
        )

    def _problem_at(self, length: int) -> str | None:
        """By how much server and trainer differ at the end of `length` tokens, if that is beyond
        the tolerance."""
        prompt_ids = self._prompt(length - LONG_SAMPLED, seed=1)
        try:
            self._compare_twice(prompt_ids, self._first_tolerance, 1, LONG_SAMPLED)
        except ProbeError as error:
            return error.seen
        except ServerError as error:
            self.servers.each(lambda client: client.info())  # raises if a server is gone
            return f"{error}."
        return None

    def _compare_twice(
        self,
        prompt_ids: list[int],
        tolerance: Tolerance,
        num_samples: int = NUM_SAMPLES,
        num_tokens: int = NUM_SAMPLED,
        samples: Callable[[], list] | None = None,
    ) -> tuple[ProbeResult | None, ProbeResult]:
        """Compares `samples`, or new ones, and once more after an outlier. Returns (the outlier if
        there was one, the last result)."""

        sample = self._sampler(prompt_ids, num_tokens, num_samples)
        try:
            return None, self._compare(prompt_ids, tolerance, samples or sample)
        except Outlier as outlier:  # on every rank, where it is raised on any
            return outlier.result, self._compare(prompt_ids, tolerance, sample)

    def _sampler(
        self, prompt_ids: list[int], num_tokens: int = NUM_SAMPLED, num_samples: int = NUM_SAMPLES
    ) -> Callable[[], list]:
        """A call that has all servers of this rank sample."""
        return lambda: self.servers.each_here(
            lambda client: self._sample(client, prompt_ids, num_tokens, num_samples)
        )

    def _sample(
        self,
        client: ServerClient,
        prompt_ids: list[int],
        num_tokens: int = NUM_SAMPLED,
        num_samples: int = NUM_SAMPLES,
    ) -> list[tuple[list[int], list[float]]]:
        return client.sample(prompt_ids, num_tokens, self._trainer.args.temperature, num_samples)

    def _compare(
        self, prompt_ids: list[int], tolerance: Tolerance, sample: Callable[[], list]
    ) -> ProbeResult:
        """The largest differences to the trainer of what each server of this rank has sampled.
        Raises `ProbeError`."""
        samples = together(sample)
        if not self.servers.one_per_rank:
            samples = on_main(lambda: samples)
        # These and `scored` have the shape (num_servers, num_samples, num_tokens).
        tokens = torch.tensor([[ids for ids, _ in of_server] for of_server in samples])
        sampled = torch.tensor(
            [[logprobs for _, logprobs in of_server] for of_server in samples], dtype=torch.float64
        )
        scored = together(lambda: self._score(prompt_ids, tokens.flatten(0, 1))).view_as(sampled)
        return together(lambda: self._check(tokens, sampled, scored, tolerance))

    def _check(
        self,
        tokens: torch.Tensor,
        sampled: torch.Tensor,
        scored: torch.Tensor,
        tolerance: Tolerance,
    ) -> ProbeResult:
        differences = (sampled - scored).abs()
        largest = differences.max().item()
        mean = differences.mean((1, 2)).max().item()
        result = ProbeResult(largest, mean, differences.flatten().quantile(0.99).item())
        if largest <= tolerance.max_abs and mean <= tolerance.mean_abs:  # false for NaN
            return result
        worst = int(differences.nan_to_num(nan=math.inf).argmax())
        seen = (
            f"token {tokens.flatten()[worst]} has log-probability {sampled.flatten()[worst]:.6f} "
            f"on the server and {scored.flatten()[worst]:.6f} in the trainer (max difference "
            f"{largest:.2e}, mean {mean:.2e}, allowed {tolerance.max_abs:.0e} and "
            f"{tolerance.mean_abs:.0e})."
        )
        error = (Outlier if mean <= tolerance.mean_abs else ProbeError)(
            f"After publishing policy version {self.policy_version}, the server and the trainer "
            f"disagree: {seen} {self._meaning(scored)}"
        )
        error.result = result
        error.seen = seen
        raise error

    def _meaning(self, scored: torch.Tensor) -> str:
        """What it means that both sides differ."""
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
        reason = (
            "both compute from one memory, so the weights are equal bit for bit: it is vLLM and "
            "Transformers that"
            if self.one_memory
            else "either the server has other weights than the trainer (with an adapter, of the "
            "base model: start both on the same one), or vLLM and Transformers"
        )
        return f"No step was taken yet: {reason} compute this model differently. {CURES}"

    @torch.no_grad()
    def _score(self, prompt_ids: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """
        Log-probabilities of `tokens`, (num_samples, num_tokens), after the prompt, in float64 on
        the CPU.

        Every other probe, from the first on, has them scored by the trainer's own way of training,
        all samples in one row if it packs rollouts. The others are scored by TRL's forward pass of
        each sample.
        """
        model = self._trainer.model
        num_tokens = tokens.shape[1]
        prompts = torch.tensor(prompt_ids).expand(len(tokens), -1)
        ids = torch.cat([prompts, tokens], dim=1).to(next(model.parameters()).device)
        training = model.training
        model.eval()  # dropout would differ from the server
        try:
            # Compiled layers would be compiled anew for a batch of this shape.
            with torch.compiler.set_stance("force_eager"):
                scorer = type(self._trainer) if self._runs % 2 == 1 else GRPOTrainer
                score = scorer._get_per_token_logps_and_entropies
                logprobs, _, _ = score(self._trainer, model, ids, torch.ones_like(ids), num_tokens)
        finally:
            model.train(training)
        return logprobs.double().cpu()


# --------------------------------------------------- a model that computes what the server computes


def drops_soft_cap(config: PreTrainedConfig, implementation: str) -> bool:
    """Whether the model caps its attention scores (Gemma 2) and torch's own attention, which
    cannot, would be used."""
    # few families have it
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return capped is not None and "sdpa" in implementation


def keep_soft_cap(model: PreTrainedModel) -> None:
    """Lets a model whose attention scores are capped compute the cap, which transformers' default
    leaves out."""
    implementation = model.config._attn_implementation
    if drops_soft_cap(model.config, implementation):
        logger.warning(
            "The trainer computes with `attn_implementation: eager`: %s caps its attention scores, "
            "which `%s` cannot. On a GPU, `flash_attention_2` has the cap, too, and takes less "
            "memory.",
            *(type(model).__name__, implementation),
        )
        model.set_attn_implementation("eager")


class Noise(NamedTuple):
    """What makes a model random in training, under one name such as `attention_dropout`."""

    value: float  # the last one that was found
    places: list[tuple[Any, str, float]]  # object, attribute, and its value before it became 0

    def off(self) -> None:
        for place, attribute, _ in self.places:
            setattr(place, attribute, 0.0)

    def restore(self) -> None:
        for place, attribute, value in self.places:
            setattr(place, attribute, value)


def silence(model: torch.nn.Module) -> dict[str, Noise]:
    """Sets all dropout, of the model and of its adapters, to 0, and keeps noisy routers out of
    training mode: the server samples without noise. Returns what was found, by name."""
    found: dict[str, Noise] = {}

    def note(name: str, value: float) -> list[tuple[Any, str, float]]:
        places = found[name].places if name in found else []
        found[name] = Noise(value, places)
        return places

    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p:
            # an adapter's has its name at the end
            name = path.removesuffix(".default").rpartition(".")[2]
            note(name, module.p).append((module, "p", module.p))
        for name, value in _numbers(module, JITTER):
            # A value of 0 would be wrong: to PhiMoE's routers, it is a threshold in evaluation
            # mode, too.
            note(name, value)
            keep_evaluating(module)
    config = model.config
    text_config = config.get_text_config()
    # some forwards read them
    configs = [config] if text_config is config else [config, text_config]
    for place in [*model.modules(), *configs]:
        for name, value in _numbers(place, DROPOUT):
            note(name, value).append((place, name, value))
    for noise in found.values():
        noise.off()
    return found


def _numbers(place: Any, pattern: re.Pattern) -> list[tuple[str, float]]:
    """Attributes of a module or a configuration whose names match, and whose values are numbers but
    not 0."""
    named = [
        (name, value) for name, value in vars(place).items() if isinstance(value, float) and value
    ]
    return [
        (name, value) for name, value in named if pattern.search(name) and not NO_NOISE.search(name)
    ]


def keep_evaluating(module: torch.nn.Module) -> None:
    """Keeps a module, but not its children, in evaluation mode, whatever mode the model is set
    to."""
    module.training = False
    module.train = partial(_train_children, module)


def _train_children(module: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
    for child in module.children():
        child.train(mode)
    return module


def prepare_model(model: torch.nn.Module, *, warn: bool = True) -> dict[str, Noise]:
    """Sets up a model, with its adapter, for training on what the server samples. Returns what it
    silenced."""
    name_backbone(base_model(model))
    found = silence(model)
    if found and warn:
        logger.warning(
            "Dropout and noise are off for training (%s), because the server samples without.",
            ", ".join(f"{name} {noise.value:g}" for name, noise in found.items()),
        )
    return found


def name_backbone(policy: PreTrainedModel) -> None:
    """Corrects a class that names a backbone which it does not have (Llama 4): TRL scores from its
    hidden states."""
    if policy.base_model is policy:
        policy.base_model_prefix = "model"


def restore_what_changes(
    found: dict[str, Noise], score: Callable[[], torch.Tensor], warn: bool = True
) -> None:
    """
    Restores, with a warning, those of the silenced attributes that change what a model computes in
    evaluation mode.

    Args:
        found: from `silence`.
        score: computes a tensor in evaluation mode, such as logits. Every rank calls it as often,
            because the forward pass of a sharded model is one of all ranks.
    """
    silenced = {name: noise for name, noise in found.items() if noise.places}
    if not silenced:
        return
    for noise in silenced.values():
        noise.restore()
    loaded = score()
    # Not always 0 on GPUs, where kernels are tuned in the first pass, and some add up in any order.
    between_passes = (score() - loaded).abs().max()
    for name, noise in silenced.items():
        noise.off()
        difference = (score() - loaded).abs().max()
        if on_main(lambda difference=difference: bool(difference > between_passes)):
            noise.restore()
            if warn:
                logger.warning(
                    "`%s` stays at %g: with 0, the model would compute something else where it is "
                    "sampled from, too (logits that differ by up to %.2g).",
                    *(name, noise.value, difference.item()),
                )
