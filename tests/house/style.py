"""How much a reader of the package has to hold at once. `make house` prints these figures.

A line of code is one that has a token which is neither a comment nor part of a docstring.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Docstrings that open with these borrow their subject or their noun from the name below which they stand.
BORROWED = {"what", "whether", "of", "how", "as", "which", "that", "where"}
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
SPACE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass
class Style:
    """Counts over some modules; `per_1000` relates one of them to the lines of code."""

    nodes: int = 0
    code_lines: int = 0
    packed_assignments: int = 0
    conditional_expressions: int = 0
    comprehensions: int = 0
    lambdas: int = 0
    docstrings: int = 0
    borrowed_docstrings: int = 0

    @property
    def nodes_per_line(self) -> float:
        return self.nodes / self.code_lines

    def per_1000(self, name: str) -> float:
        return 1000 * getattr(self, name) / self.code_lines


def docstring_nodes(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            yield node.body[0].value


def lines_of_code(source: str, tree: ast.Module) -> int:
    documented = set()
    for node in docstring_nodes(tree):
        documented.update(range(node.lineno, node.end_lineno + 1))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SPACE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def is_packed(node: ast.AST) -> bool:
    """Returns whether `node` is an assignment of the form `a, b = x, y`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[0], ast.Tuple)


def measure(paths: Iterable[Path]) -> Style:
    style = Style()
    for path in paths:
        source = path.read_text()
        tree = ast.parse(source)
        style.code_lines += lines_of_code(source, tree)
        for node in ast.walk(tree):
            style.nodes += 1
            style.packed_assignments += is_packed(node)
            style.conditional_expressions += isinstance(node, ast.IfExp)
            style.comprehensions += isinstance(node, COMPREHENSIONS)
            style.lambdas += isinstance(node, ast.Lambda)
        for node in docstring_nodes(tree):
            first_word = re.match(r"\W*(\w*)", node.value).group(1)
            style.docstrings += 1
            style.borrowed_docstrings += first_word.lower() in BORROWED
    return style
