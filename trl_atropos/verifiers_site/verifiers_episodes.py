"""One taskset of verifiers 0.4, opened to play its episodes against URLs of sessions.

`verifiers_worker.py` imports it, in the interpreter that has verifiers. The taskset is loaded,
played and scored by verifiers itself. What is ours:

- An agent of the environment that has no `client` of its own is the policy: its calls go to the
  session. There can be one such agent only, because a session does not know who calls.
- Where neither the recipe nor the taskset says so, the policy plays with verifiers' harness `null`,
  which runs no commands, in the runtime `subprocess`: verifiers' own defaults are a harness that
  runs what the model writes, and a remote sandbox.
- A mistake in the recipe is a `Refusal`, before any episode.
"""

import asyncio
import math
import shutil
from itertools import islice

from pydantic import ValidationError
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
from verifiers.v1.configs.select import SelectConfig
from verifiers.v1.runtimes import PrimeConfig, SubprocessConfig
from verifiers.v1.types import content_text
from verifiers.v1.utils.compile import resolve_runtime_config, validate_pairing
from verifiers.v1.utils.loaders import (
    builtin_harness_ids,
    default_harness_id,
    env_config_type,
    harness_class,
    import_environment,
    import_taskset,
    load_environment,
    load_harness,
    taskset_class,
    taskset_config_type,
)
from verifiers_worker import REQUIREMENT, Refusal, said

ENDLESS_TASKS = 1000  # that are used of a taskset without an end
USUAL_HARNESS = "bash"  # of verifiers, which runs commands that the model writes
PLAIN_HARNESS = "null"
NO_KEY = "TRL_ATROPOS_NO_KEY"  # a variable that is not set: the session's URL is the key
POLICY = "policy"  # model name that a session is asked for; it takes any
MESSAGE_LENGTH = 2000  # characters of a message, in the report

# Failures of an episode, besides verifiers' own words such as `harness_error`.
TIMEOUT = "timeout"
SEVERAL_TRACES = "several_traces"
BAD_SCORE = "bad_score"


