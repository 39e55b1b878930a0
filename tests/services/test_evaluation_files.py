"""What evaluations leave on disk, and that nothing in it ends a training: odd answers, torn files,
a full disk."""

import contextlib
import io
import json
import logging
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.rollouts import malformed, oracle
from trl_atropos import activity
from trl_atropos.environment_entry import EvaluationSpec
from trl_atropos.errors import EvaluationError
from trl_atropos.services.evaluation_results import Result, read_answers, read_result, results_of
from trl_atropos.services.evaluations import Evaluator
from trl_atropos.services.manager import Services

PROBLEMS, SAMPLES = 4, 2
NOTHING_READ = object()


class Ended:
    """Services that have ended with exit code 0 as soon as they were started."""

    def start(self, name, command, **options):
        return SimpleNamespace(log_path=Path("logs", f"{name}.log"))

    def exit_code(self, service) -> int:
        return 0

    def end(self, service) -> None:
        pass


def evaluator(
    folder: Path, *, asks: bool = True, services=None, command=(), step=4, **options
) -> Evaluator:
    asked = {"problems": PROBLEMS, "samples": SAMPLES} if asks else {}
    spec = EvaluationSpec(path="task.py", name="task", every=1, **asked)
    words = [sys.executable, "-I", "-S", *command]
    usual = {"folder": folder, "urls": [], "timeout": 60.0}
    made = Evaluator(
        [spec],
        services or Ended(),
        lambda spec, place, key: [*words, str(place)],
        **usual | options,
    )
    made.start(step)
    return made


def evaluated(made: Evaluator, step: int, files: dict[str, bytes]) -> list[Result]:
    """What an evaluation that leaves these files finds."""
    made.begin(step, first=step == 0, last=False)
    for name, content in files.items():
        (made._processes["task"].folder / name).write_bytes(content)
    return made.poll()


def group(**changes) -> dict:
    tokens = [[7, 8, 9], [7, 8, 10]]
    whole = {"tokens": tokens, "masks": [[-100, -100, 9], [-100, -100, 10]], "scores": [1.0, 0.0]}
    return {name: value for name, value in (whole | changes).items() if value is not NOTHING_READ}


def lines(*contents: dict) -> bytes:
    return "".join(json.dumps(content) + "\n" for content in contents).encode()


def second(**changes) -> bytes:
    """A good line, and one whose group has these changes."""
    return lines({"item": 0, "groups": [group()]}, {"item": 1, "groups": [group(**changes)]})


GOOD = lines({"item": 0, "groups": [group()]})
ODD_ANSWERS = {
    "a score of null": second(scores=[None, 0.0]),
    "a score that is text": second(scores=["1", 0.0]),
    "a score that is a list": second(scores=[[1.0], 0.0]),
    "a score that is true": second(scores=[True, 0.0]),
    "a score of NaN": second(scores=[float("nan"), 0.0]),
    "an infinite score": second(scores=[float("inf"), 0.0]),
    "a score too large for float32": second(scores=[1e300, 0.0]),
    "a score of 400 digits": second(scores=[10**400, 0.0]),
    "one score": second(scores=[1.0]),
    "scores that are a number": second(scores=1.0),
    "no scores": second(scores=NOTHING_READ),
    "empty tokens": second(tokens=[], masks=[], scores=[]),
    "tokens of null": second(tokens=None),
    "a token that is text": second(tokens=[["7", 8, 9], [7, 8, 10]]),
    "a negative token": second(tokens=[[-7, 8, 9], [7, 8, 10]]),
    "no tokens": second(tokens=NOTHING_READ),
    "no masks": second(masks=NOTHING_READ),
    "one mask": second(masks=[[-100, -100, 9]]),
    "a mask that is too short": second(masks=[[-100, 9], [-100, -100, 10]]),
    "a mask of other tokens": second(masks=[[0, 0, 1], [-100, -100, 10]]),
    "a group of null": lines({"item": 0, "groups": [group()]}, {"item": 1, "groups": [None]}),
    "groups that are a mapping": lines(
        {"item": 0, "groups": [group()]}, {"item": 1, "groups": {"a": 1}}
    ),
    "groups of null": lines({"item": 0, "groups": [group()]}, {"item": 1, "groups": None}),
    "neither groups nor an error": lines({"item": 0, "groups": [group()]}, {"item": 1}),
    "groups and an error": lines(
        {"item": 0, "groups": [group()]}, {"item": 1, "groups": [], "error": "E"}
    ),
    "an error that is a number": lines({"item": 0, "groups": [group()]}, {"item": 1, "error": 5}),
    "an item that is text": lines({"item": 0, "groups": [group()]}, {"item": "1", "groups": []}),
    "no item": lines({"item": 0, "groups": [group()]}, {"groups": []}),
    "an item twice": GOOD + GOOD,
    "a line that is a list": GOOD + b"[1]\n",
    "a torn line": GOOD + GOOD[:40],
    "an empty line": GOOD + b"\n",
    "a line of zeros": GOOD + bytes(30),
    "a line that is not UTF-8": GOOD + GOOD.replace(b'"item"', b'"it\xffem"'),
    "lists within lists": GOOD + b"[" * 100_000 + b"\n",
    "a number of 5,000 digits": GOOD + b'{"item": ' + b"1" * 5000 + b', "groups": []}\n',
}
ODD_METRICS = {
    "an empty file": b"",
    "a torn file": b'{"results": {"all": {"eval/acc',
    "a list": b"[]",
    "no results": b"{}",
    "results that are a list": b'{"results": []}',
    "no mapping of all": b'{"results": {"all": null}}',
    "no number": b'{"results": {"all": {"eval/note": "good"}}}',
    "a number of 400 digits": b'{"results": {"all": {"eval/acc": 1' + b"0" * 400 + b"}}}",
    "no text": b'{"results": {"all": {"eval/\xff": 1}}}',
}


