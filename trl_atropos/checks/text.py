"""Whether the model, the server and the environments mean the same by a token, and how many of them they take.

Tokenizers are loaded only if they are on this machine already.
"""

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

from trl_atropos.checks.environments import Environment
from trl_atropos.checks.finding import ERROR, WARNING, Finding
from trl_atropos.flags import server_flags
from trl_atropos.protocol import tokenizer_fingerprint

LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"  # vLLM's own leave to serve more than the model was made for


@cache
def tokenizer(name: str) -> Any:
    """`None` if it is not on this machine."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception:  # noqa: BLE001 - what a tokenizer's own files may raise has no bound; without it nothing is said
        return None


def tokenizers(recipe, environments: list[Environment]) -> Iterator[Finding]:
    """Of the server and of every environment, against the model's."""
    model, flags = str(recipe.model.model_name_or_path), server_flags(recipe.vllm_flags())
    if "--tokenizer" in flags:
        fix = "Leave `--tokenizer` out of `vllm_args`."
        yield from _compare("The server", flags["--tokenizer"], model, "--tokenizer", fix, ERROR)
    template = flags.get("--chat-template")
    if template is not None and template.endswith((".jinja", ".json", ".txt")) and not os.path.isfile(template):
        fix = "Correct `--chat-template` in `vllm_args`."
        yield Finding("chat-template", "The server's chat template is not there", f"--chat-template {template}", fix)
    for one in environments:
        own = one.settings.get("tokenizer_name")
        who, fix = f"Environment {one.spec.name!r}", "Add `--env.tokenizer_name {model}` to its command."
        if own is not None:
            stated = ERROR if "tokenizer_name" not in one.explicit else WARNING
            yield from _compare(who, str(own), model, "tokenizer_name", fix, stated)
        yield from _of_its_server(one, model)
        loaded = tokenizer(str(own or model))
        if one.code.chats is not None and template is None and loaded is not None and not loaded.chat_template:
            yield one.tell(
                "chat-template",
                "it samples chats, and the tokenizer has no chat template",
                f"{one.path}:{one.code.chats}, {own or model}",
                "Take a model that has one (an instruct model), save one with the tokenizer, or sample plain "
                "completions (`managed.completion`).",
            )


def _of_its_server(one: Environment, model: str) -> Iterator[Finding]:
    """Atropos loads a tokenizer by the name of the server's model (envs/server_handling/vllm_server.py:41)."""
    if one.spec.servers is not None or one.server_types != ["vllm"]:
        return
    name = one.server.get("tokenizer_name", "none")
    name = one.server.get("model_name") if name == "none" else name
    fix = "Add `--openai.model_name {model}` to its command."
    if name == "default":
        what = "its server has no model name, by which Atropos loads a tokenizer, and it ends at once"
        yield one.tell("server-model-name", what, "model_name: default", fix)
    elif name is not None and name != one.settings.get("tokenizer_name"):
        who = f"Environment {one.spec.name!r} with its server"
        yield from _compare(who, str(name), model, "model_name", fix, WARNING)


def _compare(who: str, name: str, model: str, setting: str, fix: str, unsure: str) -> Iterator[Finding]:
    """`unsure` is the level where both are not on this machine, and their names alone differ."""
    if name == model or (os.path.exists(name) and os.path.exists(model) and os.path.samefile(name, model)):
        return
    ours, theirs = tokenizer(model), tokenizer(name)
    seen = f"{setting}: {name}, the run's model: {model}"
    if ours is None or theirs is None:
        what = f"{who} tokenizes by another name than the run's model"
        yield Finding("tokenizer", what, seen, fix, unsure)
    elif tokenizer_fingerprint(ours.get_vocab()) != tokenizer_fingerprint(theirs.get_vocab()):
        what = f"{who} has another vocabulary than the run's model, so that the same ids mean different text"
        yield Finding("tokenizer", what, seen, fix)
    elif ours.chat_template != theirs.chat_template:
        what = f"{who} has another chat template than the run's model"
        yield Finding("chat-template", what, seen, fix, WARNING)


def lengths(recipe, case: Any, stated: dict[str, Any], environments: list[Environment]) -> Iterator[Finding]:
    """`case` is what memory is estimated from (`trl_atropos.memory.case`), `stated` the recipe's settings."""
    training, starts = recipe.training, recipe.services.start_vllm and case.server is not None
    positions, served = _positions(case.config), case.server.max_model_len if starts else None
    if served and positions and served > positions and os.environ.get(LONGER, "0") != "1":
        yield Finding(
            "model-length",
            "The server is to take longer sequences than the model was made for, and vLLM will not start",
            f"--max-model-len {served}, max_position_embeddings: {positions}",
            f"Lower `--max-model-len` in `vllm_args` to {positions} or less.",
        )
    longest = training.max_sequence_length
    if longest and served and longest > served:
        yield Finding(
            "sequence-length",
            "The trainer is to take longer sequences than the server samples, and stops at the start",
            f"max_sequence_length: {longest}, --max-model-len {served}",
            f"Lower `max_sequence_length`, or set `--max-model-len {longest}` in `vllm_args`.",
        )
    limit = min((one for one in (longest, served) if one), default=None)
    completion = training.max_completion_length
    if limit and "max_completion_length" in stated and completion is not None and completion >= limit:
        yield Finding(
            "completion-length",
            "Completions cannot become as long as `max_completion_length`, because prompts count too",
            f"max_completion_length: {completion}, the longest sequence: {limit}",
            "Lower `max_completion_length`, or raise `--max-model-len` in `vllm_args`.",
            WARNING,
        )
    for one in environments:
        own = one.whole("max_token_length") if "max_token_length" in one.explicit else None
        if own and limit and own > limit:
            yield one.tell(
                "environment-length",
                "it samples longer sequences than the server takes or the trainer trains on",
                f"max_token_length: {own}, the longest sequence: {limit}",
                f"Add `--env.max_token_length {limit}` to its command.",
                level=WARNING,
            )


def _positions(config: Any) -> int | None:
    """`None` where vLLM derives another number from it, or none is there."""
    fields = config.get_text_config().to_dict()
    scaled = any("factor" in str(fields.get(name)) for name in ("rope_scaling", "rope_parameters"))
    return None if scaled else fields.get("max_position_embeddings")
