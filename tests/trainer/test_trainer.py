"""What `AtroposGRPOTrainer` does with rollouts, one behaviour a test. Whether the loss is right is
in `test_reference.py`."""

import dataclasses
import importlib.metadata
import json
import math
import time
from pathlib import Path

import pandas
import pytest
import torch
from accelerate.utils import other
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig

from tests.rollout_factory import (
    arguments,
    end_token,
    make_group,
    make_trainer,
    mixed_batch,
    record,
    step_logs,
    uniform_batch,
)
from tests.weights.architectures import FAMILIES
from tests.weights.architectures import make_model as save_family
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer, ReplaySource
from trl_atropos.errors import RolloutError
from trl_atropos.weights.model_setup import silence
from trl_atropos.weights.publisher import NullPublisher

FIXES = {
    "reward_funcs": "score them in the environment",
    "reward_processing_classes": "score them in the environment",
    "train_dataset": "pass a `rollout_source`",
    "eval_dataset": "list `evaluations` in the recipe",
    "rollout_func": "pass a `rollout_source`",
    "environment_factory": "processes of their own",
    "tools": "called by the environment",
}


def standardized(scores: list[float]) -> list[float]:
    values = torch.tensor(scores, dtype=torch.float64)
    return ((values - values.mean()) / (values.std() + 1e-4)).tolist()


def tables(folder: Path) -> list[pandas.DataFrame]:
    return [
        pandas.read_parquet(path)
        for path in sorted((folder / "run" / "completions").glob("*.parquet"))
    ]


# ------------------------------------------------------------------------------------------- groups


def test_groups_of_any_sizes_fill_batch(tiny_model, tmp_path):
    sizes = (2, 3, 5, 6)
    groups = [make_group(tiny_model, size, size) for size in sizes]
    trainer = make_trainer(
        tiny_model, tmp_path, groups, per_device_train_batch_size=16, log_completions=True
    )
    trainer.train()
    expected = [advantage for group in groups for advantage in standardized(group["scores"])]
    assert tables(tmp_path)[0]["advantage"].tolist() == pytest.approx(expected, abs=1e-4)


def test_group_split_over_batches_keeps_statistics(tiny_model, tmp_path):
    groups = [make_group(tiny_model, size, size) for size in (4, 8, 4)]
    trainer = make_trainer(tiny_model, tmp_path, groups, max_steps=2, log_completions=True)
    trainer.train()
    expected = [advantage for group in groups for advantage in standardized(group["scores"])]
    first, second = (table["advantage"].tolist() for table in tables(tmp_path))
    assert first == pytest.approx(expected[:8], abs=1e-4)
    assert second == pytest.approx(expected[8:], abs=1e-4)


def test_group_of_one_trains_on_raw_score_on_request(tiny_model, tmp_path):
    groups = [
        make_group(tiny_model, size, size, scores=[0.5 + i for i in range(size)]) for size in (1, 7)
    ]
    trainer = make_trainer(
        tiny_model, tmp_path, groups, single_row_groups="raw", log_completions=True
    )
    trainer.train()
    assert tables(tmp_path)[0]["advantage"].tolist()[0] == 0.5


def test_rows_with_zeroed_advantage_add_no_loss(tiny_model, tmp_path):
    groups = [make_group(tiny_model, 8, 1, overrides=[{"set_advantage_to_zero": True}] * 8)]
    trainer = make_trainer(tiny_model, tmp_path, groups)
    trainer.train()
    assert step_logs(trainer)[0]["loss"] == step_logs(trainer)[0]["grad_norm"] == 0.0


# ------------------------------------------------------------------------------------------ metrics


