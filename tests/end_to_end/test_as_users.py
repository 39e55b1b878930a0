"""A run that a user starts, interrupts, resumes and looks at, from a shell that has only `PATH` and
`HOME`.

It has an environment in each of Atropos' two styles, and an evaluation of each: one of partial
scores, one of 0 and 1.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.forge import FORKED_ENGINES, WITHOUT_TORCH
from tests.launching import Run, command_of, free_urls, make_model
from tests.report.browser import Browser, find_browser
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.spool import read_rollouts
from trl_atropos.weights.checkpoint import whole_checkpoints

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow(120),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
BIN = Path(sys.executable).parent
SHELL = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/root")}
STEPS = 16
BATCH = 16
EVALUATED = [0, 8, 16]
GONE_WITHIN = 80.0  # seconds
RUN_WITHIN = 400.0
# has a `collect_trajectories` of its own, and partial scores
BY_GROUP = "recipes/quickstart/environment.py"
# has only `collect_trajectory`, and scores of 0 and 1
ONE_BY_ONE = "tests/end_to_end/one_by_one_environment.py"
ENVIRONMENTS = ("by_group", "one_by_one")


def write_recipe(folder: Path) -> Path:
    atropos_url, vllm_url = free_urls(2)
    by_group = {"path": BY_GROUP, "env": WITHOUT_TORCH}
    one_by_one = {"path": ONE_BY_ONE, "env": WITHOUT_TORCH}
    recipe = {
        "model_name_or_path": str(make_model(folder / "model")),
        "output_dir": str(folder / "run"),
        "start_atropos": True,
        "start_vllm": True,
        "atropos_url": atropos_url,
        "vllm_server_base_url": vllm_url,
        "vllm_mode": "colocate",
        "vllm_args": ["--max-model-len", "512"],
        "environments": [
            by_group | {"name": "by_group"},
            one_by_one | {"name": "one_by_one"},
        ],
        "evaluations": [
            # So many that some letters are right of a model that has learned nothing.
            by_group | {"name": "partial", "problems": 32, "samples": 4, "every": 8},
            one_by_one | {"name": "passes", "problems": 6, "samples": 2, "every": 8},
        ],
        "max_steps": STEPS,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": BATCH,
        "max_completion_length": 12,
        "learning_rate": 5e-4,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "env": {"VLLM_CPU_KVCACHE_SPACE": 1},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@dataclass
class Told:
    """What a command showed, the code that it ended with, and what was left of its processes."""

    output: str
    code: int
    left: list[str]
    knew_token: list[str]  # commands of its processes that had the token in their variables


def train(
    recipe: Path,
    folder: Path,
    *flags: str,
    stop_at: Path | None = None,
    env: dict[str, str] | None = None,
) -> Told:
    """Types `trl-atropos train` into a terminal, and Ctrl-C when there is a file `stop_at`."""
    command = [str(BIN / "trl-atropos"), "train", str(recipe), *flags]
    model = folder.parent / "model"
    with Run(folder, model, command=command, env=env, shell=SHELL, terminal=True) as run:
        launcher = run.launcher
        knew_token = []
        if stop_at is not None:
            run.until(stop_at.exists, f"{stop_at} is there", RUN_WITHIN)
            knew_token = those_with_token(run)
            run.type("\x03")
        deadline = time.monotonic() + (GONE_WITHIN if stop_at else RUN_WITHIN)
        while launcher in run.processes():
            assert time.monotonic() < deadline, run.output[-6000:]
            time.sleep(0.1)
        left = run.left()
        return Told(run.output, run.exit_code(), left, knew_token)


def those_with_token(run: Run) -> list[str]:
    """Command lines of the run's processes whose variables have the control token."""
    token = run.token().encode()
    assert len(token) > 20
    commands = []
    for pid in run.processes():
        with contextlib.suppress(OSError):  # it has ended
            if token in Path(f"/proc/{pid}/environ").read_bytes():
                commands.append(command_of(pid))
    return commands


