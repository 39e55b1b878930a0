"""On the same rollouts, `AtroposGRPOTrainer` takes the very steps that TRL's own `GRPOTrainer`
takes.

With TRL's micro-batches and TRL's padding, bit for bit; without its padding, and with rows of like
length in a micro-batch, to what float32 allows.

TRL gets the rollouts through its documented `rollout_func`; groups are of one size, and for the
correction for the sampler TRL is told that a vLLM sampled. Everything else is in
`test_reference.py`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.rollout_factory import (
    AsDrawnConfig,
    Group,
    PaddedTrainer,
    arguments,
    make_group,
    record,
    step_logs,
    uniform_batch,
)
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer, ReplaySource
from trl_atropos.config import IMPORTANCE_SAMPLING_MODES, LOSS_TYPES

STEPS = 4
GROUP_SIZE = 4
BATCH = 8  # rows per micro-batch
OF_THE_CLOCK = {"step_time", "epoch"}  # and of the spare data that TRL gets

SETTINGS: dict[str, dict[str, Any]] = {
    "kl": {"beta": 0.1},
    "kl without bias correction": {"beta": 0.1, "use_bias_correction_kl": False},
    "moving reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "gradient accumulation": {"gradient_accumulation_steps": 2},
    "two iterations": {"num_iterations": 2},
    "two iterations, accumulated": {
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
        "beta": 0.1,
    },
    "generation ahead": {"steps_per_generation": 4},
    "generation ahead, accumulated": {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "generation across the step": {
        "steps_per_generation": 3,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
    },
    "scale none": {"scale_rewards": "none"},
    "sequence level": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "two-sided clipping": {"delta": 1.3, "epsilon_high": 0.28, "num_iterations": 2},
    "off-policy mask": {"off_policy_mask_threshold": 0.001},
    "entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.01},
    "temperature": {"temperature": 0.7},
    "truncated rows left out": {"mask_truncated_completions": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "padding to a multiple": {"pad_to_multiple_of": 8},
}
# What a generation batch is for. TRL scores each before training, we those of the last two.
RHYTHMS: dict[str, dict[str, Any]] = {
    "one step": {"gradient_accumulation_steps": 2},
    "half a step": {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    "one step, twice": {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 1,
        "num_iterations": 2,
    },
    "two steps": {"steps_per_generation": 2},
    "two iterations": {"num_iterations": 2},
}
# Of a batch of 32 rollouts, or two, for one step.
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed by tokens": {"per_device_train_batch_size": 32, "max_tokens_per_micro_batch": 96},
    "padded by tokens": {
        "per_device_train_batch_size": 32, "max_tokens_per_micro_batch": 96, "padding_free": False
    },
    "as drawn": {"gradient_accumulation_steps": 4, "config_class": AsDrawnConfig},
    "two batches": {"gradient_accumulation_steps": 8, "steps_per_generation": 4},
}  # fmt: skip
LORA = {"target_modules": ["q_proj", "v_proj"], "r": 4, "init_lora_weights": "gaussian"}


class WatchedReplay(ReplaySource):
    """Notes the state of torch's random numbers at every pull."""

    def poll(self, num_rows, timeout):
        self.random_states.append(torch.get_rng_state())
        return super().poll(num_rows, timeout)


def trl_rollouts(groups: list[Group]) -> dict[str, list]:
    """What a `rollout_func` returns for these groups. Every sequence ends in a trained token."""
    columns: dict[str, list] = {
        name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "score")
    }
    for group in groups:
        for tokens, mask, logprobs, score in zip(
            group["tokens"], group["masks"], group["inference_logprobs"], group["scores"]
        ):
            start = next(i for i, entry in enumerate(mask) if entry != -100)
            columns["prompt_ids"].append(tokens[:start])
            columns["completion_ids"].append(tokens[start:])
            columns["logprobs"].append(
                [math.nan if value == 1.0 else value for value in logprobs[start:]]
            )
            columns["env_mask"].append([int(entry != -100) for entry in mask[start:]])
            columns["score"].append(score)
    return columns


