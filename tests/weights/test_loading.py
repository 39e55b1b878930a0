"""What a run saves loads in plain transformers, peft and vLLM, and computes what the trainer
computed.

One server has the modes one after the other, each leaves a checkpoint of its last step, and
libraries and stock servers that know nothing of this package load them.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.rollout_factory import record, uniform_batch
from tests.server_process import ENVIRONMENT, running_server
from tests.weights.live import MODES, Live
from trl_atropos.services.addresses import free_port
from trl_atropos.services.manager import Services

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

FULL = ("colocate", "server over gloo")
ADAPTERS = ("colocate with an adapter", "nccl_lora", "lora")
PROMPTS = torch.randint(256, (3, 24), generator=torch.Generator().manual_seed(0))
STEPS = 3
EXACT = 1e-4  # nats, in float32
MOVED = 1e-2  # nats by which training must have changed something, so that loading nothing is seen


@torch.no_grad()
def logprobs_of(model: torch.nn.Module) -> torch.Tensor:
    """Of each token of `PROMPTS` but the first: nats, (3, 23) float32."""
    model.eval()
    logits = model(PROMPTS, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, PROMPTS[:, 1:, None])[..., 0]


@dataclass
class Saved:
    folder: Path  # the checkpoint
    logprobs: torch.Tensor  # of the trainer, when it was saved
    weights: dict[str, torch.Tensor]  # of the trainer


def train_and_save(live: Live) -> Saved:
    settings = {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": STEPS,
        "learning_rate": 1e-2,
    }
    with live.trainer(live.publisher(), **settings) as trainer:
        trainer.train()
        weights = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
        return Saved(live.folder / f"checkpoint-{STEPS}", logprobs_of(trainer.model), weights)


@pytest.fixture(scope="module")
def recording(server_model, tmp_path_factory) -> str:
    batches = [
        uniform_batch(Path(server_model), 4, 2, seed, logprobs="absent") for seed in range(2)
    ]
    return record(tmp_path_factory.mktemp("recording") / "rollouts.jsonl", *batches)


@pytest.fixture(scope="module")
def saved(server_model, recording, tmp_path_factory) -> dict[str, Saved]:
    """The last checkpoint of a run in each mode."""
    folder = tmp_path_factory.mktemp("saved")
    found = {}
    with running_server(server_model, folder / "logs", "--vllm_mode", "lora") as server:
        for name in FULL + ADAPTERS:
            found[name] = train_and_save(
                Live(MODES[name], server, recording, folder / name.replace(" ", "_"))
            )
    return found


@pytest.fixture(scope="module")
def before(server_model) -> torch.Tensor:
    """What the model gave before any training."""
    return logprobs_of(AutoModelForCausalLM.from_pretrained(server_model, dtype=torch.float32))


@contextmanager
def stock_server(model: Path | str, log_dir: Path, *flags: str) -> Iterator[str]:
    """vLLM's own server, without this package. Yields its URL."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--port",
        str(port),
    ]
    command += ["--host", "127.0.0.1", "--max-model-len", "512", *flags]
    if not torch.cuda.is_available():
        command += [
            "--dtype",
            "float32",
            "--enforce-eager",
            "--distributed-executor-backend",
            "uni",
        ]
    # needs no compiler, either
    fast_start = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    url = f"http://127.0.0.1:{port}"
    with Services(log_dir) as services:
        services.start("stock", command, env=ENVIRONMENT | fast_start, health_url=f"{url}/health")
        services.wait_healthy("stock", 180)
        yield url


def served_logprobs(url: str, model: str) -> torch.Tensor:
    """As `logprobs_of`, from a server."""
    rows = []
    for prompt in PROMPTS.tolist():
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
        reply = requests.post(f"{url}/v1/completions", json=body, timeout=60)
        assert reply.ok, reply.text
        given = reply.json()["choices"][0]["prompt_logprobs"]
        rows.append(
            [one[str(token)]["logprob"] for token, one in zip(prompt[1:], given[1:], strict=True)]
        )
    return torch.tensor(rows)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