class OpenTaskset:
    """
    A taskset whose environment is running.

    Args:
        taskset_id: name of the taskset's package, as verifiers has it.
        args: settings of verifiers' `[env]` block.
        select: which tasks are used, as verifiers' `[select]` block.

    Raises:
        Refusal: the interpreter or the recipe cannot run it.
    """

    def __init__(self, taskset_id, args, select):
        check_taskset(taskset_id, args.get("id", ""))
        config = read_config(taskset_id, args)
        self.policy = policy_of(config)
        self.env = make_environment(config)
        self.tasks = []  # those that were read so far
        taskset = self.env.taskset.select(read_select(select))
        self.is_endless = not taskset.bounded
        self._unread = iter(taskset)

    def peek(self):
        """Reads the first task, and returns what is known without the others."""
        self.check_first_task()
        harnesses = {}
        for name, harness in self.env.config.agent_harnesses().items():
            harnesses[name] = harness.id
        return {"tasks": None, "is_endless": self.is_endless, "harnesses": harnesses}

    async def start(self, stack):
        """Starts the servers that the environment needs, which end with the exit `stack`."""
        try:
            await stack.enter_async_context(self.env.serving())
        except Exception as error:
            what = f"The servers of taskset {self.env.config.taskset.id!r} do not start"
            fix = "Correct its `args`, or install what it misses (see the traceback)."
            raise Refusal(f"{what}: {said(error)}", type(error).__name__, fix) from error

    # -------------------------------------------------------------------------------------- tasks

    def count(self):
        """Reads all tasks, but of an endless taskset none, and returns how many are used."""
        if self.is_endless:
            return ENDLESS_TASKS
        self.tasks.extend(self._unread)
        return len(self.tasks)

    def task(self, number):
        """Returns a task. Those of an endless taskset are read when they are needed."""
        missing = number + 1 - len(self.tasks)
        if missing > 0:
            self.tasks.extend(islice(self._unread, missing))
        return self.tasks[number]

    def check_first_task(self):
        """Raises `Refusal` if there is no task, or if the policy cannot play it."""
        name, agent = self.policy
        try:
            task = self.task(0)
        except IndexError:
            what = f"Taskset {self.env.config.taskset.id!r} has no tasks"
            raise Refusal(what, "0 tasks", "Correct `select`, or its `args`.") from None
        except Exception as error:
            what = f"Taskset {self.env.config.taskset.id!r} cannot load its tasks: {said(error)}"
            fix = "Correct its `args`, or give it what it loads (see the traceback)."
            raise Refusal(what, type(error).__name__, fix) from error
        harness = load_harness(self.env.config.agent_harnesses()[name])
        tools = type(task).toolsets(task.config)
        try:
            runtime = resolve_runtime_config(agent.runtime, task)
            validate_pairing(harness, type(task), runtime, tools=tools)
        except ValueError as error:
            what = f"Agent {name!r} cannot play the tasks: {error}"
            fix = f"Name another one: `args: {{{name}: {{runtime: {{type: docker}}}}}}`."
            seen = f"harness {harness.config.id}, runtime {agent.runtime.type}"
            raise Refusal(what, seen, fix) from error

    # ----------------------------------------------------------------------------------- episodes

    async def play(self, number, base_url, timeout):
        """Plays one episode of a task against a session, within `timeout` seconds. Returns its
        score, the named parts, the messages, and why it failed, if it did."""
        client = EvalClientConfig(base_url=base_url, api_key_var=NO_KEY)
        context = ModelContext(model=POLICY, client=client)
        task = self.task(number)
        try:
            async with asyncio.timeout(timeout):
                episode = await self.env.run_episode(task, context)
        except TimeoutError:
            return failed(TIMEOUT, f"it did not end within {timeout:g} s")
        return self._result(episode)

    def _result(self, episode):
        name, _agent = self.policy
        traces = [trace for trace in episode.traces if trace.agent.name == name]
        messages = []
        for trace in traces:
            messages += messages_of(trace)
        if not episode.ok:
            return failed(*failure_of(episode), messages)
        if len(traces) != 1:
            reason = f"agent {name!r} ran {len(traces)} times, and a session is one of its runs"
            return failed(SEVERAL_TRACES, reason, messages)
        (trace,) = traces
        parts = parts_of(trace)
        if not math.isfinite(trace.reward):
            return failed(BAD_SCORE, f"its reward is {trace.reward}", messages)
        return {
            "failure": "",
            "reason": "",
            "score": trace.reward,
            "parts": parts,
            "messages": messages,
        }


# ---------------------------------------------------------------------------- what the recipe says


def check_taskset(taskset_id, env_id):
    """Raises `Refusal` if verifiers has no taskset, or no environment, of that name."""
    try:
        import_taskset(taskset_id)
        if env_id:
            import_environment(env_id)
        taskset_class(taskset_id)
    except ModuleNotFoundError as error:
        raise missing_module(taskset_id, error) from error
    except ImportError as error:
        what = f"Taskset {taskset_id!r} cannot be imported: {error}"
        raise Refusal(what, f"id: {taskset_id}", "Install what it misses.") from error
    except (AttributeError, TypeError, ValueError) as error:
        what = f"{taskset_id!r} is no taskset of verifiers 0.4: {error}"
        fix = (
            f"Install the version of its package that is made for {REQUIREMENT!r}: one with a "
            "function `load_environment` is made for an older verifiers."
        )
        raise Refusal(what, f"id: {taskset_id}", fix) from error


