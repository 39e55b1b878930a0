"""`trl-atropos slurm`: the script is run as it is, with stand-ins on PATH for SLURM's programs and
for what it starts.

No cluster is here: what SLURM itself does with the script is not tested.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests import ROOT
from trl_atropos.commands.batch_script import _server_flags, render, slurm, slurm_parser

RECIPE = "recipes/gsm8k/zero3_72b.yaml"

# Runs the command for every task, as `srun` would on as many nodes.
SRUN = """#!{python}
import os, subprocess, sys
own = [word for word in sys.argv[1:] if word.startswith("--")][:5]
options = dict(word[2:].partition("=")[::2] for word in own)
command = sys.argv[1 + len(own):]
nodes = options["nodelist"].split(",")
assert len(nodes) == int(options["nodes"]) == int(options["ntasks"]), sys.argv
script = None if sys.stdin.isatty() or command[0] != "bash" else sys.stdin.buffer.read()
codes = []
for number, node in enumerate(nodes):
    env = os.environ | {{"SLURM_NODEID": str(number), "NODE": node}}
    codes.append(subprocess.run(command, input=script, env=env).returncode)
sys.exit(max(codes))
"""
# Notes how it was called. The server answers at /health that it is not ready, and then that it is:
# it is waited for, however soon it starts. The trainer ends.
NOTE = """#!{python}
import json, os, sys, http.server
names = ("NODE", "TRL_ATROPOS_TOKEN", "CUDA_VISIBLE_DEVICES", "no_proxy")
told = {{name: os.environ.get(name) for name in names}} | {{"words": sys.argv[1:]}}
told["mode"] = oct(os.stat(os.environ["TOKEN_FILE"]).st_mode & 0o777)
with open("{told}", "a") as file:
    file.write(json.dumps(told) + "\\n")
if sys.argv[1] == "serve" and {serves}:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    answers = iter((503, 200))
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(next(answers))
            self.end_headers()
    server = http.server.HTTPServer((sys.argv[sys.argv.index("--host") + 1], port), Health)
    server.timeout = 20
    server.handle_request()
    server.handle_request()
