"""The one reader of command lines: which flags one states, in whatever spelling, without knowing what they mean."""

import math
from collections.abc import Iterable, Mapping

# vLLM's short names (vllm/engine/arg_utils.py); `tests/server/test_launch.py` compares them with vLLM's own.
ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-dc": "--diffusion-config",
    "-asc": "--api-server-count",
}
PARALLEL = (
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--prefill-context-parallel-size",
    "--data-parallel-size",
)


def stated_flags(argv: Iterable[str], aliases: Mapping[str, str] | None = None) -> dict[str, str]:
    """
    The flags of a command line with their values, in either spelling (`--a v`, `--a=v`).

    Of a flag that is given several times it is the last value, of one without a value an empty text.
    """
    aliases, stated, flag = aliases or {}, {}, None
    for word in argv:
        name, is_one, value = word.partition("=")
        if name.startswith("--") or name in aliases:
            flag = aliases.get(name, name)
            stated[flag] = value
            flag = None if is_one else flag
        elif flag is not None:
            stated[flag], flag = word, None
    return stated


def server_flags(argv: Iterable[str]) -> dict[str, str]:
    """Flags of a vLLM server by their long names: `--max_model_len 8`, `-tp 2` and `-tp=2` are stated, too."""
    stated = stated_flags(argv, ALIASES)
    return {flag.replace("_", "-"): value for flag, value in stated.items()}


def values_of(flag: str, argv: Iterable[str]) -> tuple[list[str], list[str]]:
    """All values of a flag that may be given several times, and the command line without it."""
    values, rest, words = [], [], iter(argv)
    for word in words:
        if word.startswith(f"{flag}="):
            values.append(word.removeprefix(f"{flag}="))
        elif word == flag and (value := next(words, None)) is not None:
            values.append(value)
        else:
            rest.append(word)
    return values, rest


def parallel(flags: Iterable[str]) -> tuple[int, str]:
    """GPUs that a server with these flags takes, and the flags that say so."""
    stated = {flag: value for flag, value in server_flags(flags).items() if flag in PARALLEL and value.isdigit()}
    return math.prod(map(int, stated.values())), " ".join(f"{flag} {value}" for flag, value in stated.items())
