"""Takes an Atropos environment through exactly its first N problems, by its own code and without an
Atropos API.

    python groups.py SCRIPT process|evaluate --config FILE

With `process`, N is `total_steps`, `group_size` the samples of each problem, and `max_num_workers`
problems are asked side by side. Atropos' own `process` asks one after the other, and takes further
problems in place of those that fail: what it finds would be slow to come, and too good. Of each
problem, one line is written to `data_path_to_save_groups`:

    {"item": 0, "groups": [...]}    what the environment would have sent to the API, empty if
    nothing {"item": 0, "error": "KeyError: 'weight'", "place": "FILE:LINE in FUNCTION",
    "traceback": "..."}

With `evaluate`, the environment's own `evaluate` runs. If the variable `TRL_ATROPOS_GO` names a
file, either begins once that exists. Before, imports and `setup` are done, which take long, and
`FILE.awaited` is made.

Runs in the environment's Python, as `sitecustomize.py`, whose folder is this one.
"""

import asyncio
import json
import os
import sys
import traceback

from run import carry_fields, refuse_unknown_settings, run_script
from sitecustomize import describe, place_of

GO = os.environ.get("TRL_ATROPOS_GO")


async def ask(env, item):
    """The groups that come of a problem."""
    collected, _ = await env.collect_trajectories(item)
    groups = await env.postprocess_histories(collected) if collected else None
    return [group for group in (groups if isinstance(groups, list) else [groups]) if group]


def explain(error):
    """What is written of an exception."""
    link = error
    while link.__context__ is not None:
        # Atropos asks for one, and handles that there is none
        if str(link.__context__) == "no running event loop":
            link.__context__ = None
        else:
            link = link.__context__
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"error": describe(error), "place": place_of(error), "traceback": text}


async def told():
    """Waits until the run says that the policy to evaluate is served."""
    if GO:
        open(f"{GO}.awaited", "w").close()
    while GO and not os.path.exists(GO):
        await asyncio.sleep(0.02)


async def run_evaluate(env):
    """Takes the place of `BaseEnv._run_evaluate`."""
    await env.setup()
    await told()
    await env.evaluate()


async def process_manager(env):
    """Takes the place of `BaseEnv.process_manager`."""
    limit = asyncio.Semaphore(max(1, env.max_num_workers))
    seconds = env.config.worker_timeout

    async def take(index, item):
        async with limit:
            try:
                found = {
                    "groups": await asyncio.wait_for(
                        ask(env, item), seconds if seconds > 0 else None
                    )
                }
            except Exception as error:  # noqa: BLE001 - somebody else's code
                found = explain(error)
            # numbers may be numpy's
            output.write(json.dumps({"item": index, **found}, default=float) + "\n")

    await env.setup()
    await told()
    # each line is there once it is known
    with open(env.config.data_path_to_save_groups, "w", buffering=1) as output:
        tasks = []
        for index in range(env.n_groups_to_process):
            try:
                item = await env.get_next_item()
            except Exception as error:  # noqa: BLE001 - the same
                output.write(json.dumps({"item": index, **explain(error)}) + "\n")
                break
            if item is None:
                break
            tasks.append(asyncio.create_task(take(index, item)))
        await asyncio.gather(*tasks)


def main():
    from atroposlib.envs.base import BaseEnv

    carry_fields(BaseEnv)
    refuse_unknown_settings(BaseEnv)
    BaseEnv.process_manager = process_manager
    BaseEnv._run_evaluate = run_evaluate
    run_script(sys.argv[1])


if __name__ == "__main__":
    main()
