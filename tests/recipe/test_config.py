"""`AtroposGRPOConfig`: what it warns of and understands. `mistakes.py` lists what it refuses."""

import json
import math
import re
import warnings
from dataclasses import MISSING, FrozenInstanceError, fields
from pathlib import Path

import pytest
import yaml
from trl import GRPOConfig, TrlParser

from trl_atropos import AtroposGRPOConfig
from trl_atropos.config import (
    FINITE,
    IMPORTANCE_SAMPLING_MODES,
    LOSS_TYPES,
    REMOVED,
    UNUSED_FIELDS,
    described,
)
from trl_atropos.modes import MODES
from trl_atropos.recipe import (
    PARTS,
    RecipeError,
    ServicesConfig,
    _Parser,
    _types_of_settings,
    parse,
)
from trl_atropos.recipe_files import load_checked

USUAL = {"output_dir": "unused", "max_steps": 10, "use_cpu": True}
OWN_FIELDS = [f for f in fields(AtroposGRPOConfig) if f not in fields(GRPOConfig)]

# A value for each field that has no effect, other than its default.
UNUSED_VALUES = {
    "num_generations": 4,
    "num_generations_eval": 4,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "generation_kwargs": {"temperature": 0.7},
    "chat_template_kwargs": {"enable_thinking": False},
    "cache_implementation": "static",
    "max_tool_calling_iterations": 3,
    "use_transformers_continuous_batching": True,
    "vllm_structured_outputs_regex": "a*",
    "vllm_model_impl": "transformers",
    "reward_weights": [1.0],
    "multi_objective_aggregation": "normalize_then_sum",
    "shuffle_dataset": False,
}


def configure(**settings) -> AtroposGRPOConfig:
    return AtroposGRPOConfig(**USUAL | settings)


def from_yaml(folder: Path, *flags: str, **settings) -> AtroposGRPOConfig:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(USUAL | settings))
    return TrlParser((AtroposGRPOConfig,)).parse_args_and_config(["--config", str(path), *flags])[0]


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", REMOVED)
def test_removed_setting_is_refused_from_python(name):
    with pytest.raises(RecipeError) as refused:
        configure(**{name: True})
    assert str(refused.value) == f"`{name}` is no setting any more. {REMOVED[name]}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", FINITE)
def test_value_that_ruins_all_weights_is_refused(name, value):
    with pytest.raises(RecipeError, match=rf"`{name}` is {value}\. Set it to "):
        configure(**{name: value})


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
def test_loss_goes_with_every_correction_but_vespos(loss_type, mode):
    settings = {"loss_type": loss_type, "vllm_importance_sampling_mode": mode}
    if loss_type == "vespo" and mode.startswith("sequence"):
        with pytest.raises(ValueError, match="token-level"):
            configure(**settings)
        settings["vllm_importance_sampling_correction"] = False
    config = configure(**settings)
    assert (config.loss_type, config.vllm_importance_sampling_mode) == (loss_type, mode)


def test_recorded_rollouts_may_be_trained_sharded(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert configure(replay_paths=["somewhere"]).replay_paths == ["somewhere"]


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("mode", [name for name in MODES if name != "colocate"])
def test_mode_that_copies_weights_may_be_sharded(monkeypatch, mode, name):
    monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "true")
    assert configure(vllm_mode=mode).vllm_mode == mode


@pytest.mark.parametrize("mode", [name for name in MODES if name != "colocate"])
def test_mode_that_copies_weights_may_publish_rarely(mode):
    assert configure(vllm_mode=mode, sync_every_n_steps=5).sync_every_n_steps == 5


