"""The processes of `trl-atropos bench target`: `python -m benchmarks.target_sides NAME FOLDER`.

`FOLDER/settings.json` has the protocol and the model. `model` pre-trains the model and ends. The
sides `ours`, `bitwise` and `trl` start their vLLM and write `FOLDER/ready`. Then they read a seed a
line from standard input, train with it, and write `FOLDER/seed-N.json`. Both stop at the target in
the same way (`target_exam.py`).
"""

import contextlib
import functools
import gc
import hashlib
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from benchmarks.target_environment import FIRST_REQUEST
from benchmarks.target_exam import Exam, Settings, do_nothing, pretrain
from trl_atropos import __version__
from trl_atropos.services.addresses import free_port
from trl_atropos.services.mps import start_mps

if TYPE_CHECKING:  # it imports vLLM, which our side's process needs not
    from trl_atropos.weights.publisher import ServerPublisher

ENVIRONMENT = Path(__file__).with_name("target_environment.py")
STALENESS = "rollouts/staleness_mean"  # a metric
# TRL sets them for vLLM.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


# ----------------------------------------------------------------------------------------- our side


def serve_ours(settings: Settings, is_bitwise: bool) -> None:
    """Keeps the recipe's servers, and trains each seed with an API, an environment and a trainer of
    its own."""
    recipe = {**settings.recipe, **settings.protocol["training"], **settings.protocol["ours"]}
    if is_bitwise:
        recipe |= settings.protocol["bitwise"]
    if recipe.get("mps"):
        start_mps(str(settings.folder / "mps"))
    os.environ.setdefault("CUDA_MPS_CLIENT_PRIORITY", "1")

    import trl_atropos  # only when MPS is there, which CUDA looks for once

    urls = recipe.get("vllm_server_base_url", [""])
    if is_bitwise:
        urls = urls[:1]
    recipe |= {
        "model_name_or_path": str(settings.model),
        "vllm_server_base_url": [f"http://127.0.0.1:{free_port()}" for _ in urls],
        "output_dir": str(settings.folder / "servers"),
        "environments": [],
        "start_atropos": False,
    }
    shutil.rmtree(recipe["output_dir"], ignore_errors=True)
    with trl_atropos.start_services(written(recipe)):
        exam = Exam(settings)
        (settings.folder / "ready").touch()
        process_start_s = time.time() - settings.started_at
        for line in sys.stdin:
            row = train_ours(settings, recipe, int(line), exam, is_bitwise)
            row["process_start_s"] = process_start_s
            write_row(settings, row)


def written(recipe: dict[str, Any]) -> Path:
    """Writes a recipe beside its `output_dir`. Returns the file."""
    path = Path(recipe["output_dir"]).with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe))
    return path


def train_ours(
    settings: Settings, recipe: dict[str, Any], seed: int, exam: Exam, is_bitwise: bool
) -> dict[str, Any]:
    import trl_atropos

    ordered_at = time.time()
    output_dir = settings.folder / f"seed-{seed}"
    shutil.rmtree(output_dir, ignore_errors=True)  # of a run that was cut off
    note = settings.folder / f"first-request-{seed}"
    note.unlink(missing_ok=True)
    task = dict(settings.task)
    if is_bitwise:
        task["max_batches_offpolicy"] = 1
    environment = {"path": str(ENVIRONMENT), "config": task, "env": {FIRST_REQUEST: str(note)}}
    recipe = recipe | {
        "start_vllm": False,
        "start_atropos": True,
        "atropos_url": f"http://127.0.0.1:{free_port()}",
        "environments": [environment],
        "output_dir": str(output_dir),
        "seed": seed,
    }
    with trl_atropos.start_services(written(recipe)) as services:
        trainer = trl_atropos.AtroposGRPOTrainer(**services.trainer_arguments, callbacks=[exam])
        publisher = trainer.policy_publisher
        exam.begin(publisher.judge_last_publish, functools.partial(servers_paused, publisher))
        trainer.train()
    first_request = float(note.read_text())
    row = exam.row(first_request)
    staleness = []
    for logs in trainer.state.log_history:
        if STALENESS in logs:
            staleness.append(logs[STALENESS])
    row |= {
        "side": "bitwise" if is_bitwise else "ours",
        "seed": seed,
        "run_start_s": first_request - ordered_at,
        "staleness": statistics.mean(staleness) if staleness else None,
    }
    if is_bitwise:
        row |= differing_logprobs(output_dir)
    return row


@contextlib.contextmanager
def servers_paused(publisher: "ServerPublisher") -> Iterator[None]:
    """Stops sampling during the block. Requests in flight go on afterwards."""
    publisher.servers.each(lambda client: client.pause(clear_cache=False))
    try:
        yield
    finally:
        version = publisher.policy_version
        publisher.servers.each(lambda client: client.resume(version))


