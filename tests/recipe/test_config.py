"""`AtroposGRPOConfig`: what it refuses and says, what it warns of, what it understands."""

import json
import re
import warnings
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
import yaml
from trl import GRPOConfig, TrlParser

from trl_atropos import AtroposGRPOConfig
from trl_atropos.config import (
    IMPORTANCE_SAMPLING_MODES,
    LOSS_TYPES,
    REMOVED,
    UNUSED_FIELDS,
    described,
)
from trl_atropos.modes import MODES
from trl_atropos.recipe import RecipeError, ServicesConfig, parse

USUAL = {"output_dir": "unused", "max_steps": 10, "use_cpu": True}
OWN_FIELDS = [f for f in fields(AtroposGRPOConfig) if f not in fields(GRPOConfig)]

# Settings, and what the message must say: the value seen, and the fix.
REFUSED = {
    "no length"
    "": ({"max_steps": -1}, r"`max_steps` is -1.*Set `max_steps` to the number of optimizer steps"),
    "no steps": ({"max_steps": 0}, r"`max_steps` is 0.*Set `max_steps`"),
    "evaluation by epochs"
    "": ({"eval_strategy": "epoch"}, r"have no epochs.*Set `eval_strategy: steps`"),
    "no time to evaluate"
    "": ({"eval_timeout": 0}, r"`eval_timeout` is 0. Set it to a number of seconds above 0"),
    "best model of a moving policy": (
        {"eval_strategy": "steps", "metric_for_best_model": "eval_x_pass@1", "eval_hold": False},
        r"`metric_for_best_model` must be known before .*Leave `eval_hold` out",
    ),
    "mode": ({"vllm_mode": "banana"}, r"`vllm_mode` is 'banana'. Set it to one of: colocate"),
    "transport": ({"weight_transport": "rdma"}, r"`weight_transport` is 'rdma'. Set it to one of: auto, nccl, gloo"),
    "sleep level": ({"vllm_sleep_level": 3}, r"`vllm_sleep_level` is 3. Set it to one of: 1, 2"),
    "no publish": ({"sync_every_n_steps": 0}, r"`sync_every_n_steps` is 0. Set it to 1 or more"),
    "rare publishes of one copy": (
        {"sync_every_n_steps": 2},
        r"`sync_every_n_steps` is 2, but with `vllm_mode='colocate'` .*Leave it at 1",
    ),
    "sleep before the batch is whole": (
        {"vllm_mode": "server", "vllm_enable_sleep_mode": True, "gradient_accumulation_steps": 4,
         "steps_per_generation": 2},
        r"another batch before .*\(.*steps_per_generation 2, gradient_accumulation_steps 4\)\. .*leave `steps_per_gen",
    ),
    "sleep over several steps": (
        {"vllm_mode": "server", "vllm_enable_sleep_mode": True, "sync_every_n_steps": 2},
        r"another batch before that \(sync_every_n_steps 2, .*Set `sync_every_n_steps: 1`",
    ),
    "loss": ({"loss_type": "ppo"}, r"`loss_type` is 'ppo'. Set it to one of: grpo, bnpo, .*, vespo"),
    "correction": (
        {"vllm_importance_sampling_mode": "token"},
        r"`vllm_importance_sampling_mode` is 'token'. Set it to one of: token_truncate, .*sequence_mask",
    ),
    "level": ({"importance_sampling_level": "word"}, r"`importance_sampling_level` is 'word'.*: token, sequence"),
    "scaling": ({"scale_rewards": "std"}, r"`scale_rewards` is 'std'. Set it to one of: group, batch, none"),
    "single rows"
    "": ({"single_row_groups": "keep"}, r"`single_row_groups` is 'keep'.*: refuse, raw, zero"),
    "no time for rollouts"
    "": ({"rollout_timeout": 0}, r"`rollout_timeout` is 0. Set it to a number of seconds above 0"),
    "no time to publish"
    "": ({"publish_timeout": -1.0}, r"`publish_timeout` is -1.0. Set it to a number of seconds"),
    "probe": ({"probe_every_n_steps": -1}, r"`probe_every_n_steps` is -1. Set it to 0 \(off\) or more"),
    "prefetch": ({"prefetch_batches": -1}, r"`prefetch_batches` is -1. Set it to 0 or more"),
    "staleness": ({"max_staleness": -1}, r"`max_staleness` is -1. Set it to 0 or more"),
    "held back and asked for": (
        {"hold_requests": True, "prefetch_batches": 1},
        r"`hold_requests` holds back what would be sampled ahead, .* Leave one of them out",
    ),
    "no room for rollouts"
    "": ({"max_spool_gb": 0}, r"`max_spool_gb` is 0. Set it to a number of gigabytes above 0"),
    "too short"
    "": ({"max_sequence_length": 1}, r"`max_sequence_length` is 1. Set it to the longest prompt plus"),
    "a budget below the longest rollout": (
        {"max_tokens_per_micro_batch": 512, "max_sequence_length": 1024},
        r"`max_tokens_per_micro_batch` is 512, but .*`max_sequence_length` \(1024\).*Set it to that or more",
    ),
    "a budget of nothing": (
        {"max_tokens_per_micro_batch": 0},
        r"`max_tokens_per_micro_batch` is 0, .*Set it to that or more",
    ),
    "a budget, accumulated": (
        {"max_tokens_per_micro_batch": 512, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 6},
        r"`gradient_accumulation_steps` is 4, .*steps: 1` and `per_device_train_batch_size: 24`",
    ),
    "a budget with a mean over micro-batches": (
        {"max_tokens_per_micro_batch": 512, "loss_type": "bnpo"},
        r"`max_tokens_per_micro_batch` changes which rollouts share a micro-batch, .*Use another `loss_type`",
    ),
    "greedy": ({"temperature": 0.0}, r"`temperature` is 0.0.*Set it to the temperature above 0"),
    "vespo with sequence_mask": (
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"},
        r"'sequence_mask'. Set it to 'token_truncate' or 'token_mask', or set `vllm_importance_sampling_correction: ",
    ),
    "vespo with sequence_truncate": (
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_truncate"},
        r"'sequence_truncate'. Set it to 'token_truncate'",
    ),
    "odd batch": (
        {"per_device_train_batch_size": 3},
        r"A generation batch has 3 rollouts \(per_device_train_batch_size 3 x 1 processes x 1 .*must be even.*"
        r"Change `per",
    ),
    "no URL"
    "": ({"atropos_url": "localhost:8000"}, r"`atropos_url` is 'localhost:8000'.*Write it as `http://host:port`"),
    "no URL of the server"
    "": ({"vllm_server_base_url": "http://"}, r"`vllm_server_base_url` is 'http://'.*Write it as"),
    "no port"
    "": ({"atropos_url": "http://localhost:eight"}, r"`atropos_url` is .*eight.*Write it as `http://host:port`"),
    "one URL for two servers": (
        {"atropos_url": "http://127.0.0.1:9001/", "vllm_server_base_url": "http://127.0.0.1:9001/v1"},
        r"are both http://127.0.0.1:9001. They are two servers\. Give each its own port",
    ),
    "one bad URL among several": (
        {"vllm_server_base_url": "http://127.0.0.1:9001,127.0.0.1:9002"},
        r"`vllm_server_base_url` is '127.0.0.1:9002'.*Write it as `http://host:port`",
    ),
    "one bad URL in a list": (
        {"vllm_server_base_url": ["http://127.0.0.1:9001", "http://127.0.0.1:x"]},
        r"`vllm_server_base_url` is 'http://127.0.0.1:x'.*Write it as `http://host:port`",
    ),
    "an empty place in a list": (
        {"vllm_server_base_url": "http://127.0.0.1:9001,"},
        r"`vllm_server_base_url` is ''.*Write it as `http://host:port`",
    ),
    "one server twice": (
        {"vllm_server_base_url": ["http://127.0.0.1:9001", "http://127.0.0.1:9001/v1/"]},
        r"`vllm_server_base_url` lists http://127.0.0.1:9001 twice\. List each server once",
    ),
    "the API among the servers": (
        {"atropos_url": "http://h:2", "vllm_server_base_url": "http://h:1,http://h:2"},
        r"`atropos_url` and `vllm_server_base_url` are both http://h:2",
    ),
    "deepspeed": ({"deepspeed": {"zero_optimization": {"stage": 2}}}, r"cannot be sharded\. Remove `deepspeed`"),
    "fsdp": ({"fsdp": "full_shard"}, r"cannot be sharded\. Remove `fsdp`"),
}  # fmt: skip

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


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_the_fix(case):
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        configure(**settings)


