"""`AtroposGRPOConfig`: every setting of a run, with its default, its help text and its checks.

The docstring is the only place that explains a setting: `--help` and docs/reference.md are made
from it. The checks are written by hand, because a YAML recipe bypasses the `choices` of a `Literal`
annotation. `recipe.py` reads a recipe into this class; a Python program makes it itself.
"""

import inspect
import math
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from accelerate import ParallelismConfig
from transformers.utils import strtobool
from trl import GRPOConfig

from trl_atropos.errors import RecipeError
from trl_atropos.metrics.health import check_names
from trl_atropos.modes import MODES, Mode
from trl_atropos.protocol import NUMERICS

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CHOICES = {
    "vllm_mode": tuple(MODES),
    "loss_type": LOSS_TYPES,
    "vllm_importance_sampling_mode": IMPORTANCE_SAMPLING_MODES,
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "single_row_groups": ("refuse", "raw", "zero"),
    "weight_transport": ("auto", "nccl", "gloo", "memory"),
    "vllm_sleep_level": (1, 2),
    "numerics": NUMERICS,
    "attention_kernel": ("auto", "torch", "FA3", "FA4", "cudnn"),
}
# Least value of a setting, and what a message asks for. A default passes, even if it is `None`.
LEAST = {
    "rollout_timeout": (math.ulp(0), "a number of seconds above 0"),
    "publish_timeout": (math.ulp(0), "a number of seconds above 0"),
    "eval_timeout": (math.ulp(0), "a number of seconds above 0"),
    "max_spool_gb": (math.ulp(0), "a number of gigabytes above 0"),
    "probe_every_n_steps": (0, "0 (off) or more"),
    "distillation_coef": (0, "0 (off) or more"),
    "prefetch_batches": (0, "0 or more"),
    "max_staleness": (0, "0 or more"),
    "sync_every_n_steps": (1, "1 or more"),
    "learning_rate": (0, "0 or more"),
    "weight_decay": (0, "0 or more"),
    "max_grad_norm": (0, "0 (no clipping) or more"),
    "adam_epsilon": (
        math.ulp(0),
        "a number above 0, such as 1e-8: where a gradient is 0, Adam would divide 0 by 0",
    ),
    "beta": (0, "0 (no reference policy) or more"),
    "max_sequence_length": (
        2,
        "the longest prompt plus completion in tokens, or leave it out for the server's limit",
    ),
}
# With an infinite value, all weights would become NaN.
FINITE = ("distillation_coef", "learning_rate", "weight_decay", "adam_epsilon", "beta")
# Values that `numerics: bitwise` needs.
BITWISE_NEEDS = {
    "padding_free": True,
    "bf16": False,
    "fp16": False,
    "temperature": 1.0,
    "distillation_coef": 0.0,
}
# Settings that are gone, and what to do instead.
REMOVED = {
    "group_by_length": "Leave it out: rollouts of similar length share a micro-batch wherever the "
    "gradient does not depend on it.",
    "restart_environments": "Leave it out: an environment is started again up to 3 times in an "
    "hour.",
    "sampling_temperature": "Leave it out: the run compares `temperature` with what the recipe "
    "states of each environment, and with what the server has noted of each request.",
}

# Settings of GRPOConfig that describe generation. They have no effect, because the environments
# generate.
UNUSED_FIELDS = (
    "num_generations",
    "num_generations_eval",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",
    "chat_template_kwargs",
    "cache_implementation",
    "max_tool_calling_iterations",
    "use_transformers_continuous_batching",
    "vllm_structured_outputs_regex",
    "vllm_model_impl",
    "reward_weights",
    "multi_objective_aggregation",
    "shuffle_dataset",
)

# In a docstring: `> Title of a group`, or `name (type):` and its text below.
DESCRIPTION = re.compile(
    r"^    > (?P<group>.+)$|^    (?P<name>\w+) \(.*\):\n(?P<text>(?:        .*\n?)+)", re.MULTILINE
)
T = TypeVar("T")


def described(config: type) -> Iterator[tuple[str, str, str]]:
    """Yields the group, the name and the help text of every setting that a configuration's
    docstring explains."""
    group = ""
    for match in DESCRIPTION.finditer(inspect.getdoc(config) or ""):
        group = match["group"] or group
        if match["name"]:
            yield group, match["name"], " ".join(match["text"].split())


