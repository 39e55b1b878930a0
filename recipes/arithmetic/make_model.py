"""Pre-trains a small Qwen3 on the spot, to a start from which reinforcement learning has something
to do.

    python recipes/arithmetic/make_model.py runs/arithmetic/model [--seed 42] [--size gpu]
    [--textbook 400]

First it learns from a textbook, in which every problem is worked step by step. Then it learns from
a class, in which two of five write an answer without a step, which is a guess, and the others slip
now and then. It imitates them all, so a sampled answer is right now and then. Neither has a problem
of the test split.
"""

import argparse
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
from environment import ArithmeticConfig, problems, score, value, worked
from tokenizers import Tokenizer, decoders, models
from transformers import (
    BatchEncoding,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    set_seed,
)

CHARACTERS = "0123456789+*="
# shares of the class that guesses, and of the others' steps that are wrong
GUESSES = 0.4
SLIPS = 0.03
# the latter in parts of the textbook's
CLASS_STEPS = 100
CLASS_LEARNING_RATE = 0.1
EVALUATIONS = 10  # of the model while it learns from the textbook
TESTED = 200  # problems


@dataclass(frozen=True)
class Size:
    """A model, and what it is trained on."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    task: dict[str, int]  # settings of the environment
    examples: int  # of a step
    steps: int  # with the textbook
    learning_rate: float


SIZES = {
    "cpu": Size(160, 4, 4, 32, {}, 64, 500, 3e-3),  # 1.2 million parameters
    # 59 million
    "gpu": Size(640, 12, 10, 64, {"terms": 6, "digits": 2, "max_new_tokens": 128}, 512, 600, 6e-4),
}


def make_model(folder: str, seed: int, size: Size) -> None:
    """Trains, and saves model and tokenizer in `folder`. Prints how far it is."""
    set_seed(seed)
    torch.set_float32_matmul_precision("high")  # tensor cores, where there are any
    tokenizer = make_tokenizer()
    model = new_model(size, tokenizer).to("cuda" if torch.cuda.is_available() else "cpu")
    task = ArithmeticConfig(**size.task)
    asked = list(islice(problems("test", task.terms, task.digits), TESTED))
    drawn = random.Random(seed)
    phases = {
        "textbook": (worked, size.steps, size.learning_rate),
        "class": (
            lambda problem: classmate(problem, drawn),
            CLASS_STEPS,
            size.learning_rate * CLASS_LEARNING_RATE,
        ),
    }
    learning = problems("train", task.terms, task.digits, seed)
    began = time.monotonic()
    for source, (write, steps, learning_rate) in phases.items():
        answered = (
            [(problem, write(problem)) for problem in islice(learning, size.examples)]
            for _ in range(steps)
        )
        for step, loss in enumerate(train(model, tokenizer, answered, steps, learning_rate), 1):
            if step % max(50, steps // EVALUATIONS) == 0:
                right = mean(solve(model, tokenizer, asked, task.max_new_tokens))
                print(
                    f"{source} {step:4d}  loss {loss:.3f}  pass@1 {right:.3f}  "
                    f"{time.monotonic() - began:.0f} s"
                )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {character: index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        model_input_names=names,
    )


def new_model(size: Size, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        head_dim=size.head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).to(torch.float32)


def classmate(problem: str, drawn: random.Random) -> str:
    """What one of the class writes behind the `=`."""
    if drawn.random() < GUESSES:
        return str(max(1, int(value(problem)) + drawn.randint(-9, 9)))
    return worked(problem, lambda right: right + drawn.choice((1, 10)) * (drawn.random() < SLIPS))


def train(
    model, tokenizer, batches: Iterable[list[tuple[str, str]]], steps: int, learning_rate: float
) -> Iterator[float]:
    """Takes a step on each batch of `steps`, of problems and answers, and yields its loss."""
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, steps, pct_start=0.1)
    for answered in batches:
        loss = model(**batch_of(answered, tokenizer).to(model.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield loss.item()


def batch_of(answered: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> BatchEncoding:
    """Ids, mask and labels [rows, tokens], padded on the right. The answers are learned, the
    problems are not."""
    texts = [f"{problem}={answer}{tokenizer.eos_token}" for problem, answer in answered]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for labels, (problem, _) in zip(batch["labels"], answered, strict=True):
        labels[: len(problem) + 1] = -100
    return batch


@torch.no_grad()
def solve(model, tokenizer, asked: list[str], max_new_tokens: int, **sampling) -> list[float]:
    """The score of an answer to each problem, sampled at temperature 1 unless `sampling` says
    otherwise."""
    prompts = [f"{problem}=" for problem in asked]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(
        model.device
    )
    was_training = model.training
    _ = model.eval()
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} | sampling
    ids = model.generate(**batch, max_new_tokens=max_new_tokens, **sampling)[
        :, batch["input_ids"].shape[1] :
    ]
    model.train(was_training)
    answers = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [score(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--textbook", type=int, metavar="STEPS", help="fewer leave more to learn")
    options = parser.parse_args()
    size = SIZES[options.size]
    make_model(options.folder, options.seed, replace(size, steps=options.textbook or size.steps))
    print(f"arithmetic model: {options.folder}")
