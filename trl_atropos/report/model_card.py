"""Completes the model card that TRL writes at every save: the rewards with their parts, the
evaluations, the environments and their metrics, the settings and the versions of the run.

`AtroposGRPOTrainer.create_model_card` calls `complete_card`. The card may go to the Hub, so that it
has neither secrets nor paths of this machine.
"""

import contextlib
import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import TrainerState

from trl_atropos.config import AtroposGRPOConfig
from trl_atropos.report.run_folder import LOG
from trl_atropos.report.run_log import SECRET, changed, portable, portable_value, versions
from trl_atropos.report.summary import CURVE, draw_reward_curve, evaluation_lines
from trl_atropos.rollouts.reward_parts import ENVIRONMENT, REWARD
from trl_atropos.services.evaluations import Result

# Settings that say where a run was, or that transformers sets by itself.
LEFT_OUT = re.compile(
    r"output_dir|logging_dir|atropos_url|vllm_server_(base_url|host|port)|accelerator_config|debug"
)
RESUMES = {"resume_from_checkpoint"}  # differs in every run that was resumed
# of a model's folder in the Hub's cache
CACHED = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/")
CHAIN = 8  # models that may each have been made from the next
CITATIONS = "## Citations"  # heading in TRL's template, above which our sections stand
SETTINGS = """\
<details><summary>Every setting that differs from its default</summary>

```yaml
{}```

</details>"""


def complete_card(
    args: AtroposGRPOConfig,
    state: TrainerState,
    base: str,
    adapters: list,
    commands: Mapping[str, str],
    evaluations: Sequence[Result],
    draw: bool,
) -> None:
    """Completes the card that TRL has just written in `output_dir`.

    Args:
        base: The model that the run began with.
        adapters: PEFT's configurations.
        commands: Command of each environment, by its name.
        draw: Also draw the reward curve beside the card.
    """
    folder = Path(args.output_dir)
    card = ModelCard.load(folder / "README.md")
    shown_base = _complete_metadata(card, base, adapters)
    logs = [entry for entry in state.log_history if "reward" in entry]
    rewards = [entry["reward"] for entry in logs]
    if len(rewards) > 1 and draw:
        steps = [entry["step"] for entry in logs]
        draw_reward_curve(args.output_dir, rewards, steps)

    sections = ["## Atropos run", _origin(args, state)]
    sections += _reward_sections(rewards, state, folder)
    if evaluations:
        sections += ["### Evaluation", _bullets(evaluation_lines(evaluations))]
    sections += _environment_sections(commands, state)
    sections += ["### Settings", _settings(args, base, adapters)]
    earlier = earlier_settings(folder)
    if earlier:
        sections += ["The run was resumed. Before, it had other settings:", _bullets(earlier)]
    lines = [f"{name}: {version}" for name, version in versions().items()]
    sections += ["### Versions", _bullets(lines)]

    # TRL's template writes `None` for a model that is in a folder.
    text = card.text
    for name in (None, base):
        text = text.replace(f"[{name}](https://huggingface.co/{name})", shown_base)
    text = text.replace('model="None"', f'model="{portable(args.output_dir)}"')
    above, heading, below = text.partition(CITATIONS)
    card.text = "\n\n".join([above.rstrip("\n"), *sections, heading + below])
    card.save(folder / "README.md")


def _complete_metadata(card: ModelCard, base: str, adapters: list) -> str:
    """Completes what the Hub reads. Returns the base model as the text shows it."""
    card.data.pipeline_tag = "text-generation"
    if card.data.get("licence") == "license":  # TRL's template has this in place of one
        card.data.pop("licence")
    if adapters:
        card.data.library_name = "peft"
    hub_name = hub_base(base)
    if hub_name is not None:
        card.data.base_model = hub_name
        return f"[{hub_name}](https://huggingface.co/{hub_name})"
    if not _is_valid(card.data.get("base_model", "")):  # a folder that is no longer there
        card.data.pop("base_model")
    return f"`{portable(base)}`"


def _reward_sections(rewards: list[float], state: TrainerState, folder: Path) -> list[str]:
    """Returns what the card says of the mean rewards at each log, and of their parts."""
    sections = []
    if rewards:
        sections.append(
            f"Mean reward at the first log: {rewards[0]:.3f}, at the last: {rewards[-1]:.3f}."
        )
    if len(rewards) > 1 and (folder / CURVE).exists():
        sections.append(f"![Mean reward by optimizer step]({CURVE})")
    parts = _first_and_last(state.log_history, REWARD)
    if parts:
        sections += ["Mean parts of the reward:", _bullets(parts)]
    return sections


def _environment_sections(commands: Mapping[str, str], state: TrainerState) -> list[str]:
    """Returns how the environments were started, and what they logged."""
    sections = []
    if commands:
        sections.append("### Environments")
    for name, command in commands.items():
        one_line = portable(" ".join(command.split()))
        sections.append(f"`{name}`:\n\n```bash\n{one_line}\n```")
    logged = _first_and_last(state.log_history, ENVIRONMENT)
    if logged:
        sections += ["Metrics that the environments logged:", _bullets(logged)]
    return sections