"""


def rendered(words: list[str]) -> str:
    options, settings = slurm_parser().parse_known_args(words)
    return render(options, settings, "trl-atropos slurm")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Runs a script on four nodes that are this machine. Returns its result, and what was
    started."""
    monkeypatch.chdir(ROOT)

    def run(
        words: list[str], serves: bool = True, **variables: str
    ) -> tuple[subprocess.CompletedProcess, list[dict]]:
        programs, told = tmp_path / "bin", tmp_path / "told.jsonl"
        programs.mkdir()
        note = NOTE.format(python=sys.executable, told=told, serves=serves)
        for name, text in {
            "srun": SRUN.format(python=sys.executable),
            "scontrol": "#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n",
            "hostname": "#!/bin/sh\necho 127.0.0.1 10.9.9.9\n",
            **{"trl-atropos": note, "accelerate": note},
        }.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        with monkeypatch.context() as patch:
            # beside which the script finds the programs
            patch.setattr(sys, "executable", str(programs / "python"))
            script = rendered([*words, "--output_dir", str(tmp_path / "out")])
        script = script.replace("9001 + i", "29001 + i").replace("sleep 5", "sleep 0.2")
        script = script.replace("SAY_AT=10", "SAY_AT=0")
        env = (
            os.environ
            | {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_ID": "7", "no_proxy": "local"}
            | variables
        )
        options = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run(["bash", "-c", script], **options)
        return done, [json.loads(line) for line in told.read_text().splitlines()]

    return run


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_trainers_and_servers_start_with_one_token(cluster, tmp_path):
    done, told = cluster(["--config", RECIPE, "--nodes", "3"])
    assert done.returncode == 0, done.stderr
    serving, training = [one for one in told if one["words"][0] == "serve"], told[2:]
    assert sorted((one["NODE"], one["CUDA_VISIBLE_DEVICES"]) for one in serving) == [
        ("n3", "0,1,2,3"),
        ("n3", "4,5,6,7"),
    ]
    for one in serving:
        words = one["words"]
        assert words[1] == "Qwen/Qwen2.5-72B-Instruct" and after(words, "--vllm_mode") == "server"
        assert (after(words, "--tensor-parallel-size"), after(words, "--max-model-len")) == (
            "4",
            "2048",
        )
        assert words.count("--host") == 1 and after(words, "--host") == "127.0.0.1"
    assert [(one["NODE"], after(one["words"], "--machine_rank")) for one in training] == [
        ("n1", "0"),
        ("n2", "1"),
    ]
    for one in training:
        words = one["words"]
        assert after(words, "--config_file") == "configs/accelerate/zero3.yaml"
        assert (after(words, "--num_machines"), after(words, "--num_processes")) == ("2", "16")
        assert (after(words, "--main_process_ip"), after(words, "--config")) == (
            "127.0.0.1",
            RECIPE,
        )
        urls = "http://127.0.0.1:29001,http://127.0.0.1:29002"
        assert (after(words, "--vllm_server_base_url"), after(words, "--start_vllm")) == (
            urls,
            "false",
        )
        assert one["no_proxy"] == "local,127.0.0.1,127.0.0.1,127.0.0.1"
    tokens = {one["TRL_ATROPOS_TOKEN"] for one in told}
    assert len(tokens) == 1 and re.fullmatch("[0-9a-f]{48}", tokens.pop())
    assert {one["mode"] for one in told} == {"0o600"}
    assert not (tmp_path / "out/token-7").exists()  # the job took it away
    lines = done.stdout.splitlines()
    waiting, next_line, *_ = lines
    assert re.fullmatch(
        r"Waiting for the server at http://127\.0\.0\.1:29001, \d+ s: see .*", waiting
    )
    assert next_line.startswith(
        ("Waiting for the server", "A server is ready at http://127.0.0.1:29001")
    )
    ready = [line for line in lines if line.startswith("A server is ready")]
    assert [re.sub(r" after \d+ s$", "", line) for line in ready] == [
        "A server is ready at http://127.0.0.1:29001",
        "A server is ready at http://127.0.0.1:29002",
    ]


@pytest.mark.parametrize(
    ("requeued", "saved", "resumes"), [("1", True, True), ("1", False, False), ("0", True, False)]
)
def test_requeued_job_resumes_from_its_checkpoint(cluster, tmp_path, requeued, saved, resumes):
    if saved:
        (tmp_path / "out/checkpoint-10").mkdir(parents=True)
        (tmp_path / "out/checkpoint-10/trainer_state.json").write_text("{}")
    done, told = cluster(["--config", RECIPE, "--nodes", "3"], SLURM_RESTART_COUNT=requeued)
    assert done.returncode == 0, done.stderr
    for one in told[2:]:
        assert ("--resume_from_checkpoint" in one["words"]) is resumes
        assert not resumes or after(one["words"], "--resume_from_checkpoint") == "true"


def test_server_that_ends_ends_the_job(cluster, tmp_path):
    done, told = cluster(["--config", RECIPE, "--nodes", "3"], serves=False)
    assert done.returncode == 1
    assert "A server has ended: see " in done.stderr and "out/server-*.log" in done.stderr
    # No trainer. The second server may have been ended before it could note anything.
    assert {one["words"][0] for one in told} == {"serve"}
    assert not (tmp_path / "out/token-7").exists()


def test_adapters_rank_and_one_node_are_rendered(monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [
        "--config",
        "recipes/gsm8k/nccl_lora.yaml",
        "--nodes",
        "2",
        "--vllm_args",
        "--tensor-parallel-size 8",
    ]
    script = rendered([*words, "--gpus_per_node", "8", "--lora_r", "20"])
    assert re.search(
        r"--vllm_mode nccl_lora --tensor-parallel-size 8 .*--max-lora-rank 32 ", script
    )
    assert "SERVERS_PER_NODE=1 GPUS_PER_SERVER=8" in script and "--machine_rank" not in script
    assert "--num_machines 1 --num_processes 8 \\\n" in script and "--vllm_args" not in script


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        # what the recipe's first lines say
        ({"vllm_mode": "server"}, "--tensor-parallel-size 4 --port-range 3"),
        ({"vllm_args": "--host h --seed 1 --port 9", "vllm_mode": "server"}, "--seed 1"),
        ({"vllm_args": ["--seed", 1], "max_sequence_length": 512}, "--seed 1 --max-model-len 512"),
        ({"vllm_args": "--max-model-len 256", "max_sequence_length": 512}, "--max-model-len 256"),
        # PEFT's default
        ({"vllm_args": "--seed 1", "vllm_mode": "lora"}, "--seed 1 --max-lora-rank 16"),
        (
            {"vllm_args": "--seed 1", "vllm_mode": "nccl_lora", "lora_r": 40},
            "--seed 1 --max-lora-rank 64",
        ),
        ({"vllm_args": "--max-lora-rank 32", "vllm_mode": "lora"}, "--max-lora-rank 32"),
    ],
)
def test_server_gets_stated_flags_and_those_it_needs(settings, flags):
    said = [
        "--tensor-parallel-size",
        "4",
        "--port",
        "9000",
        "--port-range",
        "3",
        "--vllm_mode",
        "lora",
    ]
    assert _server_flags(settings, ["trl-atropos", "serve", "M", *said]) == flags.split()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nodes", "2"], "Of --nodes 2, 2 train"),
        (
            ["--nodes", "3", "--gpus_per_node", "2"],
            "A server of 4 GPUs does not fit on a node of 2",
        ),
        (
            ["--nodes", "3", "--vllm_mode", "colocate"],
            "Set `vllm_mode: server`, or with an adapter",
        ),
    ],
)
def test_impossible_job_is_not_rendered(words, told, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as error:
        slurm(["--config", RECIPE, *words])
    assert told in str(error.value) and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ("recipes/gsm8k/zero3_72.yaml", "does not exist .* slurm recipes/gsm8k/zero3_72b.yaml "),
        ("recipes/gsm8k", "is a folder, not a YAML file.* slurm recipes/gsm8k/colocate.yaml "),
        ("nowhere/my.yaml", "does not exist .* slurm recipes/gsm8k/colocate.yaml "),
    ],
)
def test_recipe_that_is_meant_is_named(recipe, told, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as error:
        slurm(["--config", recipe, "--nodes", "2"])
    said = " ".join(str(error.value).split())
    assert re.search(told, said), said


def test_script_is_written_to_output(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    slurm(["--config", RECIPE, "--nodes", "3", "--output", str(tmp_path / "job.sh")])
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)
    assert f"sbatch {tmp_path}/job.sh" in capsys.readouterr().out
    assert not re.search(r"@\w+@", (tmp_path / "job.sh").read_text())


# What the last job wrote before its time limit, and what SLURM does then: it ends the job's steps.
TRAINER = """#!/bin/bash
echo "$@" >> {told}
mkdir -p {out}/checkpoint-10 && echo '{{}}' > {out}/checkpoint-10/trainer_state.json
trap 'echo ended >> {told}; exit 143' TERM
while [[ " $* " != *" --resume_from_checkpoint "* ]]; do sleep 0.1; done
"""
ONE_NODE_PROGRAMS = {
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": '#!/bin/bash\necho "scontrol $*" >> {told}\nkill -TERM -- -$(ps -o pgid= $PPID | tr -d " ")\n',
}


def test_one_node_requeues_before_its_limit_and_resumes(tmp_path, monkeypatch):
    """SLURM sends USR1 to the script before the time limit. Once the job is requeued, it ends
    everything by SIGTERM, and runs the script again later."""
    monkeypatch.chdir(ROOT)
    programs, told, out = tmp_path / "bin", tmp_path / "told", tmp_path / "out"
    programs.mkdir()
    for name, text in {**ONE_NODE_PROGRAMS, "trl-atropos": TRAINER}.items():
        (programs / name).write_text(text.replace("{told}", str(told)).replace("{out}", str(out)))
        (programs / name).chmod(0o755)
    (programs / "trl-atropos").write_text(TRAINER.format(told=told, out=out))
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    recipe = "recipes/gsm8k/colocate.yaml"
    script = rendered(["--config", recipe, "--nodes", "1", "--output_dir", str(out)])
    env = os.environ | {"SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=env, start_new_session=True)
    deadline = time.monotonic() + 60
    while not told.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) != 0
    while "ended" not in told.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=env | {"SLURM_RESTART_COUNT": "1"},
        timeout=60,
        check=False,
    )
    assert again.returncode == 0
    first, requeue, ended, second = told.read_text().splitlines()
    assert first == f"train {recipe} --output_dir {out}"
    assert (requeue, ended) == ("scontrol requeue 7", "ended")
    assert second == f"{first} --resume_from_checkpoint true"


def test_container_is_a_flag_of_every_step(monkeypatch):
    monkeypatch.chdir(ROOT)
    for recipe, nodes, steps in (("colocate", "1", 1), ("zero3_72b", "3", 1)):
        words = ["--config", f"recipes/gsm8k/{recipe}.yaml", "--nodes", nodes]
        script = rendered([*words, "--container", "nvcr.io/my image:1"])
        flag = "'--container-image=nvcr.io/my image:1' --container-mounts="
        assert script.count(flag) == steps
        assert flag not in rendered(words)
