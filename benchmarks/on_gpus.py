"""Runs everything that needs a GPU, on as many GPUs of one machine as there are, and keeps what each
job prints.

    python -m benchmarks.on_gpus --output runs/gpus                    # all of it, in the order of `JOBS`
    python -m benchmarks.on_gpus --output runs/gpus --only loop_1.7B   # one job
    python -m benchmarks.on_gpus --list                                # what would run

Each GPU takes the next job that it can run, so the jobs that matter most stand first. A job has a
log `NAME.log` in the folder, and each line of `jobs.txt` tells of one that began or ended. Jobs
that have ended well are not run again: on a machine that is lent for half an hour, call it again
with the same folder.
"""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.options import visible_gpus
from benchmarks.processes import ROOT, run_variables
from trl_atropos.services.manager import Service, Services
from trl_atropos.services.signals import install_handlers

LOOK_EVERY = 0.2  # seconds
ENDED_WELL = "ended well"


@dataclass(frozen=True)
class Job:
    """
    Attributes:
        name: Of the job and of its log.
        words: What follows `python -m`. `{output}` is the folder of all jobs.
        minutes: After which it is ended.
        gpus: That it needs.
        needs: Name of the job that has to end well before.
    """

    name: str
    words: tuple[str, ...]
    minutes: float
    gpus: int = 1
    needs: str | None = None


def _bench(name: str, text: str, minutes: float, gpus: int = 1, needs: str | None = None) -> Job:
    return Job(name, ("trl_atropos.cli", "bench", *text.split()), minutes, gpus, needs)


def _tests(name: str, text: str, minutes: float, gpus: int = 1) -> Job:
    words = ("pytest", "-m", "gpu", "-n", "0", "-s", "-rs", "--tb=short", *text.split())
    return Job(name, words, minutes, gpus)


TARGET = "target --output {output}/target.jsonl --folder {output}/"
PRE_TRAINED = " --model {output}/target/model"
LONG_STEP = "step --gradient_checkpointing --shapes equal --trainers tokens --rounds 1 --prompt 16"
OF_64K = f"{LONG_STEP} --params 4B --lora_r 16 --rows 4 --micro_batch 1 --group_size 2"
OF_64K += " --longest 65536 --median 65520"
OF_32K = f"{LONG_STEP} --params 1.7B --rows 4 --micro_batch 1 --group_size 2"
OF_32K += " --longest 32768 --median 32752"
# on 80 GB: the server's keys and values of 131,072 tokens take 20 GB, and its weights 8
LONG_RUNS = "long --params 4B --tokens 65536 --gpu_memory_utilization 0.42 --timeout 720"
SHORT_STEP = "step --params 0.6B --prompt 128 --median 512 --max_tokens 16384 --shapes spread"
SHORT_STEP += " --trainers tokens,packed_loop --rounds 3"
LOOP = "loop --against trl --sequences 128 --group_size 8 --tokens 1024 --micro_batch 16"
SAMPLING = "sampling --routes /generate,/v1/completions,chat"
EPISODES = "episodes --params 1.7B --rounds 1 --gradient_checkpointing --cases agent --turns 20"
EPISODES += " --visible 500 --stripped 500 --max_tokens 32768"

