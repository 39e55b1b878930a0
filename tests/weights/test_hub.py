"""What a run leaves on the Hub, during training and after it: pushed by real trainers, in processes
of their own, to a server that implements as much of the Hub as a push takes. Run as a module, it is
one of those trainers' processes.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.forge import TRL, Forge
from tests.rollout_factory import make_group, make_trainer, record, uniform_batch
from tests.server_process import free_port
from tests.weights.hub_server import Recorded, running_hub
from trl_atropos.errors import PushError
from trl_atropos.report.run_log import portable, portable_value

pytestmark = pytest.mark.slow

TOKEN = "hf_nobodysNobodysNobodys"
STEPS = 3
LEFT_BY_A_RUN = (  # beside what is the model's
    "rollouts/rows-000000000000.arrow",
    "rollouts/spool.meta",
    "rollouts-before-1/rows-000000000000.arrow",
    "rollouts.jsonl",
    "completions/completions_00001.parquet",
    "logs/vllm.log",
    "environments/first_letter.yaml",
    "try/environments/first_letter.yaml",
    "try/logs/vllm.log",
    "adapters/v1/adapter_model.safetensors",
    "policies/v1/model.safetensors",
    "runs/Nov20_host/events.out.tfevents.1",
    "run_log.jsonl",
    "report.html",
)
COMMAND = (
    "{python} /srv/games/first_letter.py serve --openai.base_url {vllm_url}/v1 "
    "--openai.api_key very-secret"
)


@pytest.fixture(scope="module")
def hub() -> Iterator[ThreadingHTTPServer]:
    with running_hub() as server:
        yield server


@dataclass
class Ended:
    """How a process ended, and what it wrote."""

    code: int
    output: str


@dataclass
class Programs:
    """Runs programs that push to a Hub, as forks of a process that has imported everything with
    that Hub: huggingface_hub reads `HF_ENDPOINT` on import."""

    variables: dict[str, str]
    forge: Forge

    def run(self, folder: Path, module: str, *arguments: str) -> Ended:
        log = folder / "output"
        process = self.forge.fork(["-m", module, *arguments], os.environ | self.variables, log)
        return Ended(process.wait(600), log.read_text())


@contextmanager
def programs_of(url: str, home: Path) -> Iterator[Programs]:
    variables = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    variables["HF_ENDPOINT"] = url
    forge = Forge(TRL, variables)
    yield Programs(variables, forge)
    forge.close()


@pytest.fixture(scope="module")
def programs(hub, tmp_path_factory) -> Iterator[Programs]:
    with programs_of(hub.url, tmp_path_factory.mktemp("home")) as programs:
        yield programs


# ------------------------------------------------------------------------------- from Python's side


@dataclass
class Pushed:
    hub: Recorded
    folder: Path
    output: str

    def trained(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / "trained.safetensors")


@pytest.fixture(scope="module")
def pushed(tiny_model, hub, programs, tmp_path_factory) -> Pushed:
    """One run for each way to push. The name of its repository is that of its folder."""
    folder = tmp_path_factory.mktemp("pushed")
    ended = programs.run(folder, "tests.weights.test_hub", str(tiny_model), str(folder))
    assert ended.code == 0, ended.output[-3000:]
    return Pushed(hub.recorded, folder, ended.output)


def main(model: Path, folder: Path) -> None:
    """In a process of its own, because huggingface_hub reads `HF_ENDPOINT` on import."""
    from peft import LoraConfig

    recording = record(
        folder / "recorded.jsonl", *(uniform_batch(model, 4, 2, seed) for seed in range(STEPS))
    )
    for name in ("every_save", "checkpoint", "end", "closed"):
        train(model, folder / name, recording, "every_save" if name == "closed" else name)
    train(
        model,
        folder / "adapter",
        recording,
        "checkpoint",
        LoraConfig(r=4, target_modules="all-linear"),
    )


def train(model: Path, folder: Path, recording: str, strategy: str, peft_config=None) -> None:
    from safetensors.torch import save_file
    from transformers import TrainerCallback

    from tests.rollout_factory import arguments
    from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer

    class OneAtATime(TrainerCallback):
        """A push that begins while another goes on is left out by transformers."""

        def on_save(self, *args, **kwargs):
            trainer._finish_current_push()

    for path in LEFT_BY_A_RUN:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("a run's own")
    push = {
        "push_to_hub": True,
        "hub_strategy": strategy,
        "hub_model_id": f"me/{folder.name}",
        "hub_token": TOKEN,
    }
    steps = {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 1,
        "replay_paths": [recording],
    }
    trainer = AtroposGRPOTrainer(
        str(model),
        AtroposGRPOConfig(**arguments(folder, **push, **steps)),
        callbacks=[OneAtATime()],
        peft_config=peft_config,
    )
    trainer.environment_commands = {"first_letter": COMMAND}
    trainer.train()
    trainer.push_to_hub()
    trained = {
        name: one.detach().clone()
        for name, one in trainer.model.named_parameters()
        if one.requires_grad
    }
    save_file(trained, folder / "trained.safetensors")


@pytest.mark.parametrize("name", ["every_save", "checkpoint", "end", "closed"])
def test_final_push_has_weights_tokenizer_and_card(pushed, name):
    files = pushed.hub.files(f"me/{name}")
    arrived, trained = load(files["model.safetensors"]), pushed.trained(name)
    assert arrived.keys() == trained.keys()
    assert all(torch.equal(arrived[key], trained[key]) for key in trained)
    assert {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "reward_curve.png",
    } <= files.keys()
    assert pushed.hub.of(f"me/{name}")[-1].title == "End of training"


@pytest.mark.parametrize("name", ["every_save", "checkpoint", "adapter"])
def test_save_pushes_weights_and_card_of_its_step(pushed, name):
    weights = "adapter_model.safetensors" if name == "adapter" else "model.safetensors"
    commits = pushed.hub.of(f"me/{name}")
    for step in range(1, STEPS + 1):
        (commit,) = [one for one in commits if one.title == f"Training in progress, step {step}"]
        assert (
            commit.files[weights]
            == (pushed.folder / name / f"checkpoint-{step}" / weights).read_bytes()
        )
        assert f"{step} of {STEPS} steps" in commit.files["README.md"].decode()


@pytest.mark.parametrize("name", ["end", "adapter"])
def test_pushed_model_loads_in_transformers(pushed, tiny_model, tmp_path, name):
    for path, content in pushed.hub.files(f"me/{name}").items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    trained = pushed.trained(name)
    of_trainer = {key.removeprefix("base_model.model."): tensor for key, tensor in trained.items()}
    assert of_trainer and all(
        torch.equal(loaded[key], tensor) for key, tensor in of_trainer.items()
    )
    assert (
        AutoTokenizer.from_pretrained(tmp_path).get_vocab()
        == AutoTokenizer.from_pretrained(tiny_model).get_vocab()
    )


def test_push_at_end_pushes_nothing_earlier(pushed):
    assert [commit.title for commit in pushed.hub.of("me/end")] == ["End of training"]


@pytest.mark.parametrize("name", ["checkpoint", "adapter"])
def test_last_checkpoint_is_pushed_whole_on_request(pushed, name):
    files = pushed.hub.files(f"me/{name}")
    folder = pushed.folder / name / f"checkpoint-{STEPS}"
    theirs = {
        path.removeprefix("last-checkpoint/")
        for path in files
        if path.startswith("last-checkpoint/")
    }
    assert theirs == {path.name for path in folder.iterdir()} - {"training_args.bin"}
    assert {"optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth"} <= theirs
    assert all(files[f"last-checkpoint/{one}"] == (folder / one).read_bytes() for one in theirs)


@pytest.mark.parametrize("name", ["every_save", "end", "closed"])
def test_push_without_checkpoint_omits_optimizer(pushed, name):
    assert not [
        path
        for path in pushed.hub.files(f"me/{name}")
        if "checkpoint" in path or "optimizer" in path
    ]


def test_rollouts_logs_and_secrets_stay_local(pushed):
    for commit in pushed.hub.commits:
        assert not {*LEFT_BY_A_RUN, "training_args.bin"} & {
            path.removeprefix("last-checkpoint/") for path in commit.files
        }
        for path, content in commit.files.items():
            assert TOKEN.encode() not in content and b"very-secret" not in content, path
    assert not [path for path, sample in pushed.hub.offered.items() if b"a run's own" in sample]
    assert pushed.hub.tokens == {f"Bearer {TOKEN}"}


def test_failed_push_in_training_only_warns(pushed):
    failed = [line for line in pushed.output.splitlines() if "A push to the Hub failed (" in line]
    assert len(failed) == STEPS
    assert "403" in failed[0] and "the next save pushes again" in failed[0]
    assert [commit.title for commit in pushed.hub.of("me/closed")] == ["End of training"]


# ----------------------------------------------------------------------------------------- the card


def test_card_has_tags_library_and_model_name(pushed):
    whole, adapter = (
        ModelCard(pushed.hub.files(f"me/{name}")["README.md"].decode())
        for name in ("end", "adapter")
    )
    assert {"trl_atropos", "atropos", "grpo", "trl"} <= set(whole.data.tags)
    assert (whole.data.library_name, adapter.data.library_name) == ("transformers", "peft")
    assert (whole.data.model_name, whole.data.pipeline_tag) == ("end", "text-generation")
    assert 'model="me/end"' in whole.text


def test_card_tells_reward_environment_and_settings(pushed):
    files = pushed.hub.files("me/adapter")
    card = files["README.md"].decode()
    assert "![Mean reward by optimizer step](reward_curve.png)" in card
    assert files["reward_curve.png"].startswith(b"\x89PNG")
    assert (
        "{python} first_letter.py serve --openai.base_url {vllm_url}/v1 --openai.api_key <hidden>"
        in card
    )
    assert "learning_rate: 0.002\n" in card and f"max_steps: {STEPS}\n" in card
    assert "adapters:\n- peft_type: LORA\n" in card and "  r: 4\n" in card
    assert re.search(r"- trl_atropos: \d+\.\d+", card) and re.search(r"- atroposlib: \d", card)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("python /home/me/games/environment.py", "python environment.py"),
        ("python games/environment.py --env.tokenizer_name Qwen/Qwen3-0.6B", None),
        ("{python} {output_dir}/x.py ~/data/words.txt", "{python} {output_dir}/x.py words.txt"),
        ("--path=/data/words.txt,'/data/more words.txt'", "--path=words.txt,'more words.txt'"),
        ("--openai.base_url {vllm_url}/v1 --url http://127.0.0.1:8000/v1", None),
        ("--openai.api_key abc --seed 1", "--openai.api_key <hidden> --seed 1"),
        ("WANDB_API_KEY=abc HF_TOKEN: abc x", "WANDB_API_KEY=<hidden> HF_TOKEN: <hidden> x"),
        ("use hf_abcdefghijklmnopqrst here", "use <hidden> here"),
        ("https://me:secret@host/v1", "https://host/v1"),
        ("use sk-proj-a1_b2-c3d4e5 or ghp_0123456789abcdef", "use <hidden> or <hidden>"),
        (
            "AWS_SECRET_ACCESS_KEY=x --judge_key 'a b' c",
            "AWS_SECRET_ACCESS_KEY=<hidden> --judge_key <hidden> c",
        ),
        (
            """--judge '{"api_key": "x", "n": 2}' -H 'Authorization: Basic x'""",
            """--judge '{"api_key": <hidden>, "n": 2}' -H 'Authorization: Basic <hidden>'""",
        ),
        ("--env.max_token_length 512 --max_tokens 5", None),
    ],
)
def test_portable_text_hides_secrets_and_local_paths(said, shown):
    assert portable(said) == (shown or said)


def test_settings_are_shown_as_yaml_without_secrets():
    given = {
        "learning_rate": np.float64(1e-6),
        "api_keys": ["a"],
        "AWS_SECRET_ACCESS_KEY": "a",
        "max_tokens": 5,
    }
    assert (
        yaml.safe_dump(portable_value({**given, "passwd": "a"}))
        == "learning_rate: 1.0e-06\nmax_tokens: 5\n"
    )


def test_card_tells_nothing_of_machine(pushed, tiny_model):
    for name, path in (
        ("every_save", "README.md"),
        ("adapter", "README.md"),
        ("adapter", "last-checkpoint/README.md"),  # PEFT's
    ):
        card = pushed.hub.files(f"me/{name}")[path].decode()
        assert not [
            place
            for place in (str(pushed.folder), str(tiny_model), "/srv", "127.0.0.1")
            if place in card
        ]


# --------------------------------------------------------------------------------- from the command


def start(programs: Programs, model: Path, folder: Path, repository: str) -> Ended:
    """Runs the main job on a recording, with a push at its end."""
    recording = record(folder / "recorded.jsonl", uniform_batch(model, 4, 2, 0))
    recipe = {
        "model_name_or_path": str(model),
        "output_dir": str(folder / "run"),
        "replay_paths": [recording],
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "use_cpu": True,
        "report_to": "none",
        "push_to_hub": True,
        "hub_model_id": repository,
        "hub_token": TOKEN,
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # which is YAML, too
    return programs.run(folder, "trl_atropos.train", "--config", str(folder / "recipe.yaml"))


def test_recipe_pushes_with_one_field(tiny_model, hub, programs, tmp_path):
    done = start(programs, tiny_model, tmp_path, "me/recipe")
    assert done.code == 0, done.output[-3000:]
    files = hub.recorded.files("me/recipe")
    assert files["model.safetensors"] == (tmp_path / "run" / "model.safetensors").read_bytes()
    assert "1 of 1 steps" in files["README.md"].decode()
    assert (tmp_path / "run" / "run_log.jsonl").exists() and "run_log.jsonl" not in files
    assert not [path for path, content in files.items() if TOKEN.encode() in content]


def test_failed_last_push_keeps_model_and_summary(tiny_model, hub, programs, tmp_path):
    done = start(programs, tiny_model, tmp_path, "me/shut")
    assert done.code == 1
    assert "Reward curve: " in done.output and (tmp_path / "run" / "summary.json").exists()
    message = done.output.partition("trl_atropos: error: ")[2]
    assert (
        f"The model is saved in {tmp_path}/run, but its push to the Hub as me/shut failed ("
        in message
    )
    assert "403" in message and "Traceback" not in done.output
    assert (tmp_path / "run" / "model.safetensors").exists() and hub.recorded.of("me/shut") == []


def test_unreachable_hub_ends_run_before_training(tiny_model, tmp_path):
    with programs_of(f"http://127.0.0.1:{free_port()}", tmp_path / "home") as programs:
        done = start(programs, tiny_model, tmp_path, "me/nowhere")
    assert done.code == 1
    assert (
        "error: The Hub did not take or confirm the repository me/nowhere for `push_to_hub` "
        "(Connect" in done.output
    )
    assert "`push_to_hub: false`" in done.output and "Traceback" not in done.output
    assert not (tmp_path / "run" / "run_log.jsonl").exists()


def test_push_without_hub_leaves_model_on_disk(tiny_model, tmp_path):
    # tests have HF_HUB_OFFLINE set
    trainer = make_trainer(tiny_model, tmp_path, [make_group(tiny_model, 8, 1)])
    with pytest.raises(
        PushError, match=r"repository run for `push_to_hub` .OfflineModeIsEnabled: .* is whole"
    ):
        trainer.push_to_hub()
    assert load_file(tmp_path / "run" / "model.safetensors")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
