"""Trains a model on the CPU and prints how much memory it took at most, case by case: what
`test_memory.py` runs.

    python -m tests.check.peak_memory MODEL TINY_MODEL FOLDER '{"name": {"setting": value}}'

A line of JSON per case: its name, and bytes above what the process had before the model was loaded.
So that this is
repeatable, freed tensors go back to the system at once (`MALLOC` in `test_memory.py`), and
everything that is imported on the way is, by a run of the tiny model before the first case.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch

from tests.rollout_factory import Group, arguments, record
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.recipe import parse
from trl_atropos.rollouts.wire_values import MASKED

LENGTH, PROMPT = 128, 16  # tokens


def rows(length: int, seed: int) -> list[Group]:
    """A batch of two, the second a little shorter, so that there is padding."""
    draw = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(256, (size,), generator=draw).tolist() for size in (length, length - 8)]
    return [
        {
            "tokens": tokens,
            "masks": [[MASKED] * PROMPT + row[PROMPT:] for row in tokens],
            "scores": [0.0, 1.0],
            "inference_logprobs": [[-5.0] * len(row) for row in tokens],
            "env_id": 0,
        }
    ]


def command_line(model: str, folder: Path, settings: dict) -> list[str]:
    """What `trl_atropos.train` and `trl-atropos check` would be started with, to train two
    steps."""
    accumulated = settings.get("gradient_accumulation_steps", 1)
    recording = folder / "rollouts.jsonl"
    if not recording.exists():
        record(recording, *[rows(LENGTH, seed) for seed in range(2 * accumulated)])
    run = arguments(
        folder / "run", max_steps=2, per_device_train_batch_size=2, max_sequence_length=LENGTH
    )
    run |= {"model_name_or_path": model, "replay_paths": str(recording)} | settings
    return [word for name, value in run.items() for word in (f"--{name}", str(value))]


def peak_bytes(model: str, folder: Path, settings: dict) -> int:
    """By which the resident memory exceeds, at most while training, what it is now."""
    recipe = parse(command_line(model, folder, settings))
    before = resident("VmRSS")
    trainer = make_trainer(recipe)
    settle()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    trainer.train()
    return resident("VmHWM") - before


def make_trainer(recipe) -> AtroposGRPOTrainer:
    from trl import get_peft_config

    training: AtroposGRPOConfig = recipe.training
    training.model_init_kwargs = {"dtype": recipe.model.dtype}
    return AtroposGRPOTrainer(
        recipe.model.model_name_or_path, args=training, peft_config=get_peft_config(recipe.model)
    )


def settle() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident(field: str) -> int:
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{field}:")
    ]
    return int(line.split()[1]) * 1024


def main(model: str, tiny: str, folder: str, cases: str) -> None:
    torch.set_num_threads(1)
    wanted = json.loads(cases)
    for number, (name, settings) in enumerate([("", next(iter(wanted.values()))), *wanted.items()]):
        here = Path(folder) / str(number)
        here.mkdir()
        settle()
        peak = peak_bytes(model if name else tiny, here, settings)
        if name:
            print(json.dumps({"name": name, "bytes": peak}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
