"""The recipes and the configurations for accelerate that are in the repository: each is accepted by
what reads it, and what a recipe says at its head is how it is started."""

import itertools
import json
import re
import time
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from transformers import AutoTokenizer

from recipes.gsm8k.environment import score
from recipes.tool_use import environment as tool_use
from tests import ROOT
from tests.check.desk import check
from tests.end_to_end.miniature import STEPS, commands, miniature, server_urls
from tests.end_to_end.miniature_model import GOODS, REASONING_GYM, make_speaker
from tests.forge import TRAINER
from tests.launching import free_urls
from trl_atropos.errors import RecipeError
from trl_atropos.protocol import TOKEN_VARIABLE
from trl_atropos.recipe import parse
from trl_atropos.rollouts.spool import read_rollouts
from trl_atropos.server.launch import build_parser, vllm_arguments

FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("recipes/*/*.yaml"))
OVERLAYS = [path for path in FILES if "/overlays/" in path]
# Their agents need packages that are not installed here: see tests/agents/test_agents_recipes.py.
AGENTS = [path for path in FILES if "/agents/" in path]
RECIPES = [path for path in FILES if path not in (*OVERLAYS, *AGENTS)]
LAYOUTS = [path for path in RECIPES if "quickstart" not in path]  # which `make quickstart` starts
needs_reasoning_gym = pytest.mark.skipif(
    REASONING_GYM is None, reason="reasoning-gym is not installed"
)
NO_EXPRESSION = "This is no expression of whole numbers, +, - and *."
CONFIGS = sorted(path.name for path in ROOT.glob("configs/accelerate/*.yaml"))

