"""Mistakes in recipes and environments, and the one finding that `trl-atropos check` must have of each."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.check_desk import FLAGS, LISTED, Desk
from tests.server_process import free_port
from trl_atropos.checks.finding import ERROR, WARNING

ROOT = Path(__file__).parents[1]

SINGLE = LISTED.replace('[APIServerConfig(server_type="vllm")]', 'APIServerConfig(server_type="vllm")')
SINGLE_BY_NAME = SINGLE.replace("return config, ", "servers = ").replace(
    "    async def", "        return config, servers\n    async def"
)
LISTED_BY_NAME = LISTED.replace("return config, ", "servers = ").replace(
    "    async def", "        return config, servers\n    async def"
)
INHERITED = "class Mine(BaseEnv):\n    pass\nMine.cli()\n"
COMPUTED = LISTED.replace('[APIServerConfig(server_type="vllm")]', "make_servers()")
TOKENIZES = "def f(tokenizer, messages):\n    return tokenize_for_trainer(tokenizer, messages)\n"
CHATS = LISTED.replace("        pass", "        await self.server.chat_completion(messages=item)")
ONE_BY_ONE = LISTED.replace("collect_trajectories", "collect_trajectory")
COOLER = "class Cool(BaseEnvConfig):\n    temperature: float = 0.7\n" + LISTED.replace("= BaseEnvConfig(", "= Cool(")
TWO_SERVERS = LISTED.replace('"vllm")]', '"vllm"), APIServerConfig(server_type="vllm")]')
PLAIN = "--env.rollout_server_url {atropos_url} --env.tokenizer_name {model}"  # no flags for servers


@dataclass(frozen=True)
class Mistake:
    """
    Attributes:
        plant: Makes a recipe with it.
        name: Of the finding.
        seen: What the finding has seen.
        fix: A part of what it says to do.
    """

    plant: Callable[[Desk], list[str]]
    name: str
    seen: str
    fix: str
    level: str = ERROR


GPU = {"use_cpu": False, "vllm_mode": "server"}
DDP = ("--num_processes", "4", "--devices", "2")

MISTAKES = {
    # the recipe
    "a misspelt key": Mistake(
        lambda desk: desk.recipe(lerning_rate=1.0), "unknown-key", "lerning_rate: 1.0", "`learning_rate`"
    ),
    "an impossible value": Mistake(
        lambda desk: desk.recipe(rollout_timeout=-1), "setting", "rollout_timeout: -1", "Set it to a number of seconds"
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
        lambda desk: desk.recipe(flags="", entry={"servers": [{"base_url": "{nowhere}/v1"}]}),
        "environment-command",
        "'nowhere'",
        "Known ones: {python}",
    ),
    "an API at a port that there cannot be": Mistake(
        lambda desk: desk.recipe(flags=FLAGS.replace("{atropos_url}", "http://localhost:99999")),
        "environment-api",
        "rollout_server_url: http://localhost:99999",
        "Add `--env.rollout_server_url",
    ),
    "no adapter for a mode that sends one": Mistake(
        lambda desk: desk.recipe(vllm_mode="lora"), "no-adapter", "vllm_mode: lora", "Set `use_peft: true`"
    ),
    "no such model": Mistake(
        lambda desk: desk.recipe(model_name_or_path="./nowhere"), "model", "nowhere", "Set `model_name_or_path`"
    ),
    "nothing to replay": Mistake(
        lambda desk: desk.recipe(replay_paths=["nowhere"]), "replay", "replay_paths: ['nowhere']", "Correct the path"
    ),
    "no such checkpoint": Mistake(
        lambda desk: desk.recipe(resume_from_checkpoint="checkpoint-7"),
        "checkpoint",
        "resume_from_checkpoint: checkpoint-7",
        "Leave it out to begin anew",
    ),
    "an output folder that is a file": Mistake(
        lambda desk: desk.recipe(output_dir="recipe.yaml"), "output-dir", "output_dir: recipe.yaml", "another folder"
    ),
    "a setting of generation": Mistake(
        lambda desk: desk.recipe(top_p=0.9), "dead-setting", "top_p: 0.9", "in the environment", WARNING
    ),
    "flags for a server that is not started": Mistake(
        lambda desk: desk.recipe(vllm_args=["--max-num-seqs", "8"]),
        "dead-setting",
        "vllm_args: ['--max-num-seqs', '8']",
        "Set `start_vllm: true`, or remove it",
        WARNING,
    ),
    "an adapter's rank without an adapter": Mistake(
        lambda desk: desk.recipe(lora_r=8), "dead-setting", "lora_r: 8", "Set `use_peft: true`", WARNING
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
        "in its place there is `--gpu-memory-utilization` in `vllm_args`",
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
        "pip install galore_torch",
    ),
    "a report to a package that is not installed": Mistake(
        lambda desk: desk.recipe(report_to="clearml"), "report-to", "report_to: clearml", "pip install clearml"
    ),
    # where it is launched
    "a server for two processes": Mistake(
        lambda desk: desk.recipe(options=("--num_processes", "2")),
        "processes-servers",
        "2 processes, 1 servers",
        "`--num_processes 1`",
    ),
    "sharding what is shared": Mistake(
        lambda desk: desk.recipe(options=("--config_file", f"{ROOT}/configs/accelerate/zero3.yaml")),
        "sharded-colocate",
        "distributed_type: DEEPSPEED",
        "use `vllm_mode: server`",
    ),
    "no such file for accelerate": Mistake(
        lambda desk: desk.recipe(options=("--config_file", "nowhere.yaml")),
        "launch-file",
        "nowhere.yaml: ",
        "Name the file that `accelerate launch` will be given",
    ),
    "more processes than GPUs": Mistake(
        lambda desk: desk.recipe(options=DDP, **GPU), "gpu-layout", "4 processes", "`--num_processes`"
    ),
    "a server over more GPUs than there are": Mistake(
        lambda desk: desk.recipe(
            start_vllm=True, vllm_args=["--tensor-parallel-size", "4"], options=("--devices", "2"), **GPU
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
        "2 servers x `--gpu-memory-utilization` 0.92",
        "each with a `CUDA_VISIBLE_DEVICES` of its own",
    ),
    "too little memory": Mistake(
        lambda desk: desk.recipe(start_vllm=True, options=("--device_memory_gb", "1"), gradient_checkpointing=False),
        "memory",
        " of 1.00 GiB",
        "Change, what costs least first: `--kv-cache-memory-bytes ",
    ),
    "too little disk": Mistake(
        lambda desk: desk.recipe(max_steps=10**9, save_steps=1, save_strategy="steps"),
        "disk",
        "1000000000 checkpoints",
        "Set `save_total_limit`",
    ),
    "too little disk for a run that will be on another machine": Mistake(
        lambda desk: desk.recipe(
            max_steps=10**9, save_steps=1, save_strategy="steps", options=("--device_memory_gb", "999")
        ),
        "disk",
        "1000000000 checkpoints",
        "Set `save_total_limit`",
        WARNING,
    ),
    # text
    "another tokenizer": Mistake(
        lambda desk: desk.recipe(
            flags=desk.without_flag("--env.tokenizer_name") + f" --env.tokenizer_name {desk.other_vocabulary()}"
        ),
        "tokenizer",
        "tokenizer_name: {folder}/copy, the run's model: {model}",
        "Add `--env.tokenizer_name {model}`",
    ),
    "Atropos' own tokenizer": Mistake(
        lambda desk: desk.recipe(flags=desk.without_flag("--env.tokenizer_name")),
        "tokenizer",
        "tokenizer_name: NousResearch/DeepHermes-3-Llama-3-3B-Preview",
        "Add `--env.tokenizer_name {model}`",
    ),
    "another tokenizer of the server": Mistake(
        lambda desk: desk.recipe(start_vllm=True, vllm_args=["--tokenizer", desk.other_vocabulary()]),
        "tokenizer",
        "--tokenizer: {folder}/copy",
        "Leave `--tokenizer` out",
    ),
    "chats without a chat template": Mistake(
        lambda desk: desk.recipe(CHATS, model_name_or_path=desk.without_template()),
        "chat-template",
        "environment.py:12, {folder}/copy",
        "Take a model that has one",
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
            desk.changed(max_token_length=64),
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
        "max_completion_length: 128, the longest sequence: 128",
        "Lower `max_completion_length`",
        WARNING,
    ),
    "an environment's sequences longer than the trainer's": Mistake(
        lambda desk: desk.recipe(max_sequence_length=100),
        "environment-length",
        "max_token_length: 128, the longest sequence: 100",
        "Add `--env.max_token_length 100`",
        WARNING,
    ),
    # an environment's program
    "no such program": Mistake(
        lambda desk: desk.recipe(entry={"python": "venv/bin/python"}),
        "environment-program",
        "{folder}/venv/bin/python",
        "Correct its `command`",
    ),
    "a Python that cannot run": Mistake(
        lambda desk: desk.recipe(entry={"python": broken_python(desk)}),
        "environment-python",
        "exit code 3",
        "Correct its `python`",
    ),
    "no such script": Mistake(
        lambda desk: desk.recipe(entry={"command": f"{{python}} other.py serve {FLAGS}"}),
        "environment-script",
        "other.py",
        "Correct its `command` or `cwd`",
    ),
    "no such module": Mistake(
        lambda desk: desk.recipe(entry={"command": f"{{python}} -u -m nowhere.environment serve {FLAGS}"}),
        "environment-script",
        "nowhere.environment in ",
        "Correct its `command` or `cwd`",
    ),
    "a Python without Atropos": Mistake(
        lambda desk: desk.recipe(entry={"python": desk.python(atroposlib=None)}),
        "environment-atroposlib",
        "atroposlib is not installed for {folder}/python3",
        'python3 -m pip install "atroposlib==0.4.0"`',
    ),
    "a Python with another Atropos": Mistake(
        lambda desk: desk.recipe(entry={"python": desk.python(atroposlib="0.3.0")}),
        "environment-atroposlib",
        "atroposlib 0.3.0",
        'python3 -m pip install "atroposlib==0.4.0"`',
    ),
    "a configuration file that is broken": Mistake(
        lambda desk: (
            (desk.folder / "own.yaml").write_text("env: [") and desk.recipe(flags=f"{FLAGS} --config own.yaml")
        ),
        "environment-config",
        "own.yaml: ",
        "Correct the file",
    ),
    # its code
    "a single server config": Mistake(
        lambda desk: desk.recipe(SINGLE),
        "single-server",
        "environment.py:10",
        '`servers: [{base_url: "{vllm_url}/v1"}]`',
    ),
    "tokens from transformers 5": Mistake(
        lambda desk: desk.recipe(TOKENIZES + LISTED, entry={"python": desk.python(transformers="5.1.2")}),
        "tokenizes",
        "environment.py:3, transformers 5.1.2 of {folder}/python3",
        "pass `return_dict=False`",
    ),
    "trajectories one by one": Mistake(
        lambda desk: desk.recipe(ONE_BY_ONE),
        "no-logprobs",
        "environment.py:11",
        "Write `collect_trajectories`",
        WARNING,
    ),
    "a flag that Atropos does not have": Mistake(
        lambda desk: desk.recipe(flags=f"{FLAGS} --env.weight 2"),
        "environment-flag",
        "--env.weight",
        "Correct or remove",
    ),
    "flags for several servers": Mistake(
        lambda desk: desk.recipe(TWO_SERVERS),
        "openai-flags",
        "2 servers, --openai.base_url",
        "state them as `servers`",
    ),
    # its settings
    "a server type without tokens": Mistake(
        lambda desk: desk.recipe(flags=f"{FLAGS} --openai.server_type openai"),
        "server-type",
        "server_type: openai",
        "Set `server_type` to 'vllm'",
    ),
    "no server type in a list that has a name": Mistake(
        lambda desk: desk.recipe(LISTED_BY_NAME.replace('server_type="vllm"', "")),
        "server-type",
        "server_type: openai",
        "Set `server_type` to 'vllm'",
    ),
    "made-up tokens": Mistake(
        lambda desk: desk.recipe(entry={"env": {"ATROPOS_ALLOW_DUMMY_MANAGED_SERVER": "1"}}),
        "dummy-tokens",
        "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER",
        "out of its variables",
    ),
    "another server": Mistake(
        lambda desk: desk.recipe(
            flags=desk.without_flag("--openai.base_url") + " --openai.base_url http://localhost:1/v1"
        ),
        "server-url",
        "http://localhost:1/v1; the run has http://127.0.0.1:",
        "Set it to `{vllm_url}/v1`",
        WARNING,
    ),
    "a server without a name": Mistake(
        lambda desk: desk.recipe(flags=desk.without_flag("--openai.model_name")),
        "server-model-name",
        "model_name: default",
        "Add `--openai.model_name {model}`",
    ),
    "another Atropos API": Mistake(
        lambda desk: desk.recipe(flags=desk.without_flag("--env.rollout_server_url")),
        "environment-api",
        "rollout_server_url: http://localhost:8000, atropos_url: http://127.0.0.1:",
        "Add `--env.rollout_server_url {atropos_url}`",
    ),
    "an environment without a name": Mistake(
        lambda desk: desk.recipe(desk.changed(wandb_name=None)),
        "environment-name",
        "wandb_name: none",
        "Add `--env.wandb_name NAME`",
    ),
    "a log that needs a key": Mistake(
        lambda desk: desk.recipe(desk.changed(use_wandb=True), entry={"env": {"HOME": str(desk.folder)}}),
        "environment-wandb",
        "use_wandb: true, and no WANDB_API_KEY",
        "Add `--env.use_wandb false`",
    ),
    "an end before the run's": Mistake(
        lambda desk: desk.recipe(desk.changed(total_steps=5)),
        "environment-steps",
        "total_steps: 5, max_steps: 10",
        "Add `--env.total_steps -1`",
    ),
    "Atropos' own number of steps": Mistake(
        lambda desk: desk.recipe(LISTED.replace("total_steps=-1, ", ""), max_steps=1001),
        "environment-steps",
        "total_steps: 1000, max_steps: 1001",
        "Add `--env.total_steps -1`",
    ),
    "groups too old to be trained on": Mistake(
        lambda desk: desk.recipe(max_staleness=1),
        "staleness",
        "max_batches_offpolicy: 3, max_staleness: 1",
        "Add `--env.max_batches_offpolicy 1`",
        WARNING,
    ),
    "groups that do not fill a batch": Mistake(
        lambda desk: desk.recipe(desk.changed(group_size=3)),
        "group-size",
        "group_size: 3, a generation batch of 8 rows",
        "a multiple of the group size",
    ),
    "groups of one": Mistake(
        lambda desk: desk.recipe(desk.changed(group_size=1)),
        "group-of-one",
        "group_size: 1, single_row_groups: refuse",
        "set `single_row_groups` to `raw`",
    ),
    "groups that are dropped": Mistake(
        lambda desk: desk.recipe(desk.changed(ensure_scores_are_not_same=True)),
        "drops-groups",
        "ensure_scores_are_not_same: true",
        "Add `--env.ensure_scores_are_not_same false`",
        WARNING,
    ),
    "another temperature in the command": Mistake(
        lambda desk: desk.recipe(flags=f"{FLAGS} --env.temperature 0.7"),
        "temperature",
        "temperature 0.7 (--env.temperature)",
        "Make the two equal",
    ),
    "another temperature in the code": Mistake(
        lambda desk: desk.recipe(COOLER),
        "temperature",
        "temperature: 0.7 there, 1.0 in the run",
        "Add `--env.temperature {temperature}`",
    ),
    "groups of sizes that do not go together": Mistake(
        lambda desk: desk.two("--env.group_size 6", "--env.group_size 4", per_device_train_batch_size=12),
        "mixed-group-sizes",
        "one: group_size 6, two: group_size 4",
        "divide the largest",
    ),
    "shares of more than a batch": Mistake(
        lambda desk: desk.two("--env.min_batch_allocation 0.7", "--env.min_batch_allocation 0.6"),
        "batch-shares",
        "one: min_batch_allocation 0.7, two: min_batch_allocation 0.6",
        "Lower `min_batch_allocation`",
    ),
}


def broken_python(desk: Desk) -> str:
    (desk.folder / "python3").write_text("#!/bin/sh\nexit 3\n")
    (desk.folder / "python3").chmod(0o755)
    return str(desk.folder / "python3")
