"""`trl-atropos train`: what accelerate is given, and how the command ends."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from trl import TrlParser

from tests import ROOT
from tests.forge import FORKED_ENGINES, TRAINER
from tests.launching import Run, make_model
from trl_atropos import train
from trl_atropos.commands import train as train_command
from trl_atropos.commands.words import OF_BOTH, divide
from trl_atropos.recipe import PARTS
from trl_atropos.weights.full_weights import FullWeights

QUICKSTART = "recipes/quickstart/colocate.yaml"


def flags_of(parser) -> dict[str, str]:
    return {flag: action.dest for action in parser._actions for flag in action.option_strings}


def test_flag_belongs_to_accelerate_or_the_settings():
    launcher, settings = flags_of(launch_command_parser()), flags_of(TrlParser(PARTS))
    assert {launcher[flag] for flag in launcher.keys() & settings.keys()} == OF_BOTH | {"help"}


@pytest.mark.parametrize(
    ("line", "launcher", "settings"),
    [
        ("R --max_steps 3", "", "R --max_steps 3"),
        ("--num_processes 2 R --max_steps 3", "--num_processes 2", "R --max_steps 3"),
        (
            "R --num-processes=2 --seed 1 --multi_gpu --bf16 true",
            "--num-processes=2 --multi_gpu",
            "R --seed 1 --bf16 true",
        ),
        (
            "R --config_file a.yaml --gradient_accumulation_steps 4",
            "--config_file a.yaml",
            "R --gradient_accumulation_steps 4",
        ),
        ("R --seed 1 --main_process_ip", "--main_process_ip", "R --seed 1"),
    ],
)
def test_accelerates_flags_may_stand_anywhere(line, launcher, settings):
    assert divide(line.split()) == (launcher.split(), settings.split())


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """What accelerate's launcher is called with, on a machine without a configuration of
    accelerate's own."""
    seen = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", seen.append)
    monkeypatch.setattr(
        "accelerate.commands.config.default_config_file", str(tmp_path / "none.yaml")
    )
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the recipe's `env` stays here
    kept = signal.getsignal(signal.SIGINT)
    yield seen
    signal.signal(signal.SIGINT, kept)


@pytest.mark.parametrize(
    ("settings", "closes"),
    [
        ({"environments": ["a.py", {"agent": {}}]}, True),
        ({"evaluations": [{"verifiers": {}, "problems": 3}]}, True),
        ({"environments": ["agent", {"path": "b.py"}], "evaluations": None}, False),
    ],
)
def test_launcher_of_agents_closes_itself(launched, monkeypatch, tmp_path, settings, closes):
    closed = []
    monkeypatch.setattr(train_command, "close_to_others", lambda: closed.append(True))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    train_command.train([str(tmp_path / "recipe.yaml"), "--use_cpu", "true"])
    assert len(launched) == 1
    assert bool(closed) == closes


@pytest.mark.parametrize(
    ("device", "processes", "channel", "opened"),
    [
        ("cpu", 4, "cpu", False),  # files are passed by their key
        ("cuda", 1, None, False),
        ("cuda", 1, "cpu", False),
        ("cuda", 1, "cuda", True),
        ("cuda", 2, None, True),  # by NCCL
    ],
)
def test_trainer_whose_gpu_memory_others_open_is_known(device, processes, channel, opened):
    transfer = FullWeights(SimpleNamespace(), "auto")
    if channel is not None:
        transfer._channel = SimpleNamespace(device=torch.device(channel))
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device(device), num_processes=processes),
        policy_publisher=transfer,
    )
    assert train._memory_is_opened(trainer) == opened


