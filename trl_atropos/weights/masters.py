"""fp32 master weights, for 16-bit parameters that are trained in place because they are the
server's memory.

At a learning rate of 1e-6 an update is smaller than the resolution of nearly every bfloat16 weight,
and would be rounded away. So gradients accumulate in fp32, the optimizer works on fp32 copies (the
masters), and after each step the parameters are set to the rounded masters, in their own memory.
DeepSpeed and FSDP have masters of their own.

`AtroposGRPOTrainer` calls `use_masters` when it is built, and runs its training steps within
`exact_gradients` and `accumulate_gradients`.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from peft import PeftModel
from transformers import Trainer

from trl_atropos.errors import AtroposTrainingError, CheckpointError
from trl_atropos.weights.cpu_gradients import HALF, sum_in_float32

logger = logging.getLogger(__name__)

Groups = list[dict[str, Any]]  # of parameters, in torch's format
Pair = tuple[torch.nn.Parameter, torch.nn.Parameter]  # a parameter and its master

PART = 1 << 28  # values that are stepped at a time if masters are offloaded, or one parameter's
THREADS = 16  # for that, at most: it is memory that it waits for


# ------------------------------------------------------------------------- how a trainer gets them


def use_masters(trainer: Trainer, offload: bool = False) -> None:
    """Makes `trainer` build the optimizer that its arguments name with fp32 masters, if 16-bit
    parameters are trained. See `MasterOptimizer`."""
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    in_16_bits = [parameter for parameter in trained if parameter.dtype in HALF]
    if not in_16_bits:
        return
    reason = why_no_masters(trainer)
    if reason is not None:
        raise AtroposTrainingError(reason)
    if any(parameter.device.type == "cpu" for parameter in in_16_bits):
        sum_in_float32()
    optimizer_cls, kwargs = _optimizer_of(trainer)
    full_state = []
    if kwargs.get("optim_bits") == 8:
        # As transformers does, which can no longer see that it is bitsandbytes.
        for module in trainer.model.modules():
            if isinstance(module, torch.nn.Embedding):
                full_state.append(module.weight)
    kwargs = {
        **kwargs,
        "optimizer_cls": optimizer_cls,
        "offload": offload,
        "full_state": full_state,
    }
    trainer.optimizer_cls_and_kwargs = (MasterOptimizer, kwargs)


def why_no_masters(trainer: Trainer) -> str | None:
    """Returns why the optimizer that `trainer` will have cannot work on masters; `None` if it
    can."""
    if trainer.optimizer is not None:
        return (
            "16-bit weights that are trained in place need fp32 masters, but `optimizers` has a "
            f"finished {type(trainer.optimizer).__name__}, which works on the 16-bit weights: name "
            "it with `optim` instead."
        )
    cls, _ = _optimizer_of(trainer)
    is_plain = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    # schedule-free ones move weights in `eval`
    if not is_plain or steps_in_backward(trainer) or hasattr(cls, "eval"):
        return (
            f"`optim: {trainer.args.optim}` chooses its parameters or changes them outside of "
            "`step`, so it cannot have fp32 masters of 16-bit weights: set `optim: "
            "adamw_torch_fused`, or serve with `--dtype float32`."
        )
    return None


def steps_in_backward(trainer: Trainer) -> bool:
    """Returns whether `optim` names a layer-wise optimizer or LOMO, which step within the backward
    pass."""
    _, kwargs = _optimizer_of(trainer)
    return "model" in kwargs or "optimizer_dict" in kwargs


def _optimizer_of(trainer: Trainer) -> tuple[Any, dict[str, Any]]:
    if trainer.optimizer_cls_and_kwargs:
        return trainer.optimizer_cls_and_kwargs
    return trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)


def can_round_adapter(trainer: Trainer) -> bool:
    """Returns whether the model has an adapter for `round_adapter`. Autocast computes any adapter
    in 16 bits."""
    if not isinstance(trainer.model, PeftModel):
        return False
    autocasts = trainer.accelerator.mixed_precision != "no"
    return not autocasts and why_no_masters(trainer) is None


def round_adapter(model: PeftModel) -> None:
    """Rounds an adapter to the 16 bits of its base, in which the server computes it. PEFT keeps it
    in fp32, in which each of its layers would be computed. To be trained with masters."""
    parameters = list(model.parameters())
    dtype = next(parameter.dtype for parameter in parameters if not parameter.requires_grad)
    if dtype not in HALF:
        return
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


# ------------------------------------------------------------------------------------ the optimizer


class MasterOptimizer(torch.optim.Optimizer):
    """
    Any torch optimizer, made to work on fp32 masters. Per parameter these take 4 bytes, and the
    fp32 gradient 4 more. A parameter that is fp32 already is its own master.

    `param_groups` hold the parameters themselves, for clipping, schedulers and `zero_grad`.
    Hyperparameters that are changed there reach the wrapped optimizer, `inner`, whose groups hold
    the masters.

    Args:
        groups (`list[dict]`): Parameter groups, in torch's format.
        optimizer_cls (`type[torch.optim.Optimizer]`): The optimizer to wrap.
        offload (`bool`): Keep masters and optimizer state in CPU memory (pinned for CUDA
            parameters) and step there. fp32 parameters get masters, too. Torch's own optimizers
            step part by part, so that the gradients of one part come while another one is stepped,
            and are not all in CPU memory.
        full_state (`Iterable`): Parameters whose state an 8-bit bitsandbytes optimizer shall keep
            in 32 bits.
        optimizer_kwargs: Further arguments of `optimizer_cls`.
    """

    def __init__(
        self,
        groups: Groups,
        optimizer_cls: type[torch.optim.Optimizer],
        offload: bool = False,
        full_state: Iterable[torch.nn.Parameter] = (),
        **optimizer_kwargs: Any,
    ):
        self.offload = offload
        groups = [{**group, "params": list(group["params"])} for group in groups]
        self._masters: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        inner_groups = []
        for group in groups:
            for parameter in group["params"]:
                self._masters[parameter] = self._master_of(parameter)
            masters = [self._masters[parameter] for parameter in group["params"]]
            inner_groups.append({**group, "params": masters})
        self.inner = optimizer_cls(inner_groups, **optimizer_kwargs)
        full_masters = []
        for parameter in full_state:
            if parameter in self._masters:
                full_masters.append(self._masters[parameter])
        if full_masters:
            self._keep_full_state(full_masters)
        outer_groups = []
        for inner_group, group in zip(self.inner.param_groups, groups, strict=True):
            outer_groups.append({**inner_group, "params": group["params"]})
        super().__init__(outer_groups, self.inner.defaults)

        # all that are not their own masters
        self._pairs: list[Pair] = []
        for parameter, master in self._masters.items():
            if master is not parameter:
                self._pairs.append((parameter, master))
        self._parts = [self._pairs]
        if offload and type(self.inner).__module__.startswith("torch.optim."):
            sizes = [master.numel() for _, master in self._pairs]
            self._parts = []
            for places in parts_of(sizes):  # which follow each other
                begin = places[0]
                end = places[-1] + 1
                self._parts.append(self._pairs[begin:end])
        # pinned memory that gradients come to, for parts of even and of odd numbers
        self._staging: dict[int, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None  # on which they come
        self._note_versions()

    def _master_of(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        parameter.grad_dtype = torch.float32  # needs torch 2.10, which this package requires
        if parameter.dtype == torch.float32 and not self.offload:
            return parameter
        device = torch.device("cpu") if self.offload else parameter.device
        pinned = self.offload and parameter.is_cuda
        master = torch.empty_like(parameter, dtype=torch.float32, device=device, pin_memory=pinned)
        return torch.nn.Parameter(master.copy_(parameter.detach()))

    def _keep_full_state(self, masters: list[torch.nn.Parameter]) -> None:
        from bitsandbytes.optim import GlobalOptimManager

        manager = GlobalOptimManager.get_instance()
        manager.override_config(masters, "optim_bits", 32)
        manager.register_parameters(self.inner.param_groups)

    @contextmanager
    def gradients_aside(self) -> Iterator[None]:
        """
        Keeps the sums of gradients apart from the parameters within, which have them before and
        after.

        A layer that is compiled while a parameter has a gradient of another dtype is not compiled
        as a whole: torch breaks its graph at that parameter.
        """
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}

        def set_aside(parameter: torch.nn.Parameter) -> None:
            gradient = parameter.grad
            if gradient is None:
                return
            if parameter in sums:
                sums[parameter] += gradient
            else:
                sums[parameter] = gradient
            parameter.grad = None

        hooks = []
        for parameter in self._masters:
            set_aside(parameter)
            hooks.append(parameter.register_post_accumulate_grad_hook(set_aside))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, gradient in sums.items():
                parameter.grad = gradient

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_over_writes()
        _copy_hyperparameters(self.param_groups, self.inner.param_groups)
        coming = self._gradients_of(0)
        for number, part in enumerate(self._parts):
            gradients, arrived = coming
            if number + 1 < len(self._parts):
                coming = self._gradients_of(number + 1)
            if arrived is not None:
                arrived.synchronize()
            self._step_part(part, gradients)
        _copy_hyperparameters(self.inner.param_groups, self.param_groups)  # where some keep state
        if self.offload and torch.cuda.is_available():
            torch.cuda.synchronize()  # the CPU's next writing must not overtake the copies
        self._note_versions()
        return loss

    def _step_part(self, part: list[Pair], gradients: list[torch.Tensor | None]) -> None:
        params, masters = zip(*part, strict=True)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        if self.offload:
            with _threads(THREADS):
                self.inner.step()
        else:
            self.inner.step()
        for master in masters:
            master.grad = None
        # Non-blocking, so that offloaded masters come straight from pinned memory and are rounded
        # on the device.
        torch._foreach_copy_(params, masters, non_blocking=True)

    def _gradients_of(
        self, number: int
    ) -> tuple[list[torch.Tensor | None], torch.cuda.Event | None]:
        """Returns the fp32 gradients of a part, on the device of its masters and with their
        strides; and the event to wait for, if they are still being copied."""
        part = self._parts[number]
        first_parameter, _ = part[0]
        if not (self.offload and first_parameter.is_cuda):
            gradients = [_with_strides_of(master, parameter.grad) for parameter, master in part]
            return gradients, None
        staging = self._staging_of(number)
        device = first_parameter.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        if number == 0:  # the backward pass
            self._stream.wait_stream(torch.cuda.current_stream(device))
        arrived = torch.cuda.Event()
        gradients = []
        begin = 0
        with torch.cuda.stream(self._stream):
            for parameter, master in part:
                place = staging[begin:].as_strided(master.size(), master.stride())
                begin += master.numel()
                gradient = parameter.grad
                if gradient is not None:
                    gradient = place.copy_(gradient, non_blocking=True)
                gradients.append(gradient)
            arrived.record(self._stream)
        return gradients, arrived

    def _staging_of(self, number: int) -> torch.Tensor:
        """Returns the memory that the gradients of a part come to. The part two before has been
        stepped, and needs it no more."""
        place = number % 2
        if place not in self._staging:
            largest = 0
            for part in self._parts:
                values = sum(master.numel() for _, master in part)
                largest = max(largest, values)
            self._staging[place] = torch.empty(largest, dtype=torch.float32, pin_memory=True)
        return self._staging[place]

    def _note_versions(self) -> None:
        self._versions = [parameter._version for parameter, _ in self._pairs]

    def _take_over_writes(self) -> None:
        """Copies to the masters what something else has written to the parameters: a checkpoint,
        DDP's broadcast, a callback."""
        for (parameter, master), version in zip(self._pairs, self._versions, strict=True):
            is_written = parameter._version != version
            if is_written and not torch.equal(parameter, _rounded(master, parameter)):
                master.copy_(parameter)
        self._note_versions()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns the masters beside `inner`'s state: within it, loading would cast them to the
        parameters' dtype."""
        self._take_over_writes()
        _copy_hyperparameters(self.param_groups, self.inner.param_groups)
        return {
            "inner": self.inner.state_dict(),
            "masters": [master.detach() for master in self._masters.values()],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state, and sets the parameters to the rounded masters. Without masters in
        `state_dict`, the parameters stay the same."""
        self._take_over_writes()
        masters = list(self._masters.values())
        if "masters" in state_dict:
            saved = state_dict["masters"]
            _require_equal_shapes(saved, masters)
        else:
            saved = masters
            logger.warning(
                "The checkpoint was saved without fp32 master weights: training goes on from "
                "16-bit ones."
            )
        self.inner.load_state_dict(state_dict.get("inner", state_dict))
        for (parameter, master), value in zip(self._masters.items(), saved, strict=True):
            master.copy_(value)
            if not torch.equal(parameter, _rounded(master, parameter)):
                parameter.copy_(master)
        _copy_hyperparameters(self.inner.param_groups, self.param_groups)
        self._note_versions()

    @torch.no_grad()
    def all_reduce_gradients(self) -> None:
        """Averages the fp32 gradients over all processes. If only some have a gradient, the others
        count as 0."""
        params = list(self._masters)
        used = torch.tensor(
            [parameter.grad is not None for parameter in params],
            dtype=torch.uint8,
            device=params[0].device,
        )
        dist.all_reduce(used, dist.ReduceOp.MAX)
        gradients = []
        for parameter, is_used in zip(params, used.tolist(), strict=True):
            if not is_used:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
            gradients.append(parameter.grad)
        torch._foreach_div_(gradients, dist.get_world_size())
        flat = [gradient.contiguous() for gradient in gradients]  # NCCL takes no transposed tensors
        pending = [dist.all_reduce(gradient, async_op=True) for gradient in flat]
        for work in pending:
            work.wait()
        torch._foreach_copy_(gradients, flat)


def parts_of(sizes: list[int]) -> list[list[int]]:
    """Divides parameters of `sizes` values into parts of at most `PART` values, or one parameter.

    Returns their places in the list. With a `PART` of 10, the sizes 6, 4, 1 and 25 give
    `[[0, 1], [2], [3]]`.
    """
    parts = []
    room = 0
    for number, size in enumerate(sizes):
        if not parts or size > room:
            parts.append([])
            room = PART
        parts[-1].append(number)
        room -= size
    return parts


def gradients_in_flight(sizes: list[int]) -> int:
    """Returns how many values of the gradients are in CPU memory at once if they come part by
    part."""
    parts = parts_of(sizes)
    largest = 0
    for part in parts:
        values = sum(sizes[number] for number in part)
        largest = max(largest, values)
    return min(2, len(parts)) * largest


def _require_equal_shapes(saved: list[torch.Tensor], masters: list[torch.Tensor]) -> None:
    saved_shapes = [list(master.shape) for master in saved]
    own_shapes = [list(master.shape) for master in masters]
    for saved_shape, shape in zip_longest(saved_shapes, own_shapes):
        if saved_shape != shape:
            raise CheckpointError(
                f"The checkpoint has master weights of {len(saved)} parameters, and {len(masters)} "
                f"are trained; the first that differs has the shape {saved_shape} there and "
                f"{shape} here. Resume with the model and the trained parameters of the run that "
                "saved it."
            )


def _copy_hyperparameters(source: Groups, target: Groups) -> None:
    for source_group, target_group in zip(source, target, strict=True):
        for name, value in source_group.items():
            if name != "params":
                target_group[name] = value


def _with_strides_of(master: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the parameter's fp32 gradient; a copy if it has other strides than the master."""
    if gradient is None or gradient.stride() == master.stride():
        return gradient
    return torch.empty_like(master).copy_(gradient)


def _rounded(master: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return master.detach().to(device=parameter.device, dtype=parameter.dtype)


@contextmanager
def _threads(most: int) -> Iterator[None]:
    """Computes with as many threads as this process has cores, up to `most`. accelerate's launcher
    gives it one, unless you tell it otherwise."""
    usual = torch.get_num_threads()
    processes = int(os.getenv("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) // processes
    torch.set_num_threads(max(usual, min(most, cores)))
    try:
        yield
    finally:
        torch.set_num_threads(usual)


# ------------------------------------------------------------------------- around a training step


@contextmanager
def exact_gradients(trainer: Trainer, model: torch.nn.Module) -> Iterator[None]:
    """Sums gradients in fp32, around `Trainer.training_step`, and averages them over the processes
    in place of DistributedDataParallel, whose buckets have the parameters' dtype."""
    accelerator = trainer.accelerator
    optimizer = trainer.optimizer.optimizer  # within accelerate's
    if not isinstance(optimizer, MasterOptimizer):
        yield
        return
    with accelerator.no_sync(model), optimizer.gradients_aside():
        yield
    if accelerator.num_processes > 1 and accelerator.sync_gradients:
        optimizer.all_reduce_gradients()


@contextmanager
def accumulate_gradients(
    accelerator: Accelerator, model: torch.nn.Module
) -> Iterator[Callable[[torch.Tensor], None]]:
    """Only adds to the gradients, in all but the last micro-batch of a training step.

    Yields the function to call in place of `accelerator.backward`. The `Trainer` calls the last
    backward pass, with which gradients are averaged over processes, and DeepSpeed steps.
    """
    options = {}
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        options["scale_wrt_gas"] = False  # the loss is scaled already: the `Trainer` says so, too
    state = accelerator.gradient_state
    synchronizes = state.sync_gradients
    state._set_sync_gradients(False)  # as the `Trainer` does around each of its own micro-batches
    try:
        with accelerator.no_sync(model):
            yield partial(accelerator.backward, **options)
    finally:
        state._set_sync_gradients(synchronizes)
