"""A real Atropos environment that makes its groups up, in both of Atropos' styles by turns, with
parts of rewards, good and bad, and with metrics of its own.

python parts_environment.py API_URL TOKENIZER
"""

import asyncio
import itertools
import sys

import numpy as np
from atroposlib.envs.base import (
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    ScoredDataGroup,
    ScoredDataItem,
)

TOKENS = [7, 8, 9, 10]
MASKS = [-100, 8, 9, 10]


class PartsEnv(BaseEnv):
    name = "parts"

    async def setup(self):
        self.numbers = itertools.count()
        self.sampled = itertools.count()

    async def get_next_item(self):
        return {"number": next(self.numbers)}

    async def collect_trajectories(self, item):
        await asyncio.sleep(0.05)
        if item["number"] % 2:
            return await super().collect_trajectories(item)
        return ScoredDataGroup(
            tokens=[TOKENS, TOKENS],
            masks=[MASKS, MASKS],
            scores=[0.0, 1.0],
            overrides=[
                {"rewards": {"correct": False, "length": np.float32(0.5)}},
                {"rewards": {"correct": True, "length": float("nan"), "note": "good"}},
            ],
        ), []

    async def collect_trajectory(self, item):
        """Returns a rollout; every second one has parts."""
        score = next(self.sampled) % 2
        rollout = ScoredDataItem(tokens=TOKENS, masks=MASKS, scores=float(score))
        if score:
            rollout["overrides"] = {"rewards": {"alone": 2, 7: np.float64("inf"), "none": None}}
        return rollout, []

    async def wandb_log(self, wandb_metrics=None):
        wandb_metrics = wandb_metrics or {}
        wandb_metrics["train/share"] = np.float32(0.25)
        wandb_metrics["train/text"] = "not a number"
        wandb_metrics["train/broken"] = float("nan")
        await super().wandb_log(wandb_metrics)

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    api_url, tokenizer = sys.argv[1:]
    config = BaseEnvConfig(
        group_size=2,
        max_token_length=64,
        total_steps=-1,
        max_batches_offpolicy=1,
        steps_per_eval=0,
        use_wandb=False,
        wandb_name="parts",
        include_messages=False,
        rollout_server_url=api_url,
        tokenizer_name=tokenizer,
    )
    server = APIServerConfig(api_key="none", base_url="http://127.0.0.1:9/v1")
    asyncio.run(PartsEnv(config, [server]).env_manager())
