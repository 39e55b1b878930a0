"""Faults between the Atropos API and the trained row, in runs that go on after each: nothing is
lost, nothing twice.

A run has the real API, producers that post groups of known row ids, a proxy that mistreats
requests, and a consumer: a process with an `AtroposSource` that "trains" rows by noting their ids,
and writes checkpoints as a trainer does. The consumer is killed, at a stage of its life or at any
moment, and begins again from its last checkpoint; `Audit` then demands that the books balance, to
the row. `python -m tests.rollouts.run_source_faults` runs many of them.
"""

import asyncio
import http.client
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import trl.trainer.utils  # noqa: F401 - a source imports it with its first batch
import uvicorn
from atroposlib.api.server import app

from tests.server_process import free_port
from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.source import AtroposSource, RunInfo
from trl_atropos.rollouts.spool import FileHeader, read_header

BATCH = 8  # rows
GROUP = 2
MAX_LENGTH = 16  # tokens
SAVE_EVERY = 3  # steps
KEPT = 2  # checkpoints
QUEUE = 12  # groups that producers leave waiting in the API
PATIENCE = 30.0  # seconds for anything that takes milliseconds
# in which a row's id is written, so that it fits into the vocabulary of a tiny model
DIGITS, BASE = 4, 200
DRAIN = 10.0  # seconds for a few batches

# everything heavy is imported once for all processes
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([__name__])

STAGES = (
    "registered",  # the API has a registration of which the spool has no row
    "popped",  # the reply has arrived and nothing else has been done
    "pulled",  # its place is known, and it is not in the spool
    "drafted",  # it is in a file that has not got its name
    "named",  # and the name may not be on disk
    "spooled",
    "handed out",  # not trained
    "trained",  # not saved
    "saving",
    "saved",
)
PROXY = (
    "drop request",
    "cut reply",
    "delay reply",
    "duplicate request",
    "duplicate reply",
    "refuse connection",
)
OTHERS = (
    "kill at any time",
    "kill the API",
    "kill the API and the consumer",
    "kill a producer",
    "NaN in a batch",
    "disk full",
    "read-only folder",
    "clock jumps",
    "close",
)
KINDS = (
    *(f"kill when {stage}" for stage in STAGES),
    *(f"power cut when {stage}" for stage in STAGES),
    *PROXY,
    *OTHERS,
)


# ------------------------------------------------------------------------------------------ the API


def serve(port: int) -> None:
    logging.disable()
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="critical")


@dataclass
class Dead:
    """What an API held when it was killed."""

    registration: str | None
    produced: int  # rows, from its registration on
    step: int


class Api:
    """The real one, in a process of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    def start(self) -> None:
        self.process = context.Process(target=serve, args=(self.port,), daemon=True)
        self.process.start()
        wait_for(self._answers, "the API answers")

    def _answers(self) -> bool:
        try:
            return request(self.port, "GET", "/status") is not None
        except OSError:
            return False

    def register_another_run(self, name: str) -> None:
        """As a run did that is over: the API takes no other registration from here on."""
        body = {
            "wandb_group": name,
            "wandb_project": "p",
            "batch_size": BATCH,
            "max_token_len": MAX_LENGTH + 1,
        }
        body |= {
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": 5,
            "num_steps": 10**6,
        }
        request(self.port, "POST", "/register", json.dumps(body))

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)

    def held(self) -> Dead:
        """Of rows that were delivered to it, how many: whoever pulls moves them, and does not
        change the number."""
        status = request(self.port, "GET", "/status")
        name = request(self.port, "GET", "/wandb_info")["group"]
        return Dead(name, GROUP * status["queue_size"], status["current_step"])


def request(port: int, method: str, path: str, body: str | None = None) -> Any:
    """JSON of a reply. Raises `OSError` if none comes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        reply = connection.getresponse()
        content = reply.read()
        if reply.status != 200:
            raise OSError(f"{path} answered {reply.status}")
        return json.loads(content)
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()


