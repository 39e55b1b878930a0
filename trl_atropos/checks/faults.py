"""Environments' known faults, and settings of theirs that do not fit the run. Atropos 0.4.0 is the last version, so
that what is wrong with it stays so: file and line of each is in the comments.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from trl_atropos.checks.environments import Environment
from trl_atropos.checks.finding import WARNING, Finding

WITH_TOKENS = ("vllm", "sglang")  # server types that return token ids and log-probabilities
DUMMY = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"


def faults(one: Environment, recipe, written: list[str]) -> Iterator[Finding]:
    """
    `written` are the servers' URLs in the recipe's file, where flags may have put others in their place: a router or a
    tunnel at those, say.
    """
    yield from one.findings
    yield from [*_code(one), *_servers(one, recipe, written), *_api(one, recipe), *_batch(one, recipe)]


def _code(one: Environment) -> Iterator[Finding]:
    code, tell = one.code, one.tell
    if code.single_server is not None and one.spec.servers is None:  # envs/server_handling/server_manager.py:105
        yield tell(
            "single-server",
            "its `config_init` returns a single server config, and Atropos then ignores `base_url` and samples from "
            "localhost:9004 to 9007",
            f"{one.path}:{code.single_server}",
            'Let it return a list, or add `servers: [{base_url: "{vllm_url}/v1"}]` to this entry and take `--openai.` '
            "flags out of its command.",
        )
    if code.tokenizes and one.transformers is not None and int(one.transformers.split(".")[0]) >= 5:
        line, name = code.tokenizes[0]
        yield tell(
            "tokenizes",
            f"`{name}` makes garbage of its tokens with transformers 5, whose `apply_chat_template` returns a "
            "dictionary",
            f"{one.path}:{line}, transformers {one.transformers} of {one.argv[0]}",
            "Sample with `self.server.managed_server(...)`, which keeps tokens and log-probabilities; or pass "
            "`return_dict=False`; or make a virtual environment with `transformers<5` and name its Python as `python` "
            "of this entry.",
        )
    if code.one_by_one is not None:  # envs/base.py:335
        yield tell(
            "no-logprobs",
            "it has `collect_trajectory` alone, and Atropos' own `collect_trajectories` does not hand on "
            "log-probabilities, so that neither is the age of a rollout known nor the loss corrected for it",
            f"{one.path}:{code.one_by_one}",
            "Write `collect_trajectories`, which returns a group with `inference_logprobs`.",
            level=WARNING,
        )
    if one.unknown_flags:
        yield tell(
            "environment-flag",
            "its command has a flag that its configuration does not have, and Atropos ends at once",
            ", ".join(f"--{name}" for name in one.unknown_flags),
            "Correct or remove it; `python SCRIPT serve --help` lists them.",
        )


def _servers(one: Environment, recipe, written: list[str]) -> Iterator[Finding]:
    spec, tell = one.spec, one.tell
    openai = [name for name in one.flags if name.startswith("openai.")]
    if (one.code.servers or 0) > 1 and openai:  # envs/base.py, `resolve_openai_configs`
        fix = "Take the flags out of its command, and state them as `servers` of this entry."
        seen = f"{one.code.servers} servers, --{openai[0]}"
        yield tell("openai-flags", "its script has several servers, and Atropos then refuses `--openai.`", seen, fix)
    without = [kind for kind in one.server_types if kind not in WITH_TOKENS]
    if without:
        what = "its server type returns neither token ids nor log-probabilities"
        yield tell("server-type", what, f"server_type: {without[0]}", "Set `server_type` to 'vllm'.")
    if {**os.environ, **one.spec.env}.get(DUMMY) not in (None, "", "0"):
        what = "it may send made-up tokens in place of those that were sampled"
        yield tell("dummy-tokens", what, DUMMY, f"Take {DUMMY} out of its variables.")
    entries = spec.filled_servers(recipe.placeholders()) if spec.servers is not None else [one.server]
    sampled = [str(entry.get("base_url", "")) for entry in entries]
    served = {_place(url) for url in [*recipe.training.vllm_server_urls, *written]}
    strange = [url for url in sampled if url and _place(url) not in served]
    if strange and one.code.single_server is None:
        yield tell(
            "server-url",
            "it samples from a server that is none of the run's, which would not be kept in step",
            f"{strange[0]}; the run has {', '.join(recipe.training.vllm_server_urls)}",
            "Set it to `{vllm_url}/v1`, or leave it if a router to the run's servers is there.",
            level=WARNING,
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


def _api(one: Environment, recipe) -> Iterator[Finding]:
    known, training, tell = one.settings, recipe.training, one.tell
    url = str(known.get("rollout_server_url", "http://localhost:8000"))
    if _place(url)[1] != _place(training.atropos_url)[1]:
        yield tell(
            "environment-api",
            "it registers at another Atropos API than that which the run takes its batches from",
            f"rollout_server_url: {url}, atropos_url: {training.atropos_url}",
            "Add `--env.rollout_server_url {atropos_url}` to its command.",
        )
    if "wandb_name" in known and known["wandb_name"] is None:  # api/server.py:121, `desired_name: str`
        fix = "Add `--env.wandb_name NAME` to its command. It names the environment in Weights & Biases or without."
        yield tell("environment-name", "the Atropos API takes no environment without a name", "wandb_name: none", fix)
    if str(one.settings.get("use_wandb")).lower() == "true" and not _wandb_is_set_up(one):  # envs/base.py:471
        yield tell(
            "environment-wandb",
            "it logs to Weights & Biases, which asks for a key that is not there, and the environment ends",
            "use_wandb: true, and no WANDB_API_KEY",
            "Add `--env.use_wandb false` to its command, or log in with `wandb login`.",
        )
    steps = one.whole("total_steps")
    if steps is not None and 0 <= steps < training.max_steps:
        yield tell(
            "environment-steps",
            "it ends before the run does",
            f"total_steps: {steps}, max_steps: {training.max_steps}",
            "Add `--env.total_steps -1` to its command.",
        )
    ahead, oldest = one.whole("max_batches_offpolicy"), training.max_staleness
    if ahead is not None and oldest is not None and ahead > max(1, oldest):
        yield tell(
            "staleness",
            "it samples so many batches ahead that what it sends last is too old to be trained on, and dropped",
            f"max_batches_offpolicy: {ahead}, max_staleness: {oldest}",
            f"Add `--env.max_batches_offpolicy {max(1, oldest)}` to its command, or raise `max_staleness`.",
            level=WARNING,
        )


def _wandb_is_set_up(one: Environment) -> bool:
    """Whether there is a key, or anything else that says how to do without."""
    variables = {**os.environ, **one.spec.env}
    home = Path(str(variables.get("HOME", "~"))).expanduser()
    files = [Path(str(variables.get("NETRC", home / ".netrc"))), home / "_netrc", home / ".config/wandb/settings"]
    names = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_DISABLED")
    return any(variables.get(name) for name in names) or any(path.is_file() for path in files)


def _batch(one: Environment, recipe) -> Iterator[Finding]:
    training, tell = recipe.training, one.tell
    size, batch = one.whole("group_size"), training.generation_batch_size
    if size and batch % size:
        yield tell(
            "group-size",
            "its groups do not fill a generation batch, and the Atropos API would never deliver one",
            f"group_size: {size}, a generation batch of {batch} rows",
            "Make the batch (`per_device_train_batch_size` x processes x `gradient_accumulation_steps`) a multiple of "
            "the group size (`--env.group_size`).",
        )
    if size == 1 and training.single_row_groups == "refuse":
        yield tell(
            "group-of-one",
            "its groups have one rollout, which has no statistics of a group, and the run stops at the first",
            f"group_size: 1, single_row_groups: {training.single_row_groups}",
            "Raise its `group_size`, or set `single_row_groups` to `raw` (the score is the advantage) or `zero`.",
        )
    if str(one.settings.get("ensure_scores_are_not_same")).lower() == "true":
        yield tell(
            "drops-groups",
            "it drops groups whose scores are alike, which distorts the reward curve and starves a run that has "
            "nearly learned its task",
            "ensure_scores_are_not_same: true",
            "Add `--env.ensure_scores_are_not_same false` to its command; `replace_zero_variance_groups: true` "
            "replaces them in the trainer, where they are counted.",
            level=WARNING,
        )
    heat = one.number("temperature")
    if heat is not None and abs(heat - training.temperature) > 1e-6:
        yield tell(
            "temperature",
            "it samples at another temperature than that which the trainer scores its tokens at",
            f"temperature: {heat} there, {training.temperature} in the run",
            "Add `--env.temperature {temperature}` to its command.",
        )


def together(environments: list[Environment]) -> Iterator[Finding]:
    """What several environments do to each other."""
    sizes = {one.spec.name: size for one in environments if (size := one.whole("group_size"))}
    largest = max(sizes.values(), default=1)
    if any(largest % size for size in sizes.values()):  # api/utils.py:59
        yield Finding(
            "mixed-group-sizes",
            "The Atropos API puts small groups together until they are as large as the largest ones, which these "
            "cannot be, so that they wait for ever",
            ", ".join(f"{name}: group_size {size}" for name, size in sizes.items()),
            "Make every group size divide the largest one.",
        )
    shares = {one.spec.name: one.number("min_batch_allocation") for one in environments}
    least = {name: share for name, share in shares.items() if share is not None}
    if sum(least.values()) > 1:  # api/utils.py:144
        yield Finding(
            "batch-shares",
            "The least shares of a batch that environments ask for are more than one batch",
            ", ".join(f"{name}: min_batch_allocation {share:g}" for name, share in least.items()),
            "Lower `min_batch_allocation` until they are 1 together, or leave it out.",
        )
