"""Which of an optimizer's steps are published, and as which versions. Nothing here needs a server:
a transfer to none of them notes what it was asked to do. The optimizers are accelerate's own, with
a real gradient scaler."""

from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from trl_atropos.errors import AttachError
from trl_atropos.modes import MODES
from trl_atropos.server_client import Servers
from trl_atropos.weights.colocate import Colocate
from trl_atropos.weights.full_weights import FullWeights, Restart
from trl_atropos.weights.lora import FileLora, MemoryLora
from trl_atropos.weights.publisher import (
    NullPublisher,
    PolicyPublisher,
    ServerPublisher,
    transfer_of,
)
from trl_atropos.weights.transfer import Transfer


class Nowhere(Transfer):
    """Says what it is asked for, in the order in which it is asked."""

    def __init__(self, steps_in_place: bool):
        super().__init__(Servers([], timeout=1))
        self.steps_in_place = steps_in_place
        self.asked: list[str] = []

    def attach(self, trainer) -> None:
        pass

    def pause(self) -> Future:
        self.asked.append("pause")
        return super().pause()

    def send(self, policy_version: int) -> int:
        self.asked.append(f"send {policy_version}")
        return 0

    def resume(self, policy_version: int) -> Future:
        self.asked.append(f"resume {policy_version}")
        return super().resume(policy_version)


class Policy:
    """One parameter, and the optimizer that a trainer would have of it."""

    def __init__(self):
        Accelerator(cpu=True)  # the state that accelerate's optimizer looks at
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = AcceleratedOptimizer(
            torch.optim.SGD([self.parameter], lr=1.0), scaler=self.scaler
        )

    def step(self, factor: float = 1.0, synchronizes: bool = True) -> None:
        """A backward pass and a step, as in a loop with `Accelerator.accumulate`, which steps at
        each micro-batch."""
        state = self.optimizer.gradient_state
        state._set_sync_gradients(synchronizes)
        try:
            self.scaler.scale(self.parameter.sum() * factor).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        finally:
            state._set_sync_gradients(True)


PUBLISHERS = {
    "to nobody": NullPublisher,
    "of what the step writes": lambda: ServerPublisher(Nowhere(steps_in_place=True)),
    "of what is sent": lambda: ServerPublisher(Nowhere(steps_in_place=False)),
}


@pytest.fixture(params=PUBLISHERS)
def publisher(request) -> PolicyPublisher:
    publisher = PUBLISHERS[request.param]()
    if isinstance(publisher, ServerPublisher):
        publisher.on_pause = lambda: publisher.transfer.asked.append("let begin")
    return publisher


def assert_published(publisher: PolicyPublisher, *versions: int) -> None:
    """Since the last call, these were published and no others. The publisher to nobody only
    counts."""
    if isinstance(publisher, ServerPublisher):
        told = [
            ("pause", "let begin", f"send {version}", f"resume {version}") for version in versions
        ]
        assert publisher.transfer.asked == [*chain.from_iterable(told)]
        publisher.transfer.asked.clear()
    assert publisher.policy_version == publisher.trainer_version


def test_step_is_one_version_and_one_publish(publisher):
    policy = Policy()
    publisher.begin(policy.optimizer, 7)
    assert_published(publisher, 7)
    policy.step()
    assert policy.parameter.item() == -1
    assert publisher.policy_version == 8
    assert_published(publisher, 8)


def test_accumulating_micro_batches_publish_nothing(publisher):
    policy = Policy()
    publisher.begin(policy.optimizer, 0)
    for _ in range(3):
        policy.step(synchronizes=False)
    assert_published(publisher, 0)
    assert publisher.policy_version == 0
    policy.step()
    assert policy.parameter.item() == -4
    assert publisher.policy_version == 1
    assert_published(publisher, 1)


def test_step_skipped_by_scaler_is_no_version(publisher):
    policy = Policy()
    publisher.begin(policy.optimizer, 0)
    policy.step()
    policy.step(factor=float("inf"))
    assert policy.parameter.item() == -1
    assert publisher.policy_version == 1
    assert_published(publisher, 0, 1, 1)
    policy.step()
    assert policy.parameter.item() == -2
    assert publisher.policy_version == 2


def test_publishing_every_second_step_lags_one_version():
    policy, transfer = Policy(), Nowhere(steps_in_place=False)
    publisher = ServerPublisher(transfer, sync_every_n_steps=2)
    state = SimpleNamespace(global_step=0)
    publisher._trainer = SimpleNamespace(state=state, args=SimpleNamespace(max_steps=5))
    publisher.begin(policy.optimizer, 0)
    versions = []
    for state.global_step in range(5):
        policy.step()
        versions.append((publisher.trainer_version, publisher.policy_version))
    # what is saved at the end is served
    assert versions == [(1, 0), (2, 2), (3, 2), (4, 4), (5, 5)]
    assert [one for one in transfer.asked if one.startswith("send")] == [
        "send 0",
        "send 2",
        "send 4",
        "send 5",
    ]


@pytest.mark.parametrize(
    ("mode", "transfer", "settings"),
    [
        ("colocate", Colocate, {}),
        ("server", FullWeights, {"transport": "gloo"}),
        ("nccl_lora", MemoryLora, {"transport": "gloo"}),
        ("lora", FileLora, {"folder": Path("/tmp/run/adapters")}),
        ("restart", Restart, {"folder": Path("/tmp/run/policies")}),
    ],
)
def test_every_mode_has_its_transfer(mode, transfer, settings):
    servers = Servers([], timeout=1)
    made = transfer_of(mode, servers, "gloo", "/tmp/run")
    assert type(made) is transfer and made.servers is servers
    assert {name: getattr(made, name) for name in settings} == settings


def test_mode_that_does_not_exist_is_refused():
    assert set(MODES) == {"colocate", "server", "nccl_lora", "lora", "restart"}
    with pytest.raises(
        AttachError, match=r"`vllm_mode` is 'nccl'.*\. Set it to one of: colocate, "
    ):
        transfer_of("nccl", Servers([], timeout=1), "auto", "/tmp/run")
