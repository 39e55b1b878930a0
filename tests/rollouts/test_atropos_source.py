import functools
import http.server
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.rollout_factory import record
from tests.rollouts.conftest import Api, admitted, assert_same_rows, free_port, make_group
from tests.rollouts.trees import group_of, item_of, random_episode
from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.pull import LOOK_AGAIN
from trl_atropos.rollouts.replay import ReplaySource
from trl_atropos.rollouts.source import AtroposSource, RunInfo
from trl_atropos.rollouts.versions import VersionBook

WAIT = 30.0  # seconds, for what is already on its way
SHORT = 0.2  # seconds, where nothing may come


@pytest.fixture
def open_source(run_info: Callable[..., RunInfo]) -> Iterator[Callable[..., AtroposSource]]:
    """Starts sources against an API and closes them."""
    opened: list[AtroposSource] = []

    def start(url: str, *, run: RunInfo | None = None, **arguments) -> AtroposSource:
        source = AtroposSource(url, **arguments)
        opened.append(source)
        source.start(run or run_info())
        return source

    yield start
    for source in opened:
        source.close()


def numbered_groups(*tags: int) -> list[dict]:
    """Groups of two whose scores tell when they were delivered."""
    return [make_group(tag, tag + 1) for tag in tags]


def scores(source: AtroposSource, num_rows: int) -> list[float]:
    rows = source.poll(num_rows, WAIT)
    assert rows is not None, f"no {num_rows} rows within {WAIT} s"
    return [row.score for row in rows]


def poll_until(source: AtroposSource, condition: Callable[[], bool], what: str) -> None:
    """Ask for rows, of which there are none, until the source has done something."""
    deadline = time.monotonic() + WAIT
    while True:
        assert source.poll(4, SHORT) is None
        if condition():
            return
        assert time.monotonic() < deadline, f"not within {WAIT} s: {what}"


def poll_until_registered(source: AtroposSource, api: Api) -> None:
    poll_until(source, lambda: api.get("/info")["batch_size"] == 4, "the source registers again")


def deliver_nan_batch(api: Api) -> None:
    for _ in range(2):
        api.deliver_text(json.dumps(make_group(0, 1, scores=[0.0, float("nan")])))


def test_registration_has_batch_size_and_max_length(api, open_source):
    open_source(api.url)
    assert api.get("/info") == {"batch_size": 4, "max_token_len": 65}


def test_environments_get_starting_step(api, open_source, run_info):
    open_source(api.url, run=run_info(starting_step=7))
    assert api.get("/status")["current_step"] == 7


def test_environments_get_run_facts_but_no_last_step(
    api, open_source, run_info, monkeypatch, tmp_path
):
    """One that stopped after the run's own number of steps would count batches that were
    dropped."""
    monkeypatch.chdir(tmp_path)
    source = open_source(api.url, run=run_info(output_dir="run", save_steps=3, starting_step=2))
    assert source.poll(4, SHORT) is None  # lets environments in
    body = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 2}
    told = api.post("/register-env", body)
    assert (told["starting_step"], told["num_steps"], told["checkpoint_interval"]) == (
        2,
        2**31 - 1,
        3,
    )
    # environments run in folders of their own
    assert told["checkpoint_dir"] == str(tmp_path / "run")
    # and what tells this run's registrations apart
    assert api.get("/wandb_info")["group"].startswith("test-")


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ({"max_staleness": 0}, True),
        ({"max_staleness": 0, "prefetch_batches": 1}, False),  # whose batches are older in any case
        ({"max_staleness": 1}, False),
        ({}, False),
        ({"max_staleness": 0, "hold_requests": False}, False),
        ({"hold_requests": True}, True),
    ],
)
def test_requests_are_held_by_default_at_staleness_0(settings, held):
    assert AtroposSource("http://127.0.0.1:1", **settings).hold_requests is held


def test_requests_wait_only_if_batch_may_be_ready(api, open_source):
    class Book(VersionBook):
        def hold_requests(self, held: bool, let_in: float) -> None:
            assert held or let_in == 1
            calls.append(held)

    calls: list[bool] = []
    source = open_source(api.url, versions=Book([], "", 0.0), hold_requests=True)
    api.deliver(*numbered_groups(0, 2))
    assert scores(source, 4) == [0, 1, 2, 3]
    assert calls[-1]  # while the trainer trains
    calls.clear()
    api.deliver(*numbered_groups(4))
    assert source.poll(4, LOOK_AGAIN / 2) is None
    # of some fifteen looks, one may ask for a batch
    assert calls[0] is False and calls.count(True) <= 1
    api.deliver(*numbered_groups(6))
    assert scores(source, 4) == [4, 5, 6, 7]
    assert calls[-1]


