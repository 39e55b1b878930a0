"""The estimate of a run's memory: against what processes take, and what it says of a run that does
not fit.

Measured on the CPU, from the kernel's accounts of the processes. There is no figure of a GPU.
"""

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import AutoConfig, Trainer, TrainingArguments
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from benchmarks.models import config_fields
from recipes.quickstart.make_model import make_model
from tests import ROOT
from tests.check.peak_memory import command_line, rows
from tests.check.traces import traced_once  # noqa: F401 - a fixture
from tests.rollout_factory import record
from tests.server_process import MAX_MODEL_LEN, Server, make_tiny_model, running_server
from tests.weights.live import restore, snapshot
from tests.weights.trainers import make_publisher, make_trainer
from trl_atropos.check import examine
from trl_atropos.check.disk import disk
from trl_atropos.check.fit import Estimate, estimate, findings
from trl_atropos.check.launch import GIB, Case, Launch, case_of, plan_of
from trl_atropos.check.memory import smallest_cache, state_bytes
from trl_atropos.check.shadow import _head_bytes
from trl_atropos.recipe import parse
from trl_atropos.weights.masters import MasterOptimizer

# What is freed goes back to the system, so that the kernel's high-water mark is what was needed.
MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "262144",
}
ADAPTER = {"use_peft": True, "lora_r": 16, "lora_target_modules": "all-linear"}
CASES = {
    "all of fp32": {},
    "checkpointing, two micro-batches": {
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": 2,
    },
    "an adapter": ADAPTER,
    "masters of bfloat16": {"dtype": "bfloat16"},
}

on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="reads the kernel's accounts of memory on the CPU"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Of 46 million parameters, with a vocabulary of more than one tile of the
    log-probabilities."""
    folder = tmp_path_factory.mktemp("model")
    make_model(
        str(folder),
        0,
        vocab_size=40000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    return str(folder)


def estimated(folder: Path, model: str, settings: dict) -> Estimate:
    recipe = parse(command_line(model, folder, settings))
    return estimate(case_of(recipe, plan_of(recipe.training, Launch())))


# ----------------------------------------------------------------------------------------- measured


@pytest.fixture(scope="module")
def measured(model, tiny_model, tmp_path_factory) -> dict[str, int]:
    """Bytes that training took at most, by case."""
    command = [sys.executable, "-m", "tests.check.peak_memory", model, str(tiny_model)]
    done = subprocess.run(
        [*command, str(tmp_path_factory.mktemp("runs")), json.dumps(CASES)],
        env={**os.environ, **MALLOC, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {line["name"]: line["bytes"] for line in lines}


@pytest.mark.full  # a measurement; the tests below see what the estimate is made of
@pytest.mark.slow
@on_cpu
@pytest.mark.parametrize("name", CASES)
def test_trainer_peak_is_within_5_percent(name, measured, model, tmp_path):
    trainer = estimated(tmp_path, model, CASES[name]).trainer
    expected = trainer.total - trainer.items["runtime"]
    print(
        f"{name}: estimated {expected / 1e6:.0f} MB, measured {measured[name] / 1e6:.0f} MB: "
        f"{trainer.items}"
    )
    assert measured[name] == pytest.approx(expected, rel=0.05)


@pytest.fixture(scope="module")
def running(model, tmp_path_factory) -> Iterator[Server]:
    with running_server(
        model, tmp_path_factory.mktemp("logs"), "--dtype", "bfloat16", forked=False
    ) as server:
        yield server


@pytest.mark.full  # a measurement, too
@pytest.mark.slow
@on_cpu
@pytest.mark.server
def test_server_memory_is_within_10_percent(running, model, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    content = {
        "start_vllm": True,
        "vllm_args": ["--max-model-len", str(MAX_MODEL_LEN), "--dtype", "bfloat16"],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    argv = [
        "--config",
        str(tmp_path / "recipe.yaml"),
        "--model_name_or_path",
        model,
        "--use_cpu",
        "true",
    ]
    recipe = parse(
        [*argv, "--output_dir", str(tmp_path / "run"), "--max_steps", "1", "--bf16", "false"]
    )
    server = estimate(case_of(recipe, plan_of(recipe.training, Launch()))).server
    assert running.generate(prompt="abcdefgh" * 50, n=8, max_tokens=8, temperature=1.0).ok
    accounts = [
        account(process.pid) for process in (running.api, *running.api.children(recursive=True))
    ]
    # Of the files that are mapped, which are libraries, all processes have the same.
    taken = sum(one["Pss_Anon"] + one["Pss_Shmem"] for one in accounts) + max(
        one["File"] for one in accounts
    )
    print(
        f"estimated {server.total / 1e6:.0f} MB, measured {taken / 1e6:.0f} MB {accounts}: "
        f"{server.items}"
    )
    assert taken == pytest.approx(server.total, rel=0.1)


def account(pid: int) -> dict[str, int]:
    """Bytes of a process by kind. Of what several share, each has its part, so that a sum counts it
    once."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = {
        name: 1024 * int(value.split()[0]) for name, value in (line.split(":") for line in lines)
    }
    (mapped,) = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("RssFile")
    ]
    return {name: fields[name] for name in ("Pss_Anon", "Pss_Shmem")} | {
        "File": 1024 * int(mapped.split()[1])
    }


