"""The mistakes that people make in a recipe, or on the command line that names one.

A row of `MISTAKES` has what is changed in a good recipe, and what is said of it: cause, place and
fix. `test_mistakes.py` has `trl-atropos train` and `trl-atropos check` find each of them.
Mistakes that need something else that runs, such as a server, are in `test_wrong_inputs.py` and
`tests/check/test_check.py`.
"""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests import ROOT
from tests.check.desk import SOURCE, Desk
from trl_atropos.config import REMOVED
from trl_atropos.errors import ERROR, WARNING
from trl_atropos.recipe_files import PROMPT_DATASET

# Settings of a good recipe that are other than in `Desk.recipe`, or a function that plants the
# mistake and returns the command line.
Change = dict[str, Any] | Callable[[Desk], list[str]]


@dataclass(frozen=True)
class Mistake:
    """
    One mistake, and what is said of it.

    In `cause`, `place` and `fix`, `…` stands for any text, `<folder>` for the folder of the recipe
    and `<model>` for that of the model.

    Attributes:
        change: What makes a good recipe wrong.
        cause: A part of what the message says has happened.
        place: A part of what was seen: the setting and its value.
        fix: A part of what the message says to do.
        code: Name of the finding.
        level: Level of the finding.
        is_refused: Whether `train` refuses it before it starts anything. If not, only `check` tells.
    """

    change: Change
    cause: str
    place: str
    fix: str
    code: str = "setting"
    level: str = ERROR
    is_refused: bool = True

    def plant(self, desk: Desk) -> list[str]:
        """Writes a recipe with the mistake. Returns the command line that names it."""
        if isinstance(self.change, dict):
            return desk.recipe(**self.change)
        return self.change(desk)


def holds(fragment: str, text: str, desk: Desk) -> bool:
    """Returns whether a text has a `cause`, `place` or `fix`."""
    fragment = fragment.replace("<folder>", str(desk.folder)).replace("<model>", str(desk.model))
    pattern = ".*".join(map(re.escape, fragment.split("…")))
    return re.search(pattern, text) is not None


def refused_value(name: str, value: Any, fix: str) -> Mistake:
    """The mistake of a value that a setting does not take, whatever the others are."""
    return Mistake({name: value}, f"`{name}` is {value!r}", f"{name}: {value}", fix)


def wrong_entry(
    entry: dict[str, Any], cause: str, place: str, setting: str = "environments"
) -> Mistake:
    """The mistake of an entry whose keys do not go together."""
    return Mistake(
        {setting: [entry]},
        f"`{setting}` entry 1: {cause}",
        place,
        "An entry is the path of a script, or has one of `path`, `command`, `agent`",
        f"{setting.removesuffix('s')}-entry",
    )


wrong_evaluation = partial(wrong_entry, setting="evaluations")


def untrainable_model(cause: str, fix: str, **config: Any) -> Mistake:
    """The mistake of a model whose config has these fields."""
    return Mistake(
        lambda desk: desk.recipe(model_name_or_path=desk.configured_model(**config)),
        cause,
        "model_name_or_path: <folder>/copy",
        fix,
        "model",
    )


checked = partial(Mistake, is_refused=False)  # an error that only `check` looks for
warned = partial(Mistake, is_refused=False, level=WARNING)  # a run goes on with it

SLEEP = {"vllm_mode": "server", "vllm_enable_sleep_mode": True}
GPU = {"use_cpu": False, "vllm_mode": "server"}
DDP = ("--num_processes", "4", "--devices", "2")
DIVIDED = "parallelism_config: {{parallelism_config_sp_size: {}}}\nnum_processes: {}\n"
QUANTISED = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "version": "gemm",
    "zero_point": True,
}