def test_larger_groups_are_found_after_smaller_ones(api, open_source):
    source = open_source(api.url, versions=VersionBook([], "", 0.0), hold_requests=True)
    api.deliver(*numbered_groups(0, 2))
    assert scores(source, 4) == [0, 1, 2, 3]
    api.deliver(make_group(4, 5, 6, 7))
    assert scores(source, 4) == [4, 5, 6, 7]


def test_environments_enter_at_first_poll_not_start(api, open_source):
    environment = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 2}
    source = open_source(api.url)
    assert api.post("/register-env", environment)["status"] == "wait for trainer to start"
    poll_until(
        source,
        lambda: api.post("/register-env", environment)["status"] == "success",
        "the environment is let in",
    )


def test_registration_of_other_batch_size_is_refused(api, open_source, run_info):
    open_source(api.url)
    with pytest.raises(
        RolloutError, match=r"batch_size 4 .* needs batch_size 8 [\s\S]*`reset_api: true`"
    ):
        open_source(api.url, run=run_info(batch_size=8))


def test_reset_replaces_live_registration_and_queue(api, open_source, run_info):
    open_source(api.url)
    api.deliver(*numbered_groups(1, 2))
    source = open_source(api.url, run=run_info(batch_size=8), reset_api=True)
    assert api.get("/info")["batch_size"] == 8
    assert source.poll(1, SHORT) is None


def test_restarted_trainer_gets_queue_of_live_api(api, open_source):
    open_source(api.url)
    api.deliver(*numbered_groups(1, 2))
    assert scores(open_source(api.url), 4) == [1, 2, 2, 3]


def test_api_spoiled_by_early_delivery_is_healed(restartable_api, open_source):
    restartable_api.deliver(make_group(0, 1))
    source = open_source(restartable_api.url)
    restartable_api.deliver(*numbered_groups(5, 6))
    assert scores(source, 4) == [5, 6, 6, 7]


def test_burst_comes_oldest_first(api, open_source):
    source = open_source(api.url)
    api.deliver(*numbered_groups(1, 2, 3, 4, 5, 6))
    assert scores(source, 12) == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7]


def test_burst_of_dead_trainer_precedes_new_rows(api, open_source):
    open_source(api.url)
    api.deliver(*numbered_groups(1, 2, 3, 4, 5, 6))
    # the earlier trainer took the newest batch of the burst, groups 5 and 6, and died
    api.get("/batch")
    source = open_source(api.url)
    api.deliver(*numbered_groups(7, 8))
    assert scores(source, 12) == [1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 8, 9]


def test_poll_gives_exact_number_and_keeps_rest(api, open_source):
    source = open_source(api.url)
    api.deliver(*numbered_groups(1, 2))
    assert scores(source, 3) == [1, 2, 2]
    assert source.poll(2, SHORT) is None
    assert scores(source, 1) == [3]


def test_poll_times_out_and_next_call_goes_on(api, open_source):
    source = open_source(api.url)
    before = time.monotonic()
    assert source.poll(4, SHORT) is None
    assert SHORT <= time.monotonic() - before < WAIT
    api.deliver(*numbered_groups(1, 2))
    assert scores(source, 4) == [1, 2, 2, 3]


def test_nan_batch_is_lost_and_counted(api, open_source):
    source = open_source(api.url)
    deliver_nan_batch(api)
    assert source.poll(4, SHORT) is None
    api.deliver(*numbered_groups(1, 2))
    assert scores(source, 4) == [1, 2, 2, 3]
    assert source.metrics()["rollouts/lost_batches"] == 1


def test_nan_costs_its_group_alone_at_api_of_a_run(naming_api, open_source):
    source = open_source(naming_api.url)
    naming_api.deliver_text(json.dumps(make_group(0, 1, scores=[0.0, float("nan")])))
    naming_api.deliver(make_group(5, 6), *numbered_groups(1, 3))
    assert scores(source, 4) == [5, 6, 1, 2]
    metrics = source.metrics()
    assert metrics["rollouts/lost_batches"] == 0
    assert metrics["rollouts/rejected_groups"] == 1


