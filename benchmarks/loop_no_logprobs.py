"""The server of the side `no_logprobs` of `trl-atropos bench loop --against trl`: its engine makes
no log-probabilities, and all requests that ask for them get one made-up value. What is trained on
them is no policy; what is measured is the loop above an engine that does less.

The server loads it by `--middleware benchmarks.loop_no_logprobs.WithoutLogprobs`.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import wraps

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from trl_atropos.server.sampled_logprobs import SampledLogprobs

MADE_UP = -5.548076629638672  # nats; with as many digits as a real one, which JSON has to hold


class WithoutLogprobs:
    """Middleware that does nothing. Its module patches vLLM when the server imports it."""

    def __init__(self, app) -> None:
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        await self.app(scope, receive, send)


def _without_logprobs(generate):
    """Returns the engine client's method, which asks the engine for no log-probabilities of sampled
    tokens and makes them up."""

    @wraps(generate)
    async def generated(
        client, prompt, sampling_params: SamplingParams, *args, **options
    ) -> AsyncIterator[RequestOutput]:
        is_asked = sampling_params.logprobs == 0
        if is_asked:
            sampling_params = sampling_params.clone()
            sampling_params.logprobs = None
        async with aclosing(generate(client, prompt, sampling_params, *args, **options)) as outputs:
            async for output in outputs:
                for completion in output.outputs:
                    if is_asked:
                        values = [MADE_UP] * len(completion.token_ids)
                        completion.logprobs = SampledLogprobs(None, None, values)
                yield output

    return generated


AsyncLLM.generate = _without_logprobs(AsyncLLM.generate)
