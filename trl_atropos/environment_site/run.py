"""Runs the script of an Atropos environment, with what Atropos leaves out.

    python run.py SCRIPT serve --config FILE

- Atropos' own `collect_trajectories` makes a group of what `collect_trajectory` returns, and drops
  some fields. One of them is the log-probabilities of the sampled tokens, without which nobody
  knows what sampled a rollout. Here they stay. Of other fields it drops which rollout they are of,
  unless all rollouts have them. Here the others get empty ones.
- Parts of a reward may be numbers that JSON does not have, such as NaN or those of numpy. The API
  would lose the group of one, or the whole batch. Here they become plain: see
  `make_rewards_plain`.
- The metrics that an environment logs reach Weights & Biases alone. Here they also reach the run:
  see `environment_site_metrics.py`.
- Atropos drops settings that an environment does not have. Here, a name under `stated` in FILE that
  is no setting of the environment's class ends the process, with the name that was probably meant.
- Atropos' main loop sleeps longer than it must. Here it sleeps less: see `MainLoopClock`.
- Atropos ends groups that are being sampled if it counts too many. Here they go on: see
  `keep_running_groups`.
- Atropos compresses what it sends, which takes longer than to send it: see `send_quickly`.
- Atropos reads each log-probability of a vLLM server from a dictionary of its own. Here it asks for
  lists: see `environment_sampling.py`.
- Atropos opens a connection for each request. Here they are kept: see `environment_connections.py`.
- What a method returns is checked (`environment_contract.py`), and the log's last line says why the
  process ends (`environment_words.py`), also if the script only came to its end.

A run starts the entries of `environments` that have a `path` by this file. It runs in the
environment's Python, as `sitecustomize.py`, whose folder is this one. Standard library and what
Atropos itself imports only.
"""

import asyncio
import difflib
import functools
import gc
import json
import os
import runpy
import sys
import types

import environment_stacks
import environment_stage
from environment_contract import check_groups, collect_one, hold
from environment_site_metrics import plain_number, record_metrics
from environment_words import explain_exit, say

# Fields of what `collect_trajectory` returns that Atropos does not copy into the group.
CARRIED = ("inference_logprobs", "distill_token_ids", "distill_logprobs")
# Fields that Atropos copies from the rollouts that have them, and what the other rollouts get.
FILLED = {"advantages": list, "messages": list, "overrides": dict}

FIRST_SLEEP = 1.5  # seconds
USUAL_SLEEP = 0.1  # seconds, Atropos' own between two looks at the API
QUICK_SLEEP = 0.02  # seconds
QUICK_LOOKS = 4  # after the last group was sent


_has_begun = False  # the environment's main loop


class Refused(SystemExit):
    """Ends the process, with a text for the person who started the run."""

    def __init__(self, text):
        super().__init__(1)
        say(text)


class MainLoopClock:
    """Stands in for the module `asyncio` in Atropos' `BaseEnv.env_manager`, which uses nothing of
    it but `sleep`.

    Before its first look at the API, the loop sleeps 5 seconds, so that other environments can
    start: these look every second whether the trainer is there, and `FIRST_SLEEP` is enough. After
    the last group of a batch was sent, a trainer that was waiting takes the batch at once. So the
    first `QUICK_LOOKS` looks of an environment without work follow each other quickly.
    """

    def __init__(self, env):
        self._env = env
        self._idle_looks = 0

    async def sleep(self, delay):
        if delay > USUAL_SLEEP:
            await asyncio.sleep(min(delay, FIRST_SLEEP))
            return
        self._idle_looks += 1
        if self._env.workers:
            self._idle_looks = 0
        if 0 < self._idle_looks <= QUICK_LOOKS:
            delay = QUICK_SLEEP
        await asyncio.sleep(delay)


def ask_for_numbers():
    """Makes Atropos' client of a vLLM server read lists: see `environment_sampling.py`."""
    from environment_sampling import read_lists  # imports what Atropos imports, if it is there

    read_lists()


def keep_connections(base):
    """Makes `base`, Atropos' `BaseEnv`, keep connections: see `environment_connections.py`."""
    import environment_connections  # imports what Atropos imports, if it is there

    environment_connections.keep_connections(base)


