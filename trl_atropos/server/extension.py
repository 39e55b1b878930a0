"""Runs inside every worker of the vLLM server: says what the engine is, shares the model's memory,
and does what the trainer asks for. Weights arrive in `weight_receiver.py`, adapters in
`adapter_receiver.py`, and `proof.py` computes what a publish is proven by.

vLLM mixes `WorkerExtension` into its worker (`--worker-extension-cls`), so that `self` is the
worker. `control.py` calls its methods through `collective_rpc`; they take and return plain JSON
values. Importing this module also registers the loader of `shared_arena.py`, before the model is
built.
"""

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.request import LoRARequest

from trl_atropos.privacy import close_to_others
from trl_atropos.protocol import Attachment, ParameterSpec
from trl_atropos.server import compat, layout, shared_arena
from trl_atropos.server.adapter_receiver import AdapterReceiver
from trl_atropos.server.layout import Piece
from trl_atropos.server.plugin import patch_engine
from trl_atropos.server.proof import Constants, fingerprints_of
from trl_atropos.server.weight_receiver import WeightReceiver, needs_reload
from trl_atropos.tensors.channel import Channel, open_receiver
from trl_atropos.tensors.fingerprint import Fingerprints, joined
from trl_atropos.tensors.shared_memory import export_storage

# The engine, too, runs in this process, unless the server has several workers. Then its own process
# loads the plugin, which needs an installed package.
patch_engine()
if compat.is_batch_invariant():
    compat.keep_batch_invariant()


