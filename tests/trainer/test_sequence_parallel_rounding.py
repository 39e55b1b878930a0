"""Gradients in bfloat16 of rows that two processes divide are as near to the exact ones as those of
one process. The exact ones are computed in float32, from the same weights.

`main` is what each process does. On the CPU with gloo, and on two GPUs with NCCL and the kernels of
long rows.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.episodes import agents
from benchmarks.step_trainers import make_rows
from recipes.quickstart.make_model import make_model
from tests import ROOT
from tests.sharded import launch
from tests.trainer.test_trees import Gradients, train
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.services.addresses import free_port

TURNS = 4
TWO, ONE, EXACT = WAYS = ("two", "one", "exact")  # to compute the gradients
FARTHER = 1.1  # times as far from the exact gradients as one process is: all of them together,
FARTHER_ALONE = 1.5  # and those of one weight


@dataclass(frozen=True)
class Shape:
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


def batches_of(tokens: int) -> list[list[Rollout]]:
    """A batch of rollouts of so many tokens, and one of episodes that branch."""
    plain = argparse.Namespace(rows=4, group_size=4, prompt=16, median=tokens - 16, longest=tokens)
    branching = argparse.Namespace(
        turns=TURNS,
        visible=tokens // (4 * TURNS),
        stripped=tokens // (4 * TURNS),
        groups=1,
        group_size=4,
    )
    return [make_rows("equal", plain), agents(branching)]


def main(model: str, folder: str, way: str, tokens: str) -> None:
    dtype = "float32" if way == EXACT else "bfloat16"
    gradients, _ = train(
        Path(model),
        Path(folder, way),
        batches_of(int(tokens)),
        vllm_mode="server",  # `colocate` cannot divide rows
        vllm_importance_sampling_mode="token_truncate",
        model_init_kwargs={"dtype": dtype},
        use_cpu=not torch.cuda.is_available(),
        max_completion_length=int(tokens),
    )
    if os.environ.get("RANK", "0") == "0":
        torch.save(gradients, Path(folder, f"{way}.pt"))


def start(way: str, gpus: str, model: Path, folder: Path, tokens: int) -> subprocess.Popen:
    """Starts the processes that compute the gradients in one way, on these GPUs."""
    command = [sys.executable]
    if way == TWO:
        command += ["-m", "accelerate.commands.accelerate_cli", "launch", "--quiet"]
        command += ["--config_file", "configs/accelerate/sp2.yaml"]
        command += ["--main_process_port", str(free_port())]
    command += ["-m", __name__, str(model), str(folder), way, str(tokens)]
    with Path(folder, f"{way}.log").open("w") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus},
            start_new_session=True,
        )


def compute_on_gpus(ways: dict[str, str], model: Path, folder: Path, tokens: int) -> None:
    """Computes the gradients in each of the ways at once, each on the GPUs that it has."""
    processes = {way: start(way, gpus, model, folder, tokens) for way, gpus in ways.items()}
    try:
        for way, process in processes.items():
            assert process.wait(500) == 0, Path(folder, f"{way}.log").read_text()[-4000:]
    finally:
        for process in processes.values():
            process.terminate()
            process.wait(60)


def distance(found: Gradients, exact: Gradients, names: list[str]) -> float:
    squares = sum((found[name].double() - exact[name].double()).square().sum() for name in names)
    return float(squares.sqrt())


def require_as_near(folder: Path) -> None:
    """Compares the gradients that are in the folder."""
    two, one, exact = (torch.load(folder / f"{way}.pt", map_location="cpu") for way in WAYS)
    for of_two, of_one, right in zip(two, one, exact, strict=True):
        names = list(right)
        size = distance({name: torch.zeros(()) for name in names}, right, names)
        far = distance(of_one, right, names)
        assert 0 < far < 0.1 * size  # rounding, and no mistake
        ratio = distance(of_two, right, names) / far
        print(f"one process is {far / size:.1e} from the exact gradients, two {ratio:.3f} of it")
        assert ratio <= FARTHER
        for name in names:
            alone = distance(of_one, right, [name])
            assert distance(of_two, right, [name]) <= FARTHER_ALONE * alone, name


@pytest.mark.slow
def test_divided_rows_are_as_exact_as_whole_ones(tmp_path):
    model, tokens = tmp_path / "model", "256"
    make_model(str(model), 0, **asdict(Shape(64, 128, 2, 4, 2, 16)), dtype="bfloat16")
    for way in (EXACT, ONE):
        main(str(model), str(tmp_path), way, tokens)
    launch("ddp", 2, __name__, str(model), str(tmp_path), TWO, tokens, sp_size=2)
    require_as_near(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.timeout(600)
def test_divided_rows_are_as_exact_as_whole_ones_on_gpus(tmp_path):
    """Three layers of Qwen3-4B's shape, rows of 6,144 tokens."""
    model, tokens = tmp_path / "model", 6144
    make_model(str(model), 0, **asdict(Shape(2560, 9728, 3, 32, 8, 128)), dtype="bfloat16")
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    gpus = {EXACT: names[0], ONE: names[1], TWO: ",".join(names[:2])}
    compute_on_gpus(gpus, model, tmp_path, tokens)
    require_as_near(tmp_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
