"""Backward passes that only add to the gradients, within one training step of `transformers.Trainer`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType


@contextmanager
def accumulate_gradients(accelerator: Accelerator, model: torch.nn.Module) -> Iterator[Callable[[torch.Tensor], None]]:
    """
    Yields what takes the place of `accelerator.backward`. Forward and backward belong inside. Nothing is averaged over
    processes, and DeepSpeed's engine takes no step: that comes with the backward that the `Trainer` itself calls.
    """
    # The `Trainer` says so to DeepSpeed, too: the loss is scaled already.
    options = {"scale_wrt_gas": False} if accelerator.distributed_type == DistributedType.DEEPSPEED else {}
    state = accelerator.gradient_state
    synchronizes = state.sync_gradients
    state._set_sync_gradients(False)  # as the `Trainer` does around each of its own micro-batches
    try:
        with accelerator.no_sync(model):
            yield lambda loss: accelerator.backward(loss, **options)
    finally:
        state._set_sync_gradients(synchronizes)
