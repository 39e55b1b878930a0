"""`AtroposSource` over the lives of a run: what is handed out again, what never, how old it is,
what is dropped."""

import logging
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rollouts.conftest import DATA, Api, make_group
from trl_atropos.errors import RolloutError
from trl_atropos.rollouts import deliveries, diagnosis, pull
from trl_atropos.rollouts.replay import ReplaySource
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.session_metrics import SessionMetrics
from trl_atropos.rollouts.source import AtroposSource, RunInfo
from trl_atropos.rollouts.versions import VersionBook

WAIT = 30.0  # seconds, for what is already on its way
SHORT = 0.2  # seconds, where nothing may come


class Clock:
    """The trainer's version."""

    now = 0

    def __call__(self) -> int:
        return self.now


class Scores:
    """Says that a row was sampled by the version that its score is."""

    sessions = SessionMetrics([])

    def tag(self, rows: list[Rollout]) -> None:
        for row in rows:
            row.policy_version = row.newest_version = int(row.score) if row.score >= 0 else None

    def refusals(self) -> str:
        return ""


class Named:
    """Environments that the run started, of which it knows nothing but their names."""

    def __init__(self, names: dict[int, str]):
        self.names = lambda: names

    def start(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def explain(self, told: str) -> str:
        return told

    def close(self) -> None: ...


@pytest.fixture
def open_source(
    api: Api, run_info: Callable[..., RunInfo]
) -> Iterator[Callable[..., AtroposSource]]:
    """Starts sources in one output folder, each the next life of one run; `state` is that of its
    checkpoint."""
    opened: list[AtroposSource] = []

    def start(
        state: dict | None = None, run: dict[str, Any] | None = None, **arguments: Any
    ) -> AtroposSource:
        source = AtroposSource(api.url, **arguments)
        opened.append(source)
        source.start(run_info(state=state, **(run or {})))
        return source

    yield start
    for source in opened:
        source.close()


def groups(*scores: float) -> list[dict]:
    return [make_group(score, score) for score in scores]


def register_another_trainer(api: Api, batch_size: int = 4) -> None:
    body = {
        "wandb_group": "another",
        "wandb_project": "p",
        "batch_size": batch_size,
        "max_token_len": 65,
    }
    body |= {
        "checkpoint_dir": "",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 10,
    }
    api.post("/register", body)


def scores(source: AtroposSource, num_rows: int) -> list[float]:
    rows = source.poll(num_rows, WAIT)
    assert rows is not None, f"no {num_rows} rows within {WAIT} s"
    return [row.score for row in rows]


def books(source: AtroposSource) -> dict[str, Any]:
    return source.state()["books"]


def wait_for_rows(source: AtroposSource, number: int) -> None:
    deadline = time.monotonic() + WAIT
    while source.metrics()["rollouts/waiting_rows"] < number:
        assert time.monotonic() < deadline, f"{number} rows are not pulled ahead"
        time.sleep(0.01)


def test_resumed_run_goes_on_after_last_saved_row(api, open_source):
    source = open_source()
    api.deliver(*groups(1, 2, 3, 4))
    assert scores(source, 4) == [1, 1, 2, 2]
    checkpoint = source.state()
    # these are trained after the checkpoint, and forgotten
    assert scores(source, 4) == [3, 3, 4, 4]
    source.close()
    resumed = open_source(checkpoint)
    api.deliver(*groups(5, 6))
    assert scores(resumed, 8) == [3, 3, 4, 4, 5, 5, 6, 6]
    assert books(resumed) == {"trained": 12, "dropped": {}, "lost_with_api": 0}


def test_cursor_may_be_in_mid_batch(api, open_source):
    source = open_source()
    api.deliver(*groups(1, 2))
    assert scores(source, 3) == [1, 1, 2]
    assert scores(open_source(source.state()), 1) == [2]


def test_prefetched_unpolled_rows_survive_resume(api, open_source):
    source = open_source(prefetch_batches=2)
    api.deliver(*groups(1, 2, 3, 4, 5, 6))
    assert scores(source, 4) == [1, 1, 2, 2]
    wait_for_rows(source, 8)
    source.close()
    assert api.get("/status")["queue_size"] == 0
    assert scores(open_source(source.state()), 8) == [3, 3, 4, 4, 5, 5, 6, 6]


def test_groups_of_two_lives_stay_apart(api, open_source):
    source = open_source()
    api.deliver(*groups(1, 2))
    scores(source, 4)
    source.close()
    resumed = open_source({})
    api.deliver(*groups(3, 4))
    assert len({row.group for row in resumed.poll(8, WAIT)}) == 4


def test_run_without_checkpoint_resumes_at_first_row(api, open_source):
    source = open_source()
    api.deliver(*groups(1, 2))
    assert scores(source, 4) == [1, 1, 2, 2]
    source.close()
    assert scores(open_source({}), 4) == [1, 1, 2, 2]


def test_fresh_run_moves_old_rollouts_aside(api, open_source, run_info, caplog):
    source = open_source()
    api.deliver(*groups(1, 2))
    scores(source, 4)
    source.close()
    anew = open_source()
    api.deliver(*groups(3, 4))
    assert scores(anew, 4) == [3, 3, 4, 4]
    aside = Path(run_info().output_dir) / "rollouts-before-1"
    assert f"begins anew. They are now in {aside}" in caplog.text
    assert len(list(aside.glob("*.arrow"))) == 1


def test_parts_of_rewards_survive_resume_of_old_spool(api, open_source, run_info):
    """`data/spool` was written by a version that knew no parts."""
    shutil.copytree(DATA / "spool", Path(run_info().output_dir, "rollouts"))
    source = open_source({})
    assert [row.rewards for row in source.poll(2, WAIT)] == [None, None]
    parted = [
        group | {"overrides": [{"rewards": {"format": 1}}, {"rewards": {"x": True}}]}
        for group in groups(1, 2)
    ]
    api.deliver(*parted)
    state = source.state()
    parts = [{"format": 1.0}, {"x": 1.0}] * 2
    assert [row.rewards for row in source.poll(4, WAIT)] == parts
    source.close()
    resumed = open_source(state)
    assert [row.rewards for row in resumed.poll(4, WAIT)] == parts
    assert books(resumed)["trained"] == 6


def test_foreign_checkpoint_does_not_mix_rollouts(api, open_source, caplog):
    source = open_source()
    api.deliver(*groups(1, 2))
    scores(source, 4)
    source.close()
    resumed = open_source(source.state() | {"spool": "another"})
    api.deliver(*groups(3, 4))
    assert scores(resumed, 4) == [3, 3, 4, 4]
    assert "resumes from a checkpoint of another" in caplog.text


def test_unfinished_rows_at_checkpoint_are_dropped(api, open_source):
    source = open_source()
    api.deliver(*groups(1, 2))
    scores(source, 4)
    source.close()
    resumed = open_source(source.state(), {"unfinished_rows": 2})
    assert books(resumed) == {"trained": 2, "dropped": {"resumed_mid_batch": 2}, "lost_with_api": 0}


def test_run_dying_within_burst_gets_rest_in_order(api, open_source):
    source = open_source()
    api.deliver(*groups(1, 2, 3, 4, 5, 6))
    source._feed._pull()  # the newest batch of the burst,
    source._feed._pull()  # and how many there are
    assert [header.start for header in source._feed.spool.headers] == [8]
    resumed = open_source({})
    api.deliver(*groups(7, 8))
    assert scores(resumed, 16) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8]
    assert books(resumed) == {"trained": 16, "dropped": {}, "lost_with_api": 0}


