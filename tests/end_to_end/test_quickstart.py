"""The main job as a user starts it, from the first command to what it leaves behind. Real services,
nothing small."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests import ROOT
from tests.forge import FORKED_ENGINES
from tests.launching import Run, free_urls, make_model, users_environment
from tests.report.browser import Browser, find_browser
from tests.tiers import FULL
from trl_atropos.report.page import build
from trl_atropos.rollouts.spool import read_rollouts
from trl_atropos.services.evaluation_results import read_result

pytestmark = [pytest.mark.server, pytest.mark.slow(200)]
QUICKSTART = yaml.safe_load((ROOT / "recipes/quickstart/colocate.yaml").read_text())
# The recipe's steps, or those after which most of the task is learned.
STEPS = 300 if FULL else 200
LEARNED = 0.8 if FULL else 0.5
TWO_TURNS = (
    "{python} tests/end_to_end/two_turn_environment.py serve --slurm false --env.rollout_server_url "
    "{atropos_url} --env.tokenizer_name {model} --openai.base_url {vllm_url}/v1 "
    "--openai.model_name {model} --env.group_size "
)


def train(folder: Path, *flags: str, **changes) -> str:
    """Runs the quickstart's recipe with `changes` and `flags`; returns what it printed. It must succeed and
    leave nothing."""
    if not (folder / "model").exists():
        make_model(folder / "model")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**QUICKSTART, **changes}))
    # pytest's own folders are too long for sockets
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        env = {"TMPDIR": short} | (FORKED_ENGINES if changes else {})
        run = Run(folder / "run", folder / "model", recipe=str(path), flags=flags, env=env)
        with run:
            run.child.wait(900)
            left = run.shared_files()
        # Torch's cache of compiled kernels is kept, one for all runs.
        left += [name for name in os.listdir(short) if not name.startswith("torchinductor_")]
    output = run.output
    assert run.exit_code() == 0, output[-3000:]
    assert left == []
    return output


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> tuple[Path, str]:
    """Folder of the quickstart, and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    return folder, train(folder, "--max_steps", str(STEPS))


