"""Starts the inference server: vLLM's own API server with our middleware, worker extension and defaults.

    python -m trl_atropos.server.launch MODEL [--vllm_mode colocate] [any flag of `vllm serve`]

`trl-atropos serve` is the same. Called in a process of its own, because vLLM reads `sys.argv` and owns the event loop.
"""

import argparse
import importlib.util
import os
import sys

from trl_atropos.flags import server_flags
from trl_atropos.protocol import ADAPTER_MODES, TOKEN_VARIABLE, VLLM_MODES

# What the user did not say. Loopback only: the control routes change weights.
DEFAULTS = {
    "--host": "127.0.0.1",
    "--port": "9001",
    "--generation-config": "vllm",  # the model's own generation_config.json would change how environments sample
}
# What must hold for the log-probabilities and the control routes to be right.
REQUIRED = {
    "--logprobs-mode": "processed_logprobs",
    "--worker-extension-cls": "trl_atropos.server.extension.WorkerExtension",
}
CPU_DEFAULTS = {"--distributed-executor-backend": "uni", "--dtype": "float32"}
CPU_REQUIRED = {"--load-format": "trl_atropos_shared"}
# For a mode that sends adapters: places for the version in use and the next, and room for those of long requests.
LORA_DEFAULTS = {"--max-loras": "2", "--max-cpu-loras": "8", "--max-lora-rank": "64"}
MIDDLEWARE = "trl_atropos.server.control.Control"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trl-atropos serve",
        description="Start the vLLM server that environments sample from and a trainer keeps in step with.",
        epilog="Every other flag goes to vLLM: see `vllm serve --help`. The control routes need the token in "
        f"{TOKEN_VARIABLE}; if it is not set, one is made and kept in a file, which the last lines of the start name.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="Hub name or folder of the model")
    parser.add_argument(
        "--vllm_mode",
        choices=VLLM_MODES,
        default="colocate",
        help="how the trainer will publish its weights (default: colocate); the two LoRA modes add --enable-lora, "
        "'restart' puts a front before the server that holds requests while it is away",
    )
    return parser


def vllm_arguments(model: str, given: list[str], *, cpu: bool, mode: str = "colocate") -> list[str]:
    """The command line of vLLM's server. Raises `ValueError` where `given` contradicts what must hold."""
    required = {**REQUIRED, **(CPU_REQUIRED if cpu else {})}
    defaults = {**DEFAULTS, **(CPU_DEFAULTS if cpu else {})}
    stated = server_flags(given)
    for flag, value in required.items():
        if flag in stated and stated[flag] != value:
            raise ValueError(f"{flag} {stated[flag]}: this server needs `{flag} {value}`. Leave the flag out.")
    arguments = ["--model", model, "--middleware", MIDDLEWARE, *given]
    if mode in ADAPTER_MODES or "--enable-lora" in stated:
        defaults |= LORA_DEFAULTS
        if "--enable-lora" not in stated:
            arguments.append("--enable-lora")
    for flag, value in {**required, **defaults}.items():
        if flag not in stated:
            arguments += [flag, value]
    if cpu and not {"--enforce-eager", "--no-enforce-eager"} & set(stated):
        arguments.append("--enforce-eager")  # compiling takes longer than it saves on small CPU models
    return arguments


def main(argv: list[str] | None = None) -> None:
    options, given = build_parser().parse_known_args(argv)
    if importlib.util.find_spec("vllm") is None:
        sys.exit(
            f"trl-atropos serve: vLLM is not installed for {sys.executable}. On a GPU: `pip install "
            '"trl_atropos[vllm]"`; on a CPU: `make quickstart` makes an environment with it.'
        )
    if options.vllm_mode == "restart":
        from trl_atropos.server.front import main as front

        return front([options.model, *given])
    if options.vllm_mode == "lora":
        os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    import torch  # after the help text, which should not wait for it

    cpu = not torch.cuda.is_available()
    if cpu and "--data-parallel-size" not in server_flags(given):
        # One process less, and eight seconds less to start; forced back to two unless this is set.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        arguments = vllm_arguments(options.model, given, cpu=cpu, mode=options.vllm_mode)
    except ValueError as error:
        sys.stderr.write(f"trl-atropos serve: {error}\n")
        sys.exit(2)
    from trl_atropos.errors import AtroposTrainingError
    from trl_atropos.server.ready import READY_VARIABLE, ready_text, set_up_token

    stated = server_flags(arguments)
    host, port = stated["--host"], stated["--port"]
    try:
        os.environ[READY_VARIABLE] = ready_text(host, port, options.vllm_mode, set_up_token(port))
    except AtroposTrainingError as error:
        sys.exit(f"trl-atropos serve: {error}")
    if cpu and "--enforce-eager" in arguments:
        # vLLM compiles a few small functions even then, which takes a C++ compiler that a machine may not have.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    sys.argv = ["trl-atropos serve", *arguments]
    from trl_atropos.server.compat import server_main

    server_main()()


if __name__ == "__main__":
    main()
