"""Watches the environments of a run: reads their logs, and handles one that ends.

`trl_atropos.train` starts an environment by its entry in the recipe (`environment_entry.py`).
From then on `Supervisor` tells the rollout source what the logs say, and ends the run if an
environment only ever fails. `Services.watch` reports to `Disconnector` each environment that ended,
so that the Atropos API forgets it.

Only `EnvironmentLog` knows the lines that Atropos 0.4 writes. `environment_site/sitecustomize.py`
adds to them. An environment that does not load it leaves messages with less detail.
"""

import contextlib
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.api import ApiUnreachable, AtroposClient, ReplyLost, disconnect_command
from trl_atropos.services.environment_metrics import ALL_FAILED, EnvironmentMetrics, metrics_file
from trl_atropos.services.manager import ATROPOS, ENVIRONMENT, Service, Services
from trl_atropos.services.stacks import where_is

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT = 5.0  # seconds; asked from the thread that watches the services
LOOK_EVERY = 1.0  # seconds
HOPELESS = 32  # failed groups of an environment that has collected none: a mistake, not bad luck

# Parts of the lines that Atropos writes, and what each means.
COLLECT_FAILED = "Error in collect_trajectories"
POSTPROCESS_FAILED = "Scoring exception"
DELIVERY_FAILED = "Error in handle_send_to_api"
LOST_TASK = "A task failed that nobody awaits"  # our own, in `sitecustomize.py`
NOTHING = "handle_env: No trajectories collected"  # after each exception, too
FAILURES = {
    COLLECT_FAILED: "failed to collect a group",
    POSTPROCESS_FAILED: "failed in `postprocess_histories`",
    DELIVERY_FAILED: "failed to deliver a group, because something in it is missing or wrong",
    LOST_TASK: "lost a task, which nobody awaited, to an exception",
}
DROPS = {
    NOTHING: (
        "sampled a group and returned none: most environments do if all scores of a group are "
        "alike. Use other prompts or a finer reward, or have its code return such groups, too"
    ),
    "Scores are the same in a group, skipping": (
        "dropped a group because its scores are all equal: set `--env.ensure_scores_are_not_same "
        "false`, or use easier or harder prompts"
    ),
    "Token length is too long in a group, skipping": (
        "dropped a group that has a rollout over the length limit: let it sample fewer tokens, or "
        "raise `max_sequence_length`"
    ),
    "Group structure invalid, or token count mismatch": (
        "dropped a group that is not of its `group_size`: correct it"
    ),
    "Failed to send": "could not deliver a group: the API refused it or did not answer",
}
MEANINGS = FAILURES | DROPS
SIGN = re.compile("|".join(map(re.escape, MEANINGS)))
EXPLAINED = re.compile(r"\[(\w+: .*), ([^,]+:\d+ in [^;\]]+)(; no group was collected before)?\]$")
REGISTERED = re.compile(r"Initialized env with id (\d+)")
BEGINS_A_LIFE = re.compile(r"(--- \d{4}-|guard: .* starting it again in )")
LONGEST = 300  # characters of an exception that are quoted


