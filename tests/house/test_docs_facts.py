"""What the pages state beside their commands: links, recipe keys, metrics, quoted messages,
warnings, and the lists that promise to be complete."""

import ast
import re
import runpy
import sys
from configparser import ConfigParser
from functools import cache
from pathlib import Path

import pytest
import trl
import yaml
from example_trainer.cli import create_full_parser
from packaging.requirements import Requirement
from transformers import TrainingArguments
from trl import GRPOConfig, TrlParser

from tests.agents.page_example import write_example
from tests.house.docs_pages import PAGES, ROOT, Block, Page
from trl_atropos.config import AtroposGRPOConfig
from trl_atropos.environment_kinds import AgentEntry
from trl_atropos.environment_verifiers import VerifiersEntry
from trl_atropos.metrics.health import SIGNALS
from trl_atropos.metrics.timing import PARTS as TIMES
from trl_atropos.recipe import PARTS, EnvironmentSpec, EvaluationSpec, parse

PACKAGE = ROOT / "trl_atropos"
PLACEHOLDER = re.compile(r"%(?:\.\d)?[sdgf]")
FRAGMENT = 8  # letters from which on a part of a quoted message is looked for
METRIC = re.compile(
    r"^(rollouts|health|sampling|policy|services|completions|clip_ratio|distillation)/[a-z_/]+$"
)
# Keys that are written like those of a recipe and belong to environments, rollouts or accelerate.
OTHER_KEYS = {
    "ensure_scores_are_not_same",
    "server_type",
    "total_steps",
    "max_batches_offpolicy",
    "sft",
    "use_wandb",
}
OTHER_KEYS |= {
    "set_advantage_to_zero",
    "evaluation",
    "fsdp_version",
    "cpu_ram_efficient_loading",
    *EvaluationSpec.model_fields,
    *AgentEntry.model_fields,
    *VerifiersEntry.model_fields,
}
YAML_BLOCKS = [block for name in PAGES for block in Page(name).blocks_of("yaml")]


@cache
def recipe_keys() -> set[str]:
    return {action.dest for action in TrlParser(PARTS)._actions}


def literal(node: ast.AST) -> str | None:
    """The text of a string, with a gap for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    return None


@cache
def said() -> str:
    """Every text in the package's source and in the Makefile, each on a line of its own."""
    texts = [(ROOT / "Makefile").read_text().replace("\\\n", "")]
    for path in PACKAGE.rglob("*.py"):
        texts += [
            text
            for node in ast.walk(ast.parse(path.read_text()))
            if (text := literal(node)) is not None
        ]
    return "\n".join(PLACEHOLDER.sub("…", " ".join(text.split())) for text in texts)


# -------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("name", PAGES)
def test_relative_links_of_page_lead_somewhere(name):
    page = Page(name)
    for link in page.links:
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / name).parent / target if target else ROOT / name
        assert path.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in Page(str(path.resolve().relative_to(ROOT))).anchors, f"{name}: {link}"


def test_pages_are_all_named_in_index():
    index = Page("docs/README.md")
    pages = {Path(name).name for name in PAGES if name.startswith("docs/")} - {"README.md"}
    assert pages <= set(index.links)


# ------------------------------------------------------------------------------------ keys, metrics


def _is_of_another_file(block: Block) -> bool:
    """Whether it shows a file that lies in a folder beside a recipe, with all of its keys."""
    folder = (ROOT / block.place.partition(":")[0]).parent
    if folder.parent != ROOT / "recipes":
        return False
    shown = yaml.safe_load(block.text).keys()
    return any(yaml.safe_load(path.read_text()).keys() == shown for path in folder.glob("*/*.yaml"))


@pytest.mark.parametrize("block", YAML_BLOCKS, ids=lambda block: block.place)
def test_yaml_block_is_part_of_recipe(block, tiny_model, tmp_path, monkeypatch):
    if _is_of_another_file(block):
        return
    monkeypatch.chdir(ROOT)
    if block.place.startswith("docs/agents.md"):
        write_example(tmp_path)
    text = block.text.replace("my_task/", "recipes/own_environment/")  # of which it is a copy
    (tmp_path / "part.yaml").write_text(text.replace("path/to/venv/bin/python", sys.executable))
    argv = [
        "--config",
        str(tmp_path / "part.yaml"),
        "--model_name_or_path",
        str(tiny_model),
        "--max_steps",
        "1",
    ]
    parse([*argv, "--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"])


@pytest.mark.parametrize("name", PAGES)
def test_settings_in_page_text_exist(name):
    for span in Page(name).spans:
        if re.match(r"^[a-z][a-z0-9_]+: \S", span) and span.partition(":")[0] not in OTHER_KEYS:
            assert span.partition(":")[0] in recipe_keys(), f"{name}: `{span}`"
        if span.startswith(("warning_thresholds: {", "stop_on_warnings: [")):
            assert set(re.findall(r"[{\[ ](\w+)(?=[:\]])", span)) <= set(SIGNALS), (
                f"{name}: `{span}`"
            )