# ---------------------------------------------------------------------------------------- producers


def tokens_of(row_id: int) -> list[int]:
    return [row_id // BASE**place % BASE for place in range(DIGITS)]


def row_id(completion: Sequence[int]) -> int:
    return sum(int(digit) * BASE**place for place, digit in enumerate(completion[-DIGITS:]))


def make_group(first: int, rng: random.Random) -> dict[str, Any]:
    """A group whose rows' completions are their ids. Some are malformed, too long, or have nothing
    to train on."""
    ids = range(first, first + GROUP)
    tokens = [[7, *tokens_of(number)] for number in ids]
    masks = [[-100, *tokens_of(number)] for number in ids]
    kind = rng.random()
    if kind < 0.04:
        masks[0] = [-100]
    elif kind < 0.08:
        tokens[1] = [7] * MAX_LENGTH + tokens[1]
        masks[1] = [-100] * MAX_LENGTH + masks[1]
    elif kind < 0.12:
        masks[1] = [-100] * len(tokens[1])
    return {"tokens": tokens, "masks": masks, "scores": [float(number % 3) for number in ids]}


def produce(port: int, log: str, first: int, seed: int) -> None:
    """Posts groups until it is killed. Notes each before it is sent, and again when it was
    accepted."""
    rng = random.Random(seed)
    notes = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while True:
        try:
            # environments deliver to no other API
            registered = request(port, "GET", "/info")["batch_size"] > 0
            if not registered or request(port, "GET", "/status")["queue_size"] > QUEUE:
                time.sleep(0.01)
                continue
            os.write(notes, f"sent {first}\n".encode())
            request(port, "POST", "/scored_data", json.dumps(make_group(first, rng)))
            os.write(notes, f"accepted {first}\n".encode())
        except OSError:
            time.sleep(0.02)
        first += GROUP


# -------------------------------------------------------------------------------------------- proxy


class Proxy:
    """Passes requests on, and mistreats the next `GET /batch` that is about a batch, as `plan`
    says."""

    def __init__(self, api_port: int, rng: random.Random) -> None:
        self.port = free_port()
        self.plan: str | None = None
        self._api_port = api_port
        self._rng = rng
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(PATIENCE)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_server(self._handle, "127.0.0.1", self.port))
        started.set()
        self._loop.run_forever()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._pass_on(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            return  # one of the two was killed
        finally:
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.plan == "refuse connection":
            self.plan = None
            return
        asked = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (
                int(line[15:])
                for line in asked.split(b"\r\n")
                if line.lower()[:15] == b"content-length:"
            ),
            0,
        )
        asked += await reader.readexactly(length)
        is_pull = asked.startswith(b"GET /batch")
        if is_pull and self.plan == "drop request":
            self.plan = None
            return
        answer = await self._ask(asked)
        if is_pull and self.plan is not None and b'"tokens"' in answer:
            plan, self.plan = self.plan, None
            if plan == "duplicate request":
                await self._ask(asked)
            elif plan == "duplicate reply":
                answer += answer
            elif plan == "delay reply":
                await asyncio.sleep(0.2)
            elif plan == "cut reply":
                answer = answer[: self._rng.randrange(len(answer))]
        writer.write(answer)
        await writer.drain()

    async def _ask(self, asked: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._api_port)
        try:
            writer.write(asked)
            # to the end: the client asks for the connection to be closed
            return await reader.read()
        finally:
            writer.close()


# ----------------------------------------------------------------------------------------- consumer


@dataclass
class Orders:
    """What a consumer does besides consuming."""

    stage: str = ""  # at which it kills itself,
    skip: int = 0  # not at the first time, but after so many
    disk_full_after: int = -1  # steps
    read_only: bool = False
    clock_jumps: bool = False


