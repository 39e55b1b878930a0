"""`trl-atropos bench loop --against trl`: the whole loop, beside TRL's own `GRPOTrainer` with vLLM
in its process.

Both train the same model on the same task, rollouts that are really sampled: ours by `accelerate
launch` and the recipe `recipes/gsm8k/colocate.yaml` as it is shipped, with model, environment and
size of a batch replaced; TRL's by
this file (`python -m benchmarks.against_trl FOLDER`), with its own defaults. The sides run one
    after the other.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from benchmarks.models import dtype, make_model
from benchmarks.options import aligned
from benchmarks.processes import ROOT, launched, run_to_end, run_variables
from trl_atropos import __version__
from trl_atropos.services.signals import install_handlers

RECIPE = ROOT / "recipes/gsm8k/colocate.yaml"
ENVIRONMENT = ROOT / "recipes/quickstart/environment.py"
ONE_AHEAD = {"max_batches_offpolicy": 1}
TWO_SERVERS = {
    "vllm_mode": "server",
    "dtype": "bfloat16",
    "vllm_args": ["--max-model-len", "2048", "--kv-cache-memory-bytes", "8G"]
    + ["--gpu-memory-utilization", "0.2"],  # as much has to be free when the second one starts
}
# Nothing is learnt from log-probabilities that are made up, and no probe would find them right.
NO_LOGPROBS = {"learning_rate": 0.0, "probe_every_n_steps": 0}
NO_LOGPROBS_FLAGS = ["--middleware", "benchmarks.loop_no_logprobs.WithoutLogprobs"]
SIDES = {  # and the settings of the environment and of the run that differ from the recipe's
    "ours": ({}, {}),
    "turns": ({}, {"mps": False}),
    "two_servers": ({}, TWO_SERVERS),
    "one_ahead": (ONE_AHEAD, {"hold_requests": False}),
    "strict": (ONE_AHEAD, {"max_staleness": 0}),
    "no_logprobs": ({}, NO_LOGPROBS),
    "trl": ({}, {}),
}
COLUMNS = {  # of the table: field, and how it is written
    "side": "{}",
    "step_s": "{:.2f}",
    "wait_s": "{:.2f}",
    "compute_s": "{:.2f}",
    "publish_ms": "{:.1f}",
    "sampled_per_s": "{:.0f}",
    "trained_per_s": "{:.0f}",
    "mfu": "{:.1%}",
    "staleness": "{:.2f}",
    "memory_gb": "{:.1f}",
    "speedup": "{:.2f}",
    "of_no_logprobs": "{:.2f}",
}
# steps that do not count: kernels are compiled, and the first batch is sampled with nothing else to
# do
WARM_UP = 2
PROMPT = 4  # tokens
LOOK_EVERY = 0.2  # seconds


def run(options: argparse.Namespace) -> dict:
    """Measures. Returns versions, sizes, and a row for each side."""
    import torch

    install_handlers()
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="trl_atropos_bench_") as name:
        folder = Path(name)
        make_model(folder / "model", options.params, dtype())
        rows = []
        for side in options.sides:
            rows.append(_measure(folder / side, folder / "model", side, options, cuda))
            sys.stderr.write("\n".join(aligned(rows[-1:], COLUMNS)) + "\n")
    rates = {row["side"]: row["sampled_per_s"] for row in rows}
    for row in rows:
        for name, side in (("speedup", "trl"), ("of_no_logprobs", "no_logprobs")):
            row[name] = row["sampled_per_s"] / rates[side] if side in rates else None
    return {
        "trl_atropos": __version__,
        **{package: version(package) for package in ("torch", "trl", "transformers")},
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "params": options.params,
        "rollouts": options.sequences,
        "tokens": options.tokens,
        "steps": options.steps,
        "rows": rows,
    }


def _measure(
    folder: Path, model: Path, side: str, options: argparse.Namespace, cuda: bool
) -> dict[str, Any]:
    folder.mkdir()
    settings = {
        "model": str(model),
        "rollouts": options.sequences,
        "group_size": options.group_size,
        "tokens": options.tokens,
        "steps": WARM_UP + options.steps,
        "micro_batch": options.micro_batch,
        "seed": options.seed,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    if side == "trl":
        command = [sys.executable, "-m", "benchmarks.against_trl", str(folder)]
    else:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe_of(folder, settings, side, cuda)))
        words = ["-m", "trl_atropos.train", "--config", str(folder / "recipe.yaml")]
        config = "single_gpu.yaml" if cuda else "cpu.yaml"
        gpus = [os.environ["CUDA_VISIBLE_DEVICES"]] if cuda else []
        command = launched(config, *words, gpus=gpus)
    began = time.monotonic()
    with Peak() as peak:
        run_to_end(
            f"trl-atropos bench loop: {side}",
            command,
            folder / "log.txt",
            options.timeout,
            run_variables(),
            folder,
        )
    steps = read_logs(folder / "run" / "run_log.jsonl" if side != "trl" else folder / "logs.jsonl")[
        WARM_UP:
    ]
    return {
        "side": side,
        **summary(steps),
        "memory_gb": peak.gigabytes,
        "wall_s": time.monotonic() - began,
    }


class Peak:
    """Most memory of the GPU that was taken at any time within the context, by all processes."""

    def __init__(self):
        self.gigabytes: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        import torch

        while torch.cuda.is_available() and not self._over.wait(LOOK_EVERY):
            # of NVML: this process shall not have CUDA running
            used = torch.cuda.device_memory_used(0)
            self.gigabytes = max(self.gigabytes or 0.0, used / 1e9)


def recipe_of(folder: Path, settings: dict[str, Any], side: str, cuda: bool) -> dict[str, Any]:
    """The shipped recipe, for this model and this task."""
    from trl_atropos.services.addresses import free_port

    recipe = yaml.safe_load(RECIPE.read_text())
    recipe.pop("evaluations", None)  # which TRL's side would not have
    length, (of_environment, own) = PROMPT + settings["tokens"], SIDES[side]
    environment = recipe["environments"][0]["config"] | {
        "max_new_tokens": settings["tokens"],
        "group_size": settings["group_size"],
        "max_token_length": length,
        **of_environment,
    }
    recipe |= {
        "model_name_or_path": settings["model"],
        "output_dir": str(folder / "run"),
        "environments": [{"path": str(ENVIRONMENT), "config": environment}],
        "vllm_server_base_url": [
            f"http://127.0.0.1:{free_port()}" for _ in range(1 + (side == "two_servers"))
        ],
        "atropos_url": f"http://127.0.0.1:{free_port()}",
        "max_steps": settings["steps"],
        "per_device_train_batch_size": settings["rollouts"],
        "gradient_accumulation_steps": 1,
        "max_completion_length": settings["tokens"],
        "save_strategy": "no",
        "report_to": "none",
        "seed": settings["seed"],
        "warning_thresholds": {"truncated": 1},
        **own,
    }
    if not cuda:
        recipe["vllm_args"] = ["--max-model-len", str(max(512, length)), "--enforce-eager"]
        recipe["dtype"] = "float32"
        recipe["env"] = {
            "OMP_NUM_THREADS": 1,
            "VLLM_CPU_KVCACHE_SPACE": 1,
            "TOKENIZERS_PARALLELISM": "false",
        }
    if side == "no_logprobs":
        recipe["vllm_args"] = [*recipe["vllm_args"], *NO_LOGPROBS_FLAGS]
    return recipe


def read_logs(path: Path) -> list[dict[str, float]]:
    """What was logged of each step."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [entry["logs"] for entry in entries if "reward" in entry.get("logs", {})]