@pytest.mark.parametrize("odd", ODD_ANSWERS)
def test_odd_answer_fails_evaluation_named_with_log(odd, tmp_path, caplog):
    made = evaluator(tmp_path)
    assert evaluated(made, 4, {"groups.jsonl": ODD_ANSWERS[odd]}) == []
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(
        "Evaluation 'task' at step 4 failed: line 2 of groups.jsonl cannot be read: "
    )
    assert told.endswith("Its log: logs/evaluation-task.log")
    (found,) = evaluated(made, 5, {"groups.jsonl": GOOD})  # the next one is made
    assert found.metrics["pass@1"] == 0.5
    with pytest.raises(EvaluationError, match=r"line 2 of groups\.jsonl cannot be read"):
        evaluated(evaluator(tmp_path / "first"), 0, {"groups.jsonl": ODD_ANSWERS[odd]})


@pytest.mark.parametrize("odd", ODD_METRICS)
def test_odd_metrics_of_own_evaluation_fail_it(odd, tmp_path, caplog):
    made = evaluator(tmp_path, asks=False)
    assert evaluated(made, 4, {"metrics.json": ODD_METRICS[odd]}) == []
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(
        "Evaluation 'task' at step 4 failed: metrics.json of its own `evaluate` "
    )
    assert told.endswith("Its log: logs/evaluation-task.log")
    good = b'{"results": {"all": {"eval/acc": 0.5, "n": 3, "note": "good"}}}'
    assert evaluated(made, 5, {"metrics.json": good})[0].metrics == {"acc": 0.5, "n": 3.0}


def refused_result(folder: Path) -> None:
    (folder / ".result.json.tmp").mkdir()  # where the file is written first


def unreadable_answers(folder: Path) -> None:
    (folder / "groups.jsonl").unlink()
    (folder / "groups.jsonl").mkdir()


