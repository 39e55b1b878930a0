"""Flags of vLLM that are known from its source, against vLLM's own parser."""

import json
import os

import pytest

from tests.forge import SERVER
from trl_atropos.server.vllm_flags import known_flags, unknown_flags

PARSER = """
import importlib, json
for place in ("common", "launchers", "openai"):  # from 0.33 on, from 0.29 on, and before
    try:
        module = importlib.import_module(f"vllm.entrypoints.{place}.cli_args")
    except ImportError:
        continue
    break
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = module.make_arg_parser(FlexibleArgumentParser())
flags = [flag for action in parser._actions for flag in action.option_strings]
print("FLAGS" + json.dumps([flag for flag in flags if flag.startswith("--")]))
"""


@pytest.mark.slow(20)
def test_every_flag_of_vllm_is_known(tmp_path):
    (tmp_path / "flags_of_vllm.py").write_text(PARSER)
    log = tmp_path / "log"
    process = SERVER.fork(["-m", "flags_of_vllm"], os.environ, log, tmp_path)
    assert process.wait(300) == 0, log.read_text()
    line = next(line for line in log.read_text().splitlines() if line.startswith("FLAGS"))
    flags = json.loads(line.removeprefix("FLAGS"))
    assert len(flags) > 200
    assert unknown_flags([flag for flag in flags if flag != "--help"], "colocate") == {}


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--max-model-lenn", "--max-model-len"),
        ("--enforce_eagre", "--enforce-eager"),
        ("--gpu-memory-utilisation", "--gpu-memory-utilization"),
        ("--no-such-flag-at-all", None),
    ],
)
def test_misspelt_flag_is_found_with_its_correction(flag, meant):
    (found,) = unknown_flags([flag, "1", "--seed", "3"], "colocate").items()
    assert found == (flag.replace("_", "-"), meant)


@pytest.mark.parametrize(
    "words",
    [
        ["--max_model_len", "512"],
        ["--no-enforce-eager"],
        ["--compilation-config.mode", "0"],
        ["-tp", "2", "--seed=1"],
        ["--max-num-seqs", "8", "--chat-template", "none.jinja", "--lora-modules", "a=b"],
    ],
)
def test_right_flags_are_known_in_every_spelling(words):
    assert known_flags()
    assert unknown_flags(words, "colocate") == {}


def test_flag_of_the_front_is_for_restart_alone():
    assert unknown_flags(["--drain_timeout", "30"], "restart") == {}
    assert list(unknown_flags(["--drain_timeout", "30"], "server")) == ["--drain-timeout"]
