"""The processes of `trl-atropos bench sampling` that are no server: an engine without a server, and
a server without an engine.

    python -m benchmarks.sampling_roles engine MODEL FLAGS    reads questions from stdin, a line each
    python -m benchmarks.sampling_roles echo PORT TOKENS

The engine's process is vLLM's own client, as a server has it: `AsyncLLM`. A question is a JSON
object `{"clients": N, "tokens": N, "fields": {...}}`; the answer is a line on stdout, the figures
of `sampling_load.measure`.
"""

import asyncio
import json
import sys
from functools import partial

PROMPT = [7, 9, 11]  # behind a number of the client's own


def prompt_of(client: int) -> list[int]:
    """Returns a client's prompt of four tokens, of ids that every model has."""
    return [5 + client % 200, *PROMPT]


async def run_engine(model: str, flags: list[str]) -> None:
    """Answers questions until stdin ends."""
    import psutil
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    from benchmarks.sampling_load import measure
    from trl_atropos.server import sampled_logprobs

    sampled_logprobs.install()
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))
    engine = AsyncLLM.from_engine_args(arguments)
    way = await sampled_logprobs.refusal(engine)
    _say({"ready": True, "refusal": way})
    while True:
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            break
        question = json.loads(line)
        ask = partial(_complete, engine, question["fields"])
        _say(await measure(ask, question["clients"], question["tokens"], psutil.Process()))
    engine.shutdown()


async def _complete(engine, fields: dict, client: int, tokens: int) -> None:
    """Samples one completion, as a route does for a client that takes it whole."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=1.0,
        max_tokens=tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **fields,
    )
    prompt = {"prompt_token_ids": prompt_of(client)}
    async for output in engine.generate(prompt, params, f"bench-{client}"):
        (completion,) = output.outputs
    if len(completion.token_ids) != tokens:
        raise RuntimeError(f"{len(completion.token_ids)} tokens came, not {tokens}")


def _say(answer: dict) -> None:
    sys.stdout.write(f"{ANSWER}{json.dumps(answer)}\n")
    sys.stdout.flush()


ANSWER = "answer: "  # begins the lines that are no log of vLLM


def run_echo(port: int, tokens: int) -> None:
    """Serves `POST /generate` with an answer of the right size, without an engine."""
    import msgspec
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def generate(request: Request) -> Response:
        prompt = msgspec.json.decode(await request.body())["prompt"]["prompt_token_ids"]
        token_ids = [100 + number % 100 for number in range(tokens)]
        logprobs = [[{str(token): -1.2345678806304932}] for token in token_ids]
        reply = {
            "text": ["a" * tokens],
            "prompt": "",
            "finish_reasons": ["length"],
            "prompt_token_ids": prompt,
            "token_ids": [token_ids],
            "cached_tokens": 0,
            "logprobs": [logprobs],
        }
        return Response(msgspec.json.encode(reply), media_type="application/json")

    async def health(_request: Request) -> Response:
        return Response()

    routes = [
        Route("/generate", generate, methods=["POST"]),
        Route("/health", health),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    if role == "engine":
        asyncio.run(run_engine(words[0], words[1:]))
    else:
        run_echo(int(words[0]), int(words[1]))
