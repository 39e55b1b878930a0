"""Arithmetic in several steps: a sum of numbers and one product, reward 1 if the last number is
right.

`9+3*7+8+4=` asks, and `9+21+8+4=30+8+4=38+4=42` answers: the product first, then one sum after the
other. Only the last number is rewarded, so a model writes the steps before it because they help.
All problems are generated.

    python recipes/arithmetic/environment.py serve --slurm false --env.rollout_server_url http://127.0.0.1:8000 \
        --env.tokenizer_name MODEL --openai.base_url http://127.0.0.1:9001/v1 --openai.model_name
        MODEL
"""

import itertools
import random
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Literal

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

PRODUCT = re.compile(r"(\d+)\*(\d+)")
FIRST_SUM = re.compile(r"^(\d+)\+(\d+)")
TEST_SIZE = 1000
NUMBER = re.compile(r"[1-9]\d*")


class ArithmeticConfig(BaseEnvConfig):
    split: Literal["train", "test"] = Field(
        default="train",
        description="`test`: problems that `train` never asks, always the same in the same order",
    )
    terms: int = Field(default=4, ge=3, description="Terms of a problem, one of which is a product")
    digits: int = Field(default=1, ge=1, description="Digits of a number that is added, at most")
    max_new_tokens: int = Field(default=48, description="Length of a completion in tokens")
    temperature: float = Field(default=1.0, description="Must equal the trainer's `temperature`")
    seed: int = Field(default=0, description="Seed of the problems of `train`")


class ArithmeticEnv(BaseEnv):
    name = "arithmetic"
    env_config_cls = ArithmeticConfig

    @classmethod
    def config_init(cls):
        config = ArithmeticConfig(
            group_size=8,
            max_token_length=256,
            total_steps=-1,  # as many as the trainer takes
            max_batches_offpolicy=1,  # sample at most one batch ahead of the trainer
            ensure_scores_are_not_same=False,  # the trainer counts groups without variance
            steps_per_eval=0,
            use_wandb=False,
            wandb_name="arithmetic",
            include_messages=False,
        )
        return config, [APIServerConfig(server_type="vllm", api_key="none", timeout=600)]

    async def setup(self):
        self.problems = self.asked(self.config.seed)

    # called where the run has had batches already: go on with other problems
    def load_checkpoint(self):
        self.problems = self.asked(self.config.seed + self.curr_step)

    def asked(self, seed):
        return problems(self.config.split, self.config.terms, self.config.digits, seed)

    async def get_next_item(self):
        return {"prompt": next(self.problems) + "="}

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completions = await managed.completion(
                prompt=item["prompt"],
                n=self.config.group_size,
                max_tokens=self.config.max_new_tokens,
                temperature=self.config.temperature,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for choice, node in zip(completions.choices, nodes, strict=True):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(score(item["prompt"], choice.text or ""))
        group["generation_params"] = {"temperature": self.config.temperature}
        return group, []

    async def evaluate(self, *args, **kwargs):
        """Nothing to do: a recipe evaluates this environment with `split: test`."""


def problems(split: str, terms: int = 4, digits: int = 1, seed: int = 0) -> Iterator[str]:
    """Problems such as `9+3*7+8+4`, without end. `test` is a list of 1,000 that is repeated,
    whatever the seed."""
    if split == "train":
        return (
            problem for problem in drawn_problems(terms, digits, seed) if not is_of_test(problem)
        )
    found: dict[str, None] = {}  # a set that keeps the order
    candidates = filter(is_of_test, drawn_problems(terms, digits, seed=0))
    while len(found) < TEST_SIZE:
        found[next(candidates)] = None
    return itertools.cycle(found)


def drawn_problems(terms: int, digits: int, seed: int) -> Iterator[str]:
    drawn = random.Random(seed)
    while True:
        numbers = [str(drawn.randint(1, 10**digits - 1)) for _ in range(terms - 1)]
        numbers.insert(drawn.randrange(terms), f"{drawn.randint(2, 9)}*{drawn.randint(2, 9)}")
        yield "+".join(numbers)


def is_of_test(problem: str) -> bool:
    """One problem in ten, by its text alone: no problem is of both splits."""
    return zlib.crc32(problem.encode()) % 10 == 0


def worked(problem: str, slip: Callable[[int], int] = lambda result: result) -> str:
    """The steps to the value of a problem, joined by `=`. `slip` may change the result of each."""
    steps = []
    while operation := PRODUCT.search(problem) or FIRST_SUM.search(problem):
        a, b = map(int, operation.groups())
        result = slip(a * b if "*" in operation[0] else a + b)
        problem = problem[: operation.start()] + str(result) + problem[operation.end() :]
        steps.append(problem)
    return "=".join(steps)


def value(problem: str) -> str:
    return worked(problem).rpartition("=")[2]


def score(prompt: str, completion: str) -> float:
    """1 if what is behind the last `=` is the number that the prompt asks for, else 0."""
    said = (prompt + completion).rpartition("=")[2]
    return float(bool(NUMBER.fullmatch(said)) and said == value(prompt.rstrip("=")))


if __name__ == "__main__":
    ArithmeticEnv.cli()
