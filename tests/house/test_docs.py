"""What the pages say is so: their commands are run here or by the test that is named here, or carry
the hardware that they need; their flags, keys, metrics, messages and links exist.

A command that is new and none of these makes
`test_page_commands_are_run_or_state_their_needs` fail. Mark a block with `<!-- needs: 8
GPUs -->` right before it, or add what runs it to `tests/house/docs_commands.py`.
"""

import json
import re
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from atroposlib.envs.base import BaseEnvConfig
from trl import TrlParser

from tests.house.docs_commands import ELSEWHERE, HERE, QUICKSTART, STAND_INS, miniature, run_check
from tests.house.docs_pages import PAGES, ROOT, Command, Page
from tests.rollout_factory import make_group, make_trainer
from trl_atropos.recipe import PARTS, parse
from trl_atropos.server.launch import build_parser as serve_parser
from trl_atropos.server.launch import vllm_arguments

# ----------------------------------------------------------------------------------------- commands


@pytest.fixture(scope="module")
def run_dir(tiny_model, tmp_path_factory):
    """Folder of a run of two steps on 16 rollouts."""
    folder = tmp_path_factory.mktemp("recorded")
    groups = [make_group(tiny_model, 8, seed) for seed in (1, 2)]
    make_trainer(
        tiny_model, folder, groups[:1], groups[1:], max_steps=2, save_strategy="steps", save_steps=1
    ).train()
    shutil.copytree(folder / "run", folder / "as_documented")
    shutil.copytree(
        folder, folder / "as_documented" / "rollouts", ignore=shutil.ignore_patterns("run", "as_*")
    )
    return folder / "as_documented"


@pytest.fixture
def desk(tiny_model, run_dir, tmp_path, monkeypatch):
    """A checkout in which a reader types, with a model and a run as the quickstart would have left
    them."""
    for name in ("recipes", "configs", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("quickstart", "mine"):
        shutil.copytree(run_dir, tmp_path / "runs" / name)
        shutil.copytree(tiny_model, tmp_path / "runs" / name / "model")
    shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text()) | {
        "max_position_embeddings": 262144
    }
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    for name in STAND_INS:
        shutil.copy(tmp_path / QUICKSTART, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    return tmp_path


# The one trains, in a process of its own.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full) if name == "docs/resume.md" else name
        for name in PAGES
    ],
)
def test_page_commands_are_run_or_state_their_needs(name, desk):
    for block in Page(name).blocks_of("bash"):
        for command in block.commands():
            require_known(command, desk)
            if block.needs is not None:
                continue
            text = " ".join(command.words)
            here = [run for pattern, run in HERE if re.match(pattern, text)]
            if here:
                here[0](command, desk)
            else:
                assert any(re.match(pattern, text) for pattern, *_ in ELSEWHERE), (
                    f"{command}\nis run by no test: put `<!-- needs: HARDWARE -->` right before "
                    "its block, or add the test that runs it to ELSEWHERE or HERE of "
                    "tests/house/docs_commands.py."
                )


@pytest.mark.parametrize(("pattern", "test", "names"), ELSEWHERE)
def test_commands_named_elsewhere_are_run_there(pattern, test, names):
    file, _, function = test.partition("::")
    source = (ROOT / file).read_text()
    assert f"def {function}(" in source
    imported = re.findall(r"^from (tests[\w.]*) import", source, re.MULTILINE)
    near = [
        ROOT / file,
        (ROOT / file).with_name("conftest.py"),
        ROOT / "tests/server_process.py",
        ROOT / "Makefile",
    ]
    near += [ROOT / (module.replace(".", "/") + ".py") for module in imported]
    assert any(names in path.read_text() for path in near if path.is_file())


def test_llama_of_models_page_passes_check(desk):
    (block,) = (
        block
        for block in Page("docs/own-model.md").blocks_of("python")
        if "LlamaConfig(" in block.text
    )
    exec(compile(block.text, block.place, "exec"), {})
    assert json.loads((desk / "runs/llama/config.json").read_text())["model_type"] == "llama"
    words = ("trl-atropos", "check", "--config", QUICKSTART, "--model_name_or_path", "runs/llama")
    run_check(Command(block.place, words), desk)


# -------------------------------------------------------------------------------------------- flags


@cache
def training_flags() -> set[str]:
    given_to_parser = {
        flag for action in TrlParser(PARTS)._actions for flag in action.option_strings
    }
    return given_to_parser | {"--config", "--overlay", "--help_all"}


@cache
def launch_flags() -> set[str]:
    return {flag for action in launch_command_parser()._actions for flag in action.option_strings}


@cache
def own_flags() -> set[str]:
    """Of our own commands, by their help in the reference, which is current."""
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", (ROOT / "docs/reference.md").read_text()))


def require_known(command: Command, desk: Path) -> None:
    """Its flags exist, and its files."""
    words = list(command.words)
    if "trl_atropos.train" in words:
        arguments = command.after("trl_atropos.train")
        before = words[: words.index("trl_atropos.train")]
        assert stated(before) - {"--module"} <= launch_flags(), command
        for flag, value in pairwise(before):
            assert flag != "--config_file" or (desk / value).is_file(), command
        # says what it does not know, a recipe that is not there among it
        parse(miniature(arguments, desk))
    elif words[:2] == ["trl-atropos", "serve"]:
        options, given = serve_parser().parse_known_args(words[2:])
        vllm_arguments(options.model, given, cpu=False, mode=options.vllm_mode)
    elif words[0] == "trl-atropos":
        assert stated(words) <= own_flags() | training_flags() | launch_flags(), command


def stated(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@pytest.mark.parametrize("name", PAGES)
def test_flags_in_page_text_exist(name):
    for span in Page(name).spans:
        flags = {flag for flag in stated(span.split()) if "_" in flag and "." not in flag}
        known = training_flags() | launch_flags() | own_flags() | {"--drain_timeout", "--seed"}
        assert flags <= known, f"{name}: `{span}`"


def test_environment_settings_in_pages_exist():
    fields = set(BaseEnvConfig.model_fields)
    for path in ROOT.glob("recipes/*/environment.py"):
        fields |= set(re.findall(r"^    (\w+): ", path.read_text(), re.MULTILINE))
    for name in PAGES:
        assert set(re.findall(r"--env\.(\w+)", Page(name).text)) <= fields, name