def missing_module(taskset_id, error):
    """Returns the `Refusal` for a module that was not found: the taskset, or what it imports."""
    missing = error.name or getattr(error.__cause__, "name", None) or ""
    name = taskset_id.rsplit("/", 1)[-1].split("@", 1)[0]
    expected = name.replace("-", "_").lower()
    if missing in (expected, ""):
        what = f"There is no taskset {taskset_id!r} here: no module {expected!r} is installed"
        fix = (
            "Correct `id`, or install the taskset's package for the interpreter in `python`. "
            "verifiers itself brings harbor, nemo_gym, openenv and textarena."
        )
    elif missing.startswith("verifiers."):
        what = f"Taskset {taskset_id!r} needs {missing!r}, which verifiers 0.4 does not have"
        fix = f"Install the version of its package that is made for {REQUIREMENT!r}."
    else:
        what = f"Taskset {taskset_id!r} needs the module {missing!r}, which is not installed"
        fix = f"Install the package that has {missing!r} for the interpreter in `python`."
    return Refusal(what, f"id: {taskset_id}", fix)


def read_config(taskset_id, args):
    """Returns the parsed settings of the environment."""
    config_class = env_config_type(taskset_id, args.get("id", ""))
    settings = {**args, "taskset": {**args.get("taskset", {}), "id": taskset_id}}
    for name, field in config_class.model_fields.items():
        if isinstance(field.default, AgentConfig):
            stated = settings.get(name) or {}
            settings[name] = with_usual_player(taskset_id, name, field.default, stated)
    try:
        return config_class.model_validate(settings)
    except ValidationError as error:
        raise bad_argument(config_class, taskset_id, error) from error


def with_usual_player(taskset_id, name, default, stated):
    """Returns the settings of an agent, with a harness and a runtime if neither the recipe nor the
    taskset names them. Raises `Refusal` if model-written commands would run on this machine without
    the recipe's consent."""
    settings = dict(stated)
    harness_id = harness_of(taskset_id, default, stated)
    if harness_id == PLAIN_HARNESS:
        settings["harness"] = {**(stated.get("harness") or {}), "id": PLAIN_HARNESS}
    if "runtime" in stated or default.runtime != PrimeConfig():
        return settings
    try:
        harness = harness_class(harness_id)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        what = f"Agent {name!r} has no harness {harness_id!r}: {said(error)}"
        raise Refusal(what, f"harness: {harness_id}", "Correct its `harness`.") from error
    if harness.EXECUTES_CODE:
        what = f"Agent {name!r} plays with the harness {harness_id!r}, and has no `runtime`"
        fix = (
            f"Say where its program runs: `args: {{{name}: {{runtime: {{type: docker}}}}}}`, or "
            "`subprocess` for this machine, where it may run commands that the model writes."
        )
        raise Refusal(what, f"harness: {harness_id}", fix)
    settings["runtime"] = SubprocessConfig().model_dump()
    return settings


def harness_of(taskset_id, default, stated):
    """Returns the name of an agent's harness: that of the recipe, of the environment, of the
    taskset, or the one that runs no commands."""
    stated_id = (stated.get("harness") or {}).get("id")
    if stated_id is not None:
        return stated_id
    if default.harness is not None:
        return default.harness.id
    bundled = default_harness_id(taskset_id)
    if bundled != USUAL_HARNESS:
        return bundled
    return PLAIN_HARNESS


def bad_argument(config_class, taskset_id, error):
    """Returns the `Refusal` for settings that verifiers does not take."""
    mistake, *_ = error.errors()
    place = list(map(str, mistake["loc"]))
    what = f"`args` of taskset {taskset_id!r} are wrong: {'.'.join(place)}: {mistake['msg']}"
    known = {}
    if place[:1] == ["taskset"] and len(place) < 3:
        known = taskset_config_type(taskset_id).model_fields
    elif len(place) < 2:
        known = config_class.model_fields
    fix = "Correct it: `args` has what verifiers' `[env]` block has."
    if known:
        names = ", ".join(sorted(set(known) - {"id"}))
        fix = f"Correct it. There, verifiers has: {names}."
    return Refusal(what, f"{mistake['input']!r}", fix)