@pytest.fixture(scope="module")
def in_16_bits(tmp_path_factory) -> Iterator[Server]:
    model = make_tiny_model(tmp_path_factory.mktemp("small"))
    logs = tmp_path_factory.mktemp("logs")
    with running_server(model, logs, "--dtype", "bfloat16") as server:
        yield server


@pytest.mark.slow
@on_cpu
@pytest.mark.server
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_bnb_8bit"])
def test_memory_savers_work_with_colocated_weights(optim, in_16_bits, tmp_path):
    """Of 16 bits, with checkpointing and offloaded masters; the probe compares both sides after
    every step."""
    if "bnb" in optim:
        pytest.importorskip("bitsandbytes")
    recording = record(tmp_path / "rollouts.jsonl", rows(64, 0), rows(64, 1))
    settings = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-4,
        "optim": optim,
    }
    settings |= {"gradient_checkpointing": True, "offload_master_weights": True}
    trainer = make_trainer(
        make_publisher(in_16_bits, tmp_path), recording, in_16_bits.model, tmp_path, **settings
    )
    weight = trainer.model.model.layers[0].mlp.down_proj.weight
    before = snapshot(trainer.model)
    trainer.train()
    assert trainer.model.is_gradient_checkpointing
    assert (
        isinstance(trainer.optimizer.optimizer, MasterOptimizer)
        and trainer.optimizer.optimizer.offload
    )
    assert not torch.equal(weight, before["model.layers.0.mlp.down_proj.weight"])
    assert trainer.policy_publisher.policy_version == 2
    restore(trainer.model, before)


@pytest.mark.parametrize(
    "optim",
    ["adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad", "adafactor"]
    + ["adamw_bnb_8bit", "lion_8bit", "ademamix_8bit", "paged_adamw_32bit"],
)
def test_optimizer_state_is_as_estimated(optim, tmp_path):
    if "bit" in optim:
        pytest.importorskip("bitsandbytes")
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((640, 512), (512, 512), (512,))]
    arguments = TrainingArguments(str(tmp_path), optim=optim, use_cpu=True)
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    optimizer = kind(weights, **settings)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    kept = [
        tensor
        for state in optimizer.state.values()
        for tensor in state.values()
        if torch.is_tensor(tensor)
    ]
    # without bitsandbytes' tables of 256 values
    kept = sum(tensor.nbytes for tensor in kept if tensor.numel() != 256)
    assert state_bytes(optim, weights, False, set()) == pytest.approx(kept, rel=0.001, abs=100)


# ---------------------------------------------------------------------------------------- the items

LAYERS = 4  # of the 36 that the model has: each takes time
EMBEDDINGS = 151936 * 4096
PARAMETERS = (
    LAYERS * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 12288 + 2 * (4096 + 128))
    + 2 * EMBEDDINGS
    + 4096
)
OFFLOADED = 12 * PARAMETERS + 4 * 2 * EMBEDDINGS  # bytes: of the gradients, the two largest parts


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> str:
    """Qwen3-8B as far as this needs it: a config, and no weights."""
    folder = tmp_path_factory.mktemp("8B")
    fields = {**config_fields("8B"), "num_hidden_layers": LAYERS, "max_position_embeddings": 40960}
    fields["dtype"] = "bfloat16"
    AutoConfig.for_model("qwen3", **fields, architectures=["Qwen3ForCausalLM"]).save_pretrained(
        folder
    )
    return str(folder)


def on_gpus(folder: Path, model: str | Path, gib: float = 40, **settings) -> Estimate:
    """Of a run with a server, on GPUs that are not here."""
    launch, host = settings.pop("launch", None), settings.pop("host_gib", None)
    recipe = {
        "model_name_or_path": str(model),
        "start_vllm": True,
        "max_steps": 1,
        "output_dir": str(folder / "run"),
    }
    recipe |= {
        "vllm_args": ["--max-model-len", "4096"],
        "per_device_train_batch_size": 2,
        **settings,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    parsed = parse(["--config", str(folder / "recipe.yaml")])
    return estimate(
        case_of(parsed, plan_of(parsed.training, Launch(gib, host, config_file=launch)))
    )


def test_config_without_weights_is_enough(large, tmp_path):
    assert os.listdir(large) == ["config.json"]
    found = on_gpus(tmp_path, large)
    assert found.server.items["weights"] == 2 * PARAMETERS
    assert found.trainer.items["master weights"] == 4 * PARAMETERS
    assert found.trainer.items["optimizer state"] == 8 * PARAMETERS


def test_colocated_weights_are_counted_once(large, tmp_path):
    assert "weights" not in on_gpus(tmp_path, large).trainer.items
    alone = on_gpus(tmp_path, large, vllm_mode="server", dtype="bfloat16")
    assert alone.trainer.items["weights"] == alone.server.items["weights"]


def test_servers_on_trainers_gpu_are_all_counted(large, tmp_path):
    two = ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]
    found = on_gpus(tmp_path, large, vllm_mode="server", vllm_server_base_url=two)
    assert found.total == found.trainer.total + 2 * found.server.total
    assert any("server, each of 2" in line for line in found.table())
    each_its_own = on_gpus(tmp_path, large, vllm_server_base_url=two)
    assert each_its_own.total == each_its_own.trainer.total + each_its_own.server.total


