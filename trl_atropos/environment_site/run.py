"""Runs the script of an Atropos environment, with what Atropos leaves out.

    python run.py SCRIPT serve --config FILE

- Atropos' own `collect_trajectories`, which makes a group of what `collect_trajectory` returns,
  drops some fields. The sampled tokens' log-probabilities are one of them, without which nobody
  knows what sampled a rollout. Here they stay.
- Atropos drops settings that an environment does not have. Here, a name under `stated` in FILE that
  is no setting of the environment's class ends the process, with the name that was probably meant.

Runs in the environment's Python, as `sitecustomize.py`, whose folder is this one. Standard library
and what Atropos itself imports only.
"""

import difflib
import os
import runpy
import sys

# Of what `collect_trajectory` returns, what Atropos does not copy into the group.
CARRIED = ("inference_logprobs", "distill_token_ids", "distill_logprobs")


class _Recorded:
    """An environment as `BaseEnv.collect_trajectories` uses it, which keeps what each call of
    `collect_trajectory` returned, in the order of the calls."""

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
        result = await self._env.collect_trajectory(item)
        self.items[place] = result[0]
        return result


def carry_fields(base):
    """Has `base`, Atropos' `BaseEnv`, carry over the fields that every rollout of a group has."""
    collect = base.collect_trajectories

    async def collect_trajectories(self, item):
        recorded = _Recorded(self)
        group, backlog = await collect(recorded, item)
        for field in CARRIED:
            values = [rollout.get(field) for rollout in recorded.items]
            if values and all(value is not None for value in values):
                group[field] = values
        return group, backlog

    base.collect_trajectories = collect_trajectories


def refuse_unknown_settings(base):
    """Has `base.cli` compare the settings that a person stated with the fields of the environment's
    class."""
    cli = base.cli.__func__

    def checked(cls):
        fields = type(cls.config_init()[0]).model_fields
        for name in stated_names(sys.argv):
            if name not in fields:
                close = difflib.get_close_matches(name, fields, n=1)
                hint = (
                    f"Did you mean `{close[0]}`?"
                    if close
                    else f"It has: {', '.join(sorted(fields))}."
                )
                sys.exit(
                    f"error: {cls.__name__} has no setting `{name}` (under `config:` in the "
                    f"recipe). {hint}"
                )
        return cli(cls)

    base.cli = classmethod(checked)


def stated_names(argv):
    """Returns the names under `stated` in the file that `--config` names."""
    import yaml

    if "--config" not in argv[:-1]:
        return []
    with open(argv[argv.index("--config") + 1]) as file:
        return yaml.safe_load(file).get("stated", [])


def run_script(script):
    """Runs a script as if it were started itself."""
    script = os.path.abspath(script)
    sys.argv[:] = [script, *sys.argv[2:]]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


def main():
    from atroposlib.envs.base import BaseEnv

    carry_fields(BaseEnv)
    refuse_unknown_settings(BaseEnv)
    run_script(sys.argv[1])


if __name__ == "__main__":
    main()
