"""Finds what is wrong with the services and environments of a recipe.

`services` looks for room for those that the run starts, and asks those that answer already.
`environments` looks at the Python, the code and the stated settings of each environment, but not at
what the run itself writes for it. `check/__init__.py` calls both.
"""

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trl_atropos.agents.agent_tasks import lines_of
from trl_atropos.check.launch import Launch, plan_of, refused
from trl_atropos.check.scripts import ask_python, mistakes
from trl_atropos.check.settings import requirements
from trl_atropos.environment_kinds import FUNCTION, PLACEHOLDER, AgentEntry
from trl_atropos.errors import ERROR, WARNING, ServiceError
from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.flags import parallel, server_flags, stated_flags
from trl_atropos.recipe import EnvironmentSpec, Recipe
from trl_atropos.rollouts.api import AtroposClient
from trl_atropos.server.launch import vllm_arguments
from trl_atropos.server.vllm_flags import unknown_flags
from trl_atropos.server_client import ServerClient
from trl_atropos.services.addresses import port_of, require_free_port
from trl_atropos.services.environment_source import reshaping_requests
from trl_atropos.services.machine import require_shared_memory, require_sockets

CONNECT = 1.0  # seconds; nobody there is no finding: services may be started later
ANSWER = 5.0  # seconds


def services(recipe: Recipe, launch: Launch) -> Iterator[Finding]:
    """Yields what is in the way of services that the run starts, and what is wrong with those that
    run already."""
    config = recipe.services
    training = recipe.training
    if training.replay_paths is not None:
        return
    url = training.atropos_url
    if config.start_atropos:
        yield from _port_in_use("the Atropos API", "atropos_url", url, "start_atropos")
    elif not launch.elsewhere and _answers(url):
        greet = AtroposClient(url, ANSWER, ANSWER).greet
        yield from _wrong_answer(greet, f"atropos_url: {url}")
    setting = "vllm_server_base_url"
    for url in training.vllm_server_urls:
        if config.start_vllm:
            yield from _port_in_use("the vLLM server", setting, url, "start_vllm")
        elif not launch.elsewhere and _answers(url):
            yield from _wrong_answer(ServerClient(url, ANSWER).info, f"{setting}: {url}")
    if config.start_vllm:
        yield from _flags(recipe, launch)
    if config.start_vllm and not launch.elsewhere:
        yield from refused(require_sockets)
        gpus, _ = parallel(recipe.vllm_flags())
        yield from refused(partial(require_shared_memory, gpus))


def _port_in_use(service: str, setting: str, url: str, start: str) -> Iterator[Finding]:
    """Yields a finding if something else is where the run starts a service (setting `start`)."""
    fix = f"Stop what runs there, set `{setting}` to a free port, or use it with `{start}: false`."
    yield from refused(partial(require_free_port, url, service, fix))


def _wrong_answer(greet: Callable[[], Any], seen: str) -> Iterator[Finding]:
    """Yields a warning if a running service is not the one that the run needs."""
    for finding in refused(greet, seen):
        finding.level = WARNING  # another may be there when the run begins
        yield finding


def _flags(recipe: Recipe, launch: Launch) -> Iterator[Finding]:
    """Yields the flags of the server that vLLM does not have, and that ours refuses."""
    training = recipe.training
    plan = plan_of(training, launch)
    refuse = partial(
        vllm_arguments,
        recipe.model.model_name_or_path,
        recipe.vllm_flags(),
        cpu=plan is not None and plan.device == "cpu",
        mode=training.vllm_mode,
        numerics=training.numerics,
    )
    yield from refused(refuse)
    for flag, meant in unknown_flags(recipe.vllm_flags(), training.vllm_mode).items():
        fix = f"Did you mean `{meant}`?" if meant else "`vllm serve --help=all` lists them."
        yield Finding("vLLM has no such flag", f"vllm_args: {flag}", fix, "vllm-flag")


def _answers(url: str) -> bool:
    """Returns whether anything listens there."""
    with contextlib.suppress(OSError, ServiceError):
        address = (urlsplit(url).hostname, port_of(url))
        socket.create_connection(address, timeout=CONNECT).close()
        return True
    return False


# ------------------------------------------------------------------------------------- environments

PROBE = """import importlib.metadata, importlib.util, json, sys
installed = {package.name: package.version for package in importlib.metadata.distributions()}
try:
    spec = importlib.util.find_spec(sys.argv[1])
except ImportError:
    spec = None
print(json.dumps([installed, getattr(spec, "origin", None)]))
"""
# of Atropos, by transformers 5: its masks and token ids are garbage
BROKEN = "tokenize_for_trainer("
WITH_TOKENS = ("vllm", "sglang")  # server types that return token ids and log-probabilities
REQUESTS_SHOWN = 3
DUMMY = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"


