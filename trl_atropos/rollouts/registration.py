"""Becoming the trainer of an Atropos API, and knowing that it worked.

The API takes a registration only while it holds nothing, answers 200 either way, and cannot be asked to forget just
the registration. `AtroposSource` calls `wait_for_api` and `join` at the start, and `join` again after an API restart.
"""

import logging
import time

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.atropos import ApiUnreachable, AtroposClient, Info, Registration, ReplyLost, Status

logger = logging.getLogger(__name__)

UNREGISTERED = -1
RETRY_PAUSE = 0.5  # seconds
HEAL_TRIES = 3


def wait_for_api(client: AtroposClient, timeout: float) -> None:
    """Wait until an Atropos API answers. Raises `RolloutError` after `timeout` seconds, or if it is something else."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            client.greet()
            return
        except (ApiUnreachable, ReplyLost) as error:
            if time.monotonic() >= deadline:
                raise RolloutError(
                    f"No Atropos API answered at {client.url} within {timeout:g} s. Start one with `python -m "
                    "atroposlib.cli.run_api --port PORT`, correct `atropos_url`, or let the recipe start it with "
                    f"`start_atropos: true`. Last try: {error}"
                ) from error
        time.sleep(RETRY_PAUSE)


def join(client: AtroposClient, registration: Registration, *, reset: bool) -> Status:
    """
    Register, and verify that the API holds this run's batch size and length.

    Args:
        reset: first throw away whatever the API holds, queued rollouts and registered environments too.

    Returns:
        What the API holds now. An earlier trainer's queue is kept if its registration agrees with this one.

    Raises:
        RolloutError: the API holds another registration, or does not take any.
    """
    if reset:
        client.reset()
    client.register(registration)
    held = client.info()
    if held.batch_size == UNREGISTERED:
        held = _heal(client, registration)
    wanted = Info(batch_size=registration.batch_size, max_token_len=registration.max_token_len)
    if held != wanted:
        raise RolloutError(
            f"The Atropos API at {client.url} still holds an earlier run's registration: batch_size "
            f"{held.batch_size} and max_token_len {held.max_token_len}, and this run needs batch_size "
            f"{wanted.batch_size} and max_token_len {wanted.max_token_len} (its longest sequence + 1). Set "
            "`reset_atropos: true` (in code `reset_api: true` of the `AtroposSource`) to throw away the rollouts "
            "queued there, or restart the API; restart the environments in both cases."
        )
    return client.status()


def _heal(client: AtroposClient, registration: Registration) -> Info:
    """
    An environment that delivers before any trainer registered makes the API ignore every registration. No trainer can
    ever be handed what is queued there, so a reset loses nothing that could have been used.
    """
    queued = client.status().queue_size
    logger.warning(
        "The Atropos API at %s received %d groups before any trainer had registered, and ignores registrations since. "
        "Resetting it.",
        client.url,
        queued,
    )
    for _ in range(HEAL_TRIES):  # a delivery between the reset and the registration spoils it again
        client.reset()
        client.register(registration)
        held = client.info()
        if held.batch_size != UNREGISTERED:
            return held
    raise RolloutError(
        f"The Atropos API at {client.url} does not take a registration: batch_size is {UNREGISTERED} after "
        f"{HEAL_TRIES} resets. An environment of an earlier run is probably delivering to it: stop it, then restart "
        "the API."
    )
