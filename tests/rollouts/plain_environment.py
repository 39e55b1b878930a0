"""A real Atropos environment that needs no inference server: it makes its groups up.

python plain_environment.py API_URL TOKENIZER [--name value ...]
"""

import argparse
import asyncio
import itertools
import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class PlainEnv(BaseEnv):
    name = "plain"

    async def setup(self):
        self.numbers = itertools.count()

    async def get_next_item(self):
        return {"number": next(self.numbers)}

    async def collect_trajectories(self, item):
        await asyncio.sleep(options.seconds * random.uniform(0.5, 1.5))
        fault = options.faults[item["number"] % len(options.faults)]
        if fault == "returns none":
            return None, []
        size = 3 if fault == "wrong size" else self.config.group_size
        length = 65 if fault == "too long" else 4
        tokens = [[7, 8, *[9 + i % 3] * (length - 2)] for i in range(size)]
        scores = [self.score(i, fault) for i in range(size)]
        return ScoredDataGroup(
            tokens=tokens,
            masks=[[-100, *row[1:]] for row in tokens],
            scores=scores,
            inference_logprobs=[[1.0, *[-0.5] * (len(row) - 1)] for row in tokens],
        ), []

    def score(self, number, fault):
        if fault == "cannot score":
            return {"number": number}["weight"]
        return 1.0 if fault == "constant scores" else float(number)

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("api_url")
    parser.add_argument("tokenizer")
    parser.add_argument("--faults", nargs="*", default=["none"], help="of its groups, in turn")
    parser.add_argument("--seconds", type=float, default=0.05, help="that a group takes on average")
    parser.add_argument("--weight", type=float, default=1.0)
    parser.add_argument("--minimum", type=float, default=None)
    parser.add_argument("--offpolicy", type=int, default=1)
    options = parser.parse_args()
    config = BaseEnvConfig(
        group_size=2,
        max_token_length=64,
        total_steps=-1,
        max_batches_offpolicy=options.offpolicy,
        steps_per_eval=0,
        use_wandb=False,
        wandb_name="plain",
        include_messages=False,
        rollout_server_url=options.api_url,
        tokenizer_name=options.tokenizer,
        inference_weight=options.weight,
        min_batch_allocation=options.minimum,
    )
    asyncio.run(
        PlainEnv(
            config, [APIServerConfig(api_key="none", base_url="http://127.0.0.1:9/v1")]
        ).env_manager()
    )