def atropos_score(score, **kwargs):
    return score


class Scored(AtroposGRPOTrainer):
    """Has TRL score every batch before training."""

    _scores_first = True


class AsIfOfVLLM(TrainerCallback):
    """Has TRL correct for the sampler, and believe that vLLM has its weights."""

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer
        trainer.use_vllm = True

    def on_step_begin(self, args, state, control, **kwargs):
        self._trainer._last_loaded_step = state.global_step


@dataclass
class Comparison:
    """One recording, on which TRL's trainer and ours train."""

    model: Path
    folder: Path
    run: dict[str, Any]  # settings of all trainers
    batches: list[list[Group]]  # one for each generation batch
    recording: str  # of them
    corrected: bool  # for the sampler
    peft: dict[str, Any]

    def ours(
        self, trainer_class: type[AtroposGRPOTrainer], config_class: type[AtroposGRPOConfig]
    ) -> tuple[AtroposGRPOTrainer, list[torch.Tensor]]:
        """Trains. Returns the trainer, and the states of torch's random numbers at every pull."""
        folder = self.folder / trainer_class.__name__
        source = WatchedReplay(self.recording)
        source.random_states = []
        config = config_class(
            **arguments(folder, **self.run),
            replay_paths=["given as rollout_source"],
            vllm_importance_sampling_correction=self.corrected,
        )
        trainer = trainer_class(str(self.model), args=config, rollout_source=source, **self.peft)
        trainer.train()
        return trainer, source.random_states

    def theirs(self) -> tuple[GRPOTrainer, list[torch.Tensor]]:
        """The same with TRL's own trainer."""
        pulled = iter(self.batches)
        random_states = []

        def rollout_func(prompts, trainer):
            random_states.append(torch.get_rng_state())
            return trl_rollouts(next(pulled))

        config = GRPOConfig(
            **arguments(
                self.folder / "theirs",
                num_generations=GROUP_SIZE,
                shuffle_dataset=False,
                **self.run,
            )
        )
        # one generation to spare: no epoch ends in the run
        groups = (len(self.batches) + 1) * len(self.batches[0])
        trainer = GRPOTrainer(
            str(self.model),
            reward_funcs=[atropos_score],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [""] * groups}),
            rollout_func=rollout_func,
            **self.peft,
        )
        if self.corrected:
            trainer.add_callback(AsIfOfVLLM(trainer))
        trainer.train()
        return trainer, random_states


