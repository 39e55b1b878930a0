"""What `trl-atropos report` finds in a run's folder: what is known of every rollout, and what is
not."""

import base64
import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import TrainerState

from tests.report.synthetic_run import make_run
from tests.rollout_factory import make_trainer, uniform_batch
from tests.rollouts.test_spool import DELIVERY, append, make_row
from trl_atropos.report import page
from trl_atropos.report.page import build, token_texts
from trl_atropos.report.run_folder import (
    LOG,
    UNKNOWN,
    Fate,
    ReportError,
    advantages,
    episode_counts,
    read_run,
    rollouts_of,
    series,
    session_counts,
)
from trl_atropos.report.run_log import RunLog, spans
from trl_atropos.rollouts.rollout import scalar_advantages
from trl_atropos.rollouts.spool import FileHeader, Spool
from trl_atropos.rollouts.trainer_logprobs import TrainerLogprobs

FIRST = [["a", 0]]


class Folder:
    """A run's folder, with four rollouts in every file and a log that is written by hand."""

    def __init__(self, path: Path, files: int = 4):
        self.path = path
        self.spool = Spool(path / "rollouts", 1e9)
        self.log = RunLog(path)
        self.state = TrainerState()
        self.log.open(self.state)
        for file in range(files):
            rows = [
                make_row(group=file, policy_version=max(0, file - 1), score=float(i))
                for i in range(4)
            ]
            append(self.spool, 4 * file, *rows, policy_branches=FIRST, version=file)

    def begin(self, step: int = 0, **config) -> None:
        self.log.write(
            begin=step, max_steps=9, config={"scale_rewards": "group"} | config, changed=[]
        )

    def take(
        self,
        step: int,
        *indices: int,
        last: int | None = None,
        version: int | None = None,
        path=FIRST,
    ) -> None:
        """Hands out rows for the optimizer steps from `step` to `last`."""
        name = {
            "spool": self.spool.name,
            "lineage": path,
            "books": {"trained": 0, "dropped": {}, "lost_with_api": 0},
        }
        numbers = step - 1 if version is None else version
        self.log.write(batch=[step, last or step], rows=spans(indices), version=numbers, **name)

    def rows(self):
        return rollouts_of(read_run(self.path))[0]


def test_rows_are_known_by_step_and_staleness(tmp_path):
    folder = Folder(tmp_path)
    folder.begin()
    folder.take(1, 0, 1, 2, 3)
    folder.take(2, 4, 5, 10, 11)  # 6 to 9 were stale, say
    folder.log.write(logs={"loss": 0.5}, step=1)
    rows = folder.rows()
    assert (
        rows["first_step"].tolist() == [1] * 4 + [2] * 2 + [UNKNOWN] * 4 + [2] * 2 + [UNKNOWN] * 4
    )
    assert rows["fate"].tolist() == [Fate.TRAINED] * 4 + [Fate.IN_TRAINING] * 2 + [
        Fate.PASSED_OVER
    ] * 4 + ([Fate.IN_TRAINING] * 2 + [Fate.WAITING] * 4)
    assert rows["stale"].tolist() == [0] * 4 + [1] * 2 + [UNKNOWN] * 4 + [0] * 2 + [UNKNOWN] * 4


def test_rows_without_log_have_no_step_or_advantage(tmp_path):
    folder = Folder(tmp_path)
    (tmp_path / LOG).unlink()
    rows = folder.rows()
    assert set(rows["fate"]) == {Fate.UNKNOWN}
    assert set(rows["first_step"]) == set(rows["stale"]) == {UNKNOWN}
    assert np.isnan(advantages(rows, read_run(tmp_path).config.get("scale_rewards"))).all()


def test_log_begun_mid_run_leaves_fates_unknown(tmp_path):
    folder = Folder(tmp_path)
    folder.begin(step=5)
    folder.take(6, 8, 9, 10, 11)
    assert folder.rows()["fate"].tolist()[:8] == [Fate.UNKNOWN] * 8


