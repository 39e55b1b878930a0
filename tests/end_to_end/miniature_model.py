"""A model of 0.3 million parameters that has learned how the recipes' environments want to be
answered, not what.

So it calls the tool, boxes a number, or tags an answer, with content that is right now and then:
rewards differ within a group, conversations have several turns, and gradients are not zero. Learned
here, in about ten seconds.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.gsm8k.environment import INSTRUCTION as GSM8K
from recipes.quickstart.make_model import make_model
from recipes.tool_use import environment as tool_use

try:
    from recipes.reasoning_gym.environment import INSTRUCTION as REASONING_GYM
except ModuleNotFoundError:  # its library needs a compiler to be installed
    REASONING_GYM = None

STEPS = 80
NUMBERS = (2, 4)  # that it has learned to answer with
GCD = (
    "Find the Greatest Common Divisor (GCD) of these numbers: {}, {}. Give only the GCD as your "
    "final answer."
)
# on its shopping lists: all that there are, so that the one that it asks for is among them
GOODS = 8


def make_speaker(folder: Path) -> Path:
    make_model(str(folder), seed=0, max_position_embeddings=2048)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    examples = _examples(random.Random(0), tokenizer)
    for _ in range(STEPS):
        loss = model(**_batch([next(examples) for _ in range(8)], tokenizer)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    return folder


def _examples(drawn: random.Random, tokenizer) -> Iterator[tuple[str, str]]:
    """What the chat template makes of a conversation, and what comes next."""

    def prompt(*messages: str) -> str:
        roles = [("user", "assistant")[index % 2] for index in range(len(messages))]
        conversation = [
            {"role": role, "content": text} for role, text in zip(roles, messages, strict=True)
        ]
        return tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )

    while True:
        a, b, number = drawn.randint(2, 9), drawn.randint(2, 9), drawn.choice(NUMBERS)
        yield (
            prompt(f"What is {number // 2} + {number // 2}?\n\n{GSM8K}"),
            f"\\boxed{{{drawn.choice(NUMBERS)}}}",
        )
        if REASONING_GYM is not None:
            yield prompt(f"{GCD.format(a, b)}\n\n{REASONING_GYM}"), f"<answer>{number}</answer>"
        amounts = {name: drawn.randint(2, 9) for name in drawn.sample(tool_use.GOODS, GOODS)}
        question, call = tool_use.question({"amounts": amounts}), "<tool>price figs</tool>"
        yield prompt(question), call
        yield prompt(question, call, f"figs: {drawn.randint(2, 99)}"), f"\\boxed{{{number}}}"


def _batch(examples: list[tuple[str, str]], tokenizer) -> dict[str, torch.Tensor]:
    """Both [rows, tokens], padded on the right; only what comes next is learned."""
    prompts = [tokenizer.encode(prompt) for prompt, _ in examples]
    told = [[*tokenizer.encode(following), tokenizer.eos_token_id] for _, following in examples]
    length = max(map(len, map(list.__add__, prompts, told)))
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (before, after) in enumerate(zip(prompts, told, strict=True)):
        ids[row, : len(before) + len(after)] = torch.tensor(before + after)
        labels[row, len(before) : len(before) + len(after)] = torch.tensor(after)
    return {"input_ids": ids, "labels": labels}
