"""The services of a run: room for those that it starts, what answers where it starts none; and the
Python, code and settings of its environments, but for what the run writes for them itself."""

import ast
import contextlib
import json
import math
import os
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trl_atropos.check.launch import Case, Launch, refused, requirements
from trl_atropos.errors import ERROR, WARNING, ServiceError
from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.flags import parallel, server_flags, stated_flags
from trl_atropos.recipe import EnvironmentSpec, Recipe, number_of
from trl_atropos.rollouts.api import AtroposClient
from trl_atropos.server_client import ServerClient
from trl_atropos.services.environment_source import parse_script, reshaping_requests
from trl_atropos.services.manager import (
    port_of,
    require_free_port,
    require_shared_memory,
    require_sockets,
)
from trl_atropos.weights.model_setup import num_positions

ANSWER = 5.0  # seconds
LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
CONNECT = 1.0  # seconds; nobody there is no finding: services may be started later


def services(recipe: Recipe, launch: Launch) -> Iterator[Finding]:
    config = recipe.services
    training = recipe.training
    if training.replay_paths is not None:
        return
    for service, setting, urls, start in (
        ("the Atropos API", "atropos_url", [training.atropos_url], "start_atropos"),
        ("the vLLM server", "vllm_server_base_url", training.vllm_server_urls, "start_vllm"),
    ):
        fix = (
            f"Stop what runs there, set `{setting}` to a free port, or use it with `{start}: "
            "false`."
        )
        for url in urls:
            if getattr(config, start):
                yield from refused(partial(require_free_port, url, service, fix))
            elif not launch.elsewhere and _answers(url):
                api = setting == "atropos_url"
                ask = (
                    AtroposClient(url, ANSWER, ANSWER).greet
                    if api
                    else ServerClient(url, ANSWER).info
                )
                for found in refused(ask, f"{setting}: {url}"):
                    found.level = WARNING  # another may be there when the run begins
                    yield found
    if config.start_vllm and not launch.elsewhere:
        yield from refused(require_sockets)
        yield from refused(partial(require_shared_memory, parallel(recipe.vllm_flags())[0]))


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError, ServiceError):
        socket.create_connection((urlsplit(url).hostname, port_of(url)), timeout=CONNECT).close()
        return True
    return False


def lengths(recipe: Recipe, case: Case) -> Iterator[Finding]:
    starts = recipe.services.start_vllm and case.flags is not None
    longest = recipe.training.max_sequence_length
    limit = min(case.max_model_len if starts else math.inf, longest or math.inf)
    if longest and longest > limit:
        what = "The server samples shorter rollouts than the trainer is to take"
        seen = f"--max-model-len {limit}"
        fix = f"Lower `max_sequence_length`, or start the server with `--max-model-len {longest}`."
        yield Finding(what, f"max_sequence_length: {longest}, {seen}", fix, "sequence-length")
    positions = num_positions(case.config)
    if starts and case.max_model_len > positions and os.environ.get(LONGER, "0") != "1":
        what = (
            "The server is to take longer rollouts than the model was made for, and vLLM will "
            "not start"
        )
        seen = f"--max-model-len {case.max_model_len}, max_position_embeddings: {positions:.0f}"
        fix = f"Lower `--max-model-len` in `vllm_args` to {positions:.0f} or less."
        yield Finding(what, seen, fix, "model-length")
    completion = recipe.training.max_completion_length
    default = type(recipe.training).max_completion_length
    found = list(_divisor(recipe))
    yield from found
    if not found and completion is not None and limit <= completion != default:
        what = (
            "Completions cannot become as long as `max_completion_length`, because prompts "
            "count too"
        )
        seen = f"max_completion_length: {completion}, the longest rollout: {limit}"
        higher = (
            "`--max-model-len` in `vllm_args`"
            if starts and limit != longest
            else "`max_sequence_length`"
        )
        yield Finding(
            what,
            seen,
            f"Lower `max_completion_length`, or raise {higher}.",
            "completion-length",
            WARNING,
        )
    for spec in recipe.environments:
        own = number_of(recipe.stated(spec).get("max_token_length"))
        if own and own > limit:
            what = "it samples longer rollouts than the server takes or the trainer trains on"
            seen = f"max_token_length: {own:.0f}, the longest rollout: {limit}"
            yield _of(
                spec,
                what,
                seen,
                f"Lower `max_token_length` to {limit}.",
                "environment-length",
                WARNING,
            )


