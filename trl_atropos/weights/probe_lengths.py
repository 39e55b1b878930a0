"""Finds the longest sequence on which server and trainer agree, before the first step.

vLLM and Transformers may compute a model differently from some length on, mostly because of a
window or a rotary embedding. `Probe.run_longest` (`probe.py`) calls `find_agreement`, which
compares longer and longer sequences until both sides differ, and then lengths in between.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from trl_atropos.distributed import on_main

LENGTH_STEP = 32  # tokens: precision of the length from which on both sides differ


class Agreement(NamedTuple):
    """Lengths on which both sides agree."""

    longest: int  # tokens
    differs_from: int | None  # shortest length at which both sides differ, in tokens; None: at none
    problem: str  # how they differ


def find_agreement(
    difference_at: Callable[[int], str | None],
    shortest: int,
    longest: int,
    seconds: float,
    timeout: float,
) -> Agreement:
    """
    Compares sequences of up to `longest` tokens, if each takes less than half of `timeout`. Called
    on every rank.

    Args:
        difference_at: returns how both sides differ at a length, or None if they agree.
        shortest: length of the first probe, on which both sides agree.
        longest: length of the run's longest rollouts.
        seconds: time that the first probe took.
        timeout: seconds after which a server's reply counts as lost.
    """
    result = Agreement(shortest, None, "")

    def next_length() -> int | None:
        return _next_length(result, longest, seconds, timeout)

    # Rank 0 decides: the others' clocks differ.
    length = on_main(next_length)
    while length is not None:
        began = time.perf_counter()
        try:
            problem = difference_at(length)
        except torch.OutOfMemoryError:  # training on such a rollout would fail, too
            break
        seconds = time.perf_counter() - began
        if problem is None:
            result = result._replace(longest=length)
        else:
            result = result._replace(differs_from=length, problem=problem)
        length = on_main(next_length)
    return result


def _next_length(result: Agreement, longest: int, seconds: float, timeout: float) -> int | None:
    """Returns the length to compare after one that took some seconds: longer until both sides
    differ, then in between. `None` ends the search."""
    agreed, differs_from, _ = result
    if differs_from is not None:
        if differs_from - agreed <= LENGTH_STEP:
            return None
        return (agreed + differs_from) // 2
    if agreed >= longest:
        return None
    # A rollout twice as long takes at most four times as long.
    factor = math.sqrt(timeout / 2 / seconds)
    length = min(longest, int(agreed * factor))
    if length < min(longest, 2 * agreed):
        return None
    return length
