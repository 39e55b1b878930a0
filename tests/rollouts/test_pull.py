"""Why no batch comes: each cause, made for real at a real Atropos API, and what the message says of
it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.forge import WITHOUT_TORCH
from tests.rollouts.bare_trainer import BareTrainer
from tests.rollouts.conftest import Api, make_group
from trl_atropos.environment_entry import EnvironmentSpec
from trl_atropos.services.environment_metrics import ALL_FAILED
from trl_atropos.services.environments import EnvironmentLog, Supervisor

ENVIRONMENT = Path(__file__).parent / "plain_environment.py"
WEIGHT_LINE = next(
    i for i, line in enumerate(ENVIRONMENT.read_text().splitlines(), 1) if '["weight"]' in line
)
BATCH = 4
LIMIT = 65  # tokens: sequences of this length are dropped


def variables(**own: str) -> dict[str, str]:
    """Of the process of an environment that a run starts."""
    return os.environ | EnvironmentSpec(path=str(ENVIRONMENT), env=own).variables()


@pytest.fixture
def open_trainer() -> Iterator[Callable[[str], BareTrainer]]:
    """A trainer that has joined an API and has asked for its first batch, which lets environments
    in."""
    opened: list[BareTrainer] = []

    def start(url: str) -> BareTrainer:
        opened.append(BareTrainer(url, BATCH, LIMIT))
        assert opened[-1].pull() is None
        return opened[-1]

    yield start
    for trainer in opened:
        trainer.close()


def register(api: Api, group_size: int = 2, **fields) -> int:
    """What an environment does first."""
    body = {
        "max_token_length": 64,
        "desired_name": "e",
        "weight": 1.0,
        "group_size": group_size,
    } | fields
    answer = api.post("/register-env", body)
    assert answer["status"] == "success"
    return answer["env_id"]


def test_absent_environments_are_told_with_command(api, open_trainer):
    told = open_trainer(api.url).diagnosis.why_quiet()
    assert told.startswith(
        f"No environment has registered with the Atropos API at {api.url}. Start one with "
    )
    assert f"`--env.rollout_server_url {api.url}`" in told


def test_silent_api_is_named_with_reason(restartable_api, open_trainer):
    trainer = open_trainer(restartable_api.url)
    restartable_api.stop()
    told = trainer.diagnosis.why_quiet()
    assert (
        told.startswith(f"The Atropos API at {restartable_api.url} does not answer: ")
        and "refused" in told
    )


def test_restarted_api_is_told_from_unused_one(restartable_api, open_trainer):
    trainer = open_trainer(restartable_api.url)
    register(restartable_api)
    restartable_api.stop()
    restartable_api.start()
    assert "was restarted or reset and holds no trainer" in trainer.diagnosis.why_quiet()
    assert trainer.pull() is None  # registers again
    told = trainer.diagnosis.why_quiet()
    assert "No environment has registered" in told and re.search(
        r"since it was restarted \d+ s ago", told
    )
    assert "do not register again by themselves" in told


def test_unfitting_group_sizes_are_named_one_by_one(api, open_trainer):
    trainer = open_trainer(api.url)
    api.deliver(make_group(0, 1, env_id=register(api, 2)), make_group(0, 1, env_id=0))
    assert len(trainer.pull_batch()) == 2
    api.deliver(*[make_group(0, 1, 2, env_id=register(api, 3))] * 2)
    told = trainer.diagnosis.why_quiet()
    assert "holds 2 groups of at most 3 rollouts but cannot assemble exactly 4 rollouts" in told
    assert "Environment 0 sends groups of 2; environment 1 sends groups of 3." in told
    assert "a multiple of every group size" in told
    assert "`reset_atropos: true`" in told


def test_group_larger_than_batch_is_named(api, open_trainer):
    trainer = open_trainer(api.url)
    api.deliver(make_group(0, 1, 2, 3, 4, env_id=register(api, 5)))
    told = trainer.diagnosis.why_quiet()
    assert "holds 1 groups of at most 5 rollouts but cannot assemble exactly 4" in told
    assert "Environment 0 sends groups of 5." in told


def test_unfitting_group_size_is_told_from_too_few(api, open_trainer):
    trainer = open_trainer(api.url)
    api.deliver(make_group(0, 1, 2, env_id=register(api, 3)))
    told = trainer.diagnosis.why_quiet()
    assert "holds 1 groups of at most 3 rollouts but cannot assemble exactly 4" in told
    assert "a multiple of every group size" in told


def test_short_queue_is_told_from_wedge(api, open_trainer):
    trainer = open_trainer(api.url)
    env_id = register(api)
    api.deliver(make_group(0, 1, env_id=env_id), make_group(0, 1, env_id=env_id))
    assert len(trainer.pull_batch()) == 2
    api.deliver(make_group(0, 1, env_id=env_id))
    told = trainer.diagnosis.why_quiet()
    assert "holds 1 groups of at most 2 rollouts, less than a batch of 4" in told
    assert re.search(r"Environment 0 has delivered 2 groups of 2, the last \d+ s ago\.", told)


def test_dead_environment_with_allocation_is_found(api, open_trainer):
    trainer = open_trainer(api.url)
    dead = register(api, min_batch_allocation=0.5)
    alive = register(api)
    api.deliver(*[make_group(0, 1, env_id=alive)] * 4)
    assert trainer.pull() is None
    told = trainer.diagnosis.why_quiet()
    assert (
        "50% of every batch is reserved by `min_batch_allocation`, and environment 0 has nothing "
        "queued" in told
    )
    assert "Environment 0 has delivered nothing to this run." in told
    assert told.endswith(
        f"""`curl -X POST {api.url}/disconnect-env -H 'Content-Type: application/json' -d '{{"env_id": {dead}}}'`."""
    )
    api.post("/disconnect-env", {"env_id": dead})
    assert len(trainer.pull_batch()) == 2


def test_silent_environment_is_told_from_stopped_one(api, open_trainer):
    trainer = open_trainer(api.url)
    first, second = register(api), register(api)
    api.deliver(*[make_group(0, 1, env_id=second)] * 2)
    assert len(trainer.pull_batch()) == 2
    told = trainer.diagnosis.why_quiet()
    assert "has 2 environments, but its queue is empty" in told
    assert (
        f"Environment {first} has delivered nothing to this run; environment {second} has "
        "delivered 2 groups" in told
    )
    assert "cannot tell a dead environment from one that delivers nothing" in told


def test_sequences_near_length_limit_are_pointed_out(api, open_trainer):
    trainer = open_trainer(api.url)
    env_id = register(api)
    long = [[7] * (LIMIT - 1)] * 2
    fields = {"tokens": long, "masks": long, "inference_logprobs": None, "env_id": env_id}
    api.deliver(*[make_group(0, 1, **fields)] * 2)
    assert len(trainer.pull_batch()) == 2
    told = trainer.diagnosis.why_quiet()
    assert (
        f"The rollouts of environment 0 had grown to {LIMIT - 1} tokens, close to the limit" in told
    )
    assert f"a rollout of {LIMIT} tokens or more" in told


def test_anonymous_unfitting_group_is_named_by_size(api, open_trainer):
    trainer = open_trainer(api.url)
    api.deliver(*[make_group(0, 1, 2, env_id=None)] * 2)
    told = trainer.diagnosis.why_quiet()
    assert "holds 2 groups but cannot assemble exactly 4 rollouts" in told
    assert "The group that was queued last is of 3 and has no `env_id`." in told


def test_held_back_group_of_other_size_is_told(api, open_trainer):
    trainer = open_trainer(api.url)
    api.deliver(make_group(0, 1, 2, 3, env_id=register(api, 2)))
    assert trainer.pull() is None
    assert (
        "another size than its `group_size` (the API holds those back)"
        in trainer.diagnosis.why_quiet()
    )


def test_restarted_api_forgets_past_deliveries(restartable_api, open_trainer):
    trainer = open_trainer(restartable_api.url)
    restartable_api.deliver(*[make_group(0, 1, env_id=register(restartable_api))] * 2)
    assert len(trainer.pull_batch()) == 2
    restartable_api.stop()
    restartable_api.start()
    assert trainer.pull() is None  # registers again
    assert trainer.pull() is None  # lets environments in
    register(restartable_api)
    assert "Environment 0 has delivered nothing to this run." in trainer.diagnosis.why_quiet()


FAULTS = {  # of the groups of an environment, and what its log says of each
    "cannot score": r"failed to collect a group; the last error was KeyError: 'weight' "
    rf"\({re.escape(str(ENVIRONMENT))}:{WEIGHT_LINE} in score\)$",
    "returns none": "sampled a group and returned none: most environments do if all scores of a "
    "group are alike",
    "constant scores": "dropped a group because its scores are all equal",
    "too long": "dropped a group that has a rollout over the length limit",
    "wrong size": "dropped a group that is not of its `group_size`",
}


def test_environment_log_tells_why_nothing_comes(api, open_trainer, tiny_model, tmp_path):
    trainer = open_trainer(api.url)
    path = tmp_path / "log"
    command = [sys.executable, str(ENVIRONMENT), api.url, str(tiny_model), "--faults", *FAULTS]
    with path.open("wb") as output:
        env = variables(**WITHOUT_TORCH)
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=env, start_new_session=True
        )
    log = EnvironmentLog(str(path))
    try:
        deadline = time.monotonic() + 240
        while len(told := log.read().undelivered()) < len(FAULTS):
            assert process.poll() is None and time.monotonic() < deadline, path.read_text()[-3000:]
            assert trainer.pull() is None
            time.sleep(0.2)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for fault, sign in FAULTS.items():
        assert any(re.match(rf"\d+ times it {sign}", one) for one in told), f"{fault}: {told}"
    assert "failed" in told[0]
    assert len(trainer.client.environments()) == 1
    assert "has an environment, but its queue is empty" in trainer.diagnosis.why_quiet()


@pytest.fixture
def log_of(tmp_path) -> Callable[[str], EnvironmentLog]:
    """An environment's log with this text."""

    def write(text: str) -> EnvironmentLog:
        (tmp_path / "log").write_text(text)
        return EnvironmentLog(str(tmp_path / "log")).read()

    return write