def environments(recipe: Recipe) -> Iterator[Finding]:
    """Yields what is wrong with the environments, and with the server's tokenizer and template."""
    for spec in recipe.environments:
        command = recipe.environment_command(spec)
        if "python" in os.path.basename(command[0]):
            yield from _program(spec, command)
        yield from _servers(recipe, spec, command)
        name = recipe.stated(spec).get("tokenizer_name")
        who = f"Environment {spec.name!r}"
        yield from _tokenizer(recipe, who, name, "tokenizer_name", "its entry")
        yield from _settings(recipe, spec)
        yield from _requests(spec)
    for spec in (*recipe.environments, *recipe.evaluations):
        if spec.agent is not None:
            yield from agent_findings(spec, spec.agent)
    yield from _group_sizes(recipe)
    yield from _batch_shares(recipe)
    flags = {}
    if recipe.services.start_vllm:
        flags = server_flags(recipe.vllm_flags())
    name = flags.get("--tokenizer")
    yield from _tokenizer(recipe, "The server", name, "--tokenizer", "`vllm_args`")
    template = flags.get("--chat-template", "")
    if template.endswith((".jinja", ".json", ".txt")) and not os.path.isfile(template):
        what = "The server's chat template is not there"
        seen = f"--chat-template {template}"
        yield Finding(what, seen, "Correct `--chat-template` in `vllm_args`.", "chat-template")


def environment_finding(
    spec: EnvironmentSpec, what: str, seen: str, fix: str, code: str, level: str = ERROR
) -> Finding:
    return Finding(f"Environment {spec.name!r}: {what}", seen, fix, code, level)


def _program(spec: EnvironmentSpec, command: list[str]) -> Iterator[Finding]:
    """Yields what is missing for a Python, and a script or module that is not there."""
    python = command[0]
    module = ""
    if "-m" in command[:-1]:
        flag = command.index("-m")
        module = command[flag + 1]
    try:
        installed, origin = _installed(spec, python, module)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        what = "its Python cannot be asked what is installed there"
        message = str(getattr(error, "stderr", "") or error)
        last_line = message.strip().splitlines()[-1]
        fix = "Correct its `python`."
        yield environment_finding(spec, what, f"{python}: {last_line}", fix, "environment-python")
        return
    yield from _atroposlib(spec, python, installed.get("atroposlib"))
    if module:
        path = Path(origin or "")
        missing = "there is no such module"
        seen = f"{module} in {python}"
    else:
        script = spec.script_in(command)
        if not script:
            return
        path = Path(spec.cwd or "", script)
        missing = "there is no such script"
        seen = str(path)
    if not path.is_file():
        yield environment_finding(
            spec, missing, seen, "Correct its `command` or `cwd`.", "environment-script"
        )
        return
    yield from mistakes(spec, python, path)
    transformers = installed.get("transformers", "0")
    is_new = int(transformers.partition(".")[0]) >= 5
    if is_new and BROKEN in path.read_text("utf-8", "replace"):
        what = "`tokenize_for_trainer` makes garbage of its tokens with transformers 5"
        seen = f"{path}, transformers {transformers} of {python}"
        fix = (
            "Sample with `self.server.managed_server(...)`, which keeps tokens and "
            "log-probabilities; or make a virtual environment with `transformers<5` and name its "
            "Python as `python` of this entry."
        )
        yield environment_finding(spec, what, seen, fix, "tokenizes")


def _installed(
    spec: EnvironmentSpec, python: str, module: str
) -> tuple[dict[str, str], str | None]:
    """Returns the versions of what is installed for a Python, and the file of a module.

    Raises `OSError`, `SubprocessError`, `ValueError` or `IndexError` if the Python does not say it.
    """
    installed, origin = ask_python(spec, python, PROBE, module or "json")
    return installed, origin


def _atroposlib(spec: EnvironmentSpec, python: str, version: str | None) -> Iterator[Finding]:
    """Yields a finding if an environment's Python does not have the Atropos that this package
    needs."""
    needs = {need.name: need for need in requirements("trl_atropos")}
    wanted = needs["atroposlib"].specifier
    if version is not None and wanted.contains(version, prereleases=True):
        return
    seen = f"atroposlib {version}" if version else f"atroposlib is not installed for {python}"
    fix = (
        f'Install it (`{python} -m pip install "atroposlib{wanted}"`), or name another '
        "`python` in its entry."
    )
    what = "its Python does not have the Atropos that it needs"
    yield environment_finding(spec, what, seen, fix, "environment-atroposlib")