def test_steps_abandoned_by_resume_are_forgotten(tmp_path):
    folder = Folder(tmp_path)
    folder.begin()
    for step in (1, 2, 3):
        folder.take(step, *range(4 * step - 4, 4 * step))
        folder.log.write(logs={"reward": float(step)}, step=step)
    for step in (1, 2):
        folder.log.write(evaluation="held_out", step=step, metrics={"pass@1": 0.5}, versions=None)
    folder.begin(step=1)
    rows = folder.rows()
    assert [found["step"] for found in read_run(tmp_path).evaluations] == [1]
    assert rows["first_step"].tolist() == [1] * 4 + [UNKNOWN] * 12
    assert rows["fate"].tolist() == [Fate.TRAINED] * 4 + [Fate.WAITING] * 12
    folder.take(2, 4, 5, 6, 7, path=[*FIRST, ["b", 1]])
    rows, run = folder.rows(), read_run(tmp_path)
    assert rows["first_step"].tolist() == [1] * 4 + [2] * 4 + [UNKNOWN] * 8
    assert (run.resumed, list(run.logs)) == ([1], [1])
    assert rows["stale"].tolist()[4:8] == [1] * 4


def test_staleness_counts_way_to_abandoned_version(tmp_path):
    folder = Folder(tmp_path, files=0)
    append(
        folder.spool,
        0,
        *[make_row(policy_version=3) for _ in range(4)],
        policy_branches=FIRST,
        version=4,
    )
    folder.begin()
    folder.begin(step=1)
    folder.take(2, 0, 1, 2, 3, path=[*FIRST, ["b", 1]])
    assert folder.rows()["stale"].tolist() == [2] * 4  # back from 3 to 1, where the run went on


def test_fresh_run_in_same_folder_has_own_log(tmp_path):
    folder = Folder(tmp_path)
    folder.begin()
    folder.take(1, 0, 1, 2, 3)
    folder.log.write(warning="of the first run", step=1)
    folder.begin()
    run = read_run(tmp_path)
    assert (run.batches, run.warnings, run.steps) == ([], [], 0)


def test_batches_of_other_spool_tell_nothing_of_rows(tmp_path):
    folder = Folder(tmp_path)
    folder.begin()
    folder.spool.name = "another"
    folder.take(1, 0, 1, 2, 3)
    assert set(folder.rows()["fate"]) == {Fate.UNKNOWN}


def test_generation_batch_is_shown_for_all_its_steps(tmp_path):
    folder = Folder(tmp_path)
    folder.begin()
    folder.take(1, 0, 1, 2, 3, last=2)
    rows = folder.rows()
    assert (set(rows["first_step"][:4]), set(rows["last_step"][:4])) == ({1}, {2})


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages_equal_those_of_trainer(tmp_path, scale_rewards):
    folder, rng = Folder(tmp_path, files=0), np.random.default_rng(1)
    usual = [make_row(score=s, group_mean=0.3, group_std=0.2) for s in rng.normal(size=5)]
    special = [
        make_row(sft=True),
        make_row(zero_advantage=True),
        make_row(raw_advantage=True, group_mean=0.0),
    ]
    append(folder.spool, 0, *usual, *special, size=8)
    folder.begin()
    folder.take(1, *range(8))
    expected = scalar_advantages(usual + special, scale_rewards)
    np.testing.assert_allclose(advantages(folder.rows(), scale_rewards), expected, rtol=1e-5)


def test_counts_of_sessions_are_those_of_the_whole_run(tmp_path):
    """Without what a resumed run had abandoned, however few points its curves have."""
    folder = Folder(tmp_path)
    folder.begin()
    for step in range(1, 6):
        logs = {"sessions/tokens": 10.0, "sessions/ended_silence": float(step == 2), "loss": 1.0}
        logs |= {"environment/b/episodes/ended": 3.0, "environment/a/train/episodes": 1.0}
        folder.log.write(step=step, logs=logs)
    folder.begin(4)
    run = read_run(tmp_path)
    assert session_counts(run) == {"ended_silence": 1, "tokens": 40}
    assert episode_counts(run) == {"b": {"ended": 12}}
    assert series(run, limit=1)["sessions/tokens"] == [[4], [10.0]]
    run.logs = {}
    assert session_counts(run) == {}


