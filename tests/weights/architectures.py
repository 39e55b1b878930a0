"""Model families made tiny on the spot, and what happens when each is trained against vLLM.

python -m tests.weights.architectures [FAMILY ...] [--write trl_atropos/weights/ARCHITECTURES.md]

Every family gets a process of its own with a whole vLLM engine in it, which is checked by what it computes: the
log-probabilities that it gives to random prompts are compared with those of the Hugging Face model, as loaded, after
its weights were changed in place (where the family attaches), and after they were changed and loaded by name.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from tests.server_process import ENVIRONMENT as SERVER_ENVIRONMENT

SECONDS_PER_FAMILY = 120
ENVIRONMENT = {
    **SERVER_ENVIRONMENT,
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
HEADER = """\
# Which model families are trained in the server's memory

Made by `python -m tests.weights.architectures --write trl_atropos/weights/ARCHITECTURES.md`, on the CPU with
vLLM {vllm} and transformers {transformers}, from tiny models with random float32 weights.

| family | class | parameters | how | error (nats) | why not a single copy |
|---|---|---|---|---|---|
"""

BASE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WITH_HEAD_DIM = {**BASE, "head_dim": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    **BASE,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


@dataclass(frozen=True)
class Family:
    """`expected`: "single copy", "copy" or "none", on the CPU. `tolerance`: in nats; vLLM may compute otherwise."""

    model_type: str
    fields: dict
    expected: str = "single copy"
    tolerance: float = 1e-4


FAMILIES = {
    "Qwen2": Family("qwen2", {**BASE, "tie_word_embeddings": True}),
    "Qwen3": Family("qwen3", {**WITH_HEAD_DIM, "tie_word_embeddings": True}),
    "Llama": Family("llama", BASE),
    "Mistral": Family("mistral", {**BASE, "sliding_window": None}),
    "Ministral": Family("ministral", {**WITH_HEAD_DIM, "sliding_window": 16}),
    "Gemma": Family("gemma", WITH_HEAD_DIM),
    "Gemma 2": Family("gemma2", {**WITH_HEAD_DIM, "query_pre_attn_scalar": 32}),
    "Gemma 3": Family("gemma3_text", {**WITH_HEAD_DIM, "query_pre_attn_scalar": 32}),
    "Phi 2": Family("phi", {**BASE, "num_key_value_heads": 4}, "copy"),
    "Phi-3": Family("phi3", {**BASE, "tie_word_embeddings": False}),
    "GPT-2": Family("gpt2", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "GPT-J": Family("gptj", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 16}),
    "GPT-BigCode": Family("gpt_bigcode", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "GPT-NeoX": Family("gpt_neox", {**BASE, "num_key_value_heads": 4}),
    "OPT": Family(
        "opt",
        {
            "hidden_size": 128,
            "word_embed_proj_dim": 128,
            "ffn_dim": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
        },
    ),
    "OLMo": Family("olmo", BASE),
    "OLMo 2": Family("olmo2", BASE),
    "OLMo 3": Family("olmo3", BASE),
    "OLMoE": Family("olmoe", {**BASE, "num_experts": 4, "num_experts_per_tok": 2}),
    "Granite": Family("granite", BASE),
    "GraniteMoE": Family("granitemoe", {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Cohere": Family("cohere", BASE),
    "Cohere 2": Family("cohere2", BASE),
    "StarCoder 2": Family("starcoder2", BASE),
    "StableLM": Family("stablelm", BASE),
    "SmolLM3": Family("smollm3", BASE),
    "GLM": Family("glm", WITH_HEAD_DIM),
    "GLM-4": Family("glm4", WITH_HEAD_DIM),
    "Nemotron": Family("nemotron", WITH_HEAD_DIM),
    "EXAONE 4": Family("exaone4", {**WITH_HEAD_DIM, "sliding_window": 64, "sliding_window_pattern": 2}),
    "ERNIE 4.5": Family("ernie4_5", WITH_HEAD_DIM),
    "Hunyuan": Family("hunyuan_v1_dense", WITH_HEAD_DIM),
    "Seed-OSS": Family("seed_oss", WITH_HEAD_DIM),
    "Qwen2-MoE": Family("qwen2_moe", {**BASE, **EXPERTS, "shared_expert_intermediate_size": 64}),
    "Qwen3-MoE": Family("qwen3_moe", {**WITH_HEAD_DIM, **EXPERTS, "decoder_sparse_step": 1}),
    "Mixtral": Family("mixtral", {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "GPT-OSS": Family("gpt_oss", {**WITH_HEAD_DIM, "num_local_experts": 4, "num_experts_per_tok": 2}, "copy"),
    "Qwen3-Next": Family(
        "qwen3_next",
        {
            **WITH_HEAD_DIM,
            **EXPERTS,
            "shared_expert_intermediate_size": 64,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "none",
    ),
    "BLOOM": Family("bloom", {"hidden_size": 128, "n_layer": 2, "n_head": 4}, "copy", 1e-3),
    "Falcon": Family(
        "falcon",
        {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "new_decoder_architecture": False,
            "multi_query": True,
        },
        "copy",
    ),
    "Mamba": Family("mamba", {"hidden_size": 128, "num_hidden_layers": 2, "state_size": 16}, "none"),
    "DeepSeek-V2": Family("deepseek_v2", LATENT, "none"),
    "DeepSeek-V3": Family("deepseek_v3", {**LATENT, "topk_method": "noaux_tc"}, "none"),
    "Llama 4": Family(
        "llama4_text",
        {
            **WITH_HEAD_DIM,
            "intermediate_size_mlp": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 128,
        },
        "copy",
    ),
}


@dataclass
class Row:
    """What the check of one family found. `how` is "single copy", "copy" or "none"."""

    family: str
    hf_class: str = ""
    parameters: int = 0
    how: str = "none"
    loading: str = ""  # what the copy takes: "load_weights" or "layerwise reload"
    reason: str = ""  # why not a single copy, or why not at all
    error: float = 0.0  # largest difference of log-probabilities, in nats, over all comparisons


def make_model(family: Family, folder: Path) -> None:
    """Saves a tiny model with random weights (none of them zero or one), and a byte-level tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from recipes.quickstart.make_model import byte_tokenizer

    tokenizer = byte_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(family.model_type, **{"vocab_size": len(tokenizer), **ids, **family.fields})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    change(dict(model.named_parameters()), seed=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def change(parameters: dict, seed: int) -> None:
    """Moves every parameter in place, far enough that every one of them shows in the log-probabilities."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def check(name: str, folder: Path) -> Row:
    """Takes the family through attach and copy in this process, which is of no use for another one afterwards."""
    from transformers import AutoModelForCausalLM

    from tests.weights.engine import Engine

    make_model(FAMILIES[name], folder)
    # Eager, because the other attentions of transformers leave out Gemma 2's soft cap.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager").eval()
    row = Row(name, type(model).__name__, sum(parameter.numel() for parameter in model.parameters()))
    engine = Engine(folder)
    _agree(engine, model, row, "as loaded")
    refused = engine.attach(model)
    if refused:
        first, reason = next(iter(refused.items()))
        row.reason = f"{len(refused)} of {len(list(model.parameters()))}: `{first}`: {reason}"
    else:
        change(dict(model.named_parameters()), seed=2)
        _agree(engine, model, row, "after a change in place")
    try:
        row.loading = _copy(engine, model, row)
        row.how = "copy" if row.reason else "single copy"
    except Disagreement as error:
        row.reason += f"; {error}"
    return row


class Disagreement(Exception):
    """vLLM and transformers compute different log-probabilities."""


def _agree(engine, model, row: Row, when: str) -> None:
    difference = engine.difference(model)
    if not difference <= FAMILIES[row.family].tolerance:
        raise Disagreement(f"{when}, vLLM and transformers differ by {difference:.2g} nats")
    row.error = max(row.error, difference)


def _copy(engine, model, row: Row) -> str:
    """Loads changed weights by their checkpoint names. Returns what that took."""
    import torch

    changed = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    change(changed, seed=3)
    engine.load(model, changed, layerwise=False)
    if row.reason:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(changed[name])
    else:
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, changed[name]), f"{name} was not loaded to where it was traced"
    if engine.difference(model) > FAMILIES[row.family].tolerance:
        engine.load(model, changed, layerwise=True)
        _agree(engine, model, row, "after a layerwise reload")
        return "layerwise reload"
    _agree(engine, model, row, "after loading by name")
    return "load_weights"


def rows(names: list[str]) -> Iterator[Row]:
    """Checks one family after the other, each in a process that is forked from one that has imported everything."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.weights.architectures", "tests.weights.engine"])
    for name in names:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_check_and_send, args=(name, sender))
        process.start()
        sender.close()
        yield _receive(name, receiver, process)


