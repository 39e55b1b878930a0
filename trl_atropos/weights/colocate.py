"""`vllm_mode: colocate`: the trainer's parameters are views of the server's memory. Nothing is ever moved.

The model is loaded as usual, compared bit for bit with the server's, and then each parameter is replaced by a view,
which frees the loaded copy: one copy of the weights remains. The optimizer writes into it in place, under the fence.

With adapters, the frozen base is shared in this way and the adapter goes through memory (`memory_lora.py`). Where a
server's memory cannot be shared at all, its weights are copied on the device instead (`full_weights.py`), and a
warning says so.
"""

import logging
import time
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from trl_atropos.errors import AttachError
from trl_atropos.weights import layout, ranks
from trl_atropos.weights.full_weights import FullWeights
from trl_atropos.weights.memory_lora import MemoryLora
from trl_atropos.weights.names import parameter_specs
from trl_atropos.weights.servers import Servers
from trl_atropos.weights.transfer import Moved, Transfer, load_model

logger = logging.getLogger(__name__)


class Colocate(Transfer):
    """Each rank trains the memory of a server of its own, on its own device."""

    steps_in_place = True

    def __init__(self, servers: Servers):
        super().__init__(servers)
        self.views: dict[str, torch.Tensor] = {}

    def load(self, model: Any, args: Any, peft_config: Any) -> tuple[Transfer, Any]:
        self.servers.connect(one_per_rank=True)
        if args.device.type == "cpu":
            # With several processes accelerate numbers it, and `model.to("cpu:0")` copies what is on "cpu".
            PartialState().device = vars(args)["_setup_devices"] = torch.device("cpu")
        info = self.servers.infos[0]
        refusals = ranks.together(lambda: list(info.refusals))
        model = load_model(model, args, None if refusals else info.dtype)
        if not isinstance(model, PreTrainedModel):
            raise AttachError(
                f"`model` is a {type(model).__name__}. vllm_mode='colocate' needs a name, a folder or a plain "
                "`PreTrainedModel`; pass adapters as `peft_config` (`use_peft`)."
            )
        if not refusals:
            ranks.together(lambda: self._check_dtype(model, info.dtype))
            self.servers.hold_leases()
            refusals = ranks.together(lambda: self._attach_views(model))
        if refusals:
            return self._fall_back(refusals, peft_config), model
        if peft_config is not None:
            return MemoryLora(self.servers, "memory", base=self), model
        return self, model

    def _check_dtype(self, model: PreTrainedModel, dtype: str) -> None:
        own = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
        if dtype not in own:  # some families keep a few parameters in float32, and so does vLLM
            raise AttachError(
                f"The model's parameters are {', '.join(sorted(own))}, the server's {dtype}. With "
                f"vllm_mode='colocate' they are the same memory: load the model in {dtype}, or start the server with "
                "another `--dtype`."
            )

    def _attach_views(self, model: PreTrainedModel) -> list[str]:
        """Replaces the parameters by views. Returns why it cannot be done, if so; then nothing is replaced."""
        (client,) = self.servers.clients
        started = time.perf_counter()
        try:
            opened = layout.open_views(model.named_parameters(), client.attach(parameter_specs(model)))
        except AttachError as error:
            raise AttachError(
                f"{error} (The server has {self.servers.infos[0].model}, the trainer {model.name_or_path}.)"
            ) from error
        if opened.refused:
            return [f"{name}: {reason}" for name, reason in opened.refused.items()]
        layout.replace(model, opened.views)
        self.views = opened.views
        logger.info(
            "attached %d parameters (%.1f MB) of %s in %.2f s, bit for bit the checkpoint",
            len(self.views),
            sum(view.nbytes for view in self.views.values()) / 1e6,
            client.url,
            time.perf_counter() - started,
        )
        return []

    def _fall_back(self, refusals: list[str], peft_config: Any) -> Transfer:
        shown = "; ".join(refusals[:3]) + (f" and {len(refusals) - 3} more" if len(refusals) > 3 else "")
        what = "the adapter is sent and the base is held twice" if peft_config is not None else "they are held twice"
        logger.warning(
            "The weights of the server at %s cannot be shared (%s). Falling back to a copy on the same device: %s.",
            self.servers.clients[0].url,
            shown,
            what,
        )
        if peft_config is not None and self.servers.infos[0].lora is not None:
            return MemoryLora(self.servers, "memory")
        return FullWeights(self.servers, "memory")

    def attach(self, trainer: Any) -> None:
        self._model = trainer.model

    def check(self) -> None:
        """Everything depends on the parameters still being the server's memory: checked before the step writes."""
        lost = layout.detached(self._model, self.views)
        if lost:
            raise AttachError(
                f"{len(lost)} parameters are no longer the server's memory (first: {lost[0]!r}). Something replaced "
                "them after the trainer was built (`model.to`, a wrapper, `param.data = ...`): do that before."
            )

    def send(self, policy_version: int) -> Moved:
        """Nothing to move: the step has written into the server's memory."""
        return Moved()