@pytest.mark.parametrize("api_had_an_earlier_run", [False, True])
def test_batch_popped_between_lives_counts_as_lost(api_had_an_earlier_run, api, open_source):
    if api_had_an_earlier_run:
        register_another_trainer(api)
    open_source().close()
    api.deliver(*groups(1, 2, 3, 4))
    api.get("/batch")  # as by a trainer that was killed when the reply had come
    resumed = open_source({})
    api.deliver(*groups(5, 6))
    assert scores(resumed, 8) == [1, 1, 2, 2, 5, 5, 6, 6]
    assert books(resumed) == {"trained": 8, "dropped": {"lost_in_delivery": 4}, "lost_with_api": 0}


def test_foreign_burst_is_on_disk_before_next_pull(api, open_source):
    register_another_trainer(api)
    api.deliver(*groups(1, 2, 3, 4, 5, 6))
    api.get("/batch")  # the other trainer's, which died with it
    source = open_source()
    source._feed._pull()
    source._feed._pull()
    source.close()
    resumed = open_source({})
    api.deliver(*groups(7, 8))
    assert scores(resumed, 12) == [3, 3, 4, 4, 1, 1, 2, 2, 7, 7, 8, 8]
    assert books(resumed) == {"trained": 12, "dropped": {}, "lost_with_api": 0}


