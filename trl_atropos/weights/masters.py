"""fp32 master weights, for 16-bit parameters that are trained in place because they are the
server's memory.

At a learning rate of 1e-6 an update is smaller than the resolution of nearly every bfloat16 weight,
and would be rounded away. So gradients accumulate in fp32, the optimizer works on fp32 copies (the
masters), and after each step the parameters are set to the rounded masters, in their own memory.
DeepSpeed and FSDP have masters of their own.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from peft import PeftModel
from transformers import Trainer

from trl_atropos.errors import AtroposTrainingError, CheckpointError

logger = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
PART = 1 << 28  # values that are stepped at a time where masters are offloaded, or one parameter's
THREADS = 16  # for that, at most: it is memory that it waits for
# Tensors of the parameter's size that each family keeps (torch.optim; bitsandbytes.optim;
# transformers.optimization).
BUFFERS = {
    "ademamix": 3,
    "adam": 2,
    "lion": 1,
    "rmsprop": 1,
    "adagrad": 1,
    "sgd": 0,
    "lomo": 0,
    "adafactor": 0,
}
BLOCK = 256  # values that share one fp32 scale (bitsandbytes/optim/optimizer.py, `blocksize`)
TORCHS_OWN = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
SMALLEST = 4096  # values below which bitsandbytes keeps fp32 (its `min_8bit_size`)


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
        in 32 bits. optimizer_kwargs: Further arguments of `optimizer_cls`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        optimizer_cls: type[torch.optim.Optimizer],
        offload: bool = False,
        full_state: Iterable[torch.nn.Parameter] = (),
        **optimizer_kwargs: Any,
    ):
        self.offload = offload
        groups = [{**group, "params": list(group["params"])} for group in groups]
        self._masters = {
            parameter: self._master_of(parameter)
            for group in groups
            for parameter in group["params"]
        }
        self._pairs = [
            (parameter, master)
            for parameter, master in self._masters.items()
            if master is not parameter
        ]
        inner_groups = [
            {**group, "params": [self._masters[one] for one in group["params"]]} for group in groups
        ]
        self.inner = optimizer_cls(inner_groups, **optimizer_kwargs)
        if full_state := [
            self._masters[parameter] for parameter in full_state if parameter in self._masters
        ]:
            from bitsandbytes.optim import GlobalOptimManager

            manager = GlobalOptimManager.get_instance()
            manager.override_config(full_state, "optim_bits", 32)
            manager.register_parameters(self.inner.param_groups)
        outer = zip(self.inner.param_groups, groups, strict=True)
        super().__init__(
            [{**inner, "params": group["params"]} for inner, group in outer], self.inner.defaults
        )
        in_parts = offload and type(self.inner).__module__.startswith("torch.optim.")
        numbers = (
            parts_of([master.numel() for _, master in self._pairs])
            if in_parts
            else [range(len(self._pairs))]
        )
        self._parts = [[self._pairs[number] for number in part] for part in numbers]
        # where gradients come, for parts of even and of odd numbers
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

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._take_over_writes()
        _copy_hyperparameters(self.param_groups, self.inner.param_groups)
        coming = self._gradients_of(0)
        for number, part in enumerate(self._parts):
            gradients, arrived = coming
            if number + 1 < len(self._parts):
                coming = self._gradients_of(number + 1)
            if arrived is not None:
                arrived.synchronize()
            params, masters = zip(*part, strict=True)
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient
            with _threads(THREADS) if self.offload else nullcontext():
                self.inner.step()
            for master in masters:
                master.grad = None
            # Non-blocking, so that offloaded masters come straight from pinned memory and are
            # rounded on the device.
            torch._foreach_copy_(params, masters, non_blocking=True)
        _copy_hyperparameters(self.inner.param_groups, self.param_groups)  # where some keep state
        if self.offload and torch.cuda.is_available():
            torch.cuda.synchronize()  # the CPU's next writing must not overtake the copies
        self._note_versions()
        return loss

    def _gradients_of(
        self, number: int
    ) -> tuple[list[torch.Tensor | None], torch.cuda.Event | None]:
        """The fp32 gradients of a part, on the device of its masters and with their strides; and
        what to wait for, if they are on their way."""
        part = self._parts[number]
        if not (self.offload and part[0][0].is_cuda):
            return [_gradient_for(master, parameter.grad) for parameter, master in part], None
        if number % 2 not in self._staging:
            size = max(sum(master.numel() for _, master in one) for one in self._parts)
            self._staging[number % 2] = torch.empty(size, dtype=torch.float32, pin_memory=True)
        gradients = []
        begin = 0
        device = part[0][0].device
        self._stream = self._stream or torch.cuda.Stream(device)
        if number == 0:  # the backward pass
            self._stream.wait_stream(torch.cuda.current_stream(device))
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            for parameter, master in part:
                place = self._staging[number % 2][begin:].as_strided(master.size(), master.stride())
                begin += master.numel()
                gradient = parameter.grad
                gradients.append(
                    None if gradient is None else place.copy_(gradient, non_blocking=True)
                )
            arrived.record(self._stream)
        return gradients, arrived

    def _note_versions(self) -> None:
        self._versions = [parameter._version for parameter, _ in self._pairs]

    def _take_over_writes(self) -> None:
        """Takes over what something else has written to the parameters: a checkpoint, DDP's
        broadcast, a callback."""
        for (parameter, master), version in zip(self._pairs, self._versions, strict=True):
            if parameter._version != version and not torch.equal(
                parameter, _rounded(master, parameter)
            ):
                master.copy_(parameter)
        self._note_versions()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Masters stand beside `inner`'s state: within it, loading would cast them to the
        parameters' dtype."""
        self._take_over_writes()
        _copy_hyperparameters(self.param_groups, self.inner.param_groups)
        return {
            "inner": self.inner.state_dict(),
            "masters": [one.detach() for one in self._masters.values()],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Afterwards the parameters are the rounded masters. Without masters in `state_dict`, they
        stay the same."""
        self._take_over_writes()
        own = list(self._masters.values())
        saved = state_dict.get("masters", own)
        theirs, ours = ([list(master.shape) for master in masters] for masters in (saved, own))
        if theirs != ours:
            there, here = next(pair for pair in zip_longest(theirs, ours) if pair[0] != pair[1])
            raise CheckpointError(
                f"The checkpoint has master weights of {len(theirs)} parameters, and {len(ours)} "
                f"are trained; the first that differs has the shape {there} there and {here} here. "
                "Resume with the model and the trained parameters of the run that saved it."
            )
        if saved is own:
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
        """Averages the fp32 gradients over all processes. Where only some have a gradient, the
        others count as 0."""
        params = list(self._masters)
        used = torch.tensor(
            [p.grad is not None for p in params], dtype=torch.uint8, device=params[0].device
        )
        dist.all_reduce(used, dist.ReduceOp.MAX)
        params = [
            parameter for parameter, is_used in zip(params, used.tolist(), strict=True) if is_used
        ]
        for parameter in params:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        gradients = [parameter.grad for parameter in params]
        torch._foreach_div_(gradients, dist.get_world_size())
        flat = [gradient.contiguous() for gradient in gradients]  # NCCL takes no transposed tensors
        for work in [dist.all_reduce(gradient, async_op=True) for gradient in flat]:
            work.wait()
        torch._foreach_copy_(gradients, flat)


def why_no_masters(trainer: Trainer) -> str | None:
    """Why the optimizer that `trainer` will have cannot work on masters, if it cannot."""
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
    return bool(kwargs.keys() & {"model", "optimizer_dict"})


def _optimizer_of(trainer: Trainer) -> tuple[Any, dict[str, Any]]:
    return trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(
        trainer.args, trainer.model
    )


def can_round_adapter(trainer: Trainer) -> bool:
    """Whether there is an adapter that `round_adapter` is for. Autocast computes it in 16 bits as
    it is."""
    autocasts = trainer.accelerator.mixed_precision != "no"
    return (
        isinstance(trainer.model, PeftModel) and not autocasts and why_no_masters(trainer) is None
    )


def round_adapter(model: PeftModel) -> None:
    """Has an adapter computed in 16 bits where the base is, as the server does. PEFT keeps it in
    fp32, in which each of its layers is computed then. To be trained with masters."""
    base = next(parameter.dtype for parameter in model.parameters() if not parameter.requires_grad)
    if base not in HALF:
        return
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(base)


def parts_of(sizes: list[int]) -> list[list[int]]:
    """Divides parameters, of which `sizes` are the numbers of values, into parts of at most `PART`
    or of one each. Returns their places in the list."""
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
    """How many of the gradients are in CPU memory at once, where they come part by part."""
    parts = parts_of(sizes)
    return min(2, len(parts)) * max(sum(sizes[number] for number in part) for part in parts)


def use_masters(trainer: Trainer, offload: bool = False) -> None:
    """Makes `trainer` build the optimizer that its arguments name with fp32 masters, if 16-bit
    parameters are trained. See `MasterOptimizer`."""
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    in_16_bits = [parameter for parameter in trained if parameter.dtype in HALF]
    if not in_16_bits:
        return
    if why := why_no_masters(trainer):
        raise AtroposTrainingError(why)
    if any(parameter.device.type == "cpu" for parameter in in_16_bits):
        sum_in_float32()
    cls, kwargs = _optimizer_of(trainer)
    # As transformers does, which can no longer see that it is bitsandbytes.
    embeddings = [
        module.weight
        for module in trainer.model.modules()
        if isinstance(module, torch.nn.Embedding)
    ]
    own = {
        "optimizer_cls": cls,
        "offload": offload,
        "full_state": embeddings if kwargs.get("optim_bits") == 8 else [],
    }
    trainer.optimizer_cls_and_kwargs = (MasterOptimizer, {**kwargs, **own})


@cache
def sum_in_float32() -> torch.library.Library:
    """Replaces three of torch's kernels for the CPU in this process, which stay replaced while the
    returned library lives. In 16 bits, torch rounds the gradient of an embedding, of a layer norm's
    weights and of a table that is indexed after each token that it adds: of thousands, the last
    ones are lost. Those kernels now add in float32 and round once. Values that are not in 16 bits
    go through torch's own kernels as before."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # that a kernel is replaced
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, compute in (
            ("embedding_dense_backward", _embedding_gradient),
            ("native_layer_norm_backward", _layer_norm_gradients),
            ("_index_put_impl_", _put_by_index),
        ):
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, partial(compute, kernel), "CPU", with_keyset=True)
    return library


