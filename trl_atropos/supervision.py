"""What a run does about the services that it started, besides restarting them.

`trl_atropos.train` hands the trainer a `SupervisedSource`, whose metrics and diagnosis also tell of the services, and
has `Services.watch` report ends to `Disconnector`, which has the Atropos API forget environments that died.
"""

import logging
import re
import threading
import time
from dataclasses import replace

from trl_atropos.rollouts.atropos import ApiUnreachable, AtroposClient, ReplyLost
from trl_atropos.rollouts.diagnosis import disconnect_command, list_environments, told_by_log
from trl_atropos.rollouts.schema import Row
from trl_atropos.rollouts.source import RolloutSource, RunInfo
from trl_atropos.services import ATROPOS, ENVIRONMENT, Service, Services, tail

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT = 5.0  # seconds; asked from the thread that watches the services
LOOK_EVERY = 1.0
SHOWN_LINES = 2000  # of a log, in which a diagnosis looks for signs

REGISTERED = re.compile(r"Initialized env with id (\d+)")
BEGINS_A_LIFE = re.compile(r"(--- \d{4}-|guard: .* starting it again in )")


class SupervisedSource:
    """A rollout source, which also tells of the environments that this run started."""

    def __init__(self, source: RolloutSource, services: Services):
        self._source = source
        self._services = services

    def start(self, run: RunInfo) -> None:
        self._source.start(replace(run, account=self._account))

    def poll(self, num_rows: int, timeout: float) -> list[Row] | None:
        return self._source.poll(num_rows, timeout)

    def metrics(self) -> dict[str, float]:
        """And `services/restarts`, how many restarts of services there were so far."""
        return self._source.metrics() | {"services/restarts": float(self._services.restarts)}

    def diagnose(self) -> str:
        """And how the environments of this run are, with what their logs say of dropped groups."""
        return f"{self._source.diagnose()} {self._account()}".rstrip()

    def _account(self) -> str:
        environments = [one for one in self._services.running() if one.name.startswith(ENVIRONMENT)]
        return " ".join(map(_account_of, environments))

    def state(self) -> dict:
        return self._source.state()

    def close(self) -> None:
        self._source.close()


def _account_of(service: Service) -> str:
    seconds = time.monotonic() - service.started
    doing = "has ended and is about to be started again" if service.down else f"has been running for {seconds:.0f} s"
    again = f" (restarted {service.restarts} times)" if service.restarts else ""
    signs = told_by_log(tail(service.log_path, SHOWN_LINES))
    said = f"; by the end of its log, {'; '.join(signs)}" if signs else ""
    return f"{service.name}, which this run started, {doing}{again}{said}. Its log: {service.log_path}."


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
            count = len(list_environments(self._client))
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
        told = _registered_in_last_life(service.log_path)
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


def _registered_in_last_life(log_path: str) -> int | None:
    """The number that an environment's log shows for the life that has just ended, if it logs what it does."""
    number, before = None, None
    with open(log_path, encoding="utf-8", errors="replace") as log:
        for line in log:
            if BEGINS_A_LIFE.match(line):
                number, before = None, number
            elif found := REGISTERED.search(line):
                number = int(found[1])
    return before  # the last line that begins a life is that of the one to come
