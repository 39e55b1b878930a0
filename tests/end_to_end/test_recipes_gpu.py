"""The recipes on the GPUs that they are for, with all that is in them but three things: the model
has the shape of the one that they name, and random weights; data are local; and what random weights
say is rewarded for its letters.

Each test prints a row of the table in docs/performance.md: `pytest -m gpu -s
tests/end_to_end/test_recipes_gpu.py`. Run as a
module (`python -m tests.end_to_end.test_recipes_gpu NAME FOLDER`), it makes such a model.
"""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks.against_trl import WARM_UP, Peak, read_logs, summary
from benchmarks.processes import run_variables
from recipes.quickstart.make_model import byte_tokenizer
from tests import ROOT
from tests.end_to_end.miniature import commands, server_urls
from tests.launching import free_urls, users_environment
from trl_atropos.protocol import TOKEN_VARIABLE
from trl_atropos.services.manager import Services

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(1800),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

STEPS = 8
TAKES = 1500  # seconds at most
LIMIT = 0.5  # nats on one token: large models with random weights round coarsely in bfloat16
WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 4864, 24, 14, 2),
    "Qwen/Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2),
    "Qwen/Qwen2.5-3B-Instruct": (2048, 11008, 36, 16, 2),
    "Qwen/Qwen2.5-7B-Instruct": (3584, 18944, 28, 28, 4),
}
UNTIED = {"Qwen/Qwen2.5-7B-Instruct": 152064}  # and the size of the vocabulary; of the others:
VOCABULARY = 151936
ENVIRONMENT = """
from recipes.{folder} import environment
from recipes.{folder}.environment import {name}

environment.score = lambda completion, *_: sum(map(ord, completion)) % 8 / 7

if __name__ == "__main__":
    {name}.cli()
"""
NAMES = {"gsm8k": "GSM8KEnv", "tool_use": "ToolUseEnv", "own_environment": "OwnEnv"}


def make_model(name: str, folder: str) -> None:
    """With a tokenizer of as many tokens, of which texts become bytes alone."""
    vocabulary = UNTIED.get(name, VOCABULARY)
    small = byte_tokenizer()
    tokens = {
        token: number for token, number in small.get_vocab().items() if number < len(small) - 2
    }
    tokens |= {f"w{number}": number for number in range(len(tokens), vocabulary - 2)}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=small.pad_token, eos_token=small.eos_token
    )
    whole.chat_template = small.chat_template
    whole.save_pretrained(folder)
    config = Qwen2Config(
        **dict(zip(WIDTHS, SHAPES[name], strict=True)),
        vocab_size=vocabulary,
        tie_word_embeddings=name not in UNTIED,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=whole.eos_token_id,
        pad_token_id=whole.pad_token_id,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("model")
            # or its memory would be this process'
            command = [sys.executable, "-m", __name__, name, str(made[name])]
            subprocess.run(command, cwd=ROOT, check=True)
        return made[name]

    return make


def recipe_of(path: str, model: Path, folder: Path, urls: list[str]) -> Path:
    """The recipe for this test, in a file of its own."""
    recipe = yaml.safe_load((ROOT / path).read_text())
    (spec,) = recipe["environments"]
    spec = {"path": spec} if isinstance(spec, str) else spec
    kind = Path(path).parts[1]
    script = folder / "environment.py"
    script.write_text(ENVIRONMENT.format(folder=kind, name=NAMES[kind]))
    config = {}
    if kind == "gsm8k":
        lines = [
            {"question": f"{number} " * 60, "answer": f"#### {number}"} for number in range(300)
        ]
        (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
        config = {"dataset": str(folder / "questions.jsonl")}
    for one in [*recipe.get("evaluations", []), spec]:
        one |= {"path": str(script), "config": one.get("config", {}) | config}
    several = isinstance(recipe.get("vllm_server_base_url"), list)
    recipe |= {"environments": [spec], "vllm_server_base_url": urls if several else urls[0]}
    recipe |= {
        "model_name_or_path": str(model),
        "output_dir": str(folder / "run"),
        "max_steps": STEPS,
    }
    recipe |= {"atropos_url": free_urls(1)[0], "save_strategy": "no", "report_to": "none"}
    recipe["warning_thresholds"] = {"truncated": 1}  # random weights know no end
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


@pytest.mark.parametrize(
    "path",
    [
        "recipes/own_environment/colocate.yaml",
        "recipes/gsm8k/colocate.yaml",
        "recipes/tool_use/colocate.yaml",
        "recipes/gsm8k/colocate_7b_lora.yaml",
        "recipes/gsm8k/colocate_7b.yaml",
        pytest.param("recipes/gsm8k/lora.yaml", marks=two_gpus),
        pytest.param("recipes/gsm8k/restart.yaml", marks=two_gpus),
    ],
)
def test_recipe_runs_on_named_gpus(path, model_of, tmp_path):
    recipe = yaml.safe_load((ROOT / path).read_text())
    model = model_of(recipe["model_name_or_path"])
    urls = free_urls(len(server_urls(recipe)))
    file = recipe_of(path, model, tmp_path, urls)
    env = users_environment() | run_variables()
    peak, log = Peak(), tmp_path / "output.txt"
    with Services(tmp_path / "servers") as services, log.open("w") as output, peak:
        for words in commands(path):
            if words[0] == "export":
                env[TOKEN_VARIABLE] = uuid.uuid4().hex
            elif "serve" in words:
                _serve(services, words, model, urls[0], env[TOKEN_VARIABLE])
        (words,) = [words for words in commands(path) if "launch" in words]
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.accelerate_cli",
            *words[words.index("launch") :],
        ]
        command[command.index("--config") + 1] = str(file)
        if "CUDA_VISIBLE_DEVICES" in os.environ:  # accelerate would take the first
            command[4:4] = ["--gpu_ids", os.environ["CUDA_VISIBLE_DEVICES"]]
        run = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = run.wait(TAKES)
        finally:
            run.terminate()  # the launcher's end is the trainer's
            run.wait(60)
    assert code == 0, log.read_text(errors="replace")[-6000:]
    told = json.loads((tmp_path / "run/summary.json").read_text())
    steps = read_logs(tmp_path / "run/run_log.jsonl")
    row = {"recipe": path, **summary(steps[WARM_UP:]), "memory_gb": peak.gigabytes}
    print(
        "\n"
        + json.dumps(
            row | {"probe": told["probe_max_abs_diff"], "first_step_s": steps[0]["time/step"]}
        )
    )
    assert told["steps"] == STEPS
    assert 0 < told["probe_max_abs_diff"] <= LIMIT
    assert max(step["grad_norm"] for step in steps) > 0


def _serve(services: Services, words: list[str], model: Path, url: str, token: str) -> None:
    """Starts the server by the command at the recipe's head, and waits until it is there."""
    env = {"HF_HUB_OFFLINE": "1", TOKEN_VARIABLE: token}
    env |= dict(word.split("=", 1) for word in words if word.startswith("CUDA_VISIBLE_DEVICES="))
    command = [
        sys.executable,
        "-m",
        "trl_atropos.cli",
        "serve",
        str(model),
        *words[words.index("serve") + 2 :],
    ]
    command += ["--port", url.rpartition(":")[2]]
    services.start("vllm", command, env=env, health_url=f"{url}/health")
    services.wait_healthy("vllm", 400)


if __name__ == "__main__":
    make_model(*sys.argv[1:])
