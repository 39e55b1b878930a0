"""The probe: do server and trainer compute the same? Real samples show it after a publish.

The server *samples* a continuation of a fixed prompt and the trainer scores the same tokens. Scoring on the server
(`prompt_logprobs`) would not do: vLLM bypasses the prefix cache for it, and stale keys and values would go unseen. The
prompt is longer than one KV block, so that the block of the last probe is in the cache: if it outlived the change of
the weights, the log-probabilities differ. Torn, lost or detached weights differ by themselves.

Those faults persist, and show on most tokens. Rounding does not: where a residual stream nearly cancels before it is
normalised, one token in many thousands differs a thousand times more than the others. So if single tokens alone are
beyond the tolerance, the server samples once more, and only a second breach counts.

Before the first step nothing can have been lost yet: a difference is then one of how vLLM and Transformers compute the
model. It may also begin at some length only, so the run's longest sequences are compared once (`Probe.run_far`).
`prepare_model` and `keep_soft_cap`, at the end, take away what is known to make the trainer's model compute
differently. All differences are in nats: natural logarithms of probabilities.
"""

import inspect
import logging
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from trl_atropos.distributed import on_main, together
from trl_atropos.errors import ProbeError, ServerError
from trl_atropos.server_client import Servers
from trl_atropos.weights.gather import base_model

logger = logging.getLogger(__name__)

NUM_SAMPLED = 8  # tokens per sample
NUM_SAMPLES = 4  # per probe, at the same time
TAIL = 16  # prompt tokens after the first full KV block
FAR_SAMPLED = 16  # tokens that continue a long prompt, once: four samples of it would take four times the memory
FAR_STEP = 32  # tokens to within which the length is found from which on both sides differ
MAX_SHARE = 0.02  # of a run's time on a GPU that probes may take, where the configuration does not say how often
RARE = 0.1  # share of the probes with single tokens beyond the tolerance, above which they are not called rounding
SOME = 3  # probes with such tokens before that is said
NOISE = re.compile("dropout|pdrop|layerdrop|jitter")  # in names of modules' attributes and of a config's fields
NO_NOISE = re.compile("classifier|summary")  # of heads that a language model does not have

CURES = (
    "What has helped: the same dtype on both sides, `attn_implementation: eager`, a server's `--max-model-len` within "
    "`original_max_position_embeddings` (longrope), other versions of vLLM or Transformers. `probe_every_n_steps: 0` "
    "trains all the same, with importance ratios that are off by as much."
)