JOBS = (
    _bench("target_model", TARGET + "target --only_model", 10),
    _bench("long", LONG_RUNS + " --processes 1,2", 20, gpus=2),
    _bench("loop_1.7B", LOOP + " --params 1.7B --sides ours,trl --steps 8", 20),
    _bench("sampling_1.7B", SAMPLING + " --params 1.7B", 10),
    _bench("target_12", TARGET + "target_12 --seeds 1,2" + PRE_TRAINED, 20, needs="target_model"),
    _bench("target_34", TARGET + "target_34 --seeds 3,4" + PRE_TRAINED, 20, needs="target_model"),
    _bench("target_56", TARGET + "target_56 --seeds 5,6" + PRE_TRAINED, 20, needs="target_model"),
    _bench("step", SHORT_STEP, 8),
    # lengths are random: more steps, so that the sides have about as many tokens in each
    _bench("loop_0.44B", LOOP + " --params 0.44B --sides ours,no_logprobs,trl --steps 16", 20),
    _bench("sampling_0.44B", SAMPLING + " --params 0.44B", 10),
    _bench("attention", "attention --params 4B", 8),
    _bench(
        "target_bitwise",
        TARGET + "target_bitwise --sides bitwise --seeds 1" + PRE_TRAINED,
        12,
        needs="target_model",
    ),
    _tests("tests_memory", "tests/check/test_memory_gpu.py", 15),
    _tests("tests_share", "tests/trainer/test_gpu_share.py", 4),
    _tests("tests_divided", "tests/trainer/test_sequence_parallel_rounding.py", 8, gpus=2),
    _bench("step_64k", OF_64K, 8),
    _bench("step_32k", OF_32K, 8),
    _bench("step_64k_selective", OF_64K + " --selective", 8),
    _bench("step_32k_selective", OF_32K + " --selective", 8),
    _bench("step_64k_torch", OF_64K + " --selective --attention_kernel torch", 8),
    _bench("step_32k_torch", OF_32K + " --selective --attention_kernel torch", 8),
    _tests("tests_kernels", "tests/batches/test_attention_kernels.py", 8),
    _tests("tests_sessions", "tests/end_to_end/test_sessions.py", 12),
    _bench("episodes_1.7B", EPISODES, 10),
    _tests("tests_packing", "tests/batches/test_packing.py tests/weights/test_model_setup.py", 15),
)


def main(argv: Sequence[str] | None = None, jobs: Sequence[Job] = JOBS) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_gpus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("runs/gpus"), help="folder (default: %(default)s)")
    add("--only", metavar="LIST", help="names of jobs, in the order in which they shall begin")
    add("--gpus", metavar="LIST", help="as in CUDA_VISIBLE_DEVICES (default: all)")
    add("--list", action="store_true", help="print the jobs, and run nothing")
    add(
        "--rehearse",
        action="store_true",
        help="make models and lengths tiny: whether the commands work can be seen on the CPU",
    )
    options = parser.parse_args(argv)
    chosen = _chosen(options.only, jobs, parser)
    folder = options.output.absolute()
    commands = {job.name: command_of(job, folder, options.rehearse) for job in chosen}
    if options.list:
        for job in chosen:
            sys.stdout.write(f"{job.name}: python {' '.join(commands[job.name][1:])}\n")
        return
    # a machine without any has one place, where the jobs say that they need a GPU
    gpus = visible_gpus(options.gpus) or [""]
    for job in chosen:
        if job.gpus > len(gpus):
            sys.stderr.write(f"left out, for it needs {job.gpus} GPUs: {job.name}\n")
    folder.mkdir(parents=True, exist_ok=True)
    fitting = [job for job in chosen if job.gpus <= len(gpus)]
    with Services(folder) as services:
        failed = Queue(services, folder / "jobs.txt", gpus, fitting, commands).run()
    if failed:
        sys.exit(f"these jobs failed: {', '.join(failed)}. Their logs are in {folder}")


def _chosen(text: str | None, jobs: Sequence[Job], parser: argparse.ArgumentParser) -> list[Job]:
    if text is None:
        return list(jobs)
    by_name = {job.name: job for job in jobs}
    unknown = set(text.split(",")) - set(by_name)
    if unknown:
        parser.error(f"--only {','.join(sorted(unknown))}: there are {', '.join(by_name)}")
    return [by_name[name] for name in text.split(",")]


def command_of(job: Job, folder: Path, rehearse: bool) -> list[str]:
    words = [word.format(output=folder) for word in job.words]
    if rehearse:
        words = [_tiny(word) for word in words]
        if "target" in words:
            words.append("--rehearse")
    return [sys.executable, "-m", *words]