def _embedding_gradient(kernel, keys, gradient, *arguments):
    """`gradient`: of the embedded tokens, (..., width)."""
    if gradient.dtype not in HALF:
        return kernel.call_boxed(keys, gradient, *arguments)
    return kernel.call_boxed(keys, gradient.float(), *arguments).to(gradient.dtype)


def _layer_norm_gradients(kernel, keys, gradient, x, shape, mean, deviation, weight, bias, wanted):
    """Returns the gradients of input, weight and bias, of which those `wanted` are computed."""
    of_weights = any(wanted[1:])
    if not of_weights or weight is None or weight.dtype not in HALF:
        return kernel.call_boxed(keys, gradient, x, shape, mean, deviation, weight, bias, wanted)
    tensors = (gradient, x, mean, deviation, weight, bias)
    gradient, x, mean, deviation, weight, bias = (
        None if one is None else one.float() for one in tensors
    )
    found = kernel.call_boxed(keys, gradient, x, shape, mean, deviation, weight, bias, wanted)
    return tuple(None if one is None else one.to(tensors[0].dtype) for one in found)


def _put_by_index(kernel, keys, table, indices, values, accumulate=False, unsafe=False):
    """Changes and returns `table`. The gradient of `table[indices]` is made by adding to a table of
    zeros."""
    if not accumulate or table.dtype not in HALF:
        return kernel.call_boxed(keys, table, indices, values, accumulate, unsafe)
    return table.copy_(
        kernel.call_boxed(keys, table.float(), indices, values.float(), accumulate, unsafe)
    )


