"""Starts the inference server: vLLM's own API server with our middleware, worker extension and
defaults.

    python -m trl_atropos.server.launch MODEL [--vllm_mode colocate] [any flag of `vllm serve`]

`trl-atropos serve` is the same. Run in a process of its own, because vLLM reads `sys.argv` and owns
the event loop.
"""

import argparse
import errno
import importlib.util
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from trl_atropos.activity import importing
from trl_atropos.errors import AtroposTrainingError, RecipeError, ServiceError
from trl_atropos.flags import server_flags
from trl_atropos.modes import MODES
from trl_atropos.privacy import CLOSED_VARIABLE
from trl_atropos.protocol import NUMERICS, TOKEN_VARIABLE, environment_token, hide_token
from trl_atropos.server.processes import FAST_LOGPROBS_VARIABLE, SERVER_VARIABLE
from trl_atropos.server.vllm_flags import unknown_flags
from trl_atropos.terminal import CommandParser, fitted

# Flags that hold if the command line does not set them. Loopback only: the control routes change
# weights. The model's own generation_config.json would change how environments sample.
DEFAULTS = {"--host": "127.0.0.1", "--port": "9001", "--generation-config": "vllm"}
REQUIRED = {
    "--logprobs-mode": "processed_logprobs",
    "--worker-extension-cls": "trl_atropos.server.extension.WorkerExtension",
}
CPU_DEFAULTS = {"--distributed-executor-backend": "uni", "--dtype": "float32"}
CPU_REQUIRED = {"--load-format": "trl_atropos_shared"}
# On a CPU, vLLM would claim 92 % of the machine's memory for its cache, and end with a traceback if
# anything else runs. With one of these flags, or with the variable, you decide.
CPU_CACHE_GIB = 1
CACHE_FLAGS = {"--gpu-memory-utilization", "--kv-cache-memory-bytes", "--kv-cache-memory"}
CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
# For modes that send adapters: places for the version in use and the next one, and room for the
# versions of long requests.
LORA_DEFAULTS = {"--max-loras": "2", "--max-cpu-loras": "8", "--max-lora-rank": "64"}
# Flags that each value of `--numerics` requires.
NUMERICS_FLAGS = {
    "default": {},
    "float32_head": {"--hf-overrides": '{"head_dtype": "float32"}'},
    "float16": {"--dtype": "float16"},
    # The kernels that the trainer computes with are not compiled; those of decoding are replayed as
    # CUDA graphs.
    "bitwise": {
        "--compilation-config": (
            '{"mode": 0, "custom_ops": ["all"], "cudagraph_mode": "FULL_DECODE_ONLY"}'
        )
    },
}
WITHOUT_PORT = {"--uds", "--headless"}  # flags of servers that listen on no port
CONFIGS = ("config.json", "params.json")  # of a model's folder; the second is Mistral's own
NUMERICS_VARIABLE = "TRL_ATROPOS_NUMERICS"
# Begins vLLM's flags of speculative decoding: `--speculative-config`, its entries such as
# `--speculative-config.method`, and `--spec-method`, `--spec-model` and `--spec-tokens`.
SPECULATION = "--spec"
REFUSED_FLAG = "vllm-flag"  # code of the errors
# holds the text that a server prints below vLLM's own log when it is ready
READY_VARIABLE = "TRL_ATROPOS_READY"


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of our own flags; vLLM parses the others."""
    parser = CommandParser(
        prog="trl-atropos serve",
        usage="trl-atropos serve MODEL [--vllm_mode MODE] [--numerics NUMERICS] ...",
        description="Start the vLLM server that environments sample from and a trainer keeps in "
        "step with.",
        epilog="Every other flag goes to vLLM: see `vllm serve --help`. The control routes need "
        f"the token in {TOKEN_VARIABLE}; if it is not set, one is made and kept in a file, "
        "which the last lines of the start name.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="Hub name or folder of the model")
    mode = (
        "how the trainer will publish its weights (default: colocate); the two LoRA modes add "
        "--enable-lora, 'restart' puts a front before the server that holds requests while it is "
        "away"
    )
    parser.add_argument("--vllm_mode", choices=tuple(MODES), default="colocate", help=mode)
    fast = (
        "whether log-probabilities of sampled tokens take the fast way through vLLM, with the same "
        "values (default: true)"
    )
    parser.add_argument("--fast_logprobs", choices=("true", "false"), help=fast)
    numerics = (
        "how closely it computes what the trainer computes, as the trainer's `numerics` "
        "(default: default)"
    )
    parser.add_argument("--numerics", choices=NUMERICS, default="default", help=numerics)
    return parser


def main(argv: list[str] | None = None) -> None:
    """Becomes the server, and ends the process with it: with 130 after Ctrl-C, 143 after SIGTERM,
    and 1 if the model or the port cannot be used."""
    signals: list[int] = []
    try:
        _serve(argv, signals)
    except KeyboardInterrupt:  # before vLLM's event loop takes it
        signals.append(signal.SIGINT)
    if signals:
        name = "Ctrl-C" if signals[0] == signal.SIGINT else signal.Signals(signals[0]).name
        sys.stderr.write(fitted(f"\ntrl-atropos serve: stopped by {name}.\n"))
        sys.exit(128 + signals[0])


def _serve(argv: list[str] | None, signals: list[int]) -> None:
    """Parses our flags, sets the environment, and runs vLLM's own `main`. Appends a signal that
    ends this to `signals`."""
    parser = build_parser()
    options, given = parser.parse_known_args(argv)
    if importlib.util.find_spec("vllm") is None:
        message = (
            f"trl-atropos serve: vLLM is not installed for {sys.executable}. On a GPU: "
            '`pip install "trl_atropos[vllm]"`; on a CPU: `make quickstart` makes an environment '
            "with it."
        )
        sys.exit(fitted(message))
    _refuse_unknown_flags(parser, options.vllm_mode, given)
    stated = DEFAULTS | server_flags(given)
    host = stated["--host"]
    port = stated["--port"]
    try:
        _require_model(options.model)
        if not WITHOUT_PORT & stated.keys():
            _require_port(host, port)  # before the token of the server there is overwritten
        ready = ready_text(host, port, options.vllm_mode, set_up_token(port))
    except AtroposTrainingError as error:
        sys.exit(fitted(f"trl-atropos serve: {error}"))
    mode = MODES[options.vllm_mode]
    _set_variables(options, ready)
    if mode.restarts_engine:
        command = [sys.executable, "-m", "trl_atropos.front.serve", options.model, *given]
        os.execv(sys.executable, [*command, "--numerics", options.numerics])
    os.environ["CUDA_MPS_CLIENT_PRIORITY"] = "0"  # under NVIDIA's MPS: sampling before training
    # Environments keep one name for the model, whatever is served.
    os.environ.setdefault("VLLM_SKIP_MODEL_NAME_VALIDATION", "1")
    if mode.loads_files:
        os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    with importing("PyTorch"):
        import torch  # after the help text, which should not wait for it

    cpu = not torch.cuda.is_available()
    try:
        arguments = vllm_arguments(
            options.model, given, cpu=cpu, mode=options.vllm_mode, numerics=options.numerics
        )
    except RecipeError as error:
        parser.error(str(error))
    if cpu:
        _prepare_cpu(stated, eager="--enforce-eager" in arguments)
    sys.argv = ["trl-atropos serve", *arguments]
    with importing("vLLM"):
        from trl_atropos.server.compat import note_signals, run_server

    # For the engine's processes, which need no token. On a GPU, they must not close themselves.
    hide_token()
    os.environ.pop(CLOSED_VARIABLE, None)
    note_signals(signals)
    run_server()


def _set_variables(options: argparse.Namespace, ready: str) -> None:
    """Sets the environment of the server, or of a front and its servers. `ready` is what it says
    when it serves."""
    # a front sets it to nothing: its child is not what users talk to
    os.environ.setdefault(READY_VARIABLE, ready)
    os.environ[NUMERICS_VARIABLE] = options.numerics
    os.environ[SERVER_VARIABLE] = "1"
    if options.fast_logprobs is not None:  # else as the environment says: that of a front, for one
        os.environ[FAST_LOGPROBS_VARIABLE] = "1" if options.fast_logprobs == "true" else "0"
    if options.numerics == "bitwise":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"


def _prepare_cpu(stated: dict[str, str], eager: bool) -> None:
    """Sets the environment of a server on the CPU. `stated` are its flags, and `eager` says that
    vLLM compiles no model."""
    # a service's log has it from vLLM
    if not _states_cache(stated) and sys.stderr.isatty():
        message = (
            f"trl-atropos serve: the KV cache gets {CPU_CACHE_GIB} GiB of memory; "
            f"`{CACHE_VARIABLE}=N` makes it N.\n"
        )
        sys.stderr.write(fitted(message))
    if "--data-parallel-size" not in stated:
        # one process less, eight seconds less to start
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if eager:
        # vLLM compiles a few small functions even then, which takes a C++ compiler that a machine
        # may not have.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def _refuse_unknown_flags(parser: argparse.ArgumentParser, mode: str, given: list[str]) -> None:
    """Ends the process with one line where vLLM would end it with all of its usage."""
    if "--model" in server_flags(given):
        parser.error("write the model without `--model`: `trl-atropos serve MODEL`")
    for flag, meant in unknown_flags(given, mode).items():
        fix = f"Did you mean `{meant}`?" if meant else "`vllm serve --help=all` lists them."
        parser.error(f"vLLM has no flag `{flag}`. {fix}")


def _require_model(model: str) -> None:
    """Raises `ServiceError` if `model` is the path of a folder that is not there, or that holds no
    model. vLLM would take it for a name of the Hub, and end with a traceback."""
    fix = "Name the folder of a model, or a model of the Hub such as Qwen/Qwen3-0.6B."
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if os.path.isdir(model):
        if not any(Path(model, name).exists() for name in CONFIGS):
            what = f"the folder {model} holds no model: it has no {CONFIGS[0]}"
            raise ServiceError(what, model, fix, "model")
    elif is_path and not os.path.exists(model):
        what = f"the model folder {model} does not exist (looked in {os.getcwd()})"
        raise ServiceError(what, model, fix, "model")


def _require_port(host: str, port: str) -> None:
    """Raises `ServiceError` if the server cannot listen there. vLLM would say so in a traceback."""
    if not port.isdigit():  # vLLM's parser names it
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, int(port)), family=family).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        seen = f"port {port} on {host}"
        what = f"{seen} cannot be listened on ({reason})"
        fix = "Give another `--host` or `--port`."
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            what = f"{seen} is already in use"
            fix = "Stop what runs there, or give another one with `--port`."
        raise ServiceError(what, seen, fix, "port-taken") from error


def vllm_arguments(
    model: str, given: list[str], *, cpu: bool, mode: str = "colocate", numerics: str = "default"
) -> list[str]:
    """Returns the command line of vLLM's server. Raises `RecipeError` for flags in `given` that no
    server of a trainer can have."""
    required = dict(REQUIRED)
    defaults = dict(DEFAULTS)
    stated = server_flags(given)
    if cpu:
        required |= CPU_REQUIRED
        defaults |= CPU_DEFAULTS
        if not _states_cache(stated):
            defaults["--kv-cache-memory-bytes"] = str(CPU_CACHE_GIB << 30)
    required |= NUMERICS_FLAGS[numerics]
    if numerics == "bitwise" and cpu:
        what = "--numerics bitwise needs a GPU: vLLM has no batch-invariant kernels for the CPU"
        raise RecipeError(what, "numerics: bitwise", "Use another value, or a GPU.")
    _refuse_api_key(stated)
    _refuse_speculation(stated)
    for flag, value in required.items():
        if stated.get(flag, value) != value:
            what = f"{flag} {stated[flag]}: this server needs `{flag} {value}`"
            raise RecipeError(what, _seen(flag, stated), "Leave the flag out.", REFUSED_FLAG)
    arguments = ["--model", model, "--middleware", "trl_atropos.server.control.Control", *given]
    if MODES[mode].needs_adapter or "--enable-lora" in stated:
        defaults |= LORA_DEFAULTS
        if "--enable-lora" not in stated:
            arguments.append("--enable-lora")
    for flag, value in (defaults | required).items():
        if flag not in stated:
            arguments += [flag, value]
    if cpu and not {"--enforce-eager", "--no-enforce-eager"} & stated.keys():
        # compiling takes longer than it saves on small CPU models
        arguments.append("--enforce-eager")
    return arguments


def _seen(flag: str, stated: Mapping[str, str]) -> str:
    """Returns a flag as a recipe has it."""
    return f"vllm_args: {flag} {stated[flag]}".rstrip()


def _refuse_api_key(stated: Mapping[str, str]) -> None:
    """Raises `RecipeError` for a key that a trainer does not send."""
    if "--api-key" not in stated and not os.environ.get("VLLM_API_KEY"):
        return
    what = (
        "--api-key (or VLLM_API_KEY): neither `/generate` nor a trainer knows it, so that it would "
        "protect nothing"
    )
    fix = "Leave it out, unset the variable, and keep the address private."
    seen = "vllm_args: --api-key" if "--api-key" in stated else "VLLM_API_KEY is set"
    raise RecipeError(what, seen, fix, REFUSED_FLAG)


def _refuse_speculation(stated: Mapping[str, str]) -> None:
    """Raises `RecipeError` for speculative decoding, of which nobody has shown that it samples
    from the policy."""
    for flag in stated:
        if flag.startswith(SPECULATION):
            what = (
                f"{flag}: with speculative decoding, what is sampled is not known to follow the "
                "policy. vLLM's engine for the CPU reads temperatures of drafted tokens that it "
                "never wrote (github.com/vllm-project/vllm/issues/55005) and ends if a request has "
                "`top_k`; on a GPU it was not compared"
            )
            raise RecipeError(what, _seen(flag, stated), "Leave the flag out.", REFUSED_FLAG)


def _states_cache(stated: Mapping[str, str]) -> bool:
    """Returns whether flags or the environment say how large the cache of a CPU server is."""
    return bool(CACHE_FLAGS & stated.keys() or os.environ.get(CACHE_VARIABLE))


def set_up_token(port: str) -> Path | None:
    """Makes a control token if `TRL_ATROPOS_TOKEN` has none: sets it there and writes it into a
    file that only this user can read, since a terminal scrolls and others may read a log. Returns
    the file."""
    if environment_token():
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(cache, "trl_atropos", f"token-{port}")
    token = secrets.token_urlsafe(24)
    os.environ[TOKEN_VARIABLE] = token
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # the new one has this mode whatever the old one had
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(token)
    except OSError as error:
        raise ServiceError(
            f"the control token cannot be kept in {path} ({error.strerror}). Make one yourself, "
            f"for server and trainer: `export {TOKEN_VARIABLE}=$(openssl rand -hex 24)`"
        ) from error
    return path


def url_of(host: str, port: str | int) -> str:
    """Returns the URL of a server: an address with colons is IPv6, which goes into brackets."""
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"


def ready_text(host: str, port: str, mode: str, token_file: Path | None) -> str:
    """Returns the lines that a server prints when it is ready, with the command of a trainer.
    Without a file, the token is in `TRL_ATROPOS_TOKEN`."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    url = url_of(host, port)
    token = TOKEN_VARIABLE
    command = [
        f"trl-atropos train RECIPE --vllm_mode {mode} --start_vllm false",
        f"--vllm_server_base_url {url}",
    ]
    if token_file is not None:
        token = token_file
        command.insert(0, f"{TOKEN_VARIABLE}=$(cat {token_file})")
    # short lines that the shell reads as one: a terminal would break a long one anywhere
    copied = " \\\n    ".join(command)
    ready = f"trl-atropos serve: ready at {url}, vllm_mode {mode}, token in {token}; next:"
    return fitted(f"\n{ready}\n") + f"  {copied}\n"


if __name__ == "__main__":
    main()