def read_select(select):
    """Returns the parsed settings of which tasks are used."""
    try:
        return SelectConfig.model_validate(select)
    except ValidationError as error:
        mistake, *_ = error.errors()
        place = ".".join(map(str, mistake["loc"]))
        what = f"`select` is wrong: {place}: {mistake['msg']}"
        fix = f"verifiers has: {', '.join(SelectConfig.model_fields)}."
        raise Refusal(what, f"{mistake['input']!r}", fix) from error


def policy_of(config):
    """Returns the agent that is trained, as its name and its settings."""
    policies = []
    for name, agent in agent_config_fields(config).items():
        if agent.client is None:
            policies.append((name, agent))
    if len(policies) == 1:
        return policies[0]
    names = ", ".join(name for name, _agent in policies)
    if not policies:
        what = "Every agent of the environment has a `client` of its own: none is trained"
        fix = "Leave `client` out of the `args` of the agent that is trained."
    else:
        what = f"The environment has {len(policies)} agents without a `client` of their own"
        fix = (
            "A session keeps what one of them samples. Give the others a `client` and a `model` in "
            "`args`: `{judge: {client: {base_url: URL, api_key_var: KEY}, model: NAME}}`."
        )
    raise Refusal(what, names or "none", fix)


def make_environment(config):
    """Returns the environment, which has loaded its taskset and harnesses."""
    if is_uv_needed(config) and shutil.which("uv") is None:
        what = "The program `uv`, by which verifiers starts its harnesses, is not in PATH"
        fix = "Run `VENV/bin/python -m pip install uv` for the interpreter in `python`."
        raise Refusal(what, "uv", fix)
    try:
        return load_environment(config)
    except Exception as error:
        what = f"Taskset {config.taskset.id!r} does not start: {said(error)}"
        fix = "Correct its `args`, or install what it misses (see the traceback)."
        raise Refusal(what, f"id: {config.taskset.id}", fix) from error


def is_uv_needed(config):
    """Returns whether an agent plays on this machine with a harness that verifiers brings."""
    harnesses = config.agent_harnesses()
    for name, agent in agent_config_fields(config).items():
        is_here = isinstance(agent.runtime, SubprocessConfig)
        if is_here and harnesses[name].id in builtin_harness_ids():
            return True
    return False


# ---------------------------------------------------------------------------- what an episode left


def failed(failure, reason, messages=()):
    """Returns the result of an episode that has no score."""
    return {
        "failure": failure,
        "reason": reason,
        "score": None,
        "parts": {},
        "messages": list(messages),
    }


def failure_of(episode):
    """Returns a word for why an episode failed, and the reason in verifiers' words."""
    errors = list(episode.errors)
    is_timeout = episode.is_timeout
    for trace in episode.traces:
        errors += trace.errors
        is_timeout = is_timeout or trace.is_timeout
    reason = "verifiers says no more"
    failure = "failed"
    if errors:
        last = errors[-1]
        reason = f"{last.type}: {last.message}"
        # TaskError: task_error
        failure = f"{last.type.removesuffix('Error').lower()}_error"
    if is_timeout:
        failure = TIMEOUT
    return failure, reason


def parts_of(trace):
    """Returns the metrics and the rewards before their weights, by name."""
    parts = {}
    for name, value in trace.metrics.items():
        if value is not None and math.isfinite(value):
            parts[name] = float(value)
    for name, reward in trace.rewards.items():
        if reward is not None and math.isfinite(reward.score):
            parts[name] = float(reward.score)
    return parts


def messages_of(trace):
    """Returns a conversation for the report."""
    messages = []
    for message in trace.messages:
        text = content_text(message.content) if message.content else ""
        for call in getattr(message, "tool_calls", None) or []:
            text += f"\n{call.name}({call.arguments})"
        messages.append({"role": message.role, "content": text.strip()[:MESSAGE_LENGTH]})
    return messages
