"""Evaluations: what they find, of which policy, and where that goes. Their environments are real
processes."""

import itertools
import json
import math
import re
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
import uvicorn
from starlette.requests import Request
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.forge import WITHOUT_TORCH
from tests.rollout_factory import arguments, make_trainer, record, uniform_batch
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer, train
from trl_atropos.environment_entry import EvaluationSpec
from trl_atropos.errors import EvaluationError
from trl_atropos.protocol import TOKEN_VARIABLE, environment_token
from trl_atropos.recipe import parse
from trl_atropos.server.plane import ControlPlane
from trl_atropos.services import starting
from trl_atropos.services.addresses import free_port
from trl_atropos.services.evaluation_results import Result, interval, measures, pass_at
from trl_atropos.services.evaluations import Evaluator
from trl_atropos.services.manager import Services

ENVIRONMENT = "tests/services/evaluated_environment.py"
WAIT = 120.0  # seconds

# ------------------------------------------------------------------------------------ what is found


@pytest.mark.parametrize(("samples", "passed"), [(5, 0), (5, 2), (6, 6), (7, 1)])
def test_pass_at_k_is_share_of_passing_draws(samples, passed):
    for k in range(1, samples + 1):
        draws = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
        assert pass_at(k, samples, passed) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_interval_widens_for_repeating_samples():
    n, passed = 400, 100
    low, high = interval([1.0] * passed + [0.0] * (n - passed))
    p, z = passed / n, 1.96
    middle = (p + z * z / 2 / n) / (1 + z * z / n)
    width = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
    assert (low, high) == pytest.approx((middle - width, middle + width), rel=5e-3)
    alike = interval([1.0] * 10 + [0.0] * 30)  # ten samples of each of 40 problems, all of one kind
    assert alike[1] - alike[0] > 3 * (high - low) > 0
    assert interval([1.0] * 50)[0] < 0.95 and interval([1.0] * 50)[1] == 1.0


def test_gain_is_paired_by_problem():
    first = {f"{i}": [float(i % 2), 0.0] for i in range(40)}
    later = {problem: [1.0, score[1]] for problem, score in first.items()}
    found = measures(later, 0.5, first)
    gains = [0.5 * (1 - i % 2) for i in range(40)]
    error = 1.96 * statistics.stdev(gains) / math.sqrt(40)
    bounds = found["gain"], found["gain_low"], found["gain_high"]
    assert bounds == pytest.approx((0.25, 0.25 - error, 0.25 + error))
    assert (found["pass@1"], found["pass@2"], found["avg@2"]) == pytest.approx((0.5, 1.0, 0.5))
    assert "gain" not in measures(later, 0.5, {"other": [1.0]})


def test_pass_at_k_is_told_for_powers_of_two():
    scores = {"easy": [1.0, 1.0, 0.0, 1.0, 1.0, 0.0], "hard": [0.0, 0.0, 0.0, 0.0, 1.0]}
    found = measures(scores, 0.5)
    shares = {
        "pass@1": (4 / 6 + 1 / 5) / 2,
        "pass@2": (14 / 15 + 4 / 10) / 2,
        "pass@4": (1 + 4 / 5) / 2,
    }
    expected = shares | {"pass@5": 1.0, "avg@5": (4 / 6 + 1 / 5) / 2}
    assert {
        name: found[name] for name in found if not name.endswith(("_low", "_high"))
    } == pytest.approx(expected)


# --------------------------------------------------------------------------- processes of their own


def evaluator(
    tmp_path: Path, tiny_model: Path, services: Services, *entries: dict, **options
) -> Evaluator:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps(
            {
                "model_name_or_path": str(tiny_model),
                "output_dir": str(tmp_path / "run"),
                "max_steps": 100,
                "use_cpu": True,
                "evaluations": [
                    {"path": ENVIRONMENT, "env": WITHOUT_TORCH, **entry} for entry in entries
                ],
            }
        )
    )
    parsed = parse(["--config", str(recipe)])
    usual = {"folder": tmp_path / "evaluations", "urls": [], "timeout": WAIT}
    return Evaluator(parsed.evaluations, services, parsed.evaluation_command, **usual | options)