@pytest.mark.slow
def test_adapter_alone_is_counted_for_trainer(large, tmp_path):
    found = on_gpus(tmp_path, large, **ADAPTER)
    # q and o, k and v, the MLP's
    per_layer = 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    adapter = LAYERS * per_layer
    assert found.trainer.items["weights"] == 2 * adapter
    assert found.trainer.items["master weights"] == 4 * adapter
    assert found.trainer.items["optimizer state"] == 8 * adapter
    alone = on_gpus(tmp_path, large, **ADAPTER, master_weights=False)
    assert alone.trainer.items["weights"] == 4 * adapter  # as PEFT keeps it
    assert "master weights" not in alone.trainer.items
    # Two places on the device in the base's dtype, and eight adapters in host memory.
    assert found.server.items["places for adapters"] == 2 * 2 * adapter
    assert found.server.host["adapters"] == 8 * 2 * adapter


@pytest.mark.slow
def test_large_vocabulary_logits_are_never_whole(large, tmp_path):
    fields = json.loads((Path(large) / "config.json").read_text())
    (tmp_path / "small").mkdir()
    (tmp_path / "small/config.json").write_text(json.dumps(fields | {"vocab_size": 1024}))
    settings = {"per_device_train_batch_size": 8, "gradient_checkpointing": True, **ADAPTER}
    taken = [
        on_gpus(tmp_path, model, **settings).trainer.items["activations"]
        for model in (large, tmp_path / "small")
    ]
    whole = 2 * 8 * 4096 * 151936  # bytes: rows x tokens x entries of the vocabulary, in bfloat16
    assert taken[0] - taken[1] < whole / 4


def test_offloaded_and_8_bit_states_are_counted(large, tmp_path):
    usual = on_gpus(tmp_path, large)
    offloaded = on_gpus(tmp_path, large, offload_master_weights=True)
    moved = usual.trainer.items["master weights"] + usual.trainer.items["optimizer state"]
    assert (
        sum(offloaded.trainer.host.values()) - offloaded.trainer.host["gradients for the step"]
        == moved
    )
    assert offloaded.trainer.total <= usual.trainer.total - moved + usual.trainer.items["gradients"]
    in_8_bits = on_gpus(tmp_path, large, optim="adamw_bnb_8bit").trainer.items["optimizer state"]
    assert in_8_bits == pytest.approx(
        2 * (PARAMETERS - EMBEDDINGS) * (1 + 4 / 256) + 8 * EMBEDDINGS, rel=1e-3
    )


@pytest.mark.parametrize(
    "name, divided", [("zero2", ()), ("zero3", ("weights",)), ("fsdp2", ("weights",))]
)
def test_sharded_trainers_have_their_part(name, divided, large, tmp_path):
    launch = str(ROOT / f"configs/accelerate/{name}.yaml")
    found = on_gpus(
        tmp_path, large, vllm_mode="server", dtype="bfloat16", launch=launch, start_vllm=False
    )
    weights = 2 * PARAMETERS
    assert found.trainer.items["weights"] == weights // (8 if divided else 1)
    assert found.trainer.items["optimizer state"] == (4 if name != "fsdp2" else 2) * weights // 8
    assert found.total == found.trainer.total  # the server has devices of its own


def test_launch_file_tells_offloads_to_host_memory(large, tmp_path):
    offloaded = {"zero_stage": 2, "offload_optimizer_device": "cpu", "offload_param_device": "none"}
    content = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": offloaded}
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(content))
    launch = str(tmp_path / "launch.yaml")
    plan = on_gpus(tmp_path, large, vllm_mode="server", dtype="bfloat16", launch=launch).case.plan
    assert (plan.sharding, plan.offloads, plan.offloads_weights) == ("zero2", True, False)


def test_cpu_processes_share_machine_memory(large, tmp_path):
    found = on_gpus(tmp_path, large)
    plan = dataclasses.replace(found.case.plan, device="cpu", processes=3)
    shared = dataclasses.replace(
        found, case=dataclasses.replace(found.case, plan=plan), server=None
    )
    assert shared.total == 3 * found.trainer.total


def test_gpu_serves_float32_checkpoint_in_16_bits(large, tmp_path):
    fields = json.loads((Path(large) / "config.json").read_text())
    (tmp_path / "float32").mkdir()
    (tmp_path / "float32/config.json").write_text(json.dumps(fields | {"dtype": "float32"}))
    assert (
        on_gpus(tmp_path, tmp_path / "float32", vllm_mode="server").server.items["weights"]
        == 2 * PARAMETERS
    )


# Of the model `large`, by hand: two matrices of the attention's heads and two of 8 groups, the
# MLP's three, and norms.
LAYER = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 12288 + 2 * (4096 + 128)
ENDS = 2 * EMBEDDINGS + 4096  # what is outside of the layers
SENDS = {"vllm_mode": "server", "dtype": "bfloat16"}
EIGHT = "configs/accelerate/{}.yaml"  # for eight GPUs
LONG = {**SENDS, **ADAPTER, "start_vllm": False, "gradient_checkpointing": True}