def test_api_of_a_run_gives_same_batch_as_atropos(api, naming_api, open_source, run_info):
    """Numbers of all sizes, texts and nothing, by Atropos' own route and by ours."""
    values = [0.1, -0.0, 1e-320, 1.7976931348623157e308, 3.0, -12.345678901234567]
    group = make_group(0, 1) | {"inference_logprobs": [values[:4], values[2:]], "messages": None}
    group["group_overrides"] = {"text": "\u00e9\u2028\U0001f600", "deep": [{"a": [None, True]}]}
    bodies = []
    for each in (api, naming_api):
        open_source(each.url, run=run_info(output_dir=f"{run_info().output_dir}{len(bodies)}"))
        each.deliver(group, group)
        bodies.append(each.get("/batch"))
    assert bodies[0]["batch"] and repr(bodies[0]) == repr(bodies[1])


def test_batches_taken_by_other_trainer_are_counted(api, open_source, caplog):
    source = open_source(api.url)
    api.deliver(*numbered_groups(1, 2, 3, 4, 5, 6))
    source._feed._pull()  # the newest batch of the burst,
    source._feed._pull()  # and how many there are
    api.get("/batch")  # another trainer takes the next, groups 3 and 4
    assert scores(source, 8) == [1, 2, 2, 3, 5, 6, 6, 7]
    assert source.state()["books"]["dropped"] == {"lost_in_delivery": 4}
    assert "4 rollouts are lost: another trainer asks" in caplog.text
    assert "NaN" not in caplog.text


def test_two_trainers_on_one_api_share_rows_and_tell(api, open_source, run_info, caplog):
    sources = [
        open_source(api.url, run=run_info(output_dir=run_info().output_dir + name)) for name in "ab"
    ]
    every = [score for tag in range(10, 90) for score in (tag, tag + 1)]
    seen: list[list[float]] = [[], []]
    for tag in range(10, 90, 8):
        api.deliver(*numbered_groups(*range(tag, tag + 8)))
        for source, mine in zip(sources, seen):
            mine += [row.score for row in source.poll(4, SHORT) or []]
    deadline = time.monotonic() + WAIT
    while sum(map(len, seen)) < len(every):
        assert time.monotonic() < deadline, f"{seen} of {every}"
        for source, mine in zip(sources, seen):
            mine += [row.score for row in source.poll(4, SHORT) or []]
    assert sorted(seen[0] + seen[1]) == sorted(every) and all(seen)
    assert "another trainer asks" in caplog.text and "NaN" not in caplog.text


def test_lost_batch_leaves_rest_of_burst_in_order(api, open_source):
    source = open_source(api.url)
    api.deliver(*numbered_groups(1, 2))
    deliver_nan_batch(api)
    api.deliver(*numbered_groups(5, 6))
    assert scores(source, 8) == [1, 2, 2, 3, 5, 6, 6, 7]
    assert source.metrics()["rollouts/lost_batches"] == 1


def test_malformed_group_is_dropped_and_rest_kept(api, open_source, caplog):
    source = open_source(api.url)
    with caplog.at_level(logging.WARNING):
        api.deliver(make_group(1, 2, masks=[[-100, -100, 11], [-100]]), make_group(3, 4))
        assert scores(source, 2) == [3, 4]
    assert "masks[0] has 3 entries for 4 tokens" in caplog.text
    assert source.metrics()["rollouts/rejected_groups"] == 1


def test_metrics_count_since_last_call(api, open_source):
    source = open_source(api.url)
    api.deliver(make_group(1, 2, inference_logprobs=[[1.0, 1.0, -0.5, 1.0]] * 2), make_group(3, 4))
    scores(source, 3)
    first = source.metrics()
    assert (first["rollouts/unknown_logprobs"], first["rollouts/waiting_rows"]) == (0.25, 1)
    assert "rollouts/unknown_logprobs" not in source.metrics()


def test_trainer_registers_again_after_api_restart(restartable_api, open_source, caplog):
    source = open_source(restartable_api.url)
    assert source.poll(4, SHORT) is None
    restartable_api.stop()
    assert source.poll(4, SHORT) is None
    restartable_api.start()
    with caplog.at_level(logging.WARNING):
        poll_until_registered(source, restartable_api)
    restartable_api.deliver(*numbered_groups(1, 2))
    assert scores(source, 4) == [1, 2, 2, 3]
    # since the last call
    assert [source.metrics()["rollouts/api_restarts"] for _ in range(2)] == [1, 0]
    assert "Environments do not register again by themselves: restart them" in caplog.text


