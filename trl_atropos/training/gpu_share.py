"""Has the trainer compute on a part of its GPU (`gpu_share`), and leaves the rest to a server.

Under NVIDIA's MPS, kernels of trainer and server run at the same time. But a kernel of the trainer
takes all multiprocessors, and the server's wait until some of its blocks end. A decoding step is
hundreds of short kernels, each of which waits for the one before. Multiprocessors that the trainer
leaves free are there at once.

CUDA calls such a part a green context. Work that is queued on its stream runs on the part alone,
and gives the same results as on the whole GPU.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.cuda.green_contexts import GreenContext

from trl_atropos.services.mps import mps_runs

logger = logging.getLogger(__name__)


class GpuShare:
    """
    The part of a GPU that the trainer computes on.

    Args:
        share (`float`, *optional*): Of the multiprocessors, above 0 and up to 1. All by default.
        device (`torch.device`): Of the trainer. On the CPU, the share has no effect.
        warn (`bool`): Whether to warn of a share that has no effect.
    """

    def __init__(self, share: float | None, device: torch.device, warn: bool = True):
        self._stream: torch.cuda.Stream | None = None
        if share is None or share == 1 or device.type != "cuda":
            return
        level = logging.WARNING if warn else logging.DEBUG
        if not mps_runs():
            logger.log(
                level,
                "`gpu_share: %s` has no effect without NVIDIA's MPS, which lets a server use the "
                "rest of the GPU. Set `mps: true`.",
                share,
            )
            return
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        wanted = max(1, int(share * multiprocessors))
        try:
            with torch.cuda.device(device):
                # The driver rounds up, on Hopper GPUs to a multiple of 8. The stream does not keep
                # its context.
                self._context = GreenContext.create(
                    num_sms=wanted, device_id=torch.cuda.current_device()
                )
                self._stream = self._context.Stream()
        except RuntimeError as error:
            logger.log(
                level,
                "`gpu_share: %s` has no effect, because this GPU cannot be divided: %s",
                share,
                error,
            )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Has this thread compute on the share within. What it computed before is there, and what
        it computes next waits for the results."""
        if self._stream is None:
            yield
            return
        usual = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            yield
        usual.wait_stream(self._stream)
