"""Makes Atropos' client of a vLLM server ask for numbers alone.

Of the answer of `/generate`, Atropos reads token ids, log-probabilities and why a completion ended.
In the usual answer, each log-probability is in a dictionary of its own, beside the text, and takes
5 microseconds to read: .6 seconds for a batch of 131,072 tokens, for which a trainer waits. A
server of trl_atropos answers a request with the header `ANSWER_HEADER` with lists of numbers, and
makes no text. Other servers do not know the header, and Atropos reads their answers itself.

Standard library and what Atropos itself imports only.
"""

import contextlib
import functools
import types

import aiohttp
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from environment_connections import KeptConnections
from pydantic_core import from_json

ANSWER_HEADER = "x-trl-atropos-answer"
NUMBERS = "numbers"


def read_lists(server=VLLMServer):
    """Gives Atropos' class a method that reads such answers. It returns what Atropos' own does:
    token ids of the prompt, and of each completion its token ids, its log-probabilities, and why it
    ended."""
    ask = server._tokens_and_logprobs_completion_wrapper

    @functools.wraps(ask)
    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs):
        client = _Client()
        names = {**ask.__globals__, "aiohttp": client}
        asked = types.FunctionType(ask.__code__, names, closure=ask.__closure__)
        prompt_tokens, *completions = await asked(self, **kwargs)
        if client.answer is None:
            return prompt_tokens, *completions
        fields = ("token_ids", "sampled_logprobs", "finish_reasons")
        return prompt_tokens, *(client.answer[field] for field in fields)

    server._tokens_and_logprobs_completion_wrapper = _tokens_and_logprobs_completion_wrapper


class _Client(KeptConnections):
    """Stands in for the module `aiohttp` in one call of Atropos' method. `answer` keeps an answer
    of numbers. Atropos gets an answer without completions in its place."""

    def __init__(self):
        self.answer = None

    def ClientSession(self):
        make_response = functools.partial(_Response, self)
        headers = {ANSWER_HEADER: NUMBERS}
        return super().ClientSession(headers=headers, response_class=make_response)


class _Response(aiohttp.ClientResponse):
    def __init__(self, client, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._client = client

    async def json(self, **options):
        answer = await self._parsed(options)
        if "sampled_logprobs" not in answer:
            return answer
        self._client.answer = answer
        return {"logprobs": [], "finish_reasons": []}

    async def _parsed(self, options):
        """Returns the answer. Pydantic's core reads it in a sixth of the time of Python's reader,
        and gives the same numbers. What it refuses is left to aiohttp."""
        if self.content_type == "application/json":
            with contextlib.suppress(ValueError):
                return from_json(await self.read())
        return await super().json(**options)
