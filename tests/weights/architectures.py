"""Model families made tiny on the spot, and what happens when each is trained against vLLM.

python -m tests.weights.architectures [FAMILY[/DTYPE] ...] [--rows FILE] [--write
trl_atropos/weights/ARCHITECTURES.md]

Every row gets a process of its own with a whole vLLM engine in it. A trainer with default settings
takes a step and publishes it, first in `colocate` and then in `server`, and then the
log-probabilities that both sides give to random prompts are compared. Rows that `--rows` has
already are not made again, so that a run can go on where it was cut.
"""

import argparse
import faulthandler
import importlib
import json
import logging
import multiprocessing
import os
import random
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

from tests.server_process import ENVIRONMENT as SERVER_ENVIRONMENT

SECONDS_PER_ROW = 180
FAILED: list[Exception] = []  # kept: an engine that is freed half made hangs
DTYPES = ("float32", "bfloat16")
MODES = ("colocate", "server")
MEASURED = ("shared", "copied", "sent")
# nats, on any token and in the mean
TOLERANCES = {"float32": (1e-4, 1e-4), "bfloat16": (0.2, 0.02)}
ENVIRONMENT = {
    **SERVER_ENVIRONMENT,
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
HEADER = """\
# Which model families are trained in the server's memory

Made by `python -m tests.weights.architectures --write trl_atropos/weights/ARCHITECTURES.md`, on a CPU with AMX, with
vLLM {vllm} and transformers {transformers}, from tiny models with random weights. Each was loaded as a run loads it
and trained for one step of AdamW, and the number is the largest difference between the log-probabilities of server
and trainer after that, in nats. With bfloat16, both sides round, each in its own order.

*shared*: one memory in `colocate`. *copied*: `colocate` copies on the device after each step. *sent*: all weights go
to a server elsewhere (`vllm_mode: server`). *refused*: the run stops before it trains on anything wrong.

| family | class | `colocate`, float32 | bfloat16 | `server`, float32 | bfloat16 | why not shared or sent |
|---|---|---|---|---|---|---|
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
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
GRANITE_4 = {
    **BASE,
    **MAMBA,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 64,
    "layer_types": ["mamba", "attention"],
}
BARE_LOSS = {"settings": {"router_aux_loss_coef": 0.0}}  # the trainer refuses the family otherwise
LATENT = {
    **BASE,
    **ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


@dataclass(frozen=True)
class Family:
    """`expected`: "shared", "copied" or "refused", in float32. `settings`: of the trainer, beside
    its defaults."""

    model_type: str
    fields: dict
    expected: str = "shared"
    settings: dict = field(default_factory=dict)


FAMILIES = {
    "Qwen2": Family("qwen2", {**BASE, "tie_word_embeddings": True}),
    "Qwen3": Family("qwen3", {**WITH_HEAD_DIM, "tie_word_embeddings": True}),
    "Llama": Family("llama", BASE),
    "Mistral": Family("mistral", {**BASE, "sliding_window": None}),
    "Ministral": Family("ministral", {**WITH_HEAD_DIM, "sliding_window": 16}),
    "Gemma": Family("gemma", WITH_HEAD_DIM),
    "Gemma 2": Family("gemma2", {**WITH_HEAD_DIM, "query_pre_attn_scalar": 32}),
    "Gemma 3": Family("gemma3_text", {**WITH_HEAD_DIM, "query_pre_attn_scalar": 32}),
    "Phi 2": Family("phi", {**BASE, "num_key_value_heads": 4}, "copied"),
    "Phi-3": Family("phi3", {**BASE, "tie_word_embeddings": False}),
    "GPT-2": Family("gpt2", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "GPT-J": Family(
        "gptj", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 16}
    ),
    "GPT-BigCode": Family(
        "gpt_bigcode", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256}
    ),
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
    "GraniteMoE": Family(
        "granitemoe", {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2}, **BARE_LOSS
    ),
    "Cohere": Family("cohere", BASE),
    "Cohere 2": Family("cohere2", BASE),
    "StarCoder 2": Family("starcoder2", BASE),
    "StableLM": Family("stablelm", BASE),
    "SmolLM3": Family("smollm3", BASE),
    "GLM": Family("glm", WITH_HEAD_DIM),
    "GLM-4": Family("glm4", WITH_HEAD_DIM),
    "Nemotron": Family("nemotron", WITH_HEAD_DIM),
    "EXAONE 4": Family(
        "exaone4", {**WITH_HEAD_DIM, "sliding_window": 64, "sliding_window_pattern": 2}
    ),
    "ERNIE 4.5": Family("ernie4_5", WITH_HEAD_DIM),
    "Hunyuan": Family("hunyuan_v1_dense", WITH_HEAD_DIM),
    "Seed-OSS": Family("seed_oss", WITH_HEAD_DIM),
    "Qwen2-MoE": Family("qwen2_moe", {**BASE, **EXPERTS, "shared_expert_intermediate_size": 64}),
    "Qwen3-MoE": Family("qwen3_moe", {**WITH_HEAD_DIM, **EXPERTS, "decoder_sparse_step": 1}),
    "Mixtral": Family("mixtral", {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "GPT-OSS": Family(
        "gpt_oss", {**WITH_HEAD_DIM, "num_local_experts": 4, "num_experts_per_tok": 2}, "copied"
    ),
    "Qwen3-Next": Family(
        "qwen3_next",
        {
            **WITH_HEAD_DIM,
            **EXPERTS,
            "shared_expert_intermediate_size": 64,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "refused",
    ),
    "BLOOM": Family("bloom", {"hidden_size": 128, "n_layer": 2, "n_head": 4}, "refused"),
    "Falcon": Family(
        "falcon",
        {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "new_decoder_architecture": False,
            "multi_query": True,
        },
        "copied",
    ),
    "Mamba": Family(
        "mamba", {"hidden_size": 128, "num_hidden_layers": 2, "state_size": 16}, "refused"
    ),
    "DeepSeek-V2": Family("deepseek_v2", LATENT, "refused"),
    "DeepSeek-V3": Family("deepseek_v3", {**LATENT, "topk_method": "noaux_tc"}, "refused"),
    "Mamba 2": Family(
        "mamba2",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            # with more, vLLM normalises each for itself and transformers all together
            "n_groups": 1,
            "chunk_size": 32,
        },
        "copied",
    ),
    "Granite 4 (hybrid)": Family(
        "granitemoehybrid", {**GRANITE_4, "num_local_experts": 0}, "copied", **BARE_LOSS
    ),
    "Granite 4 (hybrid, experts)": Family(
        "granitemoehybrid", {**GRANITE_4, "num_local_experts": 4}, "copied", **BARE_LOSS
    ),
    "Falcon-H1": Family("falcon_h1", {**BASE, **MAMBA, "mamba_d_ssm": 256}, "copied"),
    "Nemotron-H": Family(
        "nemotron_h",
        {
            **WITH_HEAD_DIM,
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "chunk_size": 32,
        },
        "copied",
    ),
    "Zamba 2": Family(
        "zamba2",
        {
            **BASE,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "chunk_size": 32,
            "num_mem_blocks": 1,
        },
        "copied",
    ),
    "LFM2-MoE": Family(
        "lfm2_moe",
        {**BASE, **EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        "refused",
    ),
    "GLM-4-MoE": Family("glm4_moe", {**WITH_HEAD_DIM, **ROUTED}),
    "dots.llm1": Family("dots1", {**WITH_HEAD_DIM, **ROUTED}),
    "ERNIE 4.5 MoE": Family(
        "ernie4_5_moe",
        {
            **WITH_HEAD_DIM,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_num_shared_experts": 1,
        },
        "refused",
    ),
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
        "copied",
        **BARE_LOSS,
    ),
}


@dataclass
class Outcome:
    """What became of one mode. `how`: "shared", "copied", "sent" or "refused"."""

    how: str
    why: str = ""  # for "copied" and "refused"
    largest: float = 0.0  # difference of log-probabilities after the step, in nats, on any token
    mean: float = 0.0
    # parameters without a fingerprint, and why
    unproven: dict[str, str] = field(default_factory=dict)


@dataclass
class Row:
    """What the check of one family in one dtype found."""

    family: str
    dtype: str
    hf_class: str = ""
    parameters: int = 0
    attention: str = ""  # the implementation that the trainer's model computes with
    modes: dict[str, Outcome] = field(default_factory=dict)  # by `vllm_mode`


def make_model(family: Family, folder: Path, dtype: str = "float32") -> None:
    """Saves a tiny model with random weights (none of them zero or one), and a byte-level
    tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from recipes.quickstart.make_model import byte_tokenizer

    tokenizer = byte_tokenizer()
    ids = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    config = AutoConfig.for_model(
        family.model_type, **{"vocab_size": len(tokenizer), **ids, **family.fields}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # With wider ones, 16 bits round by more than the probe allows.
    change(dict(model.named_parameters()), seed=1, scale=0.05 if dtype == "float32" else 0.02)
    model.save_pretrained(folder)
    if dtype != "float32":  # what transformers keeps in float32 stays so
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def change(parameters: dict, seed: int, scale: float = 0.05) -> None:
    """Moves every parameter in place, far enough that every one of them shows in the
    log-probabilities."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def record(path: Path) -> str:
    """A batch of eight random rollouts with random rewards."""
    generator = random.Random(0)
    tokens = [[generator.randrange(256) for _ in range(40)] for _ in range(8)]
    masks = [[-100] * 8 + row[8:] for row in tokens]
    group = {"tokens": tokens, "masks": masks, "scores": [generator.random() for _ in tokens]}
    path.write_text(json.dumps({"batch": [group]}) + "\n")
    return str(path)


def check(name: str, dtype: str, folder: Path) -> Row:
    """Takes the family through a step of each mode in this process, which is of no use for another
    one afterwards."""
    from vllm.config import set_current_vllm_config

    from tests.weights.engine import Engine
    from trl_atropos.errors import AtroposTrainingError

    make_model(FAMILIES[name], folder / "model", dtype)
    row = Row(name, dtype)
    try:
        engine = Engine(folder / "model", dtype)
    except Exception as error:  # noqa: BLE001 - whatever vLLM says of a family is its row of the table
        traceback.print_exc()
        FAILED.append(error)
        row.modes = dict.fromkeys(MODES, Outcome("refused", f"vLLM: {_in_short(error)}"))
        return row
    recording = record(folder / "rollouts.jsonl")
    for mode in MODES:
        try:
            # vLLM decorates the classes of some Hugging Face models, which then look for its
            # configuration.
            with set_current_vllm_config(engine.llm.llm_engine.vllm_config):
                row.modes[mode] = step(engine, row, mode, folder, recording)
        except (AtroposTrainingError, ValueError) as error:
            row.modes[mode] = Outcome("refused", _in_short(error))
        except Exception as error:  # noqa: BLE001 - the same of libraries; the engine may be of no use any more
            traceback.print_exc()
            FAILED.append(error)
            row.modes |= dict.fromkeys(MODES, Outcome("refused", _in_short(error)))
            break
    return row


def step(engine, row: Row, mode: str, folder: Path, recording: str) -> Outcome:
    """One optimizer step of a trainer with default settings that publishes to `engine`, and what
    that led to."""
    from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer, ReplaySource
    from trl_atropos.errors import ProbeError
    from trl_atropos.server_client import Servers
    from trl_atropos.weights.publisher import ServerPublisher, transfer_of

    publisher = ServerPublisher(
        transfer_of(mode, Servers([engine.url], 60, client=engine), "auto", str(folder))
    )
    args = AtroposGRPOConfig(
        output_dir=str(folder / mode),
        vllm_mode=mode,
        model_init_kwargs={"dtype": row.dtype},
        max_steps=1,
        # of the first step of AdamW, every weight that has a gradient moves by this
        learning_rate=1e-2,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **FAMILIES[row.family].settings,
    )
    with warnings_of("trl_atropos.weights.colocate") as warned:
        trainer = AtroposGRPOTrainer(
            str(folder / "model"),
            args,
            rollout_source=ReplaySource(recording, loop=True),
            policy_publisher=publisher,
        )
    model = trainer.model
    row.hf_class, row.parameters = (
        type(model).__name__,
        sum(one.numel() for one in model.parameters()),
    )
    row.attention = model.config._attn_implementation
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    try:
        trainer.train()
    except ProbeError as error:
        if error.result is None or publisher.policy_version > 0:
            raise
        apart = f"{error.result.max_abs_diff:.1g} nats apart"
        return Outcome(
            "refused",
            f"before any step, vLLM and transformers compute log-probabilities up to {apart}",
        )
    moved = [
        name for name, parameter in model.named_parameters() if not parameter.equal(before[name])
    ]
    if len(moved) < len(before) / 2:
        raise AssertionError(f"the step moved {len(moved)} of {len(before)} parameters")
    largest, mean = engine.difference(model)
    bound, mean_bound = TOLERANCES[row.dtype]
    if not (largest <= bound and mean <= mean_bound):
        raise AssertionError(
            f"after the step, vLLM and the trainer differ by up to {largest:.2g} nats ({mean:.2g})"
        )
    how = {"Colocate": "shared", "FullWeights": "copied" if mode == "colocate" else "sent"}
    (refused,) = publisher._proof._refused.values()
    return Outcome(
        how[type(publisher.transfer).__name__], "; ".join(warned), largest, mean, refused
    )


@contextmanager
def warnings_of(logger: str) -> Iterator[list[str]]:
    """What is in the brackets of the logger's warnings: the reason."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda entry: found.append(
        entry.getMessage().partition("(")[2].rpartition(")")[0]
    )
    logging.getLogger(logger).addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger(logger).removeHandler(handler)


def _in_short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def rows(wanted: list[tuple[str, str]]) -> Iterator[Row]:
    """Checks families in dtypes, each in a process that is forked from this one, which imports
    everything and computes nothing. No other thread of ours runs here meanwhile: a lock that it held
    would never be free in the new process."""
    os.environ.update(ENVIRONMENT)
    for name in ("tests.weights.engine", "trl_atropos.trainer"):
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    for name, dtype in wanted:
        yield _in_own_process(context, name, dtype)


def _in_own_process(context, name: str, dtype: str) -> Row:
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryFile("w+") as stacks:
        process = context.Process(target=_check_and_send, args=(name, dtype, sender, stacks))
        process.start()
        sender.close()
        try:
            if receiver.poll(SECONDS_PER_ROW):
                return receiver.recv()
            stacks.seek(0)
            why = f"no result after {SECONDS_PER_ROW} s: {stacks.read()}"
        except EOFError:
            process.join()
            why = f"the process ended with exit code {process.exitcode}"
        finally:
            process.kill()
            process.join()
    failed = Row(name, dtype)
    failed.modes = dict.fromkeys(MODES, Outcome("refused", why))
    return failed


def _check_and_send(name: str, dtype: str, sender: Connection, stacks: TextIO) -> None:
    """Checks a family, and sends its row. If there is none shortly before the time is over, `stacks`
    gets what each thread does."""
    faulthandler.dump_traceback_later(SECONDS_PER_ROW - 5, file=stacks)
    with tempfile.TemporaryDirectory() as folder:
        sender.send(check(name, dtype, Path(folder)))


def table(found: dict[tuple[str, str], Row]) -> str:
    import transformers
    import vllm

    lines = [HEADER.format(vllm=vllm.__version__, transformers=transformers.__version__)]
    for family in FAMILIES:
        made = {dtype: found[family, dtype] for dtype in DTYPES if (family, dtype) in found}
        if not made:
            continue
        hf_class = next((row.hf_class for row in made.values() if row.hf_class), "")
        cells, reasons = [], defaultdict(list)
        settings = [f"with `{key}: {value:g}`" for key, value in FAMILIES[family].settings.items()]
        for mode in MODES:
            for dtype in DTYPES:
                outcome = made[dtype].modes[mode] if dtype in made else Outcome("not run")
                cells.append(
                    outcome.how + (f" {outcome.largest:.0e}" if outcome.how in MEASURED else "")
                )
                if outcome.why:
                    reasons[_first(outcome.why)].append(f"`{mode}`, {dtype}")
        everywhere = len(MODES) * len(DTYPES)
        told = [
            reason if len(where) == everywhere else f"{' and '.join(where)}: {reason}"
            for reason, where in reasons.items()
        ]
        why = "; ".join(settings + told)
        lines.append(f"| {family} | {hf_class} | {' | '.join(cells)} | {why.replace('|', '/')} |\n")
    return "".join(lines)


def _first(why: str) -> str:
    """Of the parameters that cannot be shared, the first one and how many more there are."""
    shown = [part for part in why.split("; ") if ": vLLM" in part]
    if len(shown) < 2:
        return why
    more = int(shown[-1].rpartition(" and ")[2].split()[0]) if shown[-1].endswith(" more") else 0
    return f"{shown[0]} (the first of {len(shown) + more})"


def read_rows(path: Path | None) -> dict[tuple[str, str], Row]:
    found = {}
    for line in path.read_text().splitlines() if path and path.exists() else ():
        entry = json.loads(line)
        modes = {mode: Outcome(**outcome) for mode, outcome in entry.pop("modes").items()}
        row = Row(**entry, modes=modes)
        found[row.family, row.dtype] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help_text = "names of the table's first column, or NAME/DTYPE for one of the dtypes"
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help=help_text)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--rows", type=Path, help="file of rows, one a line, that this run goes on with"
    )
    parser.add_argument("--write", type=Path, help="file for the table")
    options = parser.parse_args()
    found = read_rows(options.rows)
    wanted = []
    for word in options.families:
        name, _, dtype = word.partition("/")
        wanted += [(name, each) for each in ([dtype] if dtype else options.dtypes)]
    for row in rows([one for one in wanted if one not in found]):
        found[row.family, row.dtype] = row
        for mode, outcome in row.modes.items():
            print(row.family, row.dtype, row.attention, mode, outcome, flush=True)
        if options.rows:
            with open(options.rows, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    if options.write:
        options.write.write_text(table(found), encoding="utf-8")


if __name__ == "__main__":
    main()
