"""Keeps what the calls of one session saw and sampled as a tree of tokens.

`sessions.py` has one `TokenTree` for each session, and `session_capture.py` adds each completion
when it ends. A completion becomes one *segment*: the end of its prompt that no earlier segment has,
and the tokens that were sampled behind it. So each sampled token stands in the tree once, wholly in
the segment of its completion, and what prompts have in common is kept once.

For example, a call saw `a b` and sampled `c d`. The next one saw `a b c d e` and sampled `f`: it
continues the first. A template that drops `c` leaves the first one's path inside of it, and so the
third call, which saw `a b d e` and sampled `g`, branches behind `a b`:

    segment  parent  at  tokens    sampled
    0        -1      0   a b c d   c d
    1         0      4   e f       f
    2         0      2   d e g     g

Runs without vLLM.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

NO_PARENT = -1  # of a segment that begins a context of its own

# A policy version, and the first and the last but one of the tokens that it sampled.
VersionSpan = tuple[int | None, int, int]


class Place(NamedTuple):
    """A place in the tree: behind `at` tokens of the path of segment `parent`."""

    parent: int
    at: int


ROOT = Place(NO_PARENT, 0)


@dataclass
class Segment:
    """Holds what one completion added to the tree. Its *path* is the first `at` tokens of its
    parent's path, and its own tokens behind them."""

    parent: int
    at: int
    tokens: np.ndarray  # (s,) int32, at least one of them sampled
    begin: int  # index in `tokens` of the first sampled one; all behind it were sampled
    logprobs: np.ndarray  # (s - begin,) float32, in nats
    # with indices into `tokens`, one behind the other from `begin` to the end
    versions: list[VersionSpan]
    children: list[int] = field(default_factory=list)  # those that leave one of `tokens`

    @property
    def end(self) -> int:
        """The number of tokens of its path."""
        return self.at + len(self.tokens)

    @property
    def seen(self) -> int:
        """The number of tokens that its completion saw, which begin its path."""
        return self.at + self.begin

    @property
    def sampled(self) -> np.ndarray:
        """(s - begin,) ids of the sampled tokens, int32."""
        return self.tokens[self.begin :]

    def as_json(self) -> dict:
        """Returns the fields of `protocol.SessionSegment`."""
        return {
            "parent": self.parent,
            "at": self.at,
            "tokens": self.tokens.tolist(),
            "sampled": [[self.begin, len(self.tokens)]],
            "logprobs": self.logprobs.tolist(),
            "versions": [list(span) for span in self.versions],
        }


