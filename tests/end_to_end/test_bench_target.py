"""`trl-atropos bench target`: its clock, its rows, and a rehearsal of both sides."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl

from benchmarks.target import PROTOCOL, read_rows, rehearsal, run, summary, table
from tests import ROOT
from tests.forge import FORKED_ENGINES

COMMAND = [sys.executable, "-m", "trl_atropos.cli", "bench", "target"]
PATIENCE = 900.0  # seconds for a rehearsal on a machine that is busy with other things

pytestmark = pytest.mark.timeout(PATIENCE + 60)


def row_of(side: str, seed: int, seconds: float) -> dict:
    return {
        "protocol": PROTOCOL.id,
        "side": side,
        "seed": seed,
        "reached": True,
        "seconds": seconds,
        "machine": "m",
        "model": "abc",
    }


def test_target_compares_medians_of_seeds_that_both_sides_ran():
    rows = []
    for seed, ours, theirs in ((1, 20.0, 50.0), (2, 30.0, 60.0), (3, 25.0, 40.0)):
        rows += [row_of("ours", seed, ours), row_of("trl", seed, theirs)]
    rows.append(row_of("trl", 4, 500.0))
    result = summary(rows, PROTOCOL)
    assert result["pairs"] == [1, 2, 3]
    assert result["ratio"] == 25 / 50
    assert result["medians"] == {"ours": 25, "trl": 55}
    assert result["missing"] == {"ours": [4, 5, 6], "trl": [5, 6]}
    text = table(result)
    assert "ours: median 25.0 s of 20.0, 30.0, 25.0; not run: seeds 4, 5, 6" in text
    assert "ours / trl, seeds 1, 2, 3: 0.500" in text


def test_finished_runs_are_not_repeated(tmp_path):
    output = tmp_path / "rows.jsonl"
    rows = [row_of(side, seed, 1.0) for side in ("ours", "trl") for seed in (1, 2)]
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = read_rows(output, PROTOCOL)
    assert kept == rows
    assert (
        run(
            tmp_path, tmp_path / "model", output, kept, [1, 2], ["ours", "trl"], PROTOCOL, timeout=1
        )
        == []
    )


def test_rows_of_another_protocol_are_refused(tmp_path):
    output = tmp_path / "rows.jsonl"
    row = row_of("ours", 1, 1.0) | {"protocol": replace(PROTOCOL, target=0.5).id}
    output.write_text(json.dumps(row) + "\n")
    words = ["--summary", "--folder", str(tmp_path), "--output", str(output)]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2 and done.stdout == ""
    assert f"this one is {PROTOCOL.id}: name another file" in done.stderr
    assert done.stderr.count("\n") == 1


def test_page_says_what_the_kept_rows_say(tmp_path):
    """The rows in the repository are of its protocol, and the page has their seconds."""
    words = ["--summary", "--json", "--output", "benchmarks/target_rows.jsonl"]
    words += ["--folder", str(tmp_path)]
    done = subprocess.run(
        [*COMMAND, *words], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    result = json.loads(done.stdout)
    page = (ROOT / "docs/performance.md").read_text()
    for side, name in (("ours", "ours"), ("trl", "TRL's")):
        (line,) = re.findall(rf"^\| {name}, seconds \|(.*)\|$", page, re.MULTILINE)
        *seconds, median = [float(text) for text in re.findall(r"[\d.]+", line)]
        assert seconds == [round(value, 1) for value in result["seconds"][side].values()]
        assert median == round(result["medians"][side], 1)


@pytest.fixture
def settings(tmp_path):
    """Of a side, with a model that has learned nothing."""
    from benchmarks.target_exam import Settings, pretrain

    protocol = replace(rehearsal(), target=2.0)  # out of reach
    written = {
        "started_at": time.time(),
        "model": str(tmp_path / "model"),
        "protocol": asdict(protocol),
    }
    (tmp_path / "settings.json").write_text(json.dumps(written))
    settings = Settings(tmp_path)
    pretrain(settings)
    return settings


@pytest.mark.slow
def test_pretraining_changes_all_weights(settings, monkeypatch):
    """Autocast keeps what it has cast: the optimizer's steps would change nothing but norms."""
    import make_model  # `target_exam` has put its folder on the path

    from benchmarks import target_exam

    losses = []
    train = make_model.train

    def recorded(*args, **options) -> Iterator[float]:
        for loss in train(*args, **options):
            losses.append(loss)
            yield loss

    small = make_model.Size(64, 1, 2, 32, {}, 32, 100, 1e-2)
    monkeypatch.setattr(make_model, "train", recorded)
    monkeypatch.setattr(make_model, "CLASS_STEPS", 1)
    monkeypatch.setitem(make_model.SIZES, "cpu", small)
    settings.model = settings.model.with_name("pretrained")
    settings.protocol["is_rehearsal"] = False
    target_exam.pretrain(settings)
    assert losses[99] < 1.9