def vanished(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("harm", [refused_result, unreadable_answers])
def test_refusing_disk_fails_evaluation(harm, tmp_path, caplog):
    made = evaluator(tmp_path)
    made.begin(4, first=False, last=False)
    place = made._processes["task"].folder
    (place / "groups.jsonl").write_bytes(GOOD)
    harm(place)
    assert made.poll() == [] and read_result(tmp_path / "task/step-000004") is None
    assert "Evaluation 'task' at step 4 failed: its files cannot be read or written" in caplog.text
    assert evaluated(made, 5, {"groups.jsonl": GOOD})[0].step == 5


def test_vanished_folder_fails_evaluation(tmp_path, caplog):
    made = evaluator(tmp_path)
    shutil.rmtree(tmp_path / "task/next")
    made.begin(4, first=False, last=False)
    assert "Evaluation 'task' at step 4 failed: its files cannot be read or written" in caplog.text
    assert evaluated(made, 5, {"groups.jsonl": GOOD})[0].step == 5


def test_failed_preparation_of_evaluation_is_warning(tmp_path, caplog):
    made = evaluator(tmp_path)
    made.begin(4, first=False, last=False)
    shutil.rmtree(tmp_path / "task")
    (tmp_path / "task").write_text("no folder")
    assert made.poll() == []
    assert "The next evaluation 'task' cannot be prepared in " in caplog.text
    assert not made.busy() and made.ready(5, first=False, last=False)
    with pytest.raises(EvaluationError, match="cannot be prepared"):
        evaluator(tmp_path)


DAMAGED = {
    "an empty file": lambda whole: b"",
    "a torn file": lambda whole: whole[: len(whole) // 2],
    "another version's": lambda whole: json.dumps({"name": "task", "when": 4}).encode(),
    "a list": lambda whole: b"[]",
    "a field of another type": lambda whole: whole.replace(b'"step": 4', b'"step": "four"'),
    "no scores of a problem": lambda whole: whole.replace(b"[1.0, 0.0]", b"[]"),
    "zeros": lambda whole: bytes(len(whole)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_result_is_named_and_made_again(damage, tmp_path, caplog):
    (found,) = evaluated(evaluator(tmp_path / "evaluations"), 4, {"groups.jsonl": GOOD})
    folder = tmp_path / "evaluations/task/step-000004"
    whole = (folder / "result.json").read_bytes()
    assert read_result(folder) == found and results_of(tmp_path, 4) == [found]
    (folder / "result.json").write_bytes(DAMAGED[damage](whole))
    assert results_of(tmp_path, 4) == []
    assert f"{folder}/result.json cannot be read (" in caplog.text
    resumed = evaluator(tmp_path / "evaluations")
    # the answers are not thrown away
    assert resumed.results == [] and (folder / "groups.jsonl").exists()
    (again,) = evaluated(resumed, 4, {"groups.jsonl": GOOD})
    assert read_result(folder) == again


def test_folders_of_others_are_left_alone(tmp_path):
    for name in ("step-000002-backup", "step-x"):
        (tmp_path / "task" / name).mkdir(parents=True)
    (tmp_path / "task/step-000003.zip").write_text("")
    evaluator(tmp_path, step=0)
    left = {path.name for path in (tmp_path / "task").iterdir()}
    assert left == {"step-000002-backup", "step-x", "step-000003.zip", "next"}


def test_partial_scores_are_known_from_then_on(tmp_path):
    made = evaluator(tmp_path, step=0)
    partial = lines({"item": 0, "groups": [group(scores=[0.3, 0.2])]})
    found = [
        evaluated(made, step, {"groups.jsonl": it})[0]
        for step, it in enumerate((GOOD, partial, GOOD))
    ]
    assert [one.graded for one in found] == [False, True, True]
    assert found[1].metrics["avg@2"] == 0.25 and found[1].metrics["mean_gain"] == pytest.approx(
        -0.25
    )
    assert read_result(tmp_path / "task/step-000001") == found[1]
    own = evaluator(tmp_path / "own", asks=False)
    content = b'{"results": {"all": {"eval/acc": 0.5}}}'
    assert "task: acc 0.5 (" in evaluated(own, 5, {"metrics.json": content})[0].line()


# ----------------------------------------------------------------------------------- 2,000 contents


def build_content(
    seed: int, faults: list[tuple[int, int]], text_faults: list[tuple[int, int]]
) -> bytes:
    """Lines as an evaluation writes them, then broken by the faults of
    `tests/rollouts/malformed.py`."""
    rng = random.Random(seed)
    answers: list[dict] = []
    for item in range(rng.randint(0, 4)):
        groups = [malformed.good_group(rng) for _ in range(rng.choice([0, 1, 1, 1, 2]))]
        error = {"error": "KeyError: 'x'", "place": "a.py:3 in f", "traceback": "..."}
        answers.append({"item": item} | (error if rng.random() < 0.2 else {"groups": groups}))
    groups = [group for answer in answers for group in answer.get("groups", [])]
    for which, fault_seed in faults:
        fault_rng = random.Random(fault_seed)
        if groups:
            malformed.GROUP_FAULTS[which](fault_rng, fault_rng.choice(groups))
        if answers and fault_rng.random() < 0.1:
            broken = fault_rng.choice(answers)
            broken[fault_rng.choice(sorted(broken))] = malformed.junk(fault_rng)
    content = "".join(json.dumps(answer) + "\n" for answer in answers).encode(
        "utf-8", "surrogatepass"
    )
    for which, fault_seed in text_faults:
        content = malformed.TEXT_FAULTS[which](random.Random(fault_seed), content)
    return content


def judge(content: bytes) -> list[dict] | None:
    """The answers, said a second time by `json` and plain Python; `None` if a line is not one."""
    answers = []
    for line in content.splitlines():
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(answer, dict) or not oracle.is_integer(answer.get("item")):
            return None
        groups, error = answer.get("groups"), answer.get("error")
        if (groups is None) == (error is None) or not isinstance(answer.get("place", ""), str):
            return None
        if error is not None and not isinstance(error, str):
            return None
        if groups is not None and not (isinstance(groups, list) and all(map(is_group, groups))):
            return None
        answers.append(answer)
    items = [answer["item"] for answer in answers]
    return answers if len(set(items)) == len(items) else None


def is_group(sent) -> bool:
    fields = (
        [sent.get(name) for name in ("tokens", "masks", "scores")] if isinstance(sent, dict) else []
    )
    if not fields or not all(isinstance(field, list) for field in fields):
        return False
    tokens, masks, scores = fields
    if not len(tokens) == len(masks) == len(scores) > 0 or not all(map(oracle.is_bounded, scores)):
        return False
    for ids, mask in zip(tokens, masks):
        if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
            return False
        if not all(map(oracle.is_token, ids)):
            return False
        if not all(oracle.is_integer(m) and m in (-100, t) for m, t in zip(mask, ids)):
            return False
    return True


@pytest.fixture
def in_memory(caplog) -> Iterator[Path]:
    """A folder in which writing is fast; without thousands of warnings."""
    caplog.set_level(logging.CRITICAL)
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as folder:
        yield Path(folder)


def test_rows_of_an_episode_are_one_answer(tmp_path):
    """Of three rows, the last two are one episode. Nothing else in `overrides` is looked at."""
    overrides = [{"temperature": "hot"}, {"episode": 1}, {"episode": 1}]
    group = {"tokens": [[1, 2]] * 3, "masks": [[-100, 2]] * 3, "scores": [0, 1, 1]}
    path = tmp_path / "groups.jsonl"
    path.write_text(json.dumps({"item": 0, "groups": [group | {"overrides": overrides}]}))
    (answer,) = read_answers(path)
    assert [group.scores for group in answer.groups] == [[0.0, 1.0]]


@pytest.mark.slow
def test_evaluation_survives_any_content_and_balances(in_memory):
    made = evaluator(in_memory)
    outcomes = {"read": 0, "failed": 0}

    @settings(
        max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(
        content=st.builds(
            build_content,
            st.integers(0, 2**20),
            malformed._faults(len(malformed.GROUP_FAULTS), 2),
            malformed._faults(len(malformed.TEXT_FAULTS), 1),
        )
    )
    @example(content=b"")
    def balances(content):
        made.results.clear()  # or step 4 is known
        found = evaluated(made, 4, {"groups.jsonl": content})
        answers = judge(content)
        groups = [group for answer in answers or () for group in answer.get("groups") or ()]
        assert bool(found) == bool(groups), content
        outcomes["read" if found else "failed"] += 1
        if found:
            compare(found[0], answers, groups)

    balances()
    assert min(outcomes.values()) > 400, outcomes


def compare(found: Result, answers: list[dict], groups: list[dict]) -> None:
    failed = sum(answer.get("error") is not None for answer in answers)
    silent = sum(answer.get("groups") == [] for answer in answers)
    assert found.metrics["problems"] + silent == len(answers)
    assert found.metrics["failed"] == failed
    assert len(found.scores) == len(groups) + failed
    assert (
        sum(map(len, found.scores.values()))
        == sum(len(one["scores"]) for one in groups) + SAMPLES * failed
    )
    lengths = [sum(m != -100 for m in mask) for one in groups for mask in one["masks"]]
    assert found.metrics["mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    passed = [
        sum(score > 0.5 for score in one["scores"]) / len(one["scores"]) for one in groups
    ] + [0.0] * failed
    assert found.metrics["pass@1"] == pytest.approx(sum(passed) / len(passed))
    means = [statistics.fmean(one["scores"]) for one in groups] + [0.0] * failed
    (mean,) = [
        value
        for name, value in found.metrics.items()
        if name.startswith("avg@") and name[4:].isdigit()
    ]
    assert mean == pytest.approx(statistics.fmean(means))


# ----------------------------------------------------------------------------------- one that hangs

HANGING = """
import os, sys, time
print("loading the problems", flush=True)
go = os.environ["TRL_ATROPOS_GO"]
if {ready}:
    open(go + ".awaited", "w").close()
while not os.path.exists(go):
    time.sleep(0.01)
print("asking problem 17 of 200", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def hanging(folder: Path, ready: bool) -> Iterator[Evaluator]:
    with Services(folder / "logs") as services:
        program = ["-c", HANGING.format(ready=ready)]
        yield evaluator(folder / "evaluations", services=services, command=program)


def wait_for_line(text: str, folder: Path) -> None:
    """Waits until the log of the evaluation in `folder` has this text."""
    (log,) = (folder / "logs").glob("*.log")
    deadline = time.monotonic() + 30.0
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def told(caplog) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("Evaluation ")
    ]


def test_hung_evaluation_is_told_ever_more_rarely(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", "trl_atropos")
    monkeypatch.setattr(activity, "FIRST_MESSAGE", 1.0)
    with hanging(tmp_path, ready=True) as made:
        assert made.ready(6, first=False, last=False, timeout=30)
        began = time.monotonic()
        made.begin(6, first=False, last=False)
        wait_for_line("asking problem 17 of 200", tmp_path)
        groups = tmp_path / "evaluations/task/next/groups.jsonl"
        groups.write_text('{"item": 0, "groups": []}\n{"item": 1, "gro')  # it is at the second
        while len(told(caplog)) < 2:
            assert time.monotonic() - began < 30.0
            assert made.poll() == []
            made.tell_progress(before=6)  # of which nothing is waited for
            before = told(caplog)
            made.tell_progress()
            if len(told(caplog)) > len(before):
                assert time.monotonic() - began >= len(told(caplog))  # seconds
                assert told(caplog)[:-1] == before
            time.sleep(0.02)
    found = [
        re.fullmatch(rf"Evaluation 'task' at step 6, 1 of {PROBLEMS} problems, (\d+) s: (.*)", line)
        for line in told(caplog)
    ]
    assert [match[2] for match in found] == ["asking problem 17 of 200"] * 2
    assert 1 <= int(found[0][1]) < int(found[1][1])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_bar_of_problems(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", "trl_atropos")
    monkeypatch.setattr(activity, "FIRST_MESSAGE", 0.1)
    with hanging(tmp_path, ready=True) as made:
        assert made.ready(6, first=False, last=False, timeout=30)
        caplog.clear()
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        made.begin(6, first=False, last=False)
        groups = tmp_path / "evaluations/task/next/groups.jsonl"
        deadline = time.monotonic() + 30.0
        for done in (1, 2):
            with groups.open("a") as file:
                file.write('{"item": 0, "groups": []}\n')
            while f"| {done}/{PROBLEMS} [" not in screen.getvalue():
                assert time.monotonic() < deadline
                made.tell_progress()
                time.sleep(0.02)
        assert "Evaluation 'task' at step 6: " in screen.getvalue()
    assert told(caplog) == []


def test_unready_evaluation_is_told(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", "trl_atropos")
    monkeypatch.setattr(activity, "FIRST_MESSAGE", 0.6)
    monkeypatch.delenv("COLUMNS", raising=False)  # by which lines are cut
    with hanging(tmp_path, ready=False) as made:
        wait_for_line("loading the problems", tmp_path)
        assert not made.ready(6, first=False, last=False, timeout=1.0)
        assert made.ready(7, first=False, last=False, timeout=0) is False
    assert told(caplog)
    for line in told(caplog):
        assert re.fullmatch(
            r"Evaluation 'task' is starting for step 6, \d+ s: loading the problems", line
        )