def _tiny(word: str) -> str:
    """Returns another size of a model, or another length."""
    if re.fullmatch(r"\d+(\.\d+)?B", word):
        return "2M"
    if word.isdecimal() and int(word) >= 1000:
        return "256" if int(word) % 1024 == 0 else "240"  # a row, or what follows its prompt
    return word


@dataclass
class Running:
    job: Job
    service: Service
    gpus: list[str]
    ends_at: float  # on the monotonic clock


class Queue:
    """
    Runs jobs on the GPUs that are free.

    Args:
        services: Ends the jobs that run when its block is left, and what an ended one leaves.
        record: File to which a line is added when a job begins or ends.
        commands: Of the jobs, by their names.
    """

    def __init__(
        self,
        services: Services,
        record: Path,
        gpus: list[str],
        jobs: Sequence[Job],
        commands: dict[str, list[str]],
    ):
        self._services = services
        self._record = record
        self._free = list(gpus)
        self._commands = commands
        self._done = ended_well(record)
        self._waiting = [job for job in jobs if job.name not in self._done]
        self._running: list[Running] = []
        self._failed: list[str] = []

    def run(self) -> list[str]:
        """Runs all jobs. Returns the names of those that failed, or that needed one which did."""
        while self._waiting or self._running:
            self._begin_what_fits()
            time.sleep(LOOK_EVERY)
            for running in list(self._running):
                self._look_at(running)
        return self._failed

    def _begin_what_fits(self) -> None:
        """Begins jobs in their order. One that needs several GPUs keeps those after it waiting, or
        its own wait would have no end."""
        for job in list(self._waiting):
            if job.needs is not None and job.needs not in self._done:
                if self._is_to_come(job.needs):
                    continue
                self._waiting.remove(job)
                self._fail(job, f"is not run, because {job.needs} has not ended well")
                continue
            if job.gpus > len(self._free):
                return
            self._waiting.remove(job)
            self._begin(job)

    def _is_to_come(self, name: str) -> bool:
        jobs = self._waiting + [running.job for running in self._running]
        return any(job.name == name for job in jobs)

    def _begin(self, job: Job) -> None:
        gpus = self._free[: job.gpus]
        del self._free[: job.gpus]
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        variables["PYTHONPATH"] = run_variables()["PYTHONPATH"]
        command = self._commands[job.name]
        service = self._services.start(job.name, command, env=variables, cwd=ROOT, ends=True)
        ends_at = time.monotonic() + 60 * job.minutes
        self._running.append(Running(job, service, gpus, ends_at))
        self._note(job, f"began on GPU {','.join(gpus)}")

    def _look_at(self, running: Running) -> None:
        """Frees the GPUs of a job that has ended, or whose time is over."""
        code = self._services.exit_code(running.service)
        if code is None and time.monotonic() < running.ends_at:
            return
        self._services.end(running.service)
        self._running.remove(running)
        self._free = sorted(self._free + running.gpus)
        job = running.job
        if code == 0:
            self._done.add(job.name)
            self._note(job, ENDED_WELL)
        elif code is None:
            self._fail(job, f"was ended after {job.minutes:g} minutes")
        else:
            self._fail(job, f"ended with exit code {code}")

    def _fail(self, job: Job, why: str) -> None:
        self._failed.append(job.name)
        self._note(job, why)

    def _note(self, job: Job, what: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {job.name}: {what}\n"
        with self._record.open("a") as record:
            record.write(line)
        sys.stderr.write(line)


def ended_well(record: Path) -> set[str]:
    """Returns the names of the jobs that have ended well, by the record of earlier calls."""
    if not record.exists():
        return set()
    return set(re.findall(rf"^\S+ (\S+): {ENDED_WELL}$", record.read_text(), re.MULTILINE))


if __name__ == "__main__":
    install_handlers()  # SIGTERM as well ends the jobs
    main()