@contextmanager
def exact_gradients(trainer: Trainer, model: torch.nn.Module) -> Iterator[None]:
    """Around `Trainer.training_step`: averages gradients over the processes in fp32, in place of
    DistributedDataParallel, whose buckets have the parameters' dtype."""
    accelerator = trainer.accelerator
    optimizer = trainer.optimizer.optimizer  # within accelerate's
    if accelerator.num_processes == 1 or not isinstance(optimizer, MasterOptimizer):
        yield
        return
    with accelerator.no_sync(model):
        yield
    if accelerator.sync_gradients:
        optimizer.all_reduce_gradients()


@contextmanager
def accumulate_gradients(
    accelerator: Accelerator, model: torch.nn.Module
) -> Iterator[Callable[[torch.Tensor], None]]:
    """Around the forward and backward pass of all but the last micro-batch of a training step.
    Yields what to call in place of `accelerator.backward`: it only adds to the gradients. The
    `Trainer` calls the last backward pass, with which they are averaged over processes, and
    DeepSpeed steps."""
    # The loss is scaled already, which the `Trainer`, too, tells DeepSpeed.
    options = (
        {"scale_wrt_gas": False}
        if accelerator.distributed_type == DistributedType.DEEPSPEED
        else {}
    )
    state = accelerator.gradient_state
    synchronizes = state.sync_gradients
    state._set_sync_gradients(False)  # as the `Trainer` does around each of its own micro-batches
    try:
        with accelerator.no_sync(model):
            yield lambda loss: accelerator.backward(loss, **options)
    finally:
        state._set_sync_gradients(synchronizes)