def shorten_sleeps(base):
    """Gives the main loop of `base`, Atropos' `BaseEnv`, and nothing else, a `MainLoopClock` as its
    `asyncio`."""
    loop = base.env_manager

    async def env_manager(self):
        global _has_begun
        _has_begun = True
        names = {**loop.__globals__, "asyncio": MainLoopClock(self)}
        await types.FunctionType(loop.__code__, names)(self)

    base.env_manager = env_manager


class _KeptItems(dict):
    """The `running_items` of an environment. Atropos asks for their `keys()` in one place only: to
    end the first of them."""

    def keys(self):
        return ()


def keep_running_groups(base):
    """Makes `base`, Atropos' `BaseEnv`, begin no more groups than before, but end none.

    Atropos counts the groups in the API's queue and those that are being sampled. If there are more
    than `max_batches_offpolicy` batches, it ends the oldest that are being sampled, and samples
    their problems anew. But a group is counted twice from when it reaches the API until the reply
    has come. So each group that ends may cost another one, whose rollouts are nearly complete.
    """
    add = base.add_train_workers

    @functools.wraps(add)
    async def add_train_workers(self):
        if not isinstance(self.running_items, _KeptItems):
            self.running_items = _KeptItems(self.running_items)
        await add(self)

    base.add_train_workers = add_train_workers


class _Recorder:
    """Stands in for an environment in `BaseEnv.collect_trajectories`. `items` keeps what each call
    of `collect_trajectory` returned, in the order of the calls."""

    def __init__(self, env):
        self._env = env
        self.items = []

    def __getattr__(self, name):
        return getattr(self._env, name)

    def collect_trajectory(self, item):
        place = len(self.items)
        self.items.append(None)
        return self._keep(place, item)

    async def _keep(self, place, item):
        result = await collect_one(self._env, item)
        self.items[place] = result[0]
        return result


def carry_fields(base):
    """Makes `base`, Atropos' `BaseEnv`, carry over the fields that every rollout of a group has,
    and keep others in the order of the rollouts."""
    collect = base.collect_trajectories

    @functools.wraps(collect)
    async def collect_trajectories(self, item):
        recorder = _Recorder(self)
        group, backlog = await collect(recorder, item)
        for field in CARRIED:
            values = [rollout.get(field) for rollout in recorder.items]
            if values and all(value is not None for value in values):
                group[field] = values
        for field, make_empty in FILLED.items():
            values = [rollout.get(field) for rollout in recorder.items]
            if any(value is not None for value in values):
                group[field] = [make_empty() if value is None else value for value in values]
        return group, backlog

    base.collect_trajectories = collect_trajectories


def send_plain_rewards(base):
    """Makes `base`, Atropos' `BaseEnv`, send groups to the API with plain rewards."""
    send = base._send_scored_data_to_api

    async def _send_scored_data_to_api(self, scored_data):
        groups = scored_data if isinstance(scored_data, list) else [scored_data]
        for group in groups:
            make_rewards_plain(group)
        await send(self, scored_data)

    base._send_scored_data_to_api = _send_scored_data_to_api


def send_quickly(base):
    """Makes `base`, Atropos' `BaseEnv`, send a group to the API as it is, with its numbers encoded
    by pydantic's core. To compress it takes 8 microseconds a token, and Python's encoder takes 1,
    in which the environment does nothing else: 1.2 seconds for a batch of 131,072 tokens, for which
    the trainer waits."""
    post = base._post_json_with_compression

    @functools.wraps(post)
    def _post_json_with_compression(self, session, url, payload, *, minimum_size=float("inf")):
        if type(payload) is not dict:
            return post(self, session, url, payload, minimum_size=minimum_size)
        headers = {"Content-Type": "application/json"}
        return session.post(url, data=encoded(payload), headers=headers)

    base._post_json_with_compression = _post_json_with_compression


def encoded(group):
    """Returns the JSON of a group, as Atropos makes it. Pydantic's core encodes lists of numbers
    alone: it would also take what Atropos refuses, such as a set."""
    from pydantic_core import to_json  # which Atropos imports, if it is there

    fields = []
    others = {}
    for name, value in group.items():
        if type(name) is str and _is_rows_of_numbers(value):
            numbers = to_json(value, inf_nan_mode="constants")
            fields.append(json.dumps(name).encode() + b": " + numbers)
        else:
            others[name] = value
    if others:
        fields.append(json.dumps(others).encode()[1:-1])
    return b"{" + b", ".join(fields) + b"}"


def _is_rows_of_numbers(value):
    if type(value) is not list:
        return False
    return all(type(row) is list and set(map(type, row)) <= {int, float} for row in value)


