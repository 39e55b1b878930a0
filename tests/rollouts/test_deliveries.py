"""The place of each batch in the order of the run, from what the API's step says. The same with a
real API: `test_resume.py`, `test_http_cache.py`, `source_faults.py`."""

import pytest

from tests.rollouts.conftest import make_group
from trl_atropos.rollouts.api import AtroposClient, Registration
from trl_atropos.rollouts.deliveries import Deliveries, next_delivery
from trl_atropos.rollouts.diagnosis import Diagnosis
from trl_atropos.rollouts.spool import Delivery
from trl_atropos.rollouts.wire import read_group

URL = "http://127.0.0.1:1"  # nothing is sent there
BATCH = 4


@pytest.fixture
def deliveries() -> Deliveries:
    """At an API of step 7, with 8 rollouts delivered."""
    registration = Registration("run-1", "", BATCH, 65, "", 0, 0, 1)
    client = AtroposClient(URL, request_timeout=1.0, batch_timeout=1.0)
    current = Delivery("run-1", 7, 0, BATCH, 2, 0)
    return Deliveries(current, BATCH, URL, Diagnosis(client, registration))


def batch(score: int):
    return [read_group(make_group(*[score] * BATCH))]


def places(arrivals) -> list[tuple[int, int, bool]]:
    """Start, size, and whether a batch has come."""
    return [(header.start, header.size, came is not None) for header, came in arrivals]


def test_batches_of_a_delivery_are_placed_newest_first(deliveries):
    assert places(deliveries.place(batch(1), 3)) == [(16, 4, True)]
    assert deliveries.complete_until == 8
    assert places(deliveries.place(batch(2), 0)) == [(12, 4, True)]
    assert places(deliveries.place(batch(3), 0)) == [(8, 4, True)]
    assert deliveries.complete_until == 20
    assert deliveries.end() == []
    assert deliveries.current.step == 10


def test_batches_that_are_left_when_the_step_rises_are_lost(deliveries, caplog):
    deliveries.place(batch(1), 3)
    lost, placed = deliveries.place(batch(2), 1)
    assert places([lost, placed]) == [(8, 8, False), (20, 4, True)]
    assert lost.header.dropped == {"lost_in_delivery": 8}
    assert "8 rollouts are lost: another trainer asks" in caplog.text


def test_loss_after_a_reply_that_did_not_arrive_is_no_rivals(deliveries, caplog):
    deliveries.place(batch(1), 2)
    deliveries.reply_was_lost = True
    assert places(deliveries.end()) == [(8, 4, False)]
    assert "its reply did not arrive" in caplog.text


def test_equal_batches_are_placed_as_far_as_the_delivery_lacks_some(deliveries):
    deliveries.place(batch(1), 2)
    assert deliveries.place(batch(1), 0) == []
    assert deliveries.place(batch(1), 0) == []
    assert not deliveries.pop_repeated()
    assert places(deliveries.end()) == [(8, 4, True)]
    assert deliveries.pop_repeated()
    assert not deliveries.pop_repeated()


def test_batch_that_the_step_does_not_count_is_a_repeat(deliveries, caplog):
    assert deliveries.place(batch(1), 0) == []
    assert deliveries.pop_repeated()
    assert "an HTTP cache stands before it" in caplog.text


@pytest.mark.parametrize(("rise", "step"), [(0, 7), (None, 8)], ids=["older", "another API"])
def test_batch_beyond_the_delivery_begins_one_of_its_own(deliveries, rise, step):
    deliveries.may_hold_older = rise == 0
    assert places(deliveries.place(batch(1), rise)) == [(8, 4, True)]
    assert deliveries.current == Delivery("run-1", step, 8, BATCH, 1, 0)
    assert deliveries.place(batch(1), rise) == []  # this one came before


def test_last_batch_is_placed_without_the_step(deliveries):
    assert places(deliveries.place_last(batch(1))) == [(8, 4, True)]
    assert deliveries.current.step == 8
    assert deliveries.place_last(batch(1)) == []


def test_rollouts_are_lost_with_an_api_that_is_gone(deliveries):
    deliveries.place(batch(1), 3)
    (lost,) = deliveries.change_api("run-2", 5)
    assert places([lost]) == [(8, 8, False)]
    assert lost.header.lost_with_api == 8
    assert deliveries.current == Delivery("run-2", 5, 20, BATCH, 0, 0)


def test_run_whose_files_were_deleted_begins_at_its_cursor():
    assert next_delivery(None, 0, BATCH) == Delivery("", 0, 0, BATCH, 0, 0)
    last = Delivery("run-1", 7, 0, BATCH, 2, 0)
    assert next_delivery(last, 8, BATCH) is last
    assert next_delivery(last, 12, BATCH).end == 12
    unfinished = Delivery("run-1", 7, 0, BATCH, 2, 1)
    assert next_delivery(unfinished, 12, BATCH) is unfinished
