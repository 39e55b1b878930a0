"""The vLLM server's memory, per device, item by item."""

import torch

from trl_atropos.memory.case import Case, Process, ServerFlags
from trl_atropos.memory.plan import GIB
from trl_atropos.memory.tracing import shadow_model, trace_forward

# What its processes take before they have a model. CUDA: context, workspaces, NCCL, CUDA graphs.
RUNTIME = {"cuda": int(1.5 * GIB), "cpu": GIB}
PADDING = 64  # rows that a vocabulary is filled up to a multiple of (vllm `vocab_parallel_embedding.py`)


def server_memory(case: Case, traces: dict) -> Process:
    """
    With `gpu_memory_utilization`, vLLM gives to its KV cache what is left of that share of the device; its total is
    then known, and the items tell how it is divided.
    """
    flags, plan = case.server, case.plan
    parts = flags.tensor_parallel * flags.pipeline_parallel
    weights, adapter, activations = _traced(case, traces)
    items = {
        "runtime": RUNTIME[plan.device],
        "weights": weights // parts,
        # Sampling makes float32 of the logits, and their log-probabilities (vllm/v1/sample/sampler.py).
        "activations": activations // flags.tensor_parallel + 2 * 4 * flags.sequences * _vocabulary(case),
        "places for adapters": flags.max_loras * adapter // parts,
    }
    host = {"adapters": flags.max_cpu_loras * adapter}
    if plan.device == "cpu":
        items["places for adapters"] += host.pop("adapters")
    if flags.kv_cache_bytes is not None:
        items["KV cache"] = flags.kv_cache_bytes
    else:
        items["KV cache"] = max(0, int(flags.utilization * plan.total) - sum(items.values()))
    return Process("server", {name: size for name, size in items.items() if size}, host, "always")


def smallest_cache(case: Case) -> int:
    """Bytes of KV cache per device that one sequence of the greatest length takes, below which vLLM does not start."""
    text, flags = case.config.get_text_config(), case.server
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads  # only some configs have it
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * head * flags.dtype.itemsize
    return token * flags.max_model_len // (flags.tensor_parallel * flags.pipeline_parallel)


def _traced(case: Case, traces: dict) -> tuple[int, int, int]:
    """Bytes of the weights, of one adapter of the greatest rank, and of the activations of a full batch."""
    flags = case.server
    key = ("server", flags.dtype, flags.batched_tokens, flags.max_model_len, flags.max_lora_rank)
    if key not in traces:
        model, mode = shadow_model(case.config, flags.dtype, **case.model_settings)
        traces[key] = (
            _weights(model),
            _adapter(model, flags),
            trace_forward(model, mode, flags.batched_tokens, flags.max_model_len),
        )
    return traces[key]


def _weights(model: torch.nn.Module) -> int:
    ends = {id(one.weight): one.weight for one in (model.get_input_embeddings(), model.get_output_embeddings())}
    filled = sum(-weight.shape[0] % PADDING * weight.shape[1] * weight.itemsize for weight in ends.values())
    return filled + sum(parameter.nbytes for parameter in model.parameters())


def _adapter(model: torch.nn.Module, flags: ServerFlags) -> int:
    """Of every linear layer but the head (vllm/lora/layers/base_linear.py, `create_lora_weights`)."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return sum(m.in_features + m.out_features for m in linear) * flags.max_lora_rank * flags.dtype.itemsize


def _vocabulary(case: Case) -> int:
    return case.config.get_text_config().vocab_size
