"""Where a run's metrics go: TensorBoard, Weights & Biases, trackio, and the log that `trl-atropos
report` reads."""

import importlib.util
import json
import logging
import os
import re
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from tests.forge import TRAINER
from tests.rollout_factory import arguments, make_trainer, record, uniform_batch
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer, ReplaySource
from trl_atropos.errors import RecipeError, RolloutError
from trl_atropos.recipe_checks import check_reports, require_mlflow_store
from trl_atropos.report.run_folder import LOG, read_run

OURS = ("rollouts/", "health/", "time/", "policy/")
# what the message about a missing package names
PACKAGES = {
    "azure_ml": "azureml-sdk",
    "clearml": "clearml",
    "codecarbon": "codecarbon",
    "comet_ml": "comet-ml",
    "dagshub": "dagshub",
    "dvclive": "dvclive",
    "flyte": "flytekit",
    "kubeflow": "KUBEFLOW_TRAINER_SERVER_URL",
    "mlflow": "mlflow",
    "neptune": "neptune",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
INSTALLED = ("tensorboard", "tensorboardX", "trackio", "wandb")  # and hidden in a test
BLOCK = 32 * 1024  # of the record files of LevelDB, whose format W&B uses

Logged = dict[int, dict[str, float]]  # by optimizer step


def ours(logs: dict[str, float]) -> dict[str, float]:
    """Our metrics of a step, which loggers put below `train/`."""
    named = {name.removeprefix("train/"): value for name, value in logs.items()}
    return {name: value for name, value in named.items() if name.startswith(OURS)}


def told(folder: Path) -> Logged:
    """What the run logged, by its own account. Of every kind of metric, there is one."""
    logged = {step: ours(logs) for step, logs in read_run(folder).logs.items()}
    assert sorted(logged) == [1, 2] and all(
        any(name.startswith(kind) for name in logged[1]) for kind in OURS
    )
    return logged


def test_tensorboard_gets_every_metric_of_every_step(tiny_model, tmp_path):
    batches = [uniform_batch(tiny_model, 4, 2, seed) for seed in range(2)]
    make_trainer(tiny_model, tmp_path, *batches, max_steps=2, report_to="tensorboard").train()
    (events,) = (tmp_path / "run").glob("runs/*/events.out.tfevents.*")
    read = EventAccumulator(str(events))
    read.Reload()
    for step, logs in told(tmp_path / "run").items():
        for name, value in logs.items():
            assert [
                event.value for event in read.Scalars(f"train/{name}") if event.step == step
            ] == [pytest.approx(value, rel=1e-6)], name


@pytest.fixture(scope="module")
def reported(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of the main job, whose recipe has one line for it."""
    folder = tmp_path_factory.mktemp("reported")
    batches = [uniform_batch(tiny_model, 4, 2, seed) for seed in range(2)]
    loggers = [name for name in ("wandb", "trackio") if find_spec(name)]
    recipe = arguments(
        folder / "run", max_steps=2, report_to=loggers, model_name_or_path=str(tiny_model)
    )
    recipe["replay_paths"] = record(folder / "rollouts.jsonl", *batches)
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # which is YAML, too
    places = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "TRACKIO_DIR": str(folder / "trackio"),
    }
    command = [sys.executable, "-m", "trl_atropos.train", "--config", str(folder / "recipe.yaml")]
    done = subprocess.run(
        command, env=os.environ | places, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", sorted(INTEGRATION_TO_CALLBACK))
def test_missing_package_is_named_before_anything_starts(name, tmp_path, monkeypatch):
    def find_others(module: str, package: str | None = None):
        return None if module in INSTALLED else find_spec(module, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    with pytest.raises(RecipeError) as caught:
        check_reports(AtroposGRPOConfig(**arguments(tmp_path, report_to=name)))
    assert re.search(rf"`report_to` is \['{name}'\]: .*{PACKAGES[name]}", caught.value.what)
    assert caught.value.code == "report-to" and "`report_to: none`" in caught.value.fix


def test_folder_that_trackio_cannot_write_to_is_refused(tmp_path, monkeypatch):
    """Trackio itself only warns then, and logs no step."""
    utils = pytest.importorskip("trackio.utils")
    folder = tmp_path / "a file" / "trackio"
    folder.parent.touch()
    monkeypatch.setattr(utils, "TRACKIO_DIR", folder)
    with pytest.raises(RecipeError, match="where nothing can be written") as caught:
        check_reports(AtroposGRPOConfig(**arguments(tmp_path, report_to="trackio")))
    assert str(folder) in caught.value.seen and "TRACKIO_DIR" in caught.value.fix


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "nobody is logged in .* Run `wandb login`"),
        ({"WANDB_API_KEY": "short"}, "login cannot be used .*API key must have .* `wandb login`"),
        ({"WANDB_API_KEY": "0" * 40}, None),
        ({"WANDB_MODE": "offline"}, None),
        ({"WANDB_MODE": "disabled"}, None),
    ],
)
def test_wandb_without_login_is_refused_before_anything_starts(variables, told, tmp_path):
    """In a process of its own: wandb keeps the credentials that it has found."""
    pytest.importorskip("wandb")
    program = (
        "import sys\nfrom trl_atropos import AtroposGRPOConfig\n"
        "from trl_atropos.errors import RecipeError\n"
        "from trl_atropos.recipe_checks import check_reports\n"
        "training = AtroposGRPOConfig(output_dir='run', report_to='wandb', max_steps=1,\n"
        "    use_cpu=True, bf16=False, logging_steps=1)\n"
        "try:\n    check_reports(training)\nexcept RecipeError as error:\n    print(error)\n"
    )
    (tmp_path / "asks.py").write_text(program)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    kept |= {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_SILENT": "true"}
    done = TRAINER.run(["-m", "asks"], kept | variables, tmp_path)
    assert done.returncode == 0, done.stderr
    if told is None:
        assert done.stdout == ""
    else:
        assert re.search(rf"`report_to` has wandb.*{told}", done.stdout), done.stdout


@pytest.mark.parametrize("uri", ["file:///tmp/runs", "/tmp/runs", "mlruns"])
def test_file_store_of_mlflow_is_refused(uri):
    """It has no place for `reward` beside `reward/NAME`, and would end the run."""
    with pytest.raises(RecipeError, match=r"both `reward` and its parts.*sqlite:///mlflow\.db"):
        require_mlflow_store(uri)
    for other in ("sqlite:///mlflow.db", "http://127.0.0.1:5000", "databricks"):
        require_mlflow_store(other)


@pytest.mark.slow
def test_offline_wandb_gets_every_metric_of_every_step(reported):
    pytest.importorskip("wandb")
    (path,) = reported.glob("wandb/offline-run-*/run-*.wandb")
    assert_same(list(wandb_history(path)), told(reported / "run"))


@pytest.mark.slow
def test_trackio_gets_every_metric_of_every_step(reported):
    pytest.importorskip("trackio")
    (path,) = (reported / "trackio").glob("*.db")
    rows = sqlite3.connect(path).execute("select metrics from metrics").fetchall()
    assert_same([json.loads(text) for (text,) in rows], told(reported / "run"))


def assert_same(entries: list[dict], expected: Logged) -> None:
    by_step = {
        entry["train/global_step"]: ours(entry) for entry in entries if "train/reward" in entry
    }
    assert by_step == {step: pytest.approx(logs) for step, logs in expected.items()}


def wandb_history(path: Path) -> Iterator[dict]:
    """What was logged, from the file that a run offline leaves: LevelDB's records, each one
    message."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # too little for a header: it is padding
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            entry, message = Record.FromString(message), b""
            if entry.HasField("history"):
                yield {
                    "/".join(item.nested_key): json.loads(item.value_json)
                    for item in entry.history.item
                }


@pytest.mark.slow
def test_main_job_keeps_one_log_with_model_settings(reported, tiny_model):
    entries = [json.loads(line) for line in (reported / "run" / LOG).read_text().splitlines()]
    (begin,) = [entry for entry in entries if "begin" in entry]
    assert begin["model"]["model_name_or_path"] == tiny_model.name and "lora_r" in begin["model"]
    assert sum("end" in entry for entry in entries) == 1


# -------------------------------------------------------------------------------- the run's own log


class Spooled(ReplaySource):
    """With the rows of a recording as if they were in a spool."""

    def state(self):
        return {"spool": "abc", "lineage": [], "books": {}}


def make_spooled(model: Path, folder: Path, number: int, **settings) -> AtroposGRPOTrainer:
    recording = record(
        folder / "rollouts.jsonl", *[uniform_batch(model, 4, 2, seed) for seed in range(number)]
    )
    (folder / "run" / "rollouts").mkdir(parents=True)
    config = AtroposGRPOConfig(**arguments(folder / "run", replay_paths=[recording], **settings))
    return AtroposGRPOTrainer(str(model), args=config, rollout_source=Spooled(recording))


def test_python_made_trainer_logs_for_report(tiny_model, tmp_path):
    trainer = make_spooled(
        tiny_model,
        tmp_path,
        4,
        max_steps=4,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
    )
    assert isinstance(trainer.rollout_source, Spooled)
    trainer.train()
    run = read_run(tmp_path / "run")
    assert (run.ended, run.steps, sorted(run.logs)) == (4, 4, [1, 2, 3, 4])
    entries = [json.loads(line) for line in (tmp_path / "run" / LOG).read_text().splitlines()]
    assert [entry["batch"] for entry in entries if "batch" in entry] == [
        [step, step] for step in (1, 2, 3, 4)
    ]
    assert [entry["spool"] for entry in entries if "batch" in entry] == ["abc"] * 4
    assert run.began["model"] == {"model_name_or_path": tiny_model.name}


def test_warnings_after_broken_run_stay_out_of_log(tiny_model, tmp_path):
    trainer = make_spooled(tiny_model, tmp_path, 1, max_steps=2)
    with pytest.raises(RolloutError, match="is used up"):
        trainer.train()
    logging.getLogger("trl_atropos.metrics.health").warning("of another run")
    text = (tmp_path / "run" / LOG).read_text()
    assert '"logs"' in text and "of another run" not in text
