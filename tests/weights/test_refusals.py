"""What cannot work with a server is refused before training, in one message that names the way
out."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig, get_peft_model
from transformers import AutoModelForCausalLM

from recipes.quickstart.make_model import make_model
from tests.server_process import Server, running_server
from tests.weights import trainers
from tests.weights.trainers import make_publisher, tolerance
from trl_atropos import AtroposGRPOTrainer
from trl_atropos.errors import AttachError, ProbeError, RecipeError, ServerError
from trl_atropos.protocol import machine_id
from trl_atropos.server_client import ServerClient, Servers
from trl_atropos.weights.publisher import ServerPublisher, transfer_of
from trl_atropos.weights.transfer import choose_transport

pytestmark = pytest.mark.server

ADAPTER_MODES = ("nccl_lora", "lora")
GONE_WITHIN = 20.0  # seconds
MODES = ("colocate", "server", *ADAPTER_MODES)
Build = Callable[..., AtroposGRPOTrainer]


def adapter(mode: str = "nccl_lora", **settings) -> PeftConfig | None:
    """What a mode trains, if that is an adapter."""
    return (
        LoraConfig(**{"r": 8, "target_modules": "all-linear", **settings})
        if mode in ADAPTER_MODES
        else None
    )


@pytest.fixture(scope="module")
def lora_server(server_model, tmp_path_factory) -> Iterator[Server]:
    """A server for adapters. Nothing here changes its base model."""
    folder = tmp_path_factory.mktemp("lora_server")
    # `lora` is `nccl_lora` and a variable of the environment.
    with running_server(
        server_model, folder, "--vllm_mode", "lora", "--max-lora-rank", "8"
    ) as running:
        yield running


@pytest.fixture
def build(recording, tmp_path) -> Build:
    """`build(server, mode, peft_config)` makes a trainer of that mode on that server."""

    def build(
        server: Server,
        mode: str,
        peft_config=None,
        model: Any = None,
        transport: str = "auto",
        **more,
    ):
        publisher = make_publisher(server, tmp_path, mode, transport)
        chosen = model or server.model
        return trainers.make_trainer(
            publisher,
            recording,
            chosen,
            tmp_path,
            mode=mode,
            peft_config=peft_config,
            **{"max_steps": 2} | more,
        )

    return build


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory) -> str:
    """The servers' model from another seed."""
    folder = tmp_path_factory.mktemp("other_weights")
    make_model(str(folder), 1)
    return str(folder)


