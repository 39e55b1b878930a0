"""Grade-school mathematics (GSM8K): one question, one worked answer, reward 1 if its boxed number
is right.

    python recipes/gsm8k/environment.py serve --slurm false --env.rollout_server_url http://127.0.0.1:8000 \
        --env.tokenizer_name MODEL --openai.base_url http://127.0.0.1:9001/v1 --openai.model_name
        MODEL
"""

import contextlib
import random
import re
from pathlib import Path
from typing import Literal

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from datasets import Dataset, load_dataset
from pydantic import Field

try:
    from math_verify import LatexExtractionConfig, parse, verify
except ImportError as error:
    raise SystemExit(
        f"The answers are read by math-verify: `pip install math-verify` ({error})"
    ) from error

INSTRUCTION = "Reason step by step, and write the final answer as \\boxed{number}."
NUMBER = re.compile(r"-?\d+(\.\d+)?")
# What `math_verify` does not see through: a number within `\text{...}` and its like, which is taken
# out; what stands between thousands; spaces and fonts of LaTeX, currencies, and words at the end.
PART = r"(?:[^{}]|\{[^{}]*\})*"  # with braces in it
WRAPPED = re.compile(
    rf"\\(?:text|math|underline|boldsymbol|mbox|bm)[a-z]*\{{({PART}[\d,]{PART})\}}"
)
CLUTTER = re.compile(
    r"\\[,;:! ]|~|(?<=\d)(,|\{,\}|\s+)(?=\d{3}\b)|\\(bf|it|rm|large|Large|approx)\b"
    r"|\\?[$£€]|\\text(dollar|euro|sterling)\b|\b(USD|EUR|GBP|dollars?|cents?|euros?)\b|(\\(text|mathrm)\{[^{}\d]*\}|[.\s])+$"
)
IN_BOX = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
LONGEST_ANSWER = 200  # characters


class GSM8KConfig(BaseEnvConfig):
    dataset: str = Field(
        default="openai/gsm8k", description="Hub name, or a file of JSON lines: question, answer"
    )
    split: Literal["train", "test"] = Field(
        default="train", description="`test`: in fixed order, each question once"
    )
    max_new_tokens: int = Field(default=1024, description="Length of a completion in tokens")
    temperature: float = Field(default=1.0, description="Must equal the trainer's `temperature`")
    seed: int = Field(default=0, description="Seed of the order of questions")
    state_file: str | None = Field(
        default=None, description="Keeps how many questions were asked; a run names it"
    )


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
        self.questions = questions(self.config.dataset, self.config.split)
        self.asked = 0
        self.order = []

    async def get_next_item(self):
        if self.config.split == "test":  # in fixed order, each once
            self.asked += 1
            return self.questions[self.asked - 1] if self.asked <= len(self.questions) else None
        first = not self.order
        self.asked = self.asked if self.order else self.asked_before()
        number, place = divmod(self.asked, len(self.questions))
        if first or place == 0:  # every pass through the questions has an order of its own
            self.order = list(range(len(self.questions)))
            random.Random(f"{self.config.seed}, pass {number}").shuffle(self.order)
        self.asked += 1
        self.note_asked()
        return self.questions[self.order[place]]

    def asked_before(self) -> int:
        """How many questions the run has asked, where it was resumed or this was started again.
        Those in flight then count, too. Without a file: as many as the run has had, and those that
        may wait in the API's queue."""
        with contextlib.suppress(OSError, ValueError):
            return int(Path(self.config.state_file or "").read_text())
        batches = self.curr_step and self.curr_step + self.config.max_batches_offpolicy
        return batches * self.config.batch_size // self.config.group_size

    def note_asked(self) -> None:
        if self.config.state_file:
            new = Path(f"{self.config.state_file}.new")
            new.write_text(str(self.asked))
            new.replace(self.config.state_file)  # so that it is whole whenever this is killed

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
        """Nothing to do: `split: test` asks what a run is evaluated on."""


def questions(dataset: str, split: str) -> Dataset:
    if dataset.endswith((".json", ".jsonl")):
        return load_dataset("json", data_files=dataset, split="train")
    return load_dataset(dataset, "main", split=split)


def score(completion: str, answer: str) -> float:
    """1 if the last box says the number behind the `####` of GSM8K's answer, else 0."""
    return float(says(boxed(completion), answer.rpartition("####")[2].strip()))


def boxed(completion: str) -> str:
    """What the last `\\boxed{}` has in its braces; nothing where there is none that is closed."""
    text = completion.rpartition("\\boxed")[2].lstrip()
    depth = 0
    for end, letter in enumerate(text if "\\boxed" in completion else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[1:end]
    return ""


def says(text: str, number: str) -> bool:
    """Whether LaTeX says a number. `math_verify` knows fractions, equations, percent signs and
    units. Its deadlines of two seconds are signals: call it in the main thread, where Atropos'
    event loop is."""
    if len(text) > LONGEST_ANSWER:
        return False
    while (plain := WRAPPED.sub(r"\1", text)) != text:
        text = plain
    text = CLUTTER.sub("", text).strip()
    if NUMBER.fullmatch(text):  # so are most, and `math_verify` takes its time
        return float(text) == float(number.replace(",", ""))
    said = parse(f"\\boxed{{{text}}}", IN_BOX, parsing_timeout=2)
    return verify(parse(number, parsing_timeout=2), said, timeout_seconds=2)


if __name__ == "__main__":
    GSM8KEnv.cli()