# What `accelerate launch` must tell the processes that it starts.
TOLD = {
    "cpu.yaml": {},
    "single_gpu.yaml": {},
    "ddp.yaml": {"WORLD_SIZE": "2"},
    "multi_node.yaml": {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
    "zero2.yaml": {"WORLD_SIZE": "2", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3.yaml": {
        "WORLD_SIZE": "2",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    },
    "sp2.yaml": {
        "WORLD_SIZE": "2",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_SP_SIZE": "2",
    },
    "fsdp2.yaml": {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
}
TELL = """
import json, os, sys
if os.environ.get("RANK", "0") == "0":
    json.dump({name: os.environ.get(name) for name in sys.argv[2:]}, open(sys.argv[1], "w"))
"""


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_passes_check(recipe, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    # GB; eight servers' usual share would be more than there is
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    # the model in place of the recipe's is for 128 tokens
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    servers = server_urls(yaml.safe_load((ROOT / recipe).read_text()))
    atropos, *urls = free_urls(1 + len(servers))
    argv = [
        "--config",
        recipe,
        "--model_name_or_path",
        str(tiny_model),
        "--output_dir",
        str(tmp_path / "run"),
    ]
    argv += [
        "--atropos_url",
        atropos,
        "--vllm_server_base_url",
        ",".join(urls),
        "--use_cpu",
        "true",
    ]
    assert check([*argv, "--bf16", "false", "--device_memory_gb", "1000"]) == []


@pytest.mark.parametrize("recipe", LAYOUTS)
def test_commands_at_head_belong_to_recipe(recipe):
    settings, given = yaml.safe_load((ROOT / recipe).read_text()), commands(recipe)
    (trainer,) = [words for words in given if "launch" in words]
    assert trainer[trainer.index("--config") + 1] == recipe
    assert (ROOT / trainer[trainer.index("--config_file") + 1]).is_file()
    servers = [words for words in given if "serve" in words]
    assert bool(servers) != settings.get("start_vllm", False)
    assert bool(servers) == any(
        words[0] == "export" and TOKEN_VARIABLE in words[1] for words in given
    )
    for words in servers:
        options, flags = build_parser().parse_known_args(words[words.index("serve") + 1 :])
        assert (options.model, options.vllm_mode) == (
            settings["model_name_or_path"],
            settings["vllm_mode"],
        )
        arguments = vllm_arguments(options.model, flags, cpu=False, mode=options.vllm_mode)
        stated = {name: arguments[arguments.index(name) + 1] for name in ("--host", "--port")}
        assert f"http://{stated['--host']}:{stated['--port']}" in server_urls(settings)


@pytest.mark.parametrize("recipe", LAYOUTS)
def test_environment_samples_from_every_server(recipe, tiny_model, monkeypatch):
    monkeypatch.chdir(ROOT)
    urls = server_urls(yaml.safe_load((ROOT / recipe).read_text()))
    parsed = parse(["--config", recipe, "--model_name_or_path", str(tiny_model), "--bf16", "false"])
    sampled = [
        server["base_url"]
        for server in parsed.environment_content(parsed.environments[0])["openai"]
    ]
    # Twice the same, as Atropos ignores the URL of a single one.
    assert sampled == [f"{url}/v1" for url in (urls if len(urls) > 1 else urls * 2)]


def test_new_environment_is_one_line_of_recipe():
    assert (
        "\nenvironments: [recipes/gsm8k/environment.py]\n"
        in (ROOT / "recipes/gsm8k/lora.yaml").read_text()
    )


def test_accelerate_configs_are_tested_without_dtype():
    assert set(CONFIGS) == set(TOLD)
    for config in CONFIGS:
        assert (
            load_config_from_file(str(ROOT / "configs/accelerate" / config)).mixed_precision == "no"
        )


@pytest.mark.slow
# the recipes launch the others
@pytest.mark.parametrize("config", [config for config in CONFIGS if TOLD[config]])
def test_accelerate_launches_with_each_configuration(config, tmp_path):
    settings = load_config_from_file(str(ROOT / "configs/accelerate" / config))
    flags = [] if settings.num_processes == 1 else ["--num_processes", "2"]
    if settings.num_machines > 1:
        flags += ["--num_machines", "1", "--main_process_ip", "127.0.0.1"]
    (tmp_path / "tell.py").write_text(TELL)
    command = ["-m", "accelerate.commands.launch"]
    command += ["--config_file", f"configs/accelerate/{config}"]
    command += [*flags, "--main_process_port", free_urls(1)[0].rpartition(":")[2]]
    command += [str(tmp_path / "tell.py"), str(tmp_path / "told.json"), *TOLD[config]]
    done = TRAINER.run(command, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "told.json").read_text()) == TOLD[config]


# In the box, where the answer is 1800.
RIGHT = r"""
1800
1,800
1{,}800
1\,800
1 800
1800.
1800.00
+1800
{1800}
(1800)
$1800$
$1800
\$1800
\$1{,}800.00
£1,800
\text{\$1800}
\text{1800}
\textbf{1800}
\mathbf{1800}
\boxed{1800}
1800\%
1800^\circ
1800 hours
1800 apples
1800 \text{ dollars}
1800\text{ apples.}
1800~\text{km/h}
1800\ \text{miles}
1800 \mathrm{~m}
1800\text{ m}^2
1800 \, \text{cm}^3
\$1800 \text{ per year}
\text{1,800}
\text{\$1{,}800.00}
\textbf{1{,}800 dollars}
1\text{,}800
1,800 dollars
\underline{\textbf{1800}}
{\bf 1800}
\approx 1800
1800\text{ USD}
\textdollar 1800
\frac{3600}{\text{2}}
\frac{\frac{7200}{2}}{2}
\frac{3600}{2}
\dfrac{1800}{1}
x = 1800
C_{4} = 1800
\text{Total} = 1800
30 \times 60 = 1800
""".strip().splitlines()
WRONG = r"""
one
x
180
1801
-1800
18000
18.00
1.800
1,8,0,0
1,80
1800x
\text{1800 or 1900}
\frac{\frac{1800}{2}}{2}
1800\%\text{ of }3
1800!
\pm 1800
x > 1800
1800 \neq 3
\frac{1800}{2}
1800, 1900
1799 or 1800
1800 \text{ or } 1900
1800 \text{ of } 2000
1 \text{ and } 800
""".strip().splitlines()


@pytest.mark.parametrize("answer", [*RIGHT, " 1800 "])
def test_right_answer_is_rewarded_in_any_notation(answer):
    assert (
        score(f"So it is $\\boxed{{{answer}}}$.", "617 + 1183 = <<617+1183=1800>>1800\n#### 1,800")
        == 1.0
    )


@pytest.mark.parametrize("answer", [*WRONG, ""])
def test_wrong_answer_is_not_rewarded(answer):
    assert score(f"So it is $\\boxed{{{answer}}}$.", "#### 1,800") == 0.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("First \\boxed{3}, no: \\boxed {1800}.", 1.0),
        ("\\boxed{1800} or \\boxed{3}", 0.0),
        ("\\boxed{1800} or \\boxed{}", 0.0),
        ("\\boxed{1800} or \\boxed{18", 0.0),
        ("\\boxed 1800", 0.0),
        ("\\fbox{1800}", 0.0),
        ("It is $1800$.", 0.0),
        ("", 0.0),
    ],
)
def test_last_boxed_number_counts_as_answer(completion, reward):
    assert score(completion, "#### 1,800") == reward


