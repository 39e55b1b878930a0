"""What the trainer thinks of every rollout that it trains on is kept beside the spool, row by
row."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.launching import launch_two
from tests.rollout_factory import arguments, make_group
from tests.rollouts.conftest import Api
from tests.rollouts.test_spool import append, make_row
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.report.page import pack
from trl_atropos.report.run_folder import read_run, rollouts_of, trainer_logprobs
from trl_atropos.rollouts.replay import recorded_files
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.source import AtroposSource
from trl_atropos.rollouts.spool import Spool, read_rollouts
from trl_atropos.rollouts.trainer_logprobs import TrainerLogprobs
from trl_atropos.services.addresses import free_port
from trl_atropos.weights.publisher import NullPublisher

STEPS, ROWS = 3, 16  # rows of a generation batch
SETTINGS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "save_strategy": "steps",
    "save_steps": 1,
}


class Deliver(TrainerCallback):
    """Sends the groups when the source has registered, as an environment would."""

    def __init__(self, url: str, groups: list[dict]):
        self._url, self._groups = url, groups

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            requests.post(
                f"{self._url}/scored_data_list", json=self._groups, timeout=10
            ).raise_for_status()


def main(model: Path, folder: Path) -> None:
    """What each of the two processes does."""
    asked = json.loads((folder / "asked.json").read_text())
    config = AtroposGRPOConfig(**arguments(folder / "run", **SETTINGS))
    trainer = AtroposGRPOTrainer(
        str(model),
        args=config,
        rollout_source=AtroposSource(asked["url"]),
        policy_publisher=NullPublisher(),
    )
    assert trainer.accelerator.num_processes == 2
    trainer.add_callback(Deliver(asked["url"], asked["groups"]))
    trainer.train()


def groups_of(model: Path) -> list[dict]:
    """Rollouts of one to three turns, so that they are dealt to the processes in another order than
    they came."""
    return [make_group(model, 4, 70 + i, turns=1 + i % 3) for i in range(STEPS * ROWS // 4)]


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory) -> Iterator[Path]:
    """`output_dir` of a run on two processes with a real Atropos API."""
    folder, api = tmp_path_factory.mktemp("two-processes"), Api(free_port())
    (folder / "asked.json").write_text(
        json.dumps({"url": api.url, "groups": groups_of(tiny_model)})
    )
    api.start()
    try:
        launch_two(folder, __name__, tiny_model)
    finally:
        api.stop()
    return folder / "run"


def logprobs(model: Path, row: Rollout) -> np.ndarray:
    """`(c,)` of the completion, from a plain forward pass over this row alone."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor(np.concatenate([row.prompt_ids, row.completion_ids]))[None].long()
    with torch.no_grad():
        of_tokens = policy(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return of_tokens[len(row.prompt_ids) - 1 :].numpy()


@pytest.mark.slow
def test_logprobs_match_model_of_each_step(tiny_model, run):
    rows = [
        row
        for path in sorted((run / "rollouts").glob("rows-*.arrow"))
        for row in read_rollouts(path)
    ]
    kept = [pd.read_feather(path) for path in sorted((run / "rollouts").glob("trainer-*.feather"))]
    assert [list(table["index"]) for table in kept] == [
        list(range(at, at + ROWS)) for at in (0, ROWS, 2 * ROWS)
    ]
    models = [tiny_model, *(run / f"checkpoint-{step}" for step in range(1, STEPS))]
    for step, (table, model) in enumerate(zip(kept, models, strict=True)):
        for row, values in zip(rows[ROWS * step :], table["logprobs"]):
            values = np.array(values, np.float32)
            np.testing.assert_array_equal(np.isnan(values), ~row.mask)
            np.testing.assert_allclose(
                values[row.mask], logprobs(model, row)[row.mask], atol=1e-4, rtol=0
            )
        if step:  # the weights have moved: those of the step before would have been found out
            assert np.abs(values - logprobs(models[step - 1], row))[row.mask].max() > 1e-2


@pytest.mark.slow
def test_report_has_gap_of_every_row(run):
    rows, _ = rollouts_of(read_run(run))
    packed = pack(rows.assign(advantage=0.0), run / "rollouts")
    scored, _ = trainer_logprobs(run / "rollouts", range(len(rows)))
    sampled = [
        row
        for path in sorted((run / "rollouts").glob("rows-*.arrow"))
        for row in read_rollouts(path)
    ]
    gaps = [np.abs(scored[row.index] - row.logprobs)[row.mask] for row in sampled]
    np.testing.assert_allclose(packed.columns["gap"], [gap.mean() for gap in gaps], rtol=1e-5)
    np.testing.assert_allclose(packed.columns["gap_max"], [gap.max() for gap in gaps], rtol=1e-5)
    # the noise that `make_group` puts on the sampler's
    assert 0.05 < packed.columns["gap"][0] < 0.2


@pytest.mark.slow
def test_readers_of_folder_get_rollouts_only(run, tmp_path):
    folder = run / "rollouts"
    assert (
        datasets.load_dataset(str(folder), cache_dir=str(tmp_path))["train"].num_rows
        == STEPS * ROWS
    )
    assert [path.suffix for path in recorded_files([folder])] == [".arrow"] * len(
        list(folder.glob("*.arrow"))
    )


def rows_from(start: int, number: int = 4, length: int = 3) -> list[Rollout]:
    return [make_row(length, index=index) for index in range(start, start + number)]


def keep(files: TrainerLogprobs, start: int, value: float = -1.0) -> None:
    rows = rows_from(start)
    files.write(rows[::-1], np.array([[value - row.index] * 5 for row in rows[::-1]], np.float32))


def kept(folder: Path) -> dict[int, float]:
    """The first value of every row that is there."""
    tables = [pd.read_feather(path) for path in sorted(folder.glob("trainer-*"))]
    return {
        index: values[0]
        for table in tables
        for index, values in zip(table["index"], table["logprobs"])
    }


def test_rows_are_written_in_order_without_padding(tmp_path):
    keep(TrainerLogprobs(tmp_path), 8)
    assert kept(tmp_path) == {8: -9.0, 9: -10.0, 10: -11.0, 11: -12.0}
    assert {
        len(values)
        for values in pd.read_feather(tmp_path / "trainer-000000000008.feather")["logprobs"]
    } == {3}


def test_logprobs_of_retrained_rows_are_forgotten(tmp_path):
    files = TrainerLogprobs(tmp_path)
    for start in (0, 4, 8, 12):
        keep(files, start)
    keep(TrainerLogprobs(tmp_path), 6, value=-2.0)  # the checkpoint fell after row 5
    assert kept(tmp_path) == {i: -1.0 - i for i in range(6)} | {i: -2.0 - i for i in range(6, 10)}


def test_logprobs_go_with_rows_removed_from_spool(tmp_path):
    spool, files = Spool(tmp_path, 1.0), TrainerLogprobs(tmp_path)
    for start in (0, 4, 8):
        append(spool, start, *rows_from(start))
        keep(files, start + 2)
    assert spool.trim(8)
    append(spool, 12, *rows_from(12))
    keep(files, 14)
    assert min(kept(tmp_path)) == 6  # rows 6 and 7 are gone, but 8 and 9 are in the same file
    assert max(kept(tmp_path)) == 17


def test_refusing_disk_is_told_once_and_harmless(tmp_path, caplog):
    files = TrainerLogprobs(tmp_path)
    keep(files, 0)
    in_the_way = tmp_path / ".trainer-000000000004.feather.tmp"  # where the file is written first
    in_the_way.mkdir()
    for start in (4, 8):
        keep(files, start)
    (record,) = caplog.records
    assert "cannot be kept in" in record.getMessage() and "(Is a directory)" in record.getMessage()
    assert set(kept(tmp_path)) == {0, 1, 2, 3}
    assert list(tmp_path.glob(".*")) == [in_the_way]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
