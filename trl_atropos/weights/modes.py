"""The modes: what each value of `vllm_mode` is, and the publisher that a configuration names."""

from trl_atropos.config import AtroposGRPOConfig
from trl_atropos.weights.colocate import Colocate
from trl_atropos.weights.fence import ServerPublisher
from trl_atropos.weights.file_lora import FileLora
from trl_atropos.weights.full_weights import FullWeights
from trl_atropos.weights.memory_lora import MemoryLora
from trl_atropos.weights.publisher import NullPublisher, PolicyPublisher
from trl_atropos.weights.restart import Restart
from trl_atropos.weights.servers import Servers
from trl_atropos.weights.transfer import Transfer


def transfer_of(mode: str, servers: Servers, transport: str, output_dir: str) -> Transfer:
    """The transfer of a mode. `output_dir` is for those that write files."""
    if mode == "colocate":
        return Colocate(servers)
    if mode == "server":
        return FullWeights(servers, transport)
    if mode == "nccl_lora":
        return MemoryLora(servers, transport)
    if mode == "lora":
        return FileLora(servers, f"{output_dir}/adapters")
    assert mode == "restart", mode
    return Restart(servers, f"{output_dir}/policies")


def publisher_of(args: AtroposGRPOConfig) -> PolicyPublisher:
    """The policy publisher that the configuration names."""
    if args.replay_paths is not None:
        return NullPublisher()
    servers = Servers(args.vllm_server_urls, args.publish_timeout)
    return ServerPublisher(
        transfer_of(args.vllm_mode, servers, args.weight_transport, args.output_dir),
        args.probe_every_n_steps,
        args.sync_every_n_steps,
        args.vllm_sleep_level if args.vllm_enable_sleep_mode else 0,
    )
