"""Every mistake of `mistakes.py` is found by `trl-atropos train` and `trl-atropos check`, which say
the same: what is wrong, where, and what to do."""

import pytest

from tests.check.desk import Desk
from tests.check.traces import traced_once  # noqa: F401 - a fixture
from tests.recipe.mistakes import MISTAKES, holds
from trl_atropos.check import examine
from trl_atropos.environment_entry import EnvironmentSpec, EvaluationSpec, parse_entries
from trl_atropos.errors import ERROR, AtroposTrainingError, RecipeError
from trl_atropos.recipe import parse
from trl_atropos.recipe_checks import check_files, check_reports


@pytest.fixture
def desk(tiny_model, tmp_path, monkeypatch) -> Desk:
    return Desk(tmp_path, tiny_model, monkeypatch)


def refusal(argv: list[str]) -> AtroposTrainingError:
    """Returns the error by which `train` refuses a command line, before it starts anything."""
    with pytest.raises(AtroposTrainingError) as refused:
        recipe = check_files(parse(argv))
        check_reports(recipe.training)
    return refused.value


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistake_names_cause_and_fix(mistake, desk):
    argv = mistake.plant(desk)
    report = examine(argv)
    [finding] = report.findings
    assert (finding.code, finding.level) == (mistake.code, mistake.level)
    assert holds(mistake.cause, finding.what, desk), finding.what
    assert holds(mistake.place, finding.seen, desk), finding.seen
    assert holds(mistake.fix, finding.fix, desk), finding.fix
    assert bool(report.exit_code) == (mistake.level == ERROR)
    if mistake.is_refused:
        message = str(refusal(argv))
        assert message == str(finding)
        assert message.endswith(finding.fix) and "\n" not in message


@pytest.mark.parametrize(
    "name", ["..", ".", ".hidden", "-x", "a/b", "a b", "a\n", "x" * 201, "é" * 101]
)
@pytest.mark.parametrize(
    ("setting", "kind"), [("environments", EnvironmentSpec), ("evaluations", EvaluationSpec)]
)
def test_entry_name_that_no_file_can_have_is_refused(setting, kind, name):
    message = rf"`{setting}` entry 1: .* is none for them: set `name` to letters, digits"
    with pytest.raises(RecipeError, match=message):
        parse_entries(setting, [{"path": "environment.py", "name": name}], kind)