def with_help(config: type[T]) -> type[T]:
    """Gives the fields of a class the help texts of its docstring. Stands below `@dataclass`."""
    texts = {name: text for _, name, text in described(config)}
    for name in config.__annotations__:
        default = getattr(config, name)
        setattr(config, name, field(default=default, metadata={"help": texts.get(name, "")}))
    return config


@dataclass
@with_help
class AtroposGRPOConfig(GRPOConfig):
    """
    Configuration of [`AtroposGRPOTrainer`].

    You may use every argument of [`trl.GRPOConfig`] and [`transformers.TrainingArguments`]. Those
    that describe generation (`top_p`, ...) have no effect, because the environments generate. A
    warning names those that you set.

    A *publish* gives the weights of the trainer to the vLLM server. The *policy version* of weights
    is the number of optimizer steps that made them. The *staleness* of a rollout is the version
    that it is trained at minus the oldest version that sampled it.

    Parameters:
        > Server and weights

        vllm_mode (`str`, *optional*, defaults to `"colocate"`):
            How new weights reach the vLLM server. `"colocate"`: the trainer's parameters are views
            of the server's memory (adapters are sent). `"server"`: all weights are sent to running
            servers. `"nccl_lora"`: a LoRA adapter is sent from memory to memory. `"lora"`: servers
            load the adapter's folder over HTTP. `"restart"`: the server is restarted on a
            checkpoint.
        vllm_server_base_url (`str`, *optional*, defaults to `"http://127.0.0.1:9001"`):
            URL of the vLLM server, or of several: as a list in a recipe, or separated by commas.
        sync_every_n_steps (`int`, *optional*, defaults to `1`):
            Optimizer steps between two publishes. Always 1 with `vllm_mode: colocate`.
        weight_transport (`str`, *optional*, defaults to `"auto"`):
            Transport of the weights in the modes `"server"` and `"nccl_lora"`: `"nccl"`, `"gloo"`,
            `"memory"` (shared memory or CUDA IPC, on one machine), or `"auto"`, which takes one
            that reaches the servers.
        publish_timeout (`float`, *optional*, defaults to `60.0`):
            Seconds that the server may take to answer each step of a publish.
        probe_every_n_steps (`int`, *optional*):
            Publishes between two probes. In a probe, the server samples a fixed prompt and the
            trainer scores the same tokens; a difference stops the run. The first and the last
            publish are always probed, unless `0` switches probes off. By default, probes take at
            most 2 percent of the run's time. Weights that are sent are compared bit for bit after
            every publish.
        vllm_enable_sleep_mode (`bool`, *optional*, defaults to `False`):
            Whether a server that has a copy of the weights frees the device's memory while the
            trainer computes. The server needs `--enable-sleep-mode`.
        vllm_sleep_level (`int`, *optional*, defaults to `2`):
            `1` keeps the server's weights in host memory while it sleeps, `2` discards them.
        master_weights (`bool`, *optional*, defaults to `True`):
            Whether to keep float32 masters of 16-bit weights (an adapter then has the 16 bits of
            its base), and to accumulate gradients in float32. Without masters, updates smaller than
            a weight's rounding step are lost.
        offload_master_weights (`bool`, *optional*, defaults to `False`):
            Whether to keep the master weights and the state of the optimizer in host memory.

        > Rollouts

        atropos_url (`str`, *optional*, defaults to `"http://127.0.0.1:8000"`):
            URL of the Atropos API (`python -m atroposlib.cli.run_api`).
        reset_atropos (`bool`, *optional*, defaults to `False`):
            Whether to discard the state of the Atropos API (queued rollouts and registered
            environments) before registering. Environments that are connected at that moment end,
            and you must restart them.
        rollout_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds to wait for rollouts before the run stops with a diagnosis. The time that the
            trainer takes to pull queued rollouts from the API does not count.
        max_sequence_length (`int`, *optional*):
            Longest rollout in tokens, prompt included. Longer ones are dropped and counted.
            Defaults to the server's `max_model_len`, or to the model's `max_position_embeddings`
            when there is no server.
        single_row_groups (`str`, *optional*, defaults to `"refuse"`):
            What to do with a group of one rollout, which has no group statistics: `"refuse"` drops
            it, and stops the run if most groups of an environment are so; `"raw"` takes the score
            as the advantage; `"zero"` sets the advantage to 0.
        max_staleness (`int`, *optional*):
            Greatest staleness of a rollout that is trained on, in policy versions. Staler ones are
            dropped and counted; rollouts of unknown version are kept. By default, there is no
            limit.
        hold_requests (`bool`, *optional*):
            Whether new completions wait while the trainer computes. By default, they do if
            `max_staleness` is 0. With a `max_batches_offpolicy` of N, rollouts are then N - 1
            versions old in the mean.
        prefetch_batches (`int`, *optional*, defaults to `0`):
            Generation batches to pull and check ahead while the trainer computes. Each makes
            rollouts one version staler.
        replace_zero_variance_groups (`bool`, *optional*, defaults to `False`):
            Whether to drop groups whose scores are all equal, from which nothing is learned, and to
            fill the batch with the next groups (DAPO's dynamic sampling). The mean reward is then
            no longer that of all rollouts.
        enforce_environment_weights (`bool`, *optional*, defaults to `False`):
            Whether to train on several environments in the proportion of their
            `--env.inference_weight`, by dropping rollouts of those that are ahead. The Atropos API
            itself limits only how many requests each has in flight.
        replay_paths (`list[str]`, *optional*):
            Train on recorded rollouts instead of a live Atropos API: files or folders of JSON or
            JSON lines, or of Arrow files as a run leaves them in `<output_dir>/rollouts`. No server
            is used.
        max_spool_gb (`float`, *optional*, defaults to `10.0`):
            Gigabytes of rollouts to keep in `<output_dir>/rollouts`. Above that, the oldest that no
            checkpoint needs are removed. The trainer's log-probabilities, 4 bytes a token, do not
            count.
        move_checkpoints_aside (`bool`, *optional*, defaults to `False`):
            Whether a new run moves the checkpoints that an earlier one left in `output_dir` to a
            folder `checkpoints-before-N` there. Otherwise, it is refused. No effect on a run that
            resumes.

        > Loss and micro-batches

        vllm_importance_sampling_mode (`str`, *optional*, defaults to `"token_truncate"`):
            How the ratio of the trainer's and the sampler's probabilities corrects the loss:
            `"token_truncate"`, `"token_mask"`, `"sequence_truncate"` or `"sequence_mask"`. The last
            two multiply the ratios of all tokens, which soon exceeds any bound for rollouts that
            are one version old.
        distillation_coef (`float`, *optional*, defaults to `0.0`):
            Weight of the distillation term, for environments that send a teacher's top-k
            log-probabilities (`distill_token_ids`, `distill_logprobs`): KL(teacher || policy),
            renormalised over the top k, at temperature 1, averaged over the trained tokens that
            have them. `0` switches it off. Otherwise each micro-batch takes one further forward,
            and memory for its logits over the whole vocabulary.
        max_tokens_per_micro_batch (`int`, *optional*):
            Tokens of a micro-batch, padding included, in place of a number of rollouts. Then
            `per_device_train_batch_size` is the rollouts of one process in an optimizer step. By
            default, with `gradient_accumulation_steps: 1` on a GPU, what fits into the free memory,
            up to 16384.
        padding_free (`bool`, *optional*, defaults to `True`):
            Whether the rollouts of a micro-batch stand end to end in one row, so that nothing is
            computed on padding. For a model that cannot, they are padded, with a warning.
        share_prompts (`bool`, *optional*):
            Whether what the rollouts of a micro-batch have in common is computed once, if that
            saves an eighth of the tokens: the prompt of a group, a system prompt, and what the
            branches of an episode share. By default wherever the model allows it.
        attention_kernel (`str`, *optional*, defaults to `"auto"`):
            What attends to packed rollouts on a GPU in 16 bits: `"torch"` (FlashAttention 2, which
            torch comes with), `"FA3"` (the package `flash-attn-3`), `"FA4"` (`flash-attn-4`), or
            `"cudnn"`, which attends to rollouts of thousands of tokens one after the other. With
            `"auto"`, it is the fastest of those that are installed and right. cuDNN is one of them
            if `max_sequence_length` or `max_completion_length` is 4096 or more.
        compile_layers (`bool`, *optional*):
            Whether to compile decoder layers (`torch.compile`). By default on GPUs, for dense
            models of 50 million parameters or more that are not sharded.
        gpu_share (`float`, *optional*):
            Share of the GPU that the trainer computes on under NVIDIA's MPS, such as `0.75`. By
            default all.
        numerics (`str`, *optional*, defaults to `"default"`):
            How closely trainer and server compute the same: `"default"`, `"float32_head"`,
            `"float16"`, or on Hopper GPUs `"bitwise"` (docs/exactness.md). If the run does not
            start the server, start that with the same `--numerics`.

        > Evaluation

        eval_hold (`bool`, *optional*):
            Whether training waits while an evaluation samples, so that all of its answers are of
            one policy version. By default, it waits with `metric_for_best_model`. Before the first
            step and after the last, it always waits.
        eval_timeout (`float`, *optional*, defaults to `3600.0`):
            Seconds that an evaluation may take. After that it is ended, with a warning.

        > Warnings

        warning_thresholds (`dict[str, float]` or `str`, *optional*):
            Values above which a warning about the health of the run is given, by name, such as
            `{"truncated": 0.5}`. Other warnings keep their defaults (docs/reference.md lists them).
            A share never warns with `1`.
        stop_on_warnings (`list[str]`, *optional*):
            Names of warnings about the health of the run that end it, such as `["zero_variance"]`.
            A gradient that is not finite always ends it, unless `warning_thresholds:
            {"gradient_not_finite": 3}` lets it leave out up to 3 such steps.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `False`):
            Whether the log shows 0.0 in place of losses that are not finite, as Transformers does
            by default.
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["warning_thresholds"]

    vllm_mode: str = "colocate"
    vllm_server_base_url: str | None = "http://127.0.0.1:9001"
    sync_every_n_steps: int = 1
    weight_transport: str = "auto"
    publish_timeout: float = 60.0
    probe_every_n_steps: int | None = None
    vllm_enable_sleep_mode: bool = False
    vllm_sleep_level: int = 2
    master_weights: bool = True
    offload_master_weights: bool = False
    atropos_url: str = "http://127.0.0.1:8000"
    reset_atropos: bool = False
    rollout_timeout: float = 600.0
    max_sequence_length: int | None = None
    single_row_groups: str = "refuse"
    max_staleness: int | None = None
    hold_requests: bool | None = None
    prefetch_batches: int = 0
    replace_zero_variance_groups: bool = False
    enforce_environment_weights: bool = False
    replay_paths: list[str] | None = None
    max_spool_gb: float = 10.0
    move_checkpoints_aside: bool = False
    vllm_importance_sampling_mode: str = "token_truncate"
    distillation_coef: float = 0.0
    max_tokens_per_micro_batch: int | None = None
    padding_free: bool = True
    share_prompts: bool | None = None
    attention_kernel: str = "auto"
    compile_layers: bool | None = None
    gpu_share: float | None = None
    numerics: str = "default"
    eval_hold: bool | None = None
    eval_timeout: float = 3600.0
    warning_thresholds: dict | str | None = None
    stop_on_warnings: list[str] | None = None
    logging_nan_inf_filter: bool = False

    def __new__(cls, *args: Any, **kwargs: Any):
        for name in REMOVED.keys() & kwargs.keys():
            raise RecipeError(
                f"`{name}` is no setting any more",
                f"{name}: {kwargs[name]}",
                REMOVED[name],
                "removed",
            )
        return super().__new__(cls)

    def __post_init__(self):
        # With a single-copy server the trainer computes in the server's dtype; TRL's default would
        # be bf16 autocast.
        if self.bf16 is None:
            self.bf16 = False
        # of accelerate's launcher or its configuration
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
        if precision in ("bf16", "fp16") and not (self.bf16 or self.fp16):
            setattr(self, precision, True)
        self.use_vllm = False  # the sampler is always vLLM here, but TRL would start one of its own
        self._check_run_length()
        self._unify_spellings()
        self._check_choices()
        self._check_noise()
        self._check_least_values()
        self._check_gpu_share()
        self._check_steps()
        self.sp_size = self._launched_sp_size()  # no setting of a recipe
        self.require_divisible_rows(self.sp_size, int(os.environ.get("WORLD_SIZE", 1)))
        self._check_numerics()
        self._check_batch()
        self._check_urls()
        self._warn_unused()
        self._check_sharding()
        self._fill_in()
        # What follows reads what TRL has filled in: the steps of a generation batch, settings
        # written as JSON.
        self._check_sleep()
        self._check_token_budget()
        self._check_warnings()
        self._check_correction()
        self._check_evaluation()

    def _fill_in(self) -> None:
        """Runs TRL's own checks, which fill in what is left open."""
        # TRL groups by a fixed `num_generations`. Atropos groups have sizes of their own, so that
        # only TRL's smallest value passes its checks for every batch.
        num_generations = self.num_generations
        num_generations_eval = self.num_generations_eval
        self.num_generations = 2
        self.num_generations_eval = 1
        # TRL counts all processes. Those that divide rows among them train on the same rollouts.
        if self.generation_batch_size is not None:
            self.generation_batch_size *= self.sp_size
        super().__post_init__()
        self.generation_batch_size //= self.sp_size
        self.num_generations = num_generations
        self.num_generations_eval = num_generations_eval

    def _wrong(self, what: str, fix: str, *names: str, code: str = "setting") -> RecipeError:
        """Returns the error about the settings `names`, whose values are what was seen."""
        seen = [f"{name}: {getattr(self, name)}" for name in names]
        return RecipeError(what, ", ".join(seen), fix, code)

    def _check_run_length(self) -> None:
        if self.max_steps <= 0:
            what = f"`max_steps` is {self.max_steps}, but rollouts from environments have no end"
            fix = "Set `max_steps` to the number of optimizer steps."
            raise self._wrong(what, fix, "max_steps")
        if self.eval_strategy == "epoch":
            what = "`eval_strategy` is 'epoch', but rollouts from environments have no epochs"
            fix = "Set `eval_strategy: steps` and `eval_steps`."
            raise self._wrong(what, fix, "eval_strategy", "eval_steps")

    def _unify_spellings(self) -> None:
        """Gives settings that may be written in two ways one type."""
        booleans = {True: "group", False: "none"}
        self.scale_rewards = booleans.get(self.scale_rewards, self.scale_rewards)
        for name in ("replay_paths", "stop_on_warnings"):
            if isinstance(getattr(self, name), str):
                # YAML gives a scalar where a list has one entry
                setattr(self, name, [getattr(self, name)])

    def _check_choices(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                choices = ", ".join(map(str, allowed))
                raise self._wrong(f"`{name}` is {value!r}", f"Set it to one of: {choices}.", name)

    def _check_noise(self) -> None:
        if self.neftune_noise_alpha is not None:
            what = "`neftune_noise_alpha` adds noise in training, which the server samples without"
            raise self._wrong(what, "Leave it out.", "neftune_noise_alpha")

    def _check_least_values(self) -> None:
        for name, (least, text) in LEAST.items():
            value = getattr(self, name)
            if value == self.__dataclass_fields__[name].default:
                continue
            fits = value is not None and value >= least
            if fits and name in FINITE:
                fits = value < math.inf
            if not fits:
                raise self._wrong(f"`{name}` is {value!r}", f"Set it to {text}.", name)

    def _check_gpu_share(self) -> None:
        share = self.gpu_share
        if share is not None and not 0 < share <= 1:
            fix = "Set it to a number above 0 and up to 1, such as 0.7, or leave it out."
            raise self._wrong(f"`gpu_share` is {share!r}", fix, "gpu_share")

    def _check_steps(self) -> None:
        """Checks what is sampled and published at which step."""
        if self.hold_requests and self.prefetch_batches:
            what = (
                "`hold_requests` holds back what would be sampled ahead, and `prefetch_batches` "
                "asks for it"
            )
            fix = "Leave one of them out."
            raise self._wrong(what, fix, "hold_requests", "prefetch_batches")
        if self.sync_every_n_steps > 1 and self.mode.shares_memory:
            what = (
                f"`sync_every_n_steps` is {self.sync_every_n_steps}, but with "
                "`vllm_mode='colocate'` it is always 1"
            )
            raise self._wrong(what, "Leave it at 1.", "sync_every_n_steps", "vllm_mode")

    def _launched_sp_size(self) -> int:
        """Returns how many processes divide a row among them: `sp_size` of the `parallelism_config`
        that the run was launched with."""
        if self.parallelism_config is not None:
            what = "`parallelism_config` is set, which this trainer takes from the launcher alone"
            fix = "Leave it out, and launch with `--config_file configs/accelerate/sp2.yaml`."
            raise self._wrong(what, fix, "parallelism_config")
        is_launched = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false")
        if not strtobool(is_launched):
            return 1
        launched = ParallelismConfig()  # reads the launcher's variables
        if launched.total_size != launched.sp_size:
            raise RecipeError(
                "Of accelerate's `parallelism_config`, this trainer knows `sp_size` alone",
                f"sizes of {launched.total_size} processes, sp_size: {launched.sp_size}",
                "Leave the other sizes out: groups of `sp_size` processes are data parallel.",
            )
        return launched.sp_size

    def require_divisible_rows(self, sp_size: int, processes: int) -> None:
        """Raises `RecipeError` if rows of this run cannot be divided among `sp_size` of its
        `processes`."""
        if sp_size == 1:
            return
        seen = f"sp_size: {sp_size}"
        if processes % sp_size:
            what = f"`sp_size` is {sp_size}, into which {processes} processes cannot be grouped"
            fix = f"Launch with `--num_processes` {sp_size}, or a multiple of it."
            raise RecipeError(what, f"{seen}, {processes} processes", fix)
        shares_memory = self.mode.shares_memory and self.replay_paths is None
        servers_memory = "each process would train a server's memory of its own"
        sends = "Set `vllm_mode: server` (for an adapter, `nccl_lora`)"
        refusals = [
            (
                "padding_free",
                not self.padding_free,
                "it divides packed rows",
                "Set `padding_free: true`",
            ),
            (
                "numerics",
                self.numerics == "bitwise",
                "the server computes whole rows",
                "Set `numerics: default`",
            ),
            ("vllm_mode", shares_memory, servers_memory, sends),
        ]
        for name, is_refused, reason, fix in refusals:
            if is_refused:
                setting = f"{name}: {str(getattr(self, name)).lower()}"
                what = f"`{setting}` is not available with `sp_size` {sp_size}: {reason}"
                fix = f"{fix}, or launch without `sp_size`."
                raise RecipeError(what, f"{seen}, {setting}", fix)

    def _check_numerics(self) -> None:
        if self.numerics == "float16":
            if self.mode.shares_memory:
                what = (
                    "`numerics: float16` trains weights in float32, which `vllm_mode: colocate` "
                    "cannot share"
                )
                fix = "Set `vllm_mode: server`, which copies them in the device's memory."
                raise self._wrong(what, fix, "numerics", "vllm_mode")
            self.fp16 = True
            self.bf16 = False
        elif self.numerics == "bitwise":
            for name, value in BITWISE_NEEDS.items():
                if getattr(self, name) != value:
                    setting = f"`{name}: {getattr(self, name)}`"
                    what = f"`numerics: bitwise` is not available for {setting}"
                    fix = f"Set `{name}: {str(value).lower()}`, or another `numerics`."
                    raise self._wrong(what, fix, "numerics", name)
            self.compile_layers = False
            self.share_prompts = False
            self.attention_kernel = "torch"

    def _check_batch(self) -> None:
        shares = int(os.environ.get("WORLD_SIZE", 1)) // self.sp_size
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        size = self.generation_batch_size or self.per_device_train_batch_size * shares * steps
        if size % 2:
            sharers = "processes"
            if self.sp_size > 1:
                sharers = f"groups of {self.sp_size} processes"
            product = (
                f"{self.per_device_train_batch_size} x {shares} {sharers} x {steps} steps "
                "per generation"
            )
            what = (
                f"A generation batch has {size} rollouts (per_device_train_batch_size "
                f"{product}) and must be even"
            )
            fix = "Change `per_device_train_batch_size` or `gradient_accumulation_steps`."
            names = ("per_device_train_batch_size", "gradient_accumulation_steps")
            raise self._wrong(what, fix, *names, code="batch-size")

    def _check_urls(self) -> None:
        servers = self.vllm_server_base_url or f"http://127.0.0.1:{self.vllm_server_port}"
        if isinstance(servers, str):
            servers = servers.split(",")  # YAML may give a list
        servers = [_plain_url("vllm_server_base_url", str(url)) for url in servers]
        self.vllm_server_base_url = ",".join(servers)
        self.atropos_url = _plain_url("atropos_url", self.atropos_url)
        for url in servers:
            if servers.count(url) > 1:
                what = f"`vllm_server_base_url` lists {url} twice"
                raise self._wrong(what, "List each server once.", "vllm_server_base_url")
        if self.atropos_url in servers:
            what = (
                f"`atropos_url` and `vllm_server_base_url` are both {self.atropos_url}. They "
                "are two servers"
            )
            fix = "Give each its own port."
            raise self._wrong(what, fix, "atropos_url", "vllm_server_base_url")

    def _warn_unused(self) -> None:
        if self.unused_settings:
            unused = ", ".join(self.unused_settings)
            what = f"These settings have no effect, because the environments generate: {unused}"
            warnings.warn(f"{what}. Set what they mean in the environment instead.", stacklevel=3)

    def _check_sharding(self) -> None:
        if self.replay_paths is not None or not self.mode.shares_memory:
            return
        for name in ("deepspeed", "fsdp"):
            is_set = getattr(self, name)
            is_launched = strtobool(os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false"))
            if not is_set and not is_launched:
                continue
            place = "" if is_set else " from the configuration of `accelerate launch`"
            what = (
                "`vllm_mode='colocate'` trains the server's own memory in place, which cannot "
                "be sharded"
            )
            fix = f"Remove `{name}`{place}, or use `vllm_mode: server`."
            raise self._wrong(what, fix, "vllm_mode", name, code="sharded-colocate")

    def _check_sleep(self) -> None:
        if not self.vllm_enable_sleep_mode:
            return
        if self.mode.restarts_engine:
            what = "`vllm_enable_sleep_mode` has no meaning with `vllm_mode: restart`"
            raise self._wrong(what, "Remove it.", "vllm_enable_sleep_mode", "vllm_mode")
        if self.mode.needs_adapter and self.vllm_sleep_level != 1:
            what = (
                f"`vllm_sleep_level: 2` discards weights that `vllm_mode: {self.vllm_mode}` "
                "does not send again"
            )
            raise self._wrong(what, "Set `vllm_sleep_level: 1`.", "vllm_sleep_level", "vllm_mode")
        steps_of_batch = self.steps_per_generation * self.num_iterations
        if self.sync_every_n_steps > 1 or steps_of_batch < self.gradient_accumulation_steps:
            what = (
                "With `vllm_enable_sleep_mode` the server sleeps until the next publish, but the "
                "trainer would need another batch before that (sync_every_n_steps "
                f"{self.sync_every_n_steps}, steps_per_generation {self.steps_per_generation}, "
                f"gradient_accumulation_steps {self.gradient_accumulation_steps})"
            )
            fix = "Set `sync_every_n_steps: 1` and leave `steps_per_generation` out."
            names = ("sync_every_n_steps", "steps_per_generation", "gradient_accumulation_steps")
            raise self._wrong(what, fix, "vllm_enable_sleep_mode", *names)

    def _check_token_budget(self) -> None:
        budget = self.max_tokens_per_micro_batch
        if budget is None:
            return
        if budget < max(2, self.max_sequence_length or 0):
            longest = f"`max_sequence_length` ({self.max_sequence_length}) tokens"
            what = f"`max_tokens_per_micro_batch` is {budget}, but a rollout may have {longest}"
            names = ("max_tokens_per_micro_batch", "max_sequence_length")
            raise self._wrong(what, "Set it to that or more.", *names)
        steps = self.gradient_accumulation_steps
        if steps != 1:
            what = (
                f"`gradient_accumulation_steps` is {steps}, but `max_tokens_per_micro_batch` "
                "divides the step itself"
            )
            size = self.per_device_train_batch_size * steps
            fix = f"Set `gradient_accumulation_steps: 1` and `per_device_train_batch_size: {size}`."
            names = ("gradient_accumulation_steps", "per_device_train_batch_size")
            raise self._wrong(what, fix, "max_tokens_per_micro_batch", *names)
        if self.loss_depends_on_micro_batches:
            what = (
                "`max_tokens_per_micro_batch` changes which rollouts share a micro-batch, and "
                "`loss_type: bnpo`, `entropy_coef`, `use_adaptive_entropy` and "
                "`top_entropy_quantile` take means over each"
            )
            fix = "Use another `loss_type`, such as `dapo`, and leave the others out."
            names = ("loss_type", "entropy_coef", "use_adaptive_entropy", "top_entropy_quantile")
            raise self._wrong(what, fix, "max_tokens_per_micro_batch", *names)

    def _check_warnings(self) -> None:
        self.warning_thresholds = self.warning_thresholds or {}
        self.stop_on_warnings = self.stop_on_warnings or []
        if not isinstance(self.warning_thresholds, dict):
            what = f"`warning_thresholds` is {self.warning_thresholds!r}"
            fix = "Set it to names and values, such as '{\"truncated\": 0.5}'."
            raise self._wrong(what, fix, "warning_thresholds")
        check_names("warning_thresholds", list(self.warning_thresholds))
        check_names("stop_on_warnings", self.stop_on_warnings)
        for name, value in self.warning_thresholds.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                what = f"`warning_thresholds` sets {name!r} to {value!r}"
                raise self._wrong(what, "Set it to a number.", "warning_thresholds")

    def _check_correction(self) -> None:
        if not self.temperature > 0:
            what = (
                f"`temperature` is {self.temperature}. Log-probabilities of greedy samples "
                "cannot be corrected"
            )
            fix = "Set it to the temperature above 0 that the environments sample at."
            raise self._wrong(what, fix, "temperature", code="temperature")
        corrects_sequences = (
            self.vllm_importance_sampling_correction
            and not self.vllm_importance_sampling_mode.startswith("token")
        )
        if self.loss_type == "vespo" and corrects_sequences:
            what = (
                "`loss_type='vespo'` needs a token-level correction, but "
                f"`vllm_importance_sampling_mode` is {self.vllm_importance_sampling_mode!r}"
            )
            fix = (
                "Set it to 'token_truncate' or 'token_mask', or set "
                "`vllm_importance_sampling_correction: false`."
            )
            names = ("vllm_importance_sampling_mode", "vllm_importance_sampling_correction")
            raise self._wrong(what, fix, "loss_type", *names)

    def _check_evaluation(self) -> None:
        saves_best = self.metric_for_best_model is not None
        if self.eval_hold is False and saves_best:
            what = (
                "`metric_for_best_model` must be known before a checkpoint is written, but "
                "`eval_hold` is false"
            )
            fix = "Leave `eval_hold` out."
            raise self._wrong(what, fix, "metric_for_best_model", "eval_hold")
        if self.eval_hold is None:
            self.eval_hold = saves_best

    @property
    def mode(self) -> Mode:
        """Properties of the `vllm_mode`."""
        return MODES[self.vllm_mode]

    @property
    def loss_depends_on_micro_batches(self) -> bool:
        """True if the gradient depends on which rollouts share a micro-batch, because means over
        each are taken. Then micro-batches stay as TRL draws them."""
        entropy_bonus = self.entropy_coef != 0 or self.use_adaptive_entropy
        return self.loss_type == "bnpo" or entropy_bonus or self.top_entropy_quantile < 1

    @property
    def chooses_token_budget(self) -> bool:
        """True if a GPU's micro-batches are as large as its memory allows."""
        return (
            self.max_tokens_per_micro_batch is None
            and self.gradient_accumulation_steps == 1
            and not self.loss_depends_on_micro_batches
        )

    @property
    def steps_between_batches(self) -> int:
        """Optimizer steps from one checkpoint that falls between two generation batches to the
        next."""
        return steps_between(
            self.steps_per_generation, self.num_iterations, self.gradient_accumulation_steps
        )

    @property
    def unused_settings(self) -> list[str]:
        """Settings that differ from their defaults and have no effect, because the environments
        generate."""
        defaults = self.__dataclass_fields__
        return [name for name in UNUSED_FIELDS if getattr(self, name) != defaults[name].default]

    @property
    def vllm_server_urls(self) -> list[str]:
        """Base URL of every vLLM server."""
        return self.vllm_server_base_url.split(",")


def steps_between(steps_per_generation: int, num_iterations: int, accumulated: int) -> int:
    """Returns after how many optimizer steps, of `accumulated` training steps each, a generation
    batch ends together with an optimizer step.

    A batch of 4 training steps and optimizer steps of 8 meet every 8 training steps, which is 1
    optimizer step; a batch of 6 and optimizer steps of 4 meet every 12, which is 3.
    """
    steps_of_batch = steps_per_generation * num_iterations
    return steps_of_batch // math.gcd(steps_of_batch, accumulated)


def _plain_url(name: str, url: str) -> str:
    """Returns a base URL without `/v1` and the last slash."""
    parts = urlsplit(url.strip())
    try:
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is no number, or above 65535
        is_url = False
    if not is_url:
        fix = "Write it as `http://host:port`."
        raise RecipeError(f"`{name}` is {url!r}, which is not a URL", f"{name}: {url}", fix)
    return url.strip().rstrip("/").removesuffix("/v1")
