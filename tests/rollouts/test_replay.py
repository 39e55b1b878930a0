import json

import pytest

from tests.rollout_factory import record
from tests.rollouts.conftest import DATA, make_group
from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.replay import ReplaySource


def scores(source: ReplaySource, num_rows: int) -> list[float]:
    return [row.score for row in source.poll(num_rows, 0.0)]


def test_directory_is_replayed_in_order_of_names(tmp_path, run_info):
    (tmp_path / "b.json").write_text(json.dumps({"batch": [make_group(3, 4)]}))
    record(tmp_path / "a.jsonl", [make_group(1, 2)])
    (tmp_path / "notes.txt").write_text("not a recording")
    source = ReplaySource(tmp_path)
    source.start(run_info())
    assert scores(source, 4) == [1, 2, 3, 4]


def test_batch_of_real_environment_is_replayed(run_info):
    source = ReplaySource(DATA / "single_turn.json")
    source.start(run_info())
    assert scores(source, 4) == [0.015, 0.0785, 0.0785, 0.0785]


def test_lines_may_be_batches_or_bare_groups(tmp_path, run_info):
    path = tmp_path / "mixed.jsonl"
    path.write_text(
        json.dumps(make_group(1, 2)) + "\n\n" + json.dumps({"batch": [make_group(3, 4)]}) + "\n"
    )
    source = ReplaySource(path)
    source.start(run_info())
    assert scores(source, 4) == [1, 2, 3, 4]


def test_rows_come_in_requested_numbers(tmp_path, run_info):
    record(tmp_path / "a.jsonl", [make_group(1, 2, 3)])
    source = ReplaySource([tmp_path / "a.jsonl"])
    source.start(run_info())
    assert [scores(source, 1), scores(source, 2)] == [[1], [2, 3]]


def test_used_up_recording_tells_rows_and_fix(tmp_path, run_info):
    record(tmp_path / "a.jsonl", [make_group(1, 2, 3)])
    source = ReplaySource(tmp_path)
    source.start(run_info())
    scores(source, 2)
    with pytest.raises(
        RolloutError, match=r"it has 3 rollouts, and 1 are left for a batch of 2.*`loop=True`"
    ):
        source.poll(2, 0.0)


def test_looping_recording_begins_again(tmp_path, run_info):
    record(tmp_path / "a.jsonl", [make_group(1, 2, 3)])
    source = ReplaySource(tmp_path, loop=True)
    source.start(run_info())
    assert scores(source, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_looping_recording_needs_usable_row(tmp_path, run_info):
    record(tmp_path / "a.jsonl", [make_group(1, 2, masks=[])])
    source = ReplaySource(tmp_path, loop=True)
    source.start(run_info())
    with pytest.raises(RolloutError, match="has no rollout that can be trained on"):
        source.poll(1, 0.0)


def test_rejected_group_is_counted(tmp_path, run_info):
    record(tmp_path / "a.jsonl", [make_group(1, 2, masks=[]), make_group(3, 4)])
    source = ReplaySource(tmp_path)
    source.start(run_info())
    assert scores(source, 2) == [3, 4]
    assert source.metrics()["rollouts/rejected_groups"] == 1


def test_single_row_groups_follow_setting(tmp_path, run_info):
    record(tmp_path / "a.jsonl", [make_group(3)])
    source = ReplaySource(tmp_path, single_row_groups="raw")
    source.start(run_info())
    assert source.poll(1, 0.0)[0].raw_advantage


def test_cut_off_line_is_named(tmp_path, run_info):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"batch": [make_group(1, 2)]}) + '\n{"batch": [')
    source = ReplaySource(path)
    source.start(run_info())
    with pytest.raises(RolloutError, match=r"a\.jsonl, line 2 is not JSON"):
        source.poll(4, 0.0)


@pytest.mark.parametrize("content", ["[1, 2]", '{"batch": null}', '"text"'])
def test_foreign_file_is_refused(tmp_path, run_info, content):
    (tmp_path / "a.json").write_text(content)
    source = ReplaySource(tmp_path)
    source.start(run_info())
    with pytest.raises(RolloutError, match="neither a batch"):
        source.poll(1, 0.0)


def test_missing_path_and_empty_directory_are_refused(tmp_path, run_info):
    with pytest.raises(RolloutError, match="nowhere does not exist"):
        ReplaySource(tmp_path / "nowhere").start(run_info())
    with pytest.raises(RolloutError, match=r"holds no \.json, \.jsonl or \.arrow file"):
        ReplaySource(tmp_path).start(run_info())


def test_close_may_be_called_before_start_and_twice(tmp_path):
    source = ReplaySource(tmp_path)
    source.close()
    source.close()
