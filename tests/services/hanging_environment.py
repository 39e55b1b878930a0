"""A real Atropos environment whose `score` never ends, in a way of its own for each problem."""

import asyncio
import re
import time

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig


class Config(BaseEnvConfig):
    ways: list[str] = []  # of the problems, one after the other


def score(way: str) -> None:
    if way == "sleeps":
        time.sleep(600)  # LINE sleeps
    if way == "holds the interpreter":
        re.match(r"(a+)+b", "a" * 60)  # LINE holds the interpreter


async def score_later() -> None:
    await asyncio.sleep(600)  # LINE awaits


class HangingEnv(BaseEnv):
    name = "hanging"
    env_config_cls = Config

    @classmethod
    def config_init(cls):
        return Config(), [APIServerConfig()]

    async def setup(self):
        self.ways = iter(self.config.ways)

    async def get_next_item(self):
        return next(self.ways)

    async def evaluate(self, *args, **kwargs):
        pass

    async def collect_trajectories(self, way):
        if way == "awaits":
            await score_later()
        if way == "sleeps in a thread":
            await asyncio.to_thread(score, "sleeps")
        score(way)


if __name__ == "__main__":
    HangingEnv.cli()
