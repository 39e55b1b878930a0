"""What a run says when it ends."""

from types import SimpleNamespace

import pytest

from tests.rollouts.conftest import admitted, make_group
from trl_atropos.report.run_log import RunLog
from trl_atropos.report.summary import closing_lines, evaluation_lines, write_summary
from trl_atropos.services.evaluation_results import Result, measures


@pytest.mark.parametrize(("probe", "told"), [(None, False), (0.0, True), (2e-6, True)])
@pytest.mark.parametrize(
    ("replayed", "title"), [(False, "after training"), (True, "of the last batch")]
)
def test_absent_probe_is_not_called_zero(tmp_path, probe, told, replayed, title):
    found = {"pass@1": 0.5, "pass@1_low": 0.4, "pass@1_high": 0.6}
    evaluations = [Result("task", step, found, (step, step), 1.0) for step in (0, 20, 10)]
    summary = {"reward_first": 0.0, "reward_last": 1.0, "probe_max_abs_diff": probe, "wall_s": 3.0}
    lines = closing_lines(summary, RunLog(tmp_path), str, "curve.png", replayed, evaluations)
    assert sum("task: pass@1" in line for line in lines) == 2  # the first and the last
    assert any(line.startswith("Largest probe difference: ") for line in lines) == told
    assert any(title in line for line in lines)


@pytest.mark.parametrize(
    ("batches", "first", "last"),
    [(1, "first batch 0.000", "last batch 0.000"), (5, "first 2 batches 0.500", "2 batches 3.500")],
)
def test_start_and_end_of_short_run_are_apart(batches, first, last, tmp_path):
    log = RunLog(tmp_path)
    log.rewards = [float(number) for number in range(batches)]
    summary = write_summary(str(tmp_path), log, batches, None, 3.0, [])
    (line,) = [
        line
        for line in closing_lines(summary, log, str, "curve.png", False, [])
        if line.startswith("Mean reward")
    ]
    assert first in line and last in line


@pytest.mark.parametrize("resumed_at", [0, 6])
def test_numbers_since_last_start_are_called_so(tmp_path, resumed_at):
    summary = {"reward_first": 0.25, "reward_last": 0.5, "probe_max_abs_diff": None, "wall_s": 3.0}
    log = RunLog(tmp_path)
    log.resumed_at = resumed_at
    log.rewards = [0.25] * 20
    lines = closing_lines(summary, log, str, "curve.png", False, [])
    since = " since step 6" if resumed_at else ""
    assert lines[1:] == [
        f"Sample completions {'at step 6' if resumed_at else 'before training'} (prompt -> "
        "completion, reward):",
        "Sample completions after training (prompt -> completion, reward):",
        f"Mean reward{since}: first 10 batches 0.250, last 10 batches 0.500",
        f"Wall time{since}: 3 s",
        "Reward curve: curve.png",
    ]


def test_branches_of_samples_are_apart(tmp_path):
    branch = {"of": 0, "at": 2, "tokens": [5, 6], "masks": [-100, 6]}
    rollouts = admitted(make_group(0, 1, overrides=[{"branches": [branch]}, {}]))
    summary = {"reward_first": 0.0, "reward_last": 1.0, "probe_max_abs_diff": None, "wall_s": 3.0}
    log = RunLog(tmp_path)
    log.last_rollouts = rollouts
    text = "\n".join(closing_lines(summary, log, str, "curve.png", False, []))
    assert "'[7 8]' -> '[10  9]' | '[5 6]'  0.000" in text
    assert "'[7 8]' -> '[11  9]'  1.000" in text


def of_each(scores: list[float]) -> dict[str, list[float]]:
    """The same scores of every problem."""
    return {f"{i}": scores for i in range(40)}


PARTIAL = {f"{i}": [0.01, 0.01 + 0.02 * (i % 2)] for i in range(40)}  # of problems
LATER = {problem: [0.4 - score for score in scores] for problem, scores in PARTIAL.items()}
HALF = {f"{i}": [float(i % 2)] * 2 for i in range(40)}
LINES = {
    "partial scores": (
        [PARTIAL, LATER],
        "mean score 0.015 [0.013, 0.017]; pass@1 0.000 (scores above 0.5)",
        "mean score 0.385 [0.383, 0.387], +0.370 [+0.367, +0.373] since step 0; pass@1 0.000 "
        "(scores above 0.5)",
    ),
    "partial scores after none": (
        [of_each([0.0, 0.0]), LATER],
        "mean score 0.000; pass@1 0.000 (scores above 0.5)",
        "mean score 0.385 [0.383, 0.387], +0.385 [+0.383, +0.387] since step 0; pass@1 0.000 "
        "(scores above 0.5)",
    ),
    "the same partial scores": (
        [of_each([0.3, 0.3])] * 2,
        "mean score 0.300; pass@1 0.000 (scores above 0.5)",
        "mean score 0.300, +0.000 since step 0; pass@1 0.000 (scores above 0.5)",
    ),
    "right and wrong": (
        [HALF, of_each([1.0, 1.0])],
        "pass@1 0.500 [0.350, 0.650]",
        "pass@1 1.000, +0.500 [+0.343, +0.657] since step 0",
    ),
    "all wrong": ([of_each([0.0])] * 2, "pass@1 0.000", "pass@1 0.000, +0.000 since step 0"),
}


@pytest.mark.parametrize("kind", LINES)
def test_mean_leads_if_partial_no_interval_if_equal(kind):
    (first, last), *wanted = LINES[kind]
    found = []
    for step, scores in ((0, first), (20, last)):
        metrics = measures(scores, 0.5, first if step else None)
        graded = any(score not in (0.0, 1.0) for each in scores.values() for score in each)
        found.append(Result("task", step, metrics, (step, step), 1.0, scores, 0.5, graded))
    assert evaluation_lines(found) == [
        f"task: {line} (step {step}, 1 s)" for line, step in zip(wanted, (0, 20), strict=True)
    ]


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_sample_is_one_line_of_terminal_width(tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    log, text = RunLog(tmp_path), {"long": "x\n" * 400, "short": "ab="}
    log.first_rollouts = [
        SimpleNamespace(prompt_ids=one, completion_parts=["long"], score=1.0) for one in text
    ]
    summary = {"reward_first": 0.0, "reward_last": 1.0, "probe_max_abs_diff": 0.0, "wall_s": 3.0}
    samples = [
        line
        for line in closing_lines(summary, log, text.get, "c.png", False, [])
        if " -> '" in line
    ]
    assert [len(line) for line in samples] == [columns, columns]
    assert (
        samples[1].startswith("  'ab=' -> 'x\\nx")
        and "…" in samples[1]
        and samples[1].endswith("'  1.000")
    )