def test_metrics_have_rollout_rewards_and_lengths(tiny_model, tmp_path):
    groups = mixed_batch(tiny_model)
    trainer = make_trainer(tiny_model, tmp_path, groups, per_device_train_batch_size=16)
    trainer.train()
    log = step_logs(trainer)[0]
    scores = torch.tensor([score for group in groups for score in group["scores"]])
    trained = torch.tensor(
        [sum(m != -100 for m in mask) for group in groups for mask in group["masks"]]
    ).float()
    assert log["reward"] == log["rewards/atropos_score/mean"] == pytest.approx(scores.mean().item())
    assert (
        log["reward_std"] == log["rewards/atropos_score/std"] == pytest.approx(scores.std().item())
    )
    assert log["completions/mean_length"] == pytest.approx(trained.mean().item())
    assert (log["completions/min_length"], log["completions/max_length"]) == (
        trained.min(),
        trained.max(),
    )


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_frac_reward_zero_std_counts_rows_not_groups(tiny_model, tmp_path, scale_rewards):
    groups = [make_group(tiny_model, 6, 1), make_group(tiny_model, 2, 2, scores=[0.5, 0.5])]
    trainer = make_trainer(tiny_model, tmp_path, groups, scale_rewards=scale_rewards)
    trainer.train()
    assert step_logs(trainer)[0]["frac_reward_zero_std"] == 2 / 8


def test_masked_tail_does_not_count_as_truncated(tiny_model, tmp_path):
    """Feedback after the last trained token, as of a tool whose answer the policy never got to
    use."""
    whole, cut = make_group(tiny_model, 4, 1), make_group(tiny_model, 4, 2)
    for name, entry in (("tokens", 65), ("masks", -100), ("inference_logprobs", 1.0)):
        whole[name] = [[*sequence, entry, entry] for sequence in whole[name]]
    for name in ("tokens", "masks"):
        cut[name] = [[*sequence[:-1], 65] for sequence in cut[name]]
    assert all(tokens[-3] == end_token(tiny_model) for tokens in whole["tokens"])
    trainer = make_trainer(tiny_model, tmp_path, [whole, cut])
    trainer.train()
    assert step_logs(trainer)[0]["completions/clipped_ratio"] == 0.5


def test_policy_version_counts_optimizer_steps(tiny_model, tmp_path):
    batches = [uniform_batch(tiny_model, 4, 4, seed) for seed in range(3)]
    trainer = make_trainer(
        tiny_model, tmp_path, *batches, max_steps=3, gradient_accumulation_steps=2
    )
    trainer.train()
    assert [log["policy/version"] for log in step_logs(trainer)] == [0, 1, 2]
    assert trainer.policy_publisher.policy_version == 3


def test_table_has_completions_and_advantages(tiny_model, tmp_path):
    batches = [uniform_batch(tiny_model, 4, 2, seed) for seed in range(2)]
    trainer = make_trainer(tiny_model, tmp_path, *batches, max_steps=2, log_completions=True)
    trainer.train()
    for step, (table, batch) in enumerate(zip(tables(tmp_path), batches, strict=True), start=1):
        decode = trainer.processing_class.decode
        starts = [
            next(i for i, m in enumerate(mask) if m != -100)
            for group in batch
            for mask in group["masks"]
        ]
        tokens = [sequence for group in batch for sequence in group["tokens"]]
        assert table["step"].tolist() == [step] * 8
        assert table["prompt"].tolist() == [decode(t[:start]) for t, start in zip(tokens, starts)]
        assert table["completion"].tolist() == [
            decode(t[start:], skip_special_tokens=True) for t, start in zip(tokens, starts)
        ]
        scores = [group["scores"] for group in batch]
        assert table["atropos_score"].tolist() == pytest.approx(
            [s for group in scores for s in group]
        )
        advantages = [advantage for group in scores for advantage in standardized(group)]
        assert table["advantage"].tolist() == pytest.approx(advantages, abs=1e-4)


# ------------------------------------------------------------------------------------- what arrives