@pytest.mark.parametrize("case", REFUSED)
def test_a_recipe_is_checked_like_python(tmp_path, case):
    """YAML goes past the `choices` of the parser, so that only these checks stand between it and
    the run."""
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        from_yaml(tmp_path, **settings)


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_sharding_that_only_the_launcher_knows_of_is_refused(monkeypatch, name):
    monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "true")
    with pytest.raises(
        ValueError, match=f"Remove `{name}` from the configuration of `accelerate launch`"
    ):
        configure()


def test_an_odd_batch_is_counted_over_all_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        ValueError, match=r"has 15 rollouts .*per_device_train_batch_size 1 x 3 processes x 5 steps"
    ):
        configure(per_device_train_batch_size=1, gradient_accumulation_steps=5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
def test_every_loss_goes_with_every_correction_but_vespo_with_those_of_sequences(loss_type, mode):
    settings = {"loss_type": loss_type, "vllm_importance_sampling_mode": mode}
    if loss_type == "vespo" and mode.startswith("sequence"):
        with pytest.raises(ValueError, match="token-level"):
            configure(**settings)
        settings["vllm_importance_sampling_correction"] = False
    config = configure(**settings)
    assert (config.loss_type, config.vllm_importance_sampling_mode) == (loss_type, mode)


def test_recorded_rollouts_may_be_trained_on_sharded(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert configure(replay_paths=["somewhere"]).replay_paths == ["somewhere"]


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
@pytest.mark.parametrize("mode", [name for name in MODES if name != "colocate"])
def test_modes_that_copy_weights_may_be_sharded(monkeypatch, mode, name):
    monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "true")
    assert configure(vllm_mode=mode).vllm_mode == mode


@pytest.mark.parametrize("mode", [name for name in MODES if name != "colocate"])
def test_modes_that_copy_weights_may_publish_rarely(mode):
    assert configure(vllm_mode=mode, sync_every_n_steps=5).sync_every_n_steps == 5


@pytest.mark.parametrize(
    ("asked", "own", "expected"),
    [("bf16", {}, True), ("no", {}, False), ("bf16", {"fp16": True}, False)],
)
def test_mixed_precision_that_the_launcher_asks_for_is_a_setting_like_any_other(
    monkeypatch, asked, own, expected
):
    """Otherwise accelerate would compute in bfloat16, and nothing here would know."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    assert configure(**own).bf16 is expected


def test_a_server_may_sleep_while_a_whole_batch_is_trained():
    config = configure(
        vllm_mode="server", vllm_enable_sleep_mode=True, gradient_accumulation_steps=4
    )
    assert (config.vllm_enable_sleep_mode, config.vllm_sleep_level) == (True, 2)


# ----------------------------------------------------------------------------------------- warnings


def test_every_setting_without_effect_is_tried_here():
    assert set(UNUSED_VALUES) == set(UNUSED_FIELDS)


@pytest.mark.parametrize("name", REMOVED)
def test_a_setting_of_earlier_versions_is_refused_with_what_replaces_it(tmp_path, name):
    with pytest.raises(
        ValueError, match=re.escape(f"`{name}` is no setting any more. {REMOVED[name]}")
    ):
        AtroposGRPOConfig(output_dir=str(tmp_path), max_steps=1, **{name: True})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{name}: true")
    told = f"unknown key `{name}`. It is no setting any more. {REMOVED[name]}"
    with pytest.raises(RecipeError, match=re.escape(told)):
        parse(["--config", str(recipe)])


@pytest.mark.parametrize("name", UNUSED_FIELDS)
def test_a_setting_without_effect_is_warned_of_by_name(name):
    with pytest.warns(
        UserWarning,
        match=rf"no effect, because the environments generate: {name}\. Set .*environment",
    ):
        configure(**{name: UNUSED_VALUES[name]})


def test_settings_with_effect_are_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        configure(
            loss_type="cispo", epsilon_high=5.0, beta=0.1, temperature=0.7, max_completion_length=64
        )


# ------------------------------------------------------------------------------------ understanding


@pytest.mark.parametrize("asked", [16, 3])
def test_num_generations_is_what_was_asked_for_and_constrains_nothing(asked):
    with pytest.warns(UserWarning, match="num_generations"):
        config = configure(num_generations=asked, per_device_train_batch_size=2)
    assert (config.num_generations, config.generation_batch_size) == (asked, 2)


def test_the_defaults_are_for_rollouts_of_an_older_policy_scored_in_the_servers_dtype():
    config = configure()
    assert config.num_generations == 8
    assert config.vllm_importance_sampling_mode == "token_truncate"
    assert (config.use_vllm, config.bf16) == (False, False)


def test_a_vllm_of_trls_own_is_never_started():
    assert configure(use_vllm=True).use_vllm is False


@pytest.mark.parametrize(("given", "meant"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_scale_rewards_takes_the_booleans_that_trl_takes(given, meant):
    assert configure(scale_rewards=given).scale_rewards == meant


def test_urls_lose_what_clients_append_themselves():
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
def test_several_servers_are_a_list_or_separated_by_commas(tmp_path, several):
    for config in (
        configure(vllm_server_base_url=several),
        from_yaml(tmp_path, vllm_server_base_url=several),
    ):
        assert config.vllm_server_urls == ["http://a:1", "http://b:2"]


def test_several_servers_on_the_command_line_are_separated_by_commas(tmp_path):
    config = from_yaml(tmp_path, "--vllm_server_base_url", "http://a:1,http://b:2")
    assert config.vllm_server_urls == ["http://a:1", "http://b:2"]


def test_trls_server_port_is_understood_where_there_is_no_url():
    config = configure(vllm_server_base_url=None, vllm_server_port=9123)
    assert config.vllm_server_base_url == "http://127.0.0.1:9123"


def test_one_replay_path_in_yaml_is_a_list_of_one(tmp_path):
    assert from_yaml(tmp_path, replay_paths="one.jsonl").replay_paths == ["one.jsonl"]


def test_flags_override_the_recipe(tmp_path):
    config = from_yaml(
        tmp_path, "--temperature", "0.5", "--replay_paths", "a", "b", temperature=0.9
    )
    assert (config.temperature, config.replay_paths) == (0.5, ["a", "b"])


def test_the_parser_takes_every_field_of_ours_as_a_flag(tmp_path):
    options = {
        option
        for action in TrlParser((AtroposGRPOConfig,))._actions
        for option in action.option_strings
    }
    assert {f"--{f.name}" for f in OWN_FIELDS} <= options


@pytest.mark.parametrize("config", [ServicesConfig, AtroposGRPOConfig])
def test_the_docstring_is_the_help_of_every_field_and_states_its_default(config):
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


def test_recipe_does_not_change_and_another_one_has_other_settings(tiny_model, tmp_path):
    argv = ["--model_name_or_path", str(tiny_model), "--output_dir", str(tmp_path)]
    recipe = parse([*argv, "--max_steps", "1", "--use_cpu", "true", "--bf16", "false"])
    other = recipe.with_training(output_dir="elsewhere")
    assert (recipe.training.output_dir, other.training.output_dir) == (str(tmp_path), "elsewhere")
    assert other.services is recipe.services
    for part, name in ((recipe, "training"), (recipe.services, "start_vllm")):
        with pytest.raises(FrozenInstanceError):
            setattr(part, name, None)


def test_every_field_of_trl_is_still_there():
    assert {f.name for f in fields(GRPOConfig)} <= {f.name for f in fields(AtroposGRPOConfig)}
