"""Tasks of reasoning-gym: generated without end, checked by its own code, as many kinds as a YAML
file names.

    pip install reasoning-gym
    python recipes/reasoning_gym/environment.py serve --slurm false --env.rollout_server_url http://127.0.0.1:8000 \
        --env.tokenizer_name MODEL --openai.base_url http://127.0.0.1:9001/v1 --openai.model_name
        MODEL
"""

import contextlib
import re
from dataclasses import replace
from pathlib import Path

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field
from reasoning_gym.composite import CompositeConfig, CompositeDataset

INSTRUCTION = (
    "Think step by step, and give the final answer, and nothing else, between <answer> "
    "and </answer>."
)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymConfig(BaseEnvConfig):
    datasets: str = Field(
        default="recipes/reasoning_gym/datasets/easy.yaml",
        description="File with the size of the collection, and the name, weight and config of each "
        "data set in it",
    )
    max_new_tokens: int = Field(default=1024, description="Length of a completion in tokens")
    temperature: float = Field(default=1.0, description="Must equal the trainer's `temperature`")
    seed: int = Field(
        default=0, description="Seed of the tasks: another one makes other tasks of the same kinds"
    )
    state_file: str | None = Field(
        default=None, description="Keeps how many tasks were given; a run names it"
    )


class ReasoningGymEnv(BaseEnv):
    name = "reasoning_gym"
    env_config_cls = ReasoningGymConfig

    @classmethod
    def config_init(cls):
        config = ReasoningGymConfig(
            group_size=8,
            max_token_length=2048,
            total_steps=-1,  # as many as the trainer takes
            max_batches_offpolicy=1,  # sample at most one batch ahead of the trainer
            ensure_scores_are_not_same=False,  # the trainer counts groups without variance
            steps_per_eval=0,
            use_wandb=False,
            wandb_name="reasoning_gym",
            include_messages=False,
        )
        return config, [APIServerConfig(server_type="vllm", api_key="none", timeout=600)]

    async def setup(self):
        self.tasks = tasks(self.config.datasets, self.config.seed)
        self.next = None

    async def get_next_item(self):
        if self.next is None:
            self.next = self.given_before()
        item = self.tasks[self.next % len(self.tasks)]
        self.next += 1
        if self.config.state_file:
            new = Path(f"{self.config.state_file}.new")
            new.write_text(str(self.next))
            new.replace(self.config.state_file)  # so that it is whole whenever this is killed
        return item

    def given_before(self) -> int:
        """How many tasks the run has given, where it was resumed or this was started again. Those
        in flight then count, too. Without a file: as many as the run has had, and those that may
        wait in the API's queue."""
        with contextlib.suppress(OSError, ValueError):
            return int(Path(self.config.state_file or "").read_text())
        batches = self.curr_step and self.curr_step + self.config.max_batches_offpolicy
        return batches * self.config.batch_size // self.config.group_size

    async def collect_trajectories(self, item):
        messages = [{"role": "user", "content": f"{item['question']}\n\n{INSTRUCTION}"}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completions = await managed.chat_completion(
                messages=messages,
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
            group["scores"].append(
                self.tasks.score_answer(final_answer(choice.message.content or ""), item)
            )
        group["generation_params"] = {"temperature": self.config.temperature}
        return group, []

    async def evaluate(self, *args, **kwargs):
        """Nothing to do: as long as the collection lasts, every task is new to the model."""


def tasks(path: str, seed: int) -> CompositeDataset:
    """The collection that a file describes. Its item `i` is drawn by `seed`, and always the
    same."""
    return CompositeDataset(replace(CompositeConfig.from_yaml(path), seed=seed))


def final_answer(completion: str) -> str | None:
    """What stands between the last pair of tags."""
    found = ANSWER.findall(completion)
    return found[-1].strip() if found else None


if __name__ == "__main__":
    ReasoningGymEnv.cli()