class EnvironmentLog:
    """Follows the log of an environment that the run started. The part of this run begins at byte
    `start`."""

    def __init__(self, path: str | Path, start: int = 0):
        self._path = path
        self._read_to = start
        self._reading = threading.Lock()
        self.number: int | None = None  # of the environment at the API
        self._begin_life()

    def _begin_life(self) -> None:
        """Resets the counts, because the environment was started, or started again."""
        self.counts: Counter[str] = Counter()  # how often each of `MEANINGS` has happened
        self.failures = 0  # exceptions of its own among them
        self.error = ""  # the last exception: kind, text and place, as far as they are known
        self.place = ""  # its file, line and function, if they are known
        self.never_succeeded = False  # for certain, no group had been collected before it
        self.all_failed = ""  # what its agents have in common that all failed
        self.former_number = self.number
        self.number = None

    def read(self) -> "EnvironmentLog":
        """Reads what was written since the last call. Returns itself."""
        with self._reading, open(self._path, "rb") as log:
            log.seek(self._read_to)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._read_to += len(line)
                self._read_line(line.decode(errors="replace").rstrip())
        return self

    def _read_line(self, line: str) -> None:
        if BEGINS_A_LIFE.match(line):
            self._begin_life()
            return
        registration = REGISTERED.search(line)
        if registration is not None:
            self.number = int(registration[1])
            return
        if ALL_FAILED in line:
            self.all_failed = line[line.index(ALL_FAILED) :]
            return
        sign = SIGN.search(line)
        if sign is None:
            return
        self.counts[sign[0]] += 1
        if sign[0] in FAILURES:
            self.failures += 1
            self._read_error(line[sign.end() :].strip(": "))

    def _read_error(self, text: str) -> None:
        """Reads an exception, such as `'weight' [KeyError: 'weight', env.py:7 in score]`, or what
        Atropos writes without `sitecustomize.py`, such as `'weight'`."""
        explanation = EXPLAINED.search(text)
        if explanation is None:
            self.place = ""
            self.error = text[:LONGEST]
            self.never_succeeded = False
        else:
            error, self.place, no_success = explanation.groups()
            self.error = f"{error[:LONGEST].rstrip(': ')} ({self.place})"
            self.never_succeeded = no_success is not None

    def undelivered(self) -> list[str]:
        """Returns why groups were not delivered: exceptions first, then what happened most
        often."""
        counts = self.counts.copy()
        counts[NOTHING] -= counts[COLLECT_FAILED] + counts[POSTPROCESS_FAILED]
        reasons = []
        for kind in (FAILURES, DROPS):
            for sign in sorted(kind, key=counts.__getitem__, reverse=True):
                if counts[sign] > 0:
                    reasons.append(f"{counts[sign]} times it {kind[sign]}")
        if self.error:
            reasons[0] += f"; the last error was {self.error}"
        return reasons


class Supervisor:
    """Tells `AtroposSource` about the environments that this run started. Calls `on_failure`, from
    a thread, with the error that ends the run if an environment only ever fails."""

    def __init__(self, services: Services, on_failure: Callable[[RolloutError], None]):
        self._services = services
        self._on_failure = on_failure
        self._logs: dict[str, EnvironmentLog] = {}
        self._metrics: dict[str, EnvironmentMetrics] = {}
        self._warned_of: set[tuple[str, str]] = set()  # environment, and where it failed
        self._closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="environment-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def metrics(self) -> dict[str, float]:
        """Returns `services/restarts`, the number of restarts of services so far, and what the
        environments have logged since the last call, see `EnvironmentMetrics.read`."""
        metrics = {"services/restarts": float(self._services.restarts)}
        for service in self._services.running():
            if service.name.startswith(ENVIRONMENT):
                metrics |= self._metrics_of(service).read()
        return metrics

    def _metrics_of(self, service: Service) -> EnvironmentMetrics:
        if service.name not in self._metrics:
            path = metrics_file(service.log_path)
            name = service.name.removeprefix(ENVIRONMENT)
            self._metrics[service.name] = EnvironmentMetrics(path, name)
        return self._metrics[service.name]

    def names(self) -> dict[int, str]:
        """Returns the environments' names by their numbers at the API, which their logs show. If
        two logs show one number, as after a restart of the API, it belongs to the environment that
        was started later."""
        names = {}
        pairs = sorted(self._read_logs(), key=_start_of)
        for service, log in pairs:
            names[log.former_number] = service.name.removeprefix(ENVIRONMENT)
        for service, log in pairs:
            names[log.number] = service.name.removeprefix(ENVIRONMENT)
        names.pop(None, None)
        return names

    def explain(self, reason: str) -> str:
        """Returns why no batch comes: `reason`, with what the environments' logs say of groups that
        were not delivered."""
        with_reasons = []
        without_reasons = []
        for service, log in self._read_logs():
            undelivered = log.undelivered()
            if undelivered:
                with_reasons.append(
                    f"{service.name}: {'; '.join(undelivered)}. It {self._state_of(service)}"
                )
            else:
                without_reasons.append(f"{service.name} {self._state_of(service)}")
        return " ".join([*with_reasons, reason, *without_reasons])

    def _read_logs(self) -> list[tuple[Service, EnvironmentLog]]:
        """Returns each environment that runs, with its log read to its end."""
        pairs = []
        for service in self._services.running():
            if service.name.startswith(ENVIRONMENT):
                if service.name not in self._logs:
                    log = EnvironmentLog(service.log_path, service.log_start)
                    self._logs[service.name] = log
                pairs.append((service, self._logs[service.name].read()))
        return pairs

    def _state_of(self, service: Service) -> str:
        """Returns what an environment does, such as `has been running for 31 s, and its code is in
        score, environment.py:76. Its log: FILE.`"""
        state = f"has been running for {time.monotonic() - service.started:.0f} s"
        if service.down:
            state = "has ended and is about to be started again"
        if service.restarts:
            state += f" (restarted {service.restarts} times)"
        place = where_is(service, self._services.stacks_dir)
        if place:
            state += f", and its code is {place}"
        return f"{state}. Its log: {service.log_path}."

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_EVERY):
            for service, log in self._read_logs():
                self._tell_of_failing_agents(service, log)
                if not log.failures:
                    continue
                where = f"the traceback is in its log, {service.log_path}"
                if log.failures >= HOPELESS and log.never_succeeded:
                    what = f"{service.name} failed on each of its first {log.failures} groups"
                    fix = f"The last error was {log.error}. Correct the environment: {where}."
                    self._on_failure(RolloutError(what, fix=fix))
                    return
                if (service.name, log.place) not in self._warned_of:
                    self._warned_of.add((service.name, log.place))
                    logger.warning("%s failed on a group: %s; %s.", service.name, log.error, where)

    def _tell_of_failing_agents(self, service: Service, log: EnvironmentLog) -> None:
        """Warns once of an environment whose agents all fail. With `score_0`, they are trained all
        the same."""
        case = (service.name, ALL_FAILED)
        if log.all_failed and case not in self._warned_of:
            self._warned_of.add(case)
            logger.warning("%s: %s Its log: %s.", service.name, log.all_failed, service.log_path)


