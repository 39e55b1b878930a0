"""Starts the inference server: vLLM's own API server with our middleware, worker extension and defaults.

    python -m trl_atropos.server.launch MODEL [--vllm_mode colocate] [any flag of `vllm serve`]

`trl-atropos serve` is the same. Called in a process of its own, because vLLM reads `sys.argv` and owns the event loop.
"""

import argparse
import os
import secrets
import sys

from trl_atropos.flags import stated_flags
from trl_atropos.protocol import TOKEN_VARIABLE

# What the user did not say. Loopback only: the control routes change weights.
DEFAULTS = {
    "--host": "127.0.0.1",
    "--port": "9001",
    "--dtype": "float32",  # the trainer updates these very weights, and 16 bits would lose small steps
    "--generation-config": "vllm",  # the model's own generation_config.json would change how environments sample
}
# What must hold for the log-probabilities and the control routes to be right.
REQUIRED = {
    "--logprobs-mode": "processed_logprobs",
    "--worker-extension-cls": "trl_atropos.server.extension.WorkerExtension",
}
CPU_DEFAULTS = {"--distributed-executor-backend": "uni"}
CPU_REQUIRED = {"--load-format": "trl_atropos_shared"}
MIDDLEWARE = "trl_atropos.server.control.Control"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trl-atropos serve",
        description="Start the vLLM server that environments sample from and a trainer keeps in step with.",
        epilog="Every other flag goes to vLLM: see `vllm serve --help`. The control routes need the token in "
        f"{TOKEN_VARIABLE}, which is made and printed if it is not set; give the trainer the same one.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="Hub name or folder of the model")
    parser.add_argument(
        "--vllm_mode",
        choices=["colocate"],
        default="colocate",
        help="how the trainer will publish its weights (default: colocate)",
    )
    return parser


def vllm_arguments(model: str, given: list[str], *, cpu: bool) -> list[str]:
    """The command line of vLLM's server. Raises `ValueError` where `given` contradicts what must hold."""
    required = {**REQUIRED, **(CPU_REQUIRED if cpu else {})}
    defaults = {**DEFAULTS, **(CPU_DEFAULTS if cpu else {})}
    stated = {flag.replace("_", "-"): value for flag, value in stated_flags(given).items()}  # vLLM takes both
    for flag, value in required.items():
        if flag in stated and stated[flag] != value:
            raise ValueError(f"{flag} {stated[flag]}: this server needs `{flag} {value}`. Leave the flag out.")
    arguments = ["--model", model, "--middleware", MIDDLEWARE, *given]
    for flag, value in {**required, **defaults}.items():
        if flag not in stated:
            arguments += [flag, value]
    if cpu and not {"--enforce-eager", "--no-enforce-eager"} & set(stated):
        arguments.append("--enforce-eager")  # compiling takes longer than it saves on small CPU models
    return arguments


def main(argv: list[str] | None = None) -> None:
    options, given = build_parser().parse_known_args(argv)
    import torch  # after the help text, which should not wait for it

    cpu = not torch.cuda.is_available()
    if cpu:
        # One process less, and eight seconds less to start; forced back to two unless this is set.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        arguments = vllm_arguments(options.model, given, cpu=cpu)
    except ValueError as error:
        sys.exit(f"trl-atropos serve: {error}")
    if not os.environ.get(TOKEN_VARIABLE):
        os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(24)
        sys.stderr.write(f"Control token for the trainer:\n  export {TOKEN_VARIABLE}={os.environ[TOKEN_VARIABLE]}\n")
    if cpu and "--enforce-eager" in arguments:
        # vLLM compiles a few small functions even then, which takes a C++ compiler that a machine may not have.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    sys.argv = ["trl-atropos serve", *arguments]
    from trl_atropos.server.compat import server_main

    server_main()()


if __name__ == "__main__":
    main()