def _check_and_send(name: str, sender: Connection) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            sender.send(check(name, Path(folder)))
        except Exception as error:  # noqa: BLE001 - whatever a family raises is its row of the table
            traceback.print_exc()
            sender.send(Row(name, reason=f"{type(error).__name__}: {error}"[:300]))


def _receive(name: str, receiver: Connection, process: multiprocessing.Process) -> Row:
    try:
        if receiver.poll(SECONDS_PER_FAMILY):
            return receiver.recv()
        return Row(name, reason=f"no result after {SECONDS_PER_FAMILY} s")
    except EOFError:
        process.join()
        return Row(name, reason=f"the process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def table(found: list[Row]) -> str:
    import transformers
    import vllm

    lines = [HEADER.format(vllm=vllm.__version__, transformers=transformers.__version__)]
    for row in found:
        loading = f" ({row.loading})" if row.how == "copy" else ""
        error = f"{row.error:.1e}" if row.how != "none" else ""
        reason = row.reason.replace("|", "/").replace("\n", " ")
        lines.append(
            f"| {row.family} | {row.hf_class} | {row.parameters:,} | {row.how}{loading} | {error} | {reason} |\n"
        )
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help="names of the table's first column")
    parser.add_argument("--write", type=Path, help="file for the table")
    parser.add_argument("--json", type=Path, help="file for the rows as they are")
    options = parser.parse_args()
    found = []
    for row in rows(options.families):
        print(f"{row.family}: {row.how} {row.loading} {row.error:.1e} {row.reason}", flush=True)
        found.append(row)
    if options.write:
        options.write.write_text(table(found), encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found]), encoding="utf-8")


if __name__ == "__main__":
    main()
