"""What a server says when it is ready: its URL and mode, where its token is, and what to do next.

`launch.py` and `front.py` prepare it; `control.py` and `front.py` say it, below all that vLLM logs while it starts.
"""

import asyncio
import os
import secrets
import socket
import sys
from pathlib import Path

from trl_atropos.errors import ServiceError
from trl_atropos.protocol import TOKEN_VARIABLE, environment_token

READY_VARIABLE = "TRL_ATROPOS_READY"
"""Environment variable that takes the text into the process whose startup it ends."""

UVICORN_ENDS = 0.5  # seconds after which the last lines of its start are out


def set_up_token(port: str) -> str:
    """
    Makes a control token if `TRL_ATROPOS_TOKEN` has none: sets it there and writes it into a file that only this user
    can read. A terminal scrolls, and a log may be read by others. Returns where the token is.
    """
    if environment_token():
        return f"the one in {TOKEN_VARIABLE}, which the trainer needs, too"
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "trl_atropos", f"token-{port}")
    os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(24)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # the new one has this mode whatever the old one had
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(os.environ[TOKEN_VARIABLE])
    except OSError as error:
        raise ServiceError(
            f"the control token cannot be kept in {path} ({error.strerror}). Make one yourself, for server and "
            f"trainer: `export {TOKEN_VARIABLE}=$(openssl rand -hex 24)`"
        ) from error
    return f"in {path}: `export {TOKEN_VARIABLE}=$(cat {path})` where the trainer starts"


def ready_text(host: str, port: str, mode: str, token: str) -> str:
    """`token` says where it is."""
    url = f"http://{socket.gethostname() if host in ('0.0.0.0', '::') else host}:{port}"
    return (
        f"\ntrl-atropos serve: ready at {url}, for `vllm_mode: {mode}`.\n"
        f"  The token is {token}.\n"
        f"  Environments sample with `--openai.server_type vllm --openai.base_url {url}/v1`.\n"
        f"  A recipe trains with `--vllm_mode {mode} --start_vllm false --vllm_server_base_url {url}`.\n"
    )


def say_when_started(send):
    """Of an ASGI lifespan: passes its messages on, and says what is in `READY_VARIABLE` when startup is complete."""

    async def told(message) -> None:
        await send(message)
        if message["type"] == "lifespan.startup.complete":
            text = os.environ.get(READY_VARIABLE, "")
            asyncio.get_running_loop().call_later(UVICORN_ENDS, sys.stderr.write, text)

    return told
