"""`trl-atropos try`: what is said of one group, before a run."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests import ROOT
from tests.forge import FORKED_ENGINES, TRAINER
from tests.launching import free_urls, make_model
from tests.rollout_factory import make_group
from trl_atropos.commands import rehearsal
from trl_atropos.errors import RolloutError, ServiceError
from trl_atropos.recipe import parse
from trl_atropos.services.manager import Services

QUICKSTART = "recipes/quickstart/colocate.yaml"


@pytest.fixture
def recipe(tiny_model, tmp_path, monkeypatch):
    """A recipe whose server is not there: nothing is known of versions."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    argv = [
        "--config",
        QUICKSTART,
        "--model_name_or_path",
        str(tiny_model),
        "--output_dir",
        str(tmp_path),
    ]
    return parse([*argv, "--use_cpu", "true", "--vllm_server_base_url", free_urls(1)[0]])


def shown(recipe, line: dict | None, log: Path = Path("none.log")) -> list[str]:
    return list(rehearsal._shown(recipe, recipe.environments[0], line, log, 3.0))


def sent(tiny_model, size: int = 8, **fields) -> dict:
    return {"item": 0, "groups": [make_group(tiny_model, size, 1) | fields]}


def test_group_is_shown_rollout_by_rollout(recipe, tiny_model):
    line = sent(tiny_model, scores=[0.0, 0.5, *[0.25] * 6])
    for name in ("tokens", "masks"):
        line["groups"][0][name][1][-1] = 65  # in place of the end of the sequence
    lines = shown(recipe, line)
    assert "Environment 'quickstart' sent a group of 8 in 3 s" in lines[0]
    numbered = [line for line in lines if re.match(r"\d\. ", line)]
    assert len(numbered) == 8 and numbered[1].startswith("2. score 0.5, ")
    assert ["truncated" in line for line in numbered] == [False, True, *[False] * 6]
    assert any(re.fullmatch(r"\nprompt, \d+ tokens:", line) for line in lines)
    assert max(map(len, lines)) <= 80
    text = " ".join(lines)
    assert (
        "Scores from 0 to 0.5, mean 0.25." in text and lines[-1] == "A run would train on 8 of 8."
    )
    assert "8 are not known to the server" in text


def test_parts_of_a_reward_are_shown_below_the_score(recipe, tiny_model, caplog):
    names = [f"part number {number}" for number in range(9)]
    rewards = [{"format": True, "right": 0.123456}, dict.fromkeys(names, 1), {"bad": "1"}]
    overrides = [{"rewards": each} for each in rewards]
    overrides += [{}] * 5
    lines = shown(recipe, sent(tiny_model, overrides=overrides))
    places = [place for place, line in enumerate(lines) if re.match(r"\d\. ", line)]
    below = [lines[place + 1] for place in places]
    assert below[0] == "   parts: format 1, right 0.1235"
    assert below[1].startswith("   parts: part number 0 1, part number 1 1, ")
    assert not any("parts: " in line for line in below[2:])
    assert max(map(len, lines)) <= 80
    assert "Dropped a part of a reward from environment quickstart: {'bad': '1'}" in caplog.text


def test_second_end_token_ends_a_completion(recipe, tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps(config | {"eos_token_id": [config["eos_token_id"], 65]})
    )
    line = sent(tiny_model)
    for last, place in ((65, 1), (66, 2)):
        for name in ("tokens", "masks"):
            line["groups"][0][name][place][-1] = last
    recipe.model.model_name_or_path = str(folder)
    numbered = [text for text in shown(recipe, line) if re.match(r"\d\. ", text)]
    assert ["truncated" in text for text in numbered] == [False, False, True, *[False] * 5]