@pytest.mark.parametrize(
    "answer", ["9^{9^{9^9}}", "100000000!", "\\int_0^{10} e^{x^2} \\sin(x^3) dx"]
)
def test_unworkable_answer_costs_seconds_at_most(answer):
    begin = time.monotonic()
    assert score(f"\\boxed{{{answer}}}", "#### 1800") == 0.0
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3*17+2*9", "69"),
        ("(2 + 3) * 4 - 1", "19"),
        *[
            (text, NO_EXPRESSION)
            for text in ("2**9", "7/2", "1.5+2", "price", "__import__('os')", "f(2)", "9" * 101, "")
        ],
    ],
)
def test_calculator_does_no_more_than_stated(expression, value):
    assert tool_use.calculate(expression) == value


@pytest.mark.parametrize(
    ("message", "calls", "reward"),
    [
        ("\\boxed{26}", [("price", "figs"), ("price", "eggs")], 1.0),
        ("\\boxed{26}", [], 0.8),
        (
            "\\boxed{26} or \\boxed{3}",
            [("price", "figs"), ("price", "figs"), ("price", "bread")],
            0.1,
        ),
        ("26", [("calculate", "2*3+4*5")], 0.0),
    ],
)
def test_total_and_price_look_ups_are_rewarded(message, calls, reward):
    item = {"amounts": {"figs": 2, "eggs": 4}, "prices": {"figs": 3, "eggs": 5, "bread": 1}}
    assert tool_use.score(message, calls, item) == pytest.approx(reward)


@needs_reasoning_gym
def test_seed_draws_same_tasks_of_every_kind():
    from recipes.reasoning_gym import environment as reasoning_gym

    path = str(ROOT / "recipes/reasoning_gym/datasets/easy.yaml")
    drawn, again, other = (
        [reasoning_gym.tasks(path, seed)[i] for i in range(40)] for seed in (1, 1, 2)
    )
    assert drawn == again != other
    wanted = {entry["name"] for entry in yaml.safe_load(Path(path).read_text())["datasets"]}
    assert {task["metadata"]["source_dataset"] for task in drawn} == wanted


@needs_reasoning_gym
@pytest.mark.parametrize(
    ("completion", "answer"),
    [("<answer>1</answer>, no:\n<answer> 42\n</answer>", "42"), ("42", None), ("<answer>42", None)],
)
def test_last_tagged_answer_of_task_counts(completion, answer):
    from recipes.reasoning_gym import environment as reasoning_gym

    assert reasoning_gym.final_answer(completion) == answer


def test_environment_template_is_short():
    lines = (ROOT / "recipes/own_environment/environment.py").read_text().splitlines()
    assert len(lines) <= 100 and all(
        any(f"({number})" in line for line in lines) for number in (1, 2, 3, 4)
    )