def test_reference_model_is_copy_without_adapter(large, tmp_path):
    assert "reference model" not in on_gpus(tmp_path, large).trainer.items
    assert on_gpus(tmp_path, large, beta=0.1).trainer.items["reference model"] == 2 * PARAMETERS
    assert "reference model" not in on_gpus(tmp_path, large, beta=0.1, **ADAPTER).trainer.items


def test_gradients_of_earlier_micro_batches_count(large, tmp_path):
    settings = {"offload_master_weights": True, "per_device_train_batch_size": 4}
    two = on_gpus(tmp_path, large, **settings, gradient_accumulation_steps=2)
    assert two.trainer.when == "forward and backward"
    assert two.trainer.items["gradients"] == 4 * PARAMETERS
    # 4 micro-batches of a rollout
    divided = on_gpus(tmp_path, large, **settings, max_tokens_per_micro_batch=4096)
    assert divided.trainer.items["gradients"] == 4 * PARAMETERS


@pytest.mark.slow
def test_teacher_costs_logits_of_whole_vocabulary(large, tmp_path):
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_checkpointing": True,
        "max_tokens_per_micro_batch": 8192,
        **ADAPTER,
    }
    usual, taught = (
        on_gpus(tmp_path, large, **settings, distillation_coef=coef) for coef in (0.0, 0.5)
    )
    logits = 2 * 2 * 4095 * 151936  # bytes: bfloat16 x rollouts x predicting tokens x vocabulary
    assert taught.trainer.items["activations"] - usual.trainer.items["activations"] > logits


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_second_moment_roots_are_taken_at_once_on_gpu(optim, large, tmp_path):
    settings = {
        "gradient_checkpointing": True,
        "per_device_train_batch_size": 2,
        "max_sequence_length": 64,
    }
    found = on_gpus(tmp_path, large, 80, **settings, optim=optim)
    if optim == "adamw_torch":
        assert found.trainer.when == "the optimizer's step"
        assert (
            found.trainer.items["temporaries"] == found.trainer.items["gradients"] == 4 * PARAMETERS
        )
    else:
        assert "temporaries" not in found.trainer.items


def test_paged_optimizer_state_is_in_host_memory(large, tmp_path):
    found = on_gpus(tmp_path, large, optim="paged_adamw_32bit")
    assert "optimizer state" not in found.trainer.items
    assert found.trainer.host == {"optimizer state": 8 * PARAMETERS}