class ProbeResult(NamedTuple):
    """Differences between server and trainer, in nats."""

    max_abs_diff: float
    mean_abs_diff: float

    @classmethod
    def worst(cls, results: Iterable["ProbeResult"]) -> "ProbeResult":
        return cls(*map(max, zip(*results, strict=True)))


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
        The bounds for the probes after the first: three times what that has shown of the model's own rounding.

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
    ended: float = -math.inf  # when it ended, in seconds

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
        trainer (`AtroposGRPOTrainer`): Its model scores, at its temperature.
        every (`int`, *optional*): Publishes between two probes (see `Schedule`).
        one_memory (`bool`): Server and trainer compute from the same memory, so that their weights cannot differ
            before the first step.
    """

    def __init__(self, servers: Servers, trainer: Any, every: int | None, one_memory: bool):
        info, model = servers.info, base_model(trainer.model)
        self.servers = servers
        self.one_memory = one_memory
        self.schedule = Schedule(every, info.device)
        compute = torch.bfloat16 if trainer.args.bf16 or trainer.args.fp16 else torch.float32
        dtypes = (compute, getattr(torch, info.dtype), next(trainer.model.parameters()).dtype)
        self.tolerance = self._allowed = Tolerance.of(info.device, *dtypes)
        self._trainer = trainer
        self._longest = int(
            min(trainer.args.max_sequence_length or math.inf, info.max_model_len, num_positions(model.config))
        )
        self._skips_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._first: ProbeResult | None = None
        self._runs = self._outliers = 0  # probes, and those with single tokens beyond the tolerance
        self._looked_far = False
        length = min(info.block_size + TAIL, info.max_model_len - NUM_SAMPLED)
        if length <= info.block_size:
            logger.warning(
                "The server's max_model_len of %d tokens leaves no room for a prompt beyond one KV block of %d: the "
                "probe cannot see stale prefixes. Start the server with --max-model-len %d or more.",
                *(info.max_model_len, info.block_size, info.block_size + TAIL + NUM_SAMPLED),
            )
        self.prompt_ids = self._prompt(max(length, 1), seed=0)

    def _prompt(self, length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.servers.info.vocab_size, (length,), generator=generator).tolist()

    # ---------------------------------------------------------------------------------------------- after each publish

    def run(self, policy_version: int) -> ProbeResult:
        """
        Compares on every rank: a sharded model needs all of them to score.

        Raises:
            ProbeError: Some server is beyond the tolerance, with single tokens twice in a row, or samples from another
                policy version.
        """
        served = self.servers.each(lambda client: client.info().policy_version)
        together(lambda: self._check_versions(served, policy_version))
        self._runs += 1
        try:
            result = self._look(policy_version, self.prompt_ids, self.tolerance)
        except Outlier as outlier:  # on every rank, where it is raised on any
            again = self._look(policy_version, self.prompt_ids, self.tolerance)
            self._warn_of_outlier(outlier.result, again, policy_version)
            result = ProbeResult.worst([outlier.result, again])
        if self._first is None:
            self._first = result
            self.tolerance = self.tolerance.after(result)
        return result

    def _warn_of_outlier(self, first: ProbeResult, again: ProbeResult, policy_version: int) -> None:
        """Warns of single tokens beyond the tolerance, until it is clear that they come with the model."""
        if self._outliers_are_common():
            return
        self._outliers += 1
        logger.warning(
            "A token of the probe of policy version %d differed by %.2e nats between server and trainer (mean of all "
            "%.2e, allowed %.0e and %.0e), but none when the server sampled again (at most %.2e). %s",
            *(policy_version, *first, self.tolerance.max_abs, self.tolerance.mean_abs, again.max_abs_diff),
            f"{self._outliers} of {self._runs} probes had such tokens, too many for rounding alone: vLLM and "
            "Transformers compute this model differently, or, if it began in mid-run, the policy has grown "
            f"ill-conditioned (lower `learning_rate`). {CURES} This is said once."
            if self._outliers_are_common()
            else "One in thousands may, where rounding errors are multiplied; more often, it would not be rounding.",
        )

    def _outliers_are_common(self) -> bool:
        return self._outliers >= SOME and self._outliers > RARE * self._runs

    # ------------------------------------------------------------------------------------------- once, before training

    def run_far(self, policy_version: int) -> str | None:
        """
        Once, after a first `run`: compares the continuation of a prompt that makes a sequence as long as the run's
        longest, or as long as both sides can take within half of a server's deadline and the trainer's memory.

        Returns what is wrong, if so, with the length from which on.
        """
        if self._looked_far:
            return None
        self._looked_far = True
        seconds = on_main(lambda: self.schedule.seconds)  # all ranks must look at the same lengths
        agreed, beyond, problem = len(self.prompt_ids) + NUM_SAMPLED, 0, None
        while problem is None and agreed < self._longest:
            # A sequence twice as long takes at most four times as long.
            length = min(self._longest, int(agreed * math.sqrt(self.servers.timeout / 2 / seconds)))
            if length < min(self._longest, 2 * agreed):
                break
            began = time.perf_counter()
            try:
                problem = self._differs(policy_version, length)
            except torch.OutOfMemoryError:  # training on such a sequence would fail, too, if one came
                break
            seconds = on_main(lambda began=began: time.perf_counter() - began)
            agreed, beyond = (length, 0) if problem is None else (agreed, length)
        if problem is not None:
            problem = self._narrowed(policy_version, agreed, beyond, problem)
        else:
            message = "Server and trainer agree on sequences of %d tokens (at most %d may come)"
            logger.info(message, agreed, self._longest)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # no step may need as much, and the server is on the same device
        return problem

    def _narrowed(self, policy_version: int, agreed: int, beyond: int, problem: str) -> str:
        """Between a length at which both sides agree and one at which they do not: from where on, and what to do."""
        while beyond - agreed > FAR_STEP:
            middle = (agreed + beyond) // 2
            found = self._differs(policy_version, middle)
            agreed, beyond, problem = (middle, beyond, problem) if found is None else (agreed, middle, found)
        return (
            f"Server and trainer agree on sequences of up to {agreed} tokens, but not from {beyond} tokens on (at "
            f"most {self._longest} may come): {problem} The weights are the same, so vLLM and Transformers compute "
            "longer sequences of this model differently, mostly because of a window or a rotary embedding. Set "
            f"`max_sequence_length: {agreed}`, which drops longer rollouts, and start the server with "
            f"`--max-model-len {agreed}`, which ends them there."
        )

    def _differs(self, policy_version: int, length: int) -> str | None:
        """By how much server and trainer differ at the end of a sequence of `length` tokens, if beyond tolerance."""
        prompt_ids, seen = self._prompt(length - FAR_SAMPLED, seed=1), ""
        for _ in range(2):  # as in `run`, single tokens count only when they come again
            try:
                self._look(policy_version, prompt_ids, self._allowed, 1, FAR_SAMPLED)
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
        policy_version: int,
        prompt_ids: list[int],
        tolerance: Tolerance,
        num_samples: int = NUM_SAMPLES,
        num_tokens: int = NUM_SAMPLED,
    ) -> ProbeResult:
        samples = self.servers.each(
            lambda client: client.sample(prompt_ids, num_tokens, self._trainer.args.temperature, num_samples)
        )
        if not self.servers.one_per_rank:
            samples = on_main(lambda: samples)
        tokens = [ids for of_server in samples for ids, _ in of_server]
        scored = together(lambda: self._score(prompt_ids, tokens))
        scored = scored.view(len(samples), num_samples, num_tokens)
        results = together(lambda: self._compare(samples, scored, tolerance, policy_version))
        return ProbeResult.worst(results)

    def _check_versions(self, served: list[int], policy_version: int) -> None:
        for client, version in zip(self.servers.clients, served, strict=True):
            if version != policy_version:
                raise ProbeError(
                    f"The server at {client.url} samples from policy version {version} but the trainer published "
                    f"{policy_version}: a publish was lost, or another trainer writes to this server."
                )

    def _compare(
        self, samples: list, scored: torch.Tensor, tolerance: Tolerance, policy_version: int
    ) -> list[ProbeResult]:
        """The differences of each server. `scored`: float64, (num_servers, num_samples, num_tokens)."""
        results = []
        for of_server, expected in zip(samples, scored, strict=True):
            tokens = [token for ids, _ in of_server for token in ids]
            sampled = torch.tensor([logprobs for _, logprobs in of_server], dtype=torch.float64)
            difference = (sampled - expected).abs().flatten()
            largest, mean = result = ProbeResult(difference.max().item(), difference.mean().item())
            results.append(result)
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
                problem.result, problem.seen = result, seen
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
    def _score(self, prompt_ids: list[int], tokens: list[list[int]]) -> torch.Tensor:
        """Log-probabilities of each list of `tokens` after the prompt in the trainer's model: float64, on the CPU."""
        model = self._trainer.model
        device = next(model.parameters()).device
        ids = torch.tensor([prompt_ids + continuation for continuation in tokens], device=device)
        num_logits = len(tokens[0]) + 1
        keep = {"logits_to_keep": num_logits} if self._skips_logits else {}  # those of all tokens may fill a device
        training = model.training
        model.eval()  # dropout would differ from the server
        try:
            with self._trainer.accelerator.autocast():
                logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **keep).logits
        finally:
            model.train(training)
        logits = logits[:, -num_logits:-1].float() / self._trainer.args.temperature
        chosen = torch.tensor(tokens, device=device)[:, :, None]
        return logits.log_softmax(-1).gather(2, chosen)[:, :, 0].double().cpu()


