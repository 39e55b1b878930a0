"""What a run does about the services that it started, besides restarting them.

`trl_atropos.train` gives the rollout source a `Supervisor`, so that its metrics and diagnosis also tell of
the services, and has `Services.watch` report ends to `Disconnector`, which has the Atropos API forget environments
that died.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

from trl_atropos.environment_log import SITE, EnvironmentLog
from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.api import ApiUnreachable, AtroposClient, ReplyLost, disconnect_command
from trl_atropos.services.manager import ATROPOS, ENVIRONMENT, Service, Services

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT = 5.0  # seconds; asked from the thread that watches the services
LOOK_EVERY = 1.0
HOPELESS = 32  # groups that an environment failed to collect while it has collected none: a mistake, not bad luck


def variables_of_environment(own: dict[str, str]) -> dict[str, str]:
    """`own` and what has its Python load `environment_site/sitecustomize.py`."""
    before = own.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {**own, "PYTHONPATH": f"{SITE}{os.pathsep}{before}".rstrip(os.pathsep)}


class Supervisor:
    """
    Knows the environments that this run started, for `AtroposSource`.

    Args:
        services: of this run.
        on_failure: called, from a thread, with the error that ends the run: an environment only ever fails.
    """

    def __init__(self, services: Services, on_failure: Callable[[RolloutError], None]):
        self._services = services
        self._on_failure = on_failure
        self._logs: dict[str, EnvironmentLog] = {}
        self._told: set[tuple[str, str]] = set()  # environment, and where it failed
        self._closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="environment-watch", daemon=True).start()

    def metrics(self) -> dict[str, float]:
        """`services/restarts`: how many restarts of services there were so far."""
        return {"services/restarts": float(self._services.restarts)}

    def close(self) -> None:
        self._closed.set()

    def names(self) -> dict[int, str]:
        """
        Of the environments of this run, by the numbers that their logs show, of this life and of the one before it.
        Where two show one number, the API was restarted in between: then it is that of the later one.
        """
        logs = sorted(self._read_logs(), key=lambda pair: pair[0].started)
        numbers = [(log.former_number, service) for service, log in logs] + [
            (log.number, service) for service, log in logs
        ]
        return {number: service.name.removeprefix(ENVIRONMENT) for number, service in numbers if number is not None}

    def _read_logs(self) -> list[tuple[Service, EnvironmentLog]]:
        environments = [one for one in self._services.running() if one.name.startswith(ENVIRONMENT)]
        for one in environments:
            self._logs.setdefault(one.name, EnvironmentLog(one.log_path, one.log_start))
        return [(one, self._logs[one.name].read()) for one in environments]

    def explain(self, told: str) -> str:
        """Why no batch comes. First what the environments' logs say of groups that were never delivered."""
        before, after = [], []
        for service, log in self._read_logs():
            signs = log.told()
            (before if signs else after).append(_account_of(service, signs))
        return " ".join([*before, told, *after])

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_EVERY):
            for service, log in self._read_logs():
                if not log.failures:
                    continue
                where = f"the traceback is in its log, {service.log_path}"
                if log.failures >= HOPELESS and log.never_succeeded:
                    error = (
                        f"{service.name} failed on each of its first {log.failures} groups. The last error was "
                        f"{log.error}. Correct the environment: {where}."
                    )
                    return self._on_failure(RolloutError(error))
                if (service.name, log.place) not in self._told:
                    self._told.add((service.name, log.place))
                    logger.warning("%s failed on a group: %s; %s.", service.name, log.error, where)


def _account_of(service: Service, signs: list[str]) -> str:
    seconds = time.monotonic() - service.started
    doing = "has ended and is about to be started again" if service.down else f"has been running for {seconds:.0f} s"
    again = f" (restarted {service.restarts} times)" if service.restarts else ""
    said = f"{service.name}: {'; '.join(signs)}. It" if signs else f"{service.name}"
    return f"{said} {doing}{again}. Its log: {service.log_path}."


class Disconnector:
    """
    Has the API forget environments that died, once their successors have registered.

    The API never forgets by itself: a dead environment keeps its share of the weights, and with a
    `min_batch_allocation` it stops all batches. Which number a dead environment had is known if its log tells, or if
    it is the only one there. Before a successor is there, nothing is disconnected: without any connected
    environment, the API divides by zero.

    Args:
        services: of this run.
        url: of the API.
    """

    def __init__(self, services: Services, url: str):
        self._services = services
        self._client = AtroposClient(url, request_timeout=REQUEST_TIMEOUT, batch_timeout=REQUEST_TIMEOUT)
        self._waiting: list[tuple[str, list[int], int]] = []  # name, numbers, number of the first that registers next
        self._changing = threading.Lock()  # of the list

    def ended(self, service: Service) -> None:
        """A service has ended and will be started again. Called by `Services.watch`, before that."""
        if service.name == ATROPOS:
            with self._changing:
                self._waiting.clear()  # the new API numbers from 0
        if not service.name.startswith(ENVIRONMENT):
            return
        try:
            count = len(self._client.environments())
        except (ApiUnreachable, ReplyLost):
            return  # an API that comes back knows no environment
        numbers = self._numbers_of(service, count)
        if numbers is None:
            logger.warning(
                "The Atropos API still counts on the environment that ended (%s), and which it was there cannot be "
                "told. If it reserved a part of every batch (`min_batch_allocation`), no batch comes before the API "
                "is told to forget it: %s.",
                service.name,
                disconnect_command(self._client.url, [0, 1]),
            )
        elif numbers:
            with self._changing:
                self._waiting.append((service.name, numbers, count))
                first = len(self._waiting) == 1
            if first:
                threading.Thread(target=self._wait, name="disconnect", daemon=True).start()

    def _numbers_of(self, service: Service, count: int) -> list[int] | None:
        """Numbers under which the API may know what has ended; `None` if that cannot be told."""
        by_name = {one.name: one for one in self._services.running()}
        api = by_name.get(ATROPOS)
        if api is None:
            return None  # it may have been restarted, and its numbers be those of others
        if api.down or api.started > service.started:
            return []  # it never heard of the one that ended
        told = EnvironmentLog(service.log_path, service.log_start).read().former_number
        if told is not None and told < count:
            return [told]
        alone = [name for name in by_name if name.startswith(ENVIRONMENT)] == [service.name]
        return list(range(count)) if alone and count <= service.restarts + 1 else None

    def _wait(self) -> None:
        """Until there is nobody left to disconnect. Has no deadline: a successor that never registers ends the run."""
        while True:
            with self._changing:
                if not self._waiting:
                    return
                name, numbers, successor = self._waiting[0]
            try:
                is_there = self._client.environment(successor) is not None
                for number in numbers if is_there else []:
                    self._client.disconnect(number)
            except (ApiUnreachable, ReplyLost):
                is_there = False
            if not is_there:
                time.sleep(LOOK_EVERY)
                continue
            logger.info("The Atropos API no longer counts on %s as it was before it ended.", name)
            with self._changing:
                self._waiting = self._waiting[1:]
