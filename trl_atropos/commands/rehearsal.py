"""`trl-atropos try RECIPE`: shows one group of each environment, before a run.

`environment_site/groups.py` takes the environment's own code through one problem, on the server of
the recipe and without an Atropos API. The group that it would have sent is read and checked by the
code of a run (`rollouts/wire.py`, `intake.py`), and shown. An exception is shown as Python shows
it.
"""

import json
import math
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from trl_atropos import logging
from trl_atropos.activity import Pacer, activity
from trl_atropos.check import width, wrapped
from trl_atropos.check.launch import Launch
from trl_atropos.check.settings import read
from trl_atropos.environment_entry import EnvironmentSpec
from trl_atropos.errors import AtroposTrainingError, RolloutError, ServerError, ServiceError
from trl_atropos.flags import stated_flags, stated_settings
from trl_atropos.privacy import close_to_others
from trl_atropos.protocol import environment_token, hide_token, keep_token
from trl_atropos.recipe import Recipe
from trl_atropos.rollouts.drop_reasons import JOINED
from trl_atropos.rollouts.intake import UNKNOWN_OVERRIDE, Intake
from trl_atropos.rollouts.rollout import Rollout, end_tokens
from trl_atropos.rollouts.versions import VersionBook
from trl_atropos.rollouts.wire import ScoredGroup, parse_group
from trl_atropos.rollouts.wire_values import RejectedGroup
from trl_atropos.server_client import ServerClient
from trl_atropos.services.addresses import trouble_at
from trl_atropos.services.manager import ENVIRONMENT, Service, Services
from trl_atropos.services.service_log import cause_of_end, tail
from trl_atropos.services.stacks import where_is
from trl_atropos.services.starting import control_token, start_services
from trl_atropos.terminal import cut, fitted

logger = getLogger(__name__)

POLL = 0.1  # seconds
LINES = 4  # of a completion that are shown
REQUEST_TIMEOUT = 60.0  # seconds that a server may take to say which versions sampled


def main(launcher: list[str], settings: list[str]) -> None:
    """Runs the command with accelerate's flags and the settings. Exits with the code that the help
    names."""
    hide_token()
    logging.disable_propagation()
    logging.set_verbosity(logging.verbosity_of_environment() or logging.INFO)
    try:
        launch = _launch_of(launcher)
        with activity("Reading the recipe"):
            recipe = read(settings, stated_settings(settings), launch)
        if not recipe.environments:
            raise AtroposTrainingError(
                "The recipe names no environment", fix="Put its path under `environments`."
            )
        if recipe.runs_agents:
            close_to_others()
        good = _try_all(recipe)
    except AtroposTrainingError as error:
        sys.exit(fitted(f"\ntrl-atropos try: {error}"))
    sys.exit(0 if all(good) else 1)


def _try_all(recipe: Recipe) -> list[bool]:
    """Shows one group of each environment. Returns whether a run would train on them."""
    if recipe.services.start_vllm:
        # Environments start before the server, whose token opens their sessions.
        keep_token(control_token())
    serving = _serving_only(recipe)
    logs = os.path.join(serving.training.output_dir, "logs")
    with Services(logs, recipe.runs_agents) as services:
        # they load while the server starts
        started = [_start(serving, spec, services) for spec in recipe.environments]
        start_services(serving, services)  # raises if one of them ends before the server is up
        for service in started:
            service.ends = True
        _require_servers(serving)
        good = []
        for spec, service in zip(recipe.environments, started, strict=True):
            good.append(_try(serving, spec, services, service))
    return good


def _serving_only(recipe: Recipe) -> Recipe:
    """Returns the recipe with a server, if it starts some, and nothing else to start. It writes
    into the folder `try` of the run's."""
    services = replace(recipe.services, start_atropos=False)
    changes = {"output_dir": os.path.join(recipe.training.output_dir, "try")}
    if services.start_vllm:  # one is enough for a group
        changes["vllm_server_base_url"] = recipe.training.vllm_server_urls[0]
    return replace(recipe, environments=[], services=services).with_training(**changes)


def _launch_of(launcher: list[str]) -> Launch:
    """Returns what accelerate's flags say of the processes that will train."""
    flags = {}
    for flag, value in stated_flags(launcher).items():
        flags[flag.lstrip("-").replace("-", "_")] = value
    processes = flags.get("num_processes") or "0"
    if not processes.isdigit():
        seen = f"--num_processes {processes}"
        what = "`--num_processes` is no whole number"
        raise AtroposTrainingError(what, seen, "Say how many processes will train.")
    return Launch(config_file=flags.get("config_file"), num_processes=int(processes))