def test_token_advantages_replace_scores(tiny_model, tmp_path):
    """With the log-probabilities' gradient per token alike, doubling the advantages doubles the
    loss and its norm."""
    once = make_group(tiny_model, 8, 1, token_advantages=True)
    twice = once | {"advantages": [[2 * a for a in sequence] for sequence in once["advantages"]]}
    other_scores = once | {"scores": [1.0 - score for score in once["scores"]]}
    logs = []
    for name, group in (("once", once), ("twice", twice), ("other", other_scores)):
        trainer = make_trainer(tiny_model, tmp_path / name, [group], loss_type="grpo")
        trainer.train()
        logs.append(step_logs(trainer)[0])
    assert abs(logs[0]["loss"]) > 1e-3
    assert logs[1]["loss"] == pytest.approx(2 * logs[0]["loss"])
    assert logs[1]["grad_norm"] == pytest.approx(2 * logs[0]["grad_norm"])
    assert (logs[2]["loss"], logs[2]["grad_norm"]) == (logs[0]["loss"], logs[0]["grad_norm"])


@pytest.mark.parametrize("logprobs", ["absent", "none"])
def test_row_without_logprobs_has_ratio_one(tiny_model, tmp_path, logprobs):
    groups = [make_group(tiny_model, 8, 1, logprobs=logprobs)]
    corrected = make_trainer(tiny_model, tmp_path / "on", groups)
    corrected.train()
    uncorrected = make_trainer(
        tiny_model, tmp_path / "off", groups, vllm_importance_sampling_correction=False
    )
    uncorrected.train()
    log = step_logs(corrected)[0]
    assert (
        log["sampling/importance_sampling_ratio/min"]
        == log["sampling/importance_sampling_ratio/max"]
        == 1.0
    )
    assert log["rollouts/unknown_logprobs"] == 1.0
    assert log["loss"] == pytest.approx(step_logs(uncorrected)[0]["loss"])
    assert log["grad_norm"] == pytest.approx(step_logs(uncorrected)[0]["grad_norm"])


def test_known_logprobs_change_loss(tiny_model, tmp_path):
    groups = [make_group(tiny_model, 8, 1)]
    losses = []
    for correction in (True, False):
        folder = tmp_path / str(correction)
        trainer = make_trainer(
            tiny_model, folder, groups, vllm_importance_sampling_correction=correction
        )
        trainer.train()
        losses.append(step_logs(trainer)[0]["loss"])
    assert abs(losses[0] - losses[1]) > 1e-3


# ----------------------------------------------------------------------------------------- the life


class Witness(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append("begin")

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(state.global_step)
        control.should_training_stop = state.global_step == 2

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append("end")


def test_callbacks_see_every_step_and_may_end_run(tiny_model, tmp_path):
    witness = Witness()
    batches = [uniform_batch(tiny_model, 4, 2, seed) for seed in range(2)]
    trainer = make_trainer(tiny_model, tmp_path, *batches, max_steps=5, callbacks=[witness])
    trainer.train()
    assert witness.events == ["begin", 1, 2, "end"]


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_accumulation_steps": 2}, {"num_iterations": 2}], ids=str
)
def test_resumed_run_equals_unbroken_one(tiny_model, tmp_path, settings):
    rows = 2 * settings.get("gradient_accumulation_steps", 1)
    batches = [uniform_batch(tiny_model, 4, rows, seed) for seed in range(4)]
    options = {
        "max_steps": 4,
        "loss_type": "bnpo",
        "save_strategy": "steps",
        "save_steps": 2,
        **settings,
    }
    whole = make_trainer(tiny_model, tmp_path / "whole", *batches, **options)
    whole.train()
    resumed = make_trainer(tiny_model, tmp_path / "resumed", *batches, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "run" / "checkpoint-2"))
    names = ("step", "loss", "grad_norm", "learning_rate", "policy/version")
    expected, found = (
        [[log.get(name) for name in names] for log in step_logs(t)] for t in (whole, resumed)
    )
    assert [log[0] for log in found] == [1, 2, 3, 4]
    assert found[2:] == expected[2:]
    assert all(
        torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters())
    )


