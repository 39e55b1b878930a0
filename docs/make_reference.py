"""Writes `docs/reference.md`: every setting, warning and command, from the help texts that the
program itself shows.

    python docs/make_reference.py

TRL's and Transformers' own fields are not in it: their documentation has them.
"""

import os
import re
import subprocess
import sys
import types
from collections.abc import Iterable
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Union, get_args, get_origin, get_type_hints

from trl_atropos.config import AtroposGRPOConfig, described
from trl_atropos.logging import LEVELS, VARIABLE
from trl_atropos.metrics.health import SIGNALS
from trl_atropos.protocol import SESSION_TOKEN_VARIABLE, TOKEN_VARIABLE
from trl_atropos.recipe import ServicesConfig

COMMAND = "python docs/make_reference.py"
PAGE = Path(__file__).with_name("reference.md")
HELP_WIDTH = "100"  # columns that the commands wrap their help at


HEAD = f"""\
<!-- Made by `{COMMAND}`. Change the help texts, not this file. -->

# Reference

What `trl_atropos` adds to TRL: settings, warnings and commands, as the program itself tells them. Every argument of
[TRL's `GRPOConfig`](https://huggingface.co/docs/trl/main/en/grpo_trainer#trl.GRPOConfig) may be used beside these;
[migration](migration.md) says which of those have no effect here. All are keys of a recipe and flags of
`python -m trl_atropos.train`, whose `--help` lists these and `--help_all` those of TRL, too.
"""
SERVICES = """\
## Services of a recipe

Which services a run starts and stops. Those it does not start are used by their URL and never touched.
"""
ENVIRONMENTS = """\
An entry of `environments` has these keys; what they mean is in [own environment](own-environment.md).

{keys}

Beside these, a recipe may have `env`, a mapping of environment variables that are set before anything is imported, and
the fields of TRL's `ModelConfig`, which describe the model: `model_name_or_path`, `dtype`, `use_peft`, `lora_r`, ...
"""
WARNINGS = """\
## Health warnings

Measured on every batch, logged as `health/NAME`, and explained in the log when they stay above their threshold for
that many batches in a row. `warning_thresholds` changes a threshold, `stop_on_warnings` ends the run. What to do about
each is in [debugging](debugging.md).
"""
VARIABLES = f"""\
## Environment variables

| | |
|---|---|
| `{TOKEN_VARIABLE}` | protects the server's routes that change weights: the same on server and trainer. A recipe \
that starts its server makes one up; `trl-atropos serve` too, and says where it is |
| `{SESSION_TOKEN_VARIABLE}` | opens [sessions](sessions.md), and does nothing else: a run computes it from the control \
token, for its environments |
| `{VARIABLE}` | how much the package says: {", ".join(LEVELS)} |

Those of the libraries work as ever, in the shell or under `env` of a recipe, and reach the services, too: `HF_HOME`,
`HF_HUB_OFFLINE`, `HF_TOKEN`, `CUDA_VISIBLE_DEVICES`, `OMP_NUM_THREADS`, `VLLM_*`, `NCCL_*`, `WANDB_PROJECT`.
"""
CLI = """\
## Commands
"""


def reference() -> str:
    """The whole page."""
    parts = [HEAD, "## Training\n"]
    for title, settings in groupby(described(AtroposGRPOConfig), key=lambda setting: setting[0]):
        parts += [f"### {title}\n", _table(AtroposGRPOConfig, settings)]
    parts += [SERVICES, _table(ServicesConfig, described(ServicesConfig))]
    parts.append(ENVIRONMENTS.format(keys=_environment_keys()))
    parts += [WARNINGS, _warnings(), VARIABLES, CLI]
    parts.append(f"### `trl-atropos`\n\n```text\n{_help_of(['--help'])}```\n")
    benchmarks = re.findall(r"^  (\w+) ", _help_of(["bench", "--help"]), re.MULTILINE)
    for command in (
        "check",
        "try",
        "eval",
        "init",
        "serve",
        "sessions",
        "report",
        "slurm",
        "bench",
        *(f"bench {name}" for name in benchmarks),
    ):
        parts.append(
            f"### `trl-atropos {command}`\n\n```text\n{_help_of([*command.split(), '--help'])}```\n"
        )
    return "\n".join(parts)


def _table(config: type, settings: Iterable[tuple[str, str, str]]) -> str:
    hints, defaults = (
        get_type_hints(config),
        {field.name: field.default for field in fields(config)},
    )
    lines = ["| field | type | default | |", "|---|---|---|---|"]
    for _, name, text in settings:
        escaped = text.replace("|", "\\|")
        lines.append(
            f"| `{name}` | {_type_name(hints[name])} | {_default(defaults[name])} | {escaped} |"
        )
    return "\n".join([*lines, ""])


def _type_name(hint: object) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_type_name(one) for one in get_args(hint) if one is not types.NoneType)
    return f"`{hint.__name__}`" if get_origin(hint) is None else f"`{hint}`"


def _default(default: object) -> str:
    if default is None:
        return "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _environment_keys() -> str:
    from trl_atropos.recipe import EnvironmentSpec

    told = []
    for name, key in EnvironmentSpec.model_fields.items():
        told.append(f"`{name}` (required)" if key.is_required() else f"`{name}`")
    return ", ".join(told) + "."


def _warnings() -> str:
    lines = ["| name | warns above | batches in a row |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {signal.threshold:g} | {signal.patience} |"
        for name, signal in SIGNALS.items()
    ]
    return "\n".join([*lines, ""])


def _help_of(arguments: list[str]) -> str:
    command = [sys.executable, "-m", "trl_atropos.cli", *arguments]
    env = os.environ | {"COLUMNS": HELP_WIDTH}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=True
    ).stdout


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
