"""The section of the model card that names the run."""

from datetime import UTC, datetime

from transformers import TrainerState

from trl_atropos import __version__
from trl_atropos.config import AtroposGRPOConfig

HEADING = "## Atropos run"
SHOWN = (
    "vllm_mode",
    "loss_type",
    "scale_rewards",
    "learning_rate",
    "lr_scheduler_type",
    "beta",
    "num_iterations",
    "vllm_importance_sampling_mode",
    "temperature",
    "generation_batch_size",
    "max_completion_length",
    "seed",
)


def add_run_section(path: str, args: AtroposGRPOConfig, state: TrainerState) -> None:
    """Appends the section to the card that TRL has just written at `path`."""
    source = f"the Atropos API at `{args.atropos_url}`" if args.replay_paths is None else "recorded rollouts"
    rewards = [entry["reward"] for entry in state.log_history if "reward" in entry]
    lines = [
        "",
        HEADING,
        "",
        f"Trained with trl_atropos {__version__} on rollouts from {source}, "
        f"run `{args.run_name or args.output_dir}`, {state.global_step} of {args.max_steps} steps, "
        f"{datetime.now(UTC):%Y-%m-%d}.",
        "",
    ]
    if rewards:
        lines += [f"Mean reward at the first log: {rewards[0]:.3f}, at the last: {rewards[-1]:.3f}.", ""]
    lines += ["| setting | value |", "|---|---|"]
    lines += [f"| `{name}` | `{getattr(args, name)}` |" for name in SHOWN]
    with open(path, "a", encoding="utf-8") as card:
        card.write("\n".join(lines) + "\n")
