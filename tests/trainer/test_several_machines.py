"""How the processes of a run on several machines begin and end together.

`main` is what each of two processes does, with an `output_dir` of its own as on two machines
without a common file system. `tests/end_to_end/nodes.py` has machines with networks, and takes minutes.
"""

import json
import os
import time
from pathlib import Path

import pytest

from tests.sharded import launch
from trl_atropos.recipe import RecipeError, parse
from trl_atropos.recipe_checks import check_files
from trl_atropos.run_messages import lost_contact
from trl_atropos.train import _heed_ddp_timeout

pytestmark = pytest.mark.slow

# steps of the checkpoints on each machine: one was late with the last
SAVED = {0: (2, 4, 6), 1: (2, 4)}
TIMEOUT = 5  # seconds


def recipe_of(model: str, folder: Path, resume: str):
    argv = [
        "--model_name_or_path",
        model,
        "--output_dir",
        str(folder),
        "--max_steps",
        "9",
        "--use_cpu",
        "true",
    ]
    return parse([*argv, "--resume_from_checkpoint", resume, "--ddp_timeout", str(TIMEOUT)])


def main(model: str, folder: str) -> None:
    import torch.distributed as dist

    told, rank = {}, int(os.environ["RANK"])
    own = Path(folder, f"machine{rank}")
    for step in SAVED[rank]:
        (own / f"checkpoint-{step}").mkdir(parents=True)
        (own / f"checkpoint-{step}" / "trainer_state.json").write_text(
            json.dumps({"global_step": step})
        )
    recipe = check_files(recipe_of(model, own, "true"))
    told["resumed"] = os.path.basename(recipe.training.resume_from_checkpoint)
    try:
        check_files(recipe_of(model, own if rank == 0 else own / "nothing", "true"))
    except RecipeError as error:
        told["refused"] = str(error)
    _heed_ddp_timeout(recipe.training)
    if rank == 0:
        began = time.monotonic()
        try:
            dist.barrier()
        except RuntimeError as error:
            told |= {"lost": lost_contact(error), "seconds": time.monotonic() - began}
    Path(folder, f"told{rank}.json").write_text(json.dumps(told))
    if rank == 1:
        given_up = time.monotonic() + TIMEOUT + 30
        while not Path(folder, "told0.json").exists() and time.monotonic() < given_up:
            time.sleep(0.1)  # silent, but there
    os._exit(0)  # the group is broken


@pytest.fixture(scope="module")
def told(tiny_model, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("machines")
    launch("ddp", 2, "tests.trainer.test_several_machines", str(tiny_model), str(folder))
    return [json.loads((folder / f"told{rank}.json").read_text()) for rank in (0, 1)]


def test_run_resumes_from_last_common_checkpoint(told):
    assert [one["resumed"] for one in told] == ["checkpoint-4", "checkpoint-4"]


def test_checkpoint_missing_on_one_machine_ends_all(told):
    for one in told:
        assert "there is no checkpoint in" in one["refused"]
        assert (
            "put `output_dir` on a file system that they share, or train with `save_on_each_node"
            in one["refused"]
        )


def test_silent_process_is_left_after_ddp_timeout(told):
    assert told[0]["lost"].startswith(
        "Another process of this trainer, on this machine or on another one, has ended"
    )
    assert TIMEOUT - 1 < told[0]["seconds"] < TIMEOUT + 4