def test_offloaded_checkpoints_are_in_host_memory(large, tmp_path):
    settings = {"gradient_checkpointing": True, "vllm_args": ["--max-model-len", "32768"]}
    usual = on_gpus(tmp_path, large, **settings).trainer
    settings["gradient_checkpointing_kwargs"] = {"offload": True}
    offloaded = on_gpus(tmp_path, large, **settings).trainer
    of_layer = 32768 * 4096 * 2  # bytes: tokens of one rollout, width, bfloat16
    assert offloaded.host == {"activations of checkpoints": LAYERS * of_layer}
    saved = usual.items["activations"] - offloaded.items["activations"]
    assert saved == (LAYERS - 1) * of_layer
    settings["gradient_checkpointing_kwargs"] = {"offload": True, "every_n_layers": 2}
    fewer = on_gpus(tmp_path, large, **settings).trainer
    assert fewer.host == {"activations of checkpoints": LAYERS // 2 * of_layer}
    assert fewer.items["activations"] > offloaded.items["activations"]


def test_selective_checkpoints_keep_results_of_attention(large, tmp_path):
    settings = {"gradient_checkpointing": True, "vllm_args": ["--max-model-len", "32768"]}
    usual = on_gpus(tmp_path, large, **settings).trainer.items["activations"]
    settings["gradient_checkpointing_kwargs"] = {"selective": True}
    selective = on_gpus(tmp_path, large, **settings).trainer.items["activations"]
    heads, head_dim = 32, 128
    of_layer = 32768 * heads * (head_dim * 2 + 4)  # bytes: bfloat16, and a float32 for its backward
    assert selective - usual == (LAYERS - 1) * of_layer  # one is there in both, at the peak


def test_ddp_buckets_are_those_of_torch(large, tmp_path):
    """Each holds the gradients of its parameters once more."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        layers = torch.nn.Sequential(torch.nn.Linear(600, 700), torch.nn.Linear(700, 900)).to(
            torch.bfloat16
        )
        parallel = torch.nn.parallel.DistributedDataParallel(layers)
        sizes = parallel._get_ddp_logging_data()["bucket_sizes"].split(",")
    finally:
        torch.distributed.destroy_process_group()
    values = 600 * 700 + 700 + 700 * 900 + 900
    assert sum(map(int, sizes)) == 2 * values
    launch = str(ROOT / EIGHT.format("ddp"))
    found = on_gpus(tmp_path, large, **SENDS, start_vllm=False, launch=launch)
    assert found.trainer.items["buckets of DDP"] == 2 * PARAMETERS
    assert "buckets of DDP" not in on_gpus(tmp_path, large).trainer.items


@pytest.mark.parametrize("name", ["zero2", "zero3", "fsdp2"])
def test_sharding_divides_gradients_but_not_gathered(name, large, tmp_path):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    launch = str(ROOT / EIGHT.format(name))
    items = on_gpus(tmp_path, large, **SENDS, start_vllm=False, launch=launch).trainer.items
    assert items["gradients"] <= 2 * PARAMETERS // 8
    if name != "zero2":  # all but the layers, the layer that computes, and the one that is fetched
        assert items["gathered weights"] == 2 * (ENDS + 2 * LAYER)
    buckets = 2 * DeepSpeedZeroConfig().reduce_bucket_size * 2  # two, in bfloat16
    assert items.get("buckets of DeepSpeed", 0) == (0 if name == "fsdp2" else buckets)
    masters = {"zero2": 4 * PARAMETERS // 8, "zero3": 4 * PARAMETERS // 8}
    assert items.get("master weights", 0) == masters.get(name, 0)


@pytest.mark.slow
def test_divided_row_takes_slice_of_activations_and_whole_weights(large, tmp_path):
    settings = LONG
    offload = {"gradient_checkpointing_kwargs": {"offload": True}}
    launch = str(ROOT / EIGHT.format("sp2"))
    whole = on_gpus(tmp_path, large, **settings, max_sequence_length=32768)
    half = on_gpus(tmp_path, large, **settings, max_sequence_length=16384)
    divided = on_gpus(tmp_path, large, **settings, max_sequence_length=32768, launch=launch)
    of_slice = divided.trainer.items["activations"]
    assert of_slice < 0.6 * whole.trainer.items["activations"]
    # Around attention, queries, keys and values come and go, which one process does not exchange.
    exchanged = of_slice - half.trainer.items["activations"]
    of_token = 2 * (32 + 2 * 8) * 128  # bytes: bfloat16 x (heads, and those of keys and values)
    assert 0 <= exchanged <= 4 * 16384 * of_token
    for name in ("weights", "master weights", "optimizer state"):
        assert divided.trainer.items[name] == whole.trainer.items[name]
    assert "micro-batches of 1 x 32768 tokens, a slice of 16384 in each" in divided.table()[0]
    offload |= {"max_sequence_length": 32768, "launch": launch}
    offloaded = on_gpus(tmp_path, large, **settings, **offload)
    assert offloaded.trainer.host == {"activations of checkpoints": LAYERS * 16384 * 4096 * 2}
    assert offloaded.host == 2 * offloaded.trainer.host_total


@pytest.mark.slow
def test_row_twice_as_long_takes_twice_the_activations(large, tmp_path):
    """A packed row has no mask of all tokens by all tokens."""
    taken = []
    for length in (16384, 32768):
        found = on_gpus(tmp_path, large, **LONG, max_sequence_length=length)
        taken.append(found.trainer.items["activations"])
    assert taken[1] == pytest.approx(2 * taken[0], rel=0.02)
    padded = on_gpus(tmp_path, large, **LONG, max_sequence_length=32768, padding_free=False).trainer
    assert padded.items["activations"] > taken[1] + 32768**2


SERVED = [
    "--max-num-batched-tokens",
    "1024",
    "--max-num-seqs",
    "16",
    "--gpu-memory-utilization",
    "0.9",
]


def served(folder: Path, model: str | Path, *flags: str, gib: float = 40, **settings) -> Estimate:
    return on_gpus(
        folder, model, gib, vllm_args=["--max-model-len", "4096", *SERVED, *flags], **settings
    )


@pytest.mark.parametrize("parts", [1, 2])
def test_server_memory_equals_count_by_hand(parts, large, tmp_path):
    found = served(
        tmp_path, large, "--tensor-parallel-size", str(parts), vllm_mode="server", dtype="bfloat16"
    )
    items = found.server.items
    # tokens x (hidden states and their sum, gate, up, product) x bfloat16
    in_mlp = 1024 * (2 * 4096 + 3 * 12288) * 2
    # sequences x vocabulary x (logits and their log-probabilities) in float32
    sampled = 16 * 151936 * 2 * 4
    assert items["activations"] == in_mlp // parts + sampled
    assert items["weights"] == 2 * PARAMETERS // parts
    assert items["runtime"] == 1.5 * GIB
    cache = (
        int(0.9 * 40 * GIB) - 2 * PARAMETERS // parts - in_mlp // parts - sampled - int(1.5 * GIB)
    )
    assert items["KV cache"] == cache
    # One rollout of 4,096 tokens: keys and values of 8 groups of 128 in each of the layers, in
    # bfloat16.
    assert smallest_cache(found.case) == 2 * LAYERS * 8 * 128 * 2 * 4096 // parts


@pytest.mark.parametrize(
    ("gib", "tokens", "sequences"), [(40, 2048, 256), (80, 8192, 1024), (180, 16384, 1024)]
)
def test_server_batch_is_vllms_default_for_device(gib, tokens, sequences, large, tmp_path):
    items = on_gpus(tmp_path, large, gib).server.items
    expected = tokens * (2 * 4096 + 3 * 12288) * 2 + sequences * 151936 * 2 * 4
    assert items["activations"] == expected


def test_server_pads_vocabulary_to_multiple_of_64(large, tmp_path):
    fields = json.loads((Path(large) / "config.json").read_text())
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text(json.dumps(fields | {"vocab_size": 151937}))
    served_odd = on_gpus(tmp_path, tmp_path / "odd", vllm_mode="server").server.items["weights"]
    assert served_odd == 2 * (PARAMETERS + 2 * 64 * 4096)  # both ends up to 152,000 rows


def test_server_cache_and_adapter_places_follow_flags(large, tmp_path):
    flags = [
        "--kv-cache-memory-bytes",
        "3G",
        "--enable-lora",
        "--max-loras",
        "3",
        "--max-cpu-loras",
        "5",
    ]
    found = served(tmp_path, large, *flags, "--max-lora-rank", "32", **ADAPTER)
    assert found.server.items["KV cache"] == 3 * GIB
    adapter = LAYERS * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288)) * 2
    assert found.server.items["places for adapters"] == 3 * adapter
    assert found.server.host["adapters"] == 5 * adapter


@pytest.mark.parametrize("level", [1, 2])
def test_light_sleep_keeps_weights_in_host_memory(level, large, tmp_path):
    settings = {"vllm_enable_sleep_mode": True, "vllm_sleep_level": level}
    found = served(tmp_path, large, "--enable-sleep-mode", **SENDS, **settings)
    assert found.server.host.get("weights, asleep", 0) == (2 * PARAMETERS if level == 1 else 0)


SAVES = {"save_strategy": "steps", "save_steps": 4, "max_steps": 10}
# settings; checkpoints, bytes a parameter of one, and besides
ON_DISK: dict[str, tuple[dict, int, int, int]] = {
    "steps 4, 8 and 10": ({}, 3, 14, 2),
    "a limit": ({"save_total_limit": 1}, 2, 14, 2),
    "a limit that is not reached": ({"save_total_limit": 5}, 3, 14, 2),
    "a share of the run": ({"save_steps": 0.25}, 4, 14, 2),
    "the model only": ({"save_only_model": True}, 3, 2, 2),
    "nothing on the way": ({"save_strategy": "no"}, 0, 14, 2),
    "SGD": ({"optim": "sgd"}, 3, 6, 2),
    "without masters": (
        {"master_weights": False, "vllm_mode": "server", "dtype": "bfloat16"},
        3,
        6,
        2,
    ),
    "restarts of the server": ({"vllm_mode": "restart", "dtype": "bfloat16"}, 3, 14, 2 + 3 * 2),
}


@pytest.mark.parametrize("name", ON_DISK)
def test_disk_need_equals_count_by_hand(name, large, tmp_path, monkeypatch):
    settings, number, of_one, besides = ON_DISK[name]
    needed = (number * of_one + besides) * PARAMETERS
    case = on_gpus(tmp_path, large, **SAVES | settings).case
    free = lambda size: lambda _: shutil._ntuple_diskusage(0, 0, size)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", free(needed))
    assert list(disk(case, False)) == []
    monkeypatch.setattr(shutil, "disk_usage", free(needed - 1))
    [finding] = disk(case, False)
    assert f"({number} checkpoints of {of_one * PARAMETERS / GIB:.1f}" in finding.seen


# dtype of the weights, what is computed in, tokens, vocabulary: another part is the largest in each
HEADS = {
    "float32": (torch.float32, None, 64, 40000),
    "bfloat16": (torch.bfloat16, None, 64, 40000),
    "bfloat16, of few tokens": (torch.bfloat16, None, 8, 40000),
    "bfloat16, of a large vocabulary": (torch.bfloat16, None, 8, 100000),
    "autocast": (torch.float32, torch.bfloat16, 64, 40000),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_head_memory_is_as_seen_by_profiler(name, frozen, tmp_path):
    """On the CPU, where there is no Triton."""
    dtype, autocast, tokens, vocabulary = HEADS[name]
    hidden = torch.randn(1, tokens + 1, 256).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, 256).to(dtype).requires_grad_(not frozen)
    targets = torch.randint(vocabulary, (tokens,))
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        logprobs, *_ = ChunkedLogProbFunction.apply(
            hidden[0, :-1], weight, None, targets, 1.0, 32768, None, 1.0, ()
        )
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        logprobs.sum().backward()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    totals = itertools.accumulate(
        event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())
    )
    case = SimpleNamespace(autocast=autocast, plan=SimpleNamespace(device="cpu"))
    assert _head_bytes(hidden, weight, case) == pytest.approx(max(totals), rel=0.05)


# -------------------------------------------------------------------------------------- the recipes


def config_of(hidden: int, inner: int, layers: int, heads: int, groups: int, folder: Path) -> str:
    """Of a Qwen2.5, without weights."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "vocab_size": 152064,
    }
    sizes |= {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": 32768,
    }
    fields = {
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "architectures": ["Qwen2ForCausalLM"],
    }
    AutoConfig.for_model("qwen2", **sizes, **fields).save_pretrained(folder)
    return str(folder)


