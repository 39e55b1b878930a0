"""Knows the flags of the installed vLLM's server, from its source.

`check` looks up those that a recipe's `vllm_args` names, and `launch.py` those of its command line,
so that a misspelt one is answered at once and by its correction. vLLM's own parser takes ten
seconds to import, and then prints all of its usage. tests/server/test_vllm_flags.py compares the
two.
"""

import ast
import difflib
import importlib.machinery
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from trl_atropos.flags import server_flags
from trl_atropos.modes import MODES

# Where vLLM 0.26 to 0.33 define their flags. A version has some of these files.
SOURCES = (
    "engine/arg_utils.py",
    "entrypoints/openai/cli_args.py",
    "entrypoints/launchers/cli_args.py",  # 0.29 to 0.32
    "entrypoints/common/cli_args.py",  # from 0.33 on
    "utils/argparse_utils.py",
    "utils/__init__.py",
)
SERVER_FLAGS = {"--fast-logprobs"}  # of `launch.py`
FRONT_FLAGS = {"--drain-timeout"}  # of `front/serve.py`, which stands before vLLM
# Classes whose fields become flags: `max_log_len` becomes `--max-log-len`.
FRONT_END = "FrontendArgs"


@cache
def known_flags() -> frozenset[str]:
    """Returns the long flags of the installed vLLM, or none if they cannot be read."""
    # not `importlib.util`, which finds nothing in a process that hides vLLM from TRL
    spec = importlib.machinery.PathFinder.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    flags: set[str] = set()
    folder = Path(spec.submodule_search_locations[0])
    for source in SOURCES:
        path = folder / source
        if path.is_file():
            flags.update(_flags_in(ast.parse(path.read_text(encoding="utf-8"))))
    if "--max-model-len" not in flags:  # its source looks otherwise than that of these versions
        return frozenset()
    return frozenset(flags)


def _flags_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith("--"):
                yield node.value
        elif isinstance(node, ast.ClassDef) and node.name.endswith(FRONT_END):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield f"--{statement.target.id.replace('_', '-')}"


def unknown_flags(argv: Iterable[str], mode: str) -> dict[str, str | None]:
    """Returns the flags of a server's command line that nobody reads, each with the one that was
    probably meant. `mode` is its `vllm_mode`. Returns none if nothing is known of vLLM's flags."""
    known = known_flags()
    unknown: dict[str, str | None] = {}
    if not known:
        return unknown
    for flag in server_flags(argv):
        if flag in SERVER_FLAGS or (MODES[mode].restarts_engine and flag in FRONT_FLAGS):
            continue
        # `--compilation-config.mode 0` is the entry `mode` of the flag's JSON.
        name = flag.partition(".")[0]
        positive = f"--{name.removeprefix('--no-')}"
        if name in known or positive in known or _abbreviates(name, known):
            continue
        close = difflib.get_close_matches(name, known, n=1)
        unknown[flag] = close[0] if close else None
    return unknown


def _abbreviates(name: str, known: Iterable[str]) -> bool:
    """Returns whether argparse takes a flag for the only one that begins so."""
    return sum(flag.startswith(name) for flag in known) == 1
