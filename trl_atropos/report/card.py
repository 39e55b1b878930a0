"""The model card and the Hub: what the card says beside TRL's part, and which files of a run are uploaded."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from transformers import TrainerState
from transformers.utils import hf_api

from trl_atropos.config import AtroposGRPOConfig
from trl_atropos.errors import PushError
from trl_atropos.report.run_log import SECRET, changed, portable, portable_value, versions
from trl_atropos.report.summary import CURVE, draw_reward_curve

logger = logging.getLogger(__name__)

CARD = "README.md"
AFTER = "## Citations"  # heading of TRL's template that stays behind what is added
# Settings that say where a run was, or that transformers sets by itself.
LEFT_OUT = re.compile(r"output_dir|logging_dir|atropos_url|vllm_server_(base_url|host|port)|accelerator_config|debug")


def complete_card(
    args: AtroposGRPOConfig,
    state: TrainerState,
    base: str,
    adapters: Sequence[Any] = (),
    environments: Mapping[str, str] | None = None,
    draw: bool = True,
) -> None:
    """
    Completes the card that TRL has just written in `output_dir`, and draws the reward curve beside it.

    Args:
        base: Name or path of the model that the run began with.
        adapters: PEFT configurations of what was trained, if not the whole model.
        environments: Command of each environment, by name.
        draw: Whether to draw the curve anew.
    """
    folder = Path(args.output_dir)
    card = ModelCard.load(folder / CARD)
    card.data.pipeline_tag = "text-generation"
    if adapters:
        card.data.library_name = "peft"
    # What TRL's template says of a model that is not on the Hub.
    text = card.text.replace("[None](https://huggingface.co/None)", f"`{portable(base)}`")
    text = text.replace('model="None"', f'model="{portable(args.output_dir)}"')
    logs = [entry for entry in state.log_history if "reward" in entry]
    rewards = [entry["reward"] for entry in logs]
    if len(rewards) > 1 and draw:
        draw_reward_curve(args.output_dir, rewards, [entry["step"] for entry in logs])
    source = "rollouts of Atropos environments" if args.replay_paths is None else "recorded rollouts"
    run, steps = portable(args.run_name or folder.name), f"{state.global_step} of {args.max_steps} steps"
    parts = [f"## Atropos run\n\nTrained on {source}, run `{run}`, {steps}, {datetime.now(UTC):%Y-%m-%d}."]
    if rewards:
        parts.append(f"Mean reward at the first log: {rewards[0]:.3f}, at the last: {rewards[-1]:.3f}.")
    if len(rewards) > 1 and (folder / CURVE).exists():
        parts.append(f"![Mean reward by optimizer step]({CURVE})")
    commands = {name: portable(" ".join(command.split())) for name, command in (environments or {}).items()}
    parts += ["### Environments"] * bool(commands)
    parts += [f"`{name}`:\n\n```bash\n{command}\n```" for name, command in commands.items()]
    parts += ["### Settings", _settings(args, base, adapters), "### Versions"]
    parts.append("\n".join(f"- {name}: {version}" for name, version in versions().items()))
    before, heading, after = text.partition(AFTER)
    card.text = "\n\n".join([before.rstrip("\n"), *parts, heading + after])
    card.save(folder / CARD)


def _settings(args: AtroposGRPOConfig, base: str, adapters: Sequence[Any]) -> str:
    """The settings that differ from their defaults, as YAML."""
    settings: dict[str, Any] = {"model_name_or_path": portable(base)} | _differing(args)
    if adapters:
        settings["adapters"] = [{"peft_type": portable_value(one.peft_type)} | _differing(one) for one in adapters]
    dumped = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=1000)
    title = "Every setting that differs from its default"
    return f"<details><summary>{title}</summary>\n\n```yaml\n{dumped}```\n\n</details>"


def _differing(settings: Any) -> dict[str, Any]:
    names = [name for name in changed(settings) if not LEFT_OUT.fullmatch(name) and not SECRET.search(name)]
    values = {name: portable_value(getattr(settings, name)) for name in names}
    return {name: value for name, value in values.items() if value not in ([], {})}  # transformers' form of `None`


# ------------------------------------------------------------------------------------------------ what goes to the Hub

# `ignore_patterns` of `HfApi.upload_folder`. The card says what `training_args.bin` does. `runs` are TensorBoard's,
# which hold every setting as it was, and are written to during an upload.
KEPT_HERE = [f"{folder}/*" for folder in ("rollouts", "completions", "logs", "environments", "adapters", "policies")]
KEPT_HERE += ["runs/*", "rollouts-before-*", "rollouts.jsonl", "run_log.jsonl", ".run.lock", "report.html"]
KEPT_HERE += ["training_args.bin"]


@contextmanager
def model_only() -> Iterator[None]:
    """
    Within, Transformers uploads nothing of `KEPT_HERE`, and a failure of an upload in the background is logged. (With
    a `.gitignore`, the Hub would still be sent the names and the first bytes of these files.)
    """
    api = hf_api()
    upload = api.upload_folder

    def upload_model(**kwargs: Any) -> Any:
        kwargs["ignore_patterns"] = [*(kwargs.get("ignore_patterns") or []), *KEPT_HERE]
        try:
            started = upload(**kwargs)
        except Exception as error:  # of the Hub, of the network, of the token: what is saved is the same
            raise PushError(
                f"The model is saved in {kwargs['folder_path']}, but its push to the Hub as {kwargs['repo_id']} "
                f"failed ({_short(error)})",
                fix="Correct what it says, and push again with `trainer.push_to_hub()` or `hf upload`.",
            ) from error
        if isinstance(started, Future):
            started.add_done_callback(_warn_of_failure)
        return started

    api.upload_folder = upload_model
    try:
        yield
    finally:
        del api.upload_folder


@contextmanager
def repository_made(args: Any) -> Iterator[str]:
    """Gives the name of the run's repository on the Hub, which is made within. `args` are `TrainingArguments`."""
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    try:
        yield name
    except Exception as error:  # of the Hub, of the network, of the token: what is saved is the same
        raise PushError(
            f"The Hub did not take or confirm the repository {name} for `push_to_hub` ({_short(error)}). What "
            f"{args.output_dir} holds is whole",
            fix="Correct what it says (the network, HF_HUB_OFFLINE, `hub_token`, `hub_model_id`), or train with "
            "`push_to_hub: false` and upload the model later with `hf upload`.",
        ) from error


def make_repository(args: Any) -> None:
    """Does what the trainer does when it is built. Raises `PushError` before anything that takes long has begun."""
    with repository_made(args) as name:
        hf_api().create_repo(name, token=args.hub_token, private=args.hub_private_repo, exist_ok=True)


def _warn_of_failure(push: Future) -> None:
    """Nobody else asks how an upload in the background has ended."""
    if not push.cancelled() and (error := push.exception()) is not None:
        logger.warning(
            "A push to the Hub failed (%s). What is saved is whole, and the next save pushes again.", _short(error)
        )


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
