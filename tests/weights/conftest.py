"""A real trainer attached to the shared server, which gets its weights back afterwards."""

import json
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.server_process import running_server
from tests.weights import trainers
from tests.weights.live import MODES, Live
from trl_atropos import AtroposGRPOTrainer
from trl_atropos.server_client import ServerClient
from trl_atropos.weights.publisher import ServerPublisher


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
    """Builds trainers whose parameters are the server's; the server's weights are put back at the
    end."""
    attached: list[tuple[ServerPublisher, dict[str, torch.Tensor]]] = []

    def build(publisher: ServerPublisher | None = None, **settings) -> AtroposGRPOTrainer:
        publisher = publisher or trainers.make_publisher(server, tmp_path)
        trainer = trainers.make_trainer(
            publisher, recording, server.model, tmp_path / "run", **settings
        )
        attached.append(
            (publisher, {name: view.clone() for name, view in publisher.transfer.views.items()})
        )
        return trainer

    yield build
    for publisher, original in attached:
        publisher.close()
        for name, view in publisher.transfer.views.items():
            view.copy_(original[name])
    if attached:
        _drop_caches(ServerClient(server.url, 30, server.token))


def _drop_caches(client: ServerClient) -> None:
    client.hold_lease()
    client.pause()
    client.resume(0)
    client.release_lease()


@pytest.fixture(scope="module")  # the last one would run to the end of the session
def live(request, server_model, recording, tmp_path_factory) -> Iterator[Live]:
    """A server of the mode that the test is parametrised with: started once for all tests of that
    mode."""
    mode = MODES[request.param]
    logs = tmp_path_factory.mktemp("live_logs")
    # room for a request of seconds
    flags = ["--vllm_mode", mode.vllm_mode, "--max-model-len", "1024", *mode.flags]
    with running_server(server_model, logs, *flags) as running:
        yield Live(mode, running, recording, tmp_path_factory.mktemp("live"))
