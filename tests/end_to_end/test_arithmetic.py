"""The recipe of arithmetic: its problems, its reward, and that training on it helps with problems
never seen."""

import asyncio
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import yaml

from recipes.arithmetic.environment import (
    TEST_SIZE,
    ArithmeticConfig,
    ArithmeticEnv,
    problems,
    score,
    value,
    worked,
)
from tests import ROOT
from tests.launching import Run

FOLDER = ROOT / "recipes/arithmetic"
SIZES = [{}, {"terms": 3}, {"terms": 6, "digits": 2}]


@pytest.mark.parametrize("size", SIZES)
def test_training_asks_no_problem_of_test_split(size):
    test = list(islice(problems("test", **size), TEST_SIZE))
    assert len(set(test)) == TEST_SIZE
    for seed in (0, 1, 42):
        assert set(test).isdisjoint(islice(problems("train", **size, seed=seed), 20_000))


def test_test_split_is_fixed_and_seed_draws_training():
    def first(split: str, seed: int) -> list[str]:
        return list(islice(problems(split, seed=seed), 2 * TEST_SIZE))

    assert first("test", 1) == first("test", 2) == first("test", 1)[:TEST_SIZE] * 2
    assert first("train", 1) == first("train", 1) != first("train", 2)


@pytest.mark.parametrize("size", SIZES)
def test_worked_steps_equal_their_problem(size):
    for problem in islice(problems("train", **size), 500):
        steps = worked(problem).split("=")
        assert len(steps) == size.get("terms", 4) and {eval(step) for step in steps} == {
            eval(problem)
        }
        assert score(f"{problem}=", worked(problem)) == score(f"{problem}=", value(problem)) == 1.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("42", 1.0),
        ("9+21+8+4=30+8+4=38+4=42", 1.0),
        ("1=2=42", 1.0),  # only the last number counts
        ("43", 0.0),
        ("9+21+8+4=30+8+4=38+4=43", 0.0),
        ("42=43", 0.0),
        ("42=", 0.0),
        ("38+4", 0.0),
        ("042", 0.0),
        ("42+", 0.0),
        ("+42", 0.0),
        ("420", 0.0),
        (" 42", 0.0),
        ("42\n", 0.0),
        ("four", 0.0),
        ("", 0.0),
    ],
)
def test_last_number_counts_as_answer(completion, reward):
    assert score("9+3*7+8+4=", completion) == reward


@pytest.mark.parametrize("split", ["train", "test"])
def test_environment_asks_problems_of_its_split(split):
    environment = object.__new__(ArithmeticEnv)  # without a server
    environment.config = ArithmeticConfig(split=split, terms=3, digits=2, seed=7)

    async def asked() -> list[str]:
        await environment.setup()
        return [(await environment.get_next_item())["prompt"] for _ in range(20)]

    assert asyncio.run(asked()) == [
        f"{one}=" for one in islice(problems(split, terms=3, digits=2, seed=7), 20)
    ]


# Saves the recipe's model without any training.
UNTRAINED = """
import sys
sys.path.insert(0, sys.argv[1])
from make_model import SIZES, make_tokenizer, new_model
tokenizer = make_tokenizer()
new_model(SIZES["cpu"], tokenizer).save_pretrained(sys.argv[2])
tokenizer.save_pretrained(sys.argv[2])
"""


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("arithmetic") / "model"
    subprocess.run([sys.executable, "-c", UNTRAINED, FOLDER, folder], check=True, timeout=100)
    return folder


def compare(*words: str | Path) -> None:
    subprocess.run(
        [sys.executable, FOLDER / "compare.py", *words], cwd=ROOT, check=True, timeout=600
    )


def train(model: Path, folder: Path, steps: int) -> None:
    flags = ("--max_steps", str(steps), "--save_steps", str(steps))
    with Run(folder / "run", model, recipe="recipes/arithmetic/colocate.yaml", flags=flags) as run:
        run.child.wait(900)
    assert run.exit_code() == 0, run.output[-3000:]
    assert json.loads((folder / "run/summary.json").read_text())["steps"] == steps


@pytest.mark.full
@pytest.mark.server
@pytest.mark.slow(60)
def test_recipe_trains(untrained, tmp_path):
    train(untrained, tmp_path, steps=3)


@pytest.mark.full
@pytest.mark.server
@pytest.mark.slow(400)
def test_model_gets_better_at_problems_never_seen(tmp_path):
    # With fewer steps of pre-training, it depends on the seed whether it has learned to carry.
    model = tmp_path / "model"
    subprocess.run([sys.executable, FOLDER / "make_model.py", model], check=True, timeout=900)
    train(model, tmp_path, steps=20)
    compare("draw", tmp_path / "curve.svg", "--curve", "ours", tmp_path / "run", "--model", model)
    before, after = json.loads((tmp_path / "run/curve.json").read_text())
    assert (before["step"], after["step"], after["rollouts"]) == (0, 20, 20 * 64)
    assert 0.2 < before["pass@1"] < 0.5
    # in the first 20 of 150 steps it is 0.5 with every seed
    assert after["pass@1"] > before["pass@1"] + 0.2


@pytest.mark.full
@pytest.mark.slow(60)
def test_trl_trainer_runs_beside_ours(untrained, tmp_path):
    compare("trl", tmp_path / "run", "--model_name_or_path", untrained, "--max_steps", "2")
    compare(
        "draw",
        tmp_path / "curve.svg",
        "--curve",
        "GRPOTrainer",
        tmp_path / "run",
        "--model",
        untrained,
    )
    _, after = json.loads((tmp_path / "run/curve.json").read_text())
    assert (after["step"], after["rollouts"]) == (2, 2 * 64) and 0 < after["seconds"] < 60
    assert "GRPOTrainer" in (tmp_path / "curve.svg").read_text()
    logs = [json.loads(line) for line in (tmp_path / "run/run_log.jsonl").read_text().splitlines()]
    config = next(record["config"] for record in logs if "config" in record)
    recipe = yaml.safe_load((FOLDER / "colocate.yaml").read_text())
    shared = {"per_device_train_batch_size", "learning_rate", "loss_type", "max_completion_length"}
    assert {name: config[name] for name in shared} == {name: recipe[name] for name in shared}