def state_bytes(
    optim: str, parameters: Iterable[torch.Tensor], masters: bool, embeddings: set[int]
) -> int:
    """Bytes of the optimizer's state, by default AdamW's. With `masters`, it works on fp32 copies
    of 16-bit ones. bitsandbytes keeps `embeddings` (their `id`s) in 32 bits."""
    buffers = next((number for name, number in BUFFERS.items() if name in optim), 2)
    total = 0.0
    for parameter in parameters:
        if "adafactor" in optim:  # one value per row and one per column
            total += 4 * sum(parameter.shape[-2:]) * math.prod(parameter.shape[:-2])
        elif "8bit" in optim and parameter.numel() >= SMALLEST and id(parameter) not in embeddings:
            total += buffers * parameter.numel() * (1 + 4 / BLOCK)
        else:
            # torch's are of the parameter's dtype, bitsandbytes' always 4 bytes.
            wide = masters or "bit" in optim or "bnb" in optim
            total += buffers * parameter.numel() * (4 if wide else parameter.itemsize)
    return int(total)


@contextmanager
def _threads(most: int) -> Iterator[None]:
    """As many threads as this process has cores: accelerate's launcher gives it one, unless told
    otherwise."""
    usual = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) // int(os.getenv("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(usual, min(most, cores)))
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def _copy_hyperparameters(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for theirs, ours in zip(source, target, strict=True):
        ours.update({name: value for name, value in theirs.items() if name != "params"})


def _gradient_for(master: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The parameter's fp32 gradient with the strides of the master; not copied if it has them."""
    if gradient is None or gradient.stride() == master.stride():
        return gradient
    return torch.empty_like(master).copy_(gradient)


def _rounded(master: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return master.detach().to(device=parameter.device, dtype=parameter.dtype)