def consume(pipe: Any, port: int, folder: str, orders: Orders) -> None:
    """Trains from the last checkpoint on. Sends every step's number; obeys "finish" and "close"."""
    logging.disable()
    run = Path(folder)
    note_syncs(run / "syncs.log")
    keep_replaced(run / "replaced")
    step, trained, state = load(run)
    if orders.read_only:
        os.seteuid(65534)  # root may write everywhere
    source = AtroposSource(
        f"http://127.0.0.1:{port}",
        poll_interval=0.005,
        request_timeout=5,
        start_timeout=10,
        api_down_timeout=20,
    )
    reach = stages(orders, source)
    try:
        source.start(
            RunInfo(
                batch_size=BATCH,
                max_sequence_length=MAX_LENGTH,
                temperature=1.0,
                starting_step=step,
                max_steps=10**6,
                output_dir=folder,
                save_steps=SAVE_EVERY,
                run_name="faults",
                state=state,
            )
        )
        watch(source, reach)
        begun, full = step, False
        while not pipe.poll():
            full |= orders.disk_full_after == step - begun
            if full:
                limit_file_size(1000)
            if orders.clock_jumps:
                jump()
            rows = source.poll(BATCH, 0.2)
            if rows is None:
                pipe.send("nothing")
                continue
            reach("handed out")
            trained += ids_of(rows)
            step += 1
            # a checkpoint could not be written either
            if step % SAVE_EVERY == 0 and not (full or orders.read_only):
                reach("trained")
                save(run, step, trained, source.state(), reach)
                reach("saved")
            pipe.send(step)
        if pipe.recv() == "finish":
            while (rows := source.poll(BATCH, 1.0)) is not None:
                trained += ids_of(rows)
                step += 1
            save(run, step, trained, source.state(), lambda stage: None)
    except RolloutError as error:
        pipe.send(str(error))
    closing = time.monotonic()
    source.close()
    pipe.send(f"closed in {time.monotonic() - closing:.2f} s")


def ids_of(rows: Sequence[Rollout]) -> list[int]:
    return [row_id(row.completion_ids) for row in rows]


def load(run: Path) -> tuple[int, list[int], dict | None]:
    """Step, trained ids and the source's state of the last whole checkpoint."""
    for path in sorted(
        run.glob("checkpoint-*"), key=lambda path: int(path.name[11:]), reverse=True
    ):
        try:
            saved = json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return (
            saved["step"],
            saved["trained"],
            saved["stateful_callbacks"]["RolloutState"]["attributes"]["source"],
        )
    resumed = {} if (run / "rollouts").exists() else None
    return 0, [], resumed


