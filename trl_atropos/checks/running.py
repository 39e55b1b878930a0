"""Ports of what the run starts, and what answers already where it starts nothing."""

import os
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from trl_atropos.checks.finding import WARNING, Finding, from_message
from trl_atropos.checks.launch import Launch
from trl_atropos.checks.text import tokenizer
from trl_atropos.checks.versions import requirement
from trl_atropos.errors import RolloutError, ServerError, ServiceError
from trl_atropos.flags import parallel
from trl_atropos.protocol import ADAPTER_MODES, ServerInfo, tokenizer_fingerprint
from trl_atropos.services.manager import port_of, require_free_port, require_shared_memory, require_sockets

ANSWER = 5.0  # seconds
CONNECT = 1.0  # seconds; nobody there is no finding: services may be started later


def ports(recipe) -> Iterator[Finding]:
    services, training = recipe.services, recipe.training
    wanted = [("The Atropos API", training.atropos_url, "atropos")] if services.start_atropos else []
    wanted += [("The vLLM server", url, "vllm") for url in training.vllm_server_urls if services.start_vllm]
    for what, url, name in wanted:
        setting = "atropos_url" if name == "atropos" else "vllm_server_base_url"
        try:
            port_of(url)
        except ServiceError as error:
            yield from_message(str(error), {}, name="port", seen=f"{setting}: {url}")
            continue
        try:
            require_free_port(url, what, "")
        except ServiceError as error:
            yield Finding(
                "port-taken",
                f"{what} cannot be started where its URL says",
                f"{setting}: {url}, {str(error).partition(f', {what}')[0]}",
                f"Stop what runs there, set `{setting}` to a free port, or use it with `start_{name}: false`.",
            )


def room(recipe, launch: Launch) -> Iterator[Finding]:
    """Of a vLLM server that is started on this machine: its sockets and its shared memory."""
    if launch.elsewhere or not recipe.services.start_vllm:
        return
    processes, _ = parallel(recipe.vllm_flags())
    for name, require in (("sockets", require_sockets), ("shared-memory", lambda: require_shared_memory(processes))):
        try:
            require()
        except ServiceError as error:
            yield from_message(str(error), {}, name=name)


def running(recipe, launch: Launch) -> Iterator[Finding]:
    """Of services that the run does not start: of those that answer, whether they are the run's."""
    services, training = recipe.services, recipe.training
    if training.replay_paths is not None:
        return
    if not services.start_atropos and _answers(training.atropos_url):
        yield from _api(recipe, launch)
    for url in [] if services.start_vllm else training.vllm_server_urls:
        if _answers(url):
            yield from _server(recipe, url)


def _answers(url: str) -> bool:
    try:
        with socket.create_connection((urlsplit(url).hostname, port_of(url)), timeout=CONNECT):
            return True
    except (OSError, ServiceError):
        return False


def _api(recipe, launch: Launch) -> Iterator[Finding]:
    from trl_atropos.rollouts.api import UNREGISTERED, AtroposClient

    training = recipe.training
    client = AtroposClient(training.atropos_url, ANSWER, ANSWER)
    try:
        client.greet()
        held = client.info()
    except RolloutError as error:
        seen = f"atropos_url: {training.atropos_url}"
        yield from_message(str(error), {}, name="not-atropos", seen=seen)
        return
    wanted = training.generation_batch_size
    # Without being told how many processes there will be, any multiple may be right.
    fits = held.batch_size % wanted == 0 if launch.processes is None else held.batch_size == wanted
    if held.batch_size != UNREGISTERED and not fits and not training.reset_atropos:
        yield Finding(
            "atropos-registered",
            "The Atropos API holds an earlier run's registration, which it does not change",
            f"{training.atropos_url} has batch_size {held.batch_size}, this run {wanted}",
            "Set `reset_atropos: true` to throw away the rollouts queued there, or restart the API; restart the "
            "environments in both cases.",
        )


def _server(recipe, url: str) -> Iterator[Finding]:
    from trl_atropos.server_client import ServerClient

    try:
        info = ServerClient(url, ANSWER).info()
    except ServerError as error:
        message = str(error)
        name = next(
            name
            for part, name in (
                ("control token", "server-token"),
                ("control routes", "not-our-server"),
                ("protocol", "server-version"),
                ("", "server-answer"),
            )
            if part in message
        )
        yield from_message(message, {}, name=name, seen=f"vllm_server_base_url: {url}")
        return
    yield from _fits(recipe, url, info)


def _fits(recipe, url: str, info: ServerInfo) -> Iterator[Finding]:
    training, model = recipe.training, str(recipe.model.model_name_or_path)
    mode = training.vllm_mode
    start = f"trl-atropos serve {model} --vllm_mode {mode}"
    there = os.path.isdir(model) and os.path.isdir(info.model) and os.path.samefile(model, info.model)
    if info.model != model and not there and mode != "restart":  # which serves one checkpoint after the other
        fix = f"Start it as `{start}`, or set `model_name_or_path: {info.model}`."
        seen = f"{url} has {info.model}, the run {model}"
        yield Finding("server-model", "The server that is running serves another model", seen, fix)
    if mode in ADAPTER_MODES and info.lora is None:
        what = "The server that is running was started without adapters, and the run sends one"
        yield Finding("server-mode", what, f"{url}, vllm_mode: {mode}", f"Start it as `{start}`.")
    elif info.lora is not None and recipe.model.use_peft and recipe.model.lora_r > info.lora.max_rank:
        what = "The server that is running has no place for an adapter of that rank"
        seen = f"{url} has --max-lora-rank {info.lora.max_rank}, lora_r: {recipe.model.lora_r}"
        yield Finding("server-mode", what, seen, f"Start it as `{start} --max-lora-rank {recipe.model.lora_r}`.")
    yield from _versions(url, info)
    ours = tokenizer(model)
    same = (None, None if ours is None else tokenizer_fingerprint(ours.get_vocab()))
    if ours is not None and info.tokenizer_fingerprint not in same:
        what = "The server that is running has another vocabulary than the run's model"
        fix = f"Start it as `{start}`, without another `--tokenizer`."
        yield Finding("tokenizer", what, f"{url} has that of {info.model}, the run {model}", fix)
    if training.max_sequence_length and training.max_sequence_length > info.max_model_len:
        yield Finding(
            "sequence-length",
            "The trainer is to take longer sequences than the server that is running samples",
            f"max_sequence_length: {training.max_sequence_length}, {url} has max_model_len {info.max_model_len}",
            f"Lower `max_sequence_length`, or start the server with `--max-model-len {training.max_sequence_length}`.",
        )
    if info.lease_held:
        what = "The server that is running is another trainer's at the moment"
        fix = "Stop that trainer, or start a server for this run."
        yield Finding("server-taken", what, url, fix, WARNING)


def _versions(url: str, info: ServerInfo) -> Iterator[Finding]:
    wanted = requirement("vllm")
    if wanted is not None and not wanted.specifier.contains(info.vllm_version, prereleases=True):
        what = "The server that is running has a vLLM that this package was not made for"
        fix = f'Install another one where it runs: `pip install "{wanted.name}{wanted.specifier}"`.'
        seen = f"{url} has vllm {info.vllm_version}, wanted {wanted.specifier}"
        yield Finding("server-version", what, seen, fix, WARNING)