def hub_base(base: str) -> str | None:
    """Returns the model on the Hub that the model `base` is, or was made from. Returns `None` if
    nothing tells it.

    A folder tells it by its path in the Hub's cache, or by the model that its files name. That may
    be another folder, which is asked next. For example, an adapter's `adapter_config.json` names
    `runs/first`, whose `README.md` names `Qwen/Qwen3-0.6B`.
    """
    for _ in range(CHAIN):
        if not os.path.isdir(base):
            return base if _is_hub_name(base) else None
        folder = Path(base).resolve()
        cached = CACHED.search(f"{folder}/")
        if cached is not None:
            return f"{cached[1]}/{cached[2]}"
        made_from = _made_from(folder)
        if made_from is None:
            return None
        base = _found_from(folder, made_from)
    return None


def correct_adapter_card(folder: str | Path, base: str) -> None:
    """Corrects the card that PEFT writes beside an adapter, whose base it names as it was loaded:
    by a folder of this machine, if it is in one. The Hub takes no such name."""
    path = Path(folder, "README.md")
    if not os.path.isdir(base) or not path.exists():
        return
    card = ModelCard.load(path)
    mark = "base_model:adapter:"
    tags = [tag for tag in card.data.get("tags") or [] if not tag.startswith(mark)]
    hub_name = hub_base(base)
    if hub_name is None:
        card.data.pop("base_model", None)
    else:
        card.data.base_model = hub_name
        tags.append(f"{mark}{hub_name}")
    card.data.tags = tags
    card.save(path)


def _is_hub_name(name: str) -> bool:
    """Returns whether a name is like `Qwen/Qwen3-0.6B`. One without an owner may be a folder that
    is no longer there."""
    return "/" in name and _is_valid(name)


def _is_valid(name: str) -> bool:
    """Returns whether a repository on the Hub may have this name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _made_from(folder: Path) -> str | None:
    """Returns the model that a folder's files say it was made from: an adapter's base, or what
    Transformers or a model card have noted."""
    for file, key in (
        ("adapter_config.json", "base_model_name_or_path"),
        ("config.json", "_name_or_path"),
    ):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            name = json.loads((folder / file).read_text(encoding="utf-8")).get(key)
            if name:
                return str(name)
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        name = ModelCard.load(folder / "README.md").data.get("base_model")
        if isinstance(name, list) and len(name) == 1:  # a merged model has several
            name = name[0]
        if isinstance(name, str):
            return name
    return None


def _found_from(folder: Path, name: str) -> str:
    """Returns the path of a folder that is named by a relative path: seen from here, or from a
    folder above `folder`. Returns any other name as it is."""
    for start in (Path.cwd(), *folder.parents):
        if (start / name).is_dir():
            return str(start / name)
    return name


def _origin(args: AtroposGRPOConfig, state: TrainerState) -> str:
    source = "rollouts of Atropos environments"
    if args.replay_paths is not None:
        source = "recorded rollouts"
    run = portable(args.run_name or Path(args.output_dir).name)
    steps = f"{state.global_step} of {args.max_steps} steps"
    today = datetime.now(UTC).date()
    return f"Trained on {source}, run `{run}`, {steps}, {today}."


def _first_and_last(logs: Sequence[Mapping[str, float]], prefix: str) -> list[str]:
    """Returns a line for each metric whose name begins with `prefix`, such as ``"`format`: 0.25 at
    the first log, 0.975 at the last"``."""
    values = defaultdict(list)
    for entry in logs:
        for name, value in entry.items():
            if name.startswith(prefix):
                values[name.removeprefix(prefix)].append(value)
    lines = []
    for name, logged in sorted(values.items()):
        means = f"{logged[0]:.4g} at the first log, {logged[-1]:.4g} at the last"
        lines.append(f"`{portable(name)}`: {means}")
    return lines


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _settings(args: AtroposGRPOConfig, base: str, adapters: Sequence[Any]) -> str:
    """Returns the settings that differ from their defaults, as YAML."""
    settings: dict[str, Any] = {"model_name_or_path": portable(base)}
    settings |= _changed_values(args)
    if adapters:
        settings["adapters"] = []
    for config in adapters:
        kind = {"peft_type": portable_value(config.peft_type)}
        settings["adapters"].append(kind | _changed_values(config))
    dumped = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=1000)
    return SETTINGS.format(dumped)


def earlier_settings(folder: Path) -> list[str]:
    """Returns for each part of a run that was resumed with other settings which steps it took and
    what was different, such as ``steps 1 to 4: `learning_rate: 0.001` ``. Reads the run's log."""
    begins = []
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / LOG).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a line that was cut
                record = json.loads(line)
                if "begin" in record:
                    begins.append(record)
    lines = []
    for part, resumed in itertools.pairwise(begins):
        differences = []
        for name, value in part["config"].items():
            is_stated = not LEFT_OUT.fullmatch(name) and not SECRET.search(name)
            if is_stated and name not in RESUMES and value != begins[-1]["config"].get(name):
                differences.append(f"`{name}: {portable_value(value)}`")
        # What the part did beyond the checkpoint that was resumed from is lost.
        first = part["begin"] + 1
        last = resumed["begin"]
        if differences and first <= last:
            steps = f"steps {first} to {last}" if last > first else f"step {first}"
            lines.append(f"{steps}: {', '.join(differences)}")
    return lines


def _changed_values(settings: Any) -> dict[str, Any]:
    values = {}
    for name in changed(settings):
        if LEFT_OUT.fullmatch(name) or SECRET.search(name):
            continue
        value = portable_value(getattr(settings, name))
        if value not in ([], {}):  # transformers' form of `None`
            values[name] = value
    return values
