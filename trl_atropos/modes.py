"""The values of `vllm_mode`, by which new weights reach a vLLM server, and their properties.

Settings, recipe, check, services, server and trainer look a mode up in `MODES` and ask for its
properties, instead of comparing names. Only `transfer_of` in `weights/publisher.py` compares names:
it makes each mode's `Transfer`. So a new mode needs an entry here and a case there.
"""

from dataclasses import dataclass
from typing import Literal

# How an adapter reaches the servers: merged into the weights, or alone, as an adapter. None: there
# are no servers.
AdapterWay = Literal["merged", "alone"] | None


@dataclass(frozen=True)
class Mode:
    """
    Properties of one `vllm_mode`.

    Attributes:
        name (`str`): The value of `vllm_mode`.
        adapter_way (`AdapterWay`): How an adapter of the run reaches the servers.
        needs_adapter (`bool`): Sends nothing but an adapter, so that the run must have one.
        shares_memory (`bool`): The trainer's weights are the server's memory. Every process of the
            trainer then has a server of its own on its device, and its weights cannot be sharded.
        uses_transport (`bool`): Sends messages by the `weight_transport`.
        loads_files (`bool`): Servers load an adapter's folder while they run.
        restarts_engine (`bool`): A front before the server restarts it on a checkpoint of the whole
            model, which every publish writes.
    """

    name: str
    adapter_way: AdapterWay
    needs_adapter: bool = False
    shares_memory: bool = False
    uses_transport: bool = False
    loads_files: bool = False
    restarts_engine: bool = False


COLOCATE = Mode("colocate", adapter_way="alone", shares_memory=True)
SERVER = Mode("server", adapter_way="merged", uses_transport=True)
NCCL_LORA = Mode("nccl_lora", adapter_way="alone", needs_adapter=True, uses_transport=True)
LORA = Mode("lora", adapter_way="alone", needs_adapter=True, loads_files=True)
RESTART = Mode("restart", adapter_way="merged", restarts_engine=True)

MODES = {mode.name: mode for mode in (COLOCATE, SERVER, NCCL_LORA, LORA, RESTART)}
