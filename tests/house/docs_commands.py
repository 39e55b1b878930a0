"""How the commands of the pages are run in tests: here, in miniature, or by a test of another file.

`HERE` and `ELSEWHERE` are looked through in order; the first pattern that a command begins with
counts.
"""

import importlib
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from configparser import ConfigParser
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.check.desk import check
from tests.forge import TRAINER
from tests.house.docs_pages import ROOT, Command
from tests.launching import free_urls
from trl_atropos.commands.words import with_recipe

QUICKSTART = "recipes/quickstart/colocate.yaml"
STAND_INS = ("my.yaml", "recipe.yaml", "RECIPE")  # for a recipe of the reader's own

# What is run by another test: words of a command, in this order -> the test, and what its file must
# name, too.
ELSEWHERE = [
    (
        r"make quickstart",
        "tests/end_to_end/test_quickstart.py::test_quickstart_learns_its_task",
        QUICKSTART,
    ),
    (
        r"source \.venv/bin/activate",
        "tests/end_to_end/test_quickstart.py::test_quickstart_learns_its_task",
        "VENV ?= .venv",
    ),
    (
        r"accelerate launch .*trl_atropos\.train .*--resume_from_checkpoint true",
        "tests/end_to_end/test_quickstart.py::test_run_with_foreign_environments_is_resumed",
        "resume_from_checkpoint",
    ),
    (
        r"accelerate launch .*trl_atropos\.train .*--vllm_mode (server|nccl_lora|lora|restart)",
        "tests/end_to_end/test_recipes.py::test_recipe_trains_for_three_steps",
        'glob("recipes/*/*.yaml")',
    ),
    (
        r"accelerate launch .*trl_atropos\.train .*--config recipes/(gsm8k|long|tool_use|reasoning_gym|own_environment)/",
        "tests/end_to_end/test_recipes.py::test_recipe_trains_for_three_steps",
        'glob("recipes/*/*.yaml")',
    ),
    (
        r"python recipes/arithmetic/make_model\.py|accelerate launch .*--config recipes/arithmetic/colocate\.yaml",
        "tests/end_to_end/test_arithmetic.py::test_model_gets_better_at_problems_never_seen",
        "recipes/arithmetic/colocate.yaml",
    ),
    (
        r"python recipes/arithmetic/compare\.py (trl|draw)",
        "tests/end_to_end/test_arithmetic.py::test_trl_trainer_runs_beside_ours",
        "compare.py",
    ),
    (
        r"accelerate launch .*trl_atropos\.train .*--config my_task/(colocate|cpu)\.yaml",
        "tests/end_to_end/test_recipes.py::test_recipe_trains_for_three_steps",
        "recipes/own_environment/",
    ),
    (
        rf"accelerate launch .*trl_atropos\.train .*--config {QUICKSTART}",
        "tests/end_to_end/test_quickstart.py::test_quickstart_learns_its_task",
        QUICKSTART,
    ),
    (
        r"accelerate launch .*trl_atropos\.train .*--model_name_or_path",
        "tests/end_to_end/test_quickstart.py::test_run_with_foreign_environments_is_resumed",
        QUICKSTART,
    ),
    (
        r"python my_task/environment\.py serve",
        "tests/end_to_end/test_quickstart.py::test_run_with_foreign_environments_is_resumed",
        "two_turn_environment.py",
    ),
    (
        r"python -m trl_atropos\.rollouts\.api",
        "tests/rollouts/test_resume.py::test_foreign_environments_keep_registered_names",
        "naming_api",
    ),
    (
        r"python -m atroposlib\.cli\.run_api",
        "tests/services/test_services.py::test_atropos_api_becomes_healthy_and_stops",
        "atroposlib.cli.run_api",
    ),
    (
        r"python -m benchmarks\.episode_means",
        "tests/rollouts/test_episodes.py::test_mean_over_rows_unlearns_to_branch",
        "benchmarks.episode_means",
    ),
    (
        r"trl-atropos bench target --summary --output benchmarks/target_rows\.jsonl",
        "tests/end_to_end/test_bench_target.py::test_page_says_what_the_kept_rows_say",
        "benchmarks/target_rows.jsonl",
    ),
    (
        r"trl-atropos eval",
        "tests/end_to_end/test_quickstart.py::test_run_with_foreign_environments_is_resumed",
        '"eval"',
    ),
    (
        r"trl-atropos train ",
        "tests/house/test_wheel.py::test_template_learns_its_task",
        '"train"',
    ),
    (
        r"trl-atropos try ",
        "tests/commands/test_try.py::test_group_or_traceback_of_each_is_shown",
        QUICKSTART,
    ),
    (
        r"trl-atropos sessions ",
        "tests/commands/test_sessions.py::test_sessions_are_listed_shown_and_ended",
        "sessions(list(words))",
    ),
    (
        r"trl-atropos serve",
        "tests/server/test_control.py::test_resume_without_pause_is_refused",
        "trl_atropos.server.launch",
    ),
]


