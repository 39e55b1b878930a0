"""The run as it will be launched: its recipe, read as the main job reads it, its model and its
server's flags, and the processes, devices and packages that `check` is told of or finds. And
whether these fit each other."""

import importlib.metadata
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import psutil
import torch
import yaml
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from packaging.requirements import Requirement
from transformers import AutoConfig, PretrainedConfig, Trainer
from trl import get_peft_config

from trl_atropos.batches.micro_batches import FIRST
from trl_atropos.config import steps_between
from trl_atropos.errors import WARNING
from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.flags import parallel, server_flags
from trl_atropos.recipe import Recipe, number_of, parse, read_yaml
from trl_atropos.report.run_log import PACKAGES, versions
from trl_atropos.server.launch import vllm_arguments
from trl_atropos.weights.model_setup import drops_soft_cap

UTILIZATION = 0.92  # vLLM's default of `--gpu-memory-utilization` (vllm/config/cache.py)
GIB = 1 << 30
# tokens: vLLM's `max_model_len` for BLOOM or Mamba (vllm/config/model.py)
LENGTH_WITHOUT_POSITIONS = 2048


def refused(look: Callable[[], Any], seen: str = "") -> Iterator[Finding]:
    """What a check raises that the run makes, too. `seen` is for an error that has nothing of its
    own there."""
    try:
        look()
    except Finding as error:
        error.seen = error.seen or seen
        yield error


@dataclass(frozen=True)
class Launch:
    """The options of `check`."""

    device_memory_gb: float | None = None
    host_memory_gb: float | None = None
    devices: int | None = None
    config_file: str | None = None
    num_processes: int | None = None
    num_machines: int | None = None

    @cached_property
    def content(self) -> dict[str, Any]:
        """Accelerate's YAML. Raises `AtroposTrainingError` if it cannot be read."""
        if self.config_file is None:
            return {}
        try:
            content = dict(read_yaml(self.config_file) or {})
            return content | {
                name: int(content.get(name) or 0) for name in ("num_processes", "num_machines")
            }
        except (OSError, UnicodeError, yaml.YAMLError, TypeError, ValueError) as error:
            seen = f"{self.config_file}: {' '.join(str(error).split())}"
            what = "`--config_file` cannot be read as accelerate's YAML"
            raise Finding(
                what, seen, "Name the file that `accelerate launch` gets.", "launch-file"
            ) from error

    @property
    def processes(self) -> int | None:
        """How many the trainer has on all machines; `None` if nothing says it."""
        world = int(os.environ.get("WORLD_SIZE", 1))
        return (
            self.num_processes
            or self.content.get("num_processes")
            or (world if world > 1 else None)
        )

    @property
    def machines(self) -> int:
        return self.num_machines or self.content.get("num_machines") or 1

    @property
    def elsewhere(self) -> bool:
        """Whether the run will be on another machine than this one, which has no GPU."""
        return bool(self.device_memory_gb or self.devices) and not torch.cuda.is_available()


@dataclass(frozen=True)
class Plan:
    """The machine and the processes that a run is planned for."""

    device: str  # "cuda" or "cpu"
    total: int  # bytes of one device's memory; on the CPU, of the machine's
    processes: int = 1  # of the trainer, one per device
    local: int = 1  # of them, those on one machine
    sharding: str = "none"  # or DDP; "zero1", "zero2", "zero3", "fsdp"
    offloads: bool = False  # the optimizer's state is in host memory
    offloads_weights: bool = False  # so are the weights, but for those that are gathered
    # what operators compute in, if not the parameters' dtype
    mixed_precision: torch.dtype | None = None
    # bytes of a machine's own memory, where that is known and not the device's
    host: int | None = None

    @property
    def shards(self) -> int:
        """Among how many processes the optimizer's state is divided."""
        return 1 if self.sharding == "none" else self.processes


