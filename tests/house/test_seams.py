"""`make seams`: the lists against the installed versions' sources, against the package's code, and the
command against a made-up wheel."""

import ast
import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from tests.house import seams
from tests.house.definitions import Libraries
from tests.house.lookup import examine
from tests.house.releases import open_release
from tests.house.seam import Lines, Names, split
from tests.house.uses import ROOT, trees, uses_and_overrides


@pytest.fixture(scope="module")
def installed() -> Libraries:
    return Libraries(seams.installed_releases())


@pytest.mark.parametrize("library", ["vllm", "trl", "transformers", "peft", "accelerate"])
def test_installed_version_has_all_that_is_used(installed, library):
    findings = examine(library, seams.ROWS, installed)
    assert len(findings) > 40
    assert [finding for finding in findings if finding.fails] == []


# --------------------------------------------------------------------- the lists and the package's code


def path_of(file: str) -> Path:
    is_benchmark = file.startswith("benchmarks/")
    return ROOT / file if is_benchmark else ROOT / "trl_atropos" / file


def test_listed_names_stand_in_the_named_files():
    for row in seams.ROWS:
        texts = [path_of(file).read_text(encoding="utf-8") for file in row.used_in]
        if isinstance(row, Lines) or not texts:
            continue
        for name in row.names:
            attribute = split(name)[0]
            if attribute != "__init__":
                missing = f"{attribute} of {row.place} stands in none of {row.used_in}"
                assert any(re.search(rf"\b{attribute}\b", text) for text in texts), missing


def test_optional_import_is_listed_with_its_versions():
    listed = set()
    for row in seams.ROWS:
        if isinstance(row, Names) and (row.since or row.until):
            listed.update((row.place, split(name)[0]) for name in row.names)
    uses, _ = uses_and_overrides()
    optional = {(f"{use.module}:", use.name) for use in uses if use.optional}
    assert len(optional) > 2
    assert optional - listed == set()


# Of Python, Atropos, and tuples with names.
KNOWN = {
    "_C",
    "_actions",
    "_asdict",
    "_current_frames",
    "_exit",
    "_post_json_with_compression",
    "_replace",
    "_run_evaluate",
    "_schema",
    "_tokens_and_logprobs_completion_wrapper",
    "_unsafe_view",
}


def test_private_name_of_another_library_is_listed():
    listed = {split(name)[0] for row in seams.ROWS if isinstance(row, Names) for name in row.names}
    ours = set()
    used = {}
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute):
                is_ours = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
                if is_ours:
                    ours.add(node.attr)
                elif re.fullmatch(r"_[^_].*", node.attr):
                    used.setdefault(node.attr, f"{file}:{node.lineno}")
    missing = {name: place for name, place in used.items() if name not in ours | listed | KNOWN}
    assert missing == {}


def test_variable_of_vllm_is_listed():
    listed = {name for row in seams.ROWS if row.place == "vllm.envs:" for name in row.names}
    used = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.update(re.findall(r"\bVLLM_[A-Z0-9_]+\b", node.value))
    assert used == listed


def test_row_holds_between_its_versions():
    row = Names("vllm.x:", ("name",), (), since="0.29", until="0.33")
    versions = ["0.28.1", "0.29.0rc1", "0.32.9", "0.33.0", "0.33.0+cpu"]
    held = [version for version in versions if row.holds_in(Version(version))]
    assert held == ["0.29.0rc1", "0.32.9"]


# ------------------------------------------------------------------------------------ a made-up wheel

WHEEL = {
    "vllm/__init__.py": "raise SystemExit('the wheel was executed')\n",
    "vllm/engine.py": """
import typing
if typing.TYPE_CHECKING:
    from .base import *
from vllm.base import Renamed as Engine

class Client(Engine, typing.Generic):
    @typing.overload
    def ask(self): ...
    def ask(self, question, *, deadline=1): ...
    @staticmethod
    def pause(mode, clear): ...
""",
    "vllm/base.py": """
from dataclasses import dataclass

class Renamed:
    level: int = 1
    def __init__(self):
        self.state, self.other = 1, 2
    def sleep(self, level): ...

@dataclass
class Request:
    text: str
    logprobs: int = 0
""",
    "vllm/elsewhere.py": "class Wanted:\n    pass\n\nx = 1  # the line that was looked for\n",
    "vllm/broken.py": "def f(:\n",
    "vllm-9.9.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.0\n\nText.\n",
}


@pytest.fixture
def wheel(tmp_path) -> Path:
    path = tmp_path / "vllm-9.9.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in WHEEL.items():
            archive.writestr(name, text)
    return path