@pytest.fixture(scope="module")
def other_tokenizer(server_model, tmp_path_factory) -> str:
    """The servers' model with two letters swapped."""
    folder = tmp_path_factory.mktemp("other_tokenizer")
    shutil.copytree(server_model, folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


@contextmanager
def another_trainer(server: Server) -> Iterator[None]:
    client = ServerClient(server.url, 30, server.token)
    client.hold_lease()
    try:
        yield
    finally:
        client.release_lease()


# ----------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize("mode", ADAPTER_MODES)
def test_adapter_mode_without_adapter_is_refused(lora_server, build, mode):
    with pytest.raises(
        AttachError, match=r"the run has none: set `use_peft: true`.*or use `vllm_mode: colocate`"
    ):
        build(lora_server, mode)


@pytest.mark.parametrize("mode", ADAPTER_MODES)
@pytest.mark.parametrize("ranks", [{"r": 16}, {"r": 4, "rank_pattern": {"q_proj": 16}}])
def test_lora_rank_above_server_limit_is_refused(lora_server, build, mode, ranks):
    message = r"rank is 16, the server's largest 8: start the server with `--max-lora-rank 16` or more, or lower `lora_r"
    with pytest.raises(AttachError, match=message):
        build(lora_server, mode, adapter(**ranks))


@pytest.mark.parametrize("mode", ADAPTER_MODES)
def test_modules_saved_whole_are_refused(lora_server, build, mode):
    message = r"`modules_to_save: norm`.* trains whole modules.*Leave `modules_to_save` out, or use `vllm_mode: server`"
    with pytest.raises(RecipeError, match=message):
        build(lora_server, mode, adapter(modules_to_save=["norm"]))


@pytest.mark.parametrize("mode", ADAPTER_MODES)
def test_non_lora_adapter_is_refused(lora_server, build, mode):
    other = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    with pytest.raises(
        RecipeError, match=r"type IA3 cannot be served by vLLM.* Use a `LoraConfig`"
    ):
        build(lora_server, mode, other)


@pytest.mark.parametrize("mode", ADAPTER_MODES)
@pytest.mark.parametrize("setting", ["use_dora", "lora_bias"])
def test_unservable_lora_is_refused_without_server(build, mode, setting):
    nowhere = Server("http://127.0.0.1:1", "token", "never loaded")
    message = rf"`{setting}: True`, .* or use `vllm_mode: server`, which sends merged weights"
    with pytest.raises(RecipeError, match=message):
        build(nowhere, mode, adapter(**{setting: True}))


@pytest.mark.parametrize("mode", ADAPTER_MODES)
def test_adapter_of_any_name_is_served(lora_server, build, mode):
    """The probe compares what the server samples with the trainer's own log-probabilities."""
    base = AutoModelForCausalLM.from_pretrained(lora_server.model)
    config = adapter(init_lora_weights=False, lora_alpha=4)
    trainer = build(lora_server, mode, model=get_peft_model(base, config, adapter_name="mine"))
    trainer.train()
    publisher = trainer.policy_publisher
    assert publisher.policy_version == 2
    assert 0 < publisher.probe_max_abs_diff <= tolerance(publisher)


@pytest.mark.parametrize("mode", ADAPTER_MODES)
def test_server_without_adapters_is_refused(server, build, mode):
    message = r"without adapters: add `--enable-lora --max-lora-rank R`.*trl-atropos serve --vllm_mode nccl_lora"
    with pytest.raises(AttachError, match=message):
        build(server, mode, adapter())


# ---------------------------------------------------------------------------------- another trainer


@pytest.mark.parametrize("mode", MODES)
def test_server_held_by_other_trainer_is_refused(lora_server, build, mode):
    with (
        another_trainer(lora_server),
        pytest.raises(ServerError, match="another trainer holds this server: stop it, or"),
    ):
        build(lora_server, mode, adapter(mode))


@pytest.mark.parametrize("mode", MODES)
def test_refused_trainer_releases_server(lora_server, build, mode, other_tokenizer):
    with pytest.raises(AttachError):
        build(lora_server, mode, adapter(mode), other_tokenizer)
    with another_trainer(lora_server):
        pass
    assert lora_server.generate(prompt="a", max_tokens=1).status_code == 200


# ------------------------------------------------------------------------------------ another model


@pytest.mark.parametrize("mode", MODES)
def test_another_tokenizer_is_refused(lora_server, build, mode, other_tokenizer):
    message = (
        "(?s)other_tokenizer.*different vocabularies, so the same ids mean different text. "
        "Give both the same"
    )
    with pytest.raises(AttachError, match=message):
        build(lora_server, mode, adapter(mode), other_tokenizer)


def test_one_memory_of_other_weights_is_refused(server, build, other_weights):
    message = r"weights differ .*start it again on the model that the trainer loads. \(The server has .*, the trainer .*oth"
    with pytest.raises(AttachError, match=message):
        build(server, "colocate", model=other_weights)


def test_sent_weights_replace_other_weights(server, make_trainer, build, other_weights):
    make_trainer().policy_publisher.close()  # puts the server's weights back at the end
    trainer = build(server, "server", model=other_weights)
    trainer.train()
    publisher = trainer.policy_publisher
    assert publisher.policy_version == 2
    assert 0 < publisher.probe_max_abs_diff <= tolerance(publisher)


@pytest.mark.parametrize("mode", ADAPTER_MODES)
def test_adapter_on_other_base_fails_first_probe(lora_server, build, mode, other_weights):
    trainer = build(lora_server, mode, adapter(), other_weights)
    with pytest.raises(
        ProbeError, match="After publishing policy version 0, the server and the trainer disagree"
    ):
        trainer.train()


# ------------------------------------------------------------------------------ servers and the way


def test_colocated_processes_need_one_server_each(recording, tmp_path):
    servers = Servers(["http://127.0.0.1:1", "http://127.0.0.1:2"], 30, "token")
    publisher = ServerPublisher(transfer_of("colocate", servers, "auto", str(tmp_path)))
    message = r"1 processes and 2 servers: list one URL per process in `vllm_server_base_url`, or start `--num_processes 2`"
    with pytest.raises(AttachError, match=message):
        trainers.make_trainer(publisher, recording, "never loaded", tmp_path)


def test_adapter_goes_through_memory_on_request(lora_server, build):
    trainer = build(lora_server, "nccl_lora", adapter(), transport="memory")
    trainer.train()
    publisher = trainer.policy_publisher
    assert publisher.policy_version == 2
    assert 0 < publisher.probe_max_abs_diff <= tolerance(publisher)


def test_server_of_other_numerics_is_refused(lora_server, build):
    with pytest.raises(
        AttachError, match=r"start the server by `trl-atropos serve --numerics float32_head`"
    ):
        build(lora_server, "server", numerics="float32_head")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs for NCCL to connect")
@pytest.mark.parametrize("mode", ["server", "nccl_lora"])
def test_nccl_without_gpus_is_refused(lora_server, build, mode):
    with pytest.raises(
        AttachError, match=r"`weight_transport: nccl` goes from GPU to GPU.*CPU: set it to auto"
    ):
        build(lora_server, mode, adapter(mode), transport="nccl")


@pytest.mark.parametrize(
    ("asked", "machine", "device", "told"),
    [
        ("memory", "another", "cpu", "shares memory, but a server runs on another machine"),
        ("auto", "here", "cuda", "weights go from GPU to GPU or from CPU to CPU"),
    ],
)
def test_impossible_transport_is_refused(asked, machine, device, told):
    infos = [SimpleNamespace(machine=machine_id(), device="cpu", device_uuids=()) for _ in range(2)]
    infos[1].device, infos[1].machine = device, machine_id() if machine == "here" else machine
    with pytest.raises(AttachError, match=told):
        choose_transport(asked, SimpleNamespace(infos=infos), torch.device("cpu"))


@pytest.mark.slow
def test_trainer_notices_server_replaced_after_ctrl_c(server_model, recording, tmp_path):
    with running_server(server_model, tmp_path / "first") as first:
        publisher = make_publisher(first, tmp_path)
        trainer = trainers.make_trainer(publisher, recording, server_model, tmp_path, max_steps=1)
        trainer.train()
        # as a terminal does: the engine gets it, too
        os.killpg(first.api.pid, signal.SIGINT)
        assert first.process.wait(GONE_WITHIN) == 128 + signal.SIGINT
        said = first.log.read_text()
        assert "\ntrl-atropos serve: stopped by Ctrl-C.\n" in said
        assert "Traceback" not in said
    port = int(first.url.rsplit(":", 1)[1])
    with running_server(server_model, tmp_path / "second", port=port, token=first.token) as second:
        message = r"was restarted since this trainer was built.*build the trainer again \(its last checkpoint can be resum"
        with pytest.raises(ServerError, match=message):
            trainer.train()
        assert second.generate(prompt="a", max_tokens=1).status_code == 200
