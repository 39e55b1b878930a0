"""`python -m trl_atropos.train --help`: the settings that this package adds to TRL's, in groups.

Those of TRL and Transformers are several hundred, and documented elsewhere: `--help_all` lists them too.
"""

import argparse
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields

from trl_atropos.config import AtroposGRPOConfig
from trl_atropos.recipe import ServicesConfig

# Title -> fields. Every field that `AtroposGRPOConfig` declares itself is in one of them.
GROUPS: dict[str, tuple[str, ...]] = {
    "Server and weights": (
        "vllm_mode",
        "vllm_server_base_url",
        "sync_every_n_steps",
        "weight_transport",
        "publish_timeout",
        "probe_every_n_steps",
        "vllm_enable_sleep_mode",
        "vllm_sleep_level",
        "master_weights",
        "offload_master_weights",
    ),
    "Rollouts": (
        "atropos_url",
        "reset_atropos",
        "rollout_timeout",
        "max_sequence_length",
        "single_row_groups",
        "sampling_temperature",
        "max_staleness",
        "prefetch_batches",
        "replace_zero_variance_groups",
        "enforce_environment_weights",
        "replay_paths",
        "max_spool_gb",
    ),
    "Loss and micro-batches": (
        "vllm_importance_sampling_mode",
        "distillation_coef",
        "group_by_length",
        "max_tokens_per_micro_batch",
    ),
    "Warnings": ("warning_thresholds", "stop_on_warnings"),
}

USAGE = (
    "accelerate launch [its options] -m trl_atropos.train --config RECIPE [--overlay FILE ...] [--SETTING VALUE ...]"
)
DESCRIPTION = """\
Trains by a recipe: a YAML file of `setting: value` lines. It starts the services that the recipe names, trains, saves
the model in `output_dir`, and stops what it started. Overlays change settings of the recipe, a later one those of an
earlier one; a setting on the command line wins over all.

  accelerate launch -m trl_atropos.train --config recipes/quickstart/colocate.yaml --max_steps 100
  accelerate launch -m trl_atropos.train --config my.yaml --resume_from_checkpoint true

`trl-atropos check` takes the same command line, starts nothing, and says what is wrong.
"""
EPILOG = """\
settings of TRL and Transformers:
  All of GRPOConfig, TrainingArguments and ModelConfig. Those that most runs set: model_name_or_path, output_dir,
  max_steps, per_device_train_batch_size, gradient_accumulation_steps, learning_rate, temperature, loss_type, beta,
  num_iterations, epsilon_high, max_completion_length, save_steps, logging_steps, log_completions, report_to, run_name,
  seed, bf16, gradient_checkpointing, use_peft, lora_r, lora_target_modules, push_to_hub, hub_model_id,
  resume_from_checkpoint. `--help_all` lists every one with its meaning.

environment variables:
  TRL_ATROPOS_VERBOSITY   debug, info (the default), warning, error or critical; the setting `log_level` comes first
  TRL_ATROPOS_TOKEN       control token of an inference server that the run does not start itself
  HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, WANDB_MODE ...   as everywhere; the services that the run starts get them too

exit codes: 0 when the model is saved, 1 after an error, 130 after Ctrl-C, 143 after SIGTERM.
"""


def print_help() -> None:
    parser = argparse.ArgumentParser(
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    own = {field.name: field for field in fields(AtroposGRPOConfig)}
    _add_group(parser, "Services", fields(ServicesConfig))
    for title, names in GROUPS.items():
        _add_group(parser, title, [own[name] for name in names])
    parser.print_help()


def _add_group(parser: argparse.ArgumentParser, title: str, settings: Iterable[Field]) -> None:
    group = parser.add_argument_group(title)
    for setting in settings:
        default = setting.default_factory() if setting.default is MISSING else setting.default
        told = (
            "" if default is None else f" Default: {str(default).lower() if isinstance(default, bool) else default}."
        )
        text = setting.metadata["help"].rstrip(".").replace("%", "%%") + "." + told
        group.add_argument(f"--{setting.name}", metavar="", help=text)