def _try(recipe: Recipe, spec: EnvironmentSpec, services: Services, service: Service) -> bool:
    """Shows one group of an environment. Returns whether a run would train on it."""
    began = time.monotonic()
    line = _ask(recipe, spec, services, service)
    seconds = time.monotonic() - began
    try:
        for text in _shown(recipe, spec, line, service.log_path, seconds):
            sys.stdout.write(fitted(f"{text}\n", sys.stdout))
    except RolloutError as error:
        for text in wrapped(str(error)):
            sys.stdout.write(f"{text}\n")
        return False
    return True


def _require_servers(recipe: Recipe) -> None:
    """Raises `ServiceError` if a server that this command did not start does not answer."""
    for url in recipe.training.vllm_server_urls:
        trouble = trouble_at(f"{url}/health")
        if trouble is not None:
            model = recipe.model.model_name_or_path
            mode = recipe.training.vllm_mode
            what = f"No server answers at {url}, and the recipe starts none"
            fix = (
                f"Start it with `trl-atropos serve {model} --vllm_mode {mode}`, or set "
                "`start_vllm: true`."
            )
            raise ServiceError(what, trouble, fix)


# --------------------------------------------------------------------------- the environment's code


def _files(recipe: Recipe, spec: EnvironmentSpec) -> tuple[Path, Path]:
    """Returns the file that an environment waits for, and the one to which `groups.py` writes the
    result of its problem."""
    result = Path(recipe.training.output_dir, "environments", f"{spec.name}.jsonl").absolute()
    return result.with_suffix(".go"), result


def _start(recipe: Recipe, spec: EnvironmentSpec, services: Services) -> Service:
    """Starts an environment, which loads and then waits for its `.go` file."""
    if spec.path is None:
        what = f"Environment {spec.name!r} is started by a `command`, which `try` cannot run"
        fix = "Name its script as `path`, with a `config`."
        raise AtroposTrainingError(what, str(spec.command), fix)
    name = f"{ENVIRONMENT}{spec.name}"
    go, result = _files(recipe, spec)
    for file in (go, result, services.log_dir / f"{name}.log"):
        file.unlink(missing_ok=True)
    spec = spec.model_copy(deep=True)
    spec.config |= {"total_steps": 1, "max_num_workers": 1, "data_path_to_save_groups": str(result)}
    config = recipe.write_environment_file(spec)
    command = [*spec.groups_command("process", recipe.placeholders()), "--config", str(config)]
    variables = spec.variables(TRL_ATROPOS_GO=str(go))
    return services.start(name, command, env=variables, cwd=spec.cwd, scratch=True)


def _ask(
    recipe: Recipe, spec: EnvironmentSpec, services: Services, service: Service
) -> dict[str, Any] | None:
    """Lets an environment solve one problem. Returns the line that `groups.py` wrote, `None` if it
    wrote nothing."""
    go, result = _files(recipe, spec)
    limit = recipe.services.service_timeout
    go.touch()
    began = time.monotonic()
    pacer = Pacer()
    while services.exit_code(service) is None and not _is_whole(result):
        services.check()
        waited = time.monotonic() - began
        if waited > limit:
            what = f"{service.name} did not finish a group within {limit:g} s (`service_timeout`)"
            place = where_is(service, services.stacks_dir)
            if place:
                what += f": its code is {place}"
            fix = f"Look at its log, {service.log_path.absolute()}, or give it longer."
            raise ServiceError(what, fix=fix)
        if pacer.is_due(waited):
            place = where_is(service, services.stacks_dir) or "at work"
            logger.info("%s has begun a group %.0f s ago, and is %s", service.name, waited, place)
        time.sleep(POLL)
    services.end(service)
    return json.loads(result.read_text()) if _is_whole(result) else None


def _is_whole(path: Path) -> bool:
    return path.is_file() and path.read_bytes().endswith(b"\n")


# --------------------------------------------------------------------------------- what it has sent


