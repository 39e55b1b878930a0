"""Only the LoRA adapter moves: `vllm_mode: nccl_lora` in one message through memory, `vllm_mode:
lora` as files.

`MemoryLora`: the server has two places for the adapter, so that requests in flight finish on the
version that they began with while new ones get the next. Also what `colocate` uses for an adapter,
whose frozen base is then shared.

`FileLora`: the server loads each version, by vLLM's own HTTP routes, from a directory that it must
see under the same path. It unloads the adapter first: vLLM's `load_inplace` would read the files at
every step of the engine.
"""

import json
import logging
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file

from trl_atropos.distributed import on_main
from trl_atropos.errors import AttachError
from trl_atropos.protocol import ADAPTER_NAME, ParameterSpec
from trl_atropos.server_client import Servers
from trl_atropos.tensors.channel import message_layout, unpack
from trl_atropos.tensors.fingerprint import Fingerprints, Part
from trl_atropos.weights.adapters import tensors_of, trained_adapter
from trl_atropos.weights.fingerprints import Fingerprinted, fingerprinted_base, of_stream
from trl_atropos.weights.gather import (
    WHOLE,
    base_model,
    iter_adapter_parameters,
    plain_name,
    sharding_of,
    unwrap,
)
from trl_atropos.weights.transfer import Transfer, choose_transport, open_channel, send_messages

logger = logging.getLogger(__name__)

KEPT_VERSIONS = 2  # directories, besides those that requests in flight still use
MERGED = "`vllm_mode: server`, which sends merged weights"