def test_resumed_run_has_optimizer_state(tiny_model, tmp_path):
    """The test above would not notice if Adam's memory were lost on both sides; here it is looked
    at."""
    batches = [uniform_batch(tiny_model, 4, 2, seed) for seed in range(3)]
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    make_trainer(tiny_model, tmp_path / "whole", *batches, **options).train()
    checkpoint = tmp_path / "whole" / "run" / "checkpoint-2"
    resumed = make_trainer(tiny_model, tmp_path / "resumed", *batches, **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    saved = torch.load(checkpoint / "optimizer.pt")["state"]
    now = resumed.optimizer.state_dict()["state"]
    assert {int(state["step"]) for state in saved.values()} == {2}
    assert {int(state["step"]) for state in now.values()} == {3}


class Watched(ReplaySource):
    """Remembers what it was started with, and what it handed out at which version."""

    def start(self, run):
        self.run, self.polled = run, []
        super().start(run)

    def poll(self, num_rows, timeout):
        rows = super().poll(num_rows, timeout)
        self.polled.append((self.run.policy_version(), [row.score for row in rows]))
        return rows


@pytest.mark.parametrize(
    ("settings", "consumed", "unfinished", "polled"),
    [
        ({}, 16, 0, [(2, 2), (3, 3)]),
        # The checkpoint falls into the middle of a batch: the rest of it is not trained, and is not
        # replayed.
        ({"steps_per_generation": 4}, 32, 16, [(2, 1)]),
    ],
    ids=["between two batches", "in the middle of a batch"],
)
def test_resumed_source_is_told_step_and_versions(
    tiny_model, tmp_path, settings, consumed, unfinished, polled
):
    per_batch = settings.get("steps_per_generation", 1)
    batches = [uniform_batch(tiny_model, 4, 2 * per_batch, seed) for seed in range(4)]
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **settings}
    make_trainer(tiny_model, tmp_path / "whole", *batches, **options | {"max_steps": 2}).train()

    source = Watched(record(tmp_path / "rest.jsonl", *batches))
    config = AtroposGRPOConfig(**arguments(tmp_path / "rest", replay_paths=["given"], **options))
    trainer = AtroposGRPOTrainer(str(tiny_model), args=config, rollout_source=source)
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "run" / "checkpoint-2"))
    run = source.run
    assert (run.starting_step, run.max_steps, run.batch_size) == (2, 4, 8 * per_batch)
    assert run.max_sequence_length == 128
    assert run.vocab_size == trainer.model.config.vocab_size
    assert (run.rows_consumed, run.unfinished_rows) == (consumed, unfinished)
    scores = [[score for group in batch for score in group["scores"]] for batch in batches]
    _skipped, *handed_out = source.polled
    assert handed_out == [(version, scores[batch]) for version, batch in polled]


@pytest.mark.parametrize(("asked", "state"), [("true", {}), (None, None)])
def test_missing_checkpoint_keeps_rollouts_on_resume(tiny_model, tmp_path, asked, state):
    source = Watched(record(tmp_path / "rollouts.jsonl", uniform_batch(tiny_model, 4, 2, 0)))
    config = AtroposGRPOConfig(
        **arguments(tmp_path, replay_paths=["given"], max_steps=1, resume_from_checkpoint=asked)
    )
    AtroposGRPOTrainer(str(tiny_model), args=config, rollout_source=source).train()
    assert source.run.state == state