class TokenTree:
    """The segments of a session, in the order in which their completions ended. A parent comes
    before its children."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.roots: list[int] = []
        self.num_tokens = 0  # of all segments

    def __len__(self) -> int:
        return len(self.segments)

    def find(self, prompt: np.ndarray) -> Place:
        """
        Returns the place where a prompt, an array of (p,) int32, leaves the tree: it continues the
        longest path that it begins with, or else branches behind the longest prefix that it has in
        common with one. Of equal paths, it continues the one that was added last.

        A whole path comes before a longer prefix of another one: if `a b` was sampled as a whole,
        and `a b c d` too, then `a b c x` continues the first.
        """
        best = (0, 0, NO_PARENT)  # tokens of a whole path, tokens in common, segment
        # segments whose first token fits, with the length of the longest whole path before them
        pending = []
        for number in self._fitting(self.roots, prompt, len(prompt)):
            pending.append((number, 0))
        while pending:
            number, whole = pending.pop()
            segment = self.segments[number]
            rest = prompt[segment.at :]
            common = segment.at + _common(segment.tokens, rest)
            is_whole = common == segment.end
            best = max(best, (common if is_whole else whole, common, number))
            for child in self._fitting(segment.children, prompt, common):
                continues = is_whole and self.segments[child].at == common
                pending.append((child, common if continues else whole))
        _, common, number = best
        return Place(number, common)

    def left_by(self, prompt: np.ndarray) -> list[tuple[int, int]]:
        """
        Returns the segments whose completions saw a beginning of a prompt that does not go on with
        all that they sampled, each with the number of tokens that it saw. Those that saw less than
        a whole path that the prompt begins with are left out.

        For example, `a` was seen and `b c` sampled, and then `a b c d` was seen and `e f` sampled.
        The prompt `a x` leaves the first one, `a b c d e g` the second one, and `b` none.
        """
        left = []
        whole = 0  # tokens of the longest whole path
        pending = [(number, 0) for number in self.roots]
        while pending:
            number, begin = pending.pop()
            segment = self.segments[number]
            if segment.at > begin:  # the prompt does not come as far
                continue
            rest = prompt[segment.at :]
            common = segment.at + _common(segment.tokens, rest)
            if common == segment.end:
                whole = max(whole, common)
            elif segment.seen <= common:
                left.append((number, segment.seen))
            for child in segment.children:
                pending.append((child, common))
        return [(number, seen) for number, seen in left if whole <= seen < len(prompt)]

    def _fitting(self, numbers: Iterable[int], prompt: np.ndarray, common: int) -> list[int]:
        """Returns the segments that leave the first `common` tokens of `prompt` and go on as it
        does."""
        fitting = []
        for number in numbers:
            segment = self.segments[number]
            place = segment.at
            if place > common or place == len(prompt):
                continue
            if segment.tokens[0] == prompt[place]:
                fitting.append(number)
        return fitting

    def add(
        self,
        prompt: Sequence[int] | np.ndarray,
        sampled: Sequence[int],
        logprobs: Sequence[float],
        versions: Iterable[VersionSpan],
    ) -> int:
        """
        Adds a completion. Returns the number of its segment.

        Args:
            prompt: (p,) ids of all tokens that the model saw.
            sampled: (s,) ids of the tokens that it sampled, at least one.
            logprobs: (s,) their log-probabilities in nats.
            versions: the versions that sampled them, with indices into `sampled`.
        """
        prompt = np.asarray(prompt, dtype=np.int32)
        parent, at = self.find(prompt)
        begin = len(prompt) - at
        spans = []
        for version, first, end in versions:
            spans.append((version, begin + first, begin + end))
        sampled = np.asarray(sampled, dtype=np.int32)
        tokens = np.concatenate([prompt[at:], sampled])
        logprobs = np.asarray(logprobs, dtype=np.float32)
        segment = Segment(parent, at, tokens, begin, logprobs, spans)
        return self._append(segment)

    def _append(self, segment: Segment) -> int:
        number = len(self.segments)
        self.segments.append(segment)
        siblings = self.roots
        if segment.parent != NO_PARENT:
            siblings = self.segments[segment.parent].children
        siblings.append(number)
        self.num_tokens += len(segment.tokens)
        return number

    def path(self, number: int) -> np.ndarray:
        """Returns all tokens that end with the segment's last one, (n,) int32."""
        parts = []
        end = self.segments[number].end
        while number != NO_PARENT:
            segment = self.segments[number]
            length = end - segment.at
            parts.append(segment.tokens[:length])
            end = segment.at
            number = segment.parent
        return np.concatenate(parts[::-1])

    def as_json(self) -> list[dict]:
        """Returns the segments as JSON, which `from_json` reads."""
        return [segment.as_json() for segment in self.segments]

    @classmethod
    def from_json(cls, segments: Iterable[dict]) -> "TokenTree":
        """Returns the tree that `as_json` was called on."""
        tree = cls()
        for fields in segments:
            ((begin, _),) = fields["sampled"]
            tokens = np.array(fields["tokens"], dtype=np.int32)
            logprobs = np.array(fields["logprobs"], dtype=np.float32)
            versions = [tuple(span) for span in fields["versions"]]
            parent = fields["parent"]
            at = fields["at"]
            segment = Segment(parent, at, tokens, begin, logprobs, versions)
            tree._append(segment)
        return tree


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Returns how many tokens two arrays have in common before the first one that differs."""
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    if not different.any():
        return length
    return int(different.argmax())