class WorkerExtension:
    """Methods that vLLM's worker gets, whose attributes are used here. No constructor runs."""

    _trl_atropos_channel: Channel | None = None
    _trl_atropos_weights: WeightReceiver | None = None
    _trl_atropos_adapter: AdapterReceiver | None = None
    _trl_atropos_fingerprints: Fingerprints | None = None  # of the weights
    _trl_atropos_places: dict[str, tuple] | None = None  # of the parameters when they were traced
    _trl_atropos_constants: Constants | None = None

    def trl_atropos_describe(self) -> dict:
        """Returns facts about the engine that only a worker knows for certain."""
        config = self.vllm_config
        device_uuid = None
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            device_uuid = str(properties.uuid)
        lora = None
        lora_config = config.lora_config
        if lora_config is not None:
            lora = {
                "max_rank": lora_config.max_lora_rank,
                "max_loras": lora_config.max_loras,
                "dtype": str(lora_config.lora_dtype).removeprefix("torch."),
            }
        return {
            "device": self.device.type,
            "device_uuid": device_uuid,
            "num_workers": config.parallel_config.world_size,
            "block_size": config.cache_config.block_size,
            "lora": lora,
            "sleep": config.model_config.enable_sleep_mode,
            "refusals": _refusals(config, self.device.type),
        }

    def trl_atropos_close(self) -> None:
        """Closes this process to others of the same user. On a GPU it stays open: the trainer, or
        another worker, may have to open its memory."""
        if self.device.type == "cpu":
            close_to_others()

    def trl_atropos_attach(self, specs: list[dict]) -> dict:
        """Finds where each of the trainer's parameters lives here, and exports the memory behind
        them."""
        model = self.model_runner.get_model()
        parameters = _parsed(specs)
        with set_current_vllm_config(self.vllm_config), compat.without_adapters(model):
            views, refused = layout.trace(model, parameters, self.device)
        storages = layout.unique_storages(model)
        handles = [export_storage(storage) for storage in storages.values()]
        attachment = Attachment(storages=handles, views=views, refused=refused)
        return attachment.model_dump()

    def trl_atropos_trace(self, of: str, specs: list[dict], adapter: list | None) -> dict:
        """Finds the parts of the trainer's weights that this worker keeps, or those of the adapter
        that it has loaded. Returns them parameter by parameter, and by name why it keeps none."""
        specs = _parsed(specs)
        if of == "adapter":
            receiver = self._trl_atropos_adapter
            if receiver is None or receiver.tensors != specs:  # the adapter came as files
                receiver = AdapterReceiver(self, specs, {"target_modules": []})
                self._trl_atropos_adapter = receiver
            request = LoRARequest(*adapter)
            pieces = receiver.pieces(request)
            refused = {}
        else:
            pieces, refused = self._trl_atropos_trace_weights(specs)
            self._trl_atropos_fingerprints = fingerprints_of(pieces, specs)
        parts = []
        for parameter_pieces in pieces:
            parts.append([part for _, part in parameter_pieces])
        return {"parts": parts, "refused": refused}

    def _trl_atropos_trace_weights(
        self, specs: list[ParameterSpec]
    ) -> tuple[list[list[Piece]], dict[str, str]]:
        reason = shared_arena.refusal_of_packed_layers()
        if reason is None and needs_reload(self.vllm_config, self.device):
            reason = "vLLM transforms its weights after loading them"
        if reason is not None:
            pieces = [[] for _ in specs]
            refused = {spec.name: reason for spec in specs}
            return pieces, refused
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), compat.without_adapters(model):
            pieces, refused = layout.pieces_of(model, specs)
            refused |= layout.unnamed(model, pieces)
            self._trl_atropos_places = layout.places_of(model)
            if self._trl_atropos_constants is None:
                self._trl_atropos_constants = Constants(model, self.device)
        return pieces, refused

    def trl_atropos_inspect(self) -> dict:
        """Returns whether the model's parameters have `moved` since they were traced, and the names
        of constants that `changed`."""
        if self._trl_atropos_constants is None:  # nothing of this model can be compared
            return {"moved": False, "changed": []}
        model = self.model_runner.get_model()
        with compat.without_adapters(model):
            moved = layout.places_of(model) != self._trl_atropos_places
            changed = self._trl_atropos_constants.changed(model)
        return {"moved": moved, "changed": changed}

    def trl_atropos_fingerprints(self, of: str, adapter: list | None) -> list[int]:
        """Returns the fingerprint of each part that `trl_atropos_trace` found, in that order."""
        fingerprints = self._trl_atropos_fingerprints
        if of == "adapter":
            request = LoRARequest(*adapter)
            fingerprints = self._trl_atropos_adapter.fingerprints(request)
        sums = fingerprints.compute()
        return joined(sums)

    def trl_atropos_open_channel(self, specification: dict) -> None:
        """Joins the trainer's channel, in place of an earlier one."""
        parallel = self.vllm_config.parallel_config
        # Not `data_parallel_rank`, which is 0 in every replica of a dense model.
        rank = parallel.data_parallel_index * parallel.world_size + self.rank
        self._trl_atropos_channel = open_receiver(specification, rank, self.device)
        self._trl_atropos_weights = None
        self._trl_atropos_adapter = None

    def trl_atropos_load_weights(self, tensors: list[dict]) -> None:
        """Receives one message of weights and loads it."""
        if self._trl_atropos_weights is None:
            model = self.model_runner.get_model()
            self._trl_atropos_weights = WeightReceiver(
                model, self.vllm_config, self._trl_atropos_channel
            )
        self._trl_atropos_weights.load(_parsed(tensors))

    def trl_atropos_load_weights_again(self, messages: list[int]) -> None:
        """Receives messages that were loaded before, and loads them."""
        self._trl_atropos_weights.load_again(messages)

    def trl_atropos_finish_weights(self) -> list[str]:
        """Returns vLLM's names of the parameters that nothing was loaded into."""
        return self._trl_atropos_weights.finish()

    def trl_atropos_set_up_adapter(self, tensors: list[dict], config: dict) -> str | None:
        """Returns why vLLM cannot serve such an adapter, or None."""
        try:
            self._trl_atropos_adapter = AdapterReceiver(self, _parsed(tensors), config)
        except ValueError as error:
            return str(error)
        return None

    def trl_atropos_load_adapter(self, adapter_id: int) -> None:
        """Receives the adapter's next version under `adapter_id`."""
        self._trl_atropos_adapter.load(adapter_id)


def _parsed(specs: list[dict]) -> list[ParameterSpec]:
    return [ParameterSpec.model_validate(spec) for spec in specs]


def _refusals(config: VllmConfig, device: str) -> list[str]:
    """Returns why this engine's weights cannot be trained in place, each with the way out."""
    parallel = config.parallel_config
    model = config.model_config
    refusals = []
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        refusals.append(
            f"it splits the model over {parallel.tensor_parallel_size} x "
            f"{parallel.pipeline_parallel_size} devices (start it with --tensor-parallel-size 1 "
            "--pipeline-parallel-size 1)"
        )
    if model.quantization is not None:
        refusals.append(
            f"its weights are quantised ({model.quantization}); serve an unquantised model"
        )
    if model.enable_sleep_mode:
        refusals.append(
            "it was started with --enable-sleep-mode, whose memory cannot be shared; leave the "
            "flag out"
        )
    if model.use_mla:
        refusals.append(
            "multi-head latent attention keeps transformed copies of its weights; use another model"
        )
    if device == "cpu" and config.load_config.load_format != shared_arena.LOAD_FORMAT:
        refusals.append(
            f"it was not started with --load-format {shared_arena.LOAD_FORMAT}; start it by "
            "`trl-atropos serve`"
        )
    packed = shared_arena.refusal_of_packed_layers()
    if packed is not None:
        refusals.append(packed)
    return refusals
