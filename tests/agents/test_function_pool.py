"""A function of somebody else's file: it is called in processes of its own, and its mistakes are
told."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trl_atropos.agents.function_pool import FunctionFailed, FunctionPool

VARIABLES = {"PATH": os.environ["PATH"]}
HEAD = "import asyncio, dataclasses, os, sys, time, collections\n"


def score_by(
    folder: Path, body: str, timeout: float = 20.0, kind: str = "def", times: int = 1
) -> list[Any]:
    """Returns what calls of a score function, side by side, return or raise."""
    (folder / "mine.py").write_text(f"{HEAD}{kind} score(task, folder, output, episode):\n{body}\n")

    async def call() -> list[Any]:
        pool = FunctionPool(f"{folder}/mine.py:score", None, VARIABLES)
        try:
            await pool.start()
            request = {"call": "score", "folder": "/tmp", "output": "said", "episode": {"calls": 2}}
            calls = [pool.call({**request, "task": number}, timeout) for number in range(times)]
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await pool.close()

    return asyncio.run(call())


@pytest.mark.parametrize(
    ("body", "score", "parts"),
    [
        ("    return 1", 1.0, {}),
        ("    return True", 1.0, {}),
        ("    import decimal; return decimal.Decimal('0.5')", 0.5, {}),
        ("    return {'score': 2, 'length': 3, 'none': None}", 2.0, {"length": 3.0}),
        (
            "    return collections.namedtuple('S', 'score right')(0, False)",
            0.0,
            {"right": 0.0},
        ),
        (
            "    return dataclasses.make_dataclass('S', ['score', 'right'])(1.5, 1)",
            1.5,
            {"right": 1.0},
        ),
        ("    print('noise'); return episode['calls'] + len(output) + len(str(folder))", 10.0, {}),
    ],
)
def test_score_is_number_with_named_parts(tmp_path, body, score, parts):
    assert score_by(tmp_path, body) == [{"score": score, "parts": parts}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    return None", "its score is None, and no number"),
        ("    return '1'", "its score is '1', and no number"),
        ("    return float('nan')", "its score is nan, and no finite number"),
        ("    return {'right': 1}", "return a number, or something with a `score`"),
        ("    return {'score': 1, 'right': 'yes'}", "its right is 'yes', and no number"),
        ("    raise KeyError('colour')", "KeyError: 'colour'"),
        ("    sys.exit(3)", "SystemExit: 3"),
        ("    os._exit(3)", "its process ended with exit code 3"),
        ("    time.sleep(60)", "it gave no answer within 1 s"),
    ],
)
def test_mistake_of_score_is_told(tmp_path, body, message):
    (error,) = score_by(tmp_path, body, timeout=1.0 if "sleep" in body else 20.0)
    assert isinstance(error, FunctionFailed)
    assert message in str(error)
    if "KeyError" in body:
        assert "mine.py" in error.__notes__[0]
        assert error.environment_place == f"{tmp_path}/mine.py:3 in score"


@pytest.mark.parametrize("body", ["    raise OSError('no')", "    os._exit(1)"])
def test_calls_after_a_failure_are_answered(tmp_path, body):
    answers = score_by(tmp_path, f"    if task < 2:\n    {body}\n    return task", times=6)
    assert all(isinstance(answer, FunctionFailed) for answer in answers[:2])
    assert [answer["score"] for answer in answers[2:]] == [2.0, 3.0, 4.0, 5.0]


def test_async_calls_share_a_process(tmp_path):
    began = time.monotonic()
    body = (
        "    begun.append(task)\n"
        "    while task == 0 or len(begun) < 9:\n"  # each needs all others, and one never ends
        "        await asyncio.sleep(0.01)\n"
        "    return os.getpid()\n"
        "begun = []"
    )
    late, *answers = score_by(tmp_path, body, timeout=3.0, kind="async def", times=9)
    assert time.monotonic() - began < 20  # side by side, and the late one was given up
    assert "TimeoutError" in str(late)
    assert len({answer["score"] for answer in answers}) == 1


def test_plain_calls_have_a_process_for_themselves(tmp_path):
    """One may change the folder, set an alarm, or run a loop of its own."""
    body = (
        "    import signal, tempfile\n"
        "    signal.alarm(30)\n"
        "    os.chdir(tempfile.gettempdir() if task % 2 else '/')\n"
        "    asyncio.run(asyncio.sleep(0.05))\n"
        "    return os.getcwd() == (tempfile.gettempdir() if task % 2 else '/')"
    )
    answers = score_by(tmp_path, body, times=8)
    assert [answer["score"] for answer in answers] == [1.0] * 8


def test_file_that_cannot_be_loaded_is_told(tmp_path):
    (tmp_path / "mine.py").write_text("import no_such_module\n")
    pool = FunctionPool(f"{tmp_path}/mine.py:score", None, VARIABLES)
    with pytest.raises(FunctionFailed) as caught:
        asyncio.run(pool.start())
    error = caught.value
    assert "mine.py:score cannot be loaded: ModuleNotFoundError: No module named" in str(error)


def test_function_runs_without_this_package(tmp_path):
    """Its interpreter has the standard library alone, and its own folder."""
    (tmp_path / "beside.py").write_text("FACTOR = 3")
    (tmp_path / "mine.py").write_text(
        "import sys, beside, os\n"
        "def score(task, folder, output, episode):\n"
        "    assert not [name for name in sys.modules if name.startswith(('trl', 'torch'))]\n"
        "    assert not [name for name in os.environ if 'TRL' in name or 'TOKEN' in name]\n"
        "    return beside.FACTOR\n"
    )
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    interpreter.chmod(0o755)

    async def call() -> Any:
        pool = FunctionPool(f"{tmp_path}/mine.py:score", str(interpreter), VARIABLES)
        request = {"call": "score", "task": 1, "folder": "/", "output": "", "episode": {}}
        try:
            await pool.start()
            return await pool.call(request, 20.0)
        finally:
            await pool.close()

    assert asyncio.run(call())["score"] == 3.0