def plan_of(training: Any, launch: Launch) -> Plan | None:
    """`None` if the run is for a GPU, of which nothing is known: none is here, though torch could
    use one."""
    gib = launch.device_memory_gb
    content = launch.content
    on_cpu = training.use_cpu or bool(content.get("use_cpu"))
    if gib is None and not (on_cpu or torch.cuda.is_available() or torch.version.cuda is None):
        return None
    device = "cpu" if on_cpu or (gib is None and not torch.cuda.is_available()) else "cuda"
    if gib is not None:
        total = int(gib * GIB)
    else:
        total = (
            psutil.virtual_memory().total
            if device == "cpu"
            else torch.cuda.get_device_properties(0).total_memory
        )
    own = "bf16" if training.bf16 else "fp16" if training.fp16 else content.get("mixed_precision")
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(own)
    processes = launch.processes or training.world_size
    host = None
    if device == "cuda" and (launch.host_memory_gb or not launch.elsewhere):
        host = int((launch.host_memory_gb or 0) * GIB) or psutil.virtual_memory().total
    local = -(-processes // launch.machines)
    return Plan(device, total, processes, local, *_sharding(content, training), precision, host)


def _sharding(content: dict[str, Any], training: Any) -> tuple[str, bool, bool]:
    """`Plan.sharding`, `offloads` and `offloads_weights`: what accelerate's file says, or else the
    recipe."""
    kind = content.get("distributed_type")
    if kind == "FSDP" or training.fsdp:
        offloads = bool(content.get("fsdp_config", {}).get("fsdp_offload_params"))
        return "fsdp", offloads, offloads
    stated = content.get("deepspeed_config", {}) if kind == "DEEPSPEED" else {}
    stage = stated.get("zero_stage", 0)
    devices = [stated.get(f"offload_{what}_device", "none") for what in ("optimizer", "param")]
    if own := stated.get("deepspeed_config_file") or training.deepspeed:
        zero = HfDeepSpeedConfig(own).config.get("zero_optimization", {})
        stage = zero.get("stage", 0)
        devices = [
            zero.get(f"offload_{what}", {}).get("device", "none") for what in ("optimizer", "param")
        ]
    optimizer, weights = (device not in (None, "none") for device in devices)
    return (f"zero{stage}", optimizer, weights) if stage else ("none", False, False)


def layout(recipe: Recipe, launch: Launch) -> Iterator[Finding]:
    """Whether processes and servers fit each other and, where GPUs are known to be used, the
    devices."""
    training = recipe.training
    servers = len(recipe.training.vllm_server_urls)
    if training.replay_paths is not None:
        return
    kind = launch.content.get("distributed_type")
    if training.vllm_mode == "colocate" and kind in ("DEEPSPEED", "FSDP"):
        what = (
            "`vllm_mode: colocate` trains the server's own memory in place, which cannot be sharded"
        )
        fix = (
            "Launch with configs/accelerate/ddp.yaml, which does not shard, or use `vllm_mode: "
            "server`."
        )
        yield Finding(
            what, f"distributed_type: {kind} in {launch.config_file}", fix, "sharded-colocate"
        )
    elif training.vllm_mode == "colocate" and launch.processes not in (None, servers):
        what = "With `vllm_mode: colocate` every process trains the memory of a server of its own"
        fix = (
            "List one URL per process in `vllm_server_base_url`, or launch with `--num_processes "
            f"{servers}`."
        )
        yield Finding(
            what, f"{launch.processes} processes, {servers} servers", fix, "processes-servers"
        )
    here = launch.devices or torch.cuda.device_count()
    if training.use_cpu or not here:  # nothing is known of the GPUs
        return
    local = -(-(launch.processes or 1) // launch.machines)
    starts, (parts, flags) = recipe.services.start_vllm, parallel(recipe.vllm_flags())
    each_its_own = training.vllm_mode == "colocate" and servers > 1
    share = (
        number_of(server_flags(recipe.vllm_flags()).get("--gpu-memory-utilization")) or UTILIZATION
    )
    for too_few, seen, fix in (
        (
            local > here,
            f"{local} processes of the trainer on a machine",
            "Launch with fewer `--num_processes`",
        ),
        (
            starts and each_its_own and servers > here,
            f"{servers} servers, each on a GPU",
            "List fewer servers",
        ),
        (starts and parts > (1 if each_its_own else here), f"{flags} in `vllm_args`", "Lower it"),
        (
            starts and not each_its_own and servers > 1 and share * servers > 1,
            f"{servers} servers x `--gpu-memory-utilization` {share:g} on one GPU",
            "Start them by hand with `trl-atropos serve`, each with a `CUDA_VISIBLE_DEVICES` of "
            "its own",
        ),
    ):
        if too_few:
            fix = f"{fix}, or tell `--devices` how many GPUs the machine of the run has."
            yield Finding(
                "There are fewer GPUs than the run needs", f"{seen}, {here} GPUs", fix, "gpu-layout"
            )


# ------------------------------------------------------------------------- the model and its server

# of numbers in vLLM's flags
UNITS = {"k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30}


@dataclass(frozen=True)
class Case:
    """What is estimated."""

    recipe: Recipe
    plan: Plan
    config: PretrainedConfig
    # of the server, if the run starts it; `None` where recorded rollouts are replayed
    flags: dict[str, str] | None
    peft_config: Any
    # shared by cases that differ in few settings
    traces: dict = field(default_factory=dict, repr=False)

    @property
    def training(self):
        return self.recipe.training

    @property
    def trains_with_masters(self) -> bool:
        """Where the model is in 16 bits; as `AtroposGRPOTrainer` does."""
        of_weights = self.peft_config is None or self.plan.mixed_precision is None
        return self.training.master_weights and self.plan.sharding == "none" and of_weights

    @property
    def model_settings(self) -> dict[str, Any]:
        """Arguments of `from_config`. Attention is torch's own, which keeps what FlashAttention's
        kernels keep."""
        asked = self.recipe.model.attn_implementation or "sdpa"
        eager = asked == "eager" or drops_soft_cap(self.config, asked)
        options = {"attn_implementation": "eager"} if eager else {}
        return {"trust_remote_code": self.training.trust_remote_code, **options}

    def whole(self, flag: str, default: int) -> int:
        """A flag of the server as vLLM takes it: `16k` is 16,000, `16K` 16,384. It chooses `auto`
        and -1 itself."""
        text = (self.flags or {}).get(f"--{flag}", "auto")
        if text in ("auto", "-1"):
            return default
        return int(float(text[:-1]) * UNITS[text[-1]]) if text[-1:] in UNITS else int(float(text))

    @property
    def max_model_len(self) -> int:
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return self.whole(
            "max-model-len", LENGTH_WITHOUT_POSITIONS if positions is None else positions
        )

    @property
    def parts(self) -> int:
        """Among how many GPUs the server's weights are divided."""
        return self.whole("tensor-parallel-size", 1) * self.whole("pipeline-parallel-size", 1)

    @property
    def kv_cache_bytes(self) -> int | None:
        """The size of the server's KV cache, if it is given."""
        return self.whole("kv-cache-memory-bytes", 0) or self.whole("kv-cache-memory", 0) or None

    @property
    def dtype(self) -> torch.dtype:
        """The trainer's, as TRL chooses it; with `colocate` the server's, with DeepSpeed what it
        computes in."""
        if self.plan.sharding.startswith("zero") and self.plan.mixed_precision is not None:
            return self.plan.mixed_precision
        if self.flags is not None and self.training.vllm_mode == "colocate":
            return self.served_dtype
        kwargs = self.training.model_init_kwargs or {}
        stated = str(kwargs.get("dtype", self.recipe.model.dtype)).removeprefix("torch.")
        return self.config.dtype or torch.float32 if stated == "auto" else getattr(torch, stated)

    @property
    def served_dtype(self) -> torch.dtype:
        """`auto` is the checkpoint's, and 16-bit for float32 ones (vllm/config/model.py,
        `_resolve_auto_dtype`)."""
        stated = self.flags.get("--dtype", "auto")
        if stated == "auto":
            own = self.config.get_text_config().dtype or self.config.dtype or torch.float32
            return torch.bfloat16 if own == torch.float32 else own
        return {"half": torch.float16, "float": torch.float32}.get(stated) or getattr(torch, stated)

    @property
    def length(self) -> int:
        """Tokens of the longest rollout."""
        return self.training.max_sequence_length or self.max_model_len

    @property
    def chooses_token_budget(self) -> bool:
        return self.plan.device == "cuda" and self.training.chooses_token_budget

    @property
    def rollouts(self) -> int:
        """How many the largest micro-batch has."""
        rollouts = self.training.per_device_train_batch_size
        tokens = self.training.max_tokens_per_micro_batch
        if self.chooses_token_budget:
            tokens = FIRST
        return rollouts if tokens is None else max(1, min(rollouts, tokens // self.length))

    @property
    def autocast(self) -> torch.dtype | None:
        """What operators compute in, if not the parameters' dtype."""
        return self.plan.mixed_precision if self.plan.mixed_precision != self.dtype else None

    @property
    def plain_attention(self) -> bool:
        """Whether attention keeps its weights. CUDA's kernels for float32 know no groups of heads,
        which transformers leaves to them for rollouts of one length
        (transformers/integrations/sdpa_attention.py, `use_gqa_in_sdpa`)."""
        text = self.config.get_text_config()
        shared, heads = (
            getattr(text, name, None) for name in ("num_key_value_heads", "num_attention_heads")
        )
        in_float32 = self.plan.device == "cuda" and (self.autocast or self.dtype) == torch.float32
        return in_float32 and shared not in (None, heads)

    @property
    def shares_weights(self) -> bool:
        """Whether the trainer's parameters are the server's memory, as far as the settings tell."""
        return self.training.vllm_mode == "colocate" and self.flags is not None and self.parts == 1


def case_of(recipe: Recipe, plan: Plan) -> Case:
    """Raises `OSError` or `ValueError` if the model's config cannot be read."""
    training = recipe.training
    model = recipe.model
    options = {"revision": model.model_revision, "trust_remote_code": training.trust_remote_code}
    config = AutoConfig.from_pretrained(model.model_name_or_path, **options)
    flags = None
    if training.replay_paths is None:
        cpu = plan.device == "cpu"
        # another server has flags of its own
        own = recipe.vllm_flags() if recipe.services.start_vllm else []
        given = vllm_arguments(model.model_name_or_path, own, cpu=cpu, mode=training.vllm_mode)
        flags = server_flags(given)
        if cpu and os.environ.get("VLLM_CPU_KVCACHE_SPACE"):  # comes first, and is GiB
            flags["--kv-cache-memory-bytes"] = str(int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) << 30)
    return Case(recipe, plan, config, flags, get_peft_config(model))


# --------------------------------------------------------------------------------------- the recipe

TRL_SERVER = {  # fields of TRL's own vLLM, and what to use here
    "vllm_gpu_memory_utilization": "`--gpu-memory-utilization` in `vllm_args`",
    "vllm_max_model_length": "`--max-model-len` in `vllm_args`",
    "vllm_tensor_parallel_size": "`--tensor-parallel-size` in `vllm_args`",
    "vllm_server_host": "`vllm_server_base_url`",
    "vllm_server_timeout": "`service_timeout`",
    "vllm_group_port": "`weight_transport`",
}


def read(argv: list[str], stated: dict[str, Any], launch: Launch) -> Recipe:
    """The recipe. Raises `AtroposTrainingError` if it cannot be run."""
    # What transformers refuses on a machine without a GPU, where one is planned for that has some.
    true = {name for name, value in stated.items() if str(value).lower() == "true"}
    for_gpus = (
        true & {"bf16", "fp16", "tf32"} if launch.elsewhere and "use_cpu" not in true else set()
    )
    without = [word for name in for_gpus for word in (f"--{name}", "false")]
    try:
        with warnings.catch_warnings(action="ignore"):  # `dead` says it
            recipe = parse([*argv, *_for_processes(stated, launch.processes), *without])
    except Finding as error:
        if "setup doesn't support bf16/gpu" not in error.what:  # transformers' words
            raise
        what = "`bf16` is for a GPU, and this machine has none"
        seen = f"bf16: {stated.get('bf16')}"
        fix = (
            "For a run on another machine, add `--device_memory_gb N` (GiB of its GPU); for one "
            "here, set "
        )
        raise Finding(what, seen, f"{fix}`use_cpu: true`.", "no-gpu") from error
    for name in for_gpus:
        setattr(recipe.training, name, True)
    return recipe


def _for_processes(stated: dict[str, Any], processes: int | None) -> list[str]:
    """This process stands for all of them: its generation batch is gathered over as many more
    steps."""
    if (processes or 1) <= int(
        os.environ.get("WORLD_SIZE", 1)
    ) or "generation_batch_size" in stated:
        return []
    steps = stated.get("steps_per_generation") or stated.get("gradient_accumulation_steps") or 1
    return ["--steps_per_generation", str(int(steps) * processes)] if str(steps).isdigit() else []


def dead(recipe: Recipe, stated: dict[str, Any]) -> Iterator[Finding]:
    """Settings that are stated and have no effect with the others."""
    services = recipe.services
    training = recipe.training
    starts = services.start_atropos or services.start_vllm
    lora = [name for name in stated if name.startswith("lora_")]
    own = f"`vllm_mode: {training.vllm_mode}` has a transport of its own"
    replays = training.replay_paths is not None
    sends = training.vllm_mode in ("server", "nccl_lora")
    saves = training.save_strategy != "no"
    for is_dead, reason, instead, names in (
        (True, "the environments generate", "Set the environment's own", training.unused_settings),
        (
            replays,
            "recorded rollouts are replayed",
            "",
            ["start_atropos", "start_vllm", "environments"],
        ),
        (
            not services.start_vllm,
            "the run starts no server",
            "Set `start_vllm: true`",
            ["vllm_args"],
        ),
        (not starts, "the run starts no service", "", ["service_timeout"]),
        (
            not starts and not recipe.environments,
            "the run starts no service",
            "",
            ["restart_environments"],
        ),
        (services.start_atropos, "an API that the run starts is empty", "", ["reset_atropos"]),
        (not sends, own, "Use `vllm_mode: server` or `nccl_lora`", ["weight_transport"]),
        (not recipe.model.use_peft, "the run has no adapter", "Set `use_peft: true`", lora),
        (
            not training.vllm_enable_sleep_mode,
            "the server does not sleep",
            "",
            ["vllm_sleep_level"],
        ),
        (
            not training.master_weights,
            "there are no master weights",
            "",
            ["offload_master_weights"],
        ),
        (
            not saves,
            "nothing is saved on the way",
            "Set `save_strategy: steps`",
            ["save_steps", "save_total_limit"],
        ),
        *(
            (True, "the server is no part of TRL", f"Use {ours}", [theirs])
            for theirs, ours in TRL_SERVER.items()
        ),
    ):
        found = [
            name
            for name in names
            if is_dead and stated.get(name) not in (None, False, "false", "False", [])
        ]
        if found:
            seen = ", ".join(f"{name}: {stated[name]}" for name in found)
            them = "it" if len(found) == 1 else "them"
            fix = f"{instead}, or remove {them}." if instead else f"Remove {them}."
            yield Finding(
                f"A setting has no effect, because {reason}", seen, fix, "dead-setting", WARNING
            )


def saves(recipe: Recipe, launch: Launch, stated: dict[str, Any]) -> Iterator[Finding]:
    """If checkpoints fall into the middle of a generation batch, which a run that resumes there
    does not finish."""
    training = recipe.training
    if training.save_strategy != "steps":
        return
    # Where this process stands for all of them, it has the steps of all.
    stands_for = launch.processes if _for_processes(stated, launch.processes) else 1
    steps = training.steps_per_generation // stands_for
    between = steps_between(steps, training.num_iterations, training.gradient_accumulation_steps)
    every = (
        training.save_steps
        if training.save_steps >= 1
        else math.ceil(training.save_steps * training.max_steps)
    )
    every = int(every)
    if every % between:
        below = every // between * between
        values = [f"`save_steps: {value}`" for value in (below, below + between) if value]
        what = (
            f"Checkpoints fall into the middle of a generation batch, which has {between} "
            "optimizer steps"
        )
        fix = (
            f"Set {' or '.join(values)}: a run that resumes in the middle does not train the "
            "rest of the batch."
        )
        yield Finding(what, f"save_steps: {training.save_steps}", fix, "save-steps", WARNING)


# -------------------------------------------------------------------------------- what is installed


def requirements(name: str) -> list[Requirement]:
    """What a package that is installed needs here. Those of an extra count, too, wherever they are
    installed."""
    wanted = map(Requirement, importlib.metadata.requires(name) or [])
    extras = [{"extra": extra} for extra in ("", "cpu", "vllm")]
    return [one for one in wanted if one.marker is None or any(map(one.marker.evaluate, extras))]


def packages(recipe: Recipe | None) -> Iterator[Finding]:
    """Packages in other versions than this one, or the vLLM that is installed, is made for, and the
    optimizer's."""
    here = versions()
    servers = ("vllm", "vllm-cpu")
    for name in [name for name in ("trl_atropos", *servers) if name in here]:
        for wanted in requirements(name):
            version = here.get(wanted.name)
            of_interest = wanted.name in (PACKAGES if name == "trl_atropos" else ("torch",))
            # of the two builds of vLLM, one is enough
            missing = version is None and wanted.name not in servers
            if of_interest and (
                missing or (version and not wanted.specifier.contains(version, prereleases=True))
            ):
                what = f"{wanted.name} is not of a version that {name} {here[name]} works with"
                seen = f"{wanted.name} {version or 'is not installed'}, wanted {wanted.specifier}"
                yield Finding(
                    what, seen, f'`pip install "{wanted.name}{wanted.specifier}"`.', "version"
                )
    try:
        if recipe is not None:
            Trainer.get_optimizer_cls_and_kwargs(recipe.training)
    except ImportError as error:  # which says what to install
        what = "A setting needs a package that is not installed"
        seen = f"optim: {recipe.training.optim.value}"
        yield Finding(what, seen, f"{error}. Or change `optim`.", "package-missing")
    except ValueError:  # it needs the model
        return
