"""A server or a trainer that dies or hangs in the middle of a publish: who notices, when, and what
is sampled.

Everything is real: the processes get SIGKILL and SIGSTOP. All 184 combinations of mode, point and
way take more than an hour and run with TRL_ATROPOS_FULL=1; otherwise those in `COVERING` run.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.server_process import Server, running_server
from tests.tiers import FULL
from tests.weights import faults
from tests.weights.faults import (
    FIRST_VERSION,
    Processes,
    Samplers,
    errors,
    fresh_samples,
    settle,
    trainer_at,
)
from tests.weights.live import MODES, snapshot
from tests.weights.watched import Sampled
from trl_atropos.errors import ServerError

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux",
        reason="sends signals to processes that it finds as Linux shows them",
    ),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="written for servers of two processes, on the CPU"
    ),
]

TIMEOUT = 5.0  # seconds: `publish_timeout` when the fault comes
MARGIN = 15.0  # seconds on top of it until the trainer has its error, on a slow machine
TOLERANCE = 1e-4  # nats
LEAVES_WITHIN = 30.0  # seconds

# The calls of a publish in their order, and what an error in each says.
CALLS = {
    "colocate": ["/pause", "/resume", "/info", "/generate"],
    "server over gloo": ["/pause", "/weights/again", "/resume", "/info", "/generate"],
    "server over memory": ["/pause", "/resume", "/info", "/generate"],
    "nccl_lora": ["/pause", "/adapter/load", "/resume", "/info", "/generate"],
    "lora": [
        "/pause",
        "/v1/unload_lora_adapter",
        "/v1/load_lora_adapter",
        "/resume",
        "/info",
        "/generate",
    ],
}
SAYS = {
    "/pause": "while pausing the server",
    "/weights/again": "while loading weights into the server|transfer of weights to the server at "
    ".* broke off",
    "/adapter/load": "while loading the adapter|transfer of weights to the server at .* broke off",
    "/v1/unload_lora_adapter": "while loading the adapter in",
    "/v1/load_lora_adapter": "while loading the adapter in",
    "/resume": "while resuming the server",
    "/info": "while asking the server what it is",
    "/generate": "while asking what is cached",
}
BESIDE = "while comparing the .* bit for bit"  # at the same time as the last two
REPEATED = {("lora", "/info")}  # calls that a publish makes several of
WITHOUT_ENGINE = ("/info", "/v1/unload_lora_adapter")  # answered even if that is dead
# From which call on the weights are no longer surely those of the version that the server names,
# until it resumes.
TORN_FROM = {
    "colocate": "/pause",
    "server over memory": "/pause",
    "server over gloo": "/weights/again",
}
WAYS = ["kill api", "kill engine", "freeze both", "freeze engine"]
# Those that the server survives come first and share one, those that change the base model last.
COVERING = [
    ("server over gloo", "in /pause", "freeze both"),
    ("nccl_lora", "in /pause", "freeze engine"),
    ("nccl_lora", "after /adapter/load", "freeze both"),
    ("nccl_lora", "in /generate", "freeze both"),
    ("lora", "after /v1/unload_lora_adapter", "freeze both"),
    ("lora", "in /v1/load_lora_adapter", "freeze engine"),
    ("lora", "in /resume", "freeze both"),
    ("nccl_lora", "in /adapter/load", "kill api"),
    ("server over gloo", "after /weights/again", "kill engine"),
    ("server over memory", "in /resume", "freeze engine"),
    ("colocate", "step", "kill api"),
]
POINTS = {
    mode: [f"{when} {call}" for call in calls for when in ("in", "after")]
    for mode, calls in CALLS.items()
}
POINTS = {mode: points[:-1] + ["step"] * (mode == "colocate") for mode, points in POINTS.items()}
PRODUCT = [
    (mode, point, way) for mode, points in POINTS.items() for point in points for way in WAYS
]
CASES = COVERING + ([case for case in PRODUCT if case not in COVERING] if FULL else [])


class Keeper:
    """One server at a time, for as long as it can be used."""

    def __init__(self, model: str, folders: pytest.TempPathFactory):
        self.model = model
        self.folders = folders
        self._stack = ExitStack()
        self._server: Server | None = None
        self._had_adapter = False

    def take(self, mode: str) -> Server:
        """A server with the weights of the checkpoint, and for a mode of full weights without an
        adapter."""
        if self._server is None or (self._had_adapter and not MODES[mode].lora):
            self.drop()
            folder = self.folders.mktemp("faults")
            # Also for modes of full weights: it is `server` and what adapters need.
            self._server = self._stack.enter_context(
                running_server(self.model, folder, "--vllm_mode", "lora")
            )
            self._had_adapter = False
        self._had_adapter |= MODES[mode].lora
        return self._server

    def drop(self) -> None:
        self._stack.close()
        self._server = None


@pytest.fixture(scope="module")
def keeper(server_model, tmp_path_factory) -> Iterator[Keeper]:
    keeper = Keeper(server_model, tmp_path_factory)
    yield keeper
    keeper.drop()


@pytest.fixture(scope="module")
def score_with(server_model) -> dict[bool, torch.nn.Module]:
    """Models to score with in this process, by whether they have an adapter."""
    plain, base = (
        AutoModelForCausalLM.from_pretrained(server_model, dtype=torch.float32) for _ in range(2)
    )
    lora = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    return {False: plain.eval(), True: lora.eval()}


def versions_of(samples: list[Sampled]) -> set[tuple[int, int]]:
    """That samples have begun and ended with, of those that say so."""
    return {(one.begun, one.ended) for one in samples if one.begun != faults.UNKNOWN}


def assert_only_ends_of_service(failures: list[str]) -> None:
    """The connection broke, the server answered 503 with our reason, or vLLM's own route 500 with
    its own."""
    broken = "ConnectionError|ChunkedEncodingError"
    refused = "HTTP 503|This server is shutting down|the engine ended the request with 'abort'"
    died = "HTTP 500: .*EngineCore encountered"
    assert [one for one in failures if not re.search(f"{broken}|{refused}|{died}", one)] == []


# ------------------------------------------------------------------------------------ server faults


@pytest.mark.parametrize(("mode", "point", "way"), CASES)
def test_server_fault_raises_soon_without_torn_samples(
    keeper: Keeper, recording, tmp_path, mode, point, way
):
    server = keeper.take(mode)
    processes = Processes.of(server)
    trainer = faults.make_trainer(server, mode, recording, tmp_path)
    publisher = trainer.policy_publisher
    old = faults.publish_first(trainer)
    began, ended, version = [], None, None

    def fault() -> None:
        began.append(time.monotonic())
        processes.do(way, during=point.startswith("in "))

    try:
        with Samplers(server) as samplers:
            samplers.wait_for_samples()
            faults.limit(publisher, TIMEOUT)
            with pytest.raises(ServerError) as caught:
                faults.publish_next(trainer, point, fault)
            error_after = time.monotonic() - began[0]
            new = snapshot(trainer.model)
            closing = time.monotonic()
            publisher.close()
            closed_after = time.monotonic() - closing
            processes.thaw()
            ended = settle(server, LEAVES_WITHIN)
            after = fresh_samples(server) if ended == "lives" else []
        version = publisher.servers.clients[0].info().policy_version if ended == "lives" else None
        print(
            f"{mode} | {point} | {way} | {error_after:.1f} s | {ended} {version} | {caught.value}"
        )
        print(f"{len(samplers.samples)} samples, {len(samplers.failures)} failures")
        assert error_after <= TIMEOUT + MARGIN
        assert closed_after <= 10.0
        assert server.url in str(caught.value)
        assert re.search(expected_phases(mode, point), str(caught.value)), caught.value
        assert (ended, version) in expected_ends(mode, point, way)
        assert_only_ends_of_service(samplers.failures)
        assert samplers.failures == [] or ended == "leaves"
        assert errors(trainer.model, samplers.samples, old, new) <= TOLERANCE
        assert errors(trainer.model, after, old if version == FIRST_VERSION else new) <= TOLERANCE
        # Where the step writes to the server's own weights, it does not come before the server is
        # paused.
        stepped = not (publisher.transfer.steps_in_place and calls_hit(mode, point)[0] == "/pause")
        assert any(not torch.equal(new[name], old[name]) for name in new) == stepped
        if after:
            assert (
                not stepped
                or errors(trainer.model, after, new if version == FIRST_VERSION else old) > 0.01
            )
            assert versions_of(after) == {(version, version)}
    finally:
        publisher.close()
        processes.thaw()
        if ended != "lives" or not (MODES[mode].lora or version == FIRST_VERSION):
            keeper.drop()


def calls_hit(mode: str, point: str) -> list[str]:
    """The calls of a publish from the first one that a fault at `point` meets."""
    calls = CALLS[mode]
    when, _, call = ("after /pause" if point == "step" else point).partition(" ")
    later = when == "after" and (mode, call) not in REPEATED
    return calls[calls.index(call) + later :]


def expected_phases(mode: str, point: str) -> str:
    rest = calls_hit(mode, point)
    with_engine = next(i for i, call in enumerate(rest) if call not in WITHOUT_ENGINE)
    met = rest[: with_engine + 1]
    return "|".join(
        [*(SAYS[call] for call in met), *([BESIDE] if {"/info", "/generate"} & set(met) else [])]
    )


def expected_ends(mode: str, point: str, way: str) -> list[tuple[str, int | None]]:
    """What may become of the server: it is gone, or it serves the old version or the new one."""
    gone, old, new = ("leaves", None), ("lives", FIRST_VERSION), ("lives", FIRST_VERSION + 1)
    if way.startswith("kill"):
        return [gone]
    calls, hit = CALLS[mode], calls_hit(mode, point)[0]
    if calls.index(hit) > calls.index("/resume"):
        return [new]
    torn_from = TORN_FROM.get(mode)
    before = [gone] if torn_from and calls.index(hit) >= calls.index(torn_from) else [old]
    if hit == torn_from:
        # the thawed server may have seen the end of the lease first, and refused the call
        return [gone, old]
    return [*before, new] if hit == "/resume" else before  # or the call


# ----------------------------------------------------------------------------------- trainer faults

RESUMES = [
    ("server over gloo", "after /pause"),
    ("nccl_lora", "sending"),
    ("nccl_lora", "after /adapter/load"),
    ("lora", "after /v1/unload_lora_adapter"),
    ("lora", "after /v1/load_lora_adapter"),
]
LEAVES = [
    ("server over gloo", "sending on"),
    pytest.param("server over gloo", "after /weights/again", marks=pytest.mark.full),
    ("colocate", "step"),
]


@pytest.mark.parametrize(("mode", "point"), RESUMES)
def test_server_keeps_old_version_after_trainer_kill(
    keeper: Keeper, score_with, recording, tmp_path, mode, point
):
    server = keeper.take(mode)
    with (
        trainer_at(server, mode, point, recording, tmp_path / "run") as trainer,
        Samplers(server) as samplers,
    ):
        samplers.wait_for_samples()
        trainer.reach(point)
        trainer.kill()
        began = time.monotonic()
        assert settle(server, LEAVES_WITHIN) == "lives"
        resumed_after = time.monotonic() - began
        after = fresh_samples(server)
    print(
        f"{mode} | {point} | resumed after {resumed_after:.2f} s | {len(samplers.samples)} samples"
    )
    assert resumed_after <= 10.0
    assert samplers.failures == []
    assert versions_of(after) == {(FIRST_VERSION, FIRST_VERSION)}
    assert errors(score_with[MODES[mode].lora], after, trainer.old) <= TOLERANCE
    assert errors(score_with[MODES[mode].lora], samplers.samples, trainer.old) <= TOLERANCE


def test_trainer_frozen_in_pause_holds_requests(keeper: Keeper, recording, tmp_path):
    server = keeper.take("nccl_lora")
    with trainer_at(server, "nccl_lora", "after /pause", recording, tmp_path / "run") as trainer:
        trainer.reach("after /pause")
        os.kill(trainer.process.pid, signal.SIGSTOP)
        with Samplers(server) as samplers:
            time.sleep(3)
            held = samplers.samples + samplers.failures
            paused = server.control("GET", "/info").json()["paused"]
            os.kill(trainer.process.pid, signal.SIGCONT)
            ended = trainer.go_on()
        trainer.process.join(20)
    assert (held, paused, ended) == ([], True, "published")
    assert samplers.failures == []
    assert versions_of(samplers.samples) == {(FIRST_VERSION + 1, FIRST_VERSION + 1)}
    assert trainer.process.exitcode == 0


@pytest.mark.full
def test_hung_engine_and_killed_trainer_end_server(keeper: Keeper, recording, tmp_path):
    server = keeper.take("nccl_lora")
    processes = Processes.of(server)
    try:
        with trainer_at(
            server, "nccl_lora", "after /pause", recording, tmp_path / "run"
        ) as trainer:
            trainer.reach("after /pause")
            processes.engine.suspend()
            trainer.kill()
            assert settle(server, 45) == "leaves"
    finally:
        processes.thaw()
        keeper.drop()


@pytest.mark.parametrize("mode", ["server over gloo", "nccl_lora"])
def test_server_hanging_in_transfer_ends_trainer(keeper: Keeper, recording, tmp_path, mode):
    server = keeper.take(mode)
    with trainer_at(server, mode, "sending", recording, tmp_path / "run", TIMEOUT) as trainer:
        trainer.reach("sending")
        processes = Processes.of(server)
        processes.do("freeze both", during=False)
        began = time.monotonic()
        try:
            said = trainer.go_on()
            trainer.process.join(TIMEOUT + MARGIN)
            ended_after = time.monotonic() - began
        finally:
            processes.thaw()
            settle(server, LEAVES_WITHIN)
            if mode == "server over gloo":
                keeper.drop()
    assert server.url in said
    assert re.search(SAYS["/weights/again"] + "|" + SAYS["/adapter/load"], said)
    assert trainer.process.exitcode == 0
    assert ended_after <= TIMEOUT + MARGIN


@pytest.mark.parametrize(("mode", "point"), LEAVES)
def test_server_with_torn_weights_refuses_and_exits(
    keeper: Keeper, score_with, recording, tmp_path, mode, point
):
    server = keeper.take(mode)
    try:
        with (
            trainer_at(server, mode, point, recording, tmp_path / "run") as trainer,
            Samplers(server) as samplers,
        ):
            samplers.wait_for_samples()
            trainer.reach(point)
            with Samplers(server) as held:
                time.sleep(0.5)
                trainer.kill()
                began = time.monotonic()
                ended = settle(server, LEAVES_WITHIN)
            print(
                f"{mode} | {point} | {ended} after {time.monotonic() - began:.1f} s | "
                f"{held.failures[:1]}"
            )
    finally:
        keeper.drop()
    assert ended == "leaves"
    assert errors(score_with[MODES[mode].lora], samplers.samples, trainer.old) <= TOLERANCE
    assert held.samples == []
    assert_only_ends_of_service(samplers.failures + held.failures)
    told = "the weights may be half written. This server is shutting down: start it"
    first_failures = {}
    for failure in held.failures:
        first_failures.setdefault(failure.partition(": ")[0], failure)
    assert sorted(first_failures) == ["complete", "sample"]
    assert all(told in failure for failure in first_failures.values())