MISTAKES = {
    # ---------------------------------------------------------------------------- the command line
    "no word at all": Mistake(
        lambda desk: [],
        "No recipe",
        "",
        "Name one with `--config`, as in `--config recipes/quickstart/colocate.yaml`",
        "no-recipe",
    ),
    "--config without a file": Mistake(
        lambda desk: ["--config"],
        "No recipe",
        "--config",
        "Name one with `--config`, as in `--config recipes/quickstart/colocate.yaml`",
        "no-recipe",
    ),
    "a recipe without --config": Mistake(
        lambda desk: ["mine.yaml"],
        "No recipe",
        "mine.yaml",
        "Name one with `--config`, as in `--config mine.yaml`",
        "no-recipe",
    ),
    "a misspelt flag": Mistake(
        lambda desk: desk.recipe(options=("--learning_rte", "1")),
        "Unknown arguments: --learning_rte 1",
        "--learning_rte 1",
        "Did you mean `learning_rate`",
        "unknown-flag",
    ),
    "flags of the server in several words": Mistake(
        lambda desk: desk.recipe(
            options=("--vllm_args", "--max-num-seqs 8", "--enforce-eager"), start_vllm=True
        ),
        "Unknown arguments: --enforce-eager",
        "--enforce-eager",
        "Flags of the server are a list in a recipe",
        "unknown-flag",
    ),
    "flags of the server as JSON": Mistake(
        lambda desk: desk.recipe(
            options=("--vllm_args", '["--dtype", "bfloat16"]'), start_vllm=True
        ),
        """`vllm_args` begins with '["--dtype", "bfloat16"]', which is no flag""",
        """vllm_args: ['["--dtype", "bfloat16"]']""",
        "Flags of the server are a list in a recipe",
    ),
    # ------------------------------------------------------------------------------------ the file
    "no such recipe": Mistake(
        lambda desk: ["--config", "nowhere.yaml"],
        "The recipe 'nowhere.yaml' does not exist (looked in <folder>)",
        "nowhere.yaml",
        "Check `--config`",
        "no-recipe",
    ),
    "a recipe that is no text": Mistake(
        lambda desk: ["--config", sys.executable],
        "cannot be read",
        sys.executable,
        "Check `--config`",
        "no-recipe",
    ),
    "a recipe that is no YAML": Mistake(
        lambda desk: desk.written("max_steps: [1, 2\n"),
        "recipe.yaml is not valid YAML: …line 1…expected ',' or ']'",
        "recipe.yaml",
        "Correct it there",
        "recipe-format",
    ),
    "a recipe that is a list": Mistake(
        lambda desk: desk.written("- max_steps\n"),
        "recipe.yaml must hold `key: value` lines",
        "recipe.yaml: list",
        "Write one setting a line there, such as `max_steps: 100`",
        "recipe-format",
    ),
    "a setting without a value": Mistake(
        lambda desk: desk.written("temperature:\n"),
        "recipe.yaml: `temperature` is None",
        "temperature: None",
        "leave the line out",
    ),
    "a misspelt key": Mistake(
        {"lerning_rate": 1.0},
        "recipe.yaml: unknown key `lerning_rate`",
        "lerning_rate: 1.0",
        "Did you mean `learning_rate`",
        "unknown-key",
    ),
    **{
        f"{name}, which is gone": Mistake(
            {name: True},
            f"recipe.yaml: unknown key `{name}`",
            f"{name}: True",
            f"It is no setting any more. {replacement}",
            "unknown-key",
        )
        for name, replacement in REMOVED.items()
    },
    **{
        f"{name}, as for a prompt dataset": Mistake(
            {name: "some"},
            f"recipe.yaml: unknown key `{name}`",
            f"{name}: some",
            "prompts and rewards come from `environments:`, as in `environments: [",
            "unknown-key",
        )
        for name in PROMPT_DATASET
    },
    "a prompt dataset as a flag": Mistake(
        lambda desk: desk.recipe(options=("--dataset_name", "some")),
        "Unknown arguments: --dataset_name some",
        "--dataset_name some",
        "prompts and rewards come from `environments:`",
        "unknown-flag",
    ),
    "a number for a text": Mistake(
        {"model_name_or_path": 7},
        "recipe.yaml: `model_name_or_path` is 7",
        "model_name_or_path: 7",
        "Write text, in quotes",
    ),
    "a word for a whole number": Mistake(
        {"max_steps": "many"},
        "recipe.yaml: `max_steps`: invalid int value: 'many'",
        "",
        "See `python -m trl_atropos.train --help`",
    ),
    "a fraction for a whole number": Mistake(
        {"max_steps": 2.5},
        "recipe.yaml: `max_steps` is 2.5",
        "max_steps: 2.5",
        "Write a whole number",
    ),
    "a word for a number": Mistake(
        {"temperature": "hot"},
        "recipe.yaml: `temperature`: invalid float value: 'hot'",
        "",
        "See `python -m trl_atropos.train --help`",
    ),
    "a no without quotes": Mistake(
        {"save_strategy": False},
        "recipe.yaml: `save_strategy` is False",
        "save_strategy: False",
        "the word in quotes",
    ),
    "a quote that is not closed": Mistake(
        {"vllm_args": ["--seed '1"], "start_vllm": True},
        "`vllm_args` cannot be split into flags: No closing quotation",
        'vllm_args: ["--seed \'1"]',
        "Correct its quotes",
    ),
    # ---------------------------------------------------------------------------------- an overlay
    "an overlay without a recipe": Mistake(
        lambda desk: ["--overlay", "a.yaml", "--max_steps", "3"],
        "`--overlay a.yaml` changes a recipe, and there is none",
        "a.yaml",
        "Name one with `--config`",
        "no-recipe",
    ),
    "no such overlay": Mistake(
        lambda desk: [*desk.recipe(), "--overlay", "nowhere.yaml"],
        "The overlay 'nowhere.yaml' does not exist",
        "nowhere.yaml",
        "Check `--overlay`",
        "no-recipe",
    ),
    "an empty overlay": Mistake(
        lambda desk: desk.overlaid(""),
        "overlay.yaml must hold `key: value` lines",
        "overlay.yaml: NoneType",
        "Write one setting a line there, such as `max_steps: 100`",
        "recipe-format",
    ),
    "a misspelt key in an overlay": Mistake(
        lambda desk: desk.overlaid("epsilon_hihg: 0.3\n"),
        "overlay.yaml: unknown key `epsilon_hihg`",
        "epsilon_hihg: 0.3",
        "Did you mean `epsilon_high`",
        "unknown-key",
    ),
    "a word for a number in an overlay": Mistake(
        lambda desk: desk.overlaid("max_steps: many\n"),
        "recipe.yaml with overlay.yaml: `max_steps`: invalid int value: 'many'",
        "",
        "See `python -m trl_atropos.train --help`",
    ),
    "a list for a number in an overlay": Mistake(
        lambda desk: desk.overlaid("save_steps: [1]\n"),
        "overlay.yaml: `save_steps` is [1]",
        "save_steps: [1]",
        "Write a number",
    ),
    "an impossible value in an overlay": Mistake(
        lambda desk: desk.overlaid("rollout_timeout: -2\n"),
        "recipe.yaml with overlay.yaml: `rollout_timeout` is -2",
        "rollout_timeout: -2",
        "Set it to a number of seconds above 0",
    ),
    "variables in an overlay": Mistake(
        lambda desk: desk.overlaid("env: {A: 1}\n"),
        "overlay.yaml: `env` cannot be in an overlay",
        "env in overlay.yaml",
        "Set it in the recipe, recipe.yaml",
    ),
    "environments in an overlay": Mistake(
        lambda desk: desk.overlaid("environments: []\n"),
        "overlay.yaml: `environments` cannot be in an overlay",
        "environments in overlay.yaml",
        "Set it in the recipe, recipe.yaml",
    ),
    # --------------------------------------------------------------------------- a choice, a bound
    "vllm_mode": refused_value("vllm_mode", "colocated", "one of: colocate, server, nccl_lora"),
    "weight_transport": refused_value("weight_transport", "rdma", "one of: auto, nccl, gloo"),
    "vllm_sleep_level": refused_value("vllm_sleep_level", 3, "Set it to one of: 1, 2"),
    "loss_type": refused_value("loss_type", "ppo", "one of: grpo, bnpo, …, vespo"),
    "vllm_importance_sampling_mode": refused_value(
        "vllm_importance_sampling_mode", "token", "one of: token_truncate, …sequence_mask"
    ),
    "importance_sampling_level": refused_value(
        "importance_sampling_level", "word", "one of: token, sequence"
    ),
    "scale_rewards": refused_value("scale_rewards", "std", "one of: group, batch, none"),
    "single_row_groups": refused_value("single_row_groups", "keep", "one of: refuse, raw, zero"),
    "numerics": refused_value(
        "numerics", "exact", "one of: default, float32_head, float16, bitwise"
    ),
    "max_steps": refused_value("max_steps", 0, "Set `max_steps` to the number of optimizer steps"),
    "rollout_timeout": refused_value("rollout_timeout", 0, "a number of seconds above 0"),
    "publish_timeout": refused_value("publish_timeout", -1.0, "a number of seconds above 0"),
    "eval_timeout": refused_value("eval_timeout", 0, "a number of seconds above 0"),
    "max_spool_gb": refused_value("max_spool_gb", 0, "a number of gigabytes above 0"),
    "probe_every_n_steps": refused_value("probe_every_n_steps", -1, "Set it to 0 (off) or more"),
    "prefetch_batches": refused_value("prefetch_batches", -1, "Set it to 0 or more"),
    "max_staleness": refused_value("max_staleness", -1, "Set it to 0 or more"),
    "sync_every_n_steps": refused_value("sync_every_n_steps", 0, "Set it to 1 or more"),
    "max_sequence_length": refused_value("max_sequence_length", 1, "the longest prompt plus"),
    "max_grad_norm": refused_value("max_grad_norm", -1.0, "Set it to 0 (no clipping) or more"),
    "gpu_share": refused_value("gpu_share", 75, "a number above 0 and up to 1, such as 0.7"),
    "no share": refused_value("gpu_share", 0, "a number above 0 and up to 1, such as 0.7"),
    "distillation_coef": refused_value("distillation_coef", -0.1, "Set it to 0 (off) or more"),
    "learning_rate": refused_value("learning_rate", math.nan, "Set it to 0 or more"),
    "weight_decay": refused_value("weight_decay", math.inf, "Set it to 0 or more"),
    "adam_epsilon": refused_value("adam_epsilon", -1.0, "Adam would divide 0 by 0"),
    "beta": refused_value("beta", math.nan, "Set it to 0 (no reference policy) or more"),
    "a greedy temperature": Mistake(
        {"temperature": 0.0},
        "`temperature` is 0.0…greedy",
        "temperature: 0.0",
        "Set it to the temperature above 0",
        "temperature",
    ),
    # ------------------------------------------------------------------------- the run, its batches
    "no number of steps": Mistake(
        {"max_steps": None},
        "`max_steps` is -1",
        "max_steps: -1",
        "Set `max_steps` to the number of optimizer steps",
    ),
    "an odd batch": Mistake(
        {"per_device_train_batch_size": 3},
        "has 3 rollouts (per_device_train_batch_size 3 x 1 processes x 1 …must be even",
        "per_device_train_batch_size: 3",
        "Change `per_device_train_batch_size`",
        "batch-size",
    ),
    "an odd batch of several processes": Mistake(
        lambda desk: desk.with_variable(
            "WORLD_SIZE", "3", per_device_train_batch_size=1, gradient_accumulation_steps=5
        ),
        "has 15 rollouts (per_device_train_batch_size 1 x 3 processes x 5 steps",
        "per_device_train_batch_size: 1, gradient_accumulation_steps: 5",
        "Change `per_device_train_batch_size`",
        "batch-size",
    ),
    "rare publishes of one copy": Mistake(
        {"sync_every_n_steps": 4},
        "`sync_every_n_steps` is 4, but with `vllm_mode='colocate'`",
        "sync_every_n_steps: 4, vllm_mode: colocate",
        "Leave it at 1",
    ),
    "sleep before the batch is whole": Mistake(
        {**SLEEP, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
        "another batch before …steps_per_generation 2, gradient_accumulation_steps 4)",
        "steps_per_generation: 2, gradient_accumulation_steps: 4",
        "leave `steps_per_generation` out",
    ),
    "sleep over several steps": Mistake(
        {**SLEEP, "sync_every_n_steps": 2},
        "another batch before that (sync_every_n_steps 2, ",
        "sync_every_n_steps: 2",
        "Set `sync_every_n_steps: 1`",
    ),
    "sleep of a server that is restarted": Mistake(
        {**SLEEP, "vllm_mode": "restart"},
        "`vllm_enable_sleep_mode` has no meaning with `vllm_mode: restart`",
        "vllm_enable_sleep_mode: True, vllm_mode: restart",
        "Remove it",
    ),
    "sleep that loses the base of an adapter": Mistake(
        {**SLEEP, "vllm_mode": "nccl_lora", "use_peft": True},
        "`vllm_sleep_level: 2` discards weights",
        "vllm_sleep_level: 2, vllm_mode: nccl_lora",
        "Set `vllm_sleep_level: 1`",
    ),
    "requests that are held back and asked for": Mistake(
        {"hold_requests": True, "prefetch_batches": 1},
        "`hold_requests` holds back what would be sampled ahead, ",
        "hold_requests: True, prefetch_batches: 1",
        "Leave one of them out",
    ),
    "noise in training alone": Mistake(
        {"neftune_noise_alpha": 5.0},
        "`neftune_noise_alpha` adds noise in training, ",
        "neftune_noise_alpha: 5.0",
        "Leave it out",
    ),
    "a token budget below the longest rollout": Mistake(
        {"max_tokens_per_micro_batch": 512, "max_sequence_length": 1024},
        "`max_tokens_per_micro_batch` is 512, but …`max_sequence_length` (1024)",
        "max_tokens_per_micro_batch: 512, max_sequence_length: 1024",
        "Set it to that or more",
    ),
    "a token budget of nothing": Mistake(
        {"max_tokens_per_micro_batch": 0},
        "`max_tokens_per_micro_batch` is 0, ",
        "max_tokens_per_micro_batch: 0",
        "Set it to that or more",
    ),
    "a token budget and accumulated gradients": Mistake(
        {
            "max_tokens_per_micro_batch": 512,
            "gradient_accumulation_steps": 4,
            "per_device_train_batch_size": 6,
        },
        "`gradient_accumulation_steps` is 4, ",
        "max_tokens_per_micro_batch: 512, gradient_accumulation_steps: 4",
        "Set `gradient_accumulation_steps: 1` and `per_device_train_batch_size: 24`",
    ),
    "a token budget and a mean over micro-batches": Mistake(
        {"max_tokens_per_micro_batch": 512, "loss_type": "bnpo"},
        "`max_tokens_per_micro_batch` changes which rollouts share a micro-batch, ",
        "max_tokens_per_micro_batch: 512, loss_type: bnpo",
        "Use another `loss_type`",
    ),
    "vespo with sequence_mask": Mistake(
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"},
        "token-level correction, but `vllm_importance_sampling_mode` is 'sequence_mask'",
        "loss_type: vespo, vllm_importance_sampling_mode: sequence_mask",
        "Set it to 'token_truncate' or 'token_mask', or set `vllm_importance_sampling_correction: ",
    ),
    "vespo with sequence_truncate": Mistake(
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_truncate"},
        "token-level correction, but `vllm_importance_sampling_mode` is 'sequence_truncate'",
        "loss_type: vespo, vllm_importance_sampling_mode: sequence_truncate",
        "Set it to 'token_truncate'",
    ),
    "bitwise numerics at another temperature": Mistake(
        {"numerics": "bitwise", "temperature": 0.7},
        "`numerics: bitwise` is not available for `temperature: 0.7`",
        "numerics: bitwise, temperature: 0.7",
        "Set `temperature: 1.0`, or another `numerics`",
    ),
    "bitwise numerics with padding": Mistake(
        {"numerics": "bitwise", "padding_free": False},
        "`numerics: bitwise` is not available for `padding_free: False`",
        "numerics: bitwise, padding_free: False",
        "Set `padding_free: true`, or another `numerics`",
    ),
    "bitwise numerics with distillation": Mistake(
        {"numerics": "bitwise", "distillation_coef": 0.5},
        "`numerics: bitwise` is not available for `distillation_coef: 0.5`",
        "numerics: bitwise, distillation_coef: 0.5",
        "Set `distillation_coef: 0.0`, or another `numerics`",
    ),
    "numerics in float16 in one memory": Mistake(
        {"numerics": "float16"},
        "`vllm_mode: colocate` cannot share",
        "numerics: float16, vllm_mode: colocate",
        "Set `vllm_mode: server`",
    ),
    "a stop on no warning": Mistake(
        {"stop_on_warnings": ["reward"]},
        "`stop_on_warnings` names 'reward', which is no warning",
        "stop_on_warnings: reward",
        "Known are: …zero_var",
    ),
    "a stop on no warning in one word": Mistake(
        {"stop_on_warnings": "loss"},
        "`stop_on_warnings` names 'loss', which is no warning",
        "stop_on_warnings: loss",
        "Known are: ",
    ),
    "a threshold of no warning": Mistake(
        {"warning_thresholds": {"gap": 1}},
        "`warning_thresholds` names 'gap', which is no warning",
        "warning_thresholds: gap",
        "Known are: …truncated",
    ),
    "a threshold that is no number": Mistake(
        {"warning_thresholds": {"truncated": "x"}},
        "`warning_thresholds` sets 'truncated' to 'x'",
        "warning_thresholds: {'truncated': 'x'}",
        "Set it to a number",
    ),
    "a threshold without a value": Mistake(
        {"warning_thresholds": "truncated"},
        "`warning_thresholds` is 'truncated'",
        "warning_thresholds: truncated",
        "Set it to names and values",
    ),
    # ---------------------------------------------------------------------------------- evaluations
    "an evaluation of epochs": Mistake(
        {"eval_strategy": "epoch"},
        "rollouts from environments have no epochs",
        "eval_strategy: epoch",
        "Set `eval_strategy: steps`",
    ),
    "nothing to evaluate": Mistake(
        {"eval_strategy": "steps"},
        "There is nothing to evaluate",
        "eval_strategy: steps",
        "List `evaluations` in the recipe",
    ),
    "a best model of a policy that moves on": Mistake(
        {
            "eval_strategy": "steps",
            "metric_for_best_model": "eval_x_pass@1",
            "eval_hold": False,
        },
        "`metric_for_best_model` must be known before ",
        "metric_for_best_model: eval_x_pass@1, eval_hold: False",
        "Leave `eval_hold` out",
    ),
    "a best model by the loss": Mistake(
        lambda desk: desk.evaluated({"problems": 3}, metric_for_best_model="loss"),
        "`metric_for_best_model` is 'loss'",
        "metric_for_best_model: loss",
        "Name one of an evaluation, such as eval_task_pass@1",
    ),
    "a best model of older weights": Mistake(
        lambda desk: desk.evaluated(
            {"problems": 3, "every": 3},
            metric_for_best_model="eval_task_pass@1",
            sync_every_n_steps=2,
            vllm_mode="server",
        ),
        "`sync_every_n_steps` is 2: other weights are evaluated than are saved",
        "eval_steps: 3",
        "Make `eval_steps` a multiple of it",
    ),
    "a best model by evaluations at different steps": Mistake(
        lambda desk: desk.evaluated(
            {"problems": 3, "every": 4},
            {"problems": 3, "every": 6, "name": "other"},
            metric_for_best_model="eval_task_pass@1",
        ),
        "`metric_for_best_model` is needed every 2 steps, but 'task' is not made then",
        "eval_steps: 2",
        "Give all evaluations the same `every`",
    ),
    "evaluations without a server": Mistake(
        lambda desk: desk.evaluated({"problems": 3}, replay_paths=["environment.py"]),
        "`evaluations` need a server",
        "evaluations, replay_paths",
        "Leave one out",
    ),
    "an evaluation with a threshold that is no number": wrong_evaluation(
        {"path": "environment.py", "problems": 3, "passes_above": math.nan},
        "passes_above: Input should be a finite number",
        "'passes_above': nan",
    ),
    "an evaluation with samples of no problems": wrong_evaluation(
        {"path": "environment.py", "samples": 3},
        "`samples` goes with `problems`",
        "'samples': 3",
    ),
    "an evaluation with several greedy samples": Mistake(
        {
            "evaluations": [
                {"path": "environment.py", "problems": 3, "temperature": 0, "samples": 2}
            ]
        },
        "`evaluations` entry 1: at temperature 0 all samples of a problem are the same",
        "'temperature': 0",
        "Set `samples: 1`, or a `temperature` above 0.",
        "evaluation-entry",
    ),
    "an evaluation by a command": wrong_evaluation(
        {"name": "task", "command": "python x.py"},
        "an evaluation needs a `path`",
        "'command': 'python x.py'",
    ),
    "an evaluation with a misspelt key": wrong_evaluation(
        {"path": "environment.py", "problems": 3, "sample": 3},
        "sample: Extra inputs",
        "'sample': 3",
    ),
    "an evaluation without its script": Mistake(
        lambda desk: desk.evaluated({"path": "nowhere.py"}),
        "there is no script 'nowhere.py'",
        "path: nowhere.py",
        "Correct its `path` or `cwd`",
        "environment-script",
    ),
    "an evaluation that is called like a folder": wrong_evaluation(
        {"path": "environment.py", "name": "a/b"},
        "…'a/b' is none for them: set `name` to letters, digits",
        "'name': 'a/b'",
    ),
    # ----------------------------------------------------------------------------------------- URLs
    "a URL without http": Mistake(
        {"atropos_url": "localhost:8000"},
        "`atropos_url` is 'localhost:8000', which is not a URL",
        "atropos_url: localhost:8000",
        "Write it as `http://host:port`",
    ),
    "a URL without a host": Mistake(
        {"vllm_server_base_url": "http://"},
        "`vllm_server_base_url` is 'http://', which is not a URL",
        "vllm_server_base_url: http://",
        "Write it as `http://host:port`",
    ),
    "a URL with a word as its port": Mistake(
        {"atropos_url": "http://localhost:80a"},
        "`atropos_url` is 'http://localhost:80a', which is not a URL",
        "atropos_url: http://localhost:80a",
        "Write it as `http://host:port`",
    ),
    "one URL for two services": Mistake(
        {
            "atropos_url": "http://127.0.0.1:9001/",
            "vllm_server_base_url": "http://127.0.0.1:9001/v1",
        },
        "`atropos_url` and `vllm_server_base_url` are both http://127.0.0.1:9001. They are two",
        "atropos_url: http://127.0.0.1:9001, vllm_server_base_url: http://127.0.0.1:9001",
        "Give each its own port",
    ),
    "the API among the servers": Mistake(
        {"atropos_url": "http://h:2", "vllm_server_base_url": "http://h:1,http://h:2"},
        "`atropos_url` and `vllm_server_base_url` are both http://h:2",
        "atropos_url: http://h:2, vllm_server_base_url: http://h:1,http://h:2",
        "Give each its own port",
    ),
    "one bad URL among several": Mistake(
        {"vllm_server_base_url": "http://127.0.0.1:9001,127.0.0.1:9002"},
        "`vllm_server_base_url` is '127.0.0.1:9002', which is not a URL",
        "vllm_server_base_url: 127.0.0.1:9002",
        "Write it as `http://host:port`",
    ),
    "one bad URL in a list": Mistake(
        {"vllm_server_base_url": ["http://127.0.0.1:9001", "http://127.0.0.1:x"]},
        "`vllm_server_base_url` is 'http://127.0.0.1:x', which is not a URL",
        "vllm_server_base_url: http://127.0.0.1:x",
        "Write it as `http://host:port`",
    ),
    "a comma behind the last URL": Mistake(
        {"vllm_server_base_url": "http://127.0.0.1:9001,"},
        "`vllm_server_base_url` is '', which is not a URL",
        "vllm_server_base_url: ",
        "Write it as `http://host:port`",
    ),
    "one server twice": Mistake(
        {
            "vllm_mode": "server",
            "vllm_server_base_url": "http://127.0.0.1:9001,http://127.0.0.1:9001/v1/",
        },
        "`vllm_server_base_url` lists http://127.0.0.1:9001 twice",
        "vllm_server_base_url: http://127.0.0.1:9001,http://127.0.0.1:9001",
        "List each server once",
    ),
    # ------------------------------------------------------------------------------------- sharding
    "DeepSpeed in one memory": Mistake(
        {"deepspeed": {"zero_optimization": {"stage": 2}}},
        "cannot be sharded",
        "vllm_mode: colocate, deepspeed: {'zero_optimization'",
        "Remove `deepspeed`, or use `vllm_mode: server`",
        "sharded-colocate",
    ),
    "FSDP in one memory": Mistake(
        {"fsdp": True},
        "cannot be sharded",
        "vllm_mode: colocate, fsdp: True",
        "Remove `fsdp`, or use `vllm_mode: server`",
        "sharded-colocate",
    ),
    "DeepSpeed of the launcher in one memory": Mistake(
        lambda desk: desk.with_variable("ACCELERATE_USE_DEEPSPEED", "true"),
        "cannot be sharded",
        "vllm_mode: colocate, deepspeed: ",
        "Remove `deepspeed` from the configuration of `accelerate launch`, or use `vllm_mode: ",
        "sharded-colocate",
    ),
    "FSDP of the launcher in one memory": Mistake(
        lambda desk: desk.with_variable("ACCELERATE_USE_FSDP", "true"),
        "cannot be sharded",
        "vllm_mode: colocate, fsdp: ",
        "Remove `fsdp` from the configuration of `accelerate launch`, or use `vllm_mode: ",
        "sharded-colocate",
    ),
    "sharding of one memory in accelerate's file": checked(
        lambda desk: desk.recipe(
            options=("--config_file", f"{ROOT}/configs/accelerate/zero3.yaml")
        ),
        "`vllm_mode: colocate` trains the server's own memory in place, which cannot be sharded",
        "distributed_type: DEEPSPEED in ",
        "use `vllm_mode: server`",
        "sharded-colocate",
    ),
    # ------------------------------------------------------------------------------------- adapters
    "no adapter for a mode that sends one": Mistake(
        {"vllm_mode": "lora"},
        "`vllm_mode: lora` sends a LoRA adapter, but the run has none",
        "vllm_mode: lora",
        "Set `use_peft: true` and `lora_target_modules: all-linear`, or use `vllm_mode: colocate`",
        "no-adapter",
    ),
    "an adapter that vLLM does not serve": Mistake(
        {"vllm_mode": "nccl_lora", "use_peft": True, "use_dora": True},
        "vLLM does not serve DoRA",
        "use_dora: True",
        "Leave `use_dora` out, or use `vllm_mode: server`",
        "adapter",
    ),
    "whole modules beside an adapter": Mistake(
        {"use_peft": True, "lora_modules_to_save": ["norm"]},
        "The adapter has `lora_modules_to_save: norm`, which does not work in this `vllm_mode`",
        "lora_modules_to_save: norm",
        "Leave `lora_modules_to_save` out, or use `vllm_mode: server`",
        "adapter",
    ),
    "an adapter on the head": Mistake(
        {
            "vllm_mode": "server",
            "use_peft": True,
            "lora_target_modules": ["q_proj", "lm_head"],
        },
        "The adapter has `lora_target_modules: q_proj, lm_head`, which cannot be trained",
        "lora_target_modules: q_proj, lm_head",
        "Remove 'lm_head'",
        "adapter",
    ),
    "an adapter on one of two tied embeddings": Mistake(
        {
            "vllm_mode": "server",
            "use_peft": True,
            "lora_target_modules": ["q_proj", "embed_tokens"],
        },
        "The adapter is on 'embed_tokens', which is one tensor with the other embedding",
        "lora_target_modules, lora_modules_to_save: embed_tokens",
        "Remove 'embed_tokens'",
        "adapter",
    ),
    "an adapter for modules that the model does not have": checked(
        {"use_peft": True, "lora_target_modules": ["q_porj"]},
        "peft cannot put the adapter into the model",
        "lora_target_modules: q_porj",
        "Correct `lora_target_modules`",
        "adapter",
    ),
    # ------------------------------------------------------------------------------------ the model
    "no model": Mistake(
        {"model_name_or_path": None},
        "No model",
        "model_name_or_path: None",
        "Set `model_name_or_path` to a Hub name or a folder",
        "model",
    ),
    "no such folder of a model": Mistake(
        {"model_name_or_path": "./nowhere"},
        "The model folder './nowhere' does not exist (looked in <folder>)",
        "model_name_or_path: ./nowhere",
        "Set `model_name_or_path`; recipes/quickstart/make_model.py FOLDER",
        "model",
    ),
    "a model that is not on the Hub": Mistake(
        {"model_name_or_path": "nobody/nothing"},
        "The model 'nobody/nothing' cannot be loaded: …huggingface",
        "model_name_or_path: nobody/nothing",
        "Set `model_name_or_path` to a folder with a config.json",
        "model",
    ),
    "a folder without a model": Mistake(
        lambda desk: desk.recipe(model_name_or_path=desk.empty_folder()),
        "empty' cannot be loaded: ",
        "model_name_or_path: <folder>/empty",
        "Set `model_name_or_path` to a folder with a config.json",
        "model",
    ),
    "a model that transformers does not know": untrainable_model(
        "cannot be loaded: …model type `my_own`",
        "Set `model_name_or_path` to a folder with a config.json",
        model_type="my_own",
    ),
    "a model with an encoder": untrainable_model(
        "cannot be trained: t5 has an encoder",
        "Take a causal language model",
        model_type="t5",
        architectures=["T5ForConditionalGeneration"],
    ),
    "a model in four bits": untrainable_model(
        "cannot be trained: its weights are quantised (awq)",
        "train an adapter beside them (`use_peft: true`)",
        quantization_config=QUANTISED,
    ),
    "a model in eight bits": untrainable_model(
        "cannot be trained: its weights are quantised (fp8)",
        "Take the checkpoint that it was made from",
        quantization_config={"quant_method": "fp8"},
    ),
    "a model without an architecture": untrainable_model(
        "cannot be trained: its config.json names no architecture",
        'Add `"architectures"`',
        architectures=None,
    ),
    "a model of images without its processor": untrainable_model(
        "no causal language model for qwen2_5_vl, and no processor of images is with it",
        "Take the whole checkpoint",
        model_type="qwen2_5_vl",
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        vision_config={},
    ),
    "a model with code for older transformers": Mistake(
        lambda desk: desk.recipe(model_name_or_path=desk.old_model(), trust_remote_code=True),
        "does not run with transformers …(cannot import name 'top_k_top_p_filtering'",
        "model_name_or_path: <folder>/copy",
        "Take a model whose class transformers has",
        "model",
    ),
    "a generation config that cannot be saved": Mistake(
        lambda desk: desk.recipe(model_name_or_path=desk.unsavable()),
        "cannot be saved: ",
        "temperature",
        'copy/generation_config.json, set `"do_sample": true`',
        "unsavable",
    ),
    # ---------------------------------------------------------------- folders, checkpoints, recordings
    "an output folder that is a file": Mistake(
        {"output_dir": "recipe.yaml"},
        "`output_dir` is 'recipe.yaml', where nothing can be written",
        "output_dir: recipe.yaml",
        "Set it to another folder",
        "output-dir",
    ),
    "an output folder in a file": Mistake(
        {"output_dir": "recipe.yaml/run"},
        "`output_dir` is 'recipe.yaml/run', where nothing can be written",
        "output_dir: recipe.yaml/run",
        "Set it to another folder",
        "output-dir",
    ),
    "nothing to replay": Mistake(
        {"replay_paths": "nowhere.jsonl"},
        "nowhere.jsonl does not exist, so there are no recorded rollouts to replay",
        "replay_paths: ['nowhere.jsonl']",
        "Correct the path",
        "replay",
    ),
    "an empty list to replay": Mistake(
        {"replay_paths": []},
        "`replay_paths` is empty",
        "replay_paths: []",
        "Name a file or a folder",
        "replay",
    ),
    "no checkpoint yet": Mistake(
        {"resume_from_checkpoint": True},
        "`resume_from_checkpoint: True`, but there is no checkpoint in <folder>/run",
        "resume_from_checkpoint: True",
        "Leave it out to begin anew",
        "checkpoint",
    ),
    "no such checkpoint": Mistake(
        {"resume_from_checkpoint": "checkpoint-7"},
        "there is no checkpoint in checkpoint-7",
        "resume_from_checkpoint: checkpoint-7",
        "Leave it out to begin anew",
        "checkpoint",
    ),
    "a new run beside the checkpoints of another": Mistake(
        lambda desk: desk.with_checkpoint("a"),
        "which has checkpoints of an earlier run (checkpoint-7)",
        "output_dir: ",
        "`move_checkpoints_aside: true`",
        "output-dir-used",
    ),
    "a checkpoint of another run": Mistake(
        lambda desk: desk.with_checkpoint("b", resume_from_checkpoint="run/checkpoint-7"),
        "run/checkpoint-7 is of the run b, and <folder>/run holds that of another one, a",
        "resume_from_checkpoint: run/checkpoint-7",
        "set `output_dir` to the folder of the other run",
        "checkpoint",
    ),
    "checkpoints of another run alone": Mistake(
        lambda desk: desk.with_checkpoint("b", resume_from_checkpoint=True),
        "of the run that used it last (checkpoint-7: of another one)",
        "resume_from_checkpoint: True",
        "name a folder `checkpoint-N`",
        "checkpoint",
    ),
    "no steps after the checkpoint's": Mistake(
        lambda desk: desk.with_checkpoint("a", resume_from_checkpoint=True, max_steps=7),
        "`max_steps` is 7, and the checkpoint in …checkpoint-7 has 7 steps already",
        "max_steps: 7",
        "Set `max_steps` above 7",
        "checkpoint",
    ),
    "checkpoints in the middle of a batch": warned(
        {"save_strategy": "steps", "save_steps": 10, "steps_per_generation": 4},
        "Checkpoints fall into the middle of a generation batch, which has 4 optimizer steps",
        "save_steps: 10",
        "`save_steps: 8` or `save_steps: 12`",
        "save-steps",
    ),
    "checkpoints in the middle of a batch that several processes share": warned(
        lambda desk: desk.recipe(
            save_strategy="steps",
            save_steps=3,
            num_iterations=2,
            vllm_mode="server",
            options=("--num_processes", "2"),
        ),
        "Checkpoints fall into the middle of a generation batch, which has 2 optimizer steps",
        "save_steps: 3",
        "`save_steps: 2` or `save_steps: 4`",
        "save-steps",
    ),
    "too little disk": checked(
        {"max_steps": 10**9, "save_steps": 1, "save_strategy": "steps"},
        "What the run saves does not fit on the disk of `output_dir`",
        "1000000000 checkpoints",
        "Set `save_total_limit`",
        "disk",
    ),
    "too little disk for a run that will be on another machine": warned(
        lambda desk: desk.recipe(
            max_steps=10**9,
            save_steps=1,
            save_strategy="steps",
            options=("--device_memory_gb", "999"),
        ),
        "What the run saves does not fit on the disk of `output_dir`",
        "1000000000 checkpoints",
        "Set `save_total_limit`",
        "disk",
    ),
    # -------------------------------------------------------------------- settings without an effect
    "a setting of generation": warned(
        {"top_p": 0.9},
        "A setting has no effect, because the environments generate",
        "top_p: 0.9",
        "Set the environment's own",
        "dead-setting",
    ),
    "flags for a server that is not started": warned(
        {"vllm_args": ["--max-num-seqs", "8"]},
        "A setting has no effect, because the run starts no server",
        "vllm_args: ['--max-num-seqs', '8']",
        "Set `start_vllm: true`, or remove it",
        "dead-setting",
    ),
    "an adapter's rank without an adapter": warned(
        {"lora_r": 8},
        "A setting has no effect, because the run has no adapter",
        "lora_r: 8",
        "Set `use_peft: true`",
        "dead-setting",
    ),
    "a limit of checkpoints, and none": warned(
        {"save_strategy": "no", "save_total_limit": 3},
        "A setting has no effect, because nothing is saved on the way",
        "save_total_limit: 3",
        "Set `save_strategy: steps`, or remove it",
        "dead-setting",
    ),
    "a setting of TRL's own server": warned(
        {"vllm_gpu_memory_utilization": 0.5},
        "A setting has no effect, because the server is no part of TRL",
        "vllm_gpu_memory_utilization: 0.5",
        "Use `--gpu-memory-utilization` in `vllm_args`, or remove it",
        "dead-setting",
    ),
    # ------------------------------------------------------------------------- versions and packages
    "another version of a library": checked(
        lambda desk: desk.with_package("trl", "1.10.0"),
        "trl is not of a version that trl_atropos …works with",
        "trl 1.10.0, wanted <1.17,>=1.16",
        'pip install "trl<1.17,>=1.16"',
        "version",
    ),
    "an optimizer that is not installed": checked(
        {"optim": "galore_adamw", "optim_target_modules": ["q_proj"]},
        "A setting needs a package that is not installed",
        "optim: galore_adamw",
        "install `galore_torch`",
        "package-missing",
    ),
    "a report to a package that is not installed": Mistake(
        {"report_to": "clearml"},
        "`report_to` is ['clearml']: …Run `pip install clearml`",
        "report_to: clearml",
        "set `report_to: none`",
        "report-to",
    ),
    "a report to a misspelt package": Mistake(
        {"report_to": "tensorbord"},
        "`report_to` is ['tensorbord']: tensorbord is not supported, only …tensorboard",
        "report_to: tensorbord",
        "set `report_to: none`",
        "report-to",
    ),
    # ------------------------------------------------------------------------ where it is launched
    "a server for two processes": checked(
        lambda desk: desk.recipe(options=("--num_processes", "2")),
        "every process trains the memory of a server of its own",
        "2 processes, 1 servers",
        "`--num_processes 1`",
        "processes-servers",
    ),
    "no such file for accelerate": checked(
        lambda desk: desk.recipe(options=("--config_file", "nowhere.yaml")),
        "`--config_file` cannot be read as accelerate's YAML",
        "nowhere.yaml: ",
        "Name the file that `accelerate launch` gets",
        "launch-file",
    ),
    "a word for a number in accelerate's file": checked(
        lambda desk: desk.launched("num_processes: auto\n"),
        "`--config_file` cannot be read as accelerate's YAML",
        "launch.yaml: …'auto'",
        "Name the file that `accelerate launch` gets",
        "launch-file",
    ),
    "processes that cannot be grouped to divide rows": checked(
        lambda desk: desk.launched(DIVIDED.format(2, 3), vllm_mode="server"),
        "`sp_size` is 2, into which 3 processes cannot be grouped",
        "sp_size: 2, 3 processes",
        "Launch with `--num_processes` 2, or a multiple of it.",
    ),
    "padded rollouts for processes that divide rows": checked(
        lambda desk: desk.launched(DIVIDED.format(2, 2), vllm_mode="server", padding_free=False),
        "`padding_free: false` is not available with `sp_size` 2: it divides packed rows",
        "sp_size: 2, padding_free: false",
        "Set `padding_free: true`, or launch without `sp_size`.",
    ),
    "a server's memory for processes that divide rows": checked(
        lambda desk: desk.launched(DIVIDED.format(2, 2)),
        "`vllm_mode: colocate` is not available with `sp_size` 2: each process would train",
        "sp_size: 2, vllm_mode: colocate",
        "Set `vllm_mode: server` (for an adapter, `nccl_lora`), or launch without `sp_size`.",
    ),
    "attention heads that processes cannot share": checked(
        lambda desk: desk.launched(DIVIDED.format(3, 3), vllm_mode="server"),
        "attention heads of the model cannot be shared out to 3 processes",
        "sp_size: 3, num_attention_heads: 2",
        "Launch with…`sp_size`",
    ),
    "a word for the processes that divide rows": checked(
        lambda desk: desk.launched(DIVIDED.format("two", 2)),
        "`--config_file` cannot be read as accelerate's YAML",
        "launch.yaml: …'two'",
        "Name the file that `accelerate launch` gets",
        "launch-file",
    ),
    "more processes than GPUs": checked(
        lambda desk: desk.recipe(options=DDP, **GPU),
        "There are fewer GPUs than the run needs",
        "4 processes",
        "Launch with fewer `--num_processes`",
        "gpu-layout",
    ),
    "a server over more GPUs than there are": checked(
        lambda desk: desk.recipe(
            start_vllm=True,
            vllm_args=["--tensor-parallel-size", "4"],
            options=("--devices", "2"),
            **GPU,
        ),
        "There are fewer GPUs than the run needs",
        "--tensor-parallel-size 4 in `vllm_args`",
        "Lower it",
        "gpu-layout",
    ),
    "two servers on the same GPU": checked(
        lambda desk: desk.recipe(
            start_vllm=True,
            vllm_server_base_url=[desk.free_url(), desk.free_url()],
            options=("--devices", "2"),
            **GPU,
        ),
        "There are fewer GPUs than the run needs",
        "2 servers x `--gpu-memory-utilization` 0.92 on one GPU",
        "each with a `CUDA_VISIBLE_DEVICES` of its own",
        "gpu-layout",
    ),
    "too little memory": checked(
        lambda desk: desk.recipe(
            start_vllm=True, options=("--device_memory_gb", "1"), gradient_checkpointing=False
        ),
        "GiB of memory (the trainer …, the server …), but the machine has 1.00",
        " of 1.00 GiB",
        "Change, what costs least first: `--kv-cache-memory-bytes ",
        "memory",
    ),
    # --------------------------------------------------------------------------- tokenizers, lengths
    "another tokenizer": checked(
        lambda desk: desk.configured(tokenizer_name=desk.other_vocabulary()),
        "Environment 'mine' has another vocabulary",
        "tokenizer_name: <folder>/copy, the run's model: <model>",
        "Leave `tokenizer_name` out of its entry",
        "tokenizer",
    ),
    "a tokenizer that is not here": warned(
        lambda desk: desk.configured(tokenizer_name="nobody/nothing"),
        "Environment 'mine' tokenizes by another name than the run's model",
        "tokenizer_name: nobody/nothing",
        "or name the model",
        "tokenizer",
    ),
    "another tokenizer of the server": checked(
        lambda desk: desk.recipe(
            start_vllm=True, vllm_args=["--tokenizer", desk.other_vocabulary()]
        ),
        "The server has another vocabulary",
        "--tokenizer: <folder>/copy",
        "Leave `--tokenizer` out",
        "tokenizer",
    ),
    "speculative decoding": checked(
        {"start_vllm": True, "vllm_args": ["--spec-method", "ngram"]},
        "with speculative decoding, what is sampled is not known to follow the policy",
        "vllm_args: --spec-method ngram",
        "Leave the flag out",
        "vllm-flag",
    ),
    "another load format": checked(
        {"start_vllm": True, "vllm_args": ["--load-format", "dummy"]},
        "--load-format dummy: this server needs `--load-format trl_atropos_shared`",
        "vllm_args: --load-format dummy",
        "Leave the flag out",
        "vllm-flag",
    ),
    "no such chat template": checked(
        {"start_vllm": True, "vllm_args": ["--chat-template", "my.jinja"]},
        "The server's chat template is not there",
        "--chat-template my.jinja",
        "Correct `--chat-template`",
        "chat-template",
    ),
    "sequences longer than the model": checked(
        {"start_vllm": True, "vllm_args": ["--max-model-len", "512"]},
        "longer rollouts than the model was made for",
        "--max-model-len 512, max_position_embeddings: 128",
        "to 128 or less",
        "model-length",
    ),
    "sequences longer than the server": checked(
        {
            "start_vllm": True,
            "vllm_args": ["--max-model-len", "64"],
            "max_sequence_length": 100,
        },
        "The server samples shorter rollouts than the trainer is to take",
        "max_sequence_length: 100, --max-model-len 64",
        "Lower `max_sequence_length`",
        "sequence-length",
    ),
    "completions that leave no room for a prompt": warned(
        {"max_completion_length": 128, "max_sequence_length": 128},
        "Completions cannot become as long as `max_completion_length`",
        "max_completion_length: 128, the longest rollout: 128",
        "Lower `max_completion_length`",
        "completion-length",
    ),
    "completions that leave no room on a server that the run does not start": warned(
        {
            "max_completion_length": 100,
            "max_sequence_length": 100,
            "vllm_mode": "server",
            "start_vllm": False,
        },
        "Completions cannot become as long as `max_completion_length`",
        "max_completion_length: 100, the longest rollout: 100",
        "raise `max_sequence_length`.",
        "completion-length",
    ),
    "completions of an environment that leave no room for a prompt": warned(
        lambda desk: desk.recipe({"config": {"max_new_tokens": 100}}, max_sequence_length=100),
        "Environment 'mine': its completions cannot become as long as `max_new_tokens`",
        "max_new_tokens: 100, the longest rollout: 100",
        "Lower `max_new_tokens`, or raise `max_sequence_length`.",
        "completion-length",
    ),
    "completions of an evaluation that leave no room for a prompt": warned(
        lambda desk: desk.evaluated(
            {"config": {"max_new_tokens": 64}, "problems": 1},
            start_vllm=True,
            vllm_args=["--max-model-len", "64"],
            eval_steps=1,
        ),
        "Environment 'task': its completions cannot become as long as `max_new_tokens`",
        "max_new_tokens: 64, the longest rollout: 64",
        "Lower `max_new_tokens`, or raise `--max-model-len` in `vllm_args`.",
        "completion-length",
    ),
    "a deadline that ends before a long completion": warned(
        lambda desk: desk.recipe(
            {
                "config": {"max_new_tokens": 61440, "worker_timeout": -1},
                "servers": [{"timeout": 999999}],
            },
            max_sequence_length=65536,
        ),
        "The trainer waits no longer than `rollout_timeout`",
        "rollout_timeout: 600 s, max_new_tokens: 61440",
        "Raise `rollout_timeout` above 1229, or lower `max_new_tokens`.",
        "deadline",
    ),
    "a request that ends before a long completion": warned(
        lambda desk: desk.recipe(
            {"config": {"max_new_tokens": 131072, "worker_timeout": 7200}},
            max_sequence_length=140000,
            rollout_timeout=7200,
        ),
        "Environment 'mine' waits no longer than `timeout`",
        "timeout: 1200 s, max_new_tokens: 131072",
        "Raise `timeout` in `servers: [{timeout: ...}]` of its entry above 2621",
        "deadline",
    ),
    "a group that is cancelled before a long completion": warned(
        lambda desk: desk.recipe(
            {"config": {"max_new_tokens": 61440}},
            max_sequence_length=65536,
            rollout_timeout=7200,
        ),
        "Environment 'mine' waits no longer than `worker_timeout`",
        "worker_timeout: 600 s, max_new_tokens: 61440",
        "Raise `worker_timeout` in the `config` of its entry above 1229",
        "deadline",
    ),
    "a loss that divides by more than is sampled": warned(
        lambda desk: desk.recipe(
            {"config": {"max_new_tokens": 40}},
            loss_type="dr_grpo",
            max_completion_length=64,
            max_sequence_length=100,
        ),
        "`loss_type: dr_grpo` divides by `max_completion_length`",
        "max_completion_length: 64, mine: at most 40 tokens",
        "Set `max_completion_length: 40`",
        "loss-divisor",
    ),
    "an environment's sequences longer than the trainer's": warned(
        lambda desk: desk.recipe({"config": {"max_token_length": 128}}, max_sequence_length=100),
        "Environment 'mine': it samples longer rollouts",
        "max_token_length: 128, the longest rollout: 100",
        "Lower `max_token_length` to 100",
        "environment-length",
    ),
    # ------------------------------------------------------------------------ an environment's entry
    "environments in a mapping": Mistake(
        {"environments": {"name": "mine"}},
        "`environments` is one mapping, not a list",
        "'name': 'mine'",
        "Begin each entry with `- path: ...`",
        "environment-entry",
    ),
    "two environments of one name": Mistake(
        {"environments": ["environment.py", "environment.py"]},
        "`environments` names must differ",
        "",
        "Give each entry a `name`",
        "environment-entry",
    ),
    "an entry with a misspelt key": wrong_entry(
        {"path": "environment.py", "comand": "x"},
        "comand: Extra inputs",
        "'comand': 'x'",
    ),
    "an entry without a program": wrong_entry(
        {"name": "mine"},
        "it needs one of `path`, `command`, `agent`",
        "'name': 'mine'",
    ),
    "an entry with two programs": wrong_entry(
        {"path": "environment.py", "command": "true"},
        "it needs one of `path`, `command`, `agent`",
        "'command': 'true'",
    ),
    "an entry with a command and no name": wrong_entry(
        {"command": "true"},
        "an entry with a `command` needs a `name`",
        "'command': 'true'",
    ),
    "an entry with a command and settings": wrong_entry(
        {"command": "true", "name": "mine", "config": {"a": 1}},
        "`config` goes with `path`; a `command` has flags",
        "'config': {'a': 1}",
    ),
    "an entry that is called like a folder": wrong_entry(
        {"path": "environment.py", "name": "a/b"},
        "…'a/b' is none for them: set `name` to letters, digits",
        "'name': 'a/b'",
    ),
    "an unknown placeholder in a command": Mistake(
        lambda desk: desk.recipe({"command": "{python} environment.py --url {atropos}"}),
        "The entry of environment 'mine' has an unknown placeholder ('atropos')",
        "'atropos' in {atropos}",
        "{atropos_url}",
        "environment-command",
    ),
    "an unknown placeholder of a server": Mistake(
        lambda desk: desk.recipe({"servers": [{"base_url": "{nowhere}/v1"}]}),
        "The entry of environment 'mine' has an unknown placeholder ('nowhere')",
        "'nowhere'",
        "Known ones: {python}",
        "environment-command",
    ),
    "a quote in a command that is not closed": Mistake(
        lambda desk: desk.recipe({"command": "{python} -c 'print"}),
        "The command of environment 'mine' is cut short: No closing quotation",
        "{python} -c 'print",
        "Correct its quotes",
        "environment-command",
    ),
    "servers and the URL of one": Mistake(
        lambda desk: desk.commanded("--openai.base_url http://a/v1", servers=[{}]),
        "has both `servers` and --openai.base_url in its command",
        "--openai.base_url",
        "Remove one",
        "environment-command",
    ),
    "servers and a file of them": Mistake(
        lambda desk: desk.commanded("--config own.yaml", servers=[{}]),
        "has both `servers` and --config in its command",
        "--config",
        "Remove one",
        "environment-command",
    ),
    # -------------------------------------------------------------------- an environment's program
    "no such program": Mistake(
        lambda desk: desk.recipe({"command": "pyhton environment.py"}),
        "there is no program 'pyhton' to run",
        "pyhton",
        "Correct its `command`, such as `{python} path/to/script.py`",
        "environment-program",
    ),
    "no such Python": Mistake(
        lambda desk: desk.recipe({"python": "venv/bin/python"}),
        "there is no program '<folder>/venv/bin/python' to run",
        "<folder>/venv/bin/python",
        "Correct its `python`",
        "environment-program",
    ),
    "no such folder of a program": Mistake(
        lambda desk: desk.recipe({"cwd": "/nowhere"}),
        "its `cwd`, '/nowhere', is no folder",
        "cwd: /nowhere",
        "Name a folder that exists, or leave `cwd` out",
        "environment-program",
    ),
    "a Python that cannot run": checked(
        lambda desk: desk.recipe({"python": desk.broken_python()}),
        "its Python cannot be asked what is installed there",
        "exit status 3",
        "Correct its `python`",
        "environment-python",
    ),
    "no such script": Mistake(
        lambda desk: desk.recipe({"path": "other.py"}),
        "there is no script 'other.py'",
        "path: other.py",
        "Correct its `path` or",
        "environment-script",
    ),
    "no such script in a command": checked(
        lambda desk: desk.recipe({"command": "{python} -u other.py serve"}),
        "there is no such script",
        "other.py",
        "Correct its `command` or `cwd`",
        "environment-script",
    ),
    "no such module": checked(
        lambda desk: desk.recipe({"command": "{python} -u -m nowhere.environment serve"}),
        "there is no such module",
        "nowhere.environment in ",
        "Correct its `command` or `cwd`",
        "environment-script",
    ),
    "a Python without Atropos": checked(
        lambda desk: desk.recipe({"python": desk.python(atroposlib=None)}),
        "its Python does not have the Atropos that it needs",
        "atroposlib is not installed for <folder>/python3",
        'python3 -m pip install "atroposlib==0.4.0"`',
        "environment-atroposlib",
    ),
    "a Python with another Atropos": checked(
        lambda desk: desk.recipe({"python": desk.python(atroposlib="0.3.0")}),
        "its Python does not have the Atropos that it needs",
        "atroposlib 0.3.0",
        'python3 -m pip install "atroposlib==0.4.0"`',
        "environment-atroposlib",
    ),
    "tokens from transformers 5": checked(
        lambda desk: desk.tokenizing(transformers="5.1.2"),
        "`tokenize_for_trainer` makes garbage of its tokens",
        "environment.py, transformers 5.1.2 of <folder>/python3",
        "name its Python as `python`",
        "tokenizes",
    ),
    # ------------------------------------------------------------------------ an environment's settings
    "a misspelt setting of an environment": Mistake(
        lambda desk: desk.configured(grop_size=8),
        "Environment 'mine' has no setting `grop_size`",
        "grop_size: 8 (`config:`)",
        "Did you mean `group_size`?",
        "environment-setting",
    ),
    "another temperature in the command": Mistake(
        lambda desk: desk.commanded("--env.temperature 0.7"),
        "'mine' samples at temperature 0.7 (--env.temperature), but `temperature` is 1.0",
        "temperature 0.7 (--env.temperature), temperature: 1.0",
        "Make the two equal",
        "temperature",
    ),
    "another temperature in the entry": Mistake(
        lambda desk: desk.configured(temperature=0.7),
        "'mine' samples at temperature 0.7 (`config: temperature`), but `temperature` is 1.0",
        "temperature 0.7 (`config: temperature`), temperature: 1.0",
        "Make the two equal",
        "temperature",
    ),
    "groups that do not fill a batch": Mistake(
        lambda desk: desk.configured(group_size=3),
        "'mine' sends groups of 3 rollouts, which do not fill a generation batch of 8",
        "group_size: 3, a generation batch of 8 rollouts",
        "a multiple of the group size",
        "group-size",
    ),
    "groups larger than a batch": Mistake(
        lambda desk: desk.commanded("--env.group_size=16"),
        "'mine' sends groups of 16 rollouts, but a generation batch has only 8 rollouts",
        "group_size: 16, a generation batch of 8 rollouts",
        "Raise `per_device_train_batch_size`",
        "group-size",
    ),
    "groups of one": checked(
        lambda desk: desk.configured(group_size=1),
        "its groups have one rollout",
        "group_size: 1, single_row_groups: refuse",
        "set `single_row_groups` to `raw`",
        "group-of-one",
    ),
    "groups of sizes that do not go together": checked(
        lambda desk: desk.two({"group_size": 6}, {"group_size": 4}, per_device_train_batch_size=12),
        "waits for ever to fill small groups",
        "one: group_size 6, two: group_size 4",
        "divide the largest",
        "mixed-group-sizes",
    ),
    "shares of more than a batch": checked(
        lambda desk: desk.two({"min_batch_allocation": 0.7}, {"min_batch_allocation": 0.6}),
        "more than one batch",
        "one: min_batch_allocation 0.7, two: min_batch_allocation 0.6",
        "Lower `min_batch_allocation`",
        "batch-shares",
    ),
    "groups too old to be trained on": warned(
        lambda desk: desk.recipe({"config": {"max_batches_offpolicy": 3}}, max_staleness=1),
        "its last rollouts are too old to be trained on",
        "max_batches_offpolicy: 3, max_staleness: 1",
        "Lower `max_batches_offpolicy` to 1",
        "staleness",
    ),
    "an end before the run's": checked(
        lambda desk: desk.commanded("--env.total_steps 5"),
        "it ends before the run does",
        "total_steps: 5, max_steps: 10",
        "Leave `total_steps` out",
        "environment-steps",
    ),
    "an API at a port that there cannot be": checked(
        lambda desk: desk.configured(rollout_server_url="http://localhost:99999"),
        "it registers at another Atropos API than the run's",
        "rollout_server_url: http://localhost:99999",
        "Set it to `{atropos_url}`",
        "environment-api",
    ),
    "another server": warned(
        lambda desk: desk.commanded("--openai.base_url http://localhost:1/v1"),
        "it samples from a server that is none of the run's",
        "http://localhost:1/v1; the run has http://127.0.0.1:",
        "Set it to `{vllm_url}/v1`",
        "server-url",
    ),
    "a server type without tokens": checked(
        lambda desk: desk.commanded("--openai.server_type openai"),
        "its server type returns neither token ids nor log-probabilities",
        "server_type: openai",
        "Set `server_type` to 'vllm'",
        "server-type",
    ),
    "a server type without tokens in the entry": checked(
        lambda desk: desk.recipe({"servers": [{"server_type": "trl"}]}),
        "its server type returns neither token ids nor log-probabilities",
        "server_type: trl",
        "Set `server_type` to 'vllm'",
        "server-type",
    ),
    "a request that reshapes the distribution": warned(
        lambda desk: desk.with_source(
            SOURCE + "\nasync def sample(server):\n    await server.completion(top_p=0.9)\n"
        ),
        "its requests change what is sampled",
        "top_p=0.9 (line 16 of environment.py)",
        "Leave this out of requests",
        "reshaped",
    ),
    "made-up tokens": checked(
        lambda desk: desk.recipe({"env": {"ATROPOS_ALLOW_DUMMY_MANAGED_SERVER": "1"}}),
        "it may send made-up tokens",
        "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER",
        "out of its variables",
        "dummy-tokens",
    ),
}