def differing_logprobs(output_dir: Path) -> dict[str, int]:
    """Compares the log-probabilities of the trained tokens of a strictly on-policy run, as the
    server sent them and as the trainer computed them. Returns how many there are, and how many
    differ in any bit."""
    import numpy as np

    from trl_atropos.report import run_folder
    from trl_atropos.rollouts.spool import read_rollouts

    run = run_folder.read_run(output_dir)
    rollouts, unreadable = run_folder.rollouts_of(run)
    trained = rollouts[rollouts["fate"] == run_folder.Fate.TRAINED]
    assert not unreadable, unreadable
    assert (trained["stale"] == 0).all(), "the run was not strictly on-policy"
    wanted = set(trained["index"])
    by_index, unreadable = run_folder.trainer_logprobs(output_dir / "rollouts", wanted)
    assert not unreadable, unreadable
    tokens = 0
    differ = 0
    for path in trained["path"].unique():
        for rollout in read_rollouts(Path(path)):
            if rollout.index not in wanted:
                continue
            scored = by_index[rollout.index]
            known = ~np.isnan(scored) & ~np.isnan(rollout.logprobs)
            tokens += int(known.sum())
            differ += int((scored != rollout.logprobs)[known].sum())
    return {"tokens": tokens, "differ": differ}


# --------------------------------------------------------------------------------------- TRL's side


def serve_trl(settings: Settings) -> None:
    """Keeps TRL's vLLM in this process, and trains each seed with a trainer of its own."""
    if torch.cuda.is_available():
        from trl.generation import vllm_generation

        # The next trainer gets the engine of the first, whose weights it replaces at its first
        # step. Nothing else of TRL is changed.
        vllm_generation.LLM = functools.cache(vllm_generation.LLM)
        make_trl_trainer(settings, settings.protocol["seeds"][0], [])
        release_memory()
    exam = Exam(settings)
    (settings.folder / "ready").touch()
    process_start_s = time.time() - settings.started_at
    for line in sys.stdin:
        row = train_trl(settings, int(line), exam)
        row["process_start_s"] = process_start_s
        write_row(settings, row)


def train_trl(settings: Settings, seed: int, exam: Exam) -> dict[str, Any]:
    ordered_at = time.time()
    trainer = make_trl_trainer(settings, seed, [exam])
    first_requests: list[float] = []
    if trainer.use_vllm:
        engine = trainer.vllm_generation
        engine.generate = noting_time(engine.generate, first_requests)
    exam.begin(do_nothing, contextlib.nullcontext)
    trainer.train()
    # Without vLLM, which is on the CPU, the first sample is asked for as training begins.
    first_request = [*first_requests, exam.began_at][0]
    row = exam.row(first_request)
    return row | {"side": "trl", "seed": seed, "run_start_s": first_request - ordered_at}


def make_trl_trainer(settings: Settings, seed: int, callbacks: list[Any]) -> Any:
    """Returns TRL's own trainer, on the problems that our environment asks with this seed."""
    from datasets import Dataset
    from environment import ArithmeticConfig, problems, score
    from trl import GRPOConfig, GRPOTrainer

    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)  # else the next trainer would take itself for one of several
    shared = settings.protocol["training"]
    own = settings.protocol["trl"]
    task = ArithmeticConfig(**settings.task)
    groups_per_step = shared["per_device_train_batch_size"] // own["num_generations"]
    drawn = problems("train", task.terms, task.digits, seed)
    asked = islice(drawn, settings.budget * groups_per_step)

    def right_answers(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        pairs = zip(prompts, completions, strict=True)
        return [score(prompt, completion) for prompt, completion in pairs]

    args = GRPOConfig(output_dir=str(settings.folder / f"seed-{seed}"), seed=seed, **shared, **own)
    return GRPOTrainer(
        model=str(settings.model),
        reward_funcs=right_answers,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": f"{problem}="} for problem in asked]),
        callbacks=callbacks,
    )


def noting_time(call: Callable, times: list[float]) -> Callable:
    """Returns `call`, which notes in `times` when it is called."""

    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        times.append(time.time())
        return call(*args, **kwargs)

    return noted


# ----------------------------------------------------------------------------------------- the rows


def hash_of(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()[:12]


def device_of_this_process() -> dict[str, str]:
    """Returns the name of the device, and what tells this machine from others."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return {"device": properties.name, "machine": str(properties.uuid)}
    return {"device": "cpu", "machine": os.uname().nodename}


def release_memory() -> None:
    """Gives the memory of the last run back, which the other side may need."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write_row(settings: Settings, row: dict[str, Any]) -> None:
    """Writes what a run came to, with what it ran on."""
    release_memory()
    row |= device_of_this_process()
    row["model"] = hash_of(settings.model)
    row["trl_atropos"] = __version__
    for package in ("torch", "trl", "transformers"):
        row[package] = version(package)
    draft = settings.folder / "draft.json"
    draft.write_text(json.dumps(row))
    draft.rename(settings.folder / f"seed-{row['seed']}.json")


def main() -> None:
    name, folder = sys.argv[1:]
    settings = Settings(Path(folder))
    if name == "model":
        pretrain(settings)
    elif name == "trl":
        serve_trl(settings)
    else:
        serve_ours(settings, is_bitwise=name == "bitwise")


if __name__ == "__main__":
    main()
