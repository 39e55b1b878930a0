"""A trainer of two processes, sharded or not, whose weights reach the servers whole and right.

`main` is what each of the two processes does; the servers belong to the test. One launch per kind
of sharding does all its runs, one trainer after the other on the same servers, because starting one
takes longer than they do.
"""

import json
import os
import re
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.server_process import Server, running_server
from tests.sharded import forget_sharding, launch, sharding_arguments
from tests.weights.live import assert_proven, snapshot
from tests.weights.trainers import make_trainer
from tests.weights.watched import largest_difference, sample
from trl_atropos.errors import AtroposTrainingError, FingerprintError
from trl_atropos.server_client import Servers
from trl_atropos.weights import gather
from trl_atropos.weights.publisher import (
    NullPublisher,
    PolicyPublisher,
    ServerPublisher,
    transfer_of,
)

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3
LENGTHS = [3, 20, 100, 270, 300, 400]  # of prompts, in tokens; a KV block has 128
CASES = {"full": ("server", False), "merged": ("server", True), "adapter": ("nccl_lora", True)}
ADAPTER = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
# Adam divides small gradients by their own size, which would turn the rounding of a sum in another
# order into a step.
PLAIN_STEPS = {"optim": "sgd", "learning_rate": 0.05}


@dataclass
class Job:
    """What the processes must know. `folder`: for what they have seen. `servers`: process ids."""

    urls: list[str]
    token: str
    model: str
    recording: str
    folder: str
    servers: list[int]

    def trainer(
        self,
        kind: str,
        mode: str,
        adapted: bool = False,
        urls: list[str] | None = None,
        **settings: Any,
    ):
        """A trainer of this process, on its half of the batch."""
        servers = Servers(urls or self.urls, 60, self.token)
        publisher = ServerPublisher(
            transfer_of(mode, servers, "auto", self.folder), probe_every_n_steps=1
        )
        return train_on(
            publisher,
            self,
            mode,
            adapted,
            per_device_train_batch_size=4,
            **sharded(kind) | settings,
        )


def sharded(kind: str) -> dict[str, Any]:
    """With a way to look at all the weights that is not ours."""
    arguments = sharding_arguments(kind)
    if kind == "zero3":
        arguments["deepspeed"]["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = (
            True
        )
    return arguments


def train_on(
    publisher: PolicyPublisher,
    job: Job,
    mode: str = "colocate",
    adapted: bool = False,
    **settings: Any,
):
    return make_trainer(
        publisher,
        job.recording,
        job.model,
        Path(job.folder),
        mode=mode,
        peft_config=LoraConfig(**ADAPTER) if adapted else None,
        max_steps=STEPS,
        **settings,
    )


# ------------------------------------------------------------------------- in each of the processes


def main(task: str, kind: str, job: str) -> None:
    told = TASKS[task](kind, Job(**json.loads(job)))
    torch.save(told, f"{json.loads(job)['folder']}/{kind}-{torch.distributed.get_rank()}.pt")


def take_turns(kind: str, job: Job) -> dict[str, Any]:
    """One trainer after the other, and after each what its server continues and all its weights as
    others see them."""
    told = {}
    for case, (mode, adapted) in CASES.items():
        url = job.urls[mode == "nccl_lora"]
        trainer = job.trainer(kind, mode, adapted, [url])
        trainer.train()
        told[case] = outcome(trainer)
        assert_proven(trainer.policy_publisher, STEPS + 1)
        told[case]["weights"] = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if trainer.accelerator.is_main_process:
            told[case]["samples"] = continuations(Server(url, job.token, job.model))
        trainer.accelerator.wait_for_everyone()
        forget_sharding()
    if kind in ("zero3", "fsdp2"):  # otherwise, the second process publishes nothing
        told["fault"] = lose_a_bit(kind, job)
    return told


def lose_a_bit(kind: str, job: Job) -> dict[str, str]:
    """What is raised after one element of the second process has changed behind the back of a
    publish."""
    trainer = job.trainer(kind, "server", False, job.urls[:1])
    transfer, name = trainer.policy_publisher.transfer, "model.layers.1.mlp.up_proj.weight"
    send = transfer.send

    def faulty(version: int) -> int:
        sent = send(version)
        for entry in gather.entries_of(trainer.model, trainer.accelerator):
            if (version, entry.name) == (2, name) and not trainer.accelerator.is_main_process:
                for values, _ in gather.local_parts(entry.parameter, trainer.accelerator):
                    values.view(-1).view(torch.int32)[3] += 1
        return sent

    transfer.send = faulty
    with pytest.raises(FingerprintError) as error:
        trainer.train()
    forget_sharding()
    return {"name": name, "error": str(error.value)}