def test_next_batch_begins_in_last_publish_before_due(tiny_model, tmp_path):
    class Pausing(NullPublisher):
        def begin(self, optimizer, policy_version):
            super().begin(optimizer, policy_version)
            step = optimizer.step
            self._wrap_step(
                optimizer, lambda *args, **kwargs: (self.on_pause(), step(*args, **kwargs))[1]
            )

    class Asking(ReplaySource):
        def start(self, run):
            super().start(run)
            self.asked = []
            run.when_wanted_soon(lambda: self.asked.append(run.policy_version()))

    batches = [uniform_batch(tiny_model, 4, 4, seed) for seed in range(3)]
    source = Asking(record(tmp_path / "rollouts.jsonl", *batches))
    options = {"replay_paths": ["given"], "steps_per_generation": 2, "max_steps": 6}
    config = AtroposGRPOConfig(**arguments(tmp_path / "run", **options))
    trainer = AtroposGRPOTrainer(
        str(tiny_model), args=config, rollout_source=source, policy_publisher=Pausing()
    )
    trainer.train()
    # before the steps to versions 2 and 4; after the step to 6 there is no batch
    assert source.asked == [1, 3]


def test_training_twice_counts_every_step_once(tiny_model, tmp_path):
    batches = [uniform_batch(tiny_model, 4, 2, seed) for seed in range(4)]
    trainer = make_trainer(tiny_model, tmp_path, *batches, max_steps=2)
    trainer.train()
    trainer.train()
    assert trainer.policy_publisher.policy_version == 2


def test_source_error_ends_run_and_closes_both_ends(tiny_model, tmp_path):
    class Closing(NullPublisher):
        closed = False

        def close(self):
            self.closed = True

    class Ending(ReplaySource):
        closed = False

        def close(self):
            super().close()
            self.closed = True

    source = Ending(record(tmp_path / "rollouts.jsonl", uniform_batch(tiny_model, 4, 2, 0)))
    publisher = Closing()
    config = AtroposGRPOConfig(**arguments(tmp_path / "run", replay_paths=["given"], max_steps=2))
    trainer = AtroposGRPOTrainer(
        str(tiny_model), args=config, rollout_source=source, policy_publisher=publisher
    )
    with pytest.raises(RolloutError, match="used up"):
        trainer.train()
    assert source.closed and publisher.closed


