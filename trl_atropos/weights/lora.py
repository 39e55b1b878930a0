"""Only the LoRA adapter moves: in one message through memory (`vllm_mode: nccl_lora`), or as files
(`vllm_mode: lora`).

`MemoryLora`: the server has two places for the adapter, so that requests in flight finish on the
version that they began with while new ones get the next. `colocate` uses it for an adapter, and
shares the frozen base.

`FileLora`: the server loads each version, by vLLM's own HTTP routes, from a directory that it must
see under the same path. It unloads the adapter first: vLLM's `load_inplace` would read the files at
every step of the engine.
"""

import json
import logging
import shutil
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file

from trl_atropos.distributed import on_main
from trl_atropos.errors import AttachError
from trl_atropos.modes import LORA, NCCL_LORA
from trl_atropos.protocol import ADAPTER_NAME, ParameterSpec
from trl_atropos.server_client import Servers
from trl_atropos.tensors.channel import message_layout, unpack
from trl_atropos.tensors.fingerprint import Fingerprints, PlacedPart
from trl_atropos.weights.adapters import tensors_of, trained_adapter
from trl_atropos.weights.fingerprints import (
    NO_FINGERPRINTS,
    Fingerprinted,
    fingerprinted_base,
    of_stream,
)
from trl_atropos.weights.gather import (
    Named,
    base_model,
    is_whole,
    iter_adapter_parameters,
    plain_name,
    unwrap,
)
from trl_atropos.weights.transfer import Transfer, choose_transport, open_channel, send_messages

logger = logging.getLogger(__name__)

KEPT_VERSIONS = 2  # directories, besides those that requests in flight still use
MERGED = "`vllm_mode: server`, which sends merged weights"