def archive_of(folder: Path) -> Path:
    """Returns a source archive with the files of the wheel."""
    path = folder / "vllm-9.9.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in WHEEL.items():
            name = "PKG-INFO" if name.endswith("METADATA") else f"src/{name}"
            member = tarfile.TarInfo(f"vllm-9.9.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def status_of(row, path: Path) -> tuple[str, str]:
    """Returns what becomes of the one name of a row."""
    libraries = Libraries([open_release("vllm", path)])
    findings = examine("vllm", [row], libraries)
    [finding] = [finding for finding in findings if finding.used_in == ("here.py",)]
    return finding.status, finding.text


@pytest.mark.parametrize(
    ("place", "name", "status", "text"),
    [
        ("vllm.engine:Client", "ask(question, deadline)", "there", ""),
        ("vllm.engine:Client", "level", "there", ""),  # of a base that another module defines
        ("vllm.engine:Client", "state", "there", ""),  # set by the base's constructor
        ("vllm.engine:", "Request", "there", ""),  # by `import *`
        ("vllm.engine:Client", "sleep(level, mode)", "breaks", "takes no mode: (level)"),
        ("vllm.engine:Client", "pause(mode, flush)", "breaks", "takes no flush: (mode, clear)"),
        ("vllm.engine:Client", "wake", "gone", "vllm.engine:Client has no wake"),
        ("vllm.base:Request", "tokens", "gone", "vllm.base:Request has no tokens"),
        ("vllm.engine:", "Wanted", "moved", "perhaps now vllm.elsewhere:Wanted"),
        ("vllm.gone:Wanted", "field", "moved", "perhaps now vllm.elsewhere:Wanted"),
        ("vllm.broken:", "f", "unreadable", "vllm.broken cannot be read: invalid syntax"),
    ],
)
def test_name_is_looked_up_in_wheel_and_archive(wheel, tmp_path, place, name, status, text):
    for path in (wheel, archive_of(tmp_path)):
        found, explanation = status_of(Names(place, (name,), ("here.py",)), path)
        assert found == status
        assert text in explanation


def test_exact_signature_may_not_grow(wheel):
    row = Names("vllm.engine:Client", ("ask(question)",), ("here.py",), exact=True)
    status, text = status_of(row, wheel)
    assert (status, text) == (
        "breaks",
        "takes (question, deadline=), and what stands in its place (question)",
    )


@pytest.mark.parametrize(
    ("row", "status", "text"),
    [
        (("vllm.base:Renamed.sleep", ("def sleep", "...")), "there", ""),
        (
            ("vllm.base:Renamed", ("def sleep", "self.state")),
            "gone",
            "'self.state' in another place",
        ),
        (("vllm.base:Renamed", ("def sleep", "def wake")), "gone", "has 'def wake' no more"),
        (("vllm.base:", ("line that was looked for",)), "moved", "stands in vllm.elsewhere"),
    ],
)
def test_lines_are_looked_up_in_order(wheel, row, status, text):
    place, lines = row
    found, explanation = status_of(Lines(place, lines, "a reason", ("here.py",)), wheel)
    assert found == status
    assert text in explanation
    again = Lines(place, lines[:1], "a reason", ("here.py",), times=2)
    assert status_of(again, wheel)[0] in ("breaks", "moved")


def test_row_of_another_version_is_not_looked_for(wheel):
    old = Names("vllm.gone:", ("name",), ("here.py",), until="9")
    coming = Names("vllm.gone:", ("name",), ("here.py",), since="10")
    assert status_of(old, wheel) == ("no longer", "until 9")
    assert status_of(coming, wheel) == ("not yet", "from 10 on")


def test_command_shows_what_moved_and_executes_nothing(wheel, capsys):
    assert seams.main([f"vllm={wheel}"]) == 1  # importing it would have ended the test
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("vllm 9.9.0, compared with the installed ")
    place = lines.index("  gone       vllm.v1.core.block_pool:BlockPool.reset_prefix_cache")
    assert lines[place + 1 : place + 3] == [
        "             there is no module vllm.v1.core.block_pool",
        "             used in server/compat.py",
    ]


def test_command_accepts_the_installed_version(capsys):
    assert seams.main(["uvicorn=installed"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("uvicorn ") and line.endswith(" there")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("trl={folder}/no.whl==1", "pip cannot download {folder}/no.whl==1: "),
        ("trl={wheel}", "vllm-9.9.0-py3-none-any.whl has no package trl. Name a version, or"),
        ("trl={folder}/text", "text is no wheel, no source archive and no folder"),
    ],
)
def test_unavailable_release_is_explained(wheel, tmp_path, capsys, argument, message):
    (tmp_path / "text").write_text("no archive")
    names = {"folder": tmp_path, "wheel": wheel}
    assert seams.main([argument.format(**names)]) == 2
    assert message.format(**names) in capsys.readouterr().err


def test_unknown_library_is_refused(capsys):
    with pytest.raises(SystemExit):
        seams.main(["numpy=2"])
    assert "'numpy=2' is not LIBRARY=RELEASE, for instance vllm=0.33.0" in capsys.readouterr().err
