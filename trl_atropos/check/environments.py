"""Environments: what is installed for their Python, and the settings that the recipe states of them; and whether the
model, the server and the environments mean the same by a token, and how many of them they take.

What the run writes for an environment itself needs no look. Tokenizers are loaded only if they are on this machine.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trl_atropos.check.memory import Case
from trl_atropos.check.settings import requirement
from trl_atropos.errors import ERROR, WARNING
from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.protocol import server_flags, stated_flags, tokenizer_fingerprint
from trl_atropos.recipe import EnvironmentSpec, Recipe

PYTHON_DEADLINE = 60.0  # seconds; a cold start from a network disk takes some
PROBE = """
import importlib.metadata, importlib.util, json, sys
told = {}
for name in ("transformers", "atroposlib"):
    try:
        told[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        told[name] = None
try:
    told["module"] = importlib.util.find_spec(sys.argv[1]).origin if sys.argv[1] else ""
except Exception:  # it may import the package that the module is in
    told["module"] = None
print(json.dumps(told))
"""
BROKEN = "tokenize_for_trainer("  # of Atropos, by transformers 5: its masks and token ids are garbage
WITH_TOKENS = ("vllm", "sglang")  # server types that return token ids and log-probabilities
DUMMY = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"
LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"  # vLLM's own leave to serve more than the model was made for


def environments(recipe: Recipe, written: list[str]) -> Iterator[Finding]:
    """
    `written` are the servers' URLs in the recipe's file, where flags may have put others in their place: a router or a
    tunnel at those, say.
    """
    for spec in recipe.environments:
        command = recipe.environment_command(spec)
        if "python" in os.path.basename(command[0]):
            yield from _program(spec, command)
        yield from _servers(recipe, spec, command, written)
        yield from _settings(recipe, spec)
    yield from _together(recipe)


def _tell(spec: EnvironmentSpec, what: str, seen: str, fix: str, code: str, level: str = ERROR) -> Finding:
    return Finding(f"Environment {spec.name!r}: {what}", seen, fix, code, level)


def _program(spec: EnvironmentSpec, command: list[str]) -> Iterator[Finding]:
    """Of a Python: what is installed there, and whether what it runs is."""
    python, words = command[0], command[1:]
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    script = "" if module else next((word for word in words if word.endswith(".py")), "")
    env = {**os.environ, **{name: str(value) for name, value in spec.env.items()}}
    probe = [python, "-c", PROBE, module]
    try:
        done = subprocess.run(
            probe, capture_output=True, text=True, env=env, cwd=spec.cwd, timeout=PYTHON_DEADLINE, check=True
        )
        told = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        what, seen = "its Python cannot be asked what is installed there", f"{python}: {_why(error)}"
        yield _tell(spec, what, seen, "Correct its `python`.", "environment-python")
        return
    yield from _library(spec, python, told["atroposlib"])
    path = told["module"] if module else os.path.join(spec.cwd or "", script)
    if path is None or (script and not os.path.isfile(path)):
        what = "its Python does not find the module that it runs" if module else "there is no such script"
        seen = f"{module} in {python}" if module else path
        yield _tell(spec, what, seen, "Correct its `command` or `cwd`.", "environment-script")
    elif int((told["transformers"] or "0").partition(".")[0]) >= 5 and _calls_broken(path):
        yield _tell(
            spec,
            "`tokenize_for_trainer` makes garbage of its tokens with transformers 5, whose `apply_chat_template` "
            "returns a dictionary",
            f"{path}, transformers {told['transformers']} of {python}",
            "Sample with `self.server.managed_server(...)`, which keeps tokens and log-probabilities; or make a "
            "virtual environment with `transformers<5` and name its Python as `python` of this entry.",
            "tokenizes",
        )


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
    return f"no answer in {PYTHON_DEADLINE:g} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)


def _calls_broken(path: str) -> bool:
    return os.path.isfile(path) and BROKEN in Path(path).read_text(encoding="utf-8", errors="replace")


def _library(spec: EnvironmentSpec, python: str, version: str | None) -> Iterator[Finding]:
    wanted = requirement("atroposlib")
    if version is not None and (wanted is None or wanted.specifier.contains(version, prereleases=True)):
        return
    what = "the Atropos that is installed for its Python is of another version" if version else "it has no Atropos"
    fix = (
        f'Install it (`{python} -m pip install "atroposlib{wanted.specifier if wanted else ""}"`), or name the Python '
        "of another virtual environment as `python` of this entry."
    )
    seen = f"atroposlib {version}" if version else f"atroposlib is not installed for {python}"
    yield _tell(spec, what, seen, fix, "environment-atroposlib")


def _servers(recipe: Recipe, spec: EnvironmentSpec, command: list[str], written: list[str]) -> Iterator[Finding]:
    """Of the servers that the recipe states for an environment."""
    if {**os.environ, **spec.env}.get(DUMMY) not in (None, "", "0"):
        what = "it may send made-up tokens in place of those that were sampled"
        yield _tell(spec, what, DUMMY, f"Take {DUMMY} out of its variables.", "dummy-tokens")
    flags = stated_flags(command).items()
    stated = [{flag.removeprefix("--openai."): value for flag, value in flags if flag.startswith("--openai.")}]
    content = recipe.environment_file(spec)
    stated = stated if content is None else content["openai"]
    kinds = [one["server_type"] for one in stated if one.get("server_type", "vllm") not in WITH_TOKENS]
    if kinds:
        what = "its server type returns neither token ids nor log-probabilities"
        yield _tell(spec, what, f"server_type: {kinds[0]}", "Set `server_type` to 'vllm'.", "server-type")
    served = {_place(url) for url in [*recipe.training.vllm_server_urls, *written]}
    strange = [one["base_url"] for one in stated if one.get("base_url") and _place(one["base_url"]) not in served]
    if strange:
        yield _tell(
            spec,
            "it samples from a server that is none of the run's, which would not be kept in step",
            f"{strange[0]}; the run has {', '.join(recipe.training.vllm_server_urls)}",
            "Set it to `{vllm_url}/v1`, or leave it if a router to the run's servers is there.",
            "server-url",
            WARNING,
        )


def _place(url: str) -> tuple[str, int | None]:
    """Host and port; without a port where that is no number from 0 to 65,535."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        port = parts.port or 80
    except ValueError:
        port = None
    return ("127.0.0.1" if host in ("localhost", "0.0.0.0", "::1") else host), port


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _settings(recipe: Recipe, spec: EnvironmentSpec) -> Iterator[Finding]:
    """Of its settings that the recipe states, and that do not fit the run's."""
    stated, training = recipe.stated(spec), recipe.training
    url = stated.get("rollout_server_url", training.atropos_url)
    if _place(url)[1] != _place(training.atropos_url)[1]:
        what = "it registers at another Atropos API than that which the run takes its batches from"
        seen = f"rollout_server_url: {url}, atropos_url: {training.atropos_url}"
        yield _tell(spec, what, seen, "Set it to `{atropos_url}`.", "environment-api")
    steps = _number(stated.get("total_steps"))
    if steps is not None and 0 <= steps < training.max_steps:
        seen = f"total_steps: {steps:.0f}, max_steps: {training.max_steps}"
        yield _tell(spec, "it ends before the run does", seen, "Leave `total_steps` out.", "environment-steps")
    ahead, oldest = _number(stated.get("max_batches_offpolicy")), training.max_staleness
    if ahead is not None and oldest is not None and ahead > max(1, oldest):
        yield _tell(
            spec,
            "it samples so many batches ahead that what it sends last is too old to be trained on, and dropped",
            f"max_batches_offpolicy: {ahead:.0f}, max_staleness: {oldest}",
            f"Lower `max_batches_offpolicy` to {max(1, oldest)}, or raise `max_staleness`.",
            "staleness",
            WARNING,
        )
    if _number(stated.get("group_size")) == 1 and training.single_row_groups == "refuse":
        yield _tell(
            spec,
            "its groups have one rollout, which has no statistics of a group, and the run stops at the first",
            f"group_size: 1, single_row_groups: {training.single_row_groups}",
            "Raise its `group_size`, or set `single_row_groups` to `raw` (the score is the advantage) or `zero`.",
            "group-of-one",
        )


def _together(recipe: Recipe) -> Iterator[Finding]:
    """What several environments do to each other."""
    stated = {spec.name: recipe.stated(spec) for spec in recipe.environments}
    sizes = {name: int(size) for name, it in stated.items() if (size := _number(it.get("group_size")))}
    largest = max(sizes.values(), default=1)
    if any(largest % size for size in sizes.values()):  # api/utils.py:59
        yield Finding(
            "The Atropos API puts small groups together until they are as large as the largest ones, which these "
            "cannot be, so that they wait for ever",
            ", ".join(f"{name}: group_size {size}" for name, size in sizes.items()),
            "Make every group size divide the largest one.",
            "mixed-group-sizes",
        )
    shares = {name: share for name, it in stated.items() if (share := _number(it.get("min_batch_allocation")))}
    if sum(shares.values()) > 1:  # api/utils.py:144
        yield Finding(
            "The least shares of a batch that environments ask for are more than one batch",
            ", ".join(f"{name}: min_batch_allocation {share:g}" for name, share in shares.items()),
            "Lower `min_batch_allocation` until they are 1 together, or leave it out.",
            "batch-shares",
        )


# ------------------------------------------------------------------------------------------------------------- tokens


@cache
def _tokenizer(name: str) -> Any:
    """`None` if it is not on this machine."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception:  # noqa: BLE001 - what a tokenizer's own files may raise has no bound; without it nothing is said
        return None


def tokenizers(recipe: Recipe) -> Iterator[Finding]:
    """Of the server and of every environment that the recipe states one for, against the model's."""
    model, flags = str(recipe.model.model_name_or_path), server_flags(recipe.vllm_flags())
    if "--tokenizer" in flags:
        yield from _compare("The server", flags["--tokenizer"], model, "--tokenizer", "`vllm_args`")
    template = flags.get("--chat-template", "")
    if template.endswith((".jinja", ".json", ".txt")) and not os.path.isfile(template):
        what, fix = "The server's chat template is not there", "Correct `--chat-template` in `vllm_args`."
        yield Finding(what, f"--chat-template {template}", fix, "chat-template")
    for spec in recipe.environments:
        if own := recipe.stated(spec).get("tokenizer_name"):
            yield from _compare(f"Environment {spec.name!r}", str(own), model, "tokenizer_name", "its entry")


def _compare(who: str, name: str, model: str, setting: str, place: str) -> Iterator[Finding]:
    if name == model or (os.path.exists(name) and os.path.exists(model) and os.path.samefile(name, model)):
        return
    ours, theirs = _tokenizer(model), _tokenizer(name)
    seen, fix = f"{setting}: {name}, the run's model: {model}", f"Leave `{setting}` out of {place}, or name the model."
    if ours is None or theirs is None:
        what = f"{who} tokenizes by another name than the run's model"
        yield Finding(what, seen, fix, "tokenizer", WARNING if place == "its entry" else ERROR)
    elif tokenizer_fingerprint(ours.get_vocab()) != tokenizer_fingerprint(theirs.get_vocab()):
        what = f"{who} has another vocabulary than the run's model, so that the same ids mean different text"
        yield Finding(what, seen, fix, "tokenizer")


def lengths(recipe: Recipe, case: Case, stated: dict[str, Any]) -> Iterator[Finding]:
    """`stated` are the recipe's settings."""
    training, starts = recipe.training, recipe.services.start_vllm and case.flags is not None
    positions, served = _positions(case.config), case.max_model_len if starts else None
    if served and positions and served > positions and os.environ.get(LONGER, "0") != "1":
        yield Finding(
            "The server is to take longer sequences than the model was made for, and vLLM will not start",
            f"--max-model-len {served}, max_position_embeddings: {positions}",
            f"Lower `--max-model-len` in `vllm_args` to {positions} or less.",
            "model-length",
        )
    longest = training.max_sequence_length
    if longest and served and longest > served:
        yield Finding(
            "The trainer is to take longer sequences than the server samples, and stops at the start",
            f"max_sequence_length: {longest}, --max-model-len {served}",
            f"Lower `max_sequence_length`, or set `--max-model-len {longest}` in `vllm_args`.",
            "sequence-length",
        )
    limit = min((one for one in (longest, served) if one), default=None)
    completion = training.max_completion_length
    if limit and "max_completion_length" in stated and completion is not None and completion >= limit:
        yield Finding(
            "Completions cannot become as long as `max_completion_length`, because prompts count too",
            f"max_completion_length: {completion}, the longest sequence: {limit}",
            "Lower `max_completion_length`, or raise `--max-model-len` in `vllm_args`.",
            "completion-length",
            WARNING,
        )
    for spec in recipe.environments:
        own = _number(recipe.stated(spec).get("max_token_length"))
        if own and limit and own > limit:
            what = "it samples longer sequences than the server takes or the trainer trains on"
            seen = f"max_token_length: {own:.0f}, the longest sequence: {limit}"
            yield _tell(spec, what, seen, f"Lower `max_token_length` to {limit}.", "environment-length", WARNING)


def _positions(config: Any) -> int | None:
    """`None` where vLLM derives another number from it, or none is there."""
    fields = config.get_text_config().to_dict()
    scaled = any("factor" in str(fields.get(name)) for name in ("rope_scaling", "rope_parameters"))
    return None if scaled else fields.get("max_position_embeddings")
