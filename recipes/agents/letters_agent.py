"""An agent of openai-agents, as one would write it without any training in mind: it answers one
word, as a stream.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python letters_agent.py WORD
"""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from openai.types.responses import ResponseTextDeltaEvent


@function_tool(strict_mode=False)  # vLLM samples a strict tool below a grammar: see the README
def length_of(word: str) -> int:
    """Returns how many letters a word has."""
    return len(word)


async def main(word: str) -> None:
    set_tracing_disabled(True)  # it would send each conversation to OpenAI
    set_default_openai_api("chat_completions")
    agent = Agent(
        name="speller",
        instructions="Spell.",
        tools=[length_of],
        model="policy",
        model_settings=ModelSettings(max_tokens=16),
    )
    run = Runner.run_streamed(agent, word, max_turns=2)
    async for event in run.stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            print(event.data.delta, end="", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