def _divisor(recipe: Recipe) -> Iterator[Finding]:
    """Whether the loss divides by more tokens than a completion has, as far as the environments'
    settings tell."""
    divisor = recipe.training.max_completion_length
    longest = {}
    for spec in recipe.environments if recipe.training.loss_type == "dr_grpo" and divisor else []:
        longest[spec.name] = _longest_completion(recipe, spec) or math.inf
    if longest and divisor > max(longest.values()):
        what = (
            "`loss_type: dr_grpo` divides by `max_completion_length`, which is more than any "
            "environment samples"
        )
        seen = ", ".join(f"{name}: at most {size:.0f} tokens" for name, size in longest.items())
        fix = (
            f"Set `max_completion_length: {max(longest.values()):.0f}`, or the gradients are "
            "smaller by the ratio."
        )
        yield Finding(
            what, f"max_completion_length: {divisor}, {seen}", fix, "loss-divisor", WARNING
        )


def _longest_completion(recipe: Recipe, spec: EnvironmentSpec) -> float | None:
    """Tokens that an environment samples at most for a rollout, as far as its settings tell: those
    that the recipe states, and the defaults that its script writes as `name: int = 5` or `name: int
    = Field(default=5)`."""
    settings = {}
    tree = None if spec.path is None else parse_script(spec.script)
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            keywords = {word.arg: word.value for word in getattr(node.value, "keywords", ())}
            settings[node.target.id] = getattr(keywords.get("default", node.value), "value", None)
    settings |= recipe.stated(spec)
    # whose tokens add up, and so do the answers to them
    several = any("turn" in name for name in settings)
    return number_of(settings.get("max_token_length" if several else "max_new_tokens"))


# ------------------------------------------------------------------------------------- environments

PYTHON_DEADLINE = 60.0  # seconds; a cold start from a network disk takes some
PROBE = """import importlib.metadata, importlib.util, json, sys
installed = {one.name: one.version for one in importlib.metadata.distributions()}
try:
    found = importlib.util.find_spec(sys.argv[1])
except ImportError:
    found = None
print(json.dumps([installed, getattr(found, "origin", None)]))
"""
# of Atropos, by transformers 5: its masks and token ids are garbage
BROKEN = "tokenize_for_trainer("
WITH_TOKENS = ("vllm", "sglang")  # server types that return token ids and log-probabilities
REQUESTS_SHOWN = 3
DUMMY = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"


def environments(recipe: Recipe) -> Iterator[Finding]:
    for spec in recipe.environments:
        command = recipe.environment_command(spec)
        if "python" in os.path.basename(command[0]):
            yield from _program(spec, command)
        yield from _servers(recipe, spec, command)
        own = recipe.stated(spec).get("tokenizer_name")
        yield from _tokenizer(
            recipe, f"Environment {spec.name!r}", own, "tokenizer_name", "its entry"
        )
        yield from _settings(recipe, spec)
        yield from _requests(spec)
    yield from _together(recipe)
    flags = server_flags(recipe.vllm_flags()) if recipe.services.start_vllm else {}
    yield from _tokenizer(
        recipe, "The server", flags.get("--tokenizer"), "--tokenizer", "`vllm_args`"
    )
    template = flags.get("--chat-template", "")
    if template.endswith((".jinja", ".json", ".txt")) and not os.path.isfile(template):
        fix = "Correct `--chat-template` in `vllm_args`."
        yield Finding(
            "The server's chat template is not there",
            f"--chat-template {template}",
            fix,
            "chat-template",
        )


def _of(
    spec: EnvironmentSpec, what: str, seen: str, fix: str, code: str, level: str = ERROR
) -> Finding:
    return Finding(f"Environment {spec.name!r}: {what}", seen, fix, code, level)


