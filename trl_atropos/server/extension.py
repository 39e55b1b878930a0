"""The worker extension: what runs inside every worker of the vLLM server (`--worker-extension-cls`).

vLLM mixes this class into its worker, so that `self` is the worker. Importing the module also registers the shared
loader, which happens before the model is built. Methods are reached through `collective_rpc` from `control.py` and
take and return plain JSON values.
"""

import torch
from vllm.config import set_current_vllm_config

from trl_atropos.protocol import Attachment, LoraInfo, ParameterSpec
from trl_atropos.server import layout, loader
from trl_atropos.server.adapters import AdapterReceiver, without_adapters
from trl_atropos.server.weights import WeightReceiver
from trl_atropos.tensors.channel import open_receiver
from trl_atropos.tensors.shared_memory import export_storage


class WorkerExtension:
    def trl_atropos_describe(self) -> dict:
        """What only the worker knows for certain about the engine."""
        config = self.vllm_config
        lora = config.lora_config
        if lora is not None:
            dtype = str(lora.lora_dtype).removeprefix("torch.")
            lora = LoraInfo(max_rank=lora.max_lora_rank, max_loras=lora.max_loras, dtype=dtype).model_dump()
        cuda = self.device.type == "cuda"
        return {
            "device": self.device.type,
            "device_uuid": str(torch.cuda.get_device_properties(self.device).uuid) if cuda else None,
            "num_workers": config.parallel_config.world_size,
            "block_size": config.cache_config.block_size,
            "lora": lora,
            "sleep": config.model_config.enable_sleep_mode,
            "refusals": _refusals(config, self.device.type),
        }

    def trl_atropos_attach(self, specs: list[dict]) -> dict:
        """Traces where each of the trainer's parameters lives here, and exports the memory behind them."""
        model = self.model_runner.get_model()
        parsed = [ParameterSpec.model_validate(spec) for spec in specs]
        with set_current_vllm_config(self.vllm_config), without_adapters(model):
            views, refused = layout.trace(model, parsed, self.device)
        storages = [export_storage(storage) for storage in layout.unique_storages(model).values()]
        return Attachment(storages=storages, views=views, refused=refused).model_dump()

    def trl_atropos_open_channel(self, specification: dict) -> None:
        """Joins the trainer's channel, in place of a former one."""
        parallel = self.vllm_config.parallel_config
        # Not `data_parallel_rank`, which is 0 in every replica of a dense model.
        rank = parallel.data_parallel_index * parallel.world_size + self.rank
        self._trl_atropos_channel = open_receiver(specification, rank, self.device)
        self._trl_atropos_weights = None
        self._trl_atropos_adapter = None

    def trl_atropos_load_weights(self, tensors: list[dict]) -> dict:
        if self._trl_atropos_weights is None:
            self._trl_atropos_weights = WeightReceiver(
                self.model_runner.get_model(), self.vllm_config, self._trl_atropos_channel
            )
        return self._trl_atropos_weights.load([ParameterSpec.model_validate(t) for t in tensors]).model_dump()

    def trl_atropos_finish_weights(self) -> list[str]:
        return self._trl_atropos_weights.finish()

    def trl_atropos_set_up_adapter(self, tensors: list[dict], config: dict) -> str | None:
        """Returns why vLLM cannot serve such an adapter, or nothing."""
        parsed = [ParameterSpec.model_validate(tensor) for tensor in tensors]
        try:
            self._trl_atropos_adapter = AdapterReceiver(self, self._trl_atropos_channel, parsed, config)
        except ValueError as error:
            return str(error)
        return None

    def trl_atropos_load_adapter(self, adapter_id: int) -> dict:
        return self._trl_atropos_adapter.load(adapter_id).model_dump()


def _refusals(config, device: str) -> list[str]:
    """Why this engine's weights cannot be trained in place, each with the way out."""
    parallel, found = config.parallel_config, []
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        found.append(
            f"it splits the model over {parallel.tensor_parallel_size} x {parallel.pipeline_parallel_size} devices "
            "(start it with --tensor-parallel-size 1 --pipeline-parallel-size 1)"
        )
    if config.model_config.quantization is not None:
        found.append(f"its weights are quantised ({config.model_config.quantization}); serve an unquantised model")
    if config.model_config.enable_sleep_mode:
        found.append("it was started with --enable-sleep-mode, whose memory cannot be shared; leave the flag out")
    if config.model_config.use_mla:
        found.append("multi-head latent attention keeps transformed copies of its weights; use another model")
    if device == "cpu" and config.load_config.load_format != loader.LOAD_FORMAT:
        found.append(f"it was not started with --load-format {loader.LOAD_FORMAT}; start it by `trl-atropos serve`")
    return found
