"""Mistakes in recipes and environments, and the one finding that `trl-atropos check` must have of
each."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.check.desk import SOURCE, Desk
from tests.server_process import free_port
from trl_atropos.errors import ERROR, WARNING

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mistake:
    """
    Attributes:
        plant: Makes a recipe with it.
        code: Of the finding.
        seen: What the finding has seen.
        fix: A part of what it says to do.
    """

    plant: Callable[[Desk], list[str]]
    code: str
    seen: str
    fix: str
    level: str = ERROR


GPU = {"use_cpu": False, "vllm_mode": "server"}
DDP = ("--num_processes", "4", "--devices", "2")

MISTAKES = {
    # the recipe
    "a misspelt key": Mistake(
        lambda desk: desk.recipe(lerning_rate=1.0),
        "unknown-key",
        "lerning_rate: 1.0",
        "`learning_rate`",
    ),
    "an impossible value": Mistake(
        lambda desk: desk.recipe(rollout_timeout=-1),
        "setting",
        "rollout_timeout: -1",
        "Set it to a number of seconds",
    ),
    "an odd batch": Mistake(
        lambda desk: desk.recipe(per_device_train_batch_size=3),
        "batch-size",
        "per_device_train_batch_size: 3",
        "Change `per_device_train_batch_size`",
    ),
    "an adapter for modules that the model does not have": Mistake(
        lambda desk: desk.recipe(use_peft=True, lora_target_modules=["q_porj"]),
        "adapter",
        "lora_target_modules: q_porj",
        "Correct `lora_target_modules`",
    ),
    "a quote that is not closed": Mistake(
        lambda desk: desk.recipe(vllm_args=["--seed '1"], start_vllm=True),
        "setting",
        'vllm_args: ["--seed \'1"]',
        "Correct its quotes",
    ),
    "a server by an unknown placeholder": Mistake(
        lambda desk: desk.recipe({"servers": [{"base_url": "{nowhere}/v1"}]}),
        "environment-command",
        "'nowhere'",
        "Known ones: {python}",
    ),
    "an API at a port that there cannot be": Mistake(
        lambda desk: desk.configured(rollout_server_url="http://localhost:99999"),
        "environment-api",
        "rollout_server_url: http://localhost:99999",
        "Set it to `{atropos_url}`",
    ),
    "no adapter for a mode that sends one": Mistake(
        lambda desk: desk.recipe(vllm_mode="lora"),
        "no-adapter",
        "vllm_mode: lora",
        "Set `use_peft: true`",
    ),
    "an adapter that vLLM does not serve": Mistake(
        lambda desk: desk.recipe(vllm_mode="nccl_lora", use_peft=True, use_dora=True),
        "adapter",
        "use_dora: True",
        "`vllm_mode: server`",
    ),
    "whole modules beside an adapter": Mistake(
        lambda desk: desk.recipe(use_peft=True, lora_modules_to_save=["norm"]),
        "adapter",
        "lora_modules_to_save: norm",
        "`vllm_mode: server`",
    ),
    "an adapter on the head": Mistake(
        lambda desk: desk.recipe(
            vllm_mode="server", use_peft=True, lora_target_modules=["q_proj", "lm_head"]
        ),
        "adapter",
        "lora_target_modules: q_proj, lm_head",
        "Remove 'lm_head'",
    ),
    "an adapter on one of two tied embeddings": Mistake(
        lambda desk: desk.recipe(
            vllm_mode="server", use_peft=True, lora_target_modules=["q_proj", "embed_tokens"]
        ),
        "adapter",
        "lora_target_modules, lora_modules_to_save: embed_tokens",
        "Remove 'embed_tokens'",
    ),
    "no such model": Mistake(
        lambda desk: desk.recipe(model_name_or_path="./nowhere"),
        "model",
        "nowhere",
        "Set `model_name_or_path`",
    ),
    "nothing to replay": Mistake(
        lambda desk: desk.recipe(replay_paths=["nowhere"]),
        "replay",
        "replay_paths: ['nowhere']",
        "Correct the path",
    ),
    "no such checkpoint": Mistake(
        lambda desk: desk.recipe(resume_from_checkpoint="checkpoint-7"),
        "checkpoint",
        "resume_from_checkpoint: checkpoint-7",
        "Leave it out to begin anew",
    ),
    "a new run beside the checkpoints of another": Mistake(
        lambda desk: desk.with_checkpoint("a"),
        "output-dir-used",
        "output_dir: ",
        "`move_checkpoints_aside: true`",
    ),
    "a checkpoint of another run": Mistake(
        lambda desk: desk.with_checkpoint("b", resume_from_checkpoint="run/checkpoint-7"),
        "checkpoint",
        "resume_from_checkpoint: run/checkpoint-7",
        "set `output_dir` to the folder of the other run",
    ),
    "checkpoints of another run alone": Mistake(
        lambda desk: desk.with_checkpoint("b", resume_from_checkpoint=True),
        "checkpoint",
        "resume_from_checkpoint: True",
        "name a folder `checkpoint-N`",
    ),
    "no steps after the checkpoint's": Mistake(
        lambda desk: desk.with_checkpoint("a", resume_from_checkpoint=True, max_steps=7),
        "checkpoint",
        "max_steps: 7",
        "Set `max_steps` above 7",
    ),
    "an output folder that is a file": Mistake(
        lambda desk: desk.recipe(output_dir="recipe.yaml"),
        "output-dir",
        "output_dir: recipe.yaml",
        "another folder",
    ),
    "a setting of generation": Mistake(
        lambda desk: desk.recipe(top_p=0.9),
        "dead-setting",
        "top_p: 0.9",
        "Set the environment's own",
        WARNING,
    ),
    "flags for a server that is not started": Mistake(
        lambda desk: desk.recipe(vllm_args=["--max-num-seqs", "8"]),
        "dead-setting",
        "vllm_args: ['--max-num-seqs', '8']",
        "Set `start_vllm: true`, or remove it",
        WARNING,
    ),
    "an adapter's rank without an adapter": Mistake(
        lambda desk: desk.recipe(lora_r=8),
        "dead-setting",
        "lora_r: 8",
        "Set `use_peft: true`",
        WARNING,
    ),
    "a limit of checkpoints, and none": Mistake(
        lambda desk: desk.recipe(save_strategy="no", save_total_limit=3),
        "dead-setting",
        "save_total_limit: 3",
        "Set `save_strategy: steps`, or remove it",
        WARNING,
    ),
    "a setting of TRL's own server": Mistake(
        lambda desk: desk.recipe(vllm_gpu_memory_utilization=0.5),
        "dead-setting",
        "vllm_gpu_memory_utilization: 0.5",
        "Use `--gpu-memory-utilization` in `vllm_args`, or remove it",
        WARNING,
    ),
    # versions and packages
    "another version of a library": Mistake(
        lambda desk: sys.path.insert(0, desk.installed("trl", "1.10.0")) or desk.recipe(),
        "version",
        "trl 1.10.0, wanted <1.17,>=1.16",
        'pip install "trl<1.17,>=1.16"',
    ),
    "an optimizer that is not installed": Mistake(
        lambda desk: desk.recipe(optim="galore_adamw", optim_target_modules=["q_proj"]),
        "package-missing",
        "optim: galore_adamw",
        "install `galore_torch`",
    ),
    "a report to a package that is not installed": Mistake(
        lambda desk: desk.recipe(report_to="clearml"),
        "report-to",
        "report_to: clearml",
        "set `report_to: none`",
    ),
    # where it is launched
    "a server for two processes": Mistake(
        lambda desk: desk.recipe(options=("--num_processes", "2")),
        "processes-servers",
        "2 processes, 1 servers",
        "`--num_processes 1`",
    ),
    "sharding what is shared": Mistake(
        lambda desk: desk.recipe(
            options=("--config_file", f"{ROOT}/configs/accelerate/zero3.yaml")
        ),
        "sharded-colocate",
        "distributed_type: DEEPSPEED",
        "use `vllm_mode: server`",
    ),
    "no such file for accelerate": Mistake(
        lambda desk: desk.recipe(options=("--config_file", "nowhere.yaml")),
        "launch-file",
        "nowhere.yaml: ",
        "Name the file that `accelerate launch` gets",
    ),
    "more processes than GPUs": Mistake(
        lambda desk: desk.recipe(options=DDP, **GPU),
        "gpu-layout",
        "4 processes",
        "`--num_processes`",
    ),
    "a server over more GPUs than there are": Mistake(
        lambda desk: desk.recipe(
            start_vllm=True,
            vllm_args=["--tensor-parallel-size", "4"],
            options=("--devices", "2"),
            **GPU,
        ),
        "gpu-layout",
        "--tensor-parallel-size 4 in `vllm_args`",
        "Lower it",
    ),
    "two servers on the same GPU": Mistake(
        lambda desk: desk.recipe(
            start_vllm=True,
            vllm_server_base_url=[f"http://127.0.0.1:{free_port()}" for _ in range(2)],
            options=("--devices", "2"),
            **GPU,
        ),
        "gpu-layout",
        "2 servers x `--gpu-memory-utilization` 0.92 on one GPU",
        "each with a `CUDA_VISIBLE_DEVICES` of its own",
    ),
    "too little memory": Mistake(
        lambda desk: desk.recipe(
            start_vllm=True, options=("--device_memory_gb", "1"), gradient_checkpointing=False
        ),
        "memory",
        " of 1.00 GiB",
        "Change, what costs least first: `--kv-cache-memory-bytes ",
    ),
    "a generation config that cannot be saved": Mistake(
        lambda desk: desk.recipe(model_name_or_path=desk.unsavable()),
        "unsavable",
        "temperature",
        'unsavable/generation_config.json, set `"do_sample": true`',
    ),
    "checkpoints in the middle of a batch": Mistake(
        lambda desk: desk.recipe(save_strategy="steps", save_steps=10, steps_per_generation=4),
        "save-steps",
        "save_steps: 10",
        "`save_steps: 8` or `save_steps: 12`",
        WARNING,
    ),
    "checkpoints in the middle of a batch that several processes share": Mistake(
        lambda desk: desk.recipe(
            save_strategy="steps",
            save_steps=3,
            num_iterations=2,
            vllm_mode="server",
            options=("--num_processes", "2"),
        ),
        "save-steps",
        "save_steps: 3",
        "`save_steps: 2` or `save_steps: 4`",
        WARNING,
    ),
    "too little disk": Mistake(
        lambda desk: desk.recipe(max_steps=10**9, save_steps=1, save_strategy="steps"),
        "disk",
        "1000000000 checkpoints",
        "Set `save_total_limit`",
    ),
    "too little disk for a run that will be on another machine": Mistake(
        lambda desk: desk.recipe(
            max_steps=10**9,
            save_steps=1,
            save_strategy="steps",
            options=("--device_memory_gb", "999"),
        ),
        "disk",
        "1000000000 checkpoints",
        "Set `save_total_limit`",
        WARNING,
    ),
    # text
    "another tokenizer": Mistake(
        lambda desk: desk.configured(tokenizer_name=desk.other_vocabulary()),
        "tokenizer",
        "tokenizer_name: {folder}/copy, the run's model: {model}",
        "Leave `tokenizer_name` out of its entry",
    ),
    "a tokenizer that is not here": Mistake(
        lambda desk: desk.configured(tokenizer_name="nobody/nothing"),
        "tokenizer",
        "tokenizer_name: nobody/nothing",
        "or name the model",
        WARNING,
    ),
    "another tokenizer of the server": Mistake(
        lambda desk: desk.recipe(
            start_vllm=True, vllm_args=["--tokenizer", desk.other_vocabulary()]
        ),
        "tokenizer",
        "--tokenizer: {folder}/copy",
        "Leave `--tokenizer` out",
    ),
    "no such chat template": Mistake(
        lambda desk: desk.recipe(start_vllm=True, vllm_args=["--chat-template", "my.jinja"]),
        "chat-template",
        "--chat-template my.jinja",
        "Correct `--chat-template`",
    ),
    "sequences longer than the model": Mistake(
        lambda desk: desk.recipe(start_vllm=True, vllm_args=["--max-model-len", "512"]),
        "model-length",
        "--max-model-len 512, max_position_embeddings: 128",
        "to 128 or less",
    ),
    "sequences longer than the server": Mistake(
        lambda desk: desk.recipe(
            start_vllm=True,
            vllm_args=["--max-model-len", "64"],
            max_sequence_length=100,
        ),
        "sequence-length",
        "max_sequence_length: 100, --max-model-len 64",
        "Lower `max_sequence_length`",
    ),
    "completions that leave no room for a prompt": Mistake(
        lambda desk: desk.recipe(max_completion_length=128, max_sequence_length=128),
        "completion-length",
        "max_completion_length: 128, the longest rollout: 128",
        "Lower `max_completion_length`",
        WARNING,
    ),
    "completions that leave no room on a server that the run does not start": Mistake(
        lambda desk: desk.recipe(
            max_completion_length=100, max_sequence_length=100, vllm_mode="server", start_vllm=False
        ),
        "completion-length",
        "max_completion_length: 100, the longest rollout: 100",
        "raise `max_sequence_length`.",
        WARNING,
    ),
    "a loss that divides by more than is sampled": Mistake(
        lambda desk: desk.recipe(
            {"config": {"max_new_tokens": 40}},
            loss_type="dr_grpo",
            max_completion_length=64,
            max_sequence_length=100,
        ),
        "loss-divisor",
        "max_completion_length: 64, mine: at most 40 tokens",
        "Set `max_completion_length: 40`",
        WARNING,
    ),
    "an environment's sequences longer than the trainer's": Mistake(
        lambda desk: desk.recipe({"config": {"max_token_length": 128}}, max_sequence_length=100),
        "environment-length",
        "max_token_length: 128, the longest rollout: 100",
        "Lower `max_token_length` to 100",
        WARNING,
    ),
    # an environment's program
    "no such program": Mistake(
        lambda desk: desk.recipe({"python": "venv/bin/python"}),
        "environment-program",
        "{folder}/venv/bin/python",
        "Correct its `python`",
    ),
    "a Python that cannot run": Mistake(
        lambda desk: desk.recipe({"python": broken_python(desk)}),
        "environment-python",
        "exit status 3",
        "Correct its `python`",
    ),
    "no such script": Mistake(
        lambda desk: desk.recipe({"path": "other.py"}),
        "environment-script",
        "path: other.py",
        "Correct its `path` or",
    ),
    "no such script in a command": Mistake(
        lambda desk: desk.recipe({"command": "{python} -u other.py serve"}),
        "environment-script",
        "other.py",
        "Correct its `command` or `cwd`",
    ),
    "no such module": Mistake(
        lambda desk: desk.recipe({"command": "{python} -u -m nowhere.environment serve"}),
        "environment-script",
        "nowhere.environment in ",
        "Correct its `command` or `cwd`",
    ),
    "a Python without Atropos": Mistake(
        lambda desk: desk.recipe({"python": desk.python(atroposlib=None)}),
        "environment-atroposlib",
        "atroposlib is not installed for {folder}/python3",
        'python3 -m pip install "atroposlib==0.4.0"`',
    ),
    "a Python with another Atropos": Mistake(
        lambda desk: desk.recipe({"python": desk.python(atroposlib="0.3.0")}),
        "environment-atroposlib",
        "atroposlib 0.3.0",
        'python3 -m pip install "atroposlib==0.4.0"`',
    ),
    # its code
    "tokens from transformers 5": Mistake(
        lambda desk: tokenizing(desk, transformers="5.1.2"),
        "tokenizes",
        "environment.py, transformers 5.1.2 of {folder}/python3",
        "name its Python as `python`",
    ),
    # its settings
    "a server type without tokens": Mistake(
        lambda desk: desk.commanded("--openai.server_type openai"),
        "server-type",
        "server_type: openai",
        "Set `server_type` to 'vllm'",
    ),
    "a server type without tokens in the entry": Mistake(
        lambda desk: desk.recipe({"servers": [{"server_type": "trl"}]}),
        "server-type",
        "server_type: trl",
        "Set `server_type` to 'vllm'",
    ),
    "a misspelt setting of an environment": Mistake(
        lambda desk: desk.configured(grop_size=8),
        "environment-setting",
        "grop_size: 8 (`config:`)",
        "Did you mean `group_size`?",
    ),
    "a request that reshapes the distribution": Mistake(
        lambda desk: with_source(
            desk, SOURCE + "\nasync def sample(server):\n    await server.completion(top_p=0.9)\n"
        ),
        "reshaped",
        "top_p=0.9 (line 16 of environment.py)",
        "Leave this out of requests",
        WARNING,
    ),
    "made-up tokens": Mistake(
        lambda desk: desk.recipe({"env": {"ATROPOS_ALLOW_DUMMY_MANAGED_SERVER": "1"}}),
        "dummy-tokens",
        "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER",
        "out of its variables",
    ),
    "another server": Mistake(
        lambda desk: desk.commanded("--openai.base_url http://localhost:1/v1"),
        "server-url",
        "http://localhost:1/v1; the run has http://127.0.0.1:",
        "Set it to `{vllm_url}/v1`",
        WARNING,
    ),
    "an end before the run's": Mistake(
        lambda desk: desk.commanded("--env.total_steps 5"),
        "environment-steps",
        "total_steps: 5, max_steps: 10",
        "Leave `total_steps` out",
    ),
    "groups too old to be trained on": Mistake(
        lambda desk: desk.recipe({"config": {"max_batches_offpolicy": 3}}, max_staleness=1),
        "staleness",
        "max_batches_offpolicy: 3, max_staleness: 1",
        "Lower `max_batches_offpolicy` to 1",
        WARNING,
    ),
    "groups that do not fill a batch": Mistake(
        lambda desk: desk.configured(group_size=3),
        "group-size",
        "group_size: 3, a generation batch of 8 rollouts",
        "a multiple of the group size",
    ),
    "groups of one": Mistake(
        lambda desk: desk.configured(group_size=1),
        "group-of-one",
        "group_size: 1, single_row_groups: refuse",
        "set `single_row_groups` to `raw`",
    ),
    "another temperature in the command": Mistake(
        lambda desk: desk.commanded("--env.temperature 0.7"),
        "temperature",
        "temperature 0.7 (--env.temperature)",
        "Make the two equal",
    ),
    "another temperature in the entry": Mistake(
        lambda desk: desk.configured(temperature=0.7),
        "temperature",
        "temperature 0.7 (`config: temperature`), temperature: 1.0",
        "Make the two equal",
    ),
    "groups of sizes that do not go together": Mistake(
        lambda desk: desk.two({"group_size": 6}, {"group_size": 4}, per_device_train_batch_size=12),
        "mixed-group-sizes",
        "one: group_size 6, two: group_size 4",
        "divide the largest",
    ),
    "shares of more than a batch": Mistake(
        lambda desk: desk.two({"min_batch_allocation": 0.7}, {"min_batch_allocation": 0.6}),
        "batch-shares",
        "one: min_batch_allocation 0.7, two: min_batch_allocation 0.6",
        "Lower `min_batch_allocation`",
    ),
}


def broken_python(desk: Desk) -> str:
    (desk.folder / "python3").write_text("#!/bin/sh\nexit 3\n")
    (desk.folder / "python3").chmod(0o755)
    return str(desk.folder / "python3")


def with_source(desk: Desk, source: str) -> list[str]:
    (desk.folder / "environment.py").write_text(source)
    return desk.recipe()


def tokenizing(desk: Desk, **versions: str) -> list[str]:
    source = "def f(tokenizer, messages):\n    return tokenize_for_trainer(tokenizer, messages)\n"
    (desk.folder / "environment.py").write_text(source)
    return desk.recipe({"python": desk.python(**versions)})