def _shown(
    recipe: Recipe, spec: EnvironmentSpec, line: dict | None, log: Path, seconds: float
) -> Iterator[str]:
    """Yields the lines that are printed of an environment. Raises `RolloutError` if a run would
    drop the group or end."""
    if line is None:
        text = tail(log)
        traceback = text[max(0, text.find("Traceback (most recent")) :]
        yield from ("", *traceback.splitlines(), "")
        what = f"Environment {spec.name!r} ended before its first group{cause_of_end(log)}"
        raise RolloutError(what, fix=f"Its log: {log}.")
    if "error" in line:
        yield from ("", *line["traceback"].splitlines(), "")
        place = line["place"].replace(f"{os.getcwd()}{os.sep}", "")
        what = f"Environment {spec.name!r} failed: {line['error']} ({place})"
        raise RolloutError(what, fix="Correct it there.")
    if not line["groups"]:
        reason = _version_book(recipe).refusals() or (
            "Its `collect_trajectories` or `postprocess_histories` returned nothing for the "
            "problem."
        )
        raise RolloutError(f"Environment {spec.name!r} sent no group. {reason}")
    for group in line["groups"]:
        yield from _lines_of_group(recipe, spec, group, seconds)


def _lines_of_group(
    recipe: Recipe, spec: EnvironmentSpec, content: dict[str, Any], seconds: float
) -> Iterator[str]:
    """Yields the prompts and completions of a group, then what a run would make of it."""
    training = recipe.training
    model = recipe.model.model_name_or_path
    longest = training.max_sequence_length or _longest_served(recipe) or math.inf
    config = AutoConfig.from_pretrained(model, trust_remote_code=training.trust_remote_code)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    intake = Intake(longest, training.temperature, training.single_row_groups, vocabulary)
    try:
        group = parse_group(content)
        rollouts, dropped = intake.rollouts_of(group, spec.name)
    except RejectedGroup as error:
        what = f"A run would drop this group of environment {spec.name!r}: {error}"
        raise RolloutError(what, fix=error.fix) from error
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=training.trust_remote_code)
    ends = end_tokens(_generation_config(model, config), tokenizer)
    yield f"\nEnvironment {spec.name!r} sent a group of {group.size} in {seconds:.0f} s."
    last_prompt = None
    for number, rollout in enumerate(rollouts, start=1):
        prompt = rollout.prompt_ids.tolist()
        if prompt != last_prompt:
            last_prompt = prompt
            yield f"\nprompt, {len(prompt)} tokens:"
            yield from _lines_of_text(tokenizer.decode(prompt))
            yield ""
        yield f"{number}. score {rollout.score:.4g}, {_size(rollout, ends)}"
        yield from _lines_of_rollout(rollout, tokenizer)
        if spec.kind is not None:
            yield from _lines_of_episode(rollout)
    yield ""
    for key in group.unknown_overrides:
        yield from wrapped(f"This version does not know the override {key}. {UNKNOWN_OVERRIDE}")
    for text in _verdict(recipe, spec.name, group, rollouts, longest, dropped[JOINED]):
        yield from wrapped(text)
    doubled = sum(_ends_twice(rollout, ends) for rollout in rollouts)
    if doubled > 0:
        yield from wrapped(
            f"In {doubled} of these rollouts, an end token stands twice in a row between two "
            "turns: the model ended its turn, and the chat template ended it once more. Call "
            "`end_turn` of the template (`trl-atropos init`) after each `chat_completion`."
        )