def _start_of(pair: tuple[Service, EnvironmentLog]) -> float:
    service, _log = pair
    return service.started


class Disconnector:
    """
    Makes the API at `url` forget environments that ended.

    The API never forgets by itself: an environment that ended keeps its share of the weights, and
    with a `min_batch_allocation` it stops all batches. It is forgotten once its successor has
    registered, because the API divides by zero without any connected environment.
    """

    def __init__(self, services: Services, url: str):
        self._services = services
        self._client = AtroposClient(
            url, request_timeout=REQUEST_TIMEOUT, batch_timeout=REQUEST_TIMEOUT
        )
        self._api_ends = 0

    def ended(self, service: Service) -> None:
        """Handles a service that has ended and will be started again. Called by `Services.watch`,
        before that."""
        if service.name == ATROPOS:
            self._api_ends += 1  # the new API numbers from 0
        if not service.name.startswith(ENVIRONMENT):
            return
        try:
            count = len(self._client.environments())
        except (ApiUnreachable, ReplyLost):
            return  # an API that comes back knows no environment
        numbers = self._numbers_of(service, count)
        if numbers is None:
            logger.warning(
                "The Atropos API still counts on the environment that ended (%s), and its number "
                "there is not known. If it has a `min_batch_allocation`, no batch comes before the "
                "API is told to forget it: %s.",
                service.name,
                disconnect_command(self._client.url, [0, 1]),
            )
        elif numbers:
            threading.Thread(
                target=self._forget,
                args=(service.name, numbers, count, self._api_ends),
                name="disconnect",
                daemon=True,
            ).start()

    def _numbers_of(self, service: Service, count: int) -> list[int] | None:
        """Returns the numbers that the ended environment may have at the API, which has registered
        `count`. Returns `None` if that is not known."""
        running = self._services.running()
        apis = [other for other in running if other.name == ATROPOS]
        if not apis:
            return None  # it may have been restarted, and the numbers be those of others
        if apis[0].down or apis[0].started > service.started:
            return []  # it never heard of the environment that ended
        number = EnvironmentLog(service.log_path, service.log_start).read().former_number
        if number is not None and number < count:
            return [number]
        environments = [other.name for other in running if other.name.startswith(ENVIRONMENT)]
        if environments == [service.name] and count <= service.restarts + 1:
            return list(range(count))  # all are former lives of this one
        return None

    def _forget(self, name: str, numbers: list[int], successor: int, api_ends: int) -> None:
        """Disconnects `numbers` when the next environment has registered, as number `successor`. If
        none does, the run ends anyway."""
        while api_ends == self._api_ends:
            with contextlib.suppress(ApiUnreachable, ReplyLost):
                if self._client.environment(successor) is not None:
                    for number in numbers:
                        self._client.disconnect(number)
                    logger.info(
                        "The Atropos API no longer counts on %s as it was before it ended.", name
                    )
                    return
            time.sleep(LOOK_EVERY)
