"""`trl-atropos try RECIPE`: one group of each environment, before a run.

`environment_site/groups.py` takes the environment's own code through one problem, on the server of
the recipe and without an Atropos API. What it would have sent is read and checked by what reads and
checks it in a run (`rollouts/wire.py`, `intake.py`), and shown. An exception is shown as Python
shows it.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from trl_atropos import logging
from trl_atropos.check import width, wrapped
from trl_atropos.check.launch import Launch, read
from trl_atropos.errors import AtroposTrainingError, RolloutError, ServerError, ServiceError
from trl_atropos.protocol import environment_token, stated_flags, stated_settings
from trl_atropos.recipe import Recipe
from trl_atropos.rollouts.intake import Intake, VersionBook
from trl_atropos.rollouts.rollout import Rollout, end_tokens
from trl_atropos.rollouts.wire import RejectedGroup, ScoredGroup, parse_group
from trl_atropos.server_client import ServerClient
from trl_atropos.services.environments import SITE, EnvironmentSpec
from trl_atropos.services.manager import ENVIRONMENT, Service, Services, tail, trouble_at
from trl_atropos.train import start_services

POLL = 0.1  # seconds
LINES = 4  # of a completion that are shown


def main(launcher: list[str], settings: list[str]) -> None:
    """Called with accelerate's flags and the others. Exits with the code that the help text
    names."""
    logging.disable_propagation()
    logging.set_verbosity(logging.verbosity_of_environment() or logging.INFO)
    try:
        flags = {
            flag.lstrip("-").replace("-", "_"): value
            for flag, value in stated_flags(launcher).items()
        }
        launch = Launch(
            config_file=flags.get("config_file"), num_processes=int(flags.get("num_processes") or 0)
        )
        recipe = read(settings, stated_settings(settings), launch)
        specs = recipe.environments
        recipe = replace(
            recipe, environments=[], services=replace(recipe.services, start_atropos=False)
        )
        if not specs:
            raise AtroposTrainingError(
                "The recipe names no environment", fix="Put its path under `environments`."
            )
        if recipe.services.start_vllm:
            # enough for a group
            recipe = recipe.with_training(vllm_server_base_url=recipe.training.vllm_server_urls[0])
        recipe = recipe.with_training(output_dir=os.path.join(recipe.training.output_dir, "try"))
        with Services(os.path.join(recipe.training.output_dir, "logs")) as services:
            # they load while the server starts
            started = [_start(recipe, spec, services) for spec in specs]
            start_services(recipe, services)
            _require_servers(recipe)
            good = [
                _try(recipe, spec, services, service)
                for spec, service in zip(specs, started, strict=True)
            ]
    except AtroposTrainingError as error:
        sys.exit(f"\ntrl-atropos try: {error}")
    sys.exit(0 if all(good) else 1)


def _try(recipe: Recipe, spec: EnvironmentSpec, services: Services, service: Service) -> bool:
    """Shows one group of an environment, and returns whether a run would train on it."""
    began = time.monotonic()
    line = _ask(recipe, spec, services, service)
    seconds = time.monotonic() - began
    try:
        sys.stdout.writelines(
            f"{text}\n" for text in _shown(recipe, spec, line, service.log_path, seconds)
        )
    except RolloutError as error:
        sys.stdout.write("\n".join(wrapped(str(error))) + "\n")
        return False
    return True


def _require_servers(recipe: Recipe) -> None:
    """Raises `ServiceError` if a server that this did not start is not there."""
    for url in recipe.training.vllm_server_urls:
        if trouble := trouble_at(f"{url}/health"):
            model = recipe.model.model_name_or_path
            mode = recipe.training.vllm_mode
            fix = (
                f"Start it with `trl-atropos serve {model} --vllm_mode {mode}`, or set "
                "`start_vllm: true`."
            )
            raise ServiceError(
                f"No server answers at {url}, and the recipe starts none", trouble, fix
            )


# --------------------------------------------------------------------------- the environment's code


def _files(recipe: Recipe, spec: EnvironmentSpec) -> tuple[Path, Path]:
    """What an environment waits for, and what `groups.py` writes of its problem."""
    found = Path(recipe.training.output_dir, "environments", f"{spec.name}.jsonl").absolute()
    return found.with_suffix(".go"), found


def _start(recipe: Recipe, spec: EnvironmentSpec, services: Services) -> Service:
    if spec.path is None:
        what = "is started by a `command`, which `try` cannot run"
        fix = "Name its script as `path`, with a `config`."
        raise AtroposTrainingError(f"Environment {spec.name!r} {what}", str(spec.command), fix)
    name, (go, found) = f"{ENVIRONMENT}{spec.name}", _files(recipe, spec)
    for file in (go, found, services.log_dir / f"{name}.log"):
        file.unlink(missing_ok=True)
    spec = spec.model_copy(deep=True)
    spec.config |= {"total_steps": 1, "max_num_workers": 1, "data_path_to_save_groups": str(found)}
    recipe.write_environment_file(spec)
    python, _, script, _, *flags = recipe.environment_command(spec)
    command = [python, os.path.join(SITE, "groups.py"), script, "process", *flags]
    return services.start(
        name, command, env=spec.variables(TRL_ATROPOS_GO=str(go)), cwd=spec.cwd, ends=True
    )


def _ask(
    recipe: Recipe, spec: EnvironmentSpec, services: Services, service: Service
) -> dict[str, Any] | None:
    """What `groups.py` wrote of one problem, `None` if it wrote nothing."""
    (go, found), limit = _files(recipe, spec), recipe.services.service_timeout
    go.touch()
    ends = time.monotonic() + limit
    while services.exit_code(service) is None and not _is_whole(found):
        services.check()
        if time.monotonic() > ends:
            what = f"{service.name} did not finish a group within {limit:g} s (`service_timeout`)"
            raise ServiceError(
                what, fix=f"Look at its log, {service.log_path.absolute()}, or give it longer."
            )
        time.sleep(POLL)
    services.end(service)
    return json.loads(found.read_text()) if _is_whole(found) else None


def _is_whole(path: Path) -> bool:
    return path.is_file() and path.read_bytes().endswith(b"\n")


# --------------------------------------------------------------------------------- what it has sent


def _shown(
    recipe: Recipe, spec: EnvironmentSpec, line: dict | None, log: Path, seconds: float
) -> Iterator[str]:
    """What is printed of an environment. Raises `RolloutError` where a run would drop the group or
    end."""
    if line is None:
        text = tail(log)
        yield from ("", *text[max(0, text.find("Traceback (most recent")) :].splitlines(), "")
        raise RolloutError(
            f"Environment {spec.name!r} ended before its first group, with what is above."
        )
    if "error" in line:
        yield from ("", *line["traceback"].splitlines(), "")
        place = line["place"].replace(f"{os.getcwd()}{os.sep}", "")
        raise RolloutError(f"Environment {spec.name!r} failed: {line['error']} ({place}).")
    if not line["groups"]:
        refusals = _book(recipe).refusals()
        reason = (
            refusals
            or "Its `collect_trajectories` or `postprocess_histories` returned nothing for the "
            "problem."
        )
        raise RolloutError(f"Environment {spec.name!r} sent no group. {reason}")
    for group in line["groups"]:
        yield from _of_group(recipe, spec, group, seconds)


def _of_group(
    recipe: Recipe, spec: EnvironmentSpec, sent: dict[str, Any], seconds: float
) -> Iterator[str]:
    training = recipe.training
    model = recipe.model.model_name_or_path
    longest = training.max_sequence_length or _longest(recipe) or math.inf
    config = AutoConfig.from_pretrained(model, trust_remote_code=training.trust_remote_code)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    intake = Intake(longest, training.temperature, training.single_row_groups, vocabulary)
    try:
        group = parse_group(sent)
        rollouts = intake.rollouts_of(group, spec.name)
    except RejectedGroup as error:
        what = f"A run would drop this group of environment {spec.name!r}: {error}"
        raise RolloutError(what, fix=error.fix) from error
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=training.trust_remote_code)
    ends = end_tokens(_generation_config(model, config), tokenizer)
    yield f"\nEnvironment {spec.name!r} sent a group of {group.size} in {seconds:.0f} s."
    prompt = None
    for number, one in enumerate(rollouts, start=1):
        if (new := one.prompt_ids.tolist()) != prompt:
            prompt = new
            yield f"\nprompt, {len(prompt)} tokens:"
            yield from _text(tokenizer.decode(prompt))
            yield ""
        is_cut = int(one.completion_ids[-1]) not in ends
        yield (
            f"{number}. score {one.score:.4g}, {len(one.completion_ids)} tokens"
            + ", truncated" * is_cut
        )
        yield from _text(tokenizer.decode(one.completion_ids))
    yield ""
    for text in _judged(recipe, spec.name, group, rollouts, longest):
        yield from wrapped(text)
    if (doubled := sum(_ends_twice(rollout, ends) for rollout in rollouts)) > 0:
        yield from wrapped(
            f"In {doubled} of these rollouts, an end token stands twice in a row between two "
            "turns: the model ended its turn, and the chat template ended it once more. Call "
            "`end_turn` of the template (`trl-atropos init`) after each `chat_completion`."
        )


def _generation_config(model: str, config: Any) -> GenerationConfig:
    """The generation config that the model will have."""
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:  # there is no such file
        return GenerationConfig.from_model_config(config)


def _ends_twice(rollout: Rollout, ends: list[int]) -> bool:
    """Returns whether a sampled end token is followed by itself where nothing was sampled."""
    ids = rollout.completion_ids
    sampled = rollout.mask
    repeated = np.isin(ids[:-1], ends) & (ids[1:] == ids[:-1])
    return bool((repeated & sampled[:-1] & ~sampled[1:]).any())


def _text(text: str) -> list[str]:
    """Decoded tokens as a few lines, the middle left out."""
    room = width() - 3
    whole = logging.cut(repr(text)[1:-1], LINES * room)
    return [f"   {whole[at : at + room]}" for at in range(0, len(whole), room)] or ["   (empty)"]


def _judged(
    recipe: Recipe, name: str, group: ScoredGroup, rollouts: list[Rollout], longest: float
) -> Iterator[str]:
    """What a run would make of the group: raises `RolloutError` where nothing can be trained."""
    size = group.size
    batch = recipe.training.generation_batch_size
    scores = np.array(group.scores)
    yield f"Scores from {scores.min():.4g} to {scores.max():.4g}, mean {scores.mean():.4g}."
    if batch % size:
        what = (
            f"Groups of {size} do not fill a generation batch of {batch} rollouts: no batch "
            "would come"
        )
        fix = (
            f"Set `per_device_train_batch_size` so that the batch is a multiple of {size}, or "
            "change the group size."
        )
        fix += (
            " (If several processes will train, say so with `--num_processes` or `--config_file`.)"
        )
        raise RolloutError(what, fix=fix)
    if not rollouts:
        raise RolloutError(
            f"Each rollout is longer than {longest:g} tokens, or its mask leaves none to train on."
        )
    for rollout in rollouts:
        rollout.environment = name
    _book(recipe).tag(rollouts)  # raises if they were sampled at another temperature
    unknown = sum(bool(np.isnan(rollout.logprobs[rollout.mask]).any()) for rollout in rollouts)
    changed = sum(rollout.policy_version is None for rollout in rollouts) - unknown
    for count, what in (
        (
            size - len(rollouts),
            f"would be dropped: longer than {longest:g} tokens, or nothing in them to train on",
        ),
        (
            unknown,
            "came without log-probabilities for some "
            "tokens, so their staleness cannot be corrected",
        ),
        (changed, "are not known to the server: their tokens were changed, or sampled elsewhere"),
    ):
        if count > 0:
            yield f"Of these {size}, {count} {what}."
    if all(rollout.teaches_nothing(distils=False) for rollout in rollouts):
        yield (
            "All scores are equal: this group teaches nothing. A finer reward, or other "
            "problems, would."
        )
    yield f"A run would train on {len(rollouts)} of {size}."


# ---------------------------------------------------------------------------- what the model allows


def _book(recipe: Recipe) -> Any:
    return VersionBook(
        recipe.training.vllm_server_urls, environment_token(), 60.0, recipe.training.temperature
    )


def _longest(recipe: Recipe) -> int | None:
    """Tokens of a sequence that every server takes; `None` where one does not say it."""
    try:
        return min(
            ServerClient(url, 10.0).info().max_model_len for url in recipe.training.vllm_server_urls
        )
    except ServerError:
        return None