def results(evaluator: Evaluator) -> dict[str, Result]:
    deadline, found = time.monotonic() + WAIT, []
    while evaluator.busy():
        found += evaluator.poll()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return {result.name: result for result in found}


@pytest.mark.slow
def test_first_problems_are_asked_failures_are_unsolved(tiny_model, tmp_path, caplog):
    faulty = {
        "config": {"faults": {1: "weight"}, "max_num_workers": 3},
        "problems": 5,
        "samples": 3,
    }
    faulty |= {"passes_above": -0.5}  # where scores are penalties
    entries = [
        {
            "name": "good",
            "problems": 20,
            "samples": 4,
            "config": {"solved": [1, 0], "seconds": 0.05},
        },
        {"name": "faulty", **faulty},
        {"name": "short", "problems": 5, "config": {"faults": {1: "nothing", 3: "no more"}}},
        {"name": "own"},
    ]
    with Services(tmp_path / "logs") as services:
        made = evaluator(tmp_path, tiny_model, services, *entries)
        made.prepare()  # while servers start
        prepared = {name: process.service for name, process in made._processes.items()}
        made.start(0)
        assert {name: process.service for name, process in made._processes.items()} == prepared
        assert made.begin(0, first=True, last=True) == []
        first = results(made)
        services.check()  # that they have ended is no failure of a service
    good = first["good"]
    assert sorted(int(problem.partition(".")[0]) for problem in good.scores) == list(range(20))
    assert (good.metrics["pass@1"], good.metrics["pass@4"], good.metrics["mean_length"]) == (
        0.5,
        1.0,
        2.0,
    )
    assert first["faulty"].metrics["pass@1"] == pytest.approx(4 / 5)
    assert first["faulty"].metrics["failed"] == 1
    assert "KeyError: 'weight'" in caplog.text and "evaluated_environment.py:" in caplog.text
    assert (first["short"].metrics["problems"], first["short"].metrics["pass@1"]) == (2, 1.0)
    assert "has 2 of 5 problems" in caplog.text
    own = first["own"].metrics
    assert (own["percent_correct"], own["seed"]) == (0.25, 0)
    assert [path.name for path in (tmp_path / "evaluations" / "good").iterdir()] == ["step-000000"]


@pytest.mark.slow
def test_failed_evaluation_ends_run_only_if_first(tiny_model, tmp_path, caplog):
    broken = {
        "name": "broken",
        "problems": 3,
        "config": {"faults": dict.fromkeys(range(3), "weight")},
    }
    unset = {"name": "unset", "config": {"faults": {-1: "no data"}}}
    slow = {"name": "slow", "problems": 1, "config": {"seconds": 600}}
    with Services(tmp_path / "logs") as services:
        made = evaluator(tmp_path, tiny_model, services, broken, unset, slow, timeout=10.0)
        made.start(3)
        # imports are over, however busy the machine is
        assert made.ready(3, first=False, last=True, timeout=WAIT)
        made.begin(3, first=False, last=True)
        assert results(made) == {}
    assert (
        "'broken' at step 3 failed: none of 3 problems gave a rollout: KeyError: 'weight'"
        in caplog.text
    )
    assert "'unset' at step 3 failed: it ended with exit code 1" in caplog.text
    assert "'slow' at step 3 failed: it did not end within 10 s (`eval_timeout`)" in caplog.text
    with Services(tmp_path / "logs") as services:
        made = evaluator(tmp_path, tiny_model, services, broken)
        made.start(0)
        made.begin(0, first=True, last=True)
        with pytest.raises(
            EvaluationError, match=r"Evaluation 'broken' at step 0 failed: .*logs/evaluation-broken"
        ):
            results(made)