QWEN = {"7B": (3584, 18944, 28, 28, 4), "72B": (8192, 29568, 80, 64, 8)}


@pytest.mark.parametrize(
    "recipe, config, gib, size, host",
    [
        ("colocate_7b", "single_gpu", 80, "7B", 90),  # GiB of host memory that its head names
        pytest.param("colocate_7b_lora", "single_gpu", 80, "7B", 2, marks=pytest.mark.slow(15)),
        pytest.param("nccl_lora_72b", "zero3", 80, "72B", 0, marks=pytest.mark.full),
        pytest.param("zero3_72b", "zero3", 141, "72B", 0, marks=pytest.mark.full),
    ],
)
def test_large_model_recipe_fits_named_gpus(recipe, config, gib, size, host, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    head = (ROOT / f"recipes/gsm8k/{recipe}.yaml").read_text().split("\n\n")[0].replace("\n# ", " ")
    assert (
        f"{size} model" in head and f"{gib} GB" in head and (not host > 2 or f"{host} GiB" in head)
    )
    argv = ["--config", f"recipes/gsm8k/{recipe}.yaml", "--output_dir", str(tmp_path / "run")]
    argv += ["--model_name_or_path", config_of(*QWEN[size], tmp_path / "model")]
    machines = ["--num_machines", "2", "--num_processes", "16"] if recipe == "zero3_72b" else []
    argv += ["--config_file", f"configs/accelerate/{config}.yaml", *machines, "--devices", "8"]
    report = examine([*argv, "--device_memory_gb", str(gib), "--host_memory_gb", str(host or 1)])
    # This machine has another disk, and other tests may use the recipe's ports.
    others = [found for found in report.findings if found.code not in ("disk", "port-taken")]
    assert others == []
    assert report.memory["fits"] and report.memory["total"] < 0.9 * gib * GIB
    assert report.memory["host"] > (host - 1) * GIB


# -------------------------------------------------------------------------------- what does not fit


def test_fitting_run_has_no_finding_and_exact_table(large, tmp_path):
    found = on_gpus(
        tmp_path,
        large,
        40,
        **ADAPTER,
        vllm_args=["--max-model-len", "1024", "--gpu-memory-utilization", "0.4"],
    )
    assert found.fits and list(findings(found)) == []
    assert found.total == sum(found.trainer.items.values()) + sum(found.server.items.values())
    assert sum(found.server.items.values()) == int(0.4 * 40 * GIB)


WRITTEN = re.compile(r"`(?:(\w+): ([^`]+)|(--[\w-]+) ([^`]+))`")
ROOMY = {
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 16,
    "loss_type": "bnpo",  # whose micro-batches are not divided by tokens
}


def written(offer: str) -> list[dict]:
    """The settings of each change that an offer lists."""
    changes = []
    for text in offer.partition(" It then ")[0].split(";"):
        found = [match.groups() for match in WRITTEN.finditer(text)]
        flags = [word for *_, flag, value in found if flag for word in (flag, value)]
        settings = {name: yaml.safe_load(value) for name, value, *_ in found if name}
        changes.append(
            settings | ({"vllm_args": ["--max-model-len", "4096", *flags]} if flags else {})
        )
    return changes


@pytest.mark.slow
@pytest.mark.parametrize(
    "gib, settings", [(40, ROOMY), (26, ROOMY), (44, {"offload_master_weights": True, **ROOMY})]
)
def test_proposed_changes_are_enough_and_all_needed(gib, settings, large, tmp_path):
    found = on_gpus(tmp_path, large, gib, **settings)
    [finding] = findings(found)
    assert (
        f"The run takes {found.total / GIB:.2f} GiB" in finding.what and f"{gib}.00" in finding.what
    )
    offers = re.split(r" Or train ", finding.fix)
    assert len(offers) == (2 if "Change, " in finding.fix else 1) and "use_peft: true" in offers[-1]
    for offer in offers:
        changes = written(offer)
        then = on_gpus(
            tmp_path, large, gib, **settings | dict(pair for one in changes for pair in one.items())
        )
        assert f"It then takes {then.total / GIB:.2f}" in offer and then.total <= 0.95 * gib * GIB
        for one in changes if "use_peft" not in offer else changes[1:]:
            others = settings | dict(
                pair for other in changes if other is not one for pair in other.items()
            )
            assert on_gpus(tmp_path, large, gib, **others).total > 0.95 * gib * GIB, one


def test_changes_say_how_much_they_save(large, tmp_path):
    found = on_gpus(tmp_path, large, 40, **ROOMY)
    [text] = map(str, findings(found))
    less = found.server.total - int(float(text.split("utilization ")[1][:4]) * 40 * GIB)
    assert f"(saves {less / GIB:.2f})" in text
    checkpointing = on_gpus(tmp_path, large, 40, **ROOMY | {"gradient_checkpointing": True})
    assert (
        f"`gradient_checkpointing: true` (saves {(found.total - checkpointing.total) / GIB:.2f})"
        in text
    )
    assert (
        "`offload_master_weights: true` (saves" in text
        and f"takes {OFFLOADED / GIB:.2f} of host memory" in text
    )


def test_host_memory_is_compared_if_known(large, tmp_path):
    settings = {
        "offload_master_weights": True,
        "vllm_args": ["--max-model-len", "4096", "--kv-cache-memory", "1G"],
    }
    unknown = on_gpus(tmp_path, large, 80, **settings)
    assert unknown.fits and unknown.case.plan.host is None and unknown.host == OFFLOADED
    [finding] = findings(on_gpus(tmp_path, large, 80, host_gib=24, **settings))
    assert finding.seen == f"{OFFLOADED / GIB:.2f} of 24.00 GiB of host memory"
    assert "`offload_master_weights: false` (saves" in finding.fix
    # which must not be told to offload
    [finding] = findings(on_gpus(tmp_path, large, 20, host_gib=24))
    assert "offload_master_weights" not in finding.fix and "Train an adapter: " in finding.fix


def test_machine_has_host_memory_of_its_processes(large, tmp_path):
    content = {"distributed_type": "DEEPSPEED", "num_processes": 8, "num_machines": 4}
    content["deepspeed_config"] = {"zero_stage": 2, "offload_optimizer_device": "cpu"}
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(content))
    found = on_gpus(
        tmp_path, large, vllm_mode="server", dtype="bfloat16", launch=str(tmp_path / "launch.yaml")
    )
    assert found.host == 2 * sum(found.trainer.host.values()) and found.host == pytest.approx(
        16 * PARAMETERS / 4, 1e-6
    )


