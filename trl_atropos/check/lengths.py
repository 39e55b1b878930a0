"""Finds what is too long: rollouts for the server, the model or the trainer, and completions for
the deadlines of those who wait for them.

`check/__init__.py` calls `lengths` and `deadlines`. An environment's settings are those that the
recipe states, and the defaults that its script writes.
"""

import ast
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trl_atropos.check.launch import Case
from trl_atropos.check.services import environment_finding
from trl_atropos.errors import WARNING
from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.flags import number_of
from trl_atropos.recipe import EnvironmentSpec, Recipe
from trl_atropos.services.environment_source import parse_script
from trl_atropos.weights.model_setup import num_positions

LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"  # vLLM's variable
FASTEST = 100  # tokens a second of one completion, beside others: more than most servers sample
WORKER_TIMEOUT = 600  # seconds: Atropos' default (atroposlib/envs/base.py)
REQUEST_TIMEOUT = 1200  # seconds: Atropos' default (atroposlib/envs/server_handling)


def lengths(recipe: Recipe, case: Case) -> Iterator[Finding]:
    """Yields what is longer than the server, the model or the trainer takes, in tokens."""
    starts = recipe.services.start_vllm and case.flags is not None
    longest = recipe.training.max_sequence_length
    served = math.inf  # the flags of a server that runs already are not known
    if starts:
        served = case.max_model_len
    limit = served
    if longest:
        limit = min(served, longest)
    if longest and longest > served:
        what = "The server samples shorter rollouts than the trainer is to take"
        seen = f"max_sequence_length: {longest}, --max-model-len {served}"
        fix = f"Lower `max_sequence_length`, or start the server with `--max-model-len {longest}`."
        yield Finding(what, seen, fix, "sequence-length")
    positions = num_positions(case.config)
    if starts and served > positions and os.environ.get(LONGER, "0") != "1":
        what = (
            "The server is to take longer rollouts than the model was made for, and vLLM will "
            "not start"
        )
        seen = f"--max-model-len {served}, max_position_embeddings: {positions:.0f}"
        fix = f"Lower `--max-model-len` in `vllm_args` to {positions:.0f} or less."
        yield Finding(what, seen, fix, "model-length")
    wrong_divisor = list(_divisor(recipe))
    yield from wrong_divisor
    completion = recipe.training.max_completion_length
    default = type(recipe.training).max_completion_length
    if not wrong_divisor and completion is not None and limit <= completion != default:
        what = (
            "Completions cannot become as long as `max_completion_length`, because prompts "
            "count too"
        )
        seen = f"max_completion_length: {completion}, the longest rollout: {limit}"
        fix = f"Lower `max_completion_length`, or raise {_bound(limit, longest)}."
        yield Finding(what, seen, fix, "completion-length", WARNING)
    for spec in recipe.environments:
        tokens = recipe.stated_number(spec, "max_token_length")
        if tokens and tokens > limit:
            what = "it samples longer rollouts than the server takes or the trainer trains on"
            seen = f"max_token_length: {tokens:.0f}, the longest rollout: {limit}"
            fix = f"Lower `max_token_length` to {limit}."
            yield environment_finding(spec, what, seen, fix, "environment-length", WARNING)
        yield from _completions(recipe, spec, limit, _bound(limit, longest))
    for spec in recipe.evaluations:  # whose rollouts are not trained on
        yield from _completions(recipe, spec, served, _bound(served, None))


def _bound(limit: float, longest: int | None) -> str:
    """Returns the setting that bounds rollouts to `limit` tokens. `longest` is the trainer's
    bound."""
    if limit == longest:
        return "`max_sequence_length`"
    return "`--max-model-len` in `vllm_args`"


def _completions(
    recipe: Recipe, spec: EnvironmentSpec, limit: float, bound: str
) -> Iterator[Finding]:
    """Yields a finding if an environment asks for completions that leave no room for a prompt."""
    settings = _settings(recipe, spec)
    tokens = number_of(settings.get("max_new_tokens"))
    if tokens and tokens >= limit:
        what = (
            "its completions cannot become as long as `max_new_tokens`, because prompts count too"
        )
        seen = f"max_new_tokens: {tokens:.0f}, the longest rollout: {limit}"
        fix = f"Lower `max_new_tokens`, or raise {bound}."
        yield environment_finding(spec, what, seen, fix, "completion-length", WARNING)


