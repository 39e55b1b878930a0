"""The folder of a run of any size, written by the code that writes it in a run: `RunLog`, `Health`,
`Spool` and `TrainerLogprobs`.

python -m tests.report.synthetic_run FOLDER [--steps 1000]
"""

import argparse
import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from transformers import GenerationConfig, TrainerState

from recipes.quickstart.make_model import byte_tokenizer
from trl_atropos import AtroposGRPOConfig
from trl_atropos.metrics.health import Health
from trl_atropos.report.run_log import RunLog
from trl_atropos.rollouts.reward_parts import part_means
from trl_atropos.rollouts.rollout import Rollout, group_statistics
from trl_atropos.rollouts.selection import Accounting
from trl_atropos.rollouts.spool import Delivery, FileHeader, Spool
from trl_atropos.rollouts.trainer_logprobs import TrainerLogprobs
from trl_atropos.rollouts.tree import NO_PARENT, Tree, make_tree
from trl_atropos.services.evaluations import Result

GROUP, GROUPS = 8, 8  # rollouts of a group, groups of a step
PATH = [["a", 0]]
HOSTILE = "</script><script>window.hacked = true</script><img src=x onerror='window.hacked = true'>"
TASKS = ("Say the first letter: ", "Count to three. ", "Grüße an 東京! ")