def test_memory_error_names_helpful_settings(tiny_model, tmp_path, monkeypatch):
    trainer = make_trainer(tiny_model, tmp_path, uniform_batch(tiny_model, 4, 2, 0), max_steps=1)

    def too_much(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(trainer, "_micro_batch_loss", too_much)
    with pytest.raises(torch.OutOfMemoryError) as error:
        trainer.train()
    assert "max_tokens_per_micro_batch" in error.value.__notes__[0]


def test_rollout_timeout_ends_run_with_diagnosis(tiny_model, tmp_path):
    class Silent(ReplaySource):
        def poll(self, num_rows, timeout):
            return None

        def diagnose(self):
            return "Nobody answers."

    source = Silent(record(tmp_path / "rollouts.jsonl", uniform_batch(tiny_model, 4, 2, 0)))
    config = AtroposGRPOConfig(
        **arguments(tmp_path / "run", replay_paths=["given"], rollout_timeout=0.2)
    )
    trainer = AtroposGRPOTrainer(str(tiny_model), args=config, rollout_source=source)
    with pytest.raises(
        RolloutError,
        match=r"No batch of 8 rollouts for \d+ s \(`rollout_timeout`\). Nobody answers.",
    ):
        trainer.train()


def test_pulling_queued_rollouts_is_not_waiting(tiny_model, tmp_path):
    class Backlog(ReplaySource):
        pulled = 0.0

        def poll(self, num_rows, timeout):
            if self.pulled < 0.4:
                time.sleep(0.1)
                self.pulled += 0.1
                return None
            return super().poll(num_rows, timeout)

        def catching_up(self):
            return self.pulled

    source = Backlog(record(tmp_path / "rollouts.jsonl", uniform_batch(tiny_model, 4, 2, 0)))
    config = AtroposGRPOConfig(
        **arguments(tmp_path / "run", replay_paths=["given"], rollout_timeout=0.2, max_steps=1)
    )
    trainer = AtroposGRPOTrainer(str(tiny_model), args=config, rollout_source=source)
    trainer.train()
    assert trainer.state.global_step == 1


def test_saved_model_equals_trained_one(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = make_trainer(tiny_model, tmp_path, uniform_batch(tiny_model, 4, 2, 0))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    before = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    trained = trainer.model.state_dict()
    assert all(torch.equal(saved[name], trained[name]) for name in saved)
    assert not all(torch.equal(before[name], trained[name]) for name in saved)


def test_model_card_names_run(tiny_model, tmp_path):
    trainer = make_trainer(
        tiny_model, tmp_path, uniform_batch(tiny_model, 4, 2, 0), run_name="my-run", beta=0.1
    )
    trainer.train()
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "run" / "README.md").read_text()
    assert "- atropos" in card
    assert "run `my-run`, 1 of 1 steps" in card
    assert "recorded rollouts" in card
    assert "\nbeta: 0.1\n" in card
    assert f"{step_logs(trainer)[0]['reward']:.3f}" in card


# -------------------------------------------------------------------------------------------- model


def test_attention_softcap_is_used_in_training(tiny_model, tmp_path):
    """Which transformers' default attention leaves out, and vLLM does not."""
    family = FAMILIES["Gemma 2"]
    capped = dataclasses.replace(family, fields={**family.fields, "attn_logit_softcapping": 0.5})
    save_family(capped, tmp_path / "gemma")
    recording = record(tmp_path / "rollouts.jsonl", uniform_batch(tiny_model, 4, 2, 0))
    config = AtroposGRPOConfig(**arguments(tmp_path / "run", replay_paths=[recording], beta=0.1))
    trainer = AtroposGRPOTrainer(str(tmp_path / "gemma"), args=config)
    ids = torch.arange(200)[None]
    implementations = {"eager": 0.0, "sdpa": 0.0}
    with torch.no_grad():
        logits = [
            model.eval()(input_ids=ids).logits for model in (trainer.model, trainer.ref_model)
        ]
        for name in implementations:
            plain = AutoModelForCausalLM.from_pretrained(
                tmp_path / "gemma", attn_implementation=name
            ).eval()
            implementations[name] = max(
                (one - plain(input_ids=ids).logits).abs().max().item() for one in logits
            )
    assert implementations["eager"] == 0.0
    assert implementations["sdpa"] > 0.01


# ----------------------------------------------------------------------------------------- refusals


def test_unknown_balancing_loss_is_refused_with_fix(tmp_path):
    save_family(FAMILIES["GraniteMoE"], tmp_path / "granite")
    config = AtroposGRPOConfig(**arguments(tmp_path / "run", replay_paths=["unused"]))
    with pytest.raises(ValueError, match=r"granitemoe: set `router_aux_loss_coef: 0`"):
        AtroposGRPOTrainer(str(tmp_path / "granite"), args=config)


def test_model_split_over_gpus_is_refused_with_fix(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    # as `device_map="auto"` leaves it where two GPUs are seen
    model.hf_device_map = {"model": 0, "lm_head": 1}
    config = AtroposGRPOConfig(**arguments(tmp_path, replay_paths=["unused"]))
    with pytest.raises(
        ValueError, match=r"among several GPUs.*set `CUDA_VISIBLE_DEVICES` to one GPU, or start"
    ):
        AtroposGRPOTrainer(model, args=config)


@pytest.mark.parametrize("name", FIXES)
def test_meaningless_argument_is_refused_with_fix(tiny_model, tmp_path, name):
    config = AtroposGRPOConfig(**arguments(tmp_path, replay_paths=["unused"]))
    with pytest.raises(ValueError, match=f"`{name}` was given, but .*{FIXES[name]}"):
        AtroposGRPOTrainer(str(tiny_model), args=config, **{name: [object()]})


def test_trl_config_is_refused_with_fix(tiny_model, tmp_path):
    config = GRPOConfig(**arguments(tmp_path))
    with pytest.raises(
        ValueError, match=r"`args` is a GRPOConfig: pass `AtroposGRPOConfig\(output_dir=\.\.\."
    ):
        AtroposGRPOTrainer(str(tiny_model), args=config)


def test_prediction_is_refused(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, uniform_batch(tiny_model, 4, 2, 0))
    trainer.model.eval()
    with pytest.raises(RuntimeError, match="none to predict with"):
        trainer._generate_and_score_completions([{"prompt": ""}])


def test_saved_log_history_is_finite(tiny_model, tmp_path):
    trainer = make_trainer(
        tiny_model, tmp_path, mixed_batch(tiny_model), per_device_train_batch_size=16
    )
    trainer.train()
    trainer.save_state()
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert all(math.isfinite(value) for entry in history for value in entry.values())


# -------------------------------------------------------------------------------------------- noise

TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
NOISY = {
    "gpt2": ({"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}, "resid_dropout"),
    "gpt_bigcode": ({"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}, "attn_pdrop"),
    "opt": ({**TINY, "word_embed_proj_dim": 32, "ffn_dim": 64, "layerdrop": 0.5}, "layerdrop"),
    "seed_oss": (
        {**TINY, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16},
        "residual_dropout",
    ),
    "falcon": ({**TINY, "hidden_dropout": 0.1, "attention_dropout": 0.1}, "hidden_dropout"),
    "phimoe": (
        {**TINY, "intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4},
        "router_jitter_noise",
    ),
}


@pytest.mark.parametrize("name", NOISY)
def test_model_computes_alike_in_train_and_eval(name):
    settings, named = NOISY[name]
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings, **ids)).train()
    tokens = torch.randint(64, (4, 12))
    before = model(tokens, use_cache=False).logits
    assert not torch.equal(before, model(tokens, use_cache=False).logits)
    sampled = model.eval()(tokens, use_cache=False).logits
    assert named in silence(model)
    assert torch.equal(model(tokens, use_cache=False).logits, sampled)
    assert torch.equal(model.train()(tokens, use_cache=False).logits, sampled)


def test_attribute_misnamed_as_noise_is_restored(tiny_model, tmp_path, caplog):
    """Here, the first layer scales its output by what is called dropout."""
    with caplog.at_level("WARNING"):
        args = AtroposGRPOConfig(**arguments(tmp_path / "run", replay_paths=["none"]))
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        layer = model.model.layers[0]
        layer.scale_dropout, layer.self_attn.attention_dropout = 0.5, 0.1
        layer.register_forward_hook(
            lambda module, inputs, output: output * (1 - module.scale_dropout)
        )
        trainer = AtroposGRPOTrainer(model, args, rollout_source=ReplaySource([]))
        assert (layer.scale_dropout, layer.self_attn.attention_dropout) == (0.0, 0.0)
        trainer.computation.check()
    assert (layer.scale_dropout, layer.self_attn.attention_dropout) == (0.5, 0.0)
    assert (
        "`scale_dropout` stays at 0.5: with 0, the model would compute something else"
        in caplog.text
    )
    assert "`attention_dropout` stays" not in caplog.text


def test_noise_of_another_name_is_reported(tiny_model, tmp_path, caplog):
    with caplog.at_level("WARNING"):
        args = AtroposGRPOConfig(**arguments(tmp_path / "run", replay_paths=["none"]))
        trainer = AtroposGRPOTrainer(str(tiny_model), args, rollout_source=ReplaySource([]))
        trainer.computation.check()
        assert "noise" not in caplog.text
        layer = trainer.model.model.layers[0]
        shift = torch.linspace(-1, 1, trainer.model.config.hidden_size)
        layer.register_forward_hook(lambda module, inputs, output: output + module.training * shift)
        trainer.computation.check()
    assert "It has noise that is not called dropout or jitter" in caplog.text


def test_dropout_of_adapter_is_turned_off_and_told(tiny_model, tmp_path, caplog):
    adapter = LoraConfig(r=4, lora_dropout=0.05, target_modules="all-linear")
    with caplog.at_level("WARNING"):
        args = AtroposGRPOConfig(**arguments(tmp_path / "run", replay_paths=["none"]))
        trainer = AtroposGRPOTrainer(
            str(tiny_model), args, rollout_source=ReplaySource([]), peft_config=adapter
        )
    assert "off for training (lora_dropout 0.05), because the server samples without" in caplog.text
    assert all(
        module.p == 0 for module in trainer.model.modules() if isinstance(module, torch.nn.Dropout)
    )


def test_class_with_misnamed_backbone_takes_step(tiny_model, tmp_path):
    """Llama 4's; TRL would take the whole model for its backbone, which has no hidden states to
    score from."""
    folder = tmp_path / "llama4"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    settings = {
        **TINY,
        "vocab_size": len(tokenizer),
        "intermediate_size": 32,
        "intermediate_size_mlp": 32,
    }
    settings |= {
        "num_local_experts": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
    }
    settings |= {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama4_text", **settings)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    trainer = make_trainer(
        folder, tmp_path, uniform_batch(tiny_model, 4, 2, seed=0), router_aux_loss_coef=0.0
    )
    trainer.train()
    assert step_logs(trainer)[0]["grad_norm"] > 0


def test_installed_packages_are_not_looked_up_in_steps(tiny_model, tmp_path, monkeypatch):
    """accelerate would parse DeepSpeed's metadata several times in each."""

    class Asked(TrainerCallback):
        """Notes which packages are asked for while the second step is made."""

        names: list[str] | None = None

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                self.names = []
                monkeypatch.setattr(importlib.metadata, "metadata", self.find)

        def find(self, name: str):
            self.names.append(name)
            return found(name)

    found = importlib.metadata.metadata
    is_available = other.is_deepspeed_available
    asked = Asked()
    batches = [uniform_batch(tiny_model, 4, 2, seed) for seed in range(2)]
    trainer = make_trainer(tiny_model, tmp_path, *batches, max_steps=2)
    trainer.add_callback(asked)
    trainer.train()
    assert asked.names == []
    assert other.is_deepspeed_available is is_available
    other.is_deepspeed_available()
    assert asked.names == ["deepspeed"]


def test_checkpointing_options_outlast_scoring(tiny_model, tmp_path):
    """TRL switches checkpointing off while it scores a batch, and forgets Transformers' options."""
    batches = [uniform_batch(tiny_model, 4, 4, seed) for seed in range(2)]
    settings = {"per_device_train_batch_size": 16, "max_steps": 2}
    options = {"every_n_layers": 2, "selective": True}
    plain = {"gradient_checkpointing": True}
    logs = []
    hooks = []
    for more in ({}, plain, {**plain, "gradient_checkpointing_kwargs": options}):
        trainer = make_trainer(tiny_model, tmp_path / str(len(logs)), *batches, **settings, **more)
        trainer.train()
        logs.append([(entry["loss"], entry["grad_norm"]) for entry in step_logs(trainer)])
        hooks.append(len(trainer.model.get_input_embeddings()._forward_hooks))
    assert logs[2] == [pytest.approx(step, rel=1e-5, abs=1e-7) for step in logs[0]]
    checkpointed = [layer.gradient_checkpointing for layer in trainer.model.model.layers]
    assert checkpointed == [number % 2 == 0 for number in range(len(checkpointed))]
    assert sum(checkpointed) < len(checkpointed)
    checkpoint = trainer.model.model.layers[0]._gradient_checkpointing_func
    assert checkpoint.keywords.keys() == {"use_reentrant", "context_fn"}
    assert hooks[1] == hooks[2]  # those that TRL adds by itself


def test_offload_without_gpu_is_refused(tiny_model, tmp_path):
    batch = uniform_batch(tiny_model, 4, 4, 0)
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}
    with pytest.raises(ValueError, match="`offload`, which moves activations from a GPU"):
        make_trainer(tiny_model, tmp_path, batch, **settings)
