"""A real Atropos environment that needs no inference server: its rollouts are made up, with a fault
where it is told to have one. It has an evaluation of its own, too."""

import asyncio
import os

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class Config(BaseEnvConfig):
    faults: dict[int, str] = {}  # by problem
    solved: list[float] = [1.0]  # scores of the rollouts of each problem, in turn
    seconds: float = 0.0
    seed: int = 7
    temperature: float = 1.0


class EvaluatedEnv(BaseEnv):
    name = "evaluated"
    env_config_cls = Config

    @classmethod
    def config_init(cls):
        return Config(), [APIServerConfig()]

    async def setup(self):
        if self.config.faults.get(-1):
            raise ValueError(self.config.faults[-1])
        self.problem = -1

    async def get_next_item(self):
        self.problem += 1
        return None if self.config.faults.get(self.problem) == "no more" else self.problem

    async def collect_trajectories(self, item):
        await asyncio.sleep(self.config.seconds)
        fault, size = self.config.faults.get(item), self.config.group_size
        if fault == "nothing":
            return None, []
        if fault is not None:
            return {}[fault], []
        tokens = [[7, item, 9, 10 + i] for i in range(size)]
        scores = [self.config.solved[(item + i) % len(self.config.solved)] for i in range(size)]
        return ScoredDataGroup(
            tokens=tokens, masks=[[-100, -100, *row[2:]] for row in tokens], scores=scores
        ), []

    async def evaluate(self, *args, **kwargs):
        seen = {"eval/percent_correct": 0.25, "seed": self.config.seed, "process": os.getpid()}
        await self.evaluate_log(seen, samples=[{"score": 1}])


if __name__ == "__main__":
    EvaluatedEnv.cli()
