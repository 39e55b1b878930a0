"""`Transfer`: how a mode moves the bytes of a new policy. All around it is in `fence.py`, once for all modes."""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel, set_seed
from peft import PeftModel
from transformers import PreTrainedModel
from trl.trainer.utils import create_model_from_path

from trl_atropos.errors import AttachError
from trl_atropos.weights.servers import Servers

logger = logging.getLogger(__name__)


@dataclass
class Moved:
    """What one publish moved. Times are those of the slowest server."""

    num_bytes: int = 0
    apply_ms: float = 0.0  # of it, putting what arrived where the server samples from


class Transfer(ABC):
    """
    One subclass per mode. All methods are called on every rank.

    Attributes:
        in_place: This process writes into the server's memory, so that it must be paused before the first write.
        steps_in_place: It is the optimizer that does: the pause is around the step.
        clear_cache: Requests in flight recompute what they cached, because the weights they use change.
    """

    in_place = False
    steps_in_place = False
    clear_cache = True

    def __init__(self, servers: Servers):
        self.servers = servers

    def load(self, model: Any, args: Any, peft_config: Any) -> tuple["Transfer", Any]:
        """
        Called with the trainer's `model` argument before the trainer is built.

        Returns the transfer to use (another one where this one cannot serve the case) and what the trainer shall take
        as its model.
        """
        return self, model

    @abstractmethod
    def attach(self, trainer: Any) -> None:
        """Called once the trainer is built, with the leases held."""

    def check(self) -> None:  # noqa: B027 - not every mode can be torn
        """Raises if the trainer's parameters are no longer what they were at `attach`. Called before every pause."""

    def pause(self) -> None:
        in_place = self.in_place or self.steps_in_place
        self.servers.each(lambda client: client.pause(self.clear_cache, in_place))

    @abstractmethod
    def send(self, policy_version: int) -> Moved:
        """Moves the weights of a version that the servers do not have yet. They are paused."""

    def resume(self, policy_version: int) -> None:
        self.servers.each(lambda client: client.resume(policy_version))

    def published(self, policy_version: int) -> None:  # noqa: B027
        """Called after a publish that was whole."""


def load_model(model: Any, args: Any, dtype: str | None = None) -> PreTrainedModel:
    """
    The model that a name, a folder or a model object means, on the CPU. TRL would do the same, but later.

    Args:
        dtype (`str`, *optional*): What its parameters must be. Defaults to what `args` or TRL say.
    """
    if isinstance(model, str):
        kwargs = dict(args.model_init_kwargs or {})
        stated = str(kwargs.get("dtype")).removeprefix("torch.")
        if dtype is not None and stated not in (dtype, "auto", "None"):
            raise AttachError(
                f"The trainer's dtype is {stated}, the server's {dtype}. With vllm_mode='colocate' they are the same "
                f"memory: set `dtype: {dtype}`, or start the server with `--dtype {stated}`."
            )
        # On the CPU first, so that the device never holds the weights twice.
        kwargs |= {"device_map": None} | ({} if dtype is None else {"dtype": dtype})
        kwargs.setdefault("trust_remote_code", args.trust_remote_code)
        set_seed(args.seed)
        model = create_model_from_path(model, **kwargs)
    return model


def base_model(model: torch.nn.Module) -> PreTrainedModel:
    """The model itself, without wrappers and adapters."""
    model = extract_model_from_parallel(model, recursive=True)
    return model.get_base_model() if isinstance(model, PeftModel) else model