@dataclass
class Story:
    """Everything that the user has after the last command."""

    folder: Path
    interrupted: Told
    resumed: Told
    report: subprocess.CompletedProcess
    checkpoint: int  # step of the last one when the first command had ended

    def records(self, key: str) -> list[dict[str, Any]]:
        lines = (self.folder / "run_log.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if key in record]


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> Story:
    home = tmp_path_factory.mktemp("as_users")
    recipe, folder = write_recipe(home), home / "run"
    interrupted = train(recipe, folder, stop_at=folder / "checkpoint-4" / "trainer_state.json")
    checkpoint = max(whole_checkpoints(str(folder)))
    # What a shell of a user starts was seen in the first run; this one starts sooner.
    resumed = train(recipe, folder, "--resume_from_checkpoint", "true", env=FORKED_ENGINES)
    command = [str(BIN / "trl-atropos"), "report", str(folder)]
    report = subprocess.run(
        command, cwd=ROOT, env=SHELL, capture_output=True, text=True, timeout=120, check=False
    )
    return Story(folder, interrupted, resumed, report, checkpoint)


def test_ctrl_c_ends_run_and_leaves_no_process(story):
    after = story.interrupted.output.partition("^C")[2]
    assert story.interrupted.code == 130
    assert story.interrupted.left == []
    assert "Traceback" not in story.interrupted.output
    services = ["atropos", "vllm", *(f"environment-{name}" for name in ENVIRONMENTS)]
    assert [name for name in services if f"Stopped {name} in " not in after] == []
    assert story.checkpoint < STEPS
    farewell = re.search(r"trl_atropos: Interrupted \(SIGINT\)\. .*", after)
    assert f"checkpoint-{story.checkpoint}, of {STEPS} steps" in farewell[0]
    assert "`--resume_from_checkpoint true`" in farewell[0]


def test_programs_of_run_inherit_no_token(story):
    """Only the server's guard and its API process have it, which close themselves to agents."""
    assert len(story.interrupted.knew_token) == 2
    assert all(" trl_atropos.server.launch " in text for text in story.interrupted.knew_token)


def test_run_goes_on_at_step_of_checkpoint(story):
    assert (story.resumed.code, story.resumed.left) == (0, [])
    assert "Traceback" not in story.resumed.output
    assert "were not passed to `accelerate launch`" not in story.resumed.output
    assert f"Mean reward since step {story.checkpoint}: " in story.resumed.output
    assert [record["begin"] for record in story.records("begin")] == [0, story.checkpoint]
    assert [record["end"] for record in story.records("end")] == [STEPS]
    first = re.search(rf"step +(\d+)/{STEPS}", story.resumed.output)
    assert int(first[1]) == story.checkpoint + 1


def test_rollouts_are_all_trained_exactly_once(story):
    rollouts: dict[int, Rollout] = {}
    for path in (story.folder / "rollouts").glob("rows-*.arrow"):
        start = int(path.stem.removeprefix("rows-"))
        rollouts |= {start + offset: rollout for offset, rollout in enumerate(read_rollouts(path))}
    lives = story.records("begin") + story.records("batch")
    resumed_at = story.records("begin")[1]["at"]
    # Steps after the checkpoint, which the first command had begun, are gone with its weights.
    kept = [
        record
        for record in lives
        if "batch" in record
        and (record["at"] > resumed_at or record["batch"][1] <= story.checkpoint)
    ]
    assert [record["batch"] for record in kept] == [[step, step] for step in range(1, STEPS + 1)]
    trained = list(chain.from_iterable(range(*span) for record in kept for span in record["rows"]))
    assert trained == list(range(STEPS * BATCH))
    sampled = {(*rollouts[row].completion_ids, *rollouts[row].logprobs) for row in trained}
    assert len(sampled) == STEPS * BATCH
    assert kept[-1]["books"] == {"trained": STEPS * BATCH, "dropped": {}, "lost_with_api": 0}


def test_rollouts_of_both_styles_know_policy_version(story):
    logs = [record["logs"] for record in story.records("logs") if "reward" in record["logs"]]
    assert {log["health/unknown_version"] for log in logs} == {0.0}
    assert {
        log["rollouts/unknown_logprobs"] for log in logs if "rollouts/unknown_logprobs" in log
    } == {0.0}
    for environment in ENVIRONMENTS:
        assert sum(log.get(f"rollouts/rows_env_{environment}", 0.0) for log in logs) > 0
    rollouts = [
        rollout
        for path in (story.folder / "rollouts").glob("rows-*.arrow")
        for rollout in read_rollouts(path)
    ]
    assert set(Counter(rollout.group for rollout in rollouts).values()) == {8, 4}
    assert [rollout for rollout in rollouts if rollout.policy_version is None] == []


def test_parts_and_metrics_of_environment_are_logged_and_in_the_card(story):
    logs = [record["logs"] for record in story.records("logs") if "reward" in record["logs"]]
    odd = [log["reward/odd"] for log in logs if "reward/odd" in log]
    assert len(odd) > 1 and 0 < sum(odd) < len(odd)  # in batches that have any of its rollouts
    assert all(0 < log["reward/repeats"] <= 1 for log in logs if "reward/odd" in log)
    answers = [log.get("environment/one_by_one/train/answers", 0.0) for log in logs]
    assert max(answers) >= 4
    parted = [
        rollout
        for path in (story.folder / "rollouts").glob("rows-*.arrow")
        for rollout in read_rollouts(path)
        if rollout.rewards is not None
    ]
    assert {rollout.environment for rollout in parted} == {"one_by_one"}
    assert all(rollout.rewards["odd"] == rollout.score for rollout in parted)
    card = (story.folder / "README.md").read_text()
    assert re.search(r"\n- `odd`: \S+ at the first log, \S+ at the last\n", card)
    assert "\n- `one_by_one/train/answers`: " in card


def test_evaluations_know_their_policy_versions(story):
    found = [(record["evaluation"], record["step"]) for record in story.records("evaluation")]
    assert sorted(found) == [(name, step) for name in ("partial", "passes") for step in EVALUATED]
    for record in story.records("evaluation"):
        oldest, newest = record["versions"]
        assert oldest == record["step"] <= newest
        assert newest == oldest or record["step"] not in (0, STEPS)
    assert "policy version" not in story.interrupted.output + story.resumed.output


def test_mean_leads_for_partial_scores_else_pass_at_1(story):
    card = (story.folder / "README.md").read_text()
    shown = story.interrupted.output + story.resumed.output
    for text, times in ((shown, len(EVALUATED)), (card, 1)):
        assert (
            len(
                re.findall(
                    r"partial: mean score \S+ .*; pass@1 \S+ \(scores above 0\.5\) \(step", text
                )
            )
            >= times
        )
        assert len(re.findall(r"passes: pass@1 \S+ \[.*\].* \(step", text)) >= times
        assert "passes: mean" not in text


@pytest.mark.skipif(find_browser() is None, reason="no Chromium on this machine")
def test_report_names_environments_and_evaluations(story):
    assert (story.report.returncode, story.report.stderr) == (0, "")
    assert f"{story.folder}/report.html" in story.report.stdout
    browser = Browser(find_browser())
    page = browser.page()
    page.open(story.folder / "report.html")
    tiles = page.evaluate("document.getElementById('tiles').textContent")
    assert page.errors == []
    browser.close()
    assert f"Environments{', '.join(sorted(ENVIRONMENTS))}" in tiles
    assert f"Steps{STEPS} of {STEPS}" in tiles
    assert "Evaluation partial, mean score" in tiles
    assert "Evaluation passes, pass@1" in tiles
