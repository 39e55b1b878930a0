"""What each process of `trl-atropos bench long` runs: a trainer that gets the same rollouts at each
step, and sends its adapter to a server.

`python -m benchmarks.long_trainer FOLDER` reads `FOLDER/settings.json`, and rank 0 writes
`FOLDER/result.json`.
"""

import argparse
import faulthandler
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from benchmarks.long import WARM_UP
from benchmarks.models import dtype
from benchmarks.step_trainers import OneBatch, make_rows, prime_rl_flops
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.metrics.flops import BatchFlops, peak_flops
from trl_atropos.rollouts.rollout import Rollout


def main(folder: Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    # Processes that wait for each other say where, before they are ended.
    left = settings["stacks_at"] - time.time()
    faulthandler.dump_traceback_later(max(left, 1))
    rollouts = rollouts_of(settings)
    trainer = make_trainer(folder, settings, rollouts)
    trainer.train()
    result = measured(trainer, rollouts)
    if trainer.accelerator.is_main_process:
        (folder / "result.json").write_text(json.dumps(result))


def rollouts_of(settings: dict[str, Any]) -> list[Rollout]:
    """Groups of two rollouts, all of the same length."""
    options = argparse.Namespace(
        rows=settings["rollouts"],
        group_size=2,
        prompt=settings["prompt"],
        median=settings["tokens"] - settings["prompt"],
        longest=settings["tokens"],
    )
    return make_rows("equal", options)


def make_trainer(
    folder: Path, settings: dict[str, Any], rollouts: list[Rollout]
) -> AtroposGRPOTrainer:
    config = AtroposGRPOConfig(
        output_dir=str(folder / "run"),
        max_steps=settings["steps"],
        # the processes of one run all have the same rollouts
        per_device_train_batch_size=len(rollouts),
        max_sequence_length=settings["tokens"],
        max_completion_length=settings["tokens"],
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"selective": True} if settings["selective"] else None,
        attention_kernel=settings["attention_kernel"],
        learning_rate=1e-4,
        vllm_mode="nccl_lora",
        vllm_server_base_url=settings["url"],
        vllm_importance_sampling_mode="token_truncate",
        probe_every_n_steps=1,
        publish_timeout=300,
        model_init_kwargs={"dtype": dtype()},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        disable_tqdm=True,
    )
    rank = settings["lora_r"]
    adapter = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return AtroposGRPOTrainer(
        settings["model"], args=config, rollout_source=OneBatch(rollouts), peft_config=adapter
    )


def measured(trainer: AtroposGRPOTrainer, rollouts: list[Rollout]) -> dict[str, Any]:
    """Returns the row of a run: times in seconds, and operations of all processes."""
    steps = [entry for entry in trainer.state.log_history if "time/step" in entry][WARM_UP:]

    def median(name: str) -> float:
        return statistics.median(entry[name] for entry in steps)

    processes = trainer.accelerator.num_processes
    computing = median("time/forward_backward")
    lengths = [len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts]
    flops = BatchFlops.of(trainer.model).of_rollouts(rollouts)["mfu_with_attention"]
    of_prime_rl = prime_rl_flops(trainer.model.config, lengths)
    device = trainer.accelerator.device
    peak = peak_flops(device)
    memory = None
    if device.type == "cuda":
        taken = torch.tensor(torch.cuda.max_memory_reserved(device) / 1e9, device=device)
        memory = trainer.accelerator.gather(taken).max().item()

    def share(operations: float) -> float | None:
        if peak is None:
            return None
        return operations / computing / processes / peak

    return {
        "step_s": median("time/step"),
        "computing_s": computing,
        "publish_ms": median("time/publish") * 1e3,
        "tokens_per_s": sum(lengths) / median("time/step"),
        "flops_per_process_s": flops / computing / processes,
        "mfu_with_attention": share(flops),
        "mfu_by_prime_rl": share(of_prime_rl),
        "memory_gb": memory,
        "probe": trainer.policy_publisher.probe_max_abs_diff,
        "grad_norm": median("grad_norm"),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