def miniature(words: list[str], desk: Path) -> list[str]:
    """Arguments of the main job for this machine: another model, free ports, no GPU, one step."""
    atropos, *servers = free_urls(9)
    model = [value for flag, value in pairwise(words) if flag == "--model_name_or_path"]
    given = (
        yaml.safe_load(Path(words[words.index("--config") + 1]).read_text())
        if "--config" in words
        else {}
    )
    listed = given.get("vllm_server_base_url", "")
    several = len(listed) if isinstance(listed, list) else 1
    if not model or not Path(model[0]).is_dir():
        words = [*words, "--model_name_or_path", str(desk / "model")]
    words = [
        *words,
        "--atropos_url",
        atropos,
        "--vllm_server_base_url",
        ",".join(servers[:several]),
    ]
    return [*words, "--use_cpu", "true", "--bf16", "false", "--output_dir", str(desk / "output")]


def run_check(command: Command, desk: Path) -> None:
    arguments = [
        *miniature(with_recipe(command.after("check")), desk),
        "--device_memory_gb",
        "1000",
    ]
    assert check(arguments) == [], command


def run_command(command: Command, desk: Path) -> None:
    """`trl-atropos`, in a process of its own."""
    run_module(command, "trl_atropos.cli", command.words[1:], desk)


def run_replay(command: Command, desk: Path) -> None:
    arguments = [
        *command.after("trl_atropos.train"),
        "--max_steps",
        "1",
        "--per_device_train_batch_size",
        "8",
    ]
    arguments = [*arguments, "--use_cpu", "true", "--bf16", "false", "--save_strategy", "no"]
    printed = run_module(command, "trl_atropos.train", arguments, desk)
    # nothing is sampled
    assert "Sample completions of the last batch" in printed and "probe" not in printed, printed
    assert json.loads((desk / "runs/again/summary.json").read_text())["probe_max_abs_diff"] is None
    assert (desk / "runs/again/model.safetensors").is_file(), command


def run_report(command: Command, desk: Path) -> None:
    cli_main = importlib.import_module("trl_atropos.report.page").main
    cli_main(command.after("report"))
    assert (Path(command.words[2]) / "report.html").is_file(), command


def make_model(command: Command, desk: Path) -> None:
    """In this process, which has imported everything that takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(command.words[1:]))
        runpy.run_path(command.words[1], run_name="__main__")
    assert (desk / command.words[2] / "config.json").is_file(), command


def run_module(command: Command, module: str, arguments: Sequence[str], desk: Path) -> str:
    done = TRAINER.run(["-m", module, *arguments], cwd=desk, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"
    return done.stdout


def run_script(command: Command, desk: Path) -> str:
    words = [sys.executable if word == "python" else word for word in command.words]
    done = subprocess.run(words, cwd=desk, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"
    return done.stdout


def require_extras(command: Command, desk: Path) -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    for extras in re.findall(r"\[([\w,]+)\]", " ".join(command.words)):
        assert set(extras.split(",")) <= set(config["options.extras_require"]), command
    assert all(
        (ROOT / word).is_file() for flag, word in pairwise(command.words) if flag == "--constraint"
    ), command


# What is run here.
HERE = [
    (r"trl-atropos check ", run_check),
    (r"trl-atropos report ", run_report),
    (r"trl-atropos (init|slurm) ", run_command),
    (r"python -m trl_atropos\.train .*--replay_paths ", run_replay),
    (r"python (recipes/quickstart|my_task)/make_model\.py ", make_model),
    (r"python docs/make_reference\.py", run_script),
    (r"(cp -r|sed -i) ", run_script),
    (r"pip install .*-e ", require_extras),
]
