"""The worker extension: what runs inside every worker of the vLLM server (`--worker-extension-cls`).

vLLM mixes this class into its worker, so that `self` is the worker. Importing the module also registers the shared
loader, which happens before the model is built. Methods are reached through `collective_rpc` from `control.py` and
take and return plain JSON values.
"""

from vllm.config import set_current_vllm_config

from trl_atropos.protocol import Attachment, ParameterSpec
from trl_atropos.server import layout, loader
from trl_atropos.transport import export_storage


class WorkerExtension:
    def trl_atropos_describe(self) -> dict:
        """What only the worker knows for certain about the engine."""
        config = self.vllm_config
        return {
            "device": self.device.type,
            "block_size": config.cache_config.block_size,
            "refusals": _refusals(config, self.device.type),
        }

    def trl_atropos_attach(self, specs: list[dict]) -> dict:
        """Traces where each of the trainer's parameters lives here, and exports the memory behind them."""
        model = self.model_runner.get_model()
        parsed = [ParameterSpec.model_validate(spec) for spec in specs]
        with set_current_vllm_config(self.vllm_config):
            views, refused = layout.trace(model, parsed, self.device)
        storages = [] if refused else [export_storage(s) for s in layout.unique_storages(model).values()]
        return Attachment(storages=storages, views=views, refused=refused).model_dump()


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
    if config.lora_config is not None:
        found.append("it was started with --enable-lora; leave the flag out")
    if config.model_config.use_mla:
        found.append("multi-head latent attention keeps transformed copies of its weights; use another model")
    if device == "cpu" and config.load_config.load_format != loader.LOAD_FORMAT:
        found.append(f"it was not started with --load-format {loader.LOAD_FORMAT}; start it by `trl-atropos serve`")
    return found