def test_resumed_run_keeps_only_earlier_evaluations(tiny_model, tmp_path):
    for step in (0, 10, 20):
        folder = tmp_path / "evaluations" / "own" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(vars(scripted("own", step, 0.1))))
    with Services(tmp_path / "logs") as services:
        made = evaluator(tmp_path, tiny_model, services, {"name": "own", "every": 10})
        made.start(10)
        assert made.begin(10, first=False, last=False) == [scripted("own", 10, 0.1)]
        assert made.begin(15, first=False, last=False) == []  # nothing is due
        assert not made.busy()
        left = sorted(path.name for path in (tmp_path / "evaluations" / "own").glob("step*"))
        assert left == ["step-000000", "step-000010"]
        made.begin(20, first=False, last=False)
        assert made.busy(before=21) and not made.busy(before=20)


def test_fresh_run_makes_its_own_first_evaluation(tiny_model, tmp_path):
    """Another run has left its result in the folder, and, since it was killed, what lets an
    evaluation begin."""
    own = tmp_path / "evaluations" / "own"
    former, sign = own / "step-000000", own / "next" / "go"
    for path in (former / "result.json", sign):
        path.parent.mkdir(parents=True)
    (former / "result.json").write_text(json.dumps(vars(scripted("own", 0, 0.1))))
    sign.touch()
    with Services(tmp_path / "logs") as services:
        made = evaluator(tmp_path, tiny_model, services, {"name": "own"})
        made.start(0)
        assert not former.exists() and not sign.exists()
        assert made.begin(0, first=True, last=False) == []
        assert made.busy() and sign.exists()


@pytest.mark.parametrize(("needed", "step"), [(True, 3), (False, 3), (False, 0)])
def test_overdue_evaluation_is_error_only_if_needed(needed, step, tiny_model, tmp_path, caplog):
    told = r"Evaluation 'own' at step \d failed: it did not end within 0 s \(`eval_timeout`\)"
    with Services(tmp_path / "logs") as services:
        made = evaluator(
            tmp_path, tiny_model, services, {"name": "own"}, timeout=0.0, needed=needed
        )
        made.start(step)
        made.begin(step, first=step == 0, last=True)
        late = made._processes["own"].service
        if needed or step == 0:
            with pytest.raises(EvaluationError, match=told):
                made.poll()
        else:
            assert made.poll() == []
            assert re.search(told, caplog.text)
        assert services.exit_code(late) is not None
        assert not made.busy()


class Door(ControlPlane):
    """The routes of a server for who has its token, without an engine behind them."""

    def __init__(self):
        super().__init__()
        self.questions = {("POST", "/evaluation"): self.evaluations.answer}
        self.changes = {}

    async def __call__(self, scope, receive, send) -> None:
        await self.control(Request(scope, receive), send)


