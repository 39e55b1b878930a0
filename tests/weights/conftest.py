"""A real trainer attached to the shared server, which gets its weights back afterwards."""

import json
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer, ReplaySource
from trl_atropos.weights.client import ServerClient
from trl_atropos.weights.colocate import ColocatePublisher


@pytest.fixture(scope="session")
def recording(tmp_path_factory) -> str:
    """Two batches of eight random rollouts with random rewards: enough to move every weight."""
    generator = random.Random(0)
    path = tmp_path_factory.mktemp("recording") / "rollouts.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(2):
            tokens = [[generator.randrange(256) for _ in range(40)] for _ in range(8)]
            group = {
                "tokens": tokens,
                "masks": [[-100] * 8 + row[8:] for row in tokens],
                "scores": [generator.random() for _ in tokens],
            }
            file.write(json.dumps({"batch": [group]}) + "\n")
    return str(path)


@pytest.fixture
def make_trainer(server, recording, tmp_path) -> Iterator[Callable[..., AtroposGRPOTrainer]]:
    """Builds trainers whose parameters are the server's; the server's weights are put back at the end."""
    attached: list[tuple[ColocatePublisher, dict[str, torch.Tensor]]] = []

    def build(publisher: ColocatePublisher | None = None, **settings) -> AtroposGRPOTrainer:
        publisher = publisher or ColocatePublisher(server.url, 30, token=server.token)
        settings = {"max_steps": 4, "learning_rate": 1e-2, **settings}
        args = AtroposGRPOConfig(
            output_dir=str(tmp_path / "run"),
            per_device_train_batch_size=8,
            max_completion_length=32,
            gradient_checkpointing=False,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            disable_tqdm=True,
            logging_steps=1,
            save_strategy="no",
            **settings,
        )
        source = ReplaySource(recording, loop=True)
        trainer = AtroposGRPOTrainer(server.model, args, rollout_source=source, policy_publisher=publisher)
        attached.append((publisher, {name: view.clone() for name, view in publisher._views.items()}))
        return trainer

    yield build
    for publisher, original in attached:
        publisher.close()
        for name, view in publisher._views.items():
            view.copy_(original[name])
    if attached:
        _drop_caches(ServerClient(server.url, 30, server.token))


def _drop_caches(client: ServerClient) -> None:
    client.hold_lease()
    client.pause()
    client.resume(0)
    client.release_lease()
