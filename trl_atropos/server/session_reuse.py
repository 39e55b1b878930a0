"""Puts sampled token ids back into the prompt of a session's next turn (`reuse: true`).

A client sends an earlier answer back as text, and the server tokenises it anew. A model does not
always sample what a tokenizer would make of its text, so the prompt often leaves the session's path
in the midst of an answer, and the call branches. `with_sampled_ids` replaces the rendered tokens of
such an answer by those that were sampled:

    path        <user> Hi <end> <assistant> | Hel lo <end>
    rendered    <user> Hi <end> <assistant> | Hello <end> | <user> Go on <end> <assistant>
    in its place  ...                       | Hel lo <end> | <user> Go on <end> <assistant>

It does so only if both have the same text, and if that ends where one of the rendered tokens does.
A text with U+FFFD stays as it is: bytes that are no UTF-8 all look like that.

Runs without vLLM.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from trl_atropos.server.token_tree import TokenTree

REPLACEMENT = "\ufffd"  # stands for bytes that are no character
# Tokens before an answer that are decoded with it, because decoders may drop a text's first space.
CONTEXT = 4
# Tokens by which the end of an answer may be missed: a character has at most four bytes, and its
# first ones have a text, too.
SLACK = 4

# Returns the text of token ids, special tokens included.
Decode = Callable[[Sequence[int]], str]


def with_sampled_ids(tree: TokenTree, prompt: np.ndarray, decode: Decode) -> tuple[np.ndarray, int]:
    """Returns a prompt, (p,) int32, whose earlier answers have the ids that were sampled, and how
    many answers this has changed."""
    changed = 0
    while True:
        replaced = _with_next_answer(tree, prompt, decode)
        if replaced is None:
            break
        prompt = replaced
        changed += 1
    return prompt, changed


def _with_next_answer(tree: TokenTree, prompt: np.ndarray, decode: Decode) -> np.ndarray | None:
    """Returns the prompt with the sampled ids of one more answer, whose path it then continues.
    `None` if no other answer of the tree stands where the prompt leaves it."""
    candidates = []
    for number, seen in tree.left_by(prompt):
        sampled = tree.segments[number].sampled
        end = _end_of(sampled, prompt, seen, decode)
        if end is not None:
            candidates.append((seen, end, number))
    if not candidates:
        return None
    # the longest context first, then the longest answer, and the latest
    seen, end, number = max(candidates)
    sampled = tree.segments[number].sampled
    parts = [prompt[:seen], sampled, prompt[end:]]
    return np.concatenate(parts)


def _end_of(sampled: np.ndarray, prompt: np.ndarray, seen: int, decode: Decode) -> int | None:
    """Returns the end of the stretch of `prompt` that begins at `seen` and has the text of
    `sampled`, or `None` if there is none."""
    begin = max(0, seen - CONTEXT)
    context = prompt[begin:seen].tolist()
    longest = 2 * len(sampled) + SLACK
    rendered = prompt[seen : seen + longest].tolist()

    def text_of_first(count: int) -> str:
        tokens = context + rendered[:count]
        return decode(tokens)

    def length_of_first(count: int) -> int:
        text = text_of_first(count)
        return len(text)

    text = decode(context + sampled.tolist())
    is_empty = text == decode(context)
    if is_empty or REPLACEMENT in text:
        return None
    counts = range(len(rendered) + 1)
    nearest = bisect_left(counts, len(text), key=length_of_first)
    first = max(0, nearest - SLACK)
    last = nearest + SLACK
    for count in counts[first : last + 1]:
        if text_of_first(count) == text:
            return seen + count
    return None