@contextmanager
def served(door: Door) -> Iterator[str]:
    """Yields the URL at which it answers."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(door, port=port, lifespan="off", log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + WAIT
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(WAIT)


def test_evaluation_has_version_range_of_all_servers(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    one, other, _idle = doors = [Door() for _ in range(3)]
    one.evaluations.note("evaluation-a", (4, 6))
    other.evaluations.note("evaluation-a", (3, 5))
    with ExitStack() as stack:
        urls = [stack.enter_context(served(door)) for door in doors]
        made = Evaluator([], None, None, tmp_path, urls, WAIT)
        assert made._versions("evaluation-a") == (3, 6)
        assert made._versions("evaluation-b") is None
        assert caplog.text == ""
    assert made._versions("evaluation-a") is None
    assert "Which policy versions sampled an evaluation is unknown: The server at" in caplog.text


# ------------------------------------------------------------------------------------ in a training


def scripted(name: str, step: int, value: float) -> Result:
    return Result(
        name, step, {"pass@1": value, "pass@1_low": 0.0, "pass@1_high": 1.0}, (step, step), 1.0
    )


class Scripted(Evaluator):
    """Finds `values` by step, each after it was asked `patience` times."""

    def __init__(self, values: dict[int, float], patience: int = 1):
        super().__init__(
            [EvaluationSpec(path=ENVIRONMENT, name="task", every=2)], None, None, "", [], 1.0
        )
        self.values, self.patience, self.begun = values, patience, []
        self.left: dict[int, int] = {}

    def start(self, step):
        self.begun.append(f"start {step}")

    def begin(self, step, first, last):
        self.begun.append(step)
        self.left[step] = self.patience
        return []

    def poll(self):
        self.left = {step: left - 1 for step, left in self.left.items()}
        ended = [
            scripted("task", step, self.values[step])
            for step, left in self.left.items()
            if left <= 0
        ]
        self.left = {step: left for step, left in self.left.items() if left > 0}
        return ended

    def busy(self, before=math.inf):
        return any(step < before for step in self.left)


def trainer_of(tiny_model, tmp_path, evaluator: Evaluator, **settings) -> AtroposGRPOTrainer:
    recording = record(
        tmp_path / "rollouts.jsonl", *(uniform_batch(tiny_model, 4, 2, seed) for seed in range(6))
    )
    usual = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    config = AtroposGRPOConfig(
        **arguments(tmp_path / "run", replay_paths=[recording], **usual | settings)
    )
    return AtroposGRPOTrainer(str(tiny_model), args=config, evaluator=evaluator)


def logged(trainer: AtroposGRPOTrainer) -> dict[int, float]:
    return {
        e["step"]: e["eval_task_pass@1"]
        for e in trainer.state.log_history
        if "eval_task_pass@1" in e
    }


VALUES = {0: 0.1, 2: 0.5, 4: 0.3, 6: 0.2}


def tokens_of_a_run(tiny_model: Path, folder: Path) -> tuple[str, str]:
    """The control token that a run's servers would be started with, and the one that its
    evaluations ask them with, if the environment has none."""
    asked_with = []

    def note_token(recipe, services, evaluator, callbacks) -> None:
        asked_with.append(evaluator._servers[0].token)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, "another run's")  # so that it is put back
        patch.delenv(TOKEN_VARIABLE)
        patch.setattr(starting, "start_services", lambda *run: None)
        patch.setattr(train, "train", note_token)
        train.run(parsed(tiny_model, folder, [ENTRY], start_vllm=True))
        return environment_token(), asked_with[0]


def test_server_token_exists_before_any_request(tiny_model, tmp_path):
    served, asked_with = tokens_of_a_run(tiny_model, tmp_path)
    assert len(served) > 20 and asked_with == served


def test_result_is_logged_at_step_of_its_weights(tiny_model, tmp_path):
    made = Scripted(VALUES, patience=3)
    trainer = trainer_of(tiny_model, tmp_path, made)
    trainer.train()
    assert made.begun == ["start 0", 0, 2, 4, 6]
    assert logged(trainer) == VALUES
    steps = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert steps == list(range(1, 7))  # training has logged what it always does
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "run_log.jsonl").read_text().splitlines()
    ]
    assert {
        line["step"]: line["metrics"]["pass@1"] for line in lines if "evaluation" in line
    } == VALUES


@pytest.mark.parametrize("experts", [False, True])
def test_best_checkpoint_is_loaded(tiny_model, tmp_path, experts):
    """Experts are saved under other names than the model has."""
    model = tiny_model
    if experts:
        model = tmp_path / "experts"
        shutil.copytree(tiny_model, model)
        config = json.loads((tiny_model / "config.json").read_text())
        sizes = {name: config[name] for name in ("vocab_size", "eos_token_id", "pad_token_id")}
        sizes |= {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        sizes |= {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 4,
            "moe_intermediate_size": 32,
        }
        sizes |= {"num_experts_per_tok": 2}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(model)
    settings = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    trainer = trainer_of(
        *(model, tmp_path, Scripted(VALUES, 3)),
        metric_for_best_model="eval_task_pass@1",
        **settings,
    )
    assert trainer.args.eval_hold
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    now = trainer.model.state_dict()
    best, last = (
        type(trainer.model).from_pretrained(tmp_path / "run" / f"checkpoint-{step}").state_dict()
        for step in (2, 6)
    )
    assert all(torch.equal(now[name], value) for name, value in best.items())
    assert any(not torch.equal(now[name], value) for name, value in last.items())


def test_checkpoint_waits_for_earlier_evaluations(tiny_model, tmp_path):
    """A run that resumes there has other weights than theirs."""
    made = Scripted(VALUES, patience=10**9)
    trainer = trainer_of(
        tiny_model, tmp_path, made, save_strategy="steps", save_steps=3, max_steps=4
    )
    poll, seen = made.poll, []

    def watched():
        if made.busy():
            seen.append((trainer.state.global_step, dict(made.left)))
            made.left = dict.fromkeys(made.left, 0 if len(seen) > 3 else 9)
        return poll()

    made.poll = watched
    trainer.train()
    assert logged(trainer) == {step: VALUES[step] for step in (0, 2, 4)}
    checkpoint = json.loads((tmp_path / "run" / "checkpoint-3" / "trainer_state.json").read_text())
    assert [e["step"] for e in checkpoint["log_history"] if "eval_task_pass@1" in e] == [0, 2]


def test_evaluation_needs_evaluator_and_training(tiny_model, tmp_path):
    with pytest.raises(
        ValueError, match=r"`eval_strategy` is set: list `evaluations` in the recipe"
    ):
        make_trainer(
            tiny_model,
            tmp_path,
            uniform_batch(tiny_model, 4, 2, 0),
            eval_strategy="steps",
            eval_steps=1,
        )
    trainer = trainer_of(tiny_model, tmp_path, Scripted(VALUES))
    with pytest.raises(RuntimeError, match="use `trl-atropos eval`"):
        trainer.evaluate()


# --------------------------------------------------------------------------------------- the recipe

ENTRY = {"path": ENVIRONMENT, "problems": 3}


def parsed(tiny_model: Path, folder: Path, entries: list, **settings):
    path = folder / "recipe.yaml"
    usual = {
        "model_name_or_path": str(tiny_model),
        "output_dir": str(folder / "run"),
        "max_steps": 50,
        "use_cpu": True,
    }
    path.write_text(json.dumps(usual | settings | ({"evaluations": entries} if entries else {})))
    return parse(["--config", str(path)])


def test_every_of_an_evaluation_wins_over_eval_steps(tiny_model, tmp_path):
    settings = {
        "metric_for_best_model": "eval_evaluated_environment_pass@1",
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    recipe = parsed(tiny_model, tmp_path, [{**ENTRY, "every": 4}], **settings)
    assert recipe.training.eval_steps == 4


def test_eval_steps_fit_every_evaluation_interval(tiny_model, tmp_path):
    entries = [
        {**ENTRY, "name": "a", "every": 6},
        {**ENTRY, "name": "b", "every": 4},
        {**ENTRY, "name": "c"},
    ]
    training = parsed(tiny_model, tmp_path, entries).training
    assert (training.eval_strategy, training.eval_steps, training.eval_on_start) == (
        "steps",
        2,
        True,
    )
    recipe = parsed(tiny_model, tmp_path, entries, eval_strategy="steps", eval_steps=0.2)
    assert [spec.every for spec in recipe.evaluations] == [6, 4, 10]
    # as a command line gives it
    each = parsed(tiny_model, tmp_path, [ENTRY], eval_strategy="steps", eval_steps=1.0)
    assert (each.training.eval_steps, each.evaluations[0].every) == (1, 1)
    only_ends = parsed(tiny_model, tmp_path, [ENTRY])
    assert (only_ends.training.eval_steps, only_ends.evaluations[0].every) == (50, None)