def test_rewards_cover_all_rollouts_not_selection(tmp_path):
    folder = make_run(tmp_path / "run", 4)
    rows, _ = rollouts_of(read_run(folder))
    found = page.rewards(rows, limit=100)
    assert [each["environment"] for each in found] == ["environment 0", "tools"]
    here = (rows["env_id"] == 1) & (rows["first_step"] == 2)
    assert found[1]["means"][1] == pytest.approx(rows["score"][here].mean(), abs=1e-5)
    joined = page.rewards(rows, limit=2)[1]
    assert joined["steps"] == [2, 4]
    assert joined["means"][0] == pytest.approx(np.mean(found[1]["means"][:2]), abs=1e-5)


def test_selection_takes_whole_groups_within_limits(tmp_path):
    rows, _ = rollouts_of(read_run(make_run(tmp_path / "run", 20)))
    chosen = page.select(rows, 200, 10**9)
    groups, sizes = np.unique(rows["group"][chosen], return_counts=True)
    assert 150 <= len(chosen) <= 200 and set(sizes) == {8}
    assert (groups[0], groups[-1]) == (rows["group"].min(), rows["group"].max())
    assert np.diff(groups).max() <= 2 * np.diff(groups).min()
    few = page.select(rows, 10**9, 20_000)
    assert 10_000 < (rows["prompt_tokens"] + rows["completion_tokens"])[few].sum() <= 20_000
    assert len(page.select(rows, 10**9, 10**9)) == len(rows)


def test_packed_rollout_unfolds_into_written_row(tmp_path):
    folder = Folder(tmp_path, files=0)
    mask = np.array([True, True, False, False, True])
    logprobs = np.where(mask, -0.25, np.nan).astype(np.float32)
    row = make_row(
        5, mask=mask, logprobs=logprobs, token_advantages=np.full(5, 0.5, np.float32), messages="[]"
    )
    append(folder.spool, 0, row, size=1)
    rows = folder.rows()
    TrainerLogprobs(tmp_path / "rollouts").write(
        [row], np.where(mask, [[-0.2, -0.25, 0, 0, -0.65]], np.nan)
    )
    packed = page.pack(rows.assign(advantage=9.0), tmp_path / "rollouts")
    assert packed.chunks[0] == {
        "prompts": [[1, 2]],
        "rows": [
            [
                0,
                [0, 1, 2, 3, 4],
                [2, 2, 1],
                [-250, -250, None, None, -250],
                [500] * 5,
                "[]",
                [50, 0, None, None, -400],
                [],
            ]
        ],
    }
    assert packed.columns["advantage"] == [0.5]
    assert packed.columns["logprob"] == [-0.25]
    assert (packed.columns["gap"], packed.columns["gap_max"]) == (
        pytest.approx([0.15]),
        pytest.approx([0.4]),
    )


def test_gaps_of_abandoned_training_are_forgotten(tmp_path):
    folder = Folder(tmp_path)
    files = TrainerLogprobs(tmp_path / "rollouts")
    for start in (0, 4, 8):
        files.write(
            [make_row(index=start + i) for i in range(4)], np.full((4, 3), -0.5 - start, np.float32)
        )
    folder.begin()
    folder.take(1, 0, 1, 2, 3)
    folder.take(2, 4, 5, 6, 7)
    folder.begin(step=1)  # what came after row 3 is to be trained again
    rows = folder.rows()
    packed = page.pack(rows.assign(advantage=0.0), tmp_path / "rollouts")
    assert packed.columns["gap"][:4] == [0.0] * 4 and np.isnan(packed.columns["gap"][4:]).all()