def test_doubled_end_token_between_turns_is_reported(recipe, tiny_model):
    line = sent(tiny_model)
    group, end = line["groups"][0], line["groups"][0]["tokens"][0][-1]
    assert "stands twice" not in " ".join(shown(recipe, line))
    group["tokens"][0] += [end, 10, 70, 71]
    group["masks"][0] += [-100, -100, 70, 71]
    group["inference_logprobs"][0] += [1.0, 1.0, -0.5, -0.5]
    group["tokens"][1] += [end, end]  # sampled, so that it is what it is
    group["masks"][1] += [end, end]
    group["inference_logprobs"][1] += [-0.5, -0.5]
    text = " ".join(" ".join(shown(recipe, line)).split())
    assert "In 1 of these rollouts, an end token stands twice in a row between two turns" in text


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"item": 0, "groups": []}, "'quickstart' sent no group. Its `collect_trajectories` or"),
        (
            {
                "item": 0,
                "error": "KeyError: 'w'",
                "place": f"{ROOT}/my/e.py:7 in score",
                "traceback": "Traceback\n",
            },
            r"Environment 'quickstart' failed: KeyError: 'w' \(my/e.py:7 in score\)\.",
        ),
        ({"scores": [1.0]}, "A run would drop this group .* scores has 1 entries for 8 rollouts"),
        (
            {"generation_params": {"temperature": 0.5}},
            "environment quickstart sampled at temperature 0.5",
        ),
        ({"size": 6}, "Groups of 6 do not fill a generation batch of 64 rollouts"),
    ],
)
def test_group_that_a_run_refuses_is_refused(line, told, recipe, tiny_model):
    line = line if "item" in line else sent(tiny_model, line.pop("size", 8), **line)
    with pytest.raises(RolloutError, match=told):
        shown(recipe, line)


def test_branches_and_unknown_overrides_are_shown(recipe, tiny_model):
    line = sent(tiny_model)
    group = line["groups"][0]
    end = group["tokens"][0][-1]
    call = [70, 71, end]
    group["overrides"] = [{} for _ in group["tokens"]]
    group["overrides"][0] = {"branches": [{"of": 0, "at": 2, "tokens": call, "masks": call}]}
    group["overrides"][1] = {"brnaches": []}
    lines = shown(recipe, line)
    first = next(number for number, text in enumerate(lines) if text.startswith("1. score"))
    assert "tokens, 1 branch" in lines[first]
    assert "   branch 1: leaves 0 after 2 tokens" in lines[first:]
    text = " ".join(" ".join(lines).split())
    assert "This version does not know the override 'brnaches'." in text