def test_clock_of_target_stands_still_during_evaluation(settings):
    from transformers import AutoModelForCausalLM

    from benchmarks.target_exam import Exam, do_nothing

    @contextlib.contextmanager
    def slow_pause() -> Iterator[None]:
        time.sleep(1.0)
        yield

    exam = Exam(settings)
    exam.begin(do_nothing, slow_pause)
    model = AutoModelForCausalLM.from_pretrained(settings.model)
    control = TrainerControl()
    began = time.time()
    random_state = torch.get_rng_state()
    for step in range(1, settings.budget + 1):
        exam.on_step_end(None, SimpleNamespace(global_step=step), control, model=model)
    elapsed = time.time() - began
    assert torch.equal(torch.get_rng_state(), random_state)
    row = exam.row(began)
    assert [point[0] for point in row["curve"]] == [2, 4]
    assert row["evaluation_s"] > 2.0
    assert 0 <= row["seconds"] <= elapsed - 2.0
    assert row["steps"] == settings.budget and not row["reached"]
    assert not control.should_training_stop


def test_run_ends_at_target(settings):
    from transformers import AutoModelForCausalLM

    from benchmarks.target_exam import Exam, do_nothing

    settings.protocol["target"] = 0.0
    exam = Exam(settings)
    exam.begin(do_nothing, contextlib.nullcontext)
    model = AutoModelForCausalLM.from_pretrained(settings.model)
    control = TrainerControl()
    exam.on_step_end(None, SimpleNamespace(global_step=1), control, model=model)
    assert not control.should_training_stop
    exam.on_step_end(None, SimpleNamespace(global_step=2), control, model=model)
    assert control.should_training_stop
    row = exam.row(time.time())
    assert row["reached"] and row["steps"] == 2


@pytest.mark.full
@pytest.mark.slow(200)
@pytest.mark.server
def test_both_sides_rehearse(tmp_path: Path):
    """With real servers, API and environments; TRL's side samples by Transformers, for want of a
    GPU."""
    words = ["--rehearse", "--sides", "ours,trl,bitwise", "--folder", str(tmp_path), "--json"]
    done = subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        env=os.environ | FORKED_ENGINES,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout)["rows"]
    assert {(row["side"], row["seed"]) for row in rows} == {
        (side, seed) for side in ("ours", "trl", "bitwise") for seed in (0, 1)
    }
    assert len({row["model"] for row in rows}) == 1
    for row in rows:
        assert row["steps"] == 4 and not row["reached"]
        assert [step for step, *_ in row["curve"]] == [2, 4]
        assert 0 < row["curve"][0][1] < row["seconds"]
        assert row["evaluation_s"] > 0 and row["run_start_s"] > 0
    for row in rows:
        if row["side"] == "bitwise":
            # On the CPU the kernels differ. That all were on-policy, the side itself asserts.
            assert 0 <= row["differ"] <= row["tokens"] and row["tokens"] > 4 * 32
