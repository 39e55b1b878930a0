"""`AtroposGRPOConfig`: every setting of a run, with its default, its help text and its checks.

It is TRL's `GRPOConfig` plus the fields that the rollouts and the weight publishing need. Values are checked here by
hand, because a YAML recipe bypasses the `choices` of a `Literal` annotation.
"""

import os
import warnings
from dataclasses import dataclass, field, fields
from urllib.parse import SplitResult, urlsplit

from transformers.utils import strtobool
from trl import GRPOConfig

VLLM_MODES = ("colocate",)
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
SCALE_REWARDS = ("group", "batch", "none")
SINGLE_ROW_GROUPS = ("refuse", "raw", "zero")

# Fields of GRPOConfig that describe generation, which is the environments' business here.
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
    "vllm_enable_sleep_mode",
    "vllm_model_impl",
    "reward_weights",
    "multi_objective_aggregation",
    "shuffle_dataset",
)


@dataclass
class AtroposGRPOConfig(GRPOConfig):
    """
    Configuration of [`AtroposGRPOTrainer`].

    Every argument of [`trl.GRPOConfig`] and [`transformers.TrainingArguments`] may be used. Those that describe how
    completions are generated (`top_p`, `num_generations`, ...) have no effect, because the environments generate; a
    warning names those that were set.

    Parameters:
        vllm_mode (`str`, *optional*, defaults to `"colocate"`):
            How new weights reach the vLLM server. `"colocate"`: the trainer's parameters are views of the server's
            memory, nothing is moved.
        vllm_server_base_url (`str`, *optional*, defaults to `"http://127.0.0.1:9001"`):
            URL of the vLLM server started by `trl-atropos serve` or by the recipe.
        atropos_url (`str`, *optional*, defaults to `"http://127.0.0.1:8000"`):
            URL of the Atropos API.
        reset_atropos (`bool`, *optional*, defaults to `False`):
            Throw away the Atropos API's state (queued rollouts and registered environments) before registering.
        rollout_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds to wait for rollouts before the run stops with a diagnosis.
        publish_timeout (`float`, *optional*, defaults to `60.0`):
            Seconds that the server may take to answer any one step of a publish.
        max_sequence_length (`int`, *optional*):
            Longest rollout in tokens, prompt included. Longer ones are dropped and counted. Defaults to the server's
            `max_model_len`, or to the model's `max_position_embeddings` when there is no server.
        single_row_groups (`str`, *optional*, defaults to `"refuse"`):
            What a group of one rollout means, which has no group statistics: `"refuse"` stops the run, `"raw"` takes
            its score as the advantage, `"zero"` gives it none.
        sampling_temperature (`float`, *optional*):
            Temperature the environments sample at, where you know it. Compared with `temperature` at start.
        probe_every_n_steps (`int`, *optional*, defaults to `1`):
            After every that many publishes, the server samples a fixed prompt and the trainer scores the same tokens;
            a difference stops the run. `0` switches the probe off.
        record_rollouts (`bool`, *optional*, defaults to `False`):
            Append every batch pulled from the Atropos API to `<output_dir>/rollouts.jsonl`.
        replay_paths (`list[str]`, *optional*):
            Train on recorded batches instead of a live Atropos API: files or folders of JSON or JSON lines.
    """

    vllm_mode: str = field(
        default="colocate",
        metadata={
            "help": "How new weights reach the vLLM server. 'colocate': the trainer's parameters are views of the "
            "server's memory, so nothing is moved."
        },
    )
    vllm_server_base_url: str | None = field(
        default="http://127.0.0.1:9001",
        metadata={"help": "URL of the vLLM server started by `trl-atropos serve` or by the recipe."},
    )
    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={
            "help": "How the ratio between the trainer's and the sampler's log-probabilities corrects the loss: "
            "'token_truncate', 'token_mask', 'sequence_truncate' or 'sequence_mask'. The sequence modes multiply the "
            "ratios of all tokens, which with rollouts one version old soon exceeds any bound."
        },
    )
    atropos_url: str = field(
        default="http://127.0.0.1:8000",
        metadata={"help": "URL of the Atropos API (`python -m atroposlib.cli.run_api`)."},
    )
    reset_atropos: bool = field(
        default=False,
        metadata={
            "help": "Throw away the Atropos API's state (queued rollouts and registered environments) before "
            "registering. Environments that are connected at that moment end and must be restarted."
        },
    )
    rollout_timeout: float = field(
        default=600.0,
        metadata={"help": "Seconds to wait for rollouts before the run stops with a diagnosis."},
    )
    publish_timeout: float = field(
        default=60.0,
        metadata={"help": "Seconds that the server may take to answer any one step of a publish."},
    )
    max_sequence_length: int | None = field(
        default=None,
        metadata={
            "help": "Longest rollout in tokens, prompt included; longer ones are dropped and counted. Defaults to the "
            "server's max_model_len, or to the model's max_position_embeddings when there is no server."
        },
    )
    single_row_groups: str = field(
        default="refuse",
        metadata={
            "help": "What a group of one rollout means, which has no group statistics: 'refuse' stops the run, 'raw' "
            "takes its score as the advantage, 'zero' gives it no advantage."
        },
    )
    sampling_temperature: float | None = field(
        default=None,
        metadata={
            "help": "Temperature the environments sample at, where you know it: compared with `temperature` at start. "
            "Few environments send it along with their rollouts."
        },
    )
    probe_every_n_steps: int = field(
        default=1,
        metadata={
            "help": "After every that many publishes, the server samples a fixed prompt and the trainer scores the "
            "same tokens; a difference stops the run. 0 switches the probe off."
        },
    )
    record_rollouts: bool = field(
        default=False,
        metadata={"help": "Append every batch pulled from the Atropos API to `<output_dir>/rollouts.jsonl`."},
    )
    replay_paths: list[str] | None = field(
        default=None,
        metadata={
            "help": "Train on recorded batches instead of a live Atropos API: files or folders of JSON or JSON lines, "
            "as `record_rollouts` writes them. No server is used."
        },
    )

    def __post_init__(self):
        # With a single-copy server the trainer computes in the server's dtype; TRL's default would be bf16 autocast.
        if self.bf16 is None:
            self.bf16 = False
        # The sampler is always vLLM here, but TRL would start one of its own.
        self.use_vllm = False
        self._check_run_length()
        self._check_values()
        self._check_batch()
        self._check_urls()
        self._warn_unused()
        # TRL groups rows by a fixed `num_generations`; Atropos groups have sizes of their own, so that only TRL's
        # smallest value passes its checks for every batch.
        self._check_sharding()
        asked, self.num_generations = self.num_generations, 2
        super().__post_init__()
        self.num_generations = asked
        self._check_correction()  # only now, because `generation_kwargs` may come as JSON

    def _check_run_length(self) -> None:
        if self.max_steps <= 0:
            raise ValueError(
                f"`max_steps` is {self.max_steps}, but rollouts come from environments and have no end, so a run "
                "needs a length: set `max_steps` to the number of optimizer steps."
            )
        if str(getattr(self.eval_strategy, "value", self.eval_strategy)) != "no" or self.eval_on_start:
            raise ValueError(
                "Evaluation inside the trainer is not supported, because an evaluation step would take a training "
                "batch from the environments. Remove `eval_strategy` and `eval_on_start`; evaluate in the environment "
                "(`steps_per_eval`) or on the saved checkpoints."
            )
        if self.load_best_model_at_end:
            raise ValueError("`load_best_model_at_end` needs evaluation, which is not supported: remove it.")

    def _check_values(self) -> None:
        self.scale_rewards = {True: "group", False: "none"}.get(self.scale_rewards, self.scale_rewards)
        for name, allowed in (
            ("vllm_mode", VLLM_MODES),
            ("loss_type", LOSS_TYPES),
            ("vllm_importance_sampling_mode", IMPORTANCE_SAMPLING_MODES),
            ("importance_sampling_level", ("token", "sequence")),
            ("scale_rewards", SCALE_REWARDS),
            ("single_row_groups", SINGLE_ROW_GROUPS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}. Set it to one of: {', '.join(allowed)}.")
        for name in ("rollout_timeout", "publish_timeout"):
            if getattr(self, name) is None or not float(getattr(self, name)) > 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}. Set it to a number of seconds above 0.")
        if self.probe_every_n_steps < 0:
            raise ValueError(f"`probe_every_n_steps` is {self.probe_every_n_steps}. Set it to 0 (off) or more.")
        if self.max_sequence_length is not None and self.max_sequence_length < 2:
            raise ValueError(
                f"`max_sequence_length` is {self.max_sequence_length}. Set it to the longest prompt plus completion "
                "in tokens, or leave it out to take the server's limit."
            )
        if isinstance(self.replay_paths, str):
            self.replay_paths = [self.replay_paths]  # YAML gives a scalar where one path is listed

    def _check_correction(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"`temperature` is {self.temperature}. Log-probabilities of greedy samples cannot be corrected: set "
                "it to the temperature above 0 that the environments sample at."
            )
        elsewhere = {
            "sampling_temperature": self.sampling_temperature,
            "generation_kwargs['temperature']": (
                self.generation_kwargs.get("temperature") if isinstance(self.generation_kwargs, dict) else None
            ),
        }
        for name, value in elsewhere.items():
            if value is not None and abs(value - self.temperature) > 1e-6:
                raise ValueError(
                    f"`{name}` is {value} but `temperature` is {self.temperature}. The trainer scores every token at "
                    f"`temperature`, so the two must agree: set `temperature: {value}`, or let the environments "
                    f"sample at {self.temperature}."
                )
        token_level = self.vllm_importance_sampling_mode in ("token_truncate", "token_mask")
        if self.loss_type == "vespo" and self.vllm_importance_sampling_correction and not token_level:
            raise ValueError(
                "`loss_type='vespo'` needs a token-level correction, but `vllm_importance_sampling_mode` is "
                f"{self.vllm_importance_sampling_mode!r}. Set it to 'token_truncate' or 'token_mask', or set "
                "`vllm_importance_sampling_correction: false`."
            )

    def _check_batch(self) -> None:
        processes = int(os.environ.get("WORLD_SIZE", 1))
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        rows = self.generation_batch_size or self.per_device_train_batch_size * processes * steps
        if rows % 2:
            raise ValueError(
                f"A generation batch has {rows} rows (per_device_train_batch_size {self.per_device_train_batch_size} "
                f"x {processes} processes x {steps} steps per generation), but it must be even, and a multiple of "
                "every environment's group size. Change `per_device_train_batch_size` or "
                "`gradient_accumulation_steps`."
            )

    def _check_urls(self) -> None:
        # TRL's host and port pair is understood where it was set and the URL was not.
        if self.vllm_server_base_url is None:
            self.vllm_server_base_url = f"http://127.0.0.1:{self.vllm_server_port}"
        for name in ("atropos_url", "vllm_server_base_url"):
            parts = urlsplit(getattr(self, name))
            if parts.scheme not in ("http", "https") or not parts.hostname or not _has_good_port(parts):
                raise ValueError(
                    f"`{name}` is {getattr(self, name)!r}, which is not a URL. Write it as `http://host:port`."
                )
            setattr(self, name, getattr(self, name).rstrip("/").removesuffix("/v1"))
        if self.atropos_url == self.vllm_server_base_url:
            raise ValueError(
                f"`atropos_url` and `vllm_server_base_url` are both {self.atropos_url}. They are two servers: give "
                "each its own port."
            )

    def _check_sharding(self) -> None:
        if self.replay_paths is not None or self.vllm_mode != "colocate":
            return
        for name in ("deepspeed", "fsdp"):
            launched = strtobool(os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false"))
            if getattr(self, name) or launched:
                place = "" if getattr(self, name) else " from the configuration of `accelerate launch`"
                raise ValueError(
                    "`vllm_mode='colocate'` trains the server's own memory in place, which cannot be sharded: remove "
                    f"`{name}`{place}."
                )

    def _warn_unused(self) -> None:
        defaults = {f.name: f.default for f in fields(GRPOConfig)}
        changed = [name for name in UNUSED_FIELDS if getattr(self, name) != defaults[name]]
        if changed:
            warnings.warn(
                f"These settings have no effect, because the environments generate: {', '.join(changed)}. Set what "
                "they mean in the environment instead.",
                stacklevel=3,
            )


def _has_good_port(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:  # no number, or above 65535
        return False