def _servers(recipe: Recipe, spec: EnvironmentSpec, command: list[str]) -> Iterator[Finding]:
    """Yields what is wrong with the servers that the recipe states for an environment."""
    variables = {**os.environ, **spec.env}
    if variables.get(DUMMY) not in (None, "", "0"):
        what = "it may send made-up tokens in place of those that were sampled"
        yield environment_finding(
            spec, what, DUMMY, f"Take {DUMMY} out of its variables.", "dummy-tokens"
        )
    servers = [_stated_server(command)]
    content = recipe.environment_content(spec)
    if content is not None:
        servers = content["openai"]
    urls = [_place(url) for url in recipe.training.vllm_server_urls]
    kinds = [server.get("server_type", "vllm") for server in servers]
    for kind in kinds:
        if kind not in WITH_TOKENS:
            what = "its server type returns neither token ids nor log-probabilities"
            fix = "Set `server_type` to 'vllm'."
            yield environment_finding(spec, what, f"server_type: {kind}", fix, "server-type")
            break
    for server in servers:
        url = server.get("base_url")
        if url and _place(url) not in urls:
            what = (
                "it samples from a server that is none of the run's, which would not be kept in "
                "step"
            )
            seen = f"{url}; the run has {', '.join(recipe.training.vllm_server_urls)}"
            fix = (
                "Set it to `{vllm_url}/v1`, or leave it if a router to the run's servers is there."
            )
            yield environment_finding(spec, what, seen, fix, "server-url", WARNING)
            break


def _stated_server(command: list[str]) -> dict[str, str]:
    """Returns the server that the `--openai.` flags of a command state."""
    server = {}
    for flag, value in stated_flags(command).items():
        if flag.startswith("--openai."):
            setting = flag.removeprefix("--openai.")
            server[setting] = value
    return server


def _place(url: str) -> str:
    """Returns host and port. The names of this machine are one."""
    place = urlsplit(url).netloc
    for name in ("localhost", "0.0.0.0"):
        place = place.replace(name, "127.0.0.1")
    return place


def _port(url: str) -> str:
    _, _, port = _place(url).rpartition(":")
    return port


def _vocabulary(name: str) -> dict[str, int] | None:
    """Returns a tokenizer's vocabulary, or `None` if it is not on this machine."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, local_files_only=True, trust_remote_code=False
        )
        return tokenizer.get_vocab()
    except Exception:  # noqa: BLE001 - what a tokenizer's own files may raise has no bound; without it nothing is said
        return None


def _tokenizer(recipe: Recipe, who: str, name: Any, setting: str, place: str) -> Iterator[Finding]:
    """Yields a finding if a tokenizer that the recipe names is not the model's."""
    model = str(recipe.model.model_name_or_path)
    if name is None or os.path.realpath(str(name)) == os.path.realpath(model):
        return
    vocabulary = _vocabulary(model)
    other = _vocabulary(str(name))
    if vocabulary is None or other is None:
        what = f"{who} tokenizes by another name than the run's model"
        level = WARNING
    elif vocabulary != other:
        what = f"{who} has another vocabulary, so that the same ids mean different text"
        level = ERROR
    else:
        return
    seen = f"{setting}: {name}, the run's model: {model}"
    fix = f"Leave `{setting}` out of {place}, or name the model."
    yield Finding(what, seen, fix, "tokenizer", level)


def _settings(recipe: Recipe, spec: EnvironmentSpec) -> Iterator[Finding]:
    """Yields settings of an environment that the recipe states, and that do not fit the run's."""
    training = recipe.training
    url = recipe.stated(spec).get("rollout_server_url", training.atropos_url)
    if _port(url) != _port(training.atropos_url):  # a host has several names
        what = "it registers at another Atropos API than the run's"
        seen = f"rollout_server_url: {url}, atropos_url: {training.atropos_url}"
        yield environment_finding(spec, what, seen, "Set it to `{atropos_url}`.", "environment-api")
    steps = recipe.stated_number(spec, "total_steps")
    if steps is not None and 0 <= steps < training.max_steps:
        what = "it ends before the run does"
        seen = f"total_steps: {steps:.0f}, max_steps: {training.max_steps}"
        yield environment_finding(spec, what, seen, "Leave `total_steps` out.", "environment-steps")
    ahead = recipe.stated_number(spec, "max_batches_offpolicy")
    oldest = training.max_staleness
    if ahead is not None and oldest is not None and ahead > max(1, oldest):
        what = (
            "it samples so far ahead that its last rollouts are too old to be trained on, and "
            "dropped"
        )
        seen = f"max_batches_offpolicy: {ahead:.0f}, max_staleness: {oldest}"
        fix = f"Lower `max_batches_offpolicy` to {max(1, oldest)}, or raise `max_staleness`."
        yield environment_finding(spec, what, seen, fix, "staleness", WARNING)