def test_external_server_is_not_judged_by_run_flags(large, tmp_path):
    arguments = ["--max-model-len", "40960", "--gpu-memory-utilization", "0.1"]
    settings = {
        "vllm_mode": "server",
        "start_vllm": False,
        "vllm_args": arguments,
        "dtype": "bfloat16",
    }
    found = on_gpus(tmp_path, large, 16, **settings, max_sequence_length=4096)
    assert "server" not in found.table()[0] and found.case.length == 4096
    assert [one.code for one in findings(found)] == ["memory"] and "vllm_args" not in str(
        list(findings(found))
    )
    [finding] = findings(on_gpus(tmp_path, large, 16, **settings))
    assert "set `max_sequence_length` to the server's `--max-model-len`" in finding.fix


@pytest.mark.slow
def test_self_chosen_micro_batches_are_to_shrink(large, tmp_path):
    settings = {
        "per_device_train_batch_size": 16,
        "max_sequence_length": 1024,
        "optim": "adamw_bnb_8bit",
    }
    found = on_gpus(tmp_path, large, 1, **settings, offload_master_weights=True)
    assert "micro-batches of 4 x 1024 tokens" in found.table()[0]
    [*_, text] = map(str, findings(found))
    assert "`max_tokens_per_micro_batch: 1024` (saves" in text