def _lines_of_rollout(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yields the parts of a rollout's score, and the text of each branch of its completion."""
    if rollout.rewards:
        parts = [f"{name} {value:.4g}" for name, value in rollout.rewards.items()]
        yield from wrapped(", ".join(parts), "   parts: ")
    for part, tokens in enumerate(rollout.completion_parts):
        if part > 0:
            yield f"   branch {rollout.tree.origin(part)}"
        yield from _lines_of_text(tokenizer.decode(tokens))


def _lines_of_episode(rollout: Rollout) -> Iterator[str]:
    """Yields what an agent did: how it ended, what it printed, and each of its calls."""
    for message in json.loads(rollout.messages or "[]"):
        content = repr(message["content"])[1:-1]
        text = cut(f"{message['role']}: {content}", LINES * width())
        yield from wrapped(text, "   ")


def _size(rollout: Rollout, ends: list[int]) -> str:
    """Returns how long a rollout is after its prompt, such as `120 tokens in 3 branches,
    truncated`. It is truncated if one of its calls does not end with one of the `ends`."""
    size = f"{len(rollout.completion_ids)} tokens"
    if rollout.tree is not None:
        num_branches = len(rollout.tree) - 1
        size += f", {num_branches} {'branch' if num_branches == 1 else 'branches'}"
    if not np.isin(rollout.last_tokens, ends).all():
        size += ", truncated"
    return size


def _generation_config(model: str, config: Any) -> GenerationConfig:
    """Returns the generation config that the model will have."""
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:  # there is no such file
        return GenerationConfig.from_model_config(config)


def _ends_twice(rollout: Rollout, ends: list[int]) -> bool:
    """Returns whether a sampled end token is followed by itself in the same part of the row, and
    the second one was not sampled."""
    begin = 0
    for ids in rollout.completion_parts:
        sampled = rollout.mask[begin : begin + len(ids)]
        begin += len(ids)
        is_end = np.isin(ids[:-1], ends)
        is_repeated = ids[1:] == ids[:-1]
        only_first_sampled = sampled[:-1] & ~sampled[1:]
        if (is_end & is_repeated & only_first_sampled).any():
            return True
    return False


def _lines_of_text(text: str) -> list[str]:
    """Returns decoded tokens as a few lines, with the middle left out. A line ends inside of a word
    only if that is longer than a line."""
    indent = "   "
    escaped = repr(text)[1:-1]
    whole = cut(escaped, LINES * (width() - len(indent)))
    if not whole:
        return [f"{indent}(empty)"]
    return textwrap.wrap(
        whole,
        width(),
        initial_indent=indent,
        subsequent_indent=indent,
        drop_whitespace=False,
        break_on_hyphens=False,
    )


def _verdict(
    recipe: Recipe,
    name: str,
    group: ScoredGroup,
    rollouts: list[Rollout],
    longest: float,
    num_joined: int,
) -> Iterator[str]:
    """Yields what a run would make of the group. `num_joined` of its rows became part of another
    one's episode. Raises `RolloutError` if nothing can be trained."""
    size = group.size - num_joined
    lowest = min(group.scores)
    highest = max(group.scores)
    mean = np.mean(group.scores)
    yield f"Scores from {lowest:.4g} to {highest:.4g}, mean {mean:.4g}."
    _require_full_batches(recipe.training.generation_batch_size, group.size)
    if num_joined > 0:
        yield f"Its {group.size} rows are {size} episodes, and each of these is one rollout."
    if not rollouts:
        raise RolloutError(
            f"Each rollout is longer than {longest:g} tokens, or its mask leaves none to train on."
        )
    for rollout in rollouts:
        rollout.environment = name
    _version_book(recipe).tag(rollouts)  # raises if they were sampled at another temperature
    dropped = size - len(rollouts)
    if dropped > 0:
        yield (
            f"Of these {size}, {dropped} would be dropped: longer than {longest:g} tokens, or "
            "nothing in them to train on."
        )
    unknown = sum(_lacks_logprobs(rollout) for rollout in rollouts)
    if unknown > 0:
        yield (
            f"Of these {size}, {unknown} came without log-probabilities for some tokens, so their "
            "staleness cannot be corrected."
        )
    changed = sum(rollout.policy_version is None for rollout in rollouts) - unknown
    if changed > 0:
        yield (
            f"Of these {size}, {changed} are not known to the server: their tokens were changed, "
            "or sampled elsewhere."
        )
    if all(rollout.teaches_nothing(distils=False) for rollout in rollouts):
        yield (
            "All scores are equal: this group teaches nothing. A finer reward, or other "
            "problems, would."
        )
    yield f"A run would train on {len(rollouts)} of {size}."


def _lacks_logprobs(rollout: Rollout) -> bool:
    """Returns whether the log-probability of a sampled token is unknown."""
    logprobs = rollout.logprobs[rollout.mask]
    return bool(np.isnan(logprobs).any())


def _require_full_batches(batch: int, size: int) -> None:
    """Raises `RolloutError` if groups of `size` rollouts do not fill a generation batch."""
    if batch % size:
        what = (
            f"Groups of {size} do not fill a generation batch of {batch} rollouts: no batch "
            "would come"
        )
        fix = (
            f"Set `per_device_train_batch_size` so that the batch is a multiple of {size}, or "
            "change the group size. (If several processes will train, say so with "
            "`--num_processes` or `--config_file`.)"
        )
        raise RolloutError(what, fix=fix)


# --------------------------------------------------------------------------------- what servers say


def _version_book(recipe: Recipe) -> VersionBook:
    training = recipe.training
    return VersionBook(
        training.vllm_server_urls, environment_token(), REQUEST_TIMEOUT, training.temperature
    )


def _longest_served(recipe: Recipe) -> int | None:
    """Returns the tokens of a sequence that every server takes. Returns `None` if one does not say
    it."""
    try:
        infos = [ServerClient(url, 10.0).info() for url in recipe.training.vllm_server_urls]
    except ServerError:
        return None
    return min(info.max_model_len for info in infos)
