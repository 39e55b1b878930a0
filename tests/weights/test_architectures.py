"""Attaching needs no table of architectures: GPT-2 keeps its linear layers transposed, and fused in another way."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from tests.server_process import running_server
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer, ReplaySource
from trl_atropos.weights.colocate import ColocatePublisher

pytestmark = pytest.mark.server


def test_gpt2_is_trained_in_place(server_model, recording, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(server_model)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=128,
        n_layer=2,
        n_head=4,
        n_positions=512,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    folder = str(tmp_path / "gpt2")
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    args = AtroposGRPOConfig(
        output_dir=str(tmp_path / "run"),
        max_steps=5,
        learning_rate=1e-2,
        per_device_train_batch_size=8,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        logging_steps=1,
    )
    with running_server(folder, tmp_path / "logs") as server:
        publisher = ColocatePublisher(server.url, 30, token=server.token)
        source = ReplaySource(recording, loop=True)
        trainer = AtroposGRPOTrainer(folder, args, rollout_source=source, policy_publisher=publisher)
        trainer.train()
    assert publisher.policy_version == 5
    assert publisher.probe_max_abs_diff <= 1e-4
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-5", dtype=torch.float32)
    for (name, saved), trained in zip(plain.named_parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(saved, trained.detach().cpu()), name
    state = json.loads((tmp_path / "run" / "checkpoint-5" / "trainer_state.json").read_text())
    assert all(float(entry["grad_norm"]) > 0 for entry in state["log_history"] if "grad_norm" in entry)