@pytest.mark.slow
def test_long_rollouts_are_to_wait_in_host_memory_or_to_be_divided(large, tmp_path):
    settings = {**LONG, "max_sequence_length": 131072, "offload_master_weights": True}
    waiting = {"gradient_checkpointing_kwargs": {"offload": True}}
    fitting = on_gpus(tmp_path, large, 80, **settings, **waiting).total / 0.95
    [finding] = findings(on_gpus(tmp_path, large, fitting / GIB + 0.1, **settings))
    assert "`gradient_checkpointing_kwargs: {'offload': true}` (saves 3.00" in finding.fix
    assert "Divide" not in finding.fix
    [finding] = findings(on_gpus(tmp_path, large, fitting / GIB / 2, **settings))
    assert "Divide rows among more devices (`sp_size`" in finding.fix


def test_adapter_is_last_resort(large, tmp_path):
    settings = {
        "gradient_checkpointing": True,
        "per_device_train_batch_size": 1,
        "optim": "adamw_bnb_8bit",
    }
    settings |= {"gradient_accumulation_steps": 2}
    arguments = ["--max-model-len", "4096", "--gpu-memory-utilization", "0.5"]
    found = on_gpus(
        tmp_path, large, 14, **settings, offload_master_weights=True, vllm_args=arguments
    )
    assert "`use_peft: true` and `lora_target_modules: all-linear` (saves" in str(
        [*findings(found)][-1]
    )


def test_own_server_without_sequence_room_is_found(large, tmp_path):
    """One that is started by hand has other flags, and may well fit."""
    settings = {**ADAPTER, "vllm_mode": "server", "max_sequence_length": 4096}
    settings["vllm_args"] = ["--gpu-memory-utilization", "0.15", "--max-model-len", "40960"]
    first, *_ = findings(on_gpus(tmp_path, large, 40, **settings))
    assert (
        first.code == "kv-cache"
        and "Raise `--gpu-memory-utilization` in `vllm_args` to at least 0." in first.fix
    )
    share = first.fix.split("at least ")[1][:4]
    settings["vllm_args"] = ["--gpu-memory-utilization", share, "--max-model-len", "40960"]
    assert "kv-cache" not in [
        one.code for one in findings(on_gpus(tmp_path, large, 40, **settings))
    ]
    by_hand = on_gpus(tmp_path, large, 40, **settings, start_vllm=False)
    assert list(findings(by_hand)) == [] and by_hand.server is None
    assert "  The server is not started by this run, and not estimated." in by_hand.table()


@pytest.mark.parametrize("family", ["bloom", "mamba"])
def test_model_without_positions_has_vllms_length(family):
    case = Case(
        recipe=None, plan=None, config=AutoConfig.for_model(family), flags={}, peft_config=None
    )
    assert case.max_model_len == 2048