@pytest.mark.parametrize(
    ("correction", "reason"),
    [
        (False, "not computed with `vllm_importance_sampling_correction: false`"),
        (True, "no batch has been trained yet"),
    ],
)
def test_page_without_gap_says_why(tmp_path, correction, reason):
    folder = Folder(tmp_path)
    folder.begin(vllm_importance_sampling_correction=correction)
    assert reason in page.why_no_gap(read_run(tmp_path), folder.rows())


def test_torn_logprob_file_is_named_and_rest_shown(tmp_path):
    folder = make_run(tmp_path / "run", 3)
    torn = sorted((folder / "rollouts").glob("trainer-*"))[1]
    torn.write_bytes(torn.read_bytes()[:500])
    rows, _ = rollouts_of(read_run(folder))
    packed = page.pack(rows[:192].assign(advantage=0.0), folder / "rollouts")
    assert np.isnan(packed.columns["gap"]).tolist() == [False] * 64 + [True] * 64 + [False] * 64
    assert [name.partition(":")[0] for name in packed.unreadable] == [torn.name]


def test_tokens_without_text_are_shown_as_bytes(tmp_path):
    from recipes.quickstart.make_model import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer("a é<|end|>")["input_ids"]
    texts, unreadable = token_texts(tmp_path / "tokenizer.json", ids)
    assert [texts[i] for i in ids] == ["a", " ", "<0xC3>", "<0xA9>", "<|end|>"]
    assert unreadable == []


def shown_data(page_text: str) -> dict:
    """What the page of `build` has in its block `data`."""
    packed = re.search(r'<script type="text/plain" id="data">(.*?)</script>', page_text)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


@pytest.mark.parametrize(
    "damage",
    [lambda text: text[:500], lambda text: "", lambda text: "[]"],
    ids=["cut", "empty", "odd"],
)
def test_page_with_damaged_tokenizer_has_no_text(tmp_path, damage):
    folder = make_run(tmp_path / "run", 3)
    tokenizer = folder / "tokenizer.json"
    assert shown_data(build(folder)[0])["texts"]
    tokenizer.write_text(damage(tokenizer.read_text()))
    text, summary = build(folder)
    data = shown_data(text)
    assert "256 of 256 rollouts" in summary
    assert data["texts"] == {} and not data["has_tokenizer"]
    assert [name.partition(":")[0] for name in data["unreadable"]] == ["tokenizer.json"]


@pytest.mark.parametrize("content", ["", '{"name": "a', "[]", "{}"])
def test_damaged_spool_name_is_taken_from_log(tmp_path, content):
    folder = make_run(tmp_path / "run", 3)
    whole = shown_data(build(folder)[0])
    (folder / "rollouts" / "spool.meta").write_text(content)
    data = shown_data(build(folder)[0])
    assert data["rollouts"] == whole["rollouts"] and data["total_rollouts"] == 256
    assert [name.partition(":")[0] for name in data["unreadable"]] == ["spool.meta"]


def test_torn_rollout_file_is_named_and_rest_shown(tmp_path):
    folder = make_run(tmp_path / "run", 3)
    torn = sorted((folder / "rollouts").glob("*.arrow"))[1]
    torn.write_bytes(torn.read_bytes()[:500])
    rows, unreadable = rollouts_of(read_run(folder))
    assert len(rows) == 192 and unreadable[0].startswith(torn.name)
    assert "192 of 192 rollouts" in build(folder)[1]


def test_half_written_log_is_read_and_continued(tmp_path):
    folder = make_run(tmp_path / "run", 3, end=False)
    with (folder / LOG).open("a") as log:
        log.write('{"at": 1, "logs": {"rew')
    run = read_run(folder)
    assert (run.steps, run.ended) == (3, None)
    again = RunLog(folder)
    again.open(TrainerState())
    again.write(end=3)
    assert read_run(folder).ended == 3


