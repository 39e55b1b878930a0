"""`trl-atropos bench episodes`: how long a training step takes on what has common beginnings, with
each of them computed once and without.

The trainers take turns on the same sampled tokens, from the same weights. All of them must have the
same loss.
"""

import argparse
import gc
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.options import (
    add_rounds,
    aligned,
    give_result,
    list_of,
    model_size,
    new_parser,
    one_of,
    positive,
)
from trl_atropos import __version__
from trl_atropos.rollouts.rollout import Rollout, group_statistics
from trl_atropos.rollouts.tree import make_tree

DESCRIPTION = """\
Measure a training step on rollouts that begin alike, beside the same step that computes everything anew. Of two
optimizer steps the second is measured; times are medians of the rounds, in which all ways take turns.

  agent    episodes of many turns, whose template strips what was thought from the context: every turn branches off
             trees   an episode is one rollout (`branches`)
             rows    each turn is a rollout of its own, with the whole context before it
  prompt   a group with one long prompt
             shared  `share_prompts: true`
             apart   `share_prompts: false`
  plain    rollouts that have nothing in common; the ways are those of `prompt`, and must take as long

  tokens   that the model computes in a step, for each token of the rows
  speedup  over the last way of that case
  loss     of the first step; all ways of a case must have the same
"""
CASES = {"agent": ("trees", "rows"), "prompt": ("shared", "apart"), "plain": ("shared", "apart")}
VOCABULARY = 256
COLUMNS = {
    "case": "{}",
    "way": "{}",
    "rollouts": "{}",
    "row_tokens": "{}",
    "tokens": "{:.2f}",
    "step_ms": "{:.0f}",
    "speedup": "{:.2f}",
    "loss": "{:.6f}",
}


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("episodes", DESCRIPTION)

    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(
            name,
            type=positive,
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )

    parser.add_argument(
        "--params",
        type=model_size,
        default="2M",
        metavar="SIZE",
        help="of the model (default: %(default)s)",
    )
    parser.add_argument(
        "--cases",
        type=list_of(one_of(CASES)),
        default=",".join(CASES),
        metavar="LIST",
        help="default: %(default)s",
    )
    number("--groups", 1, "in an optimizer step")
    number("--group_size", 8, "episodes of a group")
    number("--turns", 20, "of an agent's episode")
    number("--visible", 24, "tokens of a turn's context, and again of its visible answer")
    number("--stripped", 24, "tokens of a turn that later contexts lack")
    number("--prompt", 256, "tokens of the prompt in the case `prompt`")
    number("--completion", 32, "tokens of each completion in the cases `prompt` and `plain`")
    number("--max_tokens", 16384, "of a micro-batch")
    add_rounds(parser, 3)
    parser.add_argument(
        "--gradient_checkpointing", action="store_true", help="as in training arguments"
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.groups * options.group_size % 2:
        parser.error("--groups times --group_size must be even")
    give_result(run, options, table)


def run(options: argparse.Namespace) -> dict:
    """Measures. Returns `header` and `rows`, one per case and way."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from transformers.utils.logging import disable_progress_bar

    from benchmarks.models import dtype, make_model
    from benchmarks.step_trainers import device_name

    disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory(prefix="trl_atropos_bench_") as folder:
        model = Path(folder, "model")
        make_model(model, options.params, dtype())
        for case in options.cases:
            rows += measure_case(case, model, Path(folder), options)
    packages = ("torch", "trl", "transformers")
    return {
        "header": {
            "trl_atropos": __version__,
            **{package: version(package) for package in packages},
            "device": device_name(),
            "cpus": len(os.sched_getaffinity(0)),
            "params": options.params,
        },
        "rows": rows,
    }


class Measured(NamedTuple):
    """One run of a trainer."""

    seconds: float  # of the second step
    tokens: int  # that it computed
    loss: float  # of the first step


def measure_case(
    case: str, model: Path, folder: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Lets the ways of a case take turns."""
    ways = CASES[case]
    episodes = MAKERS[case](options)
    batches = dict.fromkeys(ways, episodes)
    if case == "agent":
        batches["rows"] = paths_of(episodes)
    row_tokens = sum(len(rollout.row) for rollout in batches[ways[-1]])
    runs: dict[str, list[Measured]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way in ways:
            shares = way in ("trees", "shared")
            run = _train(model, folder / f"{case}-{way}", batches[way], shares, options)
            runs[way].append(run)
            gc.collect()
    seconds = {way: statistics.median(run.seconds for run in runs[way]) for way in ways}
    rows = []
    for way in ways:
        rows.append(
            {
                "case": case,
                "way": way,
                "rollouts": len(batches[way]),
                "row_tokens": row_tokens,
                "tokens": runs[way][0].tokens / row_tokens,
                "step_ms": seconds[way] * 1e3,
                "speedup": seconds[ways[-1]] / seconds[way],
                "loss": runs[way][0].loss,
            }
        )
    return rows


def _train(
    model: Path,
    folder: Path,
    rollouts: list[Rollout],
    shares: bool,
    options: argparse.Namespace,
) -> Measured:
    import torch
    from transformers import PrinterCallback

    from benchmarks.models import dtype
    from benchmarks.step_trainers import STEPS, OneBatch, StepTime
    from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer

    cuda = torch.cuda.is_available()
    config = AtroposGRPOConfig(
        output_dir=str(folder),
        max_steps=STEPS + cuda,  # one more counts kernels
        per_device_train_batch_size=len(rollouts),
        gradient_checkpointing=options.gradient_checkpointing,
        learning_rate=1e-6,
        loss_type="dapo",
        model_init_kwargs={"dtype": dtype()},
        vllm_importance_sampling_mode="token_truncate",
        max_tokens_per_micro_batch=options.max_tokens,
        share_prompts=shares,
        replay_paths=["given as rollout_source"],
        master_weights=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not cuda,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = AtroposGRPOTrainer(str(model), args=config, rollout_source=OneBatch(rollouts))
    clock = StepTime()
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(clock)
    clock.watch(trainer.model)
    trainer.train()
    return Measured(clock.step, clock.tokens, trainer.state.log_history[0]["loss"])


# ----------------------------------------------------------------------------------------- rollouts


def agents(options: argparse.Namespace) -> list[Rollout]:
    """Episodes of agents whose contexts lack what they thought in earlier turns. All episodes of a
    group begin with the same context."""
    turn = 2 * options.visible + options.stripped
    lengths = [turn] * options.turns
    parents = [number - 1 for number in range(options.turns)]
    # of the turn before: what that shared, and then its own context
    shared = [number * options.visible for number in range(options.turns)]
    tree = make_tree(lengths, parents, shared)
    draw = np.random.default_rng(0)
    trained = np.arange(turn) >= options.visible
    mask = np.tile(trained, options.turns)
    rollouts = []
    for group in range(options.groups):
        context = draw.integers(0, VOCABULARY, options.visible)
        for score in draw.normal(size=options.group_size):
            ids = draw.integers(0, VOCABULARY, len(mask))
            ids[: options.visible] = context
            rollouts.append(_rollout(draw, ids, mask, options.visible, group, score, tree))
    return _with_group_means(rollouts)


def prompted(options: argparse.Namespace) -> list[Rollout]:
    """Groups with one long prompt each."""
    return _plain(options, options.prompt, same_prompt=True)


def plain(options: argparse.Namespace) -> list[Rollout]:
    """Rollouts that have nothing in common."""
    return _plain(options, options.completion, same_prompt=False)


def _plain(options: argparse.Namespace, prompt_length: int, same_prompt: bool) -> list[Rollout]:
    draw = np.random.default_rng(0)
    length = prompt_length + options.completion
    mask = np.arange(length) >= prompt_length
    rollouts = []
    for group in range(options.groups):
        prompt = draw.integers(0, VOCABULARY, prompt_length)
        for score in draw.normal(size=options.group_size):
            ids = draw.integers(0, VOCABULARY, length)
            if same_prompt:
                ids[:prompt_length] = prompt
            else:
                ids[0] = len(rollouts) % VOCABULARY  # no two begin alike
            rollouts.append(_rollout(draw, ids, mask, prompt_length, group, score))
    return _with_group_means(rollouts)


MAKERS: dict[str, Callable[[argparse.Namespace], list[Rollout]]] = {
    "agent": agents,
    "prompt": prompted,
    "plain": plain,
}


def _rollout(draw, ids, mask, prompt_length, group, score, tree=None) -> Rollout:
    completion = mask[prompt_length:]
    logprobs = np.where(completion, -5 - draw.random(len(completion)), np.nan)
    return Rollout(
        ids[:prompt_length].astype(np.int32),
        ids[prompt_length:].astype(np.int32),
        completion,
        logprobs.astype(np.float32),
        score=float(score),
        group_mean=0.0,
        group_std=0.0,
        token_advantages=None,
        zero_advantage=False,
        env_id=0,
        staleness=0,
        group=group,
        tree=tree,
    )


def _with_group_means(rollouts: list[Rollout]) -> list[Rollout]:
    scores: dict[int, list[float]] = {}
    for rollout in rollouts:
        scores.setdefault(rollout.group, []).append(rollout.score)
    for rollout in rollouts:
        rollout.group_mean, rollout.group_std = group_statistics(scores[rollout.group])
    return rollouts


def paths_of(episodes: list[Rollout]) -> list[Rollout]:
    """Each part's path as a rollout of its own, which trains what the part trains."""
    rows = []
    for episode in episodes:
        begin_of_completion = len(episode.prompt_ids)
        mask = np.concatenate([np.zeros(begin_of_completion, bool), episode.mask])
        for part, path in enumerate(episode.tree.paths):
            own = np.zeros(len(path), dtype=bool)
            own[-episode.tree.lengths[part] :] = True
            trained = own & mask[path]
            begin = int(trained.argmax())
            ids = episode.row[path]
            columns = path[begin:] - begin_of_completion
            logprobs = np.where(trained[begin:], episode.logprobs[columns], np.float32(np.nan))
            row = replace(
                episode,
                prompt_ids=ids[:begin],
                completion_ids=ids[begin:],
                mask=trained[begin:],
                logprobs=logprobs,
                tree=None,
            )
            rows.append(row)
    return rows


def table(result: dict) -> str:
    """The result as lines of text."""
    header = " ".join(f"{name}={value}" for name, value in result["header"].items())
    return "\n".join([header, "", *aligned(result["rows"], COLUMNS), ""])