def test_rows_of_episodes_are_counted_as_such(recipe, tiny_model):
    line = sent(tiny_model)
    group = line["groups"][0]
    group["overrides"] = [{"episode": i // 2} for i, _ in enumerate(group["tokens"])]
    group["scores"] = [float(i // 2) for i, _ in enumerate(group["tokens"])]
    text = " ".join(" ".join(shown(recipe, line)).split())
    assert "Its 8 rows are 4 episodes, and each of these is one rollout." in text
    assert "A run would train on 4 of 4." in text


def test_group_without_variance_teaches_nothing(recipe, tiny_model):
    told = "All scores are equal"
    assert told in " ".join(shown(recipe, sent(tiny_model, scores=[0.5] * 8)))
    one_is_supervised = {"scores": [0.5] * 8, "overrides": [{"sft": True}, *[{}] * 7]}
    assert told not in " ".join(shown(recipe, sent(tiny_model, **one_is_supervised)))


def test_dropped_and_unknown_rollouts_count_once(recipe, tiny_model):
    line = sent(tiny_model)
    (group,) = line["groups"]
    group["inference_logprobs"][1] = [1.0] * len(group["tokens"][1])  # none is known
    recipe.training.max_sequence_length = max(map(len, group["tokens"]))
    for name, value in (("tokens", 65), ("masks", 65), ("inference_logprobs", -1.0)):
        group[name][2] = [*group[name][2], *[value] * recipe.training.max_sequence_length]
    text = " ".join(" ".join(shown(recipe, line)).split())
    longest = recipe.training.max_sequence_length
    assert f"Of these 8, 1 would be dropped: longer than {longest} tokens" in text
    assert "Of these 8, 1 came without log-probabilities for some tokens" in text
    assert "Of these 8, 6 are not known to the server" in text
    assert text.endswith("A run would train on 7 of 8.")


def test_earlier_try_leaves_no_answer(recipe, tmp_path):
    """Nor does its sign let the environment begin before the server is ready."""
    spec = recipe.environments[0]
    with Services(tmp_path / "logs") as services:
        left = [*rehearsal._files(recipe, spec), tmp_path / "logs/environment-quickstart.log"]
        for path in left:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("an earlier try\n")
        service = rehearsal._start(recipe, spec, services)
        assert [path.exists() for path in left[:2]] == [False, False]
        assert "an earlier try" not in left[2].read_text() and service.log_path == left[2]


def test_group_counts_when_it_is_written_whole(tmp_path):
    path = tmp_path / "quickstart.jsonl"
    seen = [rehearsal._is_whole(path)]
    for part in ('{"item": 0, ', '"groups": []}', "\n"):
        with path.open("a") as file:
            file.write(part)
        seen.append(rehearsal._is_whole(path))
    assert seen == [False, False, False, True]


def test_environment_that_cannot_start_is_shown(recipe, tmp_path):
    log = tmp_path / "e.log"
    log.write_text(
        "loading\nTraceback (most recent call last):\n  File x\nModuleNotFoundError: No module "
        "named 'y'\n"
    )
    lines = []
    with pytest.raises(RolloutError, match="'quickstart' ended before its first group"):
        lines.extend(rehearsal._shown(recipe, recipe.environments[0], None, log, 1.0))
    assert (
        lines[1] == "Traceback (most recent call last):"
        and lines[-2] == "ModuleNotFoundError: No module named 'y'"
    )


def test_missing_server_is_reported(recipe):
    with pytest.raises(
        ServiceError,
        match=r"No server answers at http.* Start it with `trl-atropos serve .* --vllm_mode",
    ):
        rehearsal._require_servers(recipe)


# Calls the command with each line of words, and prints the variable each time.
PRINT_VARIABLE = """import os, sys
from trl_atropos import cli
from trl_atropos.commands import rehearsal
rehearsal.main = lambda launcher, settings: print(os.environ.pop("TRL_ATROPOS_TESTED", None))
for line in sys.argv[1:]:
    sys.argv = ["trl-atropos", "try", *line.split()]
    cli.main()"""


def test_variables_of_the_recipe_are_set_wherever_it_stands(tmp_path):
    (tmp_path / "recipe.yaml").write_text("env: {TRL_ATROPOS_TESTED: heeded}\n")
    lines = ["recipe.yaml --num_processes 1", "--num_processes 1 recipe.yaml"]
    (tmp_path / "print_variable.py").write_text(PRINT_VARIABLE)
    done = TRAINER.run(["-m", "print_variable", *lines], cwd=tmp_path)
    assert done.stdout == "heeded\nheeded\n", done.stderr


@pytest.mark.server
@pytest.mark.slow
def test_group_or_traceback_of_each_is_shown(tmp_path):
    """With the server of the recipe, which is gone afterwards."""
    script = (ROOT / "recipes/quickstart/environment.py").read_text()
    broken = tmp_path / "broken.py"
    broken.write_text(
        script.replace('score(item["prompt"], choice', 'score(item["weight"], choice')
    )
    model, url = make_model(tmp_path / "model"), free_urls(1)[0]
    settings = yaml.safe_load((ROOT / QUICKSTART).read_text())
    settings |= {"environments": [str(ROOT / "recipes/quickstart/environment.py"), str(broken)]}
    settings |= {
        "model_name_or_path": str(model),
        "output_dir": str(tmp_path / "out"),
        "vllm_server_base_url": url,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    command = ["-m", "trl_atropos.cli", "try", "--num_processes", "1", "recipe.yaml"]
    env = os.environ | FORKED_ENGINES | {"COLUMNS": "80"}
    done = TRAINER.run(command, env, tmp_path, timeout=400)
    print(done.stdout, done.stderr)
    assert done.returncode == 1
    good, _, bad = done.stdout.partition("A run would train on 8 of 8.")
    assert len(re.findall(r"^\d\. score [\d.]+, 12 tokens, truncated$", good, re.MULTILINE)) == 8
    assert re.search(r"prompt, \d tokens:\n   [a-h]{3}=\n", good) and "not known" not in good
    assert str(broken) in bad and "KeyError: 'weight'" in bad
    assert "Environment 'broken' failed: KeyError: 'weight' (broken.py:" in " ".join(bad.split())
    longest = len(f'    File "{broken}",')
    assert max(map(len, done.stdout.splitlines())) <= max(80, longest)
    assert "Stopped vllm" in done.stderr
