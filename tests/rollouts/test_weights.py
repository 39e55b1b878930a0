"""Two real environments of weights 1 and 3: what a real Atropos API makes of them, and what the
source does."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rollouts.bare_trainer import BareTrainer
from tests.rollouts.conftest import Api, make_group
from trl_atropos.rollouts import selection
from trl_atropos.rollouts.api import AtroposClient
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.selection import Shares
from trl_atropos.rollouts.source import AtroposSource, RunInfo
from trl_atropos.rollouts.wire import read_group

ENVIRONMENT = str(Path(__file__).parent / "plain_environment.py")
BATCH = 16  # rows, 8 groups of 2
GROUPS = 1000


@contextmanager
def environments(
    client: AtroposClient, pull: Callable, model: Path, *flags: list[str]
) -> Iterator[None]:
    """One real environment after the other, so that their numbers are those of `flags`. `pull` lets
    them in."""
    processes = []
    try:
        for number, own in enumerate(flags):
            command = [sys.executable, ENVIRONMENT, client.url, str(model), *own]
            processes.append(
                subprocess.Popen(
                    command,
                    start_new_session=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
            deadline = time.monotonic() + 120
            while len(client.environments()) == number:
                assert processes[-1].poll() is None and time.monotonic() < deadline
                pull()
                time.sleep(0.2)
        yield
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def shares_of(trainer: BareTrainer, groups: int) -> tuple[float, float, int]:
    """Of environment 1: its share of what the API delivers, and of what is trained. And how many
    groups were dropped.

    Counted from the first batch that has both environments in it.
    """
    intake, shares = Intake(64, 1.0, "refuse"), Shares(trainer.client, slack=BATCH)
    delivered, trained = Counter(), Counter()
    while trained.total() < groups * 2:
        batch = trainer.pull_batch(60)
        if not delivered and len({group.env_id for group in batch}) == 1:
            continue
        rows = intake.admit(batch)
        shares.note({row.env_id for row in rows})
        delivered.update(row.env_id for row in rows)
        trained.update(row.env_id for row in rows if shares.admits(row))
    dropped = (delivered.total() - trained.total()) // 2
    return delivered[1] / delivered.total(), trained[1] / trained.total(), dropped


@pytest.mark.full  # the next test sees what is trained
@pytest.mark.slow
def test_trained_shares_follow_weights_unlike_api(restartable_api, tiny_model):
    trainer = BareTrainer(restartable_api.url, BATCH)
    with environments(
        trainer.client, trainer.pull, tiny_model, ["--weight", "1"], ["--weight", "3"]
    ):
        delivered, trained, dropped = shares_of(trainer, GROUPS)
    print(
        f"share of the environment of weight 3: delivered {delivered:.3f}, trained {trained:.3f}; "
        f"{dropped} dropped"
    )
    assert delivered < 0.65
    # so that both are within 5 % of their own share
    assert trained == pytest.approx(0.75, abs=0.05 * 0.25)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("slow", [0, 1])
def test_shares_hold_with_slower_environment(slow, restartable_api, tiny_model, tmp_path):
    client = AtroposClient(restartable_api.url, request_timeout=10, batch_timeout=60)
    source = AtroposSource(restartable_api.url, enforce_environment_weights=True)
    source.start(RunInfo(BATCH, 64, 1.0, 0, 10**6, str(tmp_path), 0, "weights"))
    flags = [["--weight", "1", "--minimum", "0.25"], ["--weight", "3", "--minimum", "0.75"]]
    flags[slow] += ["--seconds", "0.1"]
    trained: Counter[int] = Counter()
    with environments(client, lambda: source.poll(BATCH, 0.2), tiny_model, *flags):
        while trained.total() < GROUPS * 2:
            rows = source.poll(BATCH, 60)
            if trained or len({row.env_id for row in rows}) == 2:
                trained.update(row.env_id for row in rows)
    source.close()
    share, dropped = trained[1] / trained.total(), source.state()["books"]["dropped"]
    print(f"share of the environment of weight 3: {share:.3f}; dropped: {dropped}")
    assert share == pytest.approx(0.75, abs=0.05 * 0.25)
    assert set(dropped) == {"over_share"}


def rows_of(env_id: int, groups: int, intake: Intake, size: int = 2) -> list:
    return intake.admit(read_group(make_group(*range(size), env_id=env_id)) for _ in range(groups))


def register(api: Api, weight: float) -> None:
    api.post(
        "/register-env",
        {"max_token_length": 64, "desired_name": "e", "weight": weight, "group_size": 2},
    )


@pytest.fixture
def shares(api) -> Iterator[Shares]:
    trainer = BareTrainer(api.url, BATCH)
    trainer.pull()
    yield Shares(trainer.client, slack=4)
    trainer.close()


def test_single_environment_is_never_held_back(api, shares):
    register(api, 1)
    rows = rows_of(0, 100, Intake(64, 1.0, "refuse"))
    shares.note({0})
    assert all(shares.admits(row) for row in rows)


def test_group_rows_are_admitted_all_or_none(api, shares):
    register(api, 1), register(api, 3)
    intake = Intake(64, 1.0, "refuse")
    shares.note({0, 1})
    decided = {}
    for row in rows_of(0, 20, intake, size=4):
        decided.setdefault(row.group, set()).add(shares.admits(row))
    assert set(map(len, decided.values())) == {1}
    assert {True} in decided.values() and {False} in decided.values()


def test_environment_is_ahead_by_slack_at_most(api, shares):
    """Of two environments of equal weight, only one delivers: of every two rollouts, one is ahead
    of its share."""
    register(api, 1), register(api, 1)
    shares.note({0, 1})
    admitted = [row for row in rows_of(0, 20, Intake(64, 1.0, "refuse")) if shares.admits(row)]
    assert len(admitted) == 2 * shares.slack


def test_long_silent_environment_holds_nobody_back(api, shares, monkeypatch):
    monkeypatch.setattr(selection, "FORGET", 0.2)  # seconds
    register(api, 1), register(api, 1)
    intake = Intake(64, 1.0, "refuse")
    shares.note({0, 1})
    assert not all(shares.admits(row) for row in rows_of(0, 20, intake))
    time.sleep(0.3)
    shares.note({0})
    assert all(shares.admits(row) for row in rows_of(0, 20, intake))


def test_late_environment_does_not_stop_others(api, shares):
    register(api, 1), register(api, 1)
    intake = Intake(64, 1.0, "refuse")
    shares.note({0})
    assert all(shares.admits(row) for row in rows_of(0, 500, intake))
    shares.note({0, 1})
    rows = [row for _ in range(50) for env_id in (0, 1) for row in rows_of(env_id, 1, intake)]
    assert all(shares.admits(row) for row in rows)
    # from now on, it has a share
    assert not all(shares.admits(row) for row in rows_of(0, 20, intake))


def test_rows_of_unknown_environment_are_admitted(api, shares):
    shares.note({7})
    assert all(shares.admits(row) for row in rows_of(7, 20, Intake(64, 1.0, "refuse")))
