"""A `ToolCallingAgent` of smolagents with one tool, which answers a task in at most two steps.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python smolagents_agent.py TASK
"""

import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def length_of(word: str) -> int:
    """Returns how many letters a word has.

    Args:
        word: The word.
    """
    return len(word)


def main(task: str) -> None:
    model = OpenAIModel(
        model_id="policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        max_tokens=16,
        tool_choice="auto",  # "required", the default, samples below a grammar: see the README
    )
    agent = ToolCallingAgent(tools=[length_of], model=model, max_steps=2)
    print(agent.run(task))


if __name__ == "__main__":
    main(sys.argv[1])