def make_rewards_plain(group):
    """Replaces the parts of a group's rewards by numbers that JSON has, or by texts, which the run
    drops and counts: `{"format": numpy.float32(1), "length": nan}` becomes
    `{"format": 1.0, "length": "nan"}`."""
    overrides = group.get("overrides")
    if not isinstance(overrides, list):
        overrides = []
    for each in [group.get("group_overrides"), *overrides]:
        if isinstance(each, dict) and "rewards" in each:
            each["rewards"] = _plain_rewards(each["rewards"])


def _plain_rewards(rewards):
    if not isinstance(rewards, dict):
        return plain_number(rewards)
    return {str(name): plain_number(value) for name, value in rewards.items()}


def check_sent_groups(base):
    """Makes `base` look at each group before it is sent."""
    send = base.handle_send_to_api

    @functools.wraps(send)
    async def handle_send_to_api(self, scored_data, *args, **kwargs):
        check_groups(self, scored_data)
        return await send(self, scored_data, *args, **kwargs)

    base.handle_send_to_api = handle_send_to_api


def check_environment(base):
    """Makes `base.cli` check the environment's class first: what its methods return, and that it
    has the settings that the recipe states. The process ends at the first that it has not."""
    cli = base.cli.__func__

    def checked_cli(cls):
        hold(cls, base)
        fields = type(cls.config_init()[0]).model_fields
        for name in stated_names(sys.argv):
            if name not in fields:
                raise Refused(
                    f"{cls.__name__} has no setting `{name}` (under `config:` in the "
                    f"recipe). {_suggestion(name, fields)}"
                )
        return cli(cls)

    base.cli = classmethod(checked_cli)


def _suggestion(name, fields):
    close = difflib.get_close_matches(name, fields, n=1)
    if close:
        return f"Did you mean `{close[0]}`?"
    return f"It has: {', '.join(sorted(fields))}."


def stated_names(argv):
    """Returns the names under `stated` in the file that `--config` names."""
    import yaml

    if "--config" not in argv[:-1]:
        return []
    path = argv[argv.index("--config") + 1]
    with open(path) as file:
        return yaml.safe_load(file).get("stated", [])


def import_base():
    """Returns Atropos' `BaseEnv`. Ends the process if its Python has no Atropos."""
    gc.disable()  # a seventh of what these imports take, which leave little garbage
    try:
        from atroposlib.envs.base import BaseEnv
    except ModuleNotFoundError as error:
        if error.name != "atroposlib":
            raise
        text = (
            f"{sys.executable} has no atroposlib. Install it there, or name another Python "
            "as `python` of the environment's entry"
        )
        raise Refused(text) from None
    gc.enable()
    return BaseEnv


def run_script(script, base):
    """Runs a script as if it were started itself. The last line of the log says why it has ended,
    if that was not by an exception."""
    script = os.path.abspath(script)
    sys.argv[:] = [script, *sys.argv[2:]]
    sys.path[0] = os.path.dirname(script)
    if __name__ in sys.modules and __name__ != "__main__":
        del sys.modules[__name__]  # the author may have a `run.py`
    try:
        names = runpy.run_path(script, run_name="__main__")
    except Refused:
        raise
    except SystemExit as end:
        explain_exit(end)
        raise
    if not _has_begun:
        raise Refused(_useless(script, names, base))


def _useless(script, names, base):
    """Returns what is wrong with a script that came to its end and has started nothing. `names` are
    its globals."""
    text = f"{script} came to its end and started no environment"
    for name, value in names.items():
        is_class = isinstance(value, type) and issubclass(value, base) and value is not base
        if is_class and value.__module__ == "__main__":
            return f"{text}: write `{name}.cli()` as its last line"
    return f"{text}: it has no class that descends from Atropos' `BaseEnv`"


def main():
    begin()
    base = import_base()
    ask_for_numbers()
    shorten_sleeps(base)
    keep_running_groups(base)
    carry_fields(base)
    send_plain_rewards(base)
    send_quickly(base)
    keep_connections(base)
    record_metrics(base)
    check_sent_groups(base)
    check_environment(base)
    run_script(sys.argv[1], base)


def begin():
    """Makes this process answer where its code stands, and be known as one that has just begun."""
    environment_stacks.install()
    environment_stage.begin()


if __name__ == "__main__":
    main()
