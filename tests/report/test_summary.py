"""What a run says when it ends."""

from types import SimpleNamespace

import pytest

from trl_atropos.report.run_log import RunLog
from trl_atropos.report.summary import closing_lines
from trl_atropos.services.evaluations import Result


@pytest.mark.parametrize(("probe", "told"), [(None, False), (0.0, True), (2e-6, True)])
@pytest.mark.parametrize(("replayed", "title"), [(False, "after training"), (True, "of the last batch")])
def test_a_probe_that_never_ran_is_not_called_zero(tmp_path, probe, told, replayed, title):
    found = {"pass@1": 0.5, "pass@1_low": 0.4, "pass@1_high": 0.6}
    evaluations = [Result("task", step, found, (step, step), 1.0) for step in (0, 20, 10)]
    summary = {"reward_first": 0.0, "reward_last": 1.0, "probe_max_abs_diff": probe, "wall_s": 3.0}
    lines = closing_lines(summary, RunLog(tmp_path), str, "curve.png", replayed, evaluations)
    assert sum("task: pass@1" in line for line in lines) == 2  # the first and the last
    assert any(line.startswith("Largest probe difference: ") for line in lines) == told
    assert any(title in line for line in lines)


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_a_sample_is_one_line_of_the_terminals_width(tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    log, text = RunLog(tmp_path), {"long": "x\n" * 400, "short": "ab="}
    log.first_rollouts = [SimpleNamespace(prompt_ids=one, completion_ids="long", score=1.0) for one in text]
    summary = {"reward_first": 0.0, "reward_last": 1.0, "probe_max_abs_diff": 0.0, "wall_s": 3.0}
    samples = [line for line in closing_lines(summary, log, text.get, "c.png", False, []) if " -> '" in line]
    assert [len(line) for line in samples] == [columns, columns]
    assert samples[1].startswith("  'ab=' -> 'x\\nx") and "…" in samples[1] and samples[1].endswith("'  1.000")
