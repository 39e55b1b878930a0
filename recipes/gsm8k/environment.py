"""Grade-school mathematics (GSM8K): one question, one worked answer, reward 1 if its boxed number is right.

    python recipes/gsm8k/environment.py serve --slurm false --env.rollout_server_url http://127.0.0.1:8000 \
        --env.tokenizer_name MODEL --openai.base_url http://127.0.0.1:9001/v1 --openai.model_name MODEL
"""

import re

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from datasets import Dataset, load_dataset
from pydantic import Field

INSTRUCTION = "Reason step by step, and write the final answer as \\boxed{number}."
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


class GSM8KConfig(BaseEnvConfig):
    dataset: str = Field(default="openai/gsm8k", description="Hub name, or a file of JSON lines: question, answer")
    max_new_tokens: int = Field(default=1024, description="Length of a completion in tokens")
    temperature: float = Field(default=1.0, description="Must equal the trainer's `temperature`")
    seed: int = Field(default=0, description="Seed of the order of questions")


class GSM8KEnv(BaseEnv):
    name = "gsm8k"
    env_config_cls = GSM8KConfig

    @classmethod
    def config_init(cls):
        config = GSM8KConfig(
            group_size=8,
            max_token_length=2048,
            total_steps=-1,  # as many as the trainer takes
            max_batches_offpolicy=1,  # sample at most one batch ahead of the trainer
            ensure_scores_are_not_same=False,  # the trainer counts groups without variance
            steps_per_eval=0,
            use_wandb=False,
            wandb_name="gsm8k",
            include_messages=False,
        )
        return config, [APIServerConfig(server_type="vllm", api_key="none", timeout=600)]

    async def setup(self):
        self.questions = questions(self.config.dataset).shuffle(seed=self.config.seed)
        self.next = 0

    async def get_next_item(self):
        item = self.questions[self.next % len(self.questions)]
        self.next += 1
        return item

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
            group["scores"].append(score(choice.message.content or "", item["answer"]))
        group["generation_params"] = {"temperature": self.config.temperature}
        return group, []

    async def evaluate(self, *args, **kwargs):
        """Nothing to do: the training reward is the accuracy on questions that the model has not seen before."""


def questions(dataset: str) -> Dataset:
    if dataset.endswith((".json", ".jsonl")):
        return load_dataset("json", data_files=dataset, split="train")
    return load_dataset(dataset, "main", split="train")


def score(completion: str, answer: str) -> float:
    """1 if the last boxed number is that behind the `####` of GSM8K's answer, else 0."""
    boxed = BOXED.findall(completion)
    given = number(boxed[-1]) if boxed else None
    return float(given is not None and given == number(answer.rpartition("####")[2]))


def number(text: str) -> float | None:
    """The number that a text is, but for a currency, a percent sign, a full stop and commas between thousands."""
    try:
        return float(text.strip().rstrip(".%").lstrip("$").replace(",", ""))
    except ValueError:
        return None


if __name__ == "__main__":
    GSM8KEnv.cli()