@pytest.mark.parametrize(
    ("gpus", "line", "asked"),
    [
        (
            False,
            QUICKSTART,
            {"cpu": True, "num_processes": 1, "num_machines": 1, "mixed_precision": "no"},
        ),
        (False, QUICKSTART, {"num_cpu_threads_per_process": 1}),  # of the recipe's `env`
        (True, QUICKSTART, {"cpu": False, "num_processes": 1, "gpu_ids": "2"}),
        (True, f"{QUICKSTART} --use_cpu true", {"cpu": True, "num_processes": 1}),
        (
            True,
            f"{QUICKSTART} --num_processes 4",
            {"cpu": False, "num_processes": 4, "gpu_ids": None},
        ),
        (
            True,
            f"{QUICKSTART} --config_file configs/accelerate/ddp.yaml",
            {"num_processes": None, "gpu_ids": None},
        ),
    ],
)
def test_one_process_trains_without_accelerates_file(launched, monkeypatch, gpus, line, asked):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    train_command.train([*line.split(), "--max_steps", "5"])
    (options,) = launched
    assert {name: getattr(options, name) for name in asked} == asked
    assert (options.training_script, options.module, options.quiet) == (
        "trl_atropos.train",
        True,
        True,
    )
    assert options.training_script_args[:2] == ["--config", QUICKSTART]
    assert options.training_script_args[-2:] == ["--max_steps", "5"]
    assert os.environ["OMP_NUM_THREADS"] == "1"  # before accelerate looks for it


def test_accelerate_has_no_default_to_warn_of(launched, monkeypatch, tmp_path):
    """It has one for the threads if `OMP_NUM_THREADS` is not set, as in a new shell."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_steps: 5\n")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 4)
    monkeypatch.delenv("OMP_NUM_THREADS")
    train_command.train([str(recipe)])
    (options,) = launched
    defaulted = (
        "num_processes",
        "num_machines",
        "mixed_precision",
        "dynamo_backend",
        "num_cpu_threads_per_process",
    )
    assert [getattr(options, name) for name in defaulted] == [1, 1, "no", "no", 4]


FAILED = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="none")


@pytest.mark.parametrize(
    ("ended_by", "interrupted", "code"),
    [
        (SignalException("ended", signal.SIGTERM), False, 143),
        (ChildFailedError("train", {0: FAILED}), False, 1),
        (ChildFailedError("train", {0: FAILED}), True, 130),
        (SystemExit(3), False, 3),
        (SystemExit(3), True, 130),
    ],
    ids=["SIGTERM", "an error", "Ctrl-C in a worker", "an exit code", "Ctrl-C"],
)
def test_exit_code_tells_how_the_launcher_ended(launched, monkeypatch, ended_by, interrupted, code):
    monkeypatch.chdir(ROOT)

    def ends(options) -> None:
        if interrupted:
            signal.raise_signal(signal.SIGINT)
        raise ended_by

    monkeypatch.setattr("accelerate.commands.launch.launch_command", ends)
    with pytest.raises(SystemExit) as ended:
        train_command.train([QUICKSTART])
    assert ended.value.code == code


def test_refusal_of_accelerate_is_one_sentence(tmp_path):
    words = ["train", str(ROOT / QUICKSTART), "--config_file", "none.yaml"]
    done = TRAINER.run(["-m", "trl_atropos.cli", *words], os.environ | {"COLUMNS": "80"}, tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "trl-atropos train: " in done.stderr and "`none.yaml` does not exist" in done.stderr


@pytest.mark.full  # `test_as_users.py` types Ctrl-C, too
@pytest.mark.server
@pytest.mark.slow
def test_ctrl_c_ends_the_run_before_the_command(
    tmp_path,
):
    model = make_model(tmp_path / "model")
    run = Run(
        tmp_path / "out", model, flags=("--max_steps", "100000"), terminal=True, env=FORKED_ENGINES
    )
    settings = run.command[run.command.index("--config") + 1 :]
    run.command = [sys.executable, "-m", "trl_atropos.cli", "train", *settings]
    with run:
        run.until(lambda: run.info().get("policy_version", 0) >= 2, "training")
        before = len(run.output)
        run.type("\x03")
        code = run.exit_code()  # typed behind the command, so answered when that has ended
        assert (code, run.left()) == (130, [])
        assert "Traceback" not in run.output[before:]