@pytest.mark.parametrize("mode", FULL)
def test_checkpoint_loads_in_transformers_as_trained(saved, before, server_model, mode):
    checkpoint = saved[mode]
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint.folder)
    assert all(
        torch.equal(one, checkpoint.weights[name]) for name, one in loaded.named_parameters()
    )
    assert difference(logprobs_of(loaded), checkpoint.logprobs) <= EXACT
    assert difference(before, checkpoint.logprobs) > MOVED
    tokenizers = [
        AutoTokenizer.from_pretrained(folder) for folder in (checkpoint.folder, server_model)
    ]
    assert tokenizers[0]("a word").input_ids == tokenizers[1]("a word").input_ids


@pytest.mark.parametrize("mode", ADAPTERS)
def test_adapter_loads_in_peft_as_trained(saved, before, server_model, mode):
    checkpoint = saved[mode]
    base = AutoModelForCausalLM.from_pretrained(server_model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, checkpoint.folder)
    assert all(
        torch.equal(one, checkpoint.weights[name]) for name, one in loaded.named_parameters()
    )
    assert difference(logprobs_of(loaded), checkpoint.logprobs) <= EXACT
    assert difference(before, checkpoint.logprobs) > MOVED
    # Transformers finds the base by itself.
    assert (
        difference(
            logprobs_of(AutoModelForCausalLM.from_pretrained(checkpoint.folder)),
            checkpoint.logprobs,
        )
        <= EXACT
    )


def test_shared_and_sent_checkpoints_have_one_form(saved):
    """So that one of them stands for all at a server that takes minutes to start."""
    forms = []
    for mode in FULL:
        tensors = load_file(saved[mode].folder / "model.safetensors")
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        forms.append((shapes, (saved[mode].folder / "config.json").read_text()))
    assert forms[0] == forms[1]


@pytest.mark.full  # what is loaded is proven equal above
def test_checkpoint_on_stock_server_equals_trainer(saved, tmp_path):
    checkpoint = saved["colocate"]
    with stock_server(checkpoint.folder, tmp_path) as url:
        assert (
            difference(served_logprobs(url, str(checkpoint.folder)), checkpoint.logprobs) <= EXACT
        )


@pytest.mark.full
def test_adapters_on_stock_server_equal_trainer(saved, before, server_model, tmp_path):
    modules = [f"{mode.replace(' ', '_')}={saved[mode].folder}" for mode in ADAPTERS]
    with stock_server(
        server_model, tmp_path, "--enable-lora", "--max-lora-rank", "8", "--lora-modules", *modules
    ) as url:
        assert difference(served_logprobs(url, server_model), before) <= EXACT
        for mode in ADAPTERS:
            assert (
                difference(served_logprobs(url, mode.replace(" ", "_")), saved[mode].logprobs)
                <= EXACT
            ), mode


def test_run_with_masters_saves_served_bfloat16(server_model, recording, tmp_path):
    with running_server(server_model, tmp_path / "logs", "--dtype", "bfloat16") as server:
        live = Live(MODES["colocate"], server, recording, tmp_path / "run")
        publisher = live.publisher()
        settings = {
            "max_steps": STEPS,
            "save_strategy": "steps",
            "save_steps": STEPS,
            "learning_rate": 1e-3,
        }
        with live.trainer(publisher, **settings) as trainer:
            trainer.train()
            masters = trainer.optimizer.state_dict()["masters"]
            loaded = AutoModelForCausalLM.from_pretrained(live.folder / f"checkpoint-{STEPS}")
            served = publisher.transfer.views
            assert {one.dtype for one in loaded.parameters()} == {torch.bfloat16}
            assert any(not torch.equal(one, one.bfloat16().float()) for one in masters)
            assert all(torch.equal(one, served[name]) for name, one in loaded.named_parameters())
            assert torch.equal(logprobs_of(loaded), logprobs_of(trainer.model))
