"""Waiting for rollouts for longer than the process group's timeout: two real processes, a real
Atropos API."""

import json
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tests.rollout_factory import arguments, make_group, step_logs
from tests.rollouts.conftest import Api, restartable_api  # noqa: F401 - a fixture
from tests.sharded import launch
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.recipe import RecipeError, parse
from trl_atropos.rollouts.source import AtroposSource

TIMEOUT = 10  # seconds, of the process group
WAIT = 20.0  # seconds without a rollout
ROWS = 8


class BlockingSource(AtroposSource):
    """What a source must not do: it keeps rank 0 to itself for as long as it waits."""

    def poll(self, num_rows, timeout):
        return super().poll(num_rows, 10 * WAIT)


def main(url: str, model: str, folder: str, source: str) -> None:
    """What each of the two processes does."""
    import torch.distributed

    config = AtroposGRPOConfig(
        **arguments(
            Path(folder, "run"),
            per_device_train_batch_size=ROWS // 2,
            replay_paths=[folder],  # not read, as there is a source: no server is wanted
        )
    )
    trainer = AtroposGRPOTrainer(model, args=config, rollout_source=globals()[source](url))
    # On the CPU, transformers does not hand `ddp_timeout` on.
    torch.distributed.distributed_c10d._set_pg_timeout(
        timedelta(seconds=TIMEOUT), torch.distributed.group.WORLD
    )
    trainer.train()
    told = {
        "logs": step_logs(trainer),
        "step": trainer.state.global_step,
        "refusal": refusal(model, folder),
    }
    Path(folder, f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(told))


def refusal(model: str, folder: str) -> str:
    """What a recipe is told whose services may take longer than the processes wait for each
    other."""
    argv = [
        "--model_name_or_path",
        model,
        "--output_dir",
        folder,
        "--max_steps",
        "1",
        "--use_cpu",
        "true",
    ]
    argv += ["--start_atropos", "true", "--start_vllm", "true", "--service_timeout", "900"]
    try:
        parse(argv)
    except RecipeError as error:
        return str(error)
    return ""


def deliver_late(api: Api, model: Path) -> None:
    """What an environment does that takes its time."""
    deadline = time.monotonic() + 120
    while api.get("/info")["batch_size"] == -1:
        if time.monotonic() > deadline:
            return  # the trainer has failed, and the test will say why
        time.sleep(0.2)
    time.sleep(WAIT)
    api.deliver(*[make_group(model, 4, seed) | {"env_id": None} for seed in range(ROWS // 4)])


def train(api: Api, model: Path, folder: Path, source: str) -> None:
    (folder / "empty.jsonl").touch()
    environment = threading.Thread(target=deliver_late, args=(api, model), daemon=True)
    environment.start()
    launch(
        "ddp",
        2,
        "tests.trainer.test_long_wait",
        api.url,
        str(model),
        str(folder),
        source,
        timeout=240,
    )
    environment.join(10)


@pytest.mark.full
@pytest.mark.slow
def test_wait_beyond_process_group_timeout_is_harmless(
    restartable_api,  # noqa: F811
    tiny_model,
    tmp_path,
):
    train(restartable_api, tiny_model, tmp_path, "AtroposSource")
    for rank in (0, 1):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert told["step"] == 1
        # it begins to wait a while after it joins
        assert told["logs"][0]["time/wait_for_rollouts"] >= 1.5 * TIMEOUT
        assert told["refusal"].startswith(
            "2 services may take 900 s each to become healthy (`service_timeout`), but"
        )


@pytest.mark.full
def test_blocking_source_trips_process_group_timeout(restartable_api, tiny_model, tmp_path):  # noqa: F811
    with pytest.raises(AssertionError, match=r"(?i)time.?out|timed out|connection"):
        train(restartable_api, tiny_model, tmp_path, "BlockingSource")