def _requests(spec: EnvironmentSpec) -> Iterator[Finding]:
    """Yields a finding if the script's requests let the server sample from another distribution
    than the policy's."""
    if spec.path is None:
        return
    requests = reshaping_requests(spec.script)
    if requests:
        what = (
            "its requests change what is sampled, and the trainer scores every token as the "
            "policy has it"
        )
        shown = requests[:REQUESTS_SHOWN]
        places = [f"{request.text} (line {request.line} of {spec.path})" for request in shown]
        fix = "Leave this out of requests for rollouts that are trained on."
        yield environment_finding(spec, what, ", ".join(places), fix, "reshaped", WARNING)


def agent_findings(spec: EnvironmentSpec, agent: AgentEntry) -> Iterator[Finding]:
    """Yields what is wrong with an agent's tasks and its command, which are read and not run.
    `recipe_checks.py` has looked for the files and functions that the entry names."""
    for word in agent.command:
        if word.endswith((".py", ".sh")) and "{" not in word and not os.path.isfile(word):
            what = "its command names a script that is not there"
            fix = "Correct it: a path in `command` is seen from the recipe's folder."
            yield environment_finding(spec, what, word, fix, "environment-script", WARNING)
    if not isinstance(agent.tasks, str) or FUNCTION.fullmatch(agent.tasks):
        return
    try:
        tasks = lines_of(Path(agent.tasks))
    except Finding as error:
        yield environment_finding(spec, error.what, error.seen, error.fix, "agent-tasks")
        return
    if not tasks:
        fix = "Write one task a line."
        yield environment_finding(
            spec, "it has no tasks", f"tasks: {agent.tasks}", fix, "agent-tasks"
        )
        return
    problems = getattr(spec, "problems", None)
    if problems is not None and problems > len(tasks):
        what = f"it asks for {problems} problems, and there are {len(tasks)} tasks"
        fix = f"Set `problems: {len(tasks)}`, or write more tasks."
        yield environment_finding(spec, what, f"problems: {problems}", fix, "agent-tasks")
    for word in agent.command:
        for placeholder in PLACEHOLDER.finditer(word):
            key = placeholder["key"]
            if key is not None and not (isinstance(tasks[0], dict) and key in tasks[0]):
                what = f"its tasks have no entry {key!r}, which its command names"
                fix = f"Correct `{{task[{key}]}}` in `command`."
                yield environment_finding(spec, what, str(tasks[0])[:100], fix, "agent-tasks")


def _group_sizes(recipe: Recipe) -> Iterator[Finding]:
    """Yields groups of one rollout, and sizes that the Atropos API cannot bring into one batch.
    `recipe_checks.py` has compared each size with that of a generation batch."""
    sizes = _numbers(recipe, "group_size")
    refuses_one = recipe.training.single_row_groups == "refuse"
    for spec in recipe.environments:
        if refuses_one and sizes.get(spec.name) == 1:
            what = (
                "its groups have one rollout, which has no statistics of a group, and the run "
                "stops at the first"
            )
            seen = "group_size: 1, single_row_groups: refuse"
            fix = (
                "Raise its `group_size`, or set `single_row_groups` to `raw` (the score is the "
                "advantage) or `zero`."
            )
            yield environment_finding(spec, what, seen, fix, "group-of-one")
    largest = max(sizes.values(), default=1)
    if any(largest % size for size in sizes.values()):  # api/utils.py:59
        what = (
            "The Atropos API waits for ever to fill small groups up to the size of the largest, "
            "which these cannot"
        )
        seen = ", ".join(f"{name}: group_size {size:g}" for name, size in sizes.items())
        fix = "Make every group size divide the largest one."
        yield Finding(what, seen, fix, "mixed-group-sizes")


def _batch_shares(recipe: Recipe) -> Iterator[Finding]:
    """Yields a finding if environments reserve more than a batch."""
    shares = _numbers(recipe, "min_batch_allocation")
    if sum(shares.values()) > 1:  # api/utils.py:144
        what = "The least shares of a batch that environments ask for are more than one batch"
        seen = ", ".join(
            f"{name}: min_batch_allocation {share:g}" for name, share in shares.items()
        )
        fix = "Lower `min_batch_allocation` until they are 1 together, or leave it out."
        yield Finding(what, seen, fix, "batch-shares")


def _numbers(recipe: Recipe, setting: str) -> dict[str, float]:
    """Returns the values of a setting by environment, without those that are missing or 0."""
    numbers = {}
    for spec in recipe.environments:
        number = recipe.stated_number(spec, setting)
        if number:
            numbers[spec.name] = number
    return numbers
