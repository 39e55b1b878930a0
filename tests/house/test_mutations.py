"""The table of `tests/house/mutations.py` fits the code as it is. `make test-mutations` runs it, which
takes a while."""

import ast

import pytest

from tests.house.mutations import MUTATIONS, ROOT, Mutation

ROW = pytest.mark.parametrize(
    "mutation",
    [pytest.param(one, id=f"{number} {one.file}") for number, one in enumerate(MUTATIONS)],
)
SKIPPED = ("full", "gpu")  # marks of tests that usually do not run, so that they catch nothing


def row(mutation: Mutation) -> str:
    """Which row of the table a message is about."""
    return (
        f"row {MUTATIONS.index(mutation)} of tests/house/mutations.py, which replaces "
        f"{mutation.old!r} in {mutation.file}"
    )


@ROW
def test_mutated_code_is_still_there(mutation):
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    found = text.count(mutation.old)
    assert found == 1, (
        f"the code stands {found} times in the file: make the same mistake in it anew: "
        f"{row(mutation)}"
    )
    mutated = mutation.apply(text)
    if not mutation.file.endswith(".py"):
        assert mutated != text
        return
    try:
        tree = ast.parse(mutated)
    except SyntaxError as error:
        pytest.fail(f"with the mutation, the file is no Python ({error}): {row(mutation)}")
    assert ast.dump(tree) != ast.dump(ast.parse(text)), (
        f"the mutation changes nothing: {row(mutation)}"
    )


@ROW
def test_catching_test_exists_and_is_run(mutation):
    file, _, name = mutation.test.partition("::")
    path = ROOT / file
    assert path.is_file(), f"there is no {file}: name the test that catches it: {row(mutation)}"
    functions = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    tests = {one.name: one for one in functions if one.name.startswith("test_")}
    assert name in tests, (
        f"there is no {mutation.test}: name the test that catches it: {row(mutation)}"
    )
    marks = [ast.unparse(decorator) for decorator in tests[name].decorator_list]
    skipped = [
        mark for mark in marks if mark.split("(")[0] in {f"pytest.mark.{kind}" for kind in SKIPPED}
    ]
    assert not skipped, (
        f"{mutation.test} is skipped by {skipped[0]}: name another test: {row(mutation)}"
    )