@pytest.mark.parametrize("name", PAGES)
def test_metrics_in_page_text_are_logged(name):
    theirs = (Path(trl.__file__).parent / "trainer/grpo_trainer.py").read_text()
    for span in Page(name).spans:
        kind, _, rest = span.partition("/")
        if kind == "health" and rest.isidentifier() and rest != "NAME":
            assert rest in SIGNALS, f"{name}: `{span}`"
        elif kind == "time" and rest.isidentifier():
            assert rest in (*TIMES, "save", "evaluate", "step", "probe"), f"{name}: `{span}`"
        elif METRIC.match(span):
            assert span in said() or f'"{span}"' in theirs, f"{name}: `{span}`"


# ----------------------------------------------------------------------------------------- messages


def quotes() -> list[str]:
    return re.findall(r"^> (.+)$", Page("docs/troubleshooting.md").prose, re.MULTILINE)


@pytest.mark.parametrize("quote", quotes())
def test_troubleshooting_message_is_in_program(quote):
    fragments = [fragment.strip() for fragment in quote.split("…")]
    fragments = [fragment for fragment in fragments if len(fragment) >= FRAGMENT]
    assert fragments
    for fragment in fragments:
        assert fragment in said()


def test_warnings_have_line_in_debugging_page():
    table = Page("docs/debugging.md").prose.partition("## Warnings by name")[2]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(SIGNALS)


# ----------------------------------------------------------------------------------- complete lists


def test_reference_is_current():
    generator = runpy.run_path(str(ROOT / "docs/make_reference.py"))
    assert generator["PAGE"].read_text() == generator["reference"](), (
        f"Run `{generator['COMMAND']}`."
    )


def test_environment_keys_are_explained():
    page = Page("docs/own-environment.md")
    assert {"name", "command", *page.spans} >= set(EnvironmentSpec.model_fields)
    page = Page("docs/agents.md")
    assert {*page.spans} >= set(AgentEntry.model_fields)


def test_example_trainer_flags_are_in_migration_page():
    table = Page("docs/migration.md").prose.partition("| flag |")[2].partition("\n\n")[0]
    first_cells = re.findall(r"^\| (`--.*?) \|", table, re.MULTILINE)
    named = {flag for cell in first_cells for flag in re.findall(r"`(--[\w-]+)`", cell)}
    theirs = {flag for action in create_full_parser()._actions for flag in action.option_strings}
    assert named == theirs - {"-h", "--help"}


def test_trl_fields_are_in_migration_page():
    about_trl = Page("docs/migration.md").prose.partition("## From TRL")[2]
    named = set(re.findall(r"`(\w+)(?:: [^`]*)?`", about_trl))
    transformers_own = set(TrainingArguments.__dataclass_fields__)
    assert set(GRPOConfig.__dataclass_fields__) - transformers_own <= named


def test_python_blocks_compile_and_import():
    for name in PAGES:
        for block in Page(name).blocks_of("python"):
            tree = ast.parse(block.text, block.place)
            imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            exec(compile(ast.Module(imports, []), block.place, "exec"), {})
            for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
                if isinstance(call.func, ast.Name) and call.func.id == "AtroposGRPOConfig":
                    given = {keyword.arg for keyword in call.keywords}
                    assert given <= set(AtroposGRPOConfig.__dataclass_fields__), block.place


def test_gpu_versions_are_allowed_and_named():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    wanted = [config["options"]["install_requires"], extras["vllm"], extras["deepspeed"]]
    allowed = {one.name: one.specifier for text in wanted for one in map(Requirement, text.split())}
    lines = [
        line
        for line in (ROOT / "configs/constraints-gpu.txt").read_text().splitlines()
        if line[0] != "#"
    ]
    run = dict(line.split("==") for line in lines)
    assert {
        "vllm",
        "torch",
        "transformers",
        "trl",
        "atroposlib",
        "accelerate",
        "peft",
    } <= run.keys()
    assert not [
        name for name, versions in allowed.items() if name in run and run[name] not in versions
    ]
    vllm, torch, transformers = (
        ".".join(run[name].split(".")[:2]) for name in ("vllm", "torch", "transformers")
    )
    proven = " ".join((ROOT / "docs/proven.md").read_text().split())
    assert (
        f"On NVIDIA H200s with vLLM {vllm}, torch {torch}, transformers {transformers} and"
        in proven
    )
    last = max(int(one.version.split(".")[1]) for one in allowed["vllm"]) - 1  # below 0.33
    assert (
        f"**Not run on GPUs yet**: InfiniBand, more than one machine, vLLM 0.{int(vllm[2:]) + 1} "
        f"to 0.{last}," in proven
    )
