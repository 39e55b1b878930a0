"""Mistakes in an environment's script that `check` finds without running it."""

import sys
from pathlib import Path

import pytest

from trl_atropos.check.scripts import mistakes
from trl_atropos.environment_entry import EnvironmentSpec

RAISES = "raise SystemExit('it was run')\n"


def found_in(text: str, folder: Path, python: str = sys.executable) -> list[tuple[str, str]]:
    script = folder / "environment.py"
    script.write_text(text)
    spec = EnvironmentSpec(path=str(script), name="sums")
    return [(error.code, error.seen) for error in mistakes(spec, python, script)]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("import os\ndef score(:\n", 2, "invalid syntax"),
        ("def score():\nreturn 1\n", 2, "expected an indented block"),
        ("x = '''\n", 1, "unterminated triple-quoted string"),
        ("return 1\n", 1, "'return' outside function"),
        ("x = 1\0\n", 1, "null bytes"),
    ],
)
def test_syntax_error_is_found_with_its_line(text, line, message, tmp_path):
    [(code, seen)] = found_in(text, tmp_path)
    assert code == "environment-syntax"
    assert f"environment.py:{line}: " in seen
    assert message in seen


def test_missing_module_is_found_with_its_line(tmp_path):
    text = "import os\nimport numpyy.linalg\nfrom nothing_here.sub import name\n"
    found = found_in(text + RAISES, tmp_path)
    assert [code for code, _ in found] == ["environment-import"] * 2
    assert [seen.rpartition(":")[2] for _, seen in found] == ["2", "3"]


def test_modules_that_may_be_missing_are_no_finding(tmp_path):
    (tmp_path / "beside.py").write_text("")
    text = (
        "import sys, json, beside\n"
        "from . import relative\n"
        "try:\n    import nothing_here\nexcept ImportError:\n    pass\n"
        "def later():\n    import nothing_here\n"
    )
    assert found_in(text + RAISES, tmp_path) == []


def test_python_that_does_not_start_is_left_to_others(tmp_path):
    assert found_in("def score(:\n", tmp_path, python=str(tmp_path / "none")) == []