def test_trainer_writes_log_and_tokenizer(tiny_model, tmp_path):
    batches = [uniform_batch(tiny_model, 4, 2, seed) for seed in range(3)]
    make_trainer(
        tiny_model, tmp_path, *batches, max_steps=3, warning_thresholds={"unknown_version": 0.0}
    ).train()
    run = read_run(tmp_path / "run")
    assert (run.ended, run.steps, sorted(run.logs)) == (3, 3, [1, 2, 3])
    # a recording's rows are not in this folder
    assert "reward" in run.logs[2] and run.batches == []
    assert {"max_steps", "learning_rate"} <= set(run.began["changed"])
    assert "vllm_mode" in run.config and "unknown_version" in run.warnings[0]["warning"]
    assert (tmp_path / "run" / "tokenizer.json").exists()
    # and so neither are the trainer's log-probabilities
    assert not (tmp_path / "run" / "rollouts").exists()
    assert "3 steps, 1 warnings, 0 of 0 rollouts." in build(tmp_path / "run")[1]


def test_full_disk_ends_log_and_not_run(tmp_path, caplog):
    (tmp_path / LOG).symlink_to("/dev/full")
    log = RunLog(tmp_path)
    log.open(TrainerState())
    for _ in range(2):
        log.write(logs={"reward": 1.0}, step=1)
    (record,) = caplog.records
    assert "cannot be written (No space left on device)" in record.getMessage()


def report(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "trl_atropos.cli", "report", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_command_writes_page_beside_run_or_elsewhere(tmp_path):
    folder = make_run(tmp_path / "run", 2)
    done = report(str(folder))
    assert done.returncode == 0, done.stderr
    assert "2 steps, 0 warnings, 192 of 192 rollouts." in done.stdout
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    done = report(str(folder), "--output", str(tmp_path / "other.html"), "--max_rollouts", "16")
    assert done.returncode == 0 and "16 of 192 rollouts." in done.stdout
    assert (tmp_path / "other.html").exists()


def test_folder_without_run_is_refused_with_fix(tmp_path):
    with pytest.raises(ReportError, match=r"is no folder\. Name a run's `output_dir`"):
        read_run(tmp_path / "missing")
    with pytest.raises(ReportError, match=r"has no run_log\.jsonl and no rollouts"):
        read_run(tmp_path)
    done = report(str(tmp_path))
    assert (
        done.returncode == 1
        and done.stderr.startswith("trl-atropos report: ")
        and "Traceback" not in done.stderr
    )


def test_unwritable_output_is_refused_with_fix(tmp_path):
    folder = make_run(tmp_path / "run", 1)
    done = report(str(folder), "--output", str(tmp_path / "missing" / "page.html"))
    assert done.returncode == 1 and "Name another with --output" in done.stderr


def test_run_without_batches_has_page(tmp_path):
    Spool(tmp_path / "rollouts", 1e9)
    assert "0 steps, 0 warnings, 0 of 0 rollouts." in build(tmp_path)[1]
    shutil.rmtree(tmp_path / "rollouts")
    Folder(tmp_path, files=0).begin()
    assert "0 steps" in build(tmp_path)[1]


def test_batch_of_rejected_groups_is_no_hindrance(tmp_path):
    folder = Folder(tmp_path, files=1)
    folder.spool.append(FileHeader(4, 4, DELIVERY, {"rejected": 4}), [])
    append(folder.spool, 8, make_row(), size=4)
    assert len(folder.rows()) == 5


def test_secrets_stay_out_of_log(tmp_path, tiny_model):
    secret = {
        "hub_token": "hf_abc",
        "atropos_url": "http://me:abc@127.0.0.1:8000",
        "optim_args": "api_key=abc",
    }
    make_trainer(tiny_model, tmp_path, uniform_batch(tiny_model, 4, 2, 0), **secret).train()
    written = (tmp_path / "run" / LOG).read_text()
    assert "abc" not in written
    config = json.loads(written.splitlines()[0])["config"]
    assert "hub_token" not in config and config["atropos_url"] == "http://127.0.0.1:8000"