def compare(
    model: Path,
    folder: Path,
    *,
    lora: dict[str, Any] | None = None,
    alike_groups: bool = True,
    corrected: bool = False,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Trains all three on the same recording; returns TRL's log after checking that the others' are
    the same."""
    run = {"max_steps": STEPS, "per_device_train_batch_size": BATCH, **settings}
    accumulation = settings.get("gradient_accumulation_steps", 1)
    per_generation = settings.get("steps_per_generation", accumulation)
    uses = per_generation * settings.get("num_iterations", 1)  # training steps of a batch
    generations = math.ceil(STEPS * accumulation / uses)
    groups = BATCH * per_generation // GROUP_SIZE
    batches = []
    for seed in range(generations):
        batches.append(uniform_batch(model, GROUP_SIZE, groups, seed, logprobs="some"))
    # one row that did not come to an end
    batches[0][0]["tokens"][0][-1] = batches[0][0]["masks"][0][-1] = 65
    if alike_groups:
        batches[-1][-1]["scores"] = [0.25] * GROUP_SIZE  # one group without variance
    peft = {"peft_config": LoraConfig(**lora)} if lora else {}
    recording = record(folder / "rollouts.jsonl", *batches)
    comparison = Comparison(model, folder, run, batches, recording, corrected, peft)

    padded, padded_states = comparison.ours(PaddedTrainer, AsDrawnConfig)
    # Which step a row comes to is drawn at random, and not by the same generator.
    is_one_step = per_generation == accumulation
    ours, states = comparison.ours(
        AtroposGRPOTrainer, AtroposGRPOConfig if is_one_step else AsDrawnConfig
    )
    theirs, random_states = comparison.theirs()

    assert len(random_states) == generations
    for mine in (padded_states, states):
        assert all(map(torch.equal, mine, random_states)) and len(mine) == generations
    log = logged(theirs)
    assert len(log) == STEPS
    assert all(math.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in log)
    require_equal(padded, theirs)
    # the ratios of whole rollouts multiply those of their tokens, and their rounding
    of_whole_rollouts = "sequence" in run.get("vllm_importance_sampling_mode", "")
    require_close(ours, theirs, corrected, 2e-4 if of_whole_rollouts else 1e-4)
    return log


def require_equal(padded: AtroposGRPOTrainer, theirs: GRPOTrainer) -> None:
    """Rows padded as TRL pads them give the same numbers, to the last bit."""
    for mine, other in zip(logged(padded), logged(theirs), strict=True):
        assert {name: mine[name] for name in other} == other
    parameters = zip(padded.model.named_parameters(), theirs.model.named_parameters(), strict=True)
    for (name, mine), (_, other) in parameters:
        assert torch.equal(mine, other), name


def require_close(
    ours: AtroposGRPOTrainer, theirs: GRPOTrainer, corrected: bool, relative: float
) -> None:
    """Packed rows give the same numbers, within float32's rounding."""
    rounding = 5e-6 if corrected else 1e-6
    for mine, other in zip(logged(ours), logged(theirs), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=relative, abs=rounding)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        of_sampling = [name for name in other if name.startswith("sampling/")]
        # of the steps that a batch begins with
        assert len(of_sampling) == 5 * (corrected and "reward" in other)
        for name in of_sampling:
            assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name


def logged(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in entry.items() if k not in OF_THE_CLOCK} for entry in step_logs(trainer)
    ]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_takes_same_steps(tiny_model, tmp_path, loss_type):
    """With rollouts that are used again, so that ratios and clipping have something to show."""
    log = compare(
        tiny_model,
        tmp_path,
        loss_type=loss_type,
        num_iterations=2,
        steps_per_generation=4,
        gradient_accumulation_steps=2,
        beta=0.05,
    )
    assert len({entry["loss"] for entry in log}) == STEPS


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_takes_same_steps(tiny_model, tmp_path, setting):
    compare(tiny_model, tmp_path, **SETTINGS[setting])


def corrections() -> Iterator[Any]:
    """Yields every rhythm, mode and lower bound. Every rhythm meets every mode with one of the two
    bounds; the others run with TRL_ATROPOS_FULL=1."""
    for row, rhythm in enumerate(RHYTHMS):
        for column, mode in enumerate(IMPORTANCE_SAMPLING_MODES):
            for number, lowest in enumerate([None, 0.9]):
                is_left_out = (row + column + number) % 2 == 1
                marks = [pytest.mark.full] if is_left_out else []
                yield pytest.param(rhythm, mode, lowest, marks=marks)


@pytest.mark.parametrize(("rhythm", "mode", "lowest"), corrections())
def test_every_correction_takes_same_steps(tiny_model, tmp_path, rhythm, mode, lowest):
    bounds = {"vllm_importance_sampling_clip_min": lowest, "vllm_importance_sampling_clip_max": 1.1}
    log = compare(
        tiny_model,
        tmp_path,
        corrected=True,
        vllm_importance_sampling_mode=mode,
        **bounds,
        **RHYTHMS[rhythm],
    )
    largest = [
        value
        for entry in log
        for name, value in entry.items()
        if name == "sampling/importance_sampling_ratio/max"
    ]
    assert 1.0 < max(largest) <= 1.1 + 1e-6


@pytest.mark.slow(50)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_is_corrected_without_scoring(tiny_model, tmp_path, loss_type):
    settings = {
        "vllm_importance_sampling_mode": "token_truncate",
        "gradient_accumulation_steps": 2,
        "beta": 0.05,
    }
    compare(tiny_model, tmp_path, corrected=True, loss_type=loss_type, **settings)


