"""Starts the services of a recipe: the Atropos API, the inference servers, the environments and the
evaluations.

`trl_atropos.train` calls `start_services` on rank 0, and `manager.py` keeps what was started.
"""

import contextlib
import os
import secrets
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trl_atropos.activity import activity
from trl_atropos.errors import RolloutError
from trl_atropos.flags import parallel
from trl_atropos.protocol import TOKEN_VARIABLE, environment_token, keep_token
from trl_atropos.rollouts.api import AtroposClient
from trl_atropos.services.addresses import require_free_port
from trl_atropos.services.machine import require_shared_memory, require_sockets
from trl_atropos.services.manager import ATROPOS, ENVIRONMENT, Services

if TYPE_CHECKING:
    from trl_atropos.recipe import Recipe
    from trl_atropos.services.evaluations import Evaluator

RESTARTS = 3  # of an environment, and of the Atropos API, within an hour


def start_services(
    recipe: "Recipe", services: Services, evaluator: "Evaluator | None" = None
) -> None:
    """Starts the API, the server, the environments and evaluations, and waits until the first two
    are healthy."""
    config = recipe.services
    atropos = recipe.training.atropos_url
    require_room(recipe)
    if config.start_atropos:
        services.start(
            ATROPOS,
            _module("trl_atropos.rollouts.api", atropos),
            env={TOKEN_VARIABLE: ""},  # which it need not know
            health_url=f"{atropos}/",
            restarts=RESTARTS,
            scratch=True,
        )
    names = start_servers(
        recipe, services, recipe.training.vllm_mode, recipe.model.model_name_or_path
    )
    if config.start_atropos:
        services.wait_healthy(ATROPOS, config.service_timeout)
    # before the environments register there, which would end without their place
    elif recipe.training.reset_atropos:
        # the trainer waits for the API, and says what is wrong
        with contextlib.suppress(RolloutError), activity(f"Resetting the Atropos API at {atropos}"):
            AtroposClient(atropos, config.service_timeout, config.service_timeout).reset()
    # Environments load while the server starts. They sample nothing before the trainer asks for a
    # first batch, and evaluations not before they are told to.
    for spec in recipe.environments:
        recipe.write_environment_file(spec)
        services.start(
            f"{ENVIRONMENT}{spec.name}",
            recipe.environment_command(spec),
            env=spec.variables(),
            cwd=spec.cwd,
            restarts=RESTARTS,
            scratch=True,
        )
    if evaluator is not None:
        evaluator.prepare()
    for name in names:
        services.wait_healthy(name, config.service_timeout)


def start_servers(recipe: "Recipe", services: Services, mode: str, model: str) -> list[str]:
    """Starts the inference servers of a recipe that starts any. Returns the names of the
    services."""
    if not recipe.services.start_vllm:
        return []
    training = recipe.training
    urls = training.vllm_server_urls
    names = ["vllm"]
    if len(urls) > 1:
        names = [f"vllm-{index}" for index in range(len(urls))]
    token = control_token()
    keep_token(token)
    flags = ["--vllm_mode", mode, "--seed", str(training.seed), *recipe.vllm_flags()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    for index, (name, url) in enumerate(zip(names, urls, strict=True)):
        command = [*_module("trl_atropos.server.launch", url, model), *flags]
        env = {TOKEN_VARIABLE: token}
        if training.mode.shares_memory and len(urls) > 1:
            # each process trains where its server is
            device = visible.split(",")[index] if visible else str(index)
            env["CUDA_VISIBLE_DEVICES"] = device
        services.start(name, command, env=env, health_url=f"{url}/health", scratch=True)
    return names


def control_token() -> str:
    """Returns the control token of this process, or a new one."""
    return environment_token() or secrets.token_urlsafe(24)


def require_room(recipe: "Recipe") -> None:
    """Raises `ServiceError` if a service that is to be started finds no port, sockets or shared
    memory."""
    fix = "Stop what runs there, set `{}` to a free port, or use it with `{}: false`."
    if recipe.services.start_vllm:
        require_sockets()
        require_shared_memory(parallel(recipe.vllm_flags())[0])
        for url in recipe.training.vllm_server_urls:
            require_free_port(
                url, "the vLLM server", fix.format("vllm_server_base_url", "start_vllm")
            )
    if recipe.services.start_atropos:
        url = recipe.training.atropos_url
        require_free_port(url, "the Atropos API", fix.format("atropos_url", "start_atropos"))


def _module(name: str, url: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module as the server at `url`, whose port is free."""
    place = urlsplit(url)
    address = ["--host", place.hostname, "--port", str(place.port)]
    return [sys.executable, "-m", name, *arguments, *address]
