"""Finds what clients of sessions will miss at the server that the run starts (docs/sessions.md).

`check/__init__.py` calls `findings`. What a client asks for is not known before it runs, so these
are warnings.
"""

from collections.abc import Iterator

from trl_atropos.check.launch import Case
from trl_atropos.errors import WARNING
from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.recipe import EnvironmentSpec, Recipe
from trl_atropos.services.environment_source import imports_from

TOOL_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser")
AGENT_PROMPT = 4096  # tokens: first prompts of published agents have about 1,500, and they grow
# Modules of this package by which an environment opens sessions
OPENERS = ("trl_atropos.session_client", "trl_atropos.agents")


def findings(recipe: Recipe, case: Case) -> Iterator[Finding]:
    """Yields what an environment's sessions will miss, if one of them has sessions."""
    uses_sessions = any(map(_uses_sessions, recipe.environments))
    yield from missing_for(case, uses_sessions)


def _uses_sessions(spec: EnvironmentSpec) -> bool:
    """Returns whether an environment opens sessions, as far as the imports of its script tell."""
    return spec.path is not None and imports_from(spec.script, OPENERS)


def missing_for(case: Case, uses_sessions: bool) -> Iterator[Finding]:
    """Yields what clients in sessions will miss at the server. Yields nothing for a server that
    runs already, whose flags are not known."""
    if not uses_sessions or case.flags is None or not case.recipe.services.start_vllm:
        return
    missing = [flag for flag in TOOL_FLAGS if flag not in case.flags]
    if missing:
        what = (
            "The server has no parser of tool calls, so that clients with tools will get HTTP 400"
        )
        seen = f"`vllm_args` without {' and '.join(missing)}"
        fix = (
            "Add `--enable-auto-tool-choice --tool-call-parser NAME` to `vllm_args`, with the "
            "parser of the model's family, such as `hermes` for Qwen3; leave it if no client of "
            "yours has tools."
        )
        yield Finding(what, seen, fix, "session-tools", WARNING)
    if case.max_model_len < AGENT_PROMPT:
        what = "The prompts of published agents will not fit the server, and get HTTP 400"
        seen = f"--max-model-len {case.max_model_len}"
        fix = (
            f"Raise `--max-model-len` in `vllm_args` to {AGENT_PROMPT} or more, with a model that "
            "takes as much; leave it if your client's prompts are short."
        )
        yield Finding(what, seen, fix, "session-length", WARNING)