BESIDE: dict[str, dict[str, Any]] = {
    "an adapter": {"lora": LORA, "beta": 0.1},
    **{
        name: SETTINGS[name]
        for name in ("off-policy mask", "gradient checkpointing", "truncated rows left out")
    },
}


@pytest.mark.parametrize("setting", BESIDE)
def test_correction_without_scoring_suits_setting(tiny_model, tmp_path, setting):
    settings = {"vllm_importance_sampling_mode": "token_truncate", "gradient_accumulation_steps": 2}
    compare(tiny_model, tmp_path, corrected=True, **settings, **BESIDE[setting])


@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_pass_equals_separate_scoring_pass(tiny_model, tmp_path, layout, mode):
    """And no micro-batch goes through the model twice."""
    batches = [uniform_batch(tiny_model, GROUP_SIZE, 8, seed, logprobs="some") for seed in range(2)]
    recording, runs = record(tmp_path / "rollouts.jsonl", *batches), []
    settings = dict(LAYOUTS[layout])
    config_class = settings.pop("config_class", AtroposGRPOConfig)
    for trainer_class in (AtroposGRPOTrainer, Scored):
        args = config_class(
            **arguments(tmp_path / trainer_class.__name__, replay_paths=[recording], **settings),
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_max=1.1,
        )
        passes = Passes()
        trainer = trainer_class(str(tiny_model), args=args, callbacks=[passes])
        trainer.train()
        trained = [
            part for step in trainer._buffered_inputs for part in step.get("micro_batches", [step])
        ]
        runs.append((passes.train, trained, step_logs(trainer)[0]))
    (ours, trained, log), (scored_first, scored, expected) = runs
    assert all(ours) and len(ours) >= len(trained) > 2
    assert sorted(scored_first) == [False] * len(ours) + [True] * len(ours)
    for mine, other in zip(trained, scored, strict=True):
        assert torch.equal(mine["completion_ids"], other["completion_ids"])
        assert "old_per_token_logps" in other and "old_per_token_logps" not in mine
        ratio, by_trl = mine["importance_sampling_ratio"], other["importance_sampling_ratio"]
        torch.testing.assert_close(ratio, by_trl, rtol=1e-4, atol=0)
    assert (
        len(torch.cat([each["importance_sampling_ratio"].flatten() for each in trained]).unique())
        > 4
    )
    measured = [name for name in expected if name.startswith(("sampling/", "health/"))]
    assert len(measured) > 20
    assert {name: log[name] for name in measured} == pytest.approx(
        {name: expected[name] for name in measured}, 1e-4
    )
    assert log["loss"] == pytest.approx(expected["loss"], rel=1e-4)


class Passes(TrainerCallback):
    """Notes of each forward pass in a step whether it is one that trains."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.train: list[bool] = []
        model.register_forward_pre_hook(lambda *_: self.train.append(torch.is_grad_enabled()))


def test_batch_scaling_takes_same_steps(tiny_model, tmp_path):
    """Only there TRL's `frac_reward_zero_std` tells of the batch, and ours still of the groups."""
    compare(tiny_model, tmp_path, alike_groups=False, scale_rewards="batch")


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_adapter_takes_same_steps(tiny_model, tmp_path, beta):
    compare(tiny_model, tmp_path, lora=LORA, beta=beta, num_iterations=2)


def test_another_seed_takes_other_steps(tiny_model, tmp_path):
    """The order in which rows meet in micro-batches is the seed's, so the comparison above is not
    of constants."""
    options = {"gradient_accumulation_steps": 2, "loss_type": "bnpo"}
    first = compare(tiny_model, tmp_path / "a", seed=1, **options)
    second = compare(tiny_model, tmp_path / "b", seed=2, **options)
    assert [entry["loss"] for entry in first] != [entry["loss"] for entry in second]


def test_rollouts_have_masks_and_unknown_logprobs(tiny_model):
    group = make_group(tiny_model, GROUP_SIZE, 0, turns=2, logprobs="some")
    columns = trl_rollouts([group])
    assert any(0 in mask for mask in columns["env_mask"])
    assert any(math.isnan(value) for row in columns["logprobs"] for value in row)
