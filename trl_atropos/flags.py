"""Reading somebody else's command line: which flags it states, without knowing what most of them mean."""

import math


def stated_flags(argv: list[str]) -> dict[str, str]:
    """Flags of a command line with their values, in either spelling (`--a v`, `--a=v`)."""
    stated = {}
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            stated[flag] = value or following
    return stated


SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
}


def server_flags(argv: list[str]) -> dict[str, str]:
    """Flags of a vLLM server by the long name of each: `--max_model_len 8`, `-tp 2` and `-tp=2` are stated, too."""
    words = []
    for word in argv:
        flag, is_one, value = word.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else SHORT.get(flag, flag)
        words.append(f"{flag}{is_one}{value}")
    return stated_flags(words)


PARALLEL = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")


def parallel(flags: list[str]) -> tuple[int, str]:
    """GPUs that a server with these flags takes, and the flags that say so."""
    stated = {flag: value for flag, value in server_flags(flags).items() if flag in PARALLEL and value.isdigit()}
    return math.prod(map(int, stated.values())), " ".join(f"{flag} {value}" for flag, value in stated.items())