# ---------------------------------------------------------------------- a model that computes what the server computes


def drops_soft_cap(config: PreTrainedConfig, implementation: str) -> bool:
    """Whether the model caps its attention scores (Gemma 2) and torch's own attention, which cannot, would be used."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)  # few families have it
    return capped is not None and "sdpa" in implementation


def keep_soft_cap(model: PreTrainedModel) -> None:
    """Lets a model whose attention scores are capped compute the cap, which transformers' default leaves out."""
    if not drops_soft_cap(model.config, model.config._attn_implementation):
        return
    logger.warning(
        "%s caps its attention scores at %s (`attn_logit_softcapping`), which vLLM does and `attn_implementation: %s` "
        "does not: the trainer computes with `eager`. On a GPU, `attn_implementation: flash_attention_2` has the cap, "
        "too, and takes less memory.",
        type(model).__name__,
        model.config.get_text_config().attn_logit_softcapping,
        model.config._attn_implementation,
    )
    model.set_attn_implementation("eager")


def silence(model: torch.nn.Module) -> dict[str, float]:
    """
    Sets every probability of dropout, of the model and of its adapters, and all noise of a router to 0. Returns those
    that were not, by name.

    The server samples without: with them, training would compute other log-probabilities than any policy has.
    """
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p:
            found[path.removesuffix(".default").rpartition(".")[2]] = module.p  # an adapter's has its name at the end
            module.p = 0.0
    configs = [model.config, model.config.get_text_config()]  # some forwards read them
    for place in [*model.modules(), *configs]:
        for name, value in list(vars(place).items()):
            if isinstance(value, float) and value and NOISE.search(name) and not NO_NOISE.search(name):
                found[name] = value
                setattr(place, name, 0.0)
    return found


def prepare_model(model: torch.nn.Module, *, warn: bool = True) -> None:
    """Sets up a model, with its adapter, for training on what the server samples."""
    policy = base_model(model)
    if policy.base_model is policy:  # Llama 4 names a backbone that it does not have; TRL scores from its states
        policy.base_model_prefix = "model"
    found = silence(model)
    if found and warn:
        shown = ", ".join(f"{name} {value:g}" for name, value in found.items())
        logger.warning(
            "Dropout and noise are set to 0 for training (%s): the server samples without, so that they would make "
            "trainer and sampler differ.",
            shown,
        )