def test_quickstart_learns_its_task(learned):
    folder, output = learned
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["reward_first"] <= 0.1
    assert summary["reward_last"] >= LEARNED
    assert 0 < summary["probe_max_abs_diff"] <= 1e-4
    assert len(re.findall(rf"step +\d+/{STEPS}  reward", output)) == STEPS // 10
    # a text that holds one quote is put between the other
    samples = r"""^  (['"]).*\1 -> (['"]).*\2  \d\.\d{3}$"""
    assert len(re.findall(samples, output, re.MULTILINE)) == 6
    assert (folder / "run" / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    assert f"Reward curve: {folder}/run/reward_curve.png" in output
    card = (folder / "run" / "README.md").read_text()
    assert "## Atropos run" in card
    assert "python recipes/quickstart/environment.py serve" in card
    model = AutoModelForCausalLM.from_pretrained(folder / "run", dtype=torch.float32)
    # every prompt of the task, such as "cab=": all letters but one are learned now and then
    prompts = torch.tensor([[*letters, 28] for letters in product(range(64, 72), repeat=3)])
    answers = model(prompts).logits[:, -1].argmax(dim=-1)
    right = answers == prompts[:, 0]
    assert right.float().mean() >= LEARNED


@pytest.mark.skipif(find_browser() is None, reason="no Chromium on this machine")
def test_report_shows_every_rollout_and_its_step(learned, tmp_path):
    folder, output = learned
    assert f"All of it on one page: trl-atropos report {folder}/run" in output
    (tmp_path / "report.html").write_text(build(folder / "run")[0])
    browser = Browser(find_browser())
    page = browser.page()
    page.open(tmp_path / "report.html")
    assert f"Steps{STEPS} of {STEPS}" in page.evaluate(
        "document.getElementById('tiles').textContent"
    )
    page.fill("step_from", str(STEPS))
    page.fill("step_to", str(STEPS))
    shown = re.match(r"(\d+) of ", page.evaluate("document.getElementById('count').textContent"))
    assert int(shown[1]) >= 8 and int(shown[1]) % 8 == 0  # whole groups of the 64 rollouts
    page.click("#list [data-row='0']")
    page.wait_for_element("#detail .tokens")
    assert page.evaluate("document.querySelector('.part.prompt .t:last-child').textContent") == "="
    page.click("#detail input[value=gap]")
    facts = page.evaluate("document.querySelector('#detail .facts').textContent")
    largest = re.search(r"Trainer–sampler gapmean [^ ]+, largest ([^ ]+) nats", facts)[1]
    assert float(largest.replace("−", "-")) < 0.5  # a version old at most
    assert page.errors == []
    browser.close()


def evaluate_alone(folder: Path, checkpoint: Path) -> Path:
    """Runs `trl-atropos eval` on a checkpoint. Returns the folder of its results."""
    atropos, vllm = free_urls(2)
    # fmt: off
    command = [
        sys.executable, "-m", "trl_atropos.cli", "eval", "--config", str(folder / "recipe.yaml"),
        "--checkpoint", str(checkpoint), "--model_name_or_path", str(folder / "model"),
        "--output_dir", str(folder / "alone"), "--atropos_url", atropos, "--vllm_server_base_url", vllm,
    ]
    # fmt: on
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        env = users_environment() | FORKED_ENGINES | {"TMPDIR": short}
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{checkpoint}: letters: pass@1" in done.stdout
    return folder / "alone/eval" / checkpoint.name / "evaluations/letters"


@pytest.mark.full  # most of it is what `test_as_users.py` does
def test_run_with_foreign_environments_is_resumed(tmp_path):
    """Two turns, so that masks have holes, in groups of four and of eight from two environments;
    and evaluations, greedy ones, which equal those of the saved checkpoints."""
    environments = [
        {"name": name, "command": TWO_TURNS + size}
        for name, size in (("fours", "4"), ("eights", "8"))
    ]
    settings = {
        "environments": environments,
        "per_device_train_batch_size": 16,
        "max_completion_length": 64,
    }
    settings |= {"save_strategy": "steps", "save_steps": 4, "logging_steps": 1}
    asked = {"path": "recipes/quickstart/environment.py", "name": "letters", "problems": 6}
    settings["evaluations"] = [asked | {"temperature": 0.0, "passes_above": 0.0, "every": 6}]
    # else a publish may come before the first problem of step 6 is asked
    settings["eval_hold"] = True
    train(tmp_path, max_steps=4, **settings)
    run = tmp_path / "run"
    (run / "checkpoint-6").mkdir()  # of a run that was killed while it saved
    output = train(tmp_path, max_steps=12, resume_from_checkpoint=True, **settings)
    state = json.loads((run / "checkpoint-12" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "reward" in entry] == list(
        range(1, 13)
    )
    assert re.search(r"step +5/12", output)
    assert not re.search(r"step +4/12", output)
    assert "Passed over" in output
    moments = torch.load(run / "checkpoint-12" / "optimizer.pt", weights_only=True)["state"]
    assert {int(entry["step"]) for entry in moments.values()} == {12}
    versions = [entry["policy/version"] for entry in state["log_history"] if "reward" in entry]
    assert versions == list(range(12))  # of the weights that each step began with
    # The recipe's level and not TRL's, which hides what the server refuses to sample.
    assert " WARNING " in (run / "logs" / "vllm.log").read_text()
    rollouts = [
        rollout for path in (run / "rollouts").glob("*.arrow") for rollout in read_rollouts(path)
    ]
    assert set(Counter(rollout.group for rollout in rollouts).values()) == {4, 8}
    turns = {
        re.sub(r"(.)\1+", r"\1", "".join(".T"[trained] for trained in one.mask.tolist()))
        for one in rollouts
    }
    assert turns == {"T.T"}
    found = {e["step"]: e for e in state["log_history"] if "eval_letters_pass@1" in e}
    assert list(found) == [0, 4, 6, 12]  # 4 was the last step of the first run
    assert all(e["eval_letters_oldest_version"] == step for step, e in found.items())
    assert (
        found[0]["eval_letters_newest_version"] == 0
        and found[12]["eval_letters_newest_version"] == 12
    )
    assert len([e for e in state["log_history"] if "eval_letters_pass@1" in e]) == len(found)
    assert output.count("Evaluated letters") >= 2
    alone = read_result(evaluate_alone(tmp_path, run / "checkpoint-12") / "step-000012")
    trained = read_result(run / "evaluations/letters/step-000012")
    assert alone.scores == trained.scores
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 12
    assert 0 < summary["probe_max_abs_diff"] <= 1e-4