def make_run(
    folder: Path,
    steps: int,
    *,
    end: bool = True,
    every: int = 1,
    name: str = "synthetic",
    branches: bool = False,
) -> Path:
    """
    A run that learned for `steps` steps on two environments, the second with two turns. The last
    batch is on disk and waits.

    Args:
        end: whether it came to its end.
        every: steps between two entries of the log.
        branches: whether the second turn leaves the prompt, in place of following the first one.
    """
    rng = np.random.default_rng(0)
    config = AtroposGRPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        run_name=name,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    state, log = TrainerState(max_steps=steps), RunLog(folder, {"model_name_or_path": HOSTILE})
    model = SimpleNamespace(generation_config=GenerationConfig(eos_token_id=None))
    log.on_train_begin(config, state, None, model=model, processing_class=_tokenizer())
    spool, health, books = Spool(folder / "rollouts", 1e12), Health({}, ()), Accounting()
    trainer = TrainerLogprobs(spool.folder)
    for step in range(steps + 1):
        first = [step * 64 + group * GROUP for group in range(GROUPS)]
        rows = [row for number in first for row in _group(rng, step, steps, number)]
        for row in rows:
            if branches and row.env_id:
                row.tree = _tree(row)
        region = Delivery("synthetic", step, step * 64, 64, 1, 0)
        if step % max(1, steps // 3) == 0:  # it ends when training is already at the next step
            log.evaluation(found := _evaluation(step, steps))
            log.on_log(config, TrainerState(global_step=step), None, logs=found.logs())
            log.evaluation(_graded_evaluation(step, steps))
        spool.append(FileHeader(step * 64, 64, region, {}, 0, PATH, max(0, step - 1)), rows)
        if step == steps:
            break
        books.trained += 64
        state.global_step = step
        log.batch(rows, step, {"spool": spool.name, "lineage": PATH, "books": vars(books)})
        trainer.write(rows, _scored(rows, step))
        health.check({"zero_variance": float(step % 400 < 10)})
        state.global_step = step + 1
        if state.global_step % every == 0:
            log.on_log(config, state, None, logs=_logs(rng, step, steps, rows))
    if end:
        log.on_train_end(config, state, None)
    return folder


@cache
def _tokenizer():
    return byte_tokenizer()


@cache
def _ids(text: str) -> np.ndarray:
    return np.array(_tokenizer()(text)["input_ids"], np.int32)


def _group(rng: np.random.Generator, step: int, steps: int, number: int) -> list[Rollout]:
    environment = number // GROUP % 2
    progress = step / max(1, steps)
    scores = (
        np.clip(rng.normal(progress * (0.9 - 0.3 * environment), 0.15, GROUP), 0, 1)
        .round(3)
        .tolist()
    )
    mean, std = group_statistics(scores)
    prompt = np.concatenate([_ids(TASKS[number % len(TASKS)]), rng.choice(_ids("0123456789"), 5)])
    return [
        Rollout(
            prompt_ids=prompt,
            score=score,
            group_mean=mean,
            group_std=std,
            zero_advantage=False,
            env_id=environment,
            environment="tools" if environment else None,
            policy_version=max(0, step - 1),
            newest_version=step if environment else max(0, step - 1),
            group=number,
            messages=f'[{{"role": "user", "content": "{HOSTILE}"}}]' if environment else None,
            rewards={"format": float(score > 0.3), "length": score} if environment else None,
            **_completion(rng, environment),
        )
        for score in scores
    ]


def _completion(rng: np.random.Generator, environment: int) -> dict[str, np.ndarray | None]:
    """One turn with random letters, or two with a tool's answer between them."""
    said = rng.choice(_ids("abc def\n"), rng.integers(20, 90))
    told, after = (_ids(HOSTILE), _ids("done<|end|>")) if environment else (said[:0], said[:0])
    ids = np.concatenate([said, told, after])
    mask = np.repeat([True, False, True], [len(said), len(told), len(after)])
    logprobs = np.where(mask, -rng.exponential(1.2, len(ids)), np.nan).astype(np.float32)
    advantages = (
        rng.normal(0, 1, len(ids)).astype(np.float32)
        if environment and rng.random() < 0.2
        else None
    )
    return {
        "completion_ids": ids,
        "mask": mask,
        "logprobs": logprobs,
        "token_advantages": advantages,
    }


def _tree(row: Rollout) -> Tree:
    """The tool's answer begins a part that leaves the first one behind its first token."""
    first = len(row.prompt_ids) + int(row.mask.argmin())
    return make_tree([first, len(row.row) - first], [NO_PARENT, 0], [0, 1])


def _evaluation(step: int, steps: int) -> Result:
    share = 0.1 + 0.6 * step / steps
    found = {
        "pass@1": share,
        "pass@1_low": share - 0.05,
        "pass@1_high": share + 0.1,
        "pass@4": share + 0.2,
    }
    if step:
        found |= {"gain": share - 0.1, "gain_low": share - 0.2, "gain_high": share}
    return Result(
        "held_out", step, found | {"problems": 50, "failed": 0}, (step, min(step + 1, steps)), 2.0
    )


def _graded_evaluation(step: int, steps: int) -> Result:
    """Of partial scores, none of which passes."""
    mean = 0.01 + 0.339 * step / steps
    found = {"pass@1": 0.0, "pass@1_low": 0.0, "pass@1_high": 0.07, "pass@2": 0.0}
    found |= {"avg@2": mean, "avg@2_low": mean - 0.005, "avg@2_high": mean + 0.005}
    if step:
        found |= {"gain": 0.0, "gain_low": 0.0, "gain_high": 0.0}
        found |= {"mean_gain": mean - 0.01, "mean_gain_low": mean - 0.02, "mean_gain_high": mean}
    return Result(
        "partial", step, found | {"problems": 50, "failed": 0}, (step, step), 2.0, passes_above=0.9
    )


def _scored(rows: list[Rollout], step: int) -> np.ndarray:
    """What the trainer makes of rows, padded as in a run: near the sampler, on a token here and
    there far from it."""
    rng = np.random.default_rng(step)
    values = np.full((len(rows), max(len(row.logprobs) for row in rows)), np.nan, np.float32)
    for own, row in zip(values, rows):
        n = len(row.logprobs)
        own[:n] = (
            row.logprobs + rng.normal(0, 0.02, n) - (rng.random(n) < 0.03) * rng.exponential(0.6, n)
        )
    return values


def _logs(rng: np.random.Generator, step: int, steps: int, rows: list[Rollout]) -> dict[str, float]:
    scores, lengths = [row.score for row in rows], [len(row.completion_ids) for row in rows]
    wait, compute = 1.5 + math.sin(step / 60) ** 2, 2.0 + 0.3 * rng.random()
    return {
        "loss": -0.05 + 0.02 * rng.normal(),
        "grad_norm": 1 + 0.3 * rng.random(),
        "learning_rate": 1e-6,
        "entropy": 2.5 - 1.5 * step / steps,
        "reward": float(np.mean(scores)),
        "reward_std": float(np.std(scores)),
        "completions/mean_length": float(np.mean(lengths)),
        "completions/max_length": float(max(lengths)),
        "rollouts/staleness_mean": 1.0,
        "rollouts/staleness_max": 1.0 + (step % 7 == 0),
        "health/logprob_gap": 0.02 + 0.005 * rng.random(),
        "health/logprob_gap_fresh": 0.01 + 0.002 * rng.random(),
        "sampling/logprob_gap/max": 0.3 + 0.1 * rng.random(),
        "policy/probe_max_abs_diff": 1e-6 * (1 + rng.random()),
        "time/wait_for_rollouts": wait,
        "time/ingest": 0.1,
        "time/forward_backward": compute,
        "time/optimizer": 0.2,
        "time/publish": 0.05 + 0.02 * rng.random(),
        "time/other": 0.1,
        "speed/trained_tokens_per_second": 5100.0,
        "speed/sampled_tokens_per_second": 4800.0,
        "time/step": wait + compute + 0.47,
        "environment/tools/train/calls": float(step % 5),
        "environment/tools/episodes/ended": 60.0,
        "environment/tools/episodes/timeout": 4.0,
        "sessions/opened": 64.0,
        "sessions/ended_deleted": 63.0,
        "sessions/ended_deadline": 1.0,
        "sessions/calls": 200.0,
        "sessions/tokens": 10_000.0,
        "sessions/marked_temperature_0": 100.0 * (step % 3 == 0),
        "sessions/refused_calls_at_a_time": 2.0,
        **part_means(rows),
    } | {f"health/further_{i}": rng.random() for i in range(40)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    make_run(options.folder, options.steps)