def save(
    run: Path, step: int, trained: list[int], state: dict, reach: Callable[[str], None]
) -> None:
    """A checkpoint as transformers writes it, the trainer's state last; the oldest go."""
    folder = run / f"checkpoint-{step}"
    folder.mkdir(exist_ok=True)
    sync(run)
    entry = {"args": {}, "attributes": {"source": state, "unfinished_rows": 0}}
    content = {"step": step, "trained": trained, "stateful_callbacks": {"RolloutState": entry}}
    with open(folder / "draft", "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    reach("saving")
    os.replace(folder / "draft", folder / "trainer_state.json")
    sync(folder)
    checkpoints = sorted(run.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    for old in checkpoints[:-KEPT]:
        shutil.rmtree(old)


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def stages(orders: Orders, source: AtroposSource) -> Callable[[str], None]:
    """A function to call at each stage, which kills this process at the one that was ordered."""
    left = [orders.skip]

    def reach(stage: str) -> None:
        if stage != orders.stage:
            return
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    after(source._client, "register", lambda reply: reach("registered"))
    after(source._client, "batch", lambda reply: reply.batch and reach("popped"))
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith("/rollouts"):
            reach("named")
        fsync(descriptor)
        if path.endswith(".arrow.tmp"):
            reach("drafted")

    os.fsync = watched
    return reach


def watch(source: AtroposSource, reach: Callable[[str], None]) -> None:
    after(source._feed.puller, "pull", lambda came: came and reach("pulled"))
    after(source._feed.spool, "append", lambda nothing: reach("spooled"))


def after(owner: Any, name: str, act: Callable[[Any], Any]) -> None:
    call = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        act(result)
        return result

    setattr(owner, name, wrapped)


def note_syncs(log: Path) -> None:
    """Notes what is surely on disk: the content of a file by its inode, the names in a folder by
    theirs."""
    notes = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            entry = [
                f"{path}/{name} {os.stat(f'{path}/{name}').st_ino}" for name in os.listdir(path)
            ]
        else:
            entry = [str(os.fstat(descriptor).st_ino)]
        with suppress(OSError):  # the disk is full, by order: nothing else is written from here on
            os.write(notes, "".join(f"{line}\n" for line in entry).encode())

    os.fsync = noted


def keep_replaced(folder: Path) -> None:
    """Keeps what files were before another was renamed onto them: until that is synced, it may be
    what is on disk."""
    folder.mkdir(exist_ok=True)
    replace = os.replace

    def kept(source: Any, target: Any) -> None:
        # there is none, it is kept already, or nothing may be written, by order
        with suppress(OSError):
            os.link(target, folder / f"{os.path.basename(target)}.{os.stat(target).st_ino}")
        replace(source, target)

    os.replace = kept


def limit_file_size(size: int) -> None:
    """From here on, the kernel refuses to write a file beyond `size` bytes (EFBIG)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def jump(real: Callable[[], float] = time.time) -> None:
    """Sets this process's wall clock to another year."""
    offset = random.uniform(-1e9, 1e9)
    time.time = lambda: real() + offset


class Consumer:
    """A consumer's process, from outside."""

    def __init__(self, work: Callable, port: int, folder: Path, orders: Orders) -> None:
        self.pipe, there = context.Pipe()
        self.process = context.Process(
            target=work, args=(there, port, str(folder), orders), daemon=True
        )
        self.process.start()
        there.close()

    def steps(self, number: int) -> bool:
        """Waits for some steps. Returns False if the process has ended before; raises what it told
        of."""
        deadline = time.monotonic() + PATIENCE
        while number:
            try:
                if not self.pipe.poll(deadline - time.monotonic()):
                    raise TimeoutError("the consumer does not train")
                told = self.pipe.recv()
            except (EOFError, ConnectionError):
                return False
            if isinstance(told, str) and told != "nothing":
                raise RolloutError(told)
            number -= isinstance(told, int)
            assert time.monotonic() < deadline, "the consumer does not train"
        return True

    def told(self, order: str | None = None) -> list[Any]:
        """What it still says, to its end."""
        if order is not None:
            self.pipe.send(order)
        said = []
        deadline = time.monotonic() + PATIENCE
        while self.pipe.poll(max(0, deadline - time.monotonic())):
            try:
                said.append(self.pipe.recv())
            except (EOFError, ConnectionError):
                self.process.join(PATIENCE)
                return said
        raise TimeoutError("the consumer does not end")

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"it does not come that {what}"
        time.sleep(0.005)


# ---------------------------------------------------------------------------------------- the audit


@dataclass
class Spooled:
    header: FileHeader
    ids: list[int]


def about(run: Path) -> dict[str, Any]:
    return json.loads((run / "rollouts" / "spool.meta").read_text())


def headers(run: Path) -> list[tuple[Path, FileHeader]]:
    """What the files of a spool say of themselves, oldest first; also while the consumer is
    running."""
    files = sorted(run.glob("rollouts/rows-*.arrow"))
    if not (run / "rollouts" / "spool.meta").exists():
        assert not files, f"{files} belong to no spool"
        return []  # the power was cut before anything was there
    name = about(run)["name"]
    return [(path, read_header(path, name)) for path in files]


def spooled(run: Path) -> list[Spooled]:
    """All files of a spool, read without the package's reader of rows."""
    found = []
    for path, header in headers(run):
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        ids = [row_id(completion) for completion in table.column("completion_ids").to_pylist()]
        assert table.column("index").to_pylist() == list(
            range(header.start + header.missing, header.end)
        ), path
        found.append(Spooled(header, ids))
    return found


@dataclass
class Audit:
    """What must hold whenever the consumer is not running. `load` reads its last whole
    checkpoint."""

    run: Path
    load: Callable[[Path], tuple[int, list[int], dict | None]]
    logs: list[Path] = field(default_factory=list)

    def check(self) -> None:
        files = spooled(self.run)
        step, trained, state = self.load(self.run)
        sent = {int(line.split()[1]) for log in self.logs for line in log.read_text().splitlines()}
        sent_rows = {first + i for first in sent for i in range(GROUP)}
        everything = [row for file in files for row in file.ids]
        assert len(everything) == len(set(everything)), "a row is in the spool twice"
        assert set(everything) <= sent_rows, "a row is in the spool that nobody sent"
        assert len(trained) == len(set(trained)), "a row was trained twice"
        if not state:
            return
        cursor, books = state["cursor"], state["books"]
        assert step * BATCH == len(trained) == books["trained"]
        before = [file for file in files if file.header.start < cursor]
        expected = [
            row
            for file in before
            for row in file.ids[: max(0, cursor - file.header.start - file.header.missing)]
        ]
        assert trained == expected, f"trained are other rows than those below the cursor {cursor}"
        end = 0
        for file in before:
            assert file.header.start == end, f"rows {end} to {file.header.start} are nowhere"
            end = file.header.end
        dropped: Counter[str] = Counter()
        for file in before:
            dropped.update(file.header.dropped)
        assert dropped == Counter(books["dropped"]), f"{books}, but the files say {dropped}"
        assert sum(file.header.lost_with_api for file in before) == books["lost_with_api"]
        assert len(trained) + dropped.total() + books["lost_with_api"] == cursor, (
            f"{books} do not add up to {cursor}"
        )

    def owed(self, api: Api) -> int:
        """Rows that the API has assembled and that are not in the spool, neither as rows nor as
        lost; -1 = not yet."""
        alive = api.held()
        if alive.registration is None:
            return -1
        first_step = about(self.run)["registrations"].get(alive.registration)
        if first_step is None:  # an earlier run's, where this one has not joined yet
            return -1
        assembled = BATCH * (alive.step - first_step)
        received = sum(
            header.size
            for _, header in headers(self.run)
            if header.delivery.registration == alive.registration
        )
        # A restarted API may have assembled a batch before this run noticed, and joined at the step
        # after it.
        return max(0, assembled - received)

    def close(self, dead: list[Dead]) -> None:
        """At the end, when all is drained."""
        self.check()
        files = spooled(self.run)
        first_steps = about(self.run)["registrations"]
        by_api: Counter[str] = Counter()
        for file in files:
            by_api[file.header.delivery.registration] += file.header.size
        for one in dead:
            if one.registration in first_steps:
                produced = one.produced + BATCH * (one.step - first_steps[one.registration])
                assert by_api[one.registration] <= produced, (
                    f"{by_api[one.registration]} rows from {produced}"
                )
        end = files[-1].header.end
        assert sum(by_api.values()) == end, (
            f"the files hold {sum(by_api.values())} rows up to index {end}"
        )
        cursor = self.load(self.run)[2]["cursor"]
        assert end - cursor < BATCH + sum(
            file.header.missing for file in files if file.header.start >= cursor
        ), f"{end - cursor} rows are left over"


def cut_power(run: Path) -> None:
    """What was not synced is gone: the content of files, and their names, which mean again what
    they meant before."""
    synced = set((run / "syncs.log").read_text().split("\n"))

    def is_sure(path: Path, inode: int) -> bool:
        return str(inode) in synced and f"{path} {inode}" in synced

    for path in [*run.glob("rollouts/*"), *run.glob("checkpoint-*/*")]:
        if is_sure(path, path.stat().st_ino):
            continue
        path.unlink()
        before = [
            file
            for file in run.glob(f"replaced/{path.name}.*")
            if is_sure(path, file.stat().st_ino)
        ]
        if before:
            max(before, key=lambda file: file.stat().st_ctime_ns).rename(path)


# --------------------------------------------------------------------------------------------- runs


class Run:
    """One run with everything around it, and its faults. A consumer does `work`, and `load` reads
    what it saved."""

    work = staticmethod(consume)
    load = staticmethod(load)

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        folder.mkdir(parents=True)
        self.api = Api()
        self._register_another_run()
        self.dead: list[Dead] = []
        self.proxy = Proxy(self.api.port, self.rng)
        self.audit = Audit(folder, self.load)
        self.producers: list[Any] = []
        self._first_id = 1000
        self.consumer: Consumer | None = None
        self.start_consumer()
        for _ in range(2):
            self.start_producer()

    def _register_another_run(self) -> None:
        """On every second API."""
        if self.rng.random() < 0.5:
            self.api.register_another_run(f"another-{self.rng.random()}")

    def start_producer(self) -> None:
        log = self.folder / f"producer-{self._first_id}.log"
        log.touch()
        arguments = (self.api.port, str(log), self._first_id, self._first_id)
        process = context.Process(target=produce, args=arguments, daemon=True)
        process.start()
        self.producers.append(process)
        self.audit.logs.append(log)
        self._first_id += 1_000_000

    def start_consumer(self, orders: Orders | None = None) -> Consumer:
        self.consumer = Consumer(self.work, self.proxy.port, self.folder, orders or Orders())
        return self.consumer

    def end_consumer(self) -> None:
        if self.consumer is not None:
            self.consumer.kill()
            self.consumer = None

    def inflict(self, kind: str) -> None:
        """One fault, and the audit after it."""
        name, _, stage = kind.partition(" when ")
        if stage:
            self._die_at(stage, power=name == "power cut")
        elif kind in PROXY:
            self._running()
            self.proxy.plan = kind
            wait_for(lambda: self.proxy.plan is None, f"a request meets {kind!r}")
            assert self.consumer.steps(3)
            self.end_consumer()
        else:
            getattr(self, "_" + kind.replace(" ", "_").replace("-", "_").lower())()
        self.audit.check()

    def _running(self) -> Consumer:
        if self.consumer is None:
            self.start_consumer()
        assert self.consumer.steps(self.rng.randrange(1, 4)), "the consumer has died"
        return self.consumer

    def _die_at(self, stage: str, power: bool) -> None:
        self.end_consumer()
        if stage == "registered" and self.rng.random() < 0.5:
            self._replace_api()
        skip = 0 if stage == "registered" else self.rng.randrange(4)
        consumer = self.start_consumer(Orders(stage, skip))
        assert not consumer.steps(10**6), f"the consumer is still alive after {stage!r}"
        self.end_consumer()
        if power:
            cut_power(self.folder)

    def _kill_at_any_time(self) -> None:
        self._running()
        time.sleep(self.rng.random() * 0.1)
        self.end_consumer()

    def _replace_api(self) -> None:
        for producer in self.producers:
            os.kill(producer.pid, signal.SIGSTOP)
        time.sleep(0.02)  # what they have sent arrives
        self.dead.append(self.api.held())
        self.api.kill()
        for producer in self.producers:
            os.kill(producer.pid, signal.SIGCONT)
        self.api.start()
        self._register_another_run()

    def _kill_the_api(self) -> None:
        self._running()
        self._replace_api()
        assert self.consumer.steps(3)
        self.end_consumer()

    def _kill_the_api_and_the_consumer(self) -> None:
        self._running()
        self.end_consumer()
        self._replace_api()

    def _kill_a_producer(self) -> None:
        self._running()
        self.producers.pop(0).kill()
        self.start_producer()
        assert self.consumer.steps(2)
        self.end_consumer()

    def _nan_in_a_batch(self) -> None:
        self._running()
        log = self.folder / f"nan-{self._first_id}.log"
        log.write_text(f"sent {self._first_id}\n")
        self.audit.logs.append(log)
        group = make_group(self._first_id, random.Random(0)) | {"scores": [0.0, float("nan")]}
        self._first_id += 1_000_000
        request(self.api.port, "POST", "/scored_data", json.dumps(group))
        assert self.consumer.steps(4)
        self.end_consumer()

    def _disk_full(self) -> None:
        self.end_consumer()
        self._expect_error(Orders(disk_full_after=self.rng.randrange(3)), "File too large")

    def _read_only_folder(self) -> None:
        self._running()
        self.end_consumer()
        for path in (self.folder.parent, self.folder, self.folder / "rollouts"):
            path.chmod(0o755)
        for path in self.folder.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        if os.geteuid():
            (self.folder / "rollouts").chmod(0o555)
        self._expect_error(Orders(read_only=os.geteuid() == 0), "Permission denied")
        (self.folder / "rollouts").chmod(0o755)

    def _expect_error(self, orders: Orders, reason: str) -> None:
        consumer = self.start_consumer(orders)
        try:
            consumer.steps(10**6)
            raise AssertionError("the consumer has died")
        except RolloutError as error:
            assert (
                reason in str(error)
                and str(self.folder) in str(error)
                and "Make room" in str(error)
            ), error
        consumer.told()
        self.consumer = None

    def _clock_jumps(self) -> None:
        self.end_consumer()
        assert self.start_consumer(Orders(clock_jumps=True)).steps(6)
        self.end_consumer()

    def _close(self) -> None:
        """In the middle of a pull, too."""
        self._running()
        if self.rng.random() < 0.5:
            self.proxy.plan = "delay reply"
        time.sleep(self.rng.random() * 0.05)
        last = self.consumer.told("close")[-1]
        assert float(last.split()[2]) < 1.5, last
        self.proxy.plan = None
        self.consumer = None

    def finish(self) -> None:
        """Drains everything, and closes the books."""
        for producer in self.producers:
            producer.kill()
            producer.join(PATIENCE)
        if self.consumer is None:
            self.start_consumer()
        deadline = time.monotonic() + DRAIN
        while (owed := self.audit.owed(self.api)) or self.api.held().produced >= BATCH:
            assert time.monotonic() < deadline, (
                f"{owed} rows that the API assembled are not in the books"
            )
            time.sleep(0.02)
        self.drain()
        self.audit.close(self.dead)

    def drain(self) -> None:
        """The consumer trains what there is, and saves."""
        self.consumer.told("finish")
        self.consumer = None

    def end(self) -> None:
        self.end_consumer()
        for producer in self.producers:
            producer.kill()
        self.proxy.stop()
        self.api.kill()


def run_faults(
    folder: Path,
    number: int,
    seed: int,
    per_run: int = 6,
    of: type[Run] = Run,
    kinds: Sequence[str] = KINDS,
) -> Counter[str]:
    """Inflicts `number` faults, all `kinds` about as often, in runs of `per_run`. Returns how many
    of each kind."""
    rng = random.Random(seed)
    drawn: list[str] = []
    while len(drawn) < number:
        drawn += rng.sample(kinds, len(kinds))
    drawn = drawn[:number]
    for index in range(0, number, per_run):
        run_seed = rng.randrange(2**31)
        run = of(folder / f"run-{index}", run_seed)
        chosen = drawn[index : index + per_run]
        done: list[str] = []
        try:
            for kind in chosen:
                done.append(kind)
                run.inflict(kind)
            done.append("the end")
            run.finish()
        except BaseException as error:
            error.add_note(
                f"run {index} of seed {seed}, after: {', '.join(done)}; its folder is {run.folder}"
            )
            raise
        finally:
            run.end()
        shutil.rmtree(run.folder)
    return Counter(drawn)
