"""The command behind `trl-atropos serve MODEL --vllm_mode restart`: one address whose vLLM server can be restarted.

    python -m trl_atropos.server.front MODEL [--host H] [--port P] [--drain_timeout S] [any flag of `vllm serve`]

What it answers is in `restart.py`. This process owns the port; the engine server is its child and dies with it. Exit
codes: 143 and 130 after SIGTERM and SIGINT, 1 if the engine died by itself, with the reason on stderr.
"""

import argparse
import asyncio
import logging
import os
import sys

import uvicorn

from trl_atropos.errors import AtroposTrainingError
from trl_atropos.protocol import TOKEN_VARIABLE
from trl_atropos.server.engine import Engine
from trl_atropos.server.forward import make_session
from trl_atropos.server.launch import DEFAULTS
from trl_atropos.server.ready import ready_text, set_up_token
from trl_atropos.server.restart import WATCH_EVERY, Front
from trl_atropos.services.manager import require_free_port
from trl_atropos.services.signals import install_handlers


class _Server(uvicorn.Server):
    """Lets the front answer the requests that it holds as soon as a signal comes, instead of waiting for them."""

    def __init__(self, front: Front, host: str, port: int) -> None:
        options = {"log_config": None, "log_level": "warning", "access_log": False, "server_header": False}
        options |= {"date_header": False, "ws": "none", "lifespan": "off", "timeout_graceful_shutdown": 1}
        # Clients drop idle connections earlier than this; if the server did, a request could meet a closing one.
        super().__init__(uvicorn.Config(front, host, port, timeout_keep_alive=600, **options))
        self._front = front
        self._loop = asyncio.get_running_loop()
        self.interrupted = False

    def handle_exit(self, sig, frame) -> None:
        self.interrupted = True
        self._loop.call_soon_threadsafe(self._front.end, "the server was asked to shut down")
        super().handle_exit(sig, frame)


async def run(options: argparse.Namespace, flags: list[str], ready: str) -> str:
    """
    Serves until the engine dies, and says `ready` when it answers for the first time. Returns the reason for the end;
    a signal raises `Interrupted` in its place.
    """
    token = os.environ[TOKEN_VARIABLE]
    async with make_session() as session:
        engine = Engine(options.model, flags, options.seed, session)
        front = Front(engine, session, options.model, token, options.drain_timeout)
        front.server = _Server(front, options.host, options.port)
        watch = asyncio.create_task(front.supervise())
        told = asyncio.create_task(_say_when_ready(front, ready))
        try:
            await front.server.serve()
        finally:
            watch.cancel()
            told.cancel()
            engine.stop()  # holds up the loop, where there is nothing left to do
            engine.show_log()
            if front.server.interrupted:  # else the reason for the end names the log
                engine.remove_log()
        return front.ended.result()


async def _say_when_ready(front: Front, text: str) -> None:
    while not front.engine.description:
        await asyncio.sleep(WATCH_EVERY)
    sys.stderr.write(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trl-atropos serve --vllm_mode restart",
        description="Serve a model and restart the server on each checkpoint of a trainer, unseen by its clients.",
        epilog="Every other flag goes to vLLM: see `vllm serve --help`.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="Hub name or folder of the first model")
    parser.add_argument("--host", default=DEFAULTS["--host"], help="default: %(default)s")
    parser.add_argument("--port", type=int, default=int(DEFAULTS["--port"]), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of sampling; one more at each restart (default: 0)")
    parser.add_argument(
        "--drain_timeout",
        type=float,
        default=600.0,
        help="seconds that a publish waits for requests in flight (default: %(default)s)",
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    options, flags = build_parser().parse_known_args(argv)
    try:
        where = set_up_token(str(options.port))
        require_free_port(f"http://{options.host}:{options.port}", "the server", "give another one with `--port`")
    except AtroposTrainingError as problem:
        sys.exit(f"trl-atropos serve: {problem}")
    install_handlers()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    ready = ready_text(options.host, str(options.port), "restart", where)
    sys.exit(f"trl-atropos serve: {asyncio.run(run(options, flags, ready))}")


if __name__ == "__main__":
    main()
