"""Reads the Markdown pages of the repository: their code blocks, commands, code spans, links and
headings."""

import re
import shlex
from dataclasses import dataclass, field
from functools import cached_property

from tests import ROOT

PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "recipes/**/README.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
NEEDS = re.compile(r"<!-- needs: (?P<what>[^>]+?) -->\s*\Z")
ASSIGNMENT = re.compile(r"^[A-Z_]+=")


@dataclass(frozen=True)
class Command:
    """One command of a block of shell code, variables before it left out."""

    place: str  # page:line of its block
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join(self.words)}"

    def after(self, word: str) -> list[str]:
        return list(self.words[self.words.index(word) + 1 :])


@dataclass(frozen=True)
class Block:
    """A fenced block of code; `needs` is the hardware that the comment right before it names."""

    place: str
    language: str
    text: str
    needs: str | None

    def commands(self) -> list[Command]:
        joined = self.text.replace("\\\n", " ")
        lines = [part for line in joined.splitlines() for part in line.split(" && ")]
        split = (shlex.split(line, comments=True) for line in lines)
        commands = []
        for words in split:
            while words and ASSIGNMENT.match(words[0]):
                words = words[1:]
            if words and words[0] != "export":
                commands.append(Command(self.place, tuple(words)))
        return commands


@dataclass
class Page:
    name: str
    text: str = field(init=False)

    def __post_init__(self):
        self.text = (ROOT / self.name).read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[Block]:
        found = []
        for match in FENCE.finditer(self.text):
            line = self.text.count("\n", 0, match.start()) + 1
            needs = NEEDS.search(self.text[: match.start()])
            found.append(
                Block(
                    f"{self.name}:{line}",
                    match["language"],
                    match["text"],
                    needs["what"] if needs else None,
                )
            )
        return found

    def blocks_of(self, language: str) -> list[Block]:
        return [block for block in self.blocks if block.language == language]

    @cached_property
    def prose(self) -> str:
        """The text without its blocks of code."""
        return FENCE.sub("", self.text)

    @cached_property
    def spans(self) -> list[str]:
        """What stands between backticks in the prose, line breaks as blanks."""
        return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", self.prose)]

    @cached_property
    def links(self) -> list[str]:
        without_code = re.sub(r"`[^`]*`", "", self.prose)
        return re.findall(r"\]\(([^)\s]+)\)", without_code)

    @cached_property
    def anchors(self) -> set[str]:
        """Of the headings, as GitHub makes them."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