class MemoryLora(Transfer):
    """Sends the adapter to servers that were started with `--enable-lora`. `base`, if any, shares
    the frozen base with them."""

    mode = NCCL_LORA
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
        _require_servable(trainer.model, self.servers)
        self._tensors = _tensors_of(trainer, self.servers)
        self._scales = _scales_of(trainer.model, self._tensors)
        self._values: list[torch.Tensor] | None = None
        self._copy: list[torch.Tensor] | None = None  # of the adapter as it is published
        _, self._num_bytes = message_layout(self._tensors)
        self.servers.on_connected_ranks(lambda: self._connect(trainer))

    def _connect(self, trainer: Any) -> None:
        device = trainer.accelerator.device
        num_bytes = self._num_bytes
        transport = choose_transport(self.transport, self.servers, device)
        self._channel = open_channel(transport, self.servers, device, num_bytes)
        self._message = self._channel.staging(num_bytes)
        self._slots = unpack(self._message, self._tensors)
        config = _as_json(_config_of(trainer.model))
        replies = self.servers.each_here(
            lambda client: client.set_up_adapter(self._tensors, config)
        )
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

    def check(self) -> None:
        if self.base is not None:
            self.base.check()

    @torch.no_grad()
    def send(self, policy_version: int) -> int:
        values = self._gathered()
        self.servers.on_connected_ranks(lambda: self._push(values))
        return self._num_bytes

    def _push(self, values: list[torch.Tensor]) -> None:
        self._fill(self._slots, values)
        messages = iter([self._message])
        send_messages(self._channel, messages, self.servers, lambda client: client.load_adapter())

    def _fill(self, slots: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Copies the adapter's values into `slots`, in the server's dtype."""
        if self._scales:  # the scaling goes into B while it still has the trainer's precision
            factors = list(self._scales.values())
            unscaled = [values[index] for index in self._scales]
            scaled = torch._foreach_mul(unscaled, factors)
            for index, product in zip(self._scales, scaled, strict=True):
                values[index] = product
        torch._foreach_copy_(slots, values)

    def fingerprinted(self) -> list[Fingerprinted]:
        adapter = Fingerprinted("adapter", self._tensors, self._compute_fingerprints)
        return [_base_of(self._trainer, self.servers), adapter]

    @torch.no_grad()
    def _compute_fingerprints(self) -> torch.Tensor:
        """Returns the fingerprints of the adapter as it is now, in memory that no publish uses."""
        values = self._gathered()
        if not self.servers.clients:
            return NO_FINGERPRINTS
        if self._copy is None:
            message = torch.empty_like(self._message)
            self._copy = unpack(message, self._tensors)
            parts = []
            for number, slot in enumerate(self._copy):
                parts.append(PlacedPart.whole(slot, number))
            self._copy_fingerprints = Fingerprints(parts, len(parts))
        self._fill(self._copy, values)
        return self._copy_fingerprints.compute()

    def _gathered(self) -> list[torch.Tensor]:
        """Returns the adapter's whole tensors. They are kept if they are the parameters
        themselves."""
        values = self._values
        if not values:
            values = [tensor for _, tensor in _adapter_of(self._trainer)]
        if is_whole(self._trainer.accelerator):
            self._values = values
        return list(values)


class FileLora(Transfer):
    """Writes the adapter below `folder`, for servers that were also started with
    `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`."""

    mode = LORA

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
        adapter = Fingerprinted("adapter", tensors, partial(self._compute_fingerprints, tensors))
        return [_base_of(self._trainer, self.servers), adapter]

    @torch.no_grad()
    def _compute_fingerprints(self, tensors: list[ParameterSpec]) -> torch.Tensor:
        return of_stream(self._as_served(tensors), bool(self.servers.clients))

    def _as_served(self, tensors: list[ParameterSpec]) -> Iterator[Named]:
        """Yields the adapter as vLLM has it after reading the files: B is scaled in the server's
        dtype."""
        scales = _scales_of(self._trainer.model, tensors)
        dtype = getattr(torch, self.servers.info.lora.dtype)
        for number, (name, tensor) in enumerate(_adapter_of(self._trainer)):
            served = tensor.to(dtype)
            yield name, served * scales.get(number, 1)

    @torch.no_grad()
    def send(self, policy_version: int) -> int:
        tensors = {}
        for name, tensor in _adapter_of(self._trainer):
            if self.servers.clients:
                tensors[name] = tensor.detach().cpu().contiguous()
        self.servers.on_connected_ranks(lambda: self._push(tensors, policy_version))
        return sum(tensor.nbytes for tensor in tensors.values())

    def _push(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        # vLLM tells cached prefixes apart by the path: a version of an earlier training must not
        # have the same.
        unique = uuid.uuid4().hex[:8]
        path = self.folder / f"v{version}-{unique}"
        path.mkdir(parents=True)
        save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
        config = _config_of(self._trainer.model)
        config.save_pretrained(str(path))
        self._directories.append((version, path))
        self.servers.each_here(lambda client: client.swap_adapter(ADAPTER_NAME, str(path)))
        self._remove_unused()

    def _remove_unused(self) -> None:
        used = min(client.info().oldest_version_in_flight for client in self.servers.clients)
        for older, directory in self._directories[:-KEPT_VERSIONS]:
            if older < used:  # no request can ask for it any more
                shutil.rmtree(directory, ignore_errors=True)
                self._directories.remove((older, directory))


def _config_of(model: PeftModel) -> PeftConfig:
    """Returns the configuration of the adapter that is trained."""
    return model.peft_config[trained_adapter(model)]


def _as_json(config: PeftConfig) -> dict:
    """Returns a configuration of plain values: sets become lists, other objects `None`."""

    def plain(value: Any) -> list | None:
        return sorted(value) if isinstance(value, set) else None

    return json.loads(json.dumps(config.to_dict(), default=plain))


def _adapter_of(trainer: Any) -> Iterator[Named]:
    return iter_adapter_parameters(trainer.model, trainer.accelerator)


def _tensors_of(trainer: Any, servers: Servers) -> list[ParameterSpec]:
    """Returns the adapter's tensors, as the servers have them."""
    dtype = servers.info.lora.dtype
    specs = []
    for name, tensor in _adapter_of(trainer):
        specs.append(ParameterSpec.of(name, tensor.shape, dtype))
    return specs


def _scales_of(model: Any, tensors: list[ParameterSpec]) -> dict[int, float]:
    """Returns the factor of each B, by its number in `tensors`: alpha over rank, or as rsLoRA and
    patterns say. A factor of 1 is left out."""
    adapter = trained_adapter(unwrap(model))
    scales = {}  # by name
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        scale = float(module.scaling.get(adapter, 1.0))
        layer = plain_name(name)
        scales[f"{layer}.lora_B.weight"] = scale
        scales[f"{layer}.lora_embedding_B"] = scale
    factors = {}
    for number, spec in enumerate(tensors):
        scale = scales.get(spec.name, 1.0)
        if scale != 1.0:
            factors[number] = scale
    return factors


def _base_of(trainer: Any, servers: Servers) -> Fingerprinted:
    """Returns the frozen model below the adapter, which the server has loaded by itself."""
    # only models that went through a quantiser have the attribute
    if getattr(base_model(trainer.model), "is_quantized", False):
        reason = "the frozen base is quantised in the trainer"
        return Fingerprinted("weights", [], lambda: NO_FINGERPRINTS, left_out=reason)
    return fingerprinted_base(trainer, servers)


def _require_servable(model: Any, servers: Servers) -> None:
    """Raises `AttachError` if vLLM, or one of these servers, cannot serve the adapter."""
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
    adapter = tensors_of(model, trained_adapter(model))
    adapter_ids = {id(tensor) for tensor in adapter.values()}
    others = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in adapter_ids:
            others.append(name)
    if others:
        raise AttachError(
            f"{len(others)} parameters outside of the adapter are trained (first: {others[0]!r}), "
            f"which would never reach the server: use {MERGED}."
        )
    config = _config_of(model)
    rank = max([config.r, *config.rank_pattern.values()])
    if rank > served.max_rank:
        raise AttachError(
            f"The adapter's rank is {rank}, the server's largest {served.max_rank}: start the "
            f"server with `--max-lora-rank {rank}` or more, or lower `lora_r`."
        )