@pytest.mark.parametrize(
    ("asked", "own", "expected"),
    [("bf16", {}, True), ("no", {}, False), ("bf16", {"fp16": True}, False)],
)
def test_launchers_mixed_precision_becomes_a_setting(monkeypatch, asked, own, expected):
    """Otherwise accelerate would compute in bfloat16, and nothing here would know."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    assert configure(**own).bf16 is expected


def test_server_may_sleep_while_a_batch_is_trained():
    config = configure(
        vllm_mode="server", vllm_enable_sleep_mode=True, gradient_accumulation_steps=4
    )
    assert (config.vllm_enable_sleep_mode, config.vllm_sleep_level) == (True, 2)


# ----------------------------------------------------------------------------------------- warnings


@pytest.mark.parametrize("name", UNUSED_FIELDS)
def test_setting_without_effect_is_warned_of(name):
    with pytest.warns(
        UserWarning,
        match=rf"no effect, because the environments generate: {name}\. Set .*environment",
    ):
        configure(**{name: UNUSED_VALUES[name]})


def test_setting_with_effect_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        configure(
            loss_type="cispo", epsilon_high=5.0, beta=0.1, temperature=0.7, max_completion_length=64
        )


# ------------------------------------------------------------------------------------ understanding


@pytest.mark.parametrize("asked", [16, 3])
def test_num_generations_constrains_nothing(asked):
    with pytest.warns(UserWarning, match="num_generations"):
        config = configure(num_generations=asked, per_device_train_batch_size=2)
    assert (config.num_generations, config.generation_batch_size) == (asked, 2)


def test_defaults_suit_rollouts_of_an_older_policy():
    config = configure()
    assert config.num_generations == 8
    assert config.vllm_importance_sampling_mode == "token_truncate"
    assert (config.use_vllm, config.bf16) == (False, False)


def test_trls_own_vllm_is_never_started():
    assert configure(use_vllm=True).use_vllm is False


@pytest.mark.parametrize(("given", "meant"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_scale_rewards_takes_trls_booleans(given, meant):
    assert configure(scale_rewards=given).scale_rewards == meant


def test_urls_lose_what_clients_append():
    config = configure(
        atropos_url="http://127.0.0.1:8000/", vllm_server_base_url="http://127.0.0.1:9001/v1/"
    )
    assert (config.atropos_url, config.vllm_server_base_url) == (
        "http://127.0.0.1:8000",
        "http://127.0.0.1:9001",
    )


@pytest.mark.parametrize(
    "several", [["http://a:1", "http://b:2/v1"], "http://a:1, http://b:2/", "http://a:1,http://b:2"]
)
def test_servers_are_a_list_or_separated_by_commas(tmp_path, several):
    for config in (
        configure(vllm_server_base_url=several),
        from_yaml(tmp_path, vllm_server_base_url=several),
    ):
        assert config.vllm_server_urls == ["http://a:1", "http://b:2"]


def test_servers_in_a_flag_are_separated_by_commas(tmp_path):
    config = from_yaml(tmp_path, "--vllm_server_base_url", "http://a:1,http://b:2")
    assert config.vllm_server_urls == ["http://a:1", "http://b:2"]


def test_trls_server_port_stands_for_a_missing_url():
    config = configure(vllm_server_base_url=None, vllm_server_port=9123)
    assert config.vllm_server_base_url == "http://127.0.0.1:9123"


def test_replay_path_in_yaml_may_be_a_text(tmp_path):
    assert from_yaml(tmp_path, replay_paths="one.jsonl").replay_paths == ["one.jsonl"]


def test_default_may_stand_in_a_recipe(tmp_path):
    """The checks of types refuse nothing that is right."""
    defaults = {}
    for part in PARTS:
        for setting in fields(part):
            if setting.default not in (MISSING, None):
                defaults[setting.name] = getattr(setting.default, "value", setting.default)
    defaults |= {"resume_from_checkpoint": False, "fsdp": False, "scale_rewards": False}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(USUAL | defaults))
    load_checked(str(path), _types_of_settings(_Parser(PARTS)))


def test_flags_override_the_recipe(tmp_path):
    config = from_yaml(
        tmp_path, "--temperature", "0.5", "--replay_paths", "a", "b", temperature=0.9
    )
    assert (config.temperature, config.replay_paths) == (0.5, ["a", "b"])


def test_parser_takes_every_setting_as_a_flag(tmp_path):
    options = {
        option
        for action in TrlParser((AtroposGRPOConfig,))._actions
        for option in action.option_strings
    }
    assert {f"--{f.name}" for f in OWN_FIELDS} <= options


@pytest.mark.parametrize("config", [ServicesConfig, AtroposGRPOConfig])
def test_docstring_is_the_help_and_states_the_default(config):
    explained = {name: text for _, name, text in described(config)}
    assert explained.keys() == config.__annotations__.keys()
    for one in fields(config):
        if one.name in explained:
            assert one.metadata["help"] == explained[one.name]
            assert len(explained[one.name]) > 20 and explained[one.name].endswith(".")
            default = (
                ""
                if one.default is None
                else f", defaults to `{json.dumps(one.default)}`".replace("`t", "`T")
            )
            header = re.search(
                rf"^        {one.name} \(`.*`, \*optional\*(.*)\):$", config.__doc__, re.MULTILINE
            )
            assert header[1] == default.replace("`f", "`F")


def test_recipe_is_frozen_and_its_copy_is_another(tiny_model, tmp_path):
    argv = ["--model_name_or_path", str(tiny_model), "--output_dir", str(tmp_path)]
    recipe = parse([*argv, "--max_steps", "1", "--use_cpu", "true", "--bf16", "false"])
    other = recipe.with_training(output_dir="elsewhere")
    assert (recipe.training.output_dir, other.training.output_dir) == (str(tmp_path), "elsewhere")
    assert other.services is recipe.services
    for part, name in ((recipe, "training"), (recipe.services, "start_vllm")):
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, None)


@pytest.mark.parametrize(
    ("setting", "kind", "runs_agents"),
    [
        ("environments", "path", False),
        ("environments", "agent", True),
        ("evaluations", "agent", True),
        ("evaluations", "verifiers", True),
    ],
)
def test_run_with_agents_is_known(tiny_model, tmp_path, setting, kind, runs_agents):
    script = tmp_path / "score.py"
    script.write_text("def tasks():\n    return [1]\ndef score(*_):\n    return 1\n")
    agent = {"command": "python a.py", "tasks": f"{script}:tasks", "score": f"{script}:score"}
    entry = {"path": str(script), "agent": agent, "verifiers": {"id": "wordle"}}
    spec = {kind: entry[kind]}
    if setting == "evaluations":
        spec["problems"] = 2
    settings = {
        "model_name_or_path": str(tiny_model),
        "output_dir": str(tmp_path / "run"),
        "max_steps": 1,
        "use_cpu": True,
        "bf16": False,
        setting: [spec],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    recipe = parse(["--config", str(tmp_path / "recipe.yaml")])
    assert recipe.runs_agents == runs_agents


def test_fields_of_trl_are_all_there():
    assert {f.name for f in fields(GRPOConfig)} <= {f.name for f in fields(AtroposGRPOConfig)}
