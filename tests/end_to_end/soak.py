"""Half an hour of the whole loop with everything that goes wrong in days: `make soak`, or `python
-m tests.end_to_end.soak`.

Two environments, and while they feed the trainer: the Atropos API is killed once, environments
three times, the inference server once (which ends the run; it is resumed), the trainer once
(resumed too). At the end the reward must have risen, memory and disk must be flat, and the books
must balance to the row. Not a test, because of its length.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import aiohttp
import psutil
import yaml
from aiohttp import web

from tests.launching import RECIPE, Run, ask, free_urls, make_model
from trl_atropos.rollouts.selection import Accounting
from trl_atropos.rollouts.spool import Spool, source_state

ENVIRONMENTS = ("first", "second")
SPOOL_GB = 0.004  # so small that it must be trimmed
SETTLING = 25.0  # seconds that a run is left alone after something was killed
# When what is killed, as a share of the time.
PLAN = [
    (0.10, "environment-first"),
    (0.25, "atropos"),
    (0.40, "environment-second"),
    (0.50, "vllm"),
    (0.65, "trainer"),
    (0.80, "environment-first"),
]


class Tap:
    """Stands between the environments and the API, and counts the rows that the API has
    accepted."""

    def __init__(self, url: str, api: str):
        self.url, self.api = url, api
        self.accepted = [0]  # of each life of the API
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        assert self._ready.wait(10), "the tap does not start"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._ready.set()
        self._loop.run_forever()

    async def _serve(self) -> None:
        self._session = aiohttp.ClientSession()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(self.url.rpartition(":")[2])).start()

    async def _pass_on(self, request: web.Request) -> web.Response:
        body, headers = (
            await request.read(),
            {"content-type": request.headers.get("content-type", "")},
        )
        url, life = f"{self.api}{request.rel_url}", len(self.accepted) - 1
        try:
            async with self._session.request(
                request.method, url, data=body, headers=headers
            ) as reply:
                content = await reply.read()
                if reply.status == 200 and request.path in ("/scored_data", "/scored_data_list"):
                    groups = json.loads(body)
                    groups = groups if isinstance(groups, list) else [groups]
                    self.accepted[life] += sum(len(group["tokens"]) for group in groups)
                return web.Response(
                    status=reply.status, body=content, content_type=reply.content_type
                )
        except aiohttp.ClientError as error:
            return web.Response(status=502, text=str(error))


def write_recipe(path: Path, tap: str) -> str:
    """The quickstart with two environments behind the tap."""
    recipe = yaml.safe_load(Path(RECIPE).read_text(encoding="utf-8"))
    (script,) = recipe["environments"]
    recipe["environments"] = [
        {"path": script, "name": name, "config": {"rollout_server_url": tap, "seed": seed}}
        for seed, name in enumerate(ENVIRONMENTS)
    ]
    recipe |= {
        "learning_rate": 1.0e-4,
        "save_strategy": "steps",
        "save_steps": 50,
        "save_total_limit": 2,
        "max_spool_gb": SPOOL_GB,
        "logging_steps": 10,
    }
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return str(path)


def processes_of(run: Run, name: str) -> list[int]:
    return [run.trainer] if name == "trainer" else run.children(run.guard(name))


class Soak:
    def __init__(self, folder: Path, minutes: float):
        self.folder, self.seconds = folder, minutes * 60
        self.model = make_model(folder / "model")
        self.out = folder / "out"
        api, tap = free_urls(2)
        self.tap = Tap(tap, api)
        self.recipe = write_recipe(folder / "soak.yaml", tap)
        self.urls: tuple[str, str] | None = None
        self.sizes: list[tuple[float, float, float]] = []  # seconds, memory in MB, spool in MB
        self.resumed = 0
        self.began = time.monotonic()

    def start(self) -> Run:
        flags = ["--max_steps", "1000000"]
        if list(self.out.glob("checkpoint-*")):
            flags += ["--resume_from_checkpoint", "true"]
            self.resumed += 1
        run = Run(self.out, self.model, recipe=self.recipe, flags=tuple(flags))
        index = run.command.index("--atropos_url") + 1
        run.command[index] = run.atropos_url = self.tap.api
        return run

    @property
    def passed(self) -> float:
        return time.monotonic() - self.began

    def go(self) -> None:
        plan = [(share * self.seconds, name) for share, name in PLAN]
        while self.passed < self.seconds:
            with self.start() as run:
                run.until(lambda: run.info().get("policy_version", 0) >= 1, "training", 300)
                self.live(run, plan)
                if self.passed >= self.seconds:
                    self.end(run)

    def live(self, run: Run, plan: list[tuple[float, str]]) -> None:
        """Until the run ends, or the time is over."""
        quiet_until = time.monotonic() + SETTLING
        while self.passed < self.seconds and run.child.poll() is None:
            if time.monotonic() > quiet_until:
                self.measure(run)
                if plan and self.passed > plan[0][0]:
                    _, name = plan.pop(0)
                    self.kill(run, name)
                    quiet_until = time.monotonic() + SETTLING
            time.sleep(1)

    def kill(self, run: Run, name: str) -> None:
        say(f"{self.passed:5.0f} s: kill {name}")
        # its rows die with the API; a new run starts a new one
        if name in ("atropos", "vllm", "trainer"):
            self.tap.accepted.append(0)
        for pid in processes_of(run, name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if name in ("vllm", "trainer"):
            run.until(
                lambda: run.child.poll() is not None or None, f"the run ends when {name} does", 60
            )

    def measure(self, run: Run) -> None:
        memory = 0.0
        for pid in run.processes():
            with contextlib.suppress(psutil.Error):
                memory += psutil.Process(pid).memory_info().rss / 1e6
        spool = 0.0
        for path in (self.out / "rollouts").glob("*.arrow"):
            with contextlib.suppress(FileNotFoundError):  # it has just been trimmed
                spool += path.stat().st_size / 1e6
        self.sizes.append((self.passed, memory, spool))

    def end(self, run: Run) -> None:
        """Freeze the environments until the trainer has taken all that the API holds, then stop."""
        frozen = [pid for name in ENVIRONMENTS for pid in processes_of(run, f"environment-{name}")]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        before = -1
        while before != (now := run.info().get("policy_version", 0)):
            before = now
            time.sleep(5)
        self.left = (ask(f"{self.tap.api}/status") or {})["queue_size"] * 8
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        os.kill(run.launcher, signal.SIGTERM)
        run.until(lambda: run.child.poll() is not None or None, "the run stops", 60)

    # -------------------------------------------------------------------------------------- the end

    def checks(self) -> dict[str, bool]:
        state, history = self.last_state()
        books = Accounting(**state["books"])
        spool = Spool(self.out / "rollouts", 1e9)
        waiting = spool.end - state["cursor"]
        lost = sum(self.tap.accepted) - spool.end - self.left
        rewards = [entry["reward"] for entry in history if "reward" in entry]
        first, last = (sum(part) / len(part) for part in (rewards[:5], rewards[-5:]))
        settled = [size for size in self.sizes if size[0] > 0.15 * self.seconds]
        early, late = settled[: len(settled) // 4], settled[-len(settled) // 4 :]
        memory = [sum(size[1] for size in part) / len(part) for part in (early, late)]
        disk = max(size[2] for size in self.sizes)
        say(
            f"accepted by the API in its lives: {self.tap.accepted}; still in it at the end: "
            f"{self.left}"
        )
        say(f"numbered: {spool.end}; books: {books}; on disk, not in a checkpoint yet: {waiting}")
        say(f"in the API's queue when it was killed: {lost}")
        say(
            f"reward {first:.3f} -> {last:.3f}; memory {memory[0]:.0f} -> {memory[1]:.0f} MB; "
            f"spool <= {disk:.1f} MB"
        )
        return {
            "every event came": self.resumed == 2,
            "the books balance": books.produced == state["cursor"],
            "only a dead API lost rows": 0 <= lost <= 4 * 64 * (len(self.tap.accepted) - 1),
            "nothing else was dropped": set(books.dropped)
            <= {"lost_in_delivery", "resumed_mid_batch"},
            "the reward climbs": last > first + 0.2,
            "memory is flat": memory[1] <= 1.1 * memory[0],
            "disk is bounded": disk <= 1.5 * SPOOL_GB * 1e3,
        }

    def last_state(self) -> tuple[dict, list[dict]]:
        paths = sorted(
            self.out.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime
        )
        saved = json.loads(paths[-1].read_text(encoding="utf-8"))
        return source_state(saved["stateful_callbacks"])[0], saved["log_history"]


def say(message: str) -> None:
    print(f"[soak] {message}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    arguments = parser.parse_args()
    soak = Soak(arguments.folder.absolute(), arguments.minutes)
    soak.go()
    failed = [name for name, held in soak.checks().items() if not held]
    say(f"FAILED: {', '.join(failed)}" if failed else "all checks hold")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