def test_agents_that_all_fail_are_told_once(log_of, caplog):
    log = log_of(
        "--- 2026-01-01 12:00:00 python run.py\n"
        "WARNING:agents: An episode has failed (failed): exit code 1\n"
        f"WARNING:agents: {ALL_FAILED}, 32 of 32, and has the score 0. The last one: exit code 1.\n"
    )
    supervisor = Supervisor(SimpleNamespace(), pytest.fail)
    service = SimpleNamespace(name="environment-agent", log_path="logs/environment-agent.log")
    for _ in range(2):
        supervisor._tell_of_failing_agents(service, log)
    (line,) = caplog.messages
    assert line == (
        f"environment-agent: {ALL_FAILED}, 32 of 32, and has the score 0. The last one: exit code 1. "
        "Its log: logs/environment-agent.log."
    )


def test_atropos_error_is_quoted_as_last_resort(log_of):
    log = log_of(
        "ERROR:root:Error in collect_trajectories: 'yes'\nINFO\nERROR:root:Error in "
        "collect_trajectories: 'no'\n"
    )
    assert log.undelivered() == ["2 times it failed to collect a group; the last error was 'no'"]
    assert (log.place, log.never_succeeded) == ("", False)


def test_failed_group_is_not_counted_as_dropped(log_of):
    nothing = "DEBUG:atroposlib.envs.base:handle_env: No trajectories collected\n"
    log = log_of(3 * nothing + "ERROR:root:Error in collect_trajectories: 'x'\n" + nothing)
    assert [reason[:40] for reason in log.undelivered()] == [
        "1 times it failed to collect a group; th",
        "3 times it sampled a group and returned ",
    ]


def test_log_is_followed_from_run_start_and_restart(tmp_path):
    path = tmp_path / "log"
    former, failed = "--- 2026-11-22 env\n", "ERROR:root:Error in collect_trajectories: 'x'\n"
    path.write_text(former + failed)
    log = EnvironmentLog(str(path), path.stat().st_size)
    with path.open("a") as file:
        file.write(former + "Initialized env with id 3\n" + failed[:-1])
        file.flush()
        assert (log.read().failures, log.number) == (0, 3)  # the line has not ended
        file.write("\n" + failed)
        file.flush()
        assert log.read().failures == 2
        file.write("guard: python ended with exit code 1; starting it again in 1 s\n")
    assert (log.read().failures, log.number, log.former_number) == (0, None, 3)


def test_log_without_sign_tells_nothing(log_of):
    assert log_of("all is well\n").undelivered() == []
