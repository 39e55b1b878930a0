"""`vllm_mode: restart`: a checkpoint every few steps, and the server starts again on it.

The slowest way, and the one that needs the least of vLLM. Environments talk to a front, which holds their requests
while the engine behind it is away. The checkpoints must be readable where the front runs.
"""

import itertools
import shutil
from pathlib import Path
from typing import Any

import torch

from trl_atropos.distributed import together
from trl_atropos.server_client import Servers
from trl_atropos.weights.gather import base_model, buffers_of, iter_full_parameters
from trl_atropos.weights.transfer import Moved, Transfer

KEPT_VERSIONS = 2  # the one that is served, and the one before, to go back to


class Restart(Transfer):
    """
    Args:
        servers (`Servers`): Started by `trl-atropos serve --vllm_mode restart`.
        folder (`str`): Where the checkpoints go.
    """

    def __init__(self, servers: Servers, folder: str):
        super().__init__(servers)
        self.folder = Path(folder).absolute()

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer
        self._published: list[Path] = []

    def pause(self) -> None:
        """Takes as long as the requests in flight need to end."""
        self.servers.each(lambda client: client.drain())

    @torch.no_grad()
    def send(self, policy_version: int) -> Moved:
        state = {}
        dtype = getattr(torch, self.servers.info.dtype)
        parameters = iter_full_parameters(self._trainer.model, self._trainer.accelerator, dtype)
        for name, tensor in itertools.chain(parameters, buffers_of(self._trainer.model)):
            if self.servers.clients:
                state[name] = tensor.detach().cpu().clone()
        return together(lambda: self._push(state, policy_version))

    def _push(self, state: dict[str, torch.Tensor], version: int) -> Moved:
        if not self.servers.clients:
            return Moved()
        path = self.folder / f"v{version}"
        shutil.rmtree(path, ignore_errors=True)  # the same version twice: training began again
        base_model(self._trainer.model).save_pretrained(path, state_dict=state)
        self._trainer.processing_class.save_pretrained(path)
        self._published.append(path)
        seconds = self.servers.each_here(lambda client: client.restart(str(path)))
        return Moved(sum(tensor.nbytes for tensor in state.values()), max(seconds) * 1e3)

    def published(self, policy_version: int) -> None:
        """Keeps on disk only what is served and what can be gone back to, of earlier runs, too."""
        if self.servers.clients:
            kept = self._published = self._published[-KEPT_VERSIONS:]
            for path in set(self.folder.glob("v*")) - set(kept):
                shutil.rmtree(path, ignore_errors=True)