def test_trainer_registers_again_after_foreign_reset(api, open_source):
    source = open_source(api.url)
    assert source.poll(4, SHORT) is None
    api.reset()
    poll_until_registered(source, api)
    api.deliver(*numbered_groups(1, 2))
    assert scores(source, 4) == [1, 2, 2, 3]


def test_unreachable_api_stops_run_with_url_and_fix(restartable_api, open_source):
    source = open_source(restartable_api.url, api_down_timeout=0.5)
    restartable_api.stop()
    with pytest.raises(
        RolloutError,
        match=rf"{restartable_api.url} has given no usable answer for .*atroposlib\.cli\.run_api",
    ):
        source.poll(4, WAIT)


def test_absent_api_error_tells_how_to_start_one(open_source):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(
        RolloutError,
        match=rf"No Atropos API answered at {url} within 0.1 s.*atroposlib\.cli\.run_api",
    ):
        open_source(url, start_timeout=0.1)


def test_url_without_scheme_is_refused(open_source):
    with pytest.raises(RolloutError, match="'localhost:8000' is not the URL"):
        open_source("localhost:8000")


def test_foreign_server_at_url_is_refused(open_source, tmp_path):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(RolloutError, match="is not an Atropos API: GET / answered 200"):
            open_source(f"http://127.0.0.1:{server.server_address[1]}", start_timeout=0.1)
        server.shutdown()


def test_delivered_batches_replay_as_same_rollouts(api, open_source, run_info, tmp_path):
    source = open_source(api.url)
    groups = numbered_groups(1, 2, 3, 4)
    api.deliver(*groups)
    pulled = source.poll(8, WAIT)
    replay = ReplaySource(record(tmp_path / "recorded.jsonl", groups[:2], groups[2:]))
    replay.start(run_info())
    assert_same_rows(replay.poll(8, 0.0), pulled, but=("arrived", "group", "index"))


def test_branches_come_through_the_api_as_the_same_trees(api, open_source, run_info, tmp_path):
    """Through its buffer, too: groups of two for an environment of four. A recording of what was
    sent gives the same rollouts, and so does the spool."""
    rng = random.Random(0)
    groups = []
    for _ in range(4):
        items = [item_of(random_episode(rng, depth=20, most=20)) for _ in range(2)]
        groups.append(group_of(items, advantages=None))
    run = run_info(max_sequence_length=1000)
    source = open_source(api.url, run=run)
    api.deliver(*groups)
    expected = [
        rollout for group in groups for rollout in admitted(group, max_sequence_length=1000)
    ]
    assert sum(rollout.tree is not None for rollout in expected) >= 6
    rollouts = source.poll(len(expected), WAIT)
    other = ("arrived", "group", "index", "policy_version", "staleness")
    assert_same_rows(rollouts, expected, but=other)
    files = [
        record(tmp_path / "recorded.jsonl", groups[:2], groups[2:]),
        run.output_dir + "/rollouts",
    ]
    for recording in files:
        replay = ReplaySource(recording)
        replay.start(run)
        assert_same_rows(replay.poll(len(expected), 0.0), expected, but=other)


def test_joined_rows_are_accounted_for_over_a_resume(api, open_source, run_info):
    """Batches of four rows, of which each has three rollouts. A source that resumes goes on behind
    the last rollout that was handed out."""
    source = open_source(api.url)
    for tag in range(0, 30, 10):
        rows = make_group(tag + 2, tag + 2, overrides=[{"episode": "a"}] * 2)
        api.deliver(make_group(tag, tag + 1), rows | {"group_overrides": {"sft": True}})
    episodes = [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert scores(source, 5) == episodes[:5]
    state = source.state()
    books = state["books"]
    assert (books["trained"], books["dropped"]) == (5, {"joined": 2})
    assert state["cursor"] == 7
    metrics = source.metrics()
    assert metrics["rollouts/joined_rows"] >= 2
    assert metrics["rollouts/share_dropped"] == 0
    assert not any(value for name, value in metrics.items() if "dropped_" in name)
    source.close()
    again = open_source(api.url, run=run_info(state=state))
    assert scores(again, 4) == episodes[5:]
    books = again.state()["books"]
    assert (books["trained"], books["dropped"]) == (9, {"joined": 3})