class MemoryLora(Transfer):
    """For servers that were started with `--enable-lora`. `base`, if any, shares the frozen base
    with them."""

    adapter_way = "alone"
    # requests in flight keep their adapter, and new requests have prefixes of their own
    clear_cache = False

    def __init__(self, servers: Servers, transport: str, base: Transfer | None = None):
        super().__init__(servers)
        self.transport = transport
        self.base = base

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer
        if self.base is not None:
            self.base.attach(trainer)
            self.check = self.base.check
        _require_servable(trainer.model, self.servers)
        self._tensors = _tensors_of(trainer, self.servers)
        self._scales = _scales_of(trainer.model, self._tensors)
        self._values: list[torch.Tensor] | None = None
        # of the adapter as it is published
        self._copy: tuple[list[torch.Tensor], Fingerprints] | None = None
        self._num_bytes = message_layout(self._tensors)[1]
        self.servers.on_connected_ranks(lambda: self._connect(trainer))

    def _connect(self, trainer: Any) -> None:
        device = trainer.accelerator.device
        num_bytes = self._num_bytes
        transport = choose_transport(self.transport, self.servers, device)
        self._channel = open_channel(transport, self.servers, device, num_bytes)
        self._message = self._channel.staging(num_bytes)
        self._slots = unpack(self._message, self._tensors)
        config = _config_of(trainer.model).to_dict()
        plain = json.loads(
            json.dumps(
                config, default=lambda value: sorted(value) if isinstance(value, set) else None
            )
        )
        replies = self.servers.each_here(lambda client: client.set_up_adapter(self._tensors, plain))
        for client, refused in zip(self.servers.clients, replies, strict=True):
            if refused is not None:
                raise AttachError(
                    f"The server at {client.url} cannot serve this adapter: {refused}. Change it, "
                    f"or use {MERGED}."
                )
        logger.info(
            "the adapter (%.2f MB) goes to %d server(s) through %s",
            num_bytes / 1e6,
            len(replies),
            transport,
        )

    @torch.no_grad()
    def send(self, policy_version: int) -> int:
        values = self._gathered()
        self.servers.on_connected_ranks(lambda: self._push(values))
        return self._num_bytes

    def _push(self, values: list[torch.Tensor]) -> None:
        self._fill(self._slots, values)
        send_messages(
            self._channel, iter([self._message]), self.servers, lambda client: client.load_adapter()
        )

    def _fill(self, slots: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        if self._scales:  # the scaling goes into B while it still has the trainer's precision
            scaled = torch._foreach_mul(
                [values[index] for index in self._scales], list(self._scales.values())
            )
            for index, product in zip(self._scales, scaled, strict=True):
                values[index] = product
        torch._foreach_copy_(slots, values)

    def fingerprinted(self) -> list[Fingerprinted]:
        adapter = Fingerprinted("adapter", self._tensors, self._own_fingerprints)
        return [*_base_of(self._trainer, self.servers), adapter]

    @torch.no_grad()
    def _own_fingerprints(self) -> torch.Tensor:
        """Of the adapter as it is now, in memory that no publish uses."""
        values = self._gathered()
        if not self.servers.clients:
            return torch.zeros(0, 2, dtype=torch.int64)
        if self._copy is None:
            slots = unpack(torch.empty_like(self._message), self._tensors)
            parts = [
                (slot, Part.whole(slot.shape), slot.shape, number)
                for number, slot in enumerate(slots)
            ]
            self._copy = slots, Fingerprints(parts, len(slots))
        slots, fingerprints = self._copy
        self._fill(slots, values)
        return fingerprints.compute()

    def _gathered(self) -> list[torch.Tensor]:
        model = self._trainer.model
        accelerator = self._trainer.accelerator
        values = self._values or [
            tensor for _, tensor in iter_adapter_parameters(model, accelerator)
        ]
        if sharding_of(accelerator) in WHOLE:  # then these are the parameters themselves
            self._values = values
        return list(values)


class FileLora(Transfer):
    """For servers that were also started with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`. Writes below
    `folder`."""

    adapter_way = "alone"

    def __init__(self, servers: Servers, folder: str):
        super().__init__(servers)
        self.folder = Path(folder).absolute()
        self._directories: list[tuple[int, Path]] = []  # with their versions, the oldest first

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer
        _require_servable(trainer.model, self.servers)
        # vLLM before 0.32 tells cached prefixes apart by the adapter's name alone, which stays the
        # same.
        self.clear_cache = any(not info.prefixes_by_path for info in self.servers.infos)
        on_main(lambda: shutil.rmtree(self.folder, ignore_errors=True))  # of an earlier run

    def fingerprinted(self) -> list[Fingerprinted]:
        tensors = _tensors_of(self._trainer, self.servers)
        adapter = Fingerprinted("adapter", tensors, lambda: self._own_fingerprints(tensors))
        return [*_base_of(self._trainer, self.servers), adapter]

    @torch.no_grad()
    def _own_fingerprints(self, tensors: list[ParameterSpec]) -> torch.Tensor:
        """Of the adapter as vLLM has it after reading the files: B is scaled in the server's
        dtype."""
        named = iter_adapter_parameters(self._trainer.model, self._trainer.accelerator)
        scales = _scales_of(self._trainer.model, tensors)
        dtype = getattr(torch, self.servers.info.lora.dtype)
        served = (
            (name, tensor.to(dtype) * scales.get(number, 1))
            for number, (name, tensor) in enumerate(named)
        )
        return of_stream(served, bool(self.servers.clients))

    @torch.no_grad()
    def send(self, policy_version: int) -> int:
        named = iter_adapter_parameters(self._trainer.model, self._trainer.accelerator)
        tensors = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in named
            if self.servers.clients
        }
        self.servers.on_connected_ranks(lambda: self._push(tensors, policy_version))
        return sum(tensor.nbytes for tensor in tensors.values())

    def _push(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        # vLLM tells cached prefixes apart by the path: a version of an earlier training must not
        # have the same.
        path = self.folder / f"v{version}-{uuid.uuid4().hex[:8]}"
        path.mkdir(parents=True)
        save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
        _config_of(self._trainer.model).save_pretrained(str(path))
        self._directories.append((version, path))
        self.servers.each_here(lambda client: client.swap_adapter(ADAPTER_NAME, str(path)))
        used = min(client.info().oldest_version_in_flight for client in self.servers.clients)
        for older, directory in self._directories[:-KEPT_VERSIONS]:
            if older < used:  # no request can ask for it any more
                shutil.rmtree(directory, ignore_errors=True)
                self._directories.remove((older, directory))


def _config_of(model: PeftModel) -> PeftConfig:
    """Of the adapter that is trained."""
    return model.peft_config[trained_adapter(model)]


def _tensors_of(trainer: Any, servers: Servers) -> list[ParameterSpec]:
    """Of the adapter, as the servers have them."""
    whole = iter_adapter_parameters(trainer.model, trainer.accelerator)
    dtype = servers.info.lora.dtype
    return [ParameterSpec.of(name, tensor.shape, dtype) for name, tensor in whole]


def _scales_of(model: Any, tensors: list[ParameterSpec]) -> dict[int, float]:
    """What each B is multiplied by, by its number: alpha over rank, or as rsLoRA and patterns
    say."""
    adapter = trained_adapter(unwrap(model))
    scales = {
        f"{plain_name(name)}.{leaf}": float(module.scaling[adapter])
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and module.scaling.get(adapter, 1.0) != 1.0
        for leaf in ("lora_B.weight", "lora_embedding_B")
    }
    return {index: scales[spec.name] for index, spec in enumerate(tensors) if spec.name in scales}


def _base_of(trainer: Any, servers: Servers) -> list[Fingerprinted]:
    """The frozen model below the adapter, which the server has loaded by itself."""
    if getattr(base_model(trainer.model), "is_quantized", False):
        reason = "the frozen base is quantised in the trainer"
        return [
            Fingerprinted(
                "weights", [], lambda: torch.zeros(0, 2, dtype=torch.int64), left_out=reason
            )
        ]
    return [fingerprinted_base(trainer, servers)]


def _require_servable(model: Any, servers: Servers) -> None:
    """Raises `AttachError` for what no vLLM server can serve as an adapter, or not these."""
    served = servers.info.lora
    if not isinstance(model, PeftModel):
        raise AttachError(
            "This `vllm_mode` sends a LoRA adapter, but the run has none: set `use_peft: true` (or "
            "pass a `peft_config`), or use `vllm_mode: colocate` or `server` to train all weights."
        )
    if served is None:
        raise AttachError(
            "The server was started without adapters: add `--enable-lora --max-lora-rank R` (in a "
            "recipe, to `vllm_args`), or start it by `trl-atropos serve --vllm_mode nccl_lora`."
        )
    if served.max_loras < 2:
        raise AttachError(
            "The server has no place for the adapter's next version: start it with `--max-loras 2`."
        )
    config = _config_of(model)
    adapter = {id(tensor) for tensor in tensors_of(model, trained_adapter(model)).values()}
    trained = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    others = [name for name, parameter in trained if id(parameter) not in adapter]
    if others:
        raise AttachError(
            f"{len(others)} parameters outside of the adapter are trained (first: {others[0]!r}), "
            f"which would never reach the server: use {MERGED}."
        )
    rank = max([config.r, *config.rank_pattern.values()])
    if rank > served.max_rank:
        raise AttachError(
            f"The adapter's rank is {rank}, the server's largest {served.max_rank}: start the "
            f"server with `--max-lora-rank {rank}` or more, or lower `lora_r`."
        )