def outcome(trainer: Any) -> dict[str, Any]:
    publisher, logs = trainer.policy_publisher, trainer.state.log_history
    return {
        "transfer": type(publisher.transfer).__name__,
        "processes": trainer.accelerator.num_processes,
        "version": publisher.policy_version,
        "served": publisher.servers.each(lambda client: client.info().policy_version),
        "worst": publisher.probe_max_abs_diff,
        "probes": [
            log["policy/probe_max_abs_diff"] for log in logs if "policy/probe_max_abs_diff" in log
        ],
    }


def share_memory(kind: str, job: Job) -> dict[str, Any]:
    """Each process trains the memory of its own server."""
    trainer = job.trainer(kind, "colocate", **PLAIN_STEPS)
    before = snapshot(trainer.model)
    trainer.train()
    views = trainer.policy_publisher.transfer.views
    assert all(
        parameter.data_ptr() == views[name].data_ptr()
        for name, parameter in trainer.model.named_parameters()
    )
    optimizer = type(trainer.optimizer.optimizer).__name__
    return outcome(trainer) | {
        "optimizer": optimizer,
        "before": before,
        "weights": snapshot(trainer.model),
    }


def lose_the_server(kind: str, job: Job) -> dict[str, Any]:
    """The server is killed with a part of version 2 in it and another on its way."""
    trainer = job.trainer(kind, "server")
    publisher, transfer, told = trainer.policy_publisher, trainer.policy_publisher.transfer, {}
    if trainer.accelerator.is_main_process:
        transfer._room = 150_000  # bytes: at most one large parameter
        send, messages = transfer._channel.send, []

        def deadly(buffer: torch.Tensor):
            sent = send(buffer)
            messages.append(publisher.policy_version)
            if messages.count(1) == 3:
                told["killed"] = time.monotonic()
                for pid in job.servers:
                    os.kill(pid, signal.SIGKILL)
            return sent

        transfer._channel.send = deadly
    with pytest.raises(AtroposTrainingError) as error:
        trainer.train()
    told |= {"error": f"{type(error.value).__name__}: {error.value}", "ended": time.monotonic()}
    return told | {"version": publisher.policy_version}


TASKS = {"take turns": take_turns, "share memory": share_memory, "lose the server": lose_the_server}


