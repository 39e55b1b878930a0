"""One trainer, and more than one process that samples: two servers, and one server over two workers
or two copies."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch
from peft import LoraConfig

from tests.server_process import Server, running_server
from tests.weights.live import CUDA, GPU_FLAGS, all_gpus, assert_proven, disturb, publish, snapshot
from tests.weights.test_sharded_publish import (
    ADAPTER,
    continuations,
    give_back_the_weights,
    servers_for,
)
from tests.weights.trainers import make_publisher, make_trainer
from tests.weights.watched import largest_difference
from trl_atropos.errors import FingerprintError
from trl_atropos.server_client import Servers
from trl_atropos.tensors.channel import unpack
from trl_atropos.weights.publisher import ServerPublisher, transfer_of

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3


def train(
    servers: list[Server],
    mode: str,
    adapted: bool,
    recording: str,
    folder: Path,
    left_out: tuple[str, ...] = (),
) -> ServerPublisher:
    """A run on servers that have been trained before. Returns its publisher."""
    give_back_the_weights(servers, recording, folder)
    connected = Servers([one.url for one in servers], 60, servers[0].token)
    publisher = ServerPublisher(
        transfer_of(mode, connected, "auto", str(folder)), probe_every_n_steps=1
    )
    peft_config = LoraConfig(**ADAPTER) if adapted else None
    trainer = make_trainer(
        publisher,
        recording,
        servers[0].model,
        folder,
        mode=mode,
        peft_config=peft_config,
        max_steps=STEPS,
    )
    untrained = snapshot(trainer.model)
    trainer.train()
    assert publisher.policy_version == STEPS
    assert 0 < publisher.probe_max_abs_diff <= 1e-4
    assert_proven(publisher, STEPS + 1, left_out)
    for server in servers:
        samples = continuations(server)
        assert {(one.begun, one.ended) for one in samples} == {(STEPS, STEPS)}
        assert largest_difference(trainer.model, snapshot(trainer.model), samples) <= 1e-4
        assert largest_difference(trainer.model, untrained, samples) > 1e-2
    return publisher


@pytest.fixture(scope="module")
def two_servers(server_model, tmp_path_factory) -> Iterator[list[Server]]:
    flags = ("--vllm_mode", "nccl_lora")
    with servers_for(server_model, tmp_path_factory.mktemp("two_servers"), flags, flags) as servers:
        yield servers


@pytest.fixture(scope="module")
def two_workers(server_model, tmp_path_factory) -> Iterator[Server]:
    """A server that splits the model over two processes; over two GPUs if there are any, with the
    trainer on the
    first (`CUDA_VISIBLE_DEVICES=0`)."""
    if CUDA and all_gpus() < 2:
        pytest.skip("needs two GPUs")
    flags = [
        "--tensor-parallel-size",
        "2",
        "--distributed-executor-backend",
        "mp",
        "--vllm_mode",
        "nccl_lora",
    ]
    if CUDA:
        flags += ["--dtype", "bfloat16", *GPU_FLAGS]  # adapters take 16 bits there
    with pytest.MonkeyPatch.context() as patch:
        # else vLLM wants a core for each, and one to spare
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        with running_server(server_model, tmp_path_factory.mktemp("two_workers"), *flags) as server:
            patch.undo()  # the trainer keeps to its own
            yield server


@pytest.fixture(scope="module")
def two_copies(server_model, tmp_path_factory) -> Iterator[Server]:
    """A server with two engines, which take its requests in turn."""
    flags = ["--data-parallel-size", "2", "--vllm_mode", "nccl_lora"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        with running_server(server_model, tmp_path_factory.mktemp("two_copies"), *flags) as server:
            yield server


@pytest.mark.parametrize(("mode", "adapted"), [("server", False), ("nccl_lora", True)])
def test_one_trainer_publishes_to_two_servers(two_servers, mode, adapted, recording, tmp_path):
    publisher = train(two_servers, mode, adapted, recording, tmp_path)
    assert publisher.servers.each(lambda client: client.info().policy_version) == [STEPS, STEPS]


def test_full_weights_replace_former_adapter(two_servers, recording, tmp_path):
    train(two_servers, "nccl_lora", True, recording, tmp_path)
    train(two_servers, "server", False, recording, tmp_path)


@pytest.mark.full  # `test_one_memory_is_no_way_to_two_workers_...` sends both, too
@pytest.mark.parametrize(("mode", "adapted"), [("server", True), ("nccl_lora", True)])
def test_weights_reach_both_workers(two_workers, mode, adapted, recording, tmp_path):
    publisher = train([two_workers], mode, adapted, recording, tmp_path)
    assert publisher.servers.info.num_workers == 2


# split by rows, by columns, and with padding
@pytest.mark.parametrize("name", ["q_proj", "o_proj", "embed_tokens"])
def test_workers_with_each_others_shard_are_found(two_workers, name, recording, tmp_path):
    give_back_the_weights([two_workers], recording, tmp_path)
    publisher = make_publisher(two_workers, tmp_path, "server", probe_every_n_steps=0)
    trainer = make_trainer(publisher, recording, two_workers.model, tmp_path, mode="server")
    fill_messages = publisher.transfer._fill_messages
    wrong = []

    def faulty():
        for message in fill_messages():
            tensors = unpack(message.content, message.tensors)
            for spec, values in zip(message.tensors, tensors, strict=True):
                if wrong == [] and name in spec.name:
                    wrong.append(spec.name)
                    dim = int(name == "o_proj")
                    values.copy_(torch.cat(values.chunk(2, dim)[::-1], dim))
            yield message

    try:
        publisher.hold()
        publish(trainer, lambda: disturb(trainer.model, 0.01))
        publisher.judge_last_publish()
        publisher.transfer._fill_messages = faulty
        publish(trainer, lambda: None)
        with pytest.raises(FingerprintError) as error:
            publisher.judge_last_publish()
        assert " 1 of " in str(error.value) and wrong[0] in str(error.value)
    finally:
        publisher.close()


@pytest.mark.parametrize(
    ("mode", "adapted"),
    [pytest.param("server", False, marks=pytest.mark.full), ("nccl_lora", True)],
)
def test_weights_reach_both_copies(two_copies, mode, adapted, recording, tmp_path):
    publisher = train_both(two_copies, mode, adapted, recording, tmp_path)
    assert publisher.servers.info.num_workers == 2


def test_two_copies_fall_back_to_sent_weights(two_copies, recording, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        publisher = train_both(two_copies, "colocate", False, recording, tmp_path)
    assert type(publisher.transfer).__name__ == "FullWeights"
    assert not publisher.transfer.in_place
    assert "it has 2 copies of the model" in caplog.text


def train_both(
    server: Server, mode: str, adapted: bool, recording: str, folder: Path
) -> ServerPublisher:
    """As `train`. Both engines of the server must have sampled."""
    before = sampled_by_engine(server)
    publisher = train(
        [server], mode, adapted, recording, folder, left_out=("copies 2 to 2 of the model",)
    )
    after = sampled_by_engine(server)
    assert len(after) == 2
    assert all(after[engine] > before[engine] for engine in after)
    return publisher


def sampled_by_engine(server: Server) -> dict[str, float]:
    """How many tokens each engine of a server has sampled."""
    lines = requests.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    found = [line for line in lines if line.startswith("vllm:generation_tokens_total{")]
    return {
        line.split('engine="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in found
    }


@pytest.mark.parametrize(
    ("adapted", "transfer"),
    [pytest.param(False, "FullWeights", marks=pytest.mark.full), (True, "MemoryLora")],
)
def test_two_workers_fall_back_to_announced_copy(
    two_workers, adapted, transfer, recording, tmp_path, caplog
):
    with caplog.at_level(logging.WARNING):
        publisher = train([two_workers], "colocate", adapted, recording, tmp_path)
    assert type(publisher.transfer).__name__ == transfer
    assert "splits the model over 2 x 1 devices" in caplog.text
    assert "Falling back to a copy on the same device" in caplog.text
