"""The processes of `trl-atropos bench loop`: `environment FOLDER URL` and `trainer FOLDER URL`.

In FOLDER are the model, `sampler.bin` and `settings.json`. The trainer writes `result.json` there.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.loop_sampler import DIGITS, Sampler, SamplerPublisher, Versions, digits_of
from benchmarks.models import dtype

# steps after each change of the latency that do not count: they meet batches from before
WARM_UP = 2
SPREAD = 0.5  # of the logarithm of the completions' lengths
PROMPT = 16  # tokens
TICK = 0.005  # seconds between two looks at the sampler


@dataclass(frozen=True)
class Settings:
    """What both processes know."""

    sequences: int  # of a batch
    group_size: int
    tokens: int  # median of the completions' lengths; the longest have four times as many
    steps: int  # measured at each latency
    latencies: list[float]  # in units of the train step
    seed: int
    max_staleness: int | None
    micro_batch: int
    device_seconds: float  # of a train step, in which the processor idles

    @property
    def groups(self) -> int:
        return self.sequences // self.group_size


def read_settings(folder: Path) -> Settings:
    return Settings(**json.loads((folder / "settings.json").read_text()))


# -------------------------------------------------------------------------------------- environment


def run_environment(folder: Path, url: str) -> None:
    from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

    settings = read_settings(folder)
    sampler = Sampler(folder / "sampler.bin")

    class Simulated(BaseEnv):
        """Atropos' own loop, which asks the API how much is queued; sampling is a sleep."""

        name = "simulated"

        async def setup(self):
            self.number = 0

        async def get_next_item(self):
            self.number += 1
            return {"number": self.number - 1}

        async def collect_trajectories(self, item):
            # Strictly on-policy: batch n is sampled from version n, and nothing begins before that
            # is out.
            while (
                settings.max_staleness == 0 and sampler.version < item["number"] // settings.groups
            ):
                await asyncio.sleep(TICK)
            sampler.note(item["number"], sampler.version)
            await asyncio.sleep(sampler.latency)
            return ScoredDataGroup(**make_group(item["number"], settings)), []

        async def evaluate(self, *args, **kwargs):
            pass

    config = BaseEnvConfig(
        group_size=settings.group_size,
        max_num_workers_per_node=settings.groups,
        max_batches_offpolicy=1,
        max_token_length=PROMPT + 4 * settings.tokens,
        ensure_scores_are_not_same=False,
        total_steps=-1,
        steps_per_eval=0,
        use_wandb=False,
        wandb_name="simulated",
        include_messages=False,
        rollout_server_url=url,
        tokenizer_name=str(folder / "model"),
    )
    nowhere = APIServerConfig(api_key="none", base_url="http://127.0.0.1:9/v1")
    asyncio.run(Simulated(config, [nowhere]).env_manager())


def make_group(number: int, settings: Settings) -> dict[str, list]:
    """The rollouts of a group: random tokens, of lengths that are log-normal, as those of models
    are."""
    rng = random.Random(f"{settings.seed} {number}")
    prompt = digits_of(number) + [rng.randrange(256) for _ in range(PROMPT - DIGITS)]
    lengths = [
        min(4 * settings.tokens, max(1, round(rng.lognormvariate(0.0, SPREAD) * settings.tokens)))
        for _ in range(settings.group_size)
    ]
    completions = [[rng.randrange(256) for _ in range(length)] for length in lengths]
    return {
        "tokens": [prompt + completion for completion in completions],
        "masks": [[-100] * PROMPT + completion for completion in completions],
        "scores": [rng.random() for _ in completions],
        "inference_logprobs": [
            [1.0] * PROMPT + [-rng.expovariate(0.2) for _ in each] for each in completions
        ],
    }


# ------------------------------------------------------------------------------------------ trainer


def run_trainer(folder: Path, url: str) -> None:
    import torch
    from transformers import TrainerCallback

    from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
    from trl_atropos.rollouts.source import AtroposSource

    settings = read_settings(folder)
    sampler = Sampler(folder / "sampler.bin")
    schedule = Schedule(settings, sampler)

    class Scheduled(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "time/step" in logs:
                schedule.step(logs)

    args = AtroposGRPOConfig(
        output_dir=str(folder / "run"),
        max_steps=schedule.num_steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.sequences // settings.micro_batch,
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        model_init_kwargs={"dtype": dtype()},
        # what is measured is when things happen, with as large a model as there is room for
        master_weights=False,
        gradient_checkpointing=torch.cuda.is_available(),
        max_staleness=settings.max_staleness,
    )
    trainer = AtroposGRPOTrainer(
        str(folder / "model"),
        args,
        rollout_source=AtroposSource(
            url, versions=Versions(sampler), max_staleness=settings.max_staleness
        ),
        policy_publisher=SamplerPublisher(sampler),
        callbacks=[Scheduled()],
    )
    device_seconds = settings.device_seconds / args.gradient_accumulation_steps
    trainer.model.register_forward_pre_hook(
        lambda *_: time.sleep(device_seconds) if torch.is_grad_enabled() else None
    )
    trainer.train()
    (folder / "result.json").write_text(json.dumps(schedule.result()))


class Schedule:
    """Sets the sampler's latency and collects what the steps took: first without any, for the time
    of a train step."""

    def __init__(self, settings: Settings, sampler: Sampler):
        self._settings = settings
        self._sampler = sampler
        self._per_block = WARM_UP + settings.steps
        self._blocks: list[list[dict[str, float]]] = [[]]
        self._seen = 0
        self.num_steps = self._per_block * (1 + len(settings.latencies))

    @property
    def train_seconds(self) -> float:
        """Of a step with rollouts at hand."""
        return _train_seconds(self._blocks[0])

    def step(self, logs: dict[str, Any]) -> None:
        """What was logged of the next optimizer step."""
        self._seen += 1
        if (self._seen - 1) % self._per_block >= WARM_UP:
            self._blocks[-1].append(logs)
        if self._seen % self._per_block == 0 and len(self._blocks) <= len(self._settings.latencies):
            self._sampler.latency = (
                self._settings.latencies[len(self._blocks) - 1] * self.train_seconds
            )
            self._blocks.append([])

    def result(self) -> dict[str, Any]:
        """Means in seconds, and the largest staleness in versions."""
        blocks = zip(self._settings.latencies, self._blocks[1:], strict=True)
        return {
            "train_s": self.train_seconds,
            "rows": [
                {
                    "sampling_s": latency * self.train_seconds,
                    "train_s": _train_seconds(block),
                    "step_s": statistics.mean(logs["time/step"] for logs in block),
                    "staleness_max": max(logs["rollouts/staleness_max"] for logs in block),
                }
                for latency, block in blocks
            ],
        }


def _train_seconds(block: list[dict[str, float]]) -> float:
    return statistics.mean(logs["time/step"] - logs["time/wait_for_rollouts"] for logs in block)


def main() -> None:
    role, folder, url = sys.argv[1:]
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    (run_environment if role == "environment" else run_trainer)(Path(folder), url)


if __name__ == "__main__":
    main()