def _program(spec: EnvironmentSpec, command: list[str]) -> Iterator[Finding]:
    """What is installed for a Python, and whether the script or module that it runs is there."""
    python = command[0]
    env = {**os.environ, **{name: str(value) for name, value in spec.env.items()}}
    ask = {"input": PROBE, "capture_output": True, "text": True, "env": env, "cwd": spec.cwd}
    module = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
    script = spec.script_in(command)
    try:
        answer = subprocess.run(
            [python, "-", module or "json"], **ask, timeout=PYTHON_DEADLINE, check=True
        )
        installed, origin = json.loads(answer.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        what = "its Python cannot be asked what is installed there"
        seen = f"{python}: {str(getattr(error, 'stderr', '') or error).strip().splitlines()[-1]}"
        yield _of(spec, what, seen, "Correct its `python`.", "environment-python")
        return
    version = installed.get("atroposlib")
    transformers = installed.get("transformers", "0")
    wanted = next(one.specifier for one in requirements("trl_atropos") if one.name == "atroposlib")
    if version is None or not wanted.contains(version, prereleases=True):
        seen = f"atroposlib {version}" if version else f"atroposlib is not installed for {python}"
        fix = (
            f'Install it (`{python} -m pip install "atroposlib{wanted}"`), or name another '
            "`python` in its entry."
        )
        yield _of(
            spec,
            "its Python does not have the Atropos that it needs",
            seen,
            fix,
            "environment-atroposlib",
        )
    path = Path(origin or "") if module else Path(spec.cwd or "", script)
    if (module or script) and not path.is_file():
        seen = f"{module} in {python}" if module else str(path)
        what = "there is no such module" if module else "there is no such script"
        yield _of(spec, what, seen, "Correct its `command` or `cwd`.", "environment-script")
    elif (
        path.is_file()
        and int(transformers.partition(".")[0]) >= 5
        and BROKEN in path.read_text("utf-8", "replace")
    ):
        what = "`tokenize_for_trainer` makes garbage of its tokens with transformers 5"
        seen = f"{path}, transformers {transformers} of {python}"
        fix = (
            "Sample with `self.server.managed_server(...)`, which keeps tokens and "
            "log-probabilities; or make a "
        )
        fix += (
            "virtual environment with `transformers<5` and name its Python as `python` of this "
            "entry."
        )
        yield _of(spec, what, seen, fix, "tokenizes")


def _servers(recipe: Recipe, spec: EnvironmentSpec, command: list[str]) -> Iterator[Finding]:
    """Of the servers that the recipe states for an environment."""
    if {**os.environ, **spec.env}.get(DUMMY) not in (None, "", "0"):
        what = "it may send made-up tokens in place of those that were sampled"
        yield _of(spec, what, DUMMY, f"Take {DUMMY} out of its variables.", "dummy-tokens")
    flags = stated_flags(command).items()
    content = recipe.environment_file(spec)
    flags = {
        flag.removeprefix("--openai."): value
        for flag, value in flags
        if flag.startswith("--openai.")
    }
    stated = [flags] if content is None else content["openai"]
    kinds = [
        one["server_type"] for one in stated if one.get("server_type", "vllm") not in WITH_TOKENS
    ]
    if kinds:
        what = "its server type returns neither token ids nor log-probabilities"
        yield _of(
            spec, what, f"server_type: {kinds[0]}", "Set `server_type` to 'vllm'.", "server-type"
        )
    ours = recipe.training.vllm_server_urls
    urls = [one["base_url"] for one in stated if one.get("base_url")]
    strange = [url for url in urls if _place(url) not in map(_place, ours)]
    if strange:
        what = "it samples from a server that is none of the run's, which would not be kept in step"
        seen = f"{strange[0]}; the run has {', '.join(ours)}"
        fix = "Set it to `{vllm_url}/v1`, or leave it if a router to the run's servers is there."
        yield _of(spec, what, seen, fix, "server-url", WARNING)


def _place(url: str) -> str:
    """Host and port."""
    return urlsplit(url).netloc.replace("localhost", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")


def _vocabulary(name: str) -> dict[str, int] | None:
    """A tokenizer's vocabulary; `None` if it is not on this machine."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            name, local_files_only=True, trust_remote_code=False
        ).get_vocab()
    except Exception:  # noqa: BLE001 - what a tokenizer's own files may raise has no bound; without it nothing is said
        return None


def _tokenizer(recipe: Recipe, who: str, name: Any, setting: str, place: str) -> Iterator[Finding]:
    """Whether a tokenizer that the recipe names is the model's."""
    model = str(recipe.model.model_name_or_path)
    if name is None or os.path.realpath(str(name)) == os.path.realpath(model):
        return
    ours = _vocabulary(model)
    theirs = _vocabulary(str(name))
    if ours is None or theirs is None:
        what = f"{who} tokenizes by another name than the run's model"
        level = WARNING
    else:
        what = f"{who} has another vocabulary, so that the same ids mean different text"
        level = ERROR
    if ours is None or ours != theirs:
        fix = f"Leave `{setting}` out of {place}, or name the model."
        yield Finding(what, f"{setting}: {name}, the run's model: {model}", fix, "tokenizer", level)


def _settings(recipe: Recipe, spec: EnvironmentSpec) -> Iterator[Finding]:
    """Settings of an environment that the recipe states, and that do not fit the run's."""
    stated = recipe.stated(spec)
    training = recipe.training
    url = stated.get("rollout_server_url", training.atropos_url)
    # a host has several names
    if _place(url).rpartition(":")[2] != _place(training.atropos_url).rpartition(":")[2]:
        what = "it registers at another Atropos API than the run's"
        seen = f"rollout_server_url: {url}, atropos_url: {training.atropos_url}"
        yield _of(spec, what, seen, "Set it to `{atropos_url}`.", "environment-api")
    steps = number_of(stated.get("total_steps"))
    if steps is not None and 0 <= steps < training.max_steps:
        seen = f"total_steps: {steps:.0f}, max_steps: {training.max_steps}"
        yield _of(
            spec,
            "it ends before the run does",
            seen,
            "Leave `total_steps` out.",
            "environment-steps",
        )
    ahead = number_of(stated.get("max_batches_offpolicy"))
    oldest = training.max_staleness
    if ahead is not None and oldest is not None and ahead > max(1, oldest):
        what = (
            "it samples so far ahead that its last rollouts are too old to be trained on, and "
            "dropped"
        )
        seen = f"max_batches_offpolicy: {ahead:.0f}, max_staleness: {oldest}"
        fix = f"Lower `max_batches_offpolicy` to {max(1, oldest)}, or raise `max_staleness`."
        yield _of(spec, what, seen, fix, "staleness", WARNING)
    if number_of(stated.get("group_size")) == 1 and training.single_row_groups == "refuse":
        what = (
            "its groups have one rollout, which has no statistics of a group, and the run stops "
            "at the first"
        )
        fix = (
            "Raise its `group_size`, or set `single_row_groups` to `raw` (the score is the "
            "advantage) or `zero`."
        )
        yield _of(spec, what, "group_size: 1, single_row_groups: refuse", fix, "group-of-one")


def _requests(spec: EnvironmentSpec) -> Iterator[Finding]:
    """What the script asks the server for that has it sample from another distribution than the
    policy's."""
    found = [] if spec.path is None else reshaping_requests(spec.script)
    if found:
        what = (
            "its requests change what is sampled, and the trainer scores every token as the "
            "policy has it"
        )
        seen = ", ".join(
            f"{request.text} (line {request.line} of {spec.path})"
            for request in found[:REQUESTS_SHOWN]
        )
        fix = "Leave this out of requests for rollouts that are trained on."
        yield _of(spec, what, seen, fix, "reshaped", WARNING)


def _together(recipe: Recipe) -> Iterator[Finding]:
    """What several environments do to each other."""
    stated = {spec.name: recipe.stated(spec) for spec in recipe.environments}
    sizes = {
        name: int(size) for name, it in stated.items() if (size := number_of(it.get("group_size")))
    }
    largest = max(sizes.values(), default=1)
    if any(largest % size for size in sizes.values()):  # api/utils.py:59
        what = (
            "The Atropos API waits for ever to fill small groups up to the size of the largest, "
            "which these cannot"
        )
        seen = ", ".join(f"{name}: group_size {size}" for name, size in sizes.items())
        yield Finding(
            what, seen, "Make every group size divide the largest one.", "mixed-group-sizes"
        )
    shares = {
        name: share
        for name, it in stated.items()
        if (share := number_of(it.get("min_batch_allocation")))
    }
    if sum(shares.values()) > 1:  # api/utils.py:144
        what = "The least shares of a batch that environments ask for are more than one batch"
        seen = ", ".join(
            f"{name}: min_batch_allocation {share:g}" for name, share in shares.items()
        )
        fix = "Lower `min_batch_allocation` until they are 1 together, or leave it out."
        yield Finding(what, seen, fix, "batch-shares")