def continuations(server: Server) -> list:
    """What a server samples after fixed prompts."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(256, (length,), generator=generator).tolist() for length in LENGTHS]
    return [sample(server, prompt, 8) for prompt in prompts]


# ---------------------------------------------------------------------------------------- the tests


@contextmanager
def servers_for(model: str, folder: Path, *flags: tuple[str, ...]) -> Iterator[list[Server]]:
    """One server for each set of flags, all with the same token."""
    with ExitStack() as stack:
        token = uuid.uuid4().hex
        yield [
            stack.enter_context(running_server(model, folder / str(i), *some, token=token))
            for i, some in enumerate(flags)
        ]


def run(
    kind: str,
    task: str,
    servers: list[Server],
    recording: str,
    folder: Path,
    pids: list[int] | None = None,
) -> list[dict]:
    """What the two processes saw."""
    job = Job(
        [one.url for one in servers],
        servers[0].token,
        servers[0].model,
        recording,
        str(folder),
        pids or [],
    )
    launch(
        kind,
        2,
        "tests.weights.test_sharded_publish",
        task,
        kind,
        json.dumps(asdict(job)),
        timeout=280,
    )
    return [torch.load(folder / f"{kind}-{rank}.pt", weights_only=False) for rank in range(2)]


# Before `pair` has started its two servers, for which there would be no memory beside these.
def test_two_16_bit_servers_stay_exactly_equal(server_model, recording, tmp_path):
    flags = ("--dtype", "bfloat16")
    with servers_for(server_model, tmp_path, flags, flags) as servers:
        first, second = run("ddp", "share memory", servers, recording, tmp_path)
    assert first["version"] == second["version"] == STEPS
    assert first["served"] == second["served"] == [STEPS]
    assert first["optimizer"] == second["optimizer"] == "MasterOptimizer"
    assert min(first["worst"], second["worst"]) > 0
    for name, weight in first["weights"].items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, second["weights"][name]), name
        if weight.dim() > 1:  # the others are 1, where 16 bits are coarse
            assert not torch.equal(weight, first["before"][name]), name


@pytest.mark.parametrize("kind", ["zero3"])
def test_server_death_in_transfer_ends_all_ranks(kind, server_model, recording, tmp_path):
    with servers_for(server_model, tmp_path, ("--vllm_mode", "server")) as servers:
        pids = [
            process.pid for process in (servers[0].api, *servers[0].api.children(recursive=True))
        ]
        told = run(kind, "lose the server", servers, recording, tmp_path, pids)
    assert told[0]["error"] == told[1]["error"]
    assert re.match(
        rf"ServerError: .*{servers[0].url}.*(broke off|cannot be reached|died)", told[0]["error"]
    )
    assert [rank["version"] for rank in told] == [1, 1]
    # seconds; a publish may take 60
    assert max(rank["ended"] for rank in told) - told[0]["killed"] < 20


@pytest.fixture(scope="module")
def pair(server_model, tmp_path_factory) -> Iterator[list[Server]]:
    """A server for full weights and one for adapters. Both can share their memory."""
    folder = tmp_path_factory.mktemp("pair")
    with servers_for(
        server_model, folder, ("--vllm_mode", "server"), ("--vllm_mode", "nccl_lora")
    ) as servers:
        yield servers


# ZeRO 2 leaves parameters whole, as DDP does; what is gathered of it is in `test_gather.py`.
@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.full), "zero3", "fsdp2"])
def test_sharded_trainer_publishes_whole_weights(kind, pair, recording, tmp_path):
    ranks = run(kind, "take turns", pair, recording, tmp_path)
    for told in (rank["fault"] for rank in ranks if kind in ("zero3", "fsdp2")):
        found = (
            f"policy version 2, 1 of .* parameters of the server at {pair[0].url} are not .*: "
            f"{told['name']}"
        )
        assert re.search(found, told["error"])
    for case, (mode, adapted) in CASES.items():
        for told in (rank[case] for rank in ranks):
            assert told["transfer"] == ("MemoryLora" if mode == "nccl_lora" else "FullWeights")
            assert (told["processes"], told["version"]) == (2, STEPS)
            assert len(told["probes"]) == STEPS
            assert 0 < told["worst"] <= 1e-4
        model = AutoModelForCausalLM.from_pretrained(pair[0].model, dtype=torch.float32)
        if adapted:
            model = get_peft_model(model, LoraConfig(**ADAPTER))
        samples, untrained = ranks[0][case]["samples"], snapshot(model)
        model.load_state_dict(ranks[0][case]["weights"])
        assert {(one.begun, one.ended) for one in samples} == {(STEPS, STEPS)}
        assert largest_difference(model, snapshot(model), samples) <= 1e-4, case
        assert largest_difference(model, untrained, samples) > 1e-2, case


def test_two_ranks_train_shared_memories_like_one(pair, recording, tmp_path):
    give_back_the_weights(pair, recording, tmp_path)
    told = run("ddp", "share memory", pair, recording, tmp_path)
    job = Job([], "", pair[0].model, recording, str(tmp_path), [])
    alone = train_on(NullPublisher(), job, per_device_train_batch_size=8, **PLAIN_STEPS)
    alone.train()
    reference = snapshot(alone.model)
    for rank, server in zip(told, pair, strict=True):
        assert (rank["transfer"], rank["processes"]) == ("Colocate", 2)
        assert [rank["version"]] == rank["served"] == [STEPS]
        assert 0 < rank["worst"] <= 1e-4
        for name, weight in rank["weights"].items():
            torch.testing.assert_close(weight, reference[name], rtol=0, atol=1e-5)
            assert torch.equal(weight, told[0]["weights"][name]), name
        assert largest_difference(alone.model, reference, continuations(server)) <= 1e-5
        assert largest_difference(alone.model, rank["before"], continuations(server)) > 1e-3


def give_back_the_weights(servers: list[Server], recording: str, folder: Path) -> None:
    """What the servers' checkpoints say, whatever was trained before."""
    job = Job(
        [one.url for one in servers], servers[0].token, servers[0].model, recording, str(folder), []
    )
    publisher = ServerPublisher(
        transfer_of("server", Servers(job.urls, 60, job.token), "auto", job.folder)
    )
    train_on(publisher, job, mode="server", learning_rate=0.0).train()
