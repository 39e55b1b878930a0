"""The estimate of a run's memory against a GPU's own accounts, with a model of 0.6 billion
parameters.

Run as a module (`python -m tests.check.test_memory_gpu MODEL FOLDER CASE`), it trains and prints what the
allocator counted: each case in a process of its own, which begins with nothing.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.models import make_model
from tests.rollout_factory import arguments, record
from tests.server_process import running_server
from trl_atropos import AtroposGRPOTrainer
from trl_atropos.check.fit import Estimate, estimate
from trl_atropos.check.launch import Launch, case_of, plan_of
from trl_atropos.recipe import Recipe, parse
from trl_atropos.rollouts.wire_values import MASKED
from trl_atropos.weights.transfer import ROOM, leave_room

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

ROWS, LENGTH, PROMPT = 4, 2048, 16  # rows of a micro-batch; tokens
CASES = {
    "all of fp32": {"dtype": "float32"},
    "masters of bfloat16": {"dtype": "bfloat16"},
    "checkpointing, two micro-batches": {
        "dtype": "bfloat16",
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": 2,
    },
    "an adapter": {
        "dtype": "bfloat16",
        "use_peft": True,
        "lora_r": 16,
        "lora_target_modules": "all-linear",
    },
    "autocast": {"dtype": "float32", "bf16": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, "0.6B", "bfloat16")
    return str(folder)


def recipe_of(model: str, folder: Path, settings: dict) -> Recipe:
    draw = torch.Generator().manual_seed(0)
    number = ROWS * settings.get("gradient_accumulation_steps", 1)
    tokens = [torch.randint(256, (LENGTH,), generator=draw).tolist() for _ in range(number)]
    group = {
        "tokens": tokens,
        "masks": [[MASKED] * PROMPT + row[PROMPT:] for row in tokens],
        "scores": [float(i % 2) for i in range(number)],
        "inference_logprobs": [[-5.0] * len(row) for row in tokens],
        "env_id": 0,
    }
    record(folder / "rollouts.jsonl", [group], [group])
    run = arguments(
        folder / "run", max_steps=2, per_device_train_batch_size=ROWS, max_sequence_length=LENGTH
    )
    run |= {
        "model_name_or_path": model,
        "replay_paths": str(folder / "rollouts.jsonl"),
        "use_cpu": False,
    } | settings
    return parse([word for name, value in run.items() for word in (f"--{name}", str(value))])


def estimated(recipe: Recipe) -> Estimate:
    return estimate(case_of(recipe, plan_of(recipe.training, Launch())))


def train(model: str, folder: str, name: str) -> None:
    from trl import get_peft_config

    recipe = recipe_of(model, Path(folder), CASES[name])
    recipe.training.model_init_kwargs = {"dtype": recipe.model.dtype}
    trainer = AtroposGRPOTrainer(
        model, args=recipe.training, peft_config=get_peft_config(recipe.model)
    )
    trainer.train()
    dtypes = {str(parameter.dtype) for parameter in trainer.model.parameters()}
    free, total = torch.cuda.mem_get_info()
    told = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    print(
        json.dumps(
            {
                **told,
                "context": total - free - torch.cuda.memory_reserved(),
                "dtypes": sorted(dtypes),
            }
        )
    )


@pytest.mark.parametrize("name", CASES)
def test_trainer_peak_is_within_10_percent(name, model, tmp_path):
    command = [sys.executable, "-m", "tests.check.test_memory_gpu", model, str(tmp_path), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    found = estimated(recipe_of(model, tmp_path, CASES[name])).trainer
    expected = found.total - found.items["runtime"]
    items = ", ".join(f"{item} {size / 1e6:.0f}" for item, size in found.items.items())
    print(f"{name}: estimated {expected / 1e6:.0f} MB ({items}), measured {told}")
    assert told["allocated"] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    "flags", [[], ["--kv-cache-memory-bytes", str(4 << 30)]], ids=["a share", "a stated cache"]
)
def test_server_memory_is_within_10_percent(flags, model, tmp_path):
    flags = [
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "2048",
        "--gpu-memory-utilization",
        "0.2",
        *flags,
    ]
    content = {"start_vllm": True, "vllm_args": flags, "model_name_or_path": model, "max_steps": 1}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    found = estimated(
        parse(["--config", str(tmp_path / "recipe.yaml"), "--output_dir", str(tmp_path / "run")])
    ).server
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    with running_server(model, tmp_path / "logs", *flags) as server:
        assert server.generate(prompt="abcdefgh" * 50, n=8, max_tokens=8, temperature=1.0).ok
        taken = free - torch.cuda.mem_get_info()[0]
    print(f"server: estimated {found.total / 1e6:.0f} MB, taken {taken / 1e6:.0f}: {found.items}")
    assert taken == pytest.approx(found.total, rel=0.1)


def test_trainer_leaves_room_for_server_on_gpu():
    device, kept = torch.device("cuda"), []
    leave_room(device)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            while True:
                kept.append(torch.empty(1 << 30, dtype=torch.uint8, device=device))
        free, total = torch.cuda.mem_get_info(device)
        assert free >= 0.9 * ROOM * total
    finally:
        kept.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


if __name__ == "__main__":
    train(*sys.argv[1:])
