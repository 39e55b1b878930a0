"""`vllm_mode: lora`: an adapter directory per version, which the server loads by vLLM's own HTTP routes.

For a server that knows nothing of this package but its middleware. The directories must be readable where the server
runs, under the same path. A name is unloaded and loaded again under a pause, always from a new directory: vLLM's
`load_inplace` would read the files again at every step of the engine, and end it when they are gone.
"""

import logging
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trl_atropos.protocol import ADAPTER_NAME
from trl_atropos.weights import ranks
from trl_atropos.weights.gather import iter_adapter_parameters
from trl_atropos.weights.memory_lora import ADAPTER, check_is_adapter, check_servable
from trl_atropos.weights.servers import Servers
from trl_atropos.weights.transfer import Moved, Transfer

logger = logging.getLogger(__name__)

KEPT_VERSIONS = 2  # directories, besides those that requests in flight still use


class FileLora(Transfer):
    """
    Args:
        servers (`Servers`): Started with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.
        folder (`str`): Where the directories go.
    """

    clear_cache = False  # a new directory means new prefixes, and what is in flight keeps its adapter

    def __init__(self, servers: Servers, folder: str):
        super().__init__(servers)
        self.folder = Path(folder).absolute()
        self._directories: list[tuple[int, Path]] = []  # with their versions, the oldest first

    def load(self, model: Any, args: Any, peft_config: Any) -> tuple[Transfer, Any]:
        self.servers.connect()
        check_is_adapter(model, peft_config)
        # vLLM before 0.32 tells cached prefixes apart by the adapter's name alone, which stays the same.
        self.clear_cache = any(not info.prefixes_by_path for info in self.servers.infos)
        return self, model

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer
        check_servable(trainer.model, self.servers)
        ranks.on_main(lambda: shutil.rmtree(self.folder, ignore_errors=True))  # of a former run

    @torch.no_grad()
    def send(self, policy_version: int) -> Moved:
        tensors = {}
        for name, tensor in iter_adapter_parameters(self._trainer.model, self._trainer.accelerator):
            if self.servers.clients:
                tensors[name] = tensor.detach().cpu().contiguous()
        return ranks.together(lambda: self._push(tensors, policy_version)) or Moved()

    def _push(self, tensors: dict[str, torch.Tensor], version: int) -> Moved | None:
        if not self.servers.clients:
            return None
        # vLLM tells cached prefixes apart by the path: a version of a former training must not have the same.
        path = self.folder / f"v{version}-{uuid.uuid4().hex[:8]}"
        path.mkdir(parents=True)
        save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
        self._trainer.model.peft_config[ADAPTER].save_pretrained(str(path))
        self._directories.append((version, path))
        seconds = self.servers.each_here(lambda client: client.swap_adapter(ADAPTER_NAME, str(path)))
        return Moved(sum(tensor.nbytes for tensor in tensors.values()), max(seconds) * 1e3)

    def published(self, policy_version: int) -> None:
        """Removes directories that no request can ask for any more."""
        if not self.servers.clients:
            return
        used = min(client.oldest_version_in_flight() for client in self.servers.clients)
        for directory in self._directories[:-KEPT_VERSIONS]:
            version, path = directory
            if version < used:
                shutil.rmtree(path, ignore_errors=True)
                self._directories.remove(directory)
