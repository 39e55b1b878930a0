"""A run over several machines, in miniature: `make test-nodes`, or `python -m tests.end_to_end.nodes --folder
runs/nodes`.

Five network namespaces with addresses of their own (`nodes_network.py`), and real sockets between
them: two trainer machines of two processes each, started with `configs/accelerate/multi_node.yaml`,
each with an `output_dir` of its own; two inference servers; and one machine for the Atropos API and
the environment. The quickstart's model and task, all weights sent to both servers after each of 20
steps.

On the way, the second trainer machine is killed, and later the first one loses its network and is
killed, of which nobody hears. Each time the other one must end in time with a message and leave
nothing behind, and a run that is started again on both must go on from the last checkpoint. At the
end both servers must have the trained weights.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests import ROOT
from tests.end_to_end.nodes_network import INTERFACE, Network, why_not
from tests.launching import RECIPE, ask, make_model
from tests.server_process import ENVIRONMENT, MAX_MODEL_LEN, Server
from tests.weights.live import snapshot
from tests.weights.test_sharded_publish import continuations
from tests.weights.watched import largest_difference
from trl_atropos.protocol import ROUTE_PREFIX, TOKEN_VARIABLE

TRAINERS = ("trainer-a", "trainer-b")
SERVERS = ("server-1", "server-2")
STEPS, SAVE_EVERY = 20, 3
KILLED_AT, CUT_OFF_AT = 7, 13  # steps
SILENCE = 30  # seconds without a word from another process until a trainer gives up (`ddp_timeout`)
STARTING, STEPPING, ENDING = 150.0, 90.0, 30.0  # seconds
LEASE_LOST = 45.0  # seconds until a server notices that its trainer's machine is gone


class Cluster:
    """
    Args:
        network: With the nodes `TRAINERS`, `SERVERS` and `"environments"`.
        folder: For everything that is written.
    """

    def __init__(self, network: Network, folder: Path):
        self.network, self.folder = network, folder
        self.model = make_model(folder / "model")
        self.env = {
            **os.environ,
            **ENVIRONMENT,
            TOKEN_VARIABLE: uuid.uuid4().hex,
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        self.servers = [f"http://{network.address[node]}:9001" for node in SERVERS]
        self.atropos = f"http://{network.address['environments']}:8000"
        self.began = time.monotonic()

    # -------------------------------------------------------------------------- what runs on a node

    def start(self, node: str, name: str, command: list[str]) -> subprocess.Popen:
        env = {**self.env, "VLLM_HOST_IP": self.network.address[node]}
        with open(self.log(name), "ab") as log, self.network.inside(node):
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def start_services(self) -> None:
        for node in SERVERS:
            command = ["-m", "trl_atropos.server.launch", str(self.model), "--vllm_mode", "server"]
            command += ["--host", self.network.address[node], "--max-model-len", str(MAX_MODEL_LEN)]
            self.start(node, node, [sys.executable, *command])
        host, port = self.atropos.removeprefix("http://").split(":")
        command = ["-m", "atroposlib.cli.run_api", "--host", host, "--port", port]
        self.start("environments", "atropos", [sys.executable, *command])
        self.until(lambda: self.ask(self.atropos) is not None, "the API to answer", STARTING)
        known = {"model_name": str(self.model), "server_type": "vllm", "api_key": "none"}
        (self.folder / "servers.yaml").write_text(
            yaml.safe_dump({"openai": [{**known, "base_url": f"{url}/v1"} for url in self.servers]})
        )
        command = ["recipes/quickstart/environment.py", "serve", "--slurm", "false"]
        command += [
            "--env.rollout_server_url",
            self.atropos,
            "--env.tokenizer_name",
            str(self.model),
        ]
        command += ["--config", str(self.folder / "servers.yaml")]
        self.start("environments", "environment", [sys.executable, *command])
        self.until(lambda: all(self.infos()), "both servers to be up", STARTING)

    def start_trainers(self, resume: bool) -> dict[str, subprocess.Popen]:
        recipe = yaml.safe_load((ROOT / RECIPE).read_text())
        for name in ("start_atropos", "start_vllm", "vllm_args", "environments"):
            recipe.pop(name)
        recipe |= {"model_name_or_path": str(self.model), "vllm_mode": "server", "use_cpu": True}
        recipe |= {"atropos_url": self.atropos, "vllm_server_base_url": self.servers}
        recipe |= {"max_steps": STEPS, "per_device_train_batch_size": 16, "logging_steps": 1}
        recipe |= {"save_strategy": "steps", "save_steps": SAVE_EVERY, "save_on_each_node": True}
        recipe |= {"ddp_timeout": SILENCE, "publish_timeout": 30, "rollout_timeout": 60}
        (self.folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        launchers = {}
        for rank, node in enumerate(TRAINERS):
            command = [str(Path(sys.executable).with_name("accelerate")), "launch"]
            command += [
                "--config_file",
                "configs/accelerate/multi_node.yaml",
                "--num_processes",
                "4",
            ]
            command += [
                "--main_process_ip",
                self.network.address[TRAINERS[0]],
                "--machine_rank",
                str(rank),
            ]
            command += ["-m", "trl_atropos.train", "--config", str(self.folder / "recipe.yaml")]
            command += [
                "--output_dir",
                str(self.folder / node),
                "--resume_from_checkpoint",
                str(resume).lower(),
            ]
            launchers[node] = self.start(node, node, command)
        return launchers

    # -------------------------------------------------------------------------------- what it shows

    def ask(self, url: str) -> Any:
        with self.network.inside("environments"):
            return ask(url, self.env[TOKEN_VARIABLE])

    def infos(self) -> list[dict]:
        """What the servers say of themselves; nothing of one that is not up."""
        return [self.ask(f"{url}{ROUTE_PREFIX}/info") or {} for url in self.servers]

    def until(self, condition: Callable[[], Any], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (
                f"waited {seconds:.0f} s for {what}; the logs are in {self.folder}"
            )
            time.sleep(0.05)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    # ----------------------------------------------------------------------------------- the stages

    def until_step(self, step: int, launchers: dict[str, subprocess.Popen]) -> None:
        """Returns between two publishes, so that what is killed then leaves whole weights."""

        def reached() -> bool:
            for node, launcher in launchers.items():
                assert launcher.poll() is None, f"{node} ended: {self.told(node)}"
            return all(
                info["policy_version"] >= step and not info["paused"] for info in self.infos()
            )

        self.until(reached, f"step {step}", STARTING + STEPPING)

    def told(self, node: str) -> str:
        return self.log(node).read_text(errors="replace")[-4000:]

    def ends_with_a_message(self, node: str, launcher: subprocess.Popen, seconds: float) -> None:
        began = time.monotonic()
        self.until(lambda: launcher.poll() is not None, f"{node} to end", seconds)
        assert launcher.returncode != 0
        took = time.monotonic() - began
        assert "trl_atropos: error: Another process of this trainer" in self.told(node), self.told(
            node
        )
        self.until(
            lambda: not self.network.processes(node), f"the processes of {node} to be gone", ENDING
        )
        self.say(f"{node} ended {took:.1f} s later with its message, and nothing of it is left")

    def until_free(self) -> None:
        self.until(
            lambda: all(info and not info["lease_held"] for info in self.infos()),
            "both leases to end",
            LEASE_LOST,
        )

    def check_the_end(self) -> None:
        first, second = (self.folder / node for node in TRAINERS)
        last = f"checkpoint-{STEPS - STEPS % SAVE_EVERY}/model.safetensors"
        assert (first / last).read_bytes() == (second / last).read_bytes(), (
            "the trainer machines differ"
        )
        state = json.loads((first / Path(last).parent / "trainer_state.json").read_text())
        steps = [entry["step"] for entry in state["log_history"] if "reward" in entry]
        assert steps == list(range(1, len(steps) + 1)), (
            f"steps were left out or taken twice: {steps}"
        )
        probe = json.loads((first / "summary.json").read_text())["probe_max_abs_diff"]
        assert 0 < probe <= 1e-4, f"a probe differed by {probe} nats"
        trained = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
        untrained = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        continued = []
        for info, url in zip(self.infos(), self.servers, strict=True):
            assert info["policy_version"] == STEPS, info["policy_version"]
            with self.network.inside("environments"):
                samples = continuations(Server(url, self.env[TOKEN_VARIABLE], str(self.model)))
                continued.append(greedy(url))
            error = largest_difference(trained, snapshot(trained), samples)
            before = largest_difference(trained, snapshot(untrained), samples)
            assert error <= 1e-4 < 1e-2 < before, (error, before)
            self.say(
                f"{url} has version {STEPS}: {error:.1e} nats from the saved model, {before:.1e} "
                "from the first"
            )
        assert continued[0] == continued[1], f"the servers continue differently: {continued}"


def greedy(url: str) -> list[int]:
    body = {
        "prompt": {"prompt_token_ids": list(b"cab=")},
        "max_tokens": 12,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    return requests.post(f"{url}/generate", json=body, timeout=30).json()["token_ids"][0]


def run(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with Network(*TRAINERS, *SERVERS, "environments") as network:
        cluster, (first, second) = Cluster(network, folder), TRAINERS
        cluster.start_services()
        cluster.say("both servers and the API are up")

        launchers = cluster.start_trainers(resume=False)
        cluster.until_step(KILLED_AT, launchers)
        network.kill(second)
        cluster.say(f"{second} was killed at step {KILLED_AT}")
        cluster.ends_with_a_message(first, launchers[first], ENDING)
        cluster.until_free()

        launchers = cluster.start_trainers(resume=True)
        cluster.until_step(CUT_OFF_AT, launchers)
        network.unplug(first)
        network.kill(first)
        cluster.say(f"{first} has lost its network at step {CUT_OFF_AT}, and was killed")
        cluster.until_free()
        cluster.say("both servers have noticed")
        cluster.ends_with_a_message(second, launchers[second], SILENCE + ENDING)
        network.plug_in(first)

        launchers = cluster.start_trainers(resume=True)
        for node, launcher in launchers.items():
            cluster.until(
                lambda one=launcher: one.poll() is not None,
                f"{node} to finish",
                STARTING + STEPPING,
            )
            assert launcher.returncode == 0, (
                f"{node} ended with {launcher.returncode}: {cluster.told(node)}"
            )
        cluster.say(f"the run took its {STEPS} steps")
        cluster.check_the_end()
    cluster.say("all of it is gone")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="made anew; keeps logs, checkpoints and rollouts"
    )
    folder = parser.parse_args().folder.resolve()
    reason = why_not()
    if reason is not None:
        sys.exit(f"tests.end_to_end.nodes: {reason}")
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"tests.end_to_end.nodes: {folder} is not empty: name another folder")
    run(folder)


if __name__ == "__main__":
    main()
