"""Attaching needs no table of architectures: every family is shared, copied or refused by what
vLLM's loader does."""

import json
import os

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from tests.forge import SERVER
from tests.server_process import running_server
from tests.tiers import FULL
from tests.weights.architectures import ENVIRONMENT, FAMILIES, Row, read_rows
from tests.weights.architectures import make_model as save_family
from tests.weights.live import snapshot
from tests.weights.trainers import make_publisher, make_trainer
from trl_atropos.errors import AttachError
from trl_atropos.weights.colocate import check_dtype

pytestmark = pytest.mark.slow

RUNNING = [name for name, family in FAMILIES.items() if family.expected != "refused"]
# in how vLLM keeps their weights; the others run with TRL_ATROPOS_FULL=1, and for the table
DIFFERENT = ("Gemma 2", "GPT-2", "GPT-OSS", "GLM-4-MoE")
CHECKED = RUNNING if FULL else [name for name in RUNNING if name in DIFFERENT]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[tuple[str, str], Row]:
    """Found by the command that makes the table."""
    folder = tmp_path_factory.mktemp("architectures")
    path, log = folder / "rows.jsonl", folder / "log"
    command = ["-m", "tests.weights.architectures", *CHECKED, "GLM-4-MoE/bfloat16"]
    command += ["--dtypes", "float32", "--rows", str(path)]
    process = SERVER.fork(command, os.environ | ENVIRONMENT, log)
    assert process.wait(1700) == 0, log.read_text()[-3000:]
    return read_rows(path)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CHECKED)
def test_family_computes_with_trainer_weights(found, name):
    modes = found[name, "float32"].modes
    assert (modes["colocate"].how, modes["server"].how) == (FAMILIES[name].expected, "sent"), modes
    assert bool(modes["colocate"].why) == (modes["colocate"].how == "copied")


def test_family_with_vllm_float32_routers_is_copied(
    found,
):
    modes = found["GLM-4-MoE", "bfloat16"].modes
    assert (modes["colocate"].how, modes["server"].how) == ("copied", "sent"), modes
    assert "vLLM keeps it as torch.float32, the trainer as torch.bfloat16" in modes["colocate"].why


def test_family_with_own_float32_routers_attaches(tmp_path):
    save_family(FAMILIES["ERNIE 4.5 MoE"], tmp_path, "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    assert dtypes == {torch.bfloat16, torch.float32}
    check_dtype(dtypes, "bfloat16")
    with pytest.raises(
        AttachError, match=r"is bfloat16, float32, the server.s float16\..*`dtype: float16`"
    ):
        check_dtype(dtypes, "float16")


GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
TRAINED = {
    "GPT-2": AutoConfig.for_model("gpt2", **GPT2, **NO_DROPOUT),
    "Qwen3-MoE": AutoConfig.for_model(
        "qwen3_moe", **FAMILIES["Qwen3-MoE"].fields | {"max_position_embeddings": 512}
    ),
}


@pytest.mark.server
@pytest.mark.parametrize("name", TRAINED)
def test_transposed_weights_and_experts_are_trained(name, server_model, recording, tmp_path):
    folder = str(tmp_path / "model")
    make_model(TRAINED[name], server_model, folder)
    with running_server(folder, tmp_path / "logs") as server:
        publisher = make_publisher(server, tmp_path)
        trainer = make_trainer(
            publisher, recording, folder, tmp_path / "run", max_steps=5, save_strategy="steps"
        )
        trainer.train()
        weights = snapshot(trainer.model)  # these are the server's, which is trained again now
        sending = make_publisher(server, tmp_path, "server", "gloo")
        make_trainer(sending, recording, folder, tmp_path / "sent", mode="server").train()
    assert 0 < sending.probe_max_abs_diff <= 1e-4
    assert type(publisher.transfer).__name__ == "Colocate"
    assert publisher.policy_version == 5
    assert 0 < publisher.probe_max_abs_diff <= 1e-4
    saved = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "checkpoint-5", dtype=torch.float32
    )
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (place, trained), one, other in zip(
        weights.items(), saved.parameters(), before.parameters(), strict=True
    ):
        assert torch.equal(one, trained.cpu()), place
        assert not torch.equal(one, other), place
    state = json.loads((tmp_path / "run" / "checkpoint-5" / "trainer_state.json").read_text())
    assert all(
        float(entry["grad_norm"]) > 0 for entry in state["log_history"] if "grad_norm" in entry
    )


def make_model(config: PreTrainedConfig, like: str, folder: str) -> None:
    """A random model with the tokenizer of another."""
    tokenizer = AutoTokenizer.from_pretrained(like)
    config.vocab_size = len(tokenizer)
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