# ----------------------------------------------------------------------------------------- overlays


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_settings_say_why_and_arrive(overlay, tiny_model, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = yaml.safe_load((ROOT / overlay).read_text())
    lines = (ROOT / overlay).read_text().splitlines()
    assert "arXiv" in lines[0] and all(re.match(r"#|\w+: \S+  # \w", line) for line in lines)
    recipe = ["--config", "recipes/tool_use/colocate.yaml", "--model_name_or_path", str(tiny_model)]
    without, training = parse(recipe).training, parse([*recipe, "--overlay", overlay]).training
    assert {name: getattr(training, name) for name in settings} == settings
    assert {name: getattr(without, name) for name in settings} != settings


def test_later_overlay_wins_and_flag_over_all(tiny_model, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    (tmp_path / "first.yaml").write_text("epsilon: 0.1\nbeta: 0.5\nlearning_rate: 1.0e-3\n")
    (tmp_path / "second.yaml").write_text("epsilon: 0.3\nbeta: 0.6\n")
    argv = [
        "--overlay",
        str(tmp_path / "first.yaml"),
        "--config",
        "recipes/tool_use/colocate.yaml",
        "--beta",
        "0.7",
    ]
    argv += [f"--overlay={tmp_path}/second.yaml", "--model_name_or_path", str(tiny_model)]
    training = parse(argv).training
    assert (training.learning_rate, training.epsilon, training.beta) == (1e-3, 0.3, 0.7)


@pytest.mark.parametrize("flag", ["--learning_rate", "--learning-rate"])
def test_wrong_flag_is_not_blamed_on_recipe(flag, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(RecipeError, match=r"^`learning_rate`: invalid float value: 'fast'"):
        parse(["--config", "recipes/tool_use/colocate.yaml", flag, "fast"])


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        (["--max-num-seqs 8", "--seed", "1"], ["--max-num-seqs", "8", "--seed", "1"]),
        (['--speculative-config={"a": 1}', "--chat-template", "a b.jinja"],) * 2,
    ],
)
def test_server_flags_may_be_split_or_quoted(given, flags, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = ["--config", "recipes/tool_use/colocate.yaml", "--model_name_or_path", str(tiny_model)]
    path = tmp_path / "flags.yaml"
    path.write_text(yaml.safe_dump({"vllm_args": given}))
    assert parse([*recipe, "--overlay", str(path)]).vllm_flags() == flags


@pytest.mark.parametrize(
    ("rank", "stated", "flags"),
    [
        (8, [], ["--enable-lora", "--max-lora-rank", "8"]),
        (12, [], ["--enable-lora", "--max-lora-rank", "16"]),  # vLLM takes some ranks only
        (12, ["--max-lora-rank", "64"], ["--max-lora-rank", "64", "--enable-lora"]),
    ],
)
def test_server_is_started_for_adapter_rank_of_run(
    rank, stated, flags, tiny_model, tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "adapter.yaml"
    path.write_text(yaml.safe_dump({"use_peft": True, "lora_r": rank, "vllm_args": stated}))
    recipe = ["--config", "recipes/tool_use/colocate.yaml", "--model_name_or_path", str(tiny_model)]
    assert parse([*recipe, "--overlay", str(path)]).vllm_flags() == flags


# ------------------------------------------------------------------------------ three steps of each


@pytest.fixture(scope="module")
def speaker(tmp_path_factory) -> Path:
    return make_speaker(tmp_path_factory.mktemp("speaker"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Folder of small local data sets."""
    folder = tmp_path_factory.mktemp("data")
    questions = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in (1, 2)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    kinds = [
        {"name": "gcd", "weight": 1, "config": {"max_numbers": 2, "min_value": 2, "max_value": 9}}
    ]
    (folder / "gcd.yaml").write_text(yaml.safe_dump({"size": 100, "datasets": kinds}))
    return folder


ENVIRONMENTS = {
    "gsm8k": {"dataset": "{data}/questions.jsonl", "max_new_tokens": 16},
    "reasoning_gym": {"datasets": "{data}/gcd.yaml", "max_new_tokens": 24},
    "tool_use": {"goods": GOODS, "max_new_tokens": 32, "max_turns": 3},
    "own_environment": {"max_new_tokens": 16},
    "long": {"dataset": "{data}/questions.jsonl", "max_new_tokens": 16},
}
# So that every overlay is run, too.
OVERLAID = {
    "recipes/gsm8k/zero3_72b.yaml": "recipes/overlays/dr_grpo.yaml",
    "recipes/own_environment/cpu.yaml": "recipes/overlays/dapo.yaml",
    "recipes/reasoning_gym/colocate.yaml": "recipes/overlays/cispo.yaml",
    "recipes/tool_use/colocate.yaml": "recipes/overlays/gspo.yaml",
}
# Its environment is that of `cpu.yaml`, and in miniature the rest of it is
# `recipes/gsm8k/colocate.yaml`.
NOT_RUN = ["recipes/own_environment/colocate.yaml"]
# Their models know no letters; `tests/end_to_end/test_arithmetic.py` trains the first one's.
NOT_RUN += ["recipes/arithmetic/colocate.yaml", "recipes/arithmetic/gpu.yaml"]
# In miniature, what is left of these is a mode of `tests/weights/test_modes.py` with the
# environment of the others.
SEEN_ELSEWHERE = (
    *(
        f"recipes/gsm8k/{name}.yaml"
        for name in ("colocate", "colocate_8gpu", "lora", "nccl_lora", "restart", "server_6_2")
        + ("colocate_7b", "colocate_7b_lora", "nccl_lora_72b")
    ),
    "recipes/long/colocate_64k.yaml",
    # sharded as in `tests/weights/test_sharded_publish.py`
    "recipes/gsm8k/zero3_72b.yaml",
    # the quickstart's, with another environment, which `tool_use` is too
    "recipes/own_environment/cpu.yaml",
    # whose environment `rollouts/test_environment_position.py` runs
    "recipes/reasoning_gym/colocate.yaml",
)


def test_overlays_are_all_run():
    assert sorted(OVERLAID.values()) == OVERLAYS


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(
            path,
            marks=[needs_reasoning_gym] * ("reasoning_gym" in path)
            + [pytest.mark.full] * (path in SEEN_ELSEWHERE),
        )
        for path in LAYOUTS
        if path not in NOT_RUN
    ],
)
def test_recipe_trains_for_three_steps(recipe, speaker, data, tmp_path):
    """As its head says, on two processes at most; servers of several GPUs (tensor parallel) are one
    process each."""
    overlay = OVERLAID.get(recipe)
    environment = ENVIRONMENTS[Path(recipe).parts[1]] | {"group_size": 4}
    environment |= {
        name: it.format(data=data) for name, it in environment.items() if isinstance(it, str)
    }
    flags = ("--logging_steps", "1", *(("--overlay", overlay) if overlay else ()))
    with miniature(recipe, tmp_path, speaker, environment=environment, flags=flags) as run:
        run.child.wait(900)
        run.until(lambda: not run.processes(), "everything of the run ends", 60)
    assert run.exit_code() == 0, run.output[-4000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == STEPS
    assert 0 < summary["probe_max_abs_diff"] <= 1e-4
    assert max(summary["rewards"]) > 0
    notes = [json.loads(line) for line in (tmp_path / "run/run_log.jsonl").read_text().splitlines()]
    logs = [note["logs"] for note in notes if "grad_norm" in note.get("logs", {})]
    assert len(logs) == STEPS and max(log["grad_norm"] for log in logs) > 0
    (config,) = [note["config"] for note in notes if "config" in note]
    wanted = yaml.safe_load((ROOT / overlay).read_text()) if overlay else {}
    assert {name: config[name] for name in wanted} == wanted
    evaluated = [note["metrics"]["problems"] for note in notes if "evaluation" in note]
    # of GSM8K all that there are, before the first step and after the last
    problems = {"gsm8k": 2, "long": 2, "own_environment": 16}.get(Path(recipe).parts[1])
    assert evaluated == ([problems] * 2 if problems else [])
    logs_of_servers = [path.read_text() for path in tmp_path.rglob("*vllm*.log")]
    assert logs_of_servers and not any("refused the control" in text for text in logs_of_servers)
    if "tool_use" in recipe:
        the_tools_answers_are_masked(tmp_path / "run/rollouts", speaker)


def the_tools_answers_are_masked(folder: Path, model: Path) -> None:
    """And nothing else between the model's messages, each of which is trained on as it was
    sampled."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    turns = []
    for one in (rollout for path in folder.glob("*.arrow") for rollout in read_rollouts(path)):
        tokens = [*one.prompt_ids.tolist(), *one.completion_ids.tolist()]
        mask = [*[False] * len(one.prompt_ids), *one.mask.tolist()]
        parts = [
            (sampled, tokenizer.decode([token for token, _ in part]))
            for sampled, part in itertools.groupby(
                zip(tokens, mask, strict=True), lambda pair: pair[1]
            )
        ]
        assert [sampled for sampled, _ in parts] == [False, True] * (len(parts) // 2)
        messages, answers = [text for _, text in parts[1::2]], [text for _, text in parts[2::2]]
        assert all(
            tool_use.CALL.search(message) and message.endswith("<|end|>")
            for message in messages[:-1]
        )
        assert all(
            re.fullmatch(r"u:(\w+: \d+|There are no .* here\.)a:", answer, re.DOTALL)
            for answer in answers
        )
        turns.append(len(messages))
    assert 1 < max(turns) <= 3
