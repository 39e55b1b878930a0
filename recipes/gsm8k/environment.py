"""Grade-school mathematics (GSM8K): one question, one worked answer, reward 1 if its boxed number is right.

    python recipes/gsm8k/environment.py serve --slurm false --env.rollout_server_url http://127.0.0.1:8000 \
        --env.tokenizer_name MODEL --openai.base_url http://127.0.0.1:9001/v1 --openai.model_name MODEL
"""

import re

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from datasets import Dataset, load_dataset
from math_verify import LatexExtractionConfig, parse, verify
from pydantic import Field

INSTRUCTION = "Reason step by step, and write the final answer as \\boxed{number}."
NUMBER = re.compile(r"-?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")
# What `math_verify` does not see through: spaces of LaTeX, blanks between thousands, currencies, and words at the end.
CLUTTER = re.compile(r"\\[,;:! ]|~|(?<=\d)\s+(?=\d{3}\b)|\\?[$£€]|(\\(text|mathrm)\{[^{}\d]*\}|[.\s])+$")
IN_BOX = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
LONGEST_ANSWER = 100  # characters


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
        self.next = None

    async def get_next_item(self):
        if self.next is None:  # what the run has had comes first, where it was resumed or this was started again
            batches = self.curr_step and self.curr_step + self.config.max_batches_offpolicy  # these wait in the queue
            self.next = batches * self.config.batch_size // self.config.group_size
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
    """1 if the last box says the number behind the `####` of GSM8K's answer, else 0."""
    return float(says(boxed(completion), answer.rpartition("####")[2].strip()))


def boxed(completion: str) -> str:
    """What the last `\\boxed{}` has in its braces; nothing where there is none that is closed."""
    text, depth = completion.rpartition("\\boxed")[2].lstrip(), 0
    for end, letter in enumerate(text if "\\boxed" in completion else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[1:end]
    return ""


def says(text: str, number: str) -> bool:
    """Whether LaTeX says a number. `math_verify` knows fractions, equations, percent signs and units. Its deadlines of
    two seconds are signals: call it in the main thread, where Atropos' event loop is."""
    text = CLUTTER.sub("", text)
    if len(text) > LONGEST_ANSWER:
        return False
    if NUMBER.fullmatch(text):  # so are most, and `math_verify` takes its time
        return float(text.replace(",", "")) == float(number.replace(",", ""))
    said = parse(f"\\boxed{{{text}}}", IN_BOX, parsing_timeout=2)
    return verify(parse(number, parsing_timeout=2), said, timeout_seconds=2)


if __name__ == "__main__":
    GSM8KEnv.cli()