def summary(steps: list[dict[str, float]]) -> dict[str, float | None]:
    """Means of the steps; of the publish, which a few are probed after, the median."""

    def mean(name: str) -> float | None:
        values = [step[name] for step in steps if name in step]
        return statistics.mean(values) if values else None

    def per_second(name: str) -> float:
        """Over all steps: the mean of their speeds would count the short ones too often."""
        tokens = sum(step[f"speed/{name}_tokens_per_second"] * step["time/step"] for step in steps)
        return tokens / sum(step["time/step"] for step in steps)

    publishes = [step["time/publish"] for step in steps if "time/publish" in step]
    return {
        "step_s": mean("time/step"),
        "wait_s": mean("time/wait_for_rollouts"),
        "compute_s": mean("time/forward_backward"),
        "publish_ms": statistics.median(publishes) * 1e3 if publishes else None,
        "sampled_per_s": per_second("sampled"),
        "trained_per_s": per_second("trained"),
        "mfu": mean("speed/mfu"),
        "staleness": mean("rollouts/staleness_mean"),
    }


def table(result: dict) -> str:
    """The result as lines of text."""
    names = ("trl_atropos", "torch", "trl", "transformers", "device")
    lines = [
        " ".join(f"{name}={result[name]}" for name in names),
        f"{result['params']} parameters, {result['rollouts']} rollouts of at most "
        f"{result['tokens']} tokens, means of {result['steps']} steps",
        "",
        *aligned(result["rows"], COLUMNS),
    ]
    return "\n".join(lines) + "\n"


# ----------------------------------------------------------------------------------- TRL's own loop


def train_by_trl(folder: Path) -> None:
    """Trains with TRL's `GRPOTrainer` and its defaults, and writes what each step took."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, str(ENVIRONMENT.parent))
    from environment import LETTERS, score

    settings = json.loads((folder / "settings.json").read_text())
    cuda = torch.cuda.is_available()
    rollouts = settings["rollouts"]
    rng = random.Random(settings["seed"])
    number = (settings["steps"] + 1) * rollouts // settings["group_size"]
    prompts = ["".join(rng.choice(LETTERS) for _ in range(3)) + "=" for _ in range(number)]
    vllm = (
        {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.35}
        if cuda
        else {}
    )

    class Clock(TrainerCallback):
        began = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            if cuda:
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds = now - self.began
            self.began = now

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "reward" in logs:
                tokens = logs["completions/mean_length"] * rollouts
                speed = {
                    "time/step": self.seconds,
                    "speed/sampled_tokens_per_second": tokens / self.seconds,
                }
                speed["speed/trained_tokens_per_second"] = (
                    tokens + PROMPT * rollouts
                ) / self.seconds
                with (folder / "logs.jsonl").open("a") as file:
                    file.write(json.dumps({"logs": logs | speed}) + "\n")

    GRPOTrainer(
        settings["model"],
        reward_funcs=[lambda prompts, completions, **_: list(map(score, prompts, completions))],
        args=GRPOConfig(
            output_dir=str(folder / "run"),
            max_steps=settings["steps"],
            per_device_train_batch_size=settings["micro_batch"],
            gradient_accumulation_steps=rollouts // settings["micro_batch"],
            num_generations=settings["group_size"],
            max_completion_length=settings["tokens"],
            learning_rate=1e-6,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not cuda,
            bf16=cuda,
            seed=settings["seed"],
            **({"vllm_max_model_length": PROMPT + settings["tokens"]} if cuda else {}),
            **vllm,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[Clock()],
    ).train()


if __name__ == "__main__":
    train_by_trl(Path(sys.argv[1]))