def _divisor(recipe: Recipe) -> Iterator[Finding]:
    """Yields a finding if the loss divides by more tokens than a completion has, as far as the
    environments' settings tell."""
    divisor = recipe.training.max_completion_length
    if recipe.training.loss_type != "dr_grpo" or not divisor or not recipe.environments:
        return
    tokens = {}
    for spec in recipe.environments:
        tokens[spec.name] = _longest_completion(recipe, spec) or math.inf
    longest = max(tokens.values())
    if divisor > longest:
        what = (
            "`loss_type: dr_grpo` divides by `max_completion_length`, which is more than any "
            "environment samples"
        )
        sampled = ", ".join(f"{name}: at most {size:.0f} tokens" for name, size in tokens.items())
        seen = f"max_completion_length: {divisor}, {sampled}"
        fix = (
            f"Set `max_completion_length: {longest:.0f}`, or the gradients are smaller by the "
            "ratio. (If rollouts branch, set it to the most tokens that one trains in all branches "
            "together.)"
        )
        yield Finding(what, seen, fix, "loss-divisor", WARNING)


# ---------------------------------------------------------------------------------------- deadlines


@dataclass(frozen=True)
class Deadline:
    """Holds how long something waits for a completion."""

    who: str
    setting: str
    seconds: float  # 0 or less: without end
    place: str = ""  # of the setting, if that is not the recipe itself


def deadlines(recipe: Recipe) -> Iterator[Finding]:
    """Yields the deadlines that end before the longest completion can be sampled."""
    if recipe.training.replay_paths is not None:
        return
    trainer = Deadline("The trainer", "rollout_timeout", recipe.training.rollout_timeout)
    for spec in recipe.environments:
        yield from _too_soon(recipe, spec, trainer)
    run = Deadline("The run", "eval_timeout", recipe.training.eval_timeout)
    for spec in recipe.evaluations:
        yield from _too_soon(recipe, spec, run)


def _too_soon(recipe: Recipe, spec: EnvironmentSpec, waits: Deadline) -> Iterator[Finding]:
    """Yields the deadlines of an environment, and `waits`, if they end too soon."""
    settings = _settings(recipe, spec)
    tokens = number_of(settings.get("max_new_tokens"))
    if not tokens:
        return
    least = tokens / FASTEST
    for deadline in (_of_group(spec, settings), _of_request(spec), waits):
        if not 0 < deadline.seconds < least:
            continue
        what = (
            f"{deadline.who} waits no longer than `{deadline.setting}`, and a completion of "
            f"{tokens:.0f} tokens takes {least:.0f} s even at {FASTEST} tokens a second"
        )
        seen = f"{deadline.setting}: {deadline.seconds:g} s, max_new_tokens: {tokens:.0f}"
        fix = (
            f"Raise `{deadline.setting}`{deadline.place} above {2 * least:.0f}, or lower "
            "`max_new_tokens`."
        )
        yield Finding(what, seen, fix, "deadline", WARNING)


def _of_group(spec: EnvironmentSpec, settings: dict[str, Any]) -> Deadline:
    seconds = number_of(settings.get("worker_timeout"))
    if seconds is None:
        seconds = WORKER_TIMEOUT
    who = f"Environment {spec.name!r}"
    return Deadline(who, "worker_timeout", seconds, " in the `config` of its entry")


def _of_request(spec: EnvironmentSpec) -> Deadline:
    """Returns the deadline of a request to the server, the least of several servers."""
    least = math.inf
    for server in spec.servers or [{}]:
        stated = number_of(server.get("timeout"))
        if stated is None:
            stated = REQUEST_TIMEOUT
        least = min(least, stated)
    who = f"Environment {spec.name!r}"
    return Deadline(who, "timeout", least, " in `servers: [{timeout: ...}]` of its entry")


# ------------------------------------------------------------------------ settings of environments


def _longest_completion(recipe: Recipe, spec: EnvironmentSpec) -> float | None:
    """Returns the tokens that an environment samples at most for a rollout, or `None` if its
    settings do not tell."""
    settings = _settings(recipe, spec)
    # the tokens of several turns add up, and so do the answers to them
    has_turns = any("turn" in name for name in settings)
    setting = "max_token_length" if has_turns else "max_new_tokens"
    return number_of(settings.get(setting))


def _settings(recipe: Recipe, spec: EnvironmentSpec) -> dict[str, Any]:
    """Returns the settings of an environment: those that the recipe states, and the defaults that
    its script writes as `name: int = 5` or `name: int = Field(default=5)`."""
    return _defaults_in_script(spec) | recipe.stated(spec)


def _defaults_in_script(spec: EnvironmentSpec) -> dict[str, Any]:
    """Returns the defaults in an environment's script by the names of its settings."""
    if spec.path is None:
        return {}
    tree = parse_script(spec.script)
    if tree is None:
        return {}
    defaults = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            defaults[name] = _constant(node.value)
    return defaults


def _constant(value: ast.expr | None) -> Any:
    """Returns the constant that `5` or `Field(default=5)` is, or `None`."""
    for keyword in getattr(value, "keywords", ()):
        if keyword.arg == "default":
            value = keyword.value
    return getattr(value, "value", None)
