"""A model that must call tools: it is asked what a shopping list costs, and no price is in the
question.

It may call two tools, one a turn, by writing `<tool>price apples</tool>` or `<tool>calculate
3*17+2*9</tool>`; the answer comes as the next message of the user. The reward is 0.8 for the right
total in `\\boxed{}`, and 0.2 for the share of the list's prices that were looked up. Prices are
drawn anew for every question: none can be learned by heart.

    python recipes/tool_use/environment.py serve --slurm false --env.rollout_server_url http://127.0.0.1:8000 \
        --env.tokenizer_name MODEL --openai.base_url http://127.0.0.1:9001/v1 --openai.model_name
        MODEL
"""

import ast
import asyncio
import operator
import random
import re

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

GOODS = ("apples", "bread", "cheese", "dates", "eggs", "figs", "grapes", "honey")
INSTRUCTION = """You are at a shop's till. You have two tools, and may call one in a message:
<tool>price apples</tool> tells what one of them costs.
<tool>calculate 3*17+2*9</tool> calculates with whole numbers, +, - and *.
When you know the total, write it as \\boxed{number}, without calling a tool."""
CALL = re.compile(r"<tool>\s*(price|calculate)\s+([^<>]*?)\s*</tool>")
BOXED = re.compile(r"\\boxed\{\s*(-?\d+)\s*\}")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
LONGEST_EXPRESSION = 100  # characters


class ToolUseConfig(BaseEnvConfig):
    goods: int = Field(default=2, description="Kinds of goods on a list", ge=1, le=len(GOODS))
    max_turns: int = Field(
        default=5, description="Messages of the model: a call each, and the answer"
    )
    max_new_tokens: int = Field(default=256, description="Length of one message in tokens")
    temperature: float = Field(default=1.0, description="Must equal the trainer's `temperature`")
    seed: int = Field(default=0, description="Seed of the lists and prices")


class ToolUseEnv(BaseEnv):
    name = "tool_use"
    env_config_cls = ToolUseConfig

    @classmethod
    def config_init(cls):
        config = ToolUseConfig(
            group_size=8,
            max_token_length=2048,
            total_steps=-1,  # as many as the trainer takes
            max_batches_offpolicy=1,  # sample at most one batch ahead of the trainer
            ensure_scores_are_not_same=False,  # the trainer counts groups without variance
            steps_per_eval=0,
            use_wandb=False,
            wandb_name="tool_use",
            include_messages=False,
        )
        return config, [APIServerConfig(server_type="vllm", api_key="none", timeout=600)]

    async def setup(self):
        self.random = random.Random(self.config.seed)

    # called where the run has had batches already: go on with other questions
    def load_checkpoint(self):
        self.random.seed(self.config.seed + self.curr_step)

    async def get_next_item(self):
        goods = self.random.sample(GOODS, self.config.goods)
        amounts = {name: self.random.randint(2, 9) for name in goods}
        return {"amounts": amounts, "prices": {name: self.random.randint(2, 99) for name in GOODS}}

    async def collect_trajectories(self, item):
        rollouts = await asyncio.gather(
            *(self.rollout(item) for _ in range(self.config.group_size))
        )
        tokens, masks, logprobs, scores = map(list, zip(*rollouts, strict=True))
        group = ScoredDataGroup(
            tokens=tokens, masks=masks, scores=scores, inference_logprobs=logprobs
        )
        group["generation_params"] = {"temperature": self.config.temperature}
        return group, []

    async def rollout(self, item: dict) -> tuple[list[int], list[int], list[float], float]:
        """Tokens, masks and log-probabilities of one conversation, and its reward.

        The model sees its own tokens again in the next turn, never a text that was tokenized anew:
        what is trained on is then what was sampled, whatever the tokenizer or the chat template
        would make of that text.
        """
        tokens = self.render([{"role": "user", "content": question(item)}])
        masks = [-100] * len(tokens)
        logprobs = [1.0] * len(tokens)
        calls = []
        for turn in range(self.config.max_turns):
            _, (sampled,), (told,), (reason,) = await self.server.tokens_and_logprobs_completion(
                input_ids=tokens,
                max_tokens=self.config.max_new_tokens,
                temperature=self.config.temperature,
            )
            tokens = tokens + sampled
            masks = masks + sampled
            logprobs = logprobs + told
            message = self.tokenizer.decode(sampled, skip_special_tokens=True)
            call = CALL.search(message)
            if call is None or reason == "length" or turn == self.config.max_turns - 1:
                break
            calls.append(call.groups())
            reply = self.reply(answer(call, item["prices"]), sampled[-1])
            # The tool's answer is read, not learned: -100 where nothing was sampled, with 1.0 in
            # place of a logarithm.
            tokens = tokens + reply
            masks = masks + [-100] * len(reply)
            logprobs = logprobs + [1.0] * len(reply)
        return tokens, masks, logprobs, score(message, calls, item)

    def render(self, messages: list[dict]) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def reply(self, content: str, last: int) -> list[int]:
        """What the chat template puts between the model's message, whose last token is given, and
        the next one."""
        marker = "the model's message"
        turns = [("user", "?"), ("assistant", marker), ("user", content)]
        messages = [{"role": role, "content": text} for role, text in turns]
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        between = self.tokenizer.encode(text.rpartition(marker)[2], add_special_tokens=False)
        # the model has ended its message itself
        return between[1:] if between[0] == last else between

    async def evaluate(self, *args, **kwargs):
        """Nothing to do: every question is new, so that the training reward is the measure."""


def question(item: dict) -> str:
    wanted = " and ".join(f"{amount} {name}" for name, amount in item["amounts"].items())
    return f"{INSTRUCTION}\n\nWhat do {wanted} cost together?"


def answer(call: re.Match, prices: dict[str, int]) -> str:
    """What a tool says."""
    tool, argument = call.groups()
    if tool == "calculate":
        return calculate(argument)
    return (
        f"{argument}: {prices[argument]}"
        if argument in prices
        else f"There are no {argument} here."
    )


def calculate(expression: str) -> str:
    """The value of an expression of whole numbers, +, - and *. Whatever else it is, is not
    evaluated."""
    try:
        if len(expression) > LONGEST_EXPRESSION:
            raise ValueError("too long")
        return str(_value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError):
        return "This is no expression of whole numbers, +, - and *."


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("neither a number nor an operation")


def score(message: str, calls: list[tuple[str, str]], item: dict) -> float:
    """0.8 for the right total in the last message, and 0.2 for the share of prices that were looked
    up."""
    amounts = item["amounts"]
    prices = item["prices"]
    looked_up = {argument for tool, argument in calls if tool == "price"} & set(amounts)
    boxed = BOXED.findall(message)
    right = bool(boxed) and int(boxed[-1]) == sum(
        amount * prices[name] for name, amount in amounts.items()
    )
    return 0.8 * right + 0.2 * len(looked_up) / len(amounts)


if __name__ == "__main__":
    ToolUseEnv.cli()
