"""`vllm_mode: colocate`: the trainer's parameters are views of the server's memory. Nothing is ever
moved.

The model is loaded as usual, compared bit for bit with the server's, and then each parameter is
replaced by a view. The optimizer writes into the server's memory while the server is paused. If the
model has an adapter, only its frozen base is shared (`lora.py`). If memory cannot be shared,
weights are copied on the device (`full_weights.py`).
"""

import logging
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from transformers import PreTrainedModel
from trl.trainer.utils import create_model_from_path

from trl_atropos.distributed import together
from trl_atropos.errors import AttachError
from trl_atropos.modes import COLOCATE
from trl_atropos.server_client import Servers
from trl_atropos.services.mps import mps_runs
from trl_atropos.weights.checkpoint_plan import CheckpointPlan
from trl_atropos.weights.fingerprints import Fingerprinted, fingerprinted_base
from trl_atropos.weights.full_weights import FullWeights
from trl_atropos.weights.lora import MemoryLora
from trl_atropos.weights.transfer import Transfer, open_views

logger = logging.getLogger(__name__)


class Colocate(Transfer):
    """Trains, on each rank, the memory of a server of its own, on the rank's device."""

    mode = COLOCATE
    steps_in_place = True

    def __init__(self, servers: Servers):
        super().__init__(servers)
        self.views: dict[str, torch.Tensor] = {}  # of the server's memory, by parameter name

    def load(self, model: Any, args: Any, peft_config: Any) -> tuple[Transfer, Any]:
        self.servers.connect(one_per_rank=True)
        if args.device.type == "cpu":
            # With several processes accelerate numbers the device, and `model.to("cpu:0")` copies
            # what is on "cpu".
            device = torch.device("cpu")
            PartialState().device = device
            vars(args)["_setup_devices"] = device
        info = self.servers.infos[0]
        refusals = info.refusals
        dtype = None if refusals else info.dtype
        model = load_model(model, args, dtype)
        if not isinstance(model, PreTrainedModel):
            raise AttachError(
                f"`model` is a {type(model).__name__}. vllm_mode='colocate' needs a name, a folder "
                "or a plain `PreTrainedModel`; pass adapters as `peft_config` (`use_peft`). To go "
                "on from a trained one, use `nccl_lora`, `lora` or `server`."
            )
        if not refusals:
            dtypes = {parameter.dtype for parameter in model.parameters()}
            together(lambda: check_dtype(dtypes, info.dtype))
            self.servers.hold_leases()
            refusals = together(lambda: self._attach_views(model))
        if not refusals:
            if peft_config is None:
                return self, model
            return MemoryLora(self.servers, "memory", base=self), model
        reasons = "; ".join(refusals[:3])
        if len(refusals) > 3:
            reasons += f" and {len(refusals) - 3} more"
        logger.warning(
            "The weights of the server at %s cannot be shared (%s). Falling back to a copy on the "
            "same device, which holds them twice.",
            self.servers.clients[0].url,
            reasons,
        )
        if peft_config is not None and info.lora is not None:
            return MemoryLora(self.servers, "memory"), model
        return FullWeights(self.servers, "memory"), model

    def _attach_views(self, model: PreTrainedModel) -> list[str]:
        """Replaces the parameters by views, or nothing if one parameter has no view. Returns the
        reasons why not."""
        (client,) = self.servers.clients
        try:
            attachment = client.attach(CheckpointPlan(model).specs())
            views, refused = open_views(model.named_parameters(), attachment)
        except AttachError as error:
            served = self.servers.infos[0].model
            raise AttachError(
                f"{error} (The server has {served}, the trainer {model.name_or_path}.)"
            ) from error
        if not refused:
            replace(model, views)
            self.views = views
            size = sum(view.nbytes for view in views.values()) / 1e6
            logger.info(
                "attached %d parameters (%.1f MB) of %s, bit for bit equal",
                len(views),
                size,
                client.url,
            )
        return [f"{name}: {reason}" for name, reason in refused.items()]

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer
        accelerator = trainer.accelerator
        on_gpu = accelerator.device.type == "cuda"
        if on_gpu and accelerator.is_main_process and not mps_runs():
            logger.info(
                "Trainer and server take turns on the GPU. NVIDIA's MPS ends that: `mps: true` "
                "starts it."
            )

    def fingerprinted(self) -> list[Fingerprinted]:
        """Returns all weights, compared as they were loaded and after the first step. The second
        comparison proves that they are the server's memory, and `check` that they stay so."""
        return [fingerprinted_base(self._trainer, self.servers)._replace(times=2)]

    def check(self) -> None:
        """Raises `AttachError` if a parameter is no longer the server's memory. Called before a
        step writes."""
        addresses = {parameter.data_ptr() for parameter in self._trainer.model.parameters()}
        lost = [name for name, view in self.views.items() if view.data_ptr() not in addresses]
        if lost:
            raise AttachError(
                f"{len(lost)} parameters are no longer the server's memory (first: {lost[0]!r}). "
                "Something replaced them after the trainer was built (`model.to`, a wrapper, "
                "`param.data = ...`): do that before."
            )

    def send(self, policy_version: int) -> int:
        return 0  # the step has written into the server's memory


def load_model(model: Any, args: Any, dtype: str | None) -> PreTrainedModel:
    """Loads a model that is given by a name or a folder, as TRL would later, in the server's
    `dtype` if there is one."""
    if not isinstance(model, str):
        return model
    kwargs = {"trust_remote_code": args.trust_remote_code}
    kwargs |= args.model_init_kwargs or {}
    kwargs["device_map"] = None  # on the CPU first, so that the device never holds them twice
    if dtype is not None:
        if kwargs.get("dtype") not in (None, "auto"):
            check_dtype({kwargs["dtype"]}, dtype)
        kwargs["dtype"] = dtype
    set_seed(args.seed)
    return create_model_from_path(model, **kwargs)


def check_dtype(dtypes: set[torch.dtype | str], served: str) -> None:
    """Raises `AttachError` unless one of the trainer's dtypes is the server's."""
    names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if served not in names:  # some families keep a few parameters in float32, and so does vLLM
        raise AttachError(
            f"The trainer's dtype is {', '.join(names)}, the server's {served}. With "
            f"vllm_mode='colocate' they are the same memory: set `dtype: {served}`, or start the "
            f"server with `--dtype {names[0]}`."
        )


def replace(model: torch.nn.Module, views: dict[str, torch.Tensor]) -> None:
    """Puts the views in place of the parameters, everywhere a tied parameter is used."""
    replacements = {
        parameter: torch.nn.Parameter(views[name], requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    for module in model.modules():
        for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, leaf, replacements[parameter])
    model.register_state_dict_post_hook(_make_contiguous)


def _make_contiguous(model: torch.nn.Module, state_dict: dict, prefix: str, metadata: dict) -> None:
    """Replaces transposed views in a state dict, such as those of GPT-2's linear layers, by copies,
    because they cannot be saved."""
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor) and not value.is_contiguous():
            state_dict[name] = value.contiguous()
