"""Takes an Atropos environment through exactly its first N problems, by its own code and without an
Atropos API.

    python groups.py SCRIPT process|evaluate --config FILE

With `process`, N is `total_steps`, `group_size` the samples of each problem, and `max_num_workers`
problems are sampled side by side. Atropos' own `process` samples one after the other, and takes
further problems in place of those that fail: its results would be slow to come, and too good. For
each problem, one line is written to `data_path_to_save_groups`:

    {"item": 0, "groups": [...]}    what the environment would have sent to the API, empty if
                                    nothing
    {"item": 0, "error": "KeyError: 'weight'", "place": "FILE:LINE in FUNCTION", "traceback": "..."}

With `evaluate`, the environment's own `evaluate` runs. If the variable `TRL_ATROPOS_GO` names a
file, either begins once that exists. Imports and `setup`, which take long, are done before, and
then `FILE.awaited` is made.

`services/evaluations.py` and `trl-atropos try` start this file. It runs in the environment's
Python, as `sitecustomize.py`, whose folder is this one.
"""

import asyncio
import json
import os
import sys
import traceback

from environment_contract import check_groups
from environment_words import describe, place_of
from run import (
    ask_for_numbers,
    begin,
    carry_fields,
    check_environment,
    import_base,
    make_rewards_plain,
    run_script,
)

GO = os.environ.get("TRL_ATROPOS_GO")
POLL = 0.02  # seconds


async def run_evaluate(env):
    """Takes the place of `BaseEnv._run_evaluate`."""
    await env.setup()
    await wait_for_go()
    await env.evaluate()


async def process_manager(env):
    """Takes the place of `BaseEnv.process_manager`."""
    slots = asyncio.Semaphore(max(1, env.max_num_workers))

    async def solve(index, item):
        async with slots:
            write_line(output, index, await result_of(env, item))

    await env.setup()
    await wait_for_go()
    # buffering=1: a line is in the file once it is written
    with open(env.config.data_path_to_save_groups, "w", buffering=1) as output:
        tasks = []
        for index in range(env.n_groups_to_process):
            try:
                item = await env.get_next_item()
            except Exception as error:  # noqa: BLE001 - somebody else's code
                write_line(output, index, explain(error))
                break
            if item is None:
                break
            tasks.append(asyncio.create_task(solve(index, item)))
        await asyncio.gather(*tasks)


async def wait_for_go():
    """Waits until the run says that the policy to evaluate is served."""
    if not GO:
        return
    open(f"{GO}.awaited", "w").close()
    while not os.path.exists(GO):
        await asyncio.sleep(POLL)


async def result_of(env, item):
    """Returns the fields of a problem's line: `groups`, or those of an exception."""
    seconds = env.config.worker_timeout
    if seconds <= 0:
        seconds = None
    try:
        return {"groups": await asyncio.wait_for(collect_groups(env, item), seconds)}
    except Exception as error:  # noqa: BLE001 - somebody else's code
        return explain(error)


async def collect_groups(env, item):
    """Returns the groups that an environment makes of a problem, none of them empty."""
    collected, _backlog = await env.collect_trajectories(item)
    if not collected:
        return []
    groups = await env.postprocess_histories(collected)
    if not isinstance(groups, list):
        groups = [groups]
    check_groups(env, groups)
    groups = [group for group in groups if group]
    for group in groups:
        make_rewards_plain(group)
    return groups


def explain(error):
    """Returns the fields of a line for an exception."""
    link = error
    while link.__context__ is not None:
        # Atropos looks for a running event loop, and handles that there is none.
        if str(link.__context__) == "no running event loop":
            link.__context__ = None
        else:
            link = link.__context__
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"error": describe(error), "place": place_of(error), "traceback": text}


def write_line(output, index, fields):
    # default=float: numbers may be numpy's
    output.write(json.dumps({"item": index, **fields}, default=float) + "\n")


def main():
    begin()
    base = import_base()
    ask_for_numbers()
    carry_fields(base)
    check_environment(base)
    base.process_manager = process_manager
    base._run_evaluate = run_evaluate
    run_script(sys.argv[1], base)


if __name__ == "__main__":
    main()
