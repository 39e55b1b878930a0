"""Starts the processes that a benchmark measures, and waits for their end."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trl_atropos.services.service_log import tail

ROOT = Path(__file__).resolve().parents[1]
ENDS_WITHIN = 60.0  # seconds after SIGTERM
SHOWN_AT_TIMEOUT = 300  # lines: some trainers write their stacks by then


def run_variables() -> dict[str, str]:
    """Returns the variables of a process that imports this checkout, and asks the network for
    nothing."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",  # a log has all that was printed by a process that is ended
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


def launched(config: str, *words: str, gpus: Sequence[str] = ()) -> list[str]:
    """
    Returns a command by which `accelerate launch` runs `words`.

    Args:
        config: name of a file in `configs/accelerate`.
        words: module and arguments, and before them options of accelerate's.
        gpus: named as in `CUDA_VISIBLE_DEVICES`, which accelerate sets for what it starts. Without
            them, it takes those of the file.
    """
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--quiet"]
    command += ["--config_file", str(ROOT / "configs/accelerate" / config)]
    if gpus:
        command += ["--gpu_ids", ",".join(gpus)]
    return [*command, *words]


def run_to_end(
    who: str,
    command: Sequence[str],
    log: Path,
    timeout: float,
    variables: Mapping[str, str],
    folder: Path | None = None,
) -> None:
    """
    Runs a command, and ends this process with the last lines of its log if it fails.

    Args:
        who: benchmark and process, as the message names them.
        log: file for what the command prints.
        timeout: seconds after which it has failed.
        variables: that it gets besides those of this process.
        folder: that it runs in.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, cwd=folder, env=os.environ | variables
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            sys.exit(f"{who} took longer than {timeout:g} s\n{tail(log, SHOWN_AT_TIMEOUT)}")
        finally:
            _end(process)
    if code:
        sys.exit(f"{who} ended with exit code {code}\n{_last_words(log)}")


def _end(process: subprocess.Popen) -> None:
    process.terminate()  # which a launcher passes on to what it has started
    try:
        process.wait(ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_words(log: Path) -> str:
    """Returns the error of a run, which the last lines of a server may follow."""
    _, mark, error = log.read_text(errors="replace").rpartition("trl_atropos: error:")
    return mark + error if mark else tail(log)
