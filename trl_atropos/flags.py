"""Reading somebody else's command line: which flags it states, without knowing what most of them mean."""

import itertools


def stated_flags(argv: list[str]) -> dict[str, str]:
    """Flags of a command line with their values, in either spelling (`--a v`, `--a=v`)."""
    stated = {}
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            stated[flag] = value or following
    return stated


PARALLEL = {
    "tensor": ("--tensor-parallel-size", "-tp"),
    "pipeline": ("--pipeline-parallel-size", "-pp"),
    "data": ("--data-parallel-size", "-dp"),
}


def parallel(flags: list[str]) -> tuple[int, str]:
    """GPUs that a server with these flags takes, and the flags that say so."""
    words = [part for word in flags for part in word.split("=", 1)]
    parts, told = 1, []
    for word, value in itertools.pairwise(words):
        if any(word.replace("_", "-") in names for names in PARALLEL.values()) and value.isdigit():
            parts *= int(value)
            told.append(f"{word} {value}")
    return parts, " ".join(told)
