"""A recipe in miniature: the same file, the same commands, with a tiny model, local data and sizes
for two CPU cores.

What is replaced, and nowhere else: the model, the ports, the number of processes and servers (two
at most), tensor parallelism (one process for each server), the batch, the number of steps, lengths
that the tiny model has no positions for, and bfloat16 (float32, so that trainer and server can be
compared to 1e-4). The trainer's and the servers' commands are those at the head of the recipe.

Run as a module, it is the main job where accelerate refuses to shard without an accelerator.
"""

import os
import shlex
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests import ROOT
from tests.forge import FORKED_ENGINES
from tests.launching import Run, free_urls
from tests.server_process import ENVIRONMENT
from tests.sharded import _allow_on_cpu
from trl_atropos.protocol import TOKEN_VARIABLE
from trl_atropos.services.manager import Services

PROCESSES = 2
SHARDING = "TEST_SHARDING"
STEPS = 3
ROWS = 16  # of an optimizer step
POSITIONS = 2048  # of the tiny model
LENGTHS = ("max_sequence_length", "max_completion_length")
STARTS_IN = 180.0  # seconds
DROPPED = ("--tensor-parallel-size", "--host", "--port", "--num_machines", "--machine_rank")
DROPPED += ("--main_process_ip", "--main_process_port", "--num_processes")


def commands(recipe: str) -> list[list[str]]:
    """The commands in a recipe's head, as words; those of its continued lines joined."""
    head = (ROOT / recipe).read_text().split("\n\n")[0].replace("\\\n#", "")
    lines = [line.removeprefix("#   ") for line in head.splitlines() if line.startswith("#   ")]
    return [shlex.split(line, comments=True) for line in lines]


@contextmanager
def miniature(
    recipe: str,
    folder: Path,
    model: Path,
    *,
    environment: dict[str, Any],
    flags: tuple[str, ...] = (),
) -> Iterator[Run]:
    """
    The recipe's servers and trainer, started as it says; `environment` are settings of the
    environment, and `flags` end the trainer's command line.

    The run's output is in `<folder>/run`.
    """
    settings = yaml.safe_load((ROOT / recipe).read_text())
    urls = server_urls(settings)
    trainer = next(words for words in commands(recipe) if "launch" in words)
    accelerate = yaml.safe_load((ROOT / trainer[trainer.index("--config_file") + 1]).read_text())
    processes = min(PROCESSES, accelerate["num_processes"])
    here = dict(zip(urls[:PROCESSES], free_urls(min(PROCESSES, len(urls))), strict=True))
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(_shrink(settings, here, environment)))
    run = Run(folder / "run", model, env=ENVIRONMENT | FORKED_ENGINES, recipe=str(path))
    with Services(folder / "servers") as services:
        for words in commands(recipe):
            if words[0] == "export":
                run.env[TOKEN_VARIABLE] = uuid.uuid4().hex
            elif "serve" in words:
                _serve(services, words, model, list(here.values()), run.env[TOKEN_VARIABLE])
        run.entry, run.command = _trainer(run, trainer, accelerate, processes)
        run.command += _flags(settings, run, model, processes, accelerate) + [*flags]
        with run:
            yield run


def server_urls(settings: dict) -> list[str]:
    """Of a recipe's servers."""
    urls = settings.get("vllm_server_base_url", "http://127.0.0.1:9001")
    return urls if isinstance(urls, list) else [urls]


def _shrink(settings: dict, here: dict[str, str], environment: dict[str, Any]) -> dict:
    """The recipe's file with other ports, fewer servers, and other settings of the environment."""
    (spec,) = settings["environments"]
    spec = spec if isinstance(spec, dict) else {"path": spec}
    spec = spec | {"config": spec.get("config", {}) | environment}
    urls = list(here.values())
    several = isinstance(settings.get("vllm_server_base_url"), list)
    problems = {name: value for name, value in environment.items() if name != "group_size"}
    evaluations = [
        one | {"config": one["config"] | problems} for one in settings.get("evaluations", [])
    ]
    own = {"environments": [spec]} | ({"evaluations": evaluations} if evaluations else {})
    for name in LENGTHS:
        if name in settings:
            own[name] = min(settings[name], POSITIONS)
    if "vllm_args" in settings:
        own["vllm_args"] = _shortened(settings["vllm_args"])
    return settings | {"vllm_server_base_url": urls if several else urls[0], **own}


def _shortened(words: list[str]) -> list[str]:
    """The flags of a server, for the positions of the tiny model."""
    words = list(words)
    if "--max-model-len" in words:
        place = words.index("--max-model-len") + 1
        words[place] = str(min(int(words[place]), POSITIONS))
    return words


def _serve(services: Services, words: list[str], model: Path, urls: list[str], token: str) -> None:
    """Starts the servers by the command at the recipe's head, and waits until they are there."""
    stated = _shortened(_without(words[words.index("serve") + 2 :], DROPPED))
    for index, url in enumerate(urls):
        command = [sys.executable, "-m", "trl_atropos.cli", "serve", str(model), *stated]
        command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
        env = ENVIRONMENT | FORKED_ENGINES | {TOKEN_VARIABLE: token}
        services.start(f"vllm-{index}", command, env=env, health_url=f"{url}/health")
    for index in range(len(urls)):
        services.wait_healthy(f"vllm-{index}", STARTS_IN)


def _trainer(run: Run, words: list[str], accelerate: dict, processes: int) -> tuple[str, list[str]]:
    """The module to launch, and the command at the recipe's head, for this machine."""
    words = _without(words[words.index("accelerate") + 1 :], DROPPED)
    entry = words[words.index("-m") + 1]
    if accelerate["distributed_type"] == "DEEPSPEED":
        run.env[SHARDING] = f"zero{accelerate['deepspeed_config']['zero_stage']}"
        entry = "tests.end_to_end.miniature"
    options, rest = words[: words.index("-m")], words[words.index("-m") + 2 :]
    rest[rest.index("--config") + 1] = run.command[run.command.index("--config") + 1]
    if processes > 1:
        port = free_urls(1)[0].rpartition(":")[2]
        options += ["--num_processes", str(processes), "--main_process_port", port]
    return entry, [str(Path(sys.executable).with_name("accelerate")), *options, "-m", entry, *rest]


def _flags(settings: dict, run: Run, model: Path, processes: int, accelerate: dict) -> list[str]:
    per_device = 4
    parallelism = accelerate.get("parallelism_config", {})
    shares = processes // parallelism.get("parallelism_config_sp_size", 1)
    replaced = {
        "model_name_or_path": model,
        "output_dir": run.folder,
        "atropos_url": run.atropos_url,
        "max_steps": STEPS,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": ROWS // per_device // shares,
    }
    if accelerate["distributed_type"] != "DEEPSPEED":
        replaced["use_cpu"] = "true"
    if "dtype" in settings:
        replaced["dtype"] = "float32"
    if settings.get("bf16"):
        replaced["bf16"] = "false"
    if "sync_every_n_steps" in settings:
        replaced["sync_every_n_steps"] = 2
    return [word for name, value in replaced.items() for word in (f"--{name}", str(value))]


def _without(words: list[str], flags: tuple[str, ...]) -> list[str]:
    """A command line without some flags and their values."""
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if not {before, word} & set(flags)
    ]


if __name__ == "__main__":
    _allow_on_cpu(os.environ[SHARDING])
    from trl_atropos.train import main

    main()