def test_reused_registration_name_is_another_api(api, open_source):
    register_another_trainer(api)
    source = open_source()
    api.deliver(*groups(1, 2))
    scores(source, 4)
    source.close()
    api.reset()
    register_another_trainer(api)
    resumed = open_source({})
    api.deliver(*groups(3, 4))
    assert scores(resumed, 8) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert books(resumed) == {"trained": 8, "dropped": {}, "lost_with_api": 0}


def test_batches_of_restarted_api_are_lost_with_it(api, open_source):
    source = open_source()
    api.deliver(*groups(1, 2, 3, 4))
    source._feed._pull()
    source._feed._pull()
    api.reset()
    resumed = open_source({})
    api.deliver(*groups(5, 6))
    assert scores(resumed, 8) == [3, 3, 4, 4, 5, 5, 6, 6]
    assert books(resumed) == {"trained": 8, "dropped": {}, "lost_with_api": 4}


@pytest.mark.parametrize("size", [2, 6, 20])
def test_batch_of_foreign_registration_ends_run(api, open_source, size):
    """The API is restarted between two pulls, and another trainer registers first."""
    source = open_source()
    api.deliver(*groups(*range(2, 10)))
    handed_out = scores(source, 4)
    checkpoint = source.state()
    handed_out += scores(source, 12)
    api.reset()
    register_another_trainer(api, batch_size=size)
    api.deliver(*groups(*range(10, 10 + size // 2)))
    with pytest.raises(
        RolloutError,
        match=rf"holds another registration, of another: batch_size {size} .*needs batch_size 4",
    ):
        source.poll(4, WAIT)
    source.close()
    assert books(source) == {"trained": 16, "dropped": {}, "lost_with_api": 0}
    api.reset()
    source = open_source(checkpoint)
    assert scores(source, 12) == handed_out[4:]
    api.deliver(*groups(50, 51))
    assert scores(source, 4) == [50, 50, 51, 51]  # no row of the other trainer's
    assert books(source) == {"trained": 20, "dropped": {}, "lost_with_api": 0}


def test_missing_file_is_counted_as_lost(api, open_source, run_info, caplog):
    source = open_source()
    for score in (1, 3):
        api.deliver(*groups(score, score + 1))
        scores(source, 4)
    source.close()
    next(Path(run_info().output_dir).glob("rollouts/rows-000000000000.arrow")).unlink()
    resumed = open_source({})
    assert scores(resumed, 4) == [3, 3, 4, 4]
    assert books(resumed)["dropped"] == {"lost_in_delivery": 4}
    assert "A file of 4 rollouts is missing" in caplog.text


@pytest.mark.parametrize("taken", [0, 2])
def test_damaged_file_loses_only_untrained_rows(api, open_source, run_info, caplog, taken):
    source, checkpoint = open_source(), {}
    api.deliver(*groups(1, 2))
    if taken:
        scores(source, taken)
        checkpoint = source.state()
    scores(source, 4 - taken)
    api.deliver(*groups(3, 4))
    scores(source, 4)
    source.close()
    path = next(Path(run_info().output_dir).glob("rollouts/rows-000000000000.arrow"))
    content = bytearray(path.read_bytes())
    content[content.index(np.float64(2).tobytes())] ^= 1  # one bit of a score
    path.write_bytes(content)
    resumed = open_source(checkpoint)
    assert scores(resumed, 4) == [3, 3, 4, 4]
    assert books(resumed) == {
        "trained": 4 + taken,
        "dropped": {"lost_in_delivery": 4 - taken},
        "lost_with_api": 0,
    }
    assert (
        f"{path} is not a whole file of rollouts (ValueError: its checksum is wrong" in caplog.text
    )
    assert f"Its {4 - taken} rollouts are lost." in caplog.text


def test_rollouts_of_missing_folder_count_as_lost(api, open_source, run_info, caplog):
    source = open_source(prefetch_batches=1)
    api.deliver(*groups(1, 2, 3, 4))
    scores(source, 4)
    wait_for_rows(source, 4)
    source.close()
    folder = Path(run_info().output_dir, "rollouts")
    shutil.rmtree(folder)
    resumed = open_source(source.state())
    assert resumed.state()["pulled"] == 8  # the new folder has none of them
    api.deliver(*groups(5, 6))
    assert scores(resumed, 4) == [5, 5, 6, 6]
    assert books(resumed) == {"trained": 8, "dropped": {"lost_in_delivery": 4}, "lost_with_api": 0}
    assert (
        f"are not in {folder}: 4 that had been pulled and not yet trained are lost" in caplog.text
    )


def test_groups_of_unknown_tokens_drop_then_end_run(api, open_source, caplog):
    source = open_source(None, {"vocab_size": 50})
    unknown = make_group(2, 2)
    unknown["tokens"][0][-1] = unknown["masks"][0][-1] = 50
    api.deliver(*groups(1), unknown, *groups(3, 4))
    assert scores(source, 4) == [1, 1, 3, 3]
    assert books(source) == {"trained": 4, "dropped": {"rejected": 2}, "lost_with_api": 0}
    assert "sent token id 50, and the model knows 50 ids (0 to 49)" in caplog.text
    api.deliver(*[unknown] * 8)
    with pytest.raises(
        RolloutError,
        match=r"Of the last \d+ groups of environment 0, \d cannot be .*tokenizer_name",
    ):
        source.poll(4, WAIT)


def test_intake_drops_are_in_books(api, open_source):
    source = open_source()
    malformed, long = make_group(1, 2, masks=[]), make_group(3, 4)
    long["tokens"][0] += [9] * 61
    long["masks"][0] += [9] * 61
    long["inference_logprobs"][0] += [-0.5] * 61
    api.deliver(malformed, long)
    assert scores(source, 1) == [4]
    assert books(source) == {
        "trained": 1,
        "dropped": {"rejected": 2, "too_long": 1},
        "lost_with_api": 0,
    }
    api.deliver(malformed, long)
    assert scores(source, 1) == [4]
    assert books(source) == {
        "trained": 2,
        "dropped": {"rejected": 4, "too_long": 2},
        "lost_with_api": 0,
    }


def test_stale_rows_are_dropped_unknown_ones_kept(api, open_source):
    clock = Clock()
    source = open_source(None, {"policy_version": clock}, versions=Scores(), max_staleness=2)
    source.poll(4, SHORT)
    clock.now = 10
    api.deliver(*groups(7, 8, 9, -1))
    assert scores(source, 6) == [8, 8, 9, 9, -1, -1]
    assert books(source) == {"trained": 6, "dropped": {"stale": 2}, "lost_with_api": 0}
    metrics = source.metrics()
    assert metrics["rollouts/dropped_stale"] == 2
    assert metrics["rollouts/staleness_mean"] == 1.5
    assert metrics["rollouts/staleness_max"] == 2
    assert metrics["rollouts/share_unknown_version"] == pytest.approx(1 / 3)
    assert metrics["rollouts/share_dropped"] == 0.25


def test_rows_grow_old_while_they_wait(api, open_source):
    clock = Clock()
    source = open_source(
        None, {"policy_version": clock}, versions=Scores(), max_staleness=1, prefetch_batches=1
    )
    api.deliver(*groups(0, 0, 0, 0))
    assert scores(source, 4) == [0] * 4
    wait_for_rows(source, 4)
    clock.now = 2
    api.deliver(*groups(2, 2))
    assert scores(source, 4) == [2] * 4
    assert books(source)["dropped"] == {"stale": 4}


@pytest.mark.parametrize(
    ("sampled_by", "age"),
    [(3, 3), (4, 2), (7, (7 - 4) + (6 - 4))],
    ids=["before the checkpoint", "by the checkpoint", "by a future that was abandoned"],
)
def test_staleness_counts_way_back_to_checkpoint(api, open_source, sampled_by, age):
    clock = Clock()
    clock.now = 8
    source = open_source(None, {"policy_version": clock}, versions=Scores(), prefetch_batches=2)
    checkpoint = source.state()
    api.deliver(*groups(sampled_by, sampled_by))
    scores(source, 4)  # in the first life, at version 8: the checkpoint was written at version 4
    source.close()
    clock.now = 4
    resumed = open_source(checkpoint, {"policy_version": clock}, versions=Scores())
    clock.now = 6
    scores(resumed, 4)
    assert resumed.metrics()["rollouts/staleness_max"] == age


def test_future_version_counts_as_abandoned(api, open_source):
    clock = Clock()
    source = open_source(None, {"policy_version": clock}, versions=Scores())
    source.close()
    clock.now = 4
    resumed = open_source(source.state(), {"policy_version": clock}, versions=Scores())
    api.deliver(*groups(7, 4))
    assert resumed.poll(4, WAIT) is not None
    assert resumed.metrics()["rollouts/staleness_max"] == 7 - 4


def test_zero_variance_groups_are_replaced(api, open_source):
    source = open_source(replace_zero_variance_groups=True)
    api.deliver(make_group(1, 1), make_group(1, 2), make_group(3, 3), make_group(3, 4))
    assert scores(source, 4) == [1, 2, 3, 4]
    assert books(source) == {"trained": 4, "dropped": {"zero_variance": 4}, "lost_with_api": 0}


def test_zero_variance_groups_with_own_signal_stay(api, open_source):
    source = open_source(replace_zero_variance_groups=True)
    api.deliver(
        make_group(1, 1, advantages=[[0.0, 0.0, 1.0, 1.0]] * 2),
        make_group(2, 2, group_overrides={"sft": True}),
    )
    assert scores(source, 4) == [1, 1, 2, 2]


@pytest.mark.parametrize(("distils", "kept"), [(False, [1, 2]), (True, [1, 1, 1, 2])])
def test_zero_variance_groups_with_unused_signal_go(api, open_source, distils, kept):
    """As `health/zero_variance` counts them."""
    source = open_source(None, {"distils": distils}, replace_zero_variance_groups=True)
    teacher = {
        "distill_token_ids": [[[], [8], [11], [9]]] * 2,
        "distill_logprobs": [[[], [-0.1], [-0.1], [-0.1]]] * 2,
    }
    advantages = {
        "advantages": [[0.0, 0.0, 1.0, 1.0]] * 2,
        "overrides": [{"set_advantage_to_zero": True}] * 2,
    }
    api.deliver(make_group(1, 1, **teacher), make_group(2, 2, **advantages))
    api.deliver(make_group(1, 2), make_group(3, 3))
    assert scores(source, len(kept)) == kept


def test_prefetch_pulls_no_more_than_asked(api, open_source):
    source = open_source(prefetch_batches=2)
    api.deliver(*groups(1, 2))
    scores(source, 4)
    for score in range(3, 13):
        api.deliver(*groups(score))
        time.sleep(0.02)
    wait_for_rows(source, 8)
    time.sleep(SHORT)
    assert source.metrics()["rollouts/waiting_rows"] == 8
    assert api.get("/status")["queue_size"] > 0


def test_source_without_prefetch_pulls_only_at_poll(api, open_source):
    source = open_source(prefetch_batches=0)
    api.deliver(*groups(1, 2))
    scores(source, 4)
    api.deliver(*groups(3, 4))
    time.sleep(SHORT)
    assert api.get("/status")["queue_size"] == 2
    assert scores(source, 4) == [3, 3, 4, 4]


def test_next_batch_is_pulled_when_wanted_soon(api, open_source):
    given: list[Callable[[], None]] = []
    source = open_source(None, {"when_wanted_soon": given.append}, prefetch_batches=0)
    api.deliver(*groups(1, 2))
    scores(source, 4)
    api.deliver(*groups(3, 4))
    (wanted_soon,) = given
    wanted_soon()
    wait_for_rows(source, 4)
    assert api.get("/status")["queue_size"] == 0


class Held(VersionBook):
    """In place of servers: notes what they are told of requests."""

    def __init__(self):
        super().__init__([], "", 0.0)
        self.told: list[tuple[bool, float]] = []

    def hold_requests(self, held: bool, let_in: float) -> None:
        self.told.append((held, let_in))


def test_waiting_requests_begin_one_batch_per_policy(api, open_source):
    """The API gives out two batches at once, and environments ask for two anew."""
    given, book = [], Held()
    source = open_source(
        None, {"when_wanted_soon": given.append}, hold_requests=True, versions=book
    )

    def told_when_the_policy_is_new() -> list[tuple[bool, float]]:
        book.told.clear()
        given[0]()
        deadline = time.monotonic() + WAIT
        while not book.told:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return book.told[:1]

    api.deliver(*groups(1, 2, 3, 4))
    assert scores(source, 4) == [1, 1, 2, 2]
    assert book.told[-1] == (True, 0.0)
    assert told_when_the_policy_is_new() == [(True, 0.5)]
    assert scores(source, 4) == [3, 3, 4, 4]
    assert told_when_the_policy_is_new() == [(True, 1.0)]
    assert api.get("/status")["queue_size"] == 0


def test_silence_counts_only_while_somebody_waits(api, open_source, monkeypatch, caplog):
    caplog.set_level("INFO", "trl_atropos")
    monkeypatch.setattr(diagnosis, "QUIET_WARNING", 1.0)
    monkeypatch.setattr(diagnosis, "WARNED_AGAIN", 0.5)
    source = open_source()
    api.deliver(*groups(1, 2))
    scores(source, 4)
    time.sleep(1.2)  # a long step
    assert source.poll(4, timeout=0.3) is None
    assert "No batch for" not in caplog.text
    assert source.poll(4, timeout=2.0) is None
    messages = [entry for entry in caplog.records if "No batch for" in entry.getMessage()]
    assert [entry.levelname for entry in messages[:2]] == ["INFO", "WARNING"]
    assert [entry.getMessage()[:15] for entry in messages[:2]] == [
        "No batch for 1 ",
        "No batch for 2 ",
    ]


def test_metrics_name_environments_and_queue_time(api, open_source):
    names = {0: "letters", 7: "letters"}  # it was started again
    source = open_source(environments=Named(names))
    api.deliver(make_group(1, 2, env_id=0), make_group(3, 4, env_id=5))
    source.poll(2, WAIT)
    time.sleep(SHORT)
    source.poll(2, WAIT)
    metrics = source.metrics()
    assert (metrics["rollouts/rows_env_letters"], metrics["rollouts/rows_env_5"]) == (2, 2)
    assert SHORT / 2 <= metrics["rollouts/queue_seconds"] < WAIT
    api.deliver(make_group(1, 2, env_id=7), make_group(3, 4, env_id=0))
    rows = source.poll(4, WAIT)
    assert [(row.env_id, row.environment) for row in rows[::2]] == [(7, "letters"), (0, "letters")]
    assert source.metrics()["rollouts/rows_env_letters"] == 4


def test_environment_without_rows_counts_as_zero(api, open_source):
    """The trainer averages what each step logs: the ratio of the means is that of the rows, 1 to
    5."""
    source = open_source(environments=Named({0: "letters", 1: "digits"}))
    logged: dict[str, list[float]] = {"letters": [], "digits": [], "2": []}
    for env_ids in ((0, 0), (0, 1), (0, 0), (2, 2)):
        api.deliver(*[make_group(1, 2, env_id=env_id) for env_id in env_ids])
        scores(source, 4)
        metrics = source.metrics()
        for name, counts in logged.items():
            counts += [metrics[key] for key in (f"rollouts/rows_env_{name}",) if key in metrics]
    assert logged == {"letters": [4, 2, 4, 0], "digits": [0, 2, 0, 0], "2": [4]}
    api.deliver(*groups(1, 2))  # of environment 0
    scores(source, 4)
    assert source.metrics()["rollouts/rows_env_2"] == 0


def test_pulling_of_queue_is_told_and_is_no_waiting(api, open_source, monkeypatch, caplog):
    monkeypatch.setattr(deliveries, "PROGRESS", 0.02)
    source = open_source()
    api.deliver(*groups(*range(400)))
    began = time.monotonic()
    with caplog.at_level(logging.INFO):
        assert len(scores(source, 800)) == 800
    took = time.monotonic() - began
    told = re.findall(
        r"Pulled (\d+) of 200 batches that were queued at the Atropos API", caplog.text
    )
    assert len(told) >= 2 and list(map(int, told)) == sorted(map(int, told))
    caught_up = source.catching_up()
    assert 0 < caught_up <= took
    assert source.poll(4, SHORT) is None
    api.deliver(*groups(1, 2))
    scores(source, 4)
    assert source.catching_up() == caught_up  # here nothing came: that is waiting


def test_messages_name_environment(api, open_source, caplog):
    source = open_source(environments=Named({0: "letters"}))
    api.deliver(make_group(1, 2, masks=[[-100, -100, 11], [-100]]), make_group(3, 4))
    assert scores(source, 2) == [3, 4]
    assert "masks[0] has 3 entries for 4 tokens (environment letters)" in caplog.text
    assert source.poll(4, SHORT) is None
    api.post(
        "/register-env",
        {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 2},
    )
    assert (
        "Environment letters has delivered 2 groups of 2, the last" in source._diagnosis.why_quiet()
    )


def test_foreign_environments_keep_registered_names(naming_api, run_info):
    source = AtroposSource(naming_api.url, environments=Named({1: "letters"}))
    source.start(run_info())
    assert source.poll(4, SHORT) is None  # lets environments in
    for name in ("letters", "letters", "sums", "sums"):  # the first is a former life of the second
        body = {"max_token_length": 64, "desired_name": name, "weight": 1.0, "group_size": 2}
        assert naming_api.post("/register-env", body)["status"] == "success"
    naming_api.deliver(make_group(1, 2, env_id=0), make_group(3, 4, env_id=3))
    assert [row.environment for row in source.poll(4, WAIT)[::2]] == ["letters", "sums-2"]
    told = source._diagnosis.why_quiet()
    source.close()
    assert (
        "environment sums has delivered nothing to this run; environment sums-2 has delivered 1 "
        "groups" in told
    )


@pytest.mark.parametrize(
    ("strays", "removed"), [((3, 3), "2 groups of 3"), ((3, 8, 3), "3 groups of 3, 8")]
)
def test_unfitting_strays_are_removed_from_api(
    naming_api, run_info, monkeypatch, caplog, strays, removed
):
    """They have no `env_id`, so that the API does not look at their size. The others are handed out
    in their order."""
    monkeypatch.setattr(pull, "STRAYS", 0.1)
    source = AtroposSource(naming_api.url)
    try:
        source.start(run_info())
        assert source.poll(4, SHORT) is None  # lets environments in
        body = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 2}
        env_id = naming_api.post("/register-env", body)["env_id"]
        naming_api.deliver(*[make_group(*range(size), env_id=None) for size in strays])
        naming_api.deliver(*[make_group(score, score, env_id=env_id) for score in (1, 2, 3, 4)])
        assert scores(source, 8) == [1, 1, 2, 2, 3, 3, 4, 4]
        assert books(source) == {"trained": 8, "dropped": {}, "lost_with_api": 0}
    finally:
        source.close()
    assert f"Removed {removed} rollouts from the queue" in caplog.text


def test_thread_error_is_raised_by_each_poll(api, open_source):
    source = open_source()
    api.deliver(*map(make_group, range(8)))
    for _ in range(2):
        with pytest.raises(RolloutError, match="group of 1 rollout"):
            source.poll(4, WAIT)


def test_hung_request_is_told_and_close_is_quick(run_info, caplog, monkeypatch):
    monkeypatch.setattr(pull, "QUIET_WARNING", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken, released = threading.Event(), threading.Event()
        answering = threading.Thread(
            target=_answer_until_batch, args=(server, taken, released), daemon=True
        )
        answering.start()
        source = AtroposSource(f"http://127.0.0.1:{server.getsockname()[1]}")
        source.start(run_info())
        deadline = time.monotonic() + WAIT
        while not taken.is_set():
            assert time.monotonic() < deadline, "nobody asked for a batch"
            assert source.poll(4, SHORT) is None
        while "accepted a request for a batch, and has not answered for" not in caplog.text:
            assert time.monotonic() < deadline, "nobody tells that the API hangs"
            assert source.poll(4, SHORT) is None
        before = time.monotonic()
        source.close()
        assert time.monotonic() - before < 10  # a reply may take 300
        assert not source._feed.thread.is_alive()
        released.set()
        answering.join(WAIT)


def _answer_until_batch(
    server: socket.socket, taken: threading.Event, released: threading.Event
) -> None:
    """A server that takes a `GET /batch` and holds it without an answer until it is released."""
    status = b'{"message": "AtroposLib API", "group": "g", "current_step": 0, "queue_size": 0, "batch_size": 4, '
    body = status + b'"max_token_len": 65, "uuid": 1, "project": "p"}'
    held = []
    while not held:
        connection, _ = server.accept()
        asked = connection.recv(65536)
        if asked.startswith(b"GET /batch"):
            held.append(connection)
            continue
        with connection:
            if b"content-length" in asked.lower() and asked.endswith(b"\r\n\r\n"):
                connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    taken.set()
    released.wait(10 * WAIT)


def test_oldest_rollouts_go_after_checkpoint(api, open_source, run_info):
    source = open_source(None, {"save_steps": 0}, max_spool_gb=20e-6, prefetch_batches=0)
    for score in range(1, 21):
        api.deliver(*groups(score, score))
        assert scores(source, 4) == [score] * 4
    files = sorted(Path(run_info().output_dir).glob("rollouts/*.arrow"))
    assert 1 <= len(files) <= 8
    assert sum(file.stat().st_size for file in files[1:]) <= 20e3
    assert files[-1].name == "rows-000000000076.arrow"


def test_rollouts_stay_until_in_checkpoint(api, open_source, run_info, caplog):
    source = open_source(max_spool_gb=1e-9, prefetch_batches=0)
    for score in (1, 2):
        api.deliver(*groups(score, score))
        scores(source, 4)
    assert len(list(Path(run_info().output_dir).glob("rollouts/*.arrow"))) == 2
    assert caplog.text.count("none can be removed before they are in a checkpoint") == 1


def test_rollouts_of_run_can_be_replayed(api, open_source, run_info):
    source = open_source()
    api.deliver(*groups(1, 2, 3, 4))
    scores(source, 8)
    replay = ReplaySource(Path(run_info().output_dir) / "rollouts")
    replay.start(run_info())
    assert scores(replay, 8) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert replay.state() == {}


def test_replayed_rows_must_fit_run(api, open_source, run_info, caplog):
    source = open_source()
    api.deliver(*groups(1, 2))
    scores(source, 4)
    folder = Path(run_info().output_dir) / "rollouts"
    replay = ReplaySource(folder)
    replay.start(run_info(vocab_size=11))
    with pytest.raises(RolloutError, match="token id 11, but the model knows ids below 11"):
        replay.poll(1, 0.0)
    replay = ReplaySource(folder)
    replay.start(run_info(max_sequence_length=3))
    with pytest.raises(RolloutError, match="has no rollout that can be trained on"):
        replay.poll(1, 0.0)
    assert "Left out 4 rollouts" in caplog.text
