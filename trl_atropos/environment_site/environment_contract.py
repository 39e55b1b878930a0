"""Checks what an environment's methods return, and names the author's line if it is wrong.

Atropos unpacks and awaits what these methods return in lines of its own. So the traceback of a
`return None` ends in Atropos' code, and nothing in it is the author's. Here the error is raised
with the line of the method instead:

    WrongReturn: `collect_trajectories` returned None, and Atropos needs a pair: the group (or
    None), and a list of further problems

`run.py` and `groups.py` call `hold` as the environment's `.cli()` is called. Standard library only.
"""

import functools
import inspect

LONGEST = 60  # characters of a returned value that are quoted
REQUIRED = ("tokens", "masks", "scores")  # of a rollout, and of a group
# Methods that Atropos awaits, whatever they return.
AWAITED = ("setup", "get_next_item", "postprocess_histories", "evaluate", "wandb_log")
PAIR = "Atropos needs a pair: {}, and a list of further problems"


class WrongReturn(TypeError):
    """A method of an environment returned what Atropos cannot take. `environment_place` is where
    the method begins, as `FILE:LINE in FUNCTION`."""

    def __init__(self, text, method):
        super().__init__(text)
        self.environment_place = _place_of_method(method)


def hold(cls, base):
    """Checks the methods that `cls` has in place of those of `base`, Atropos' `BaseEnv`, from now
    on. Raises `WrongReturn` for its `config_init` at once."""
    _check_config(cls)
    for name in AWAITED:
        _wrap(cls, base, name, _accept)
    _wrap(cls, base, "collect_trajectories", _check_collected)


def check_groups(env, groups):
    """Raises `WrongReturn` if a group lacks what every group has. Atropos sends `groups`, a group
    or a list of them, each of which may be `None` or empty."""
    if not isinstance(groups, list):
        groups = [groups]
    for group in groups:
        if group:  # an empty one is dropped
            _check_fields(group, _maker_of_groups(env))


async def collect_one(env, item):
    """Returns what the environment's `collect_trajectory` returns, after a look at it."""
    method = env.collect_trajectory
    result = await _awaited(method, method(item))
    _check_pair(method, result, "the rollout, a dictionary")
    _check_fields(result[0], method)
    return result


def _check_config(cls):
    method = cls.config_init
    if not inspect.ismethod(method):
        text = "`config_init` is no class method: write `@classmethod` above it"
        raise WrongReturn(text, method)
    result = method()
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not hasattr(type(result[0]), "model_fields"):
        need = "Atropos needs a pair: the environment's config, and the server's config or configs"
        raise WrongReturn(f"`config_init` returned {_brief(result)}, and {need}", method)


def _wrap(cls, base, name, check):
    """Puts a method in the place of the author's that calls it and checks its result."""
    method = getattr(cls, name)
    if method is getattr(base, name) or not inspect.isfunction(method):
        return

    @functools.wraps(method)
    async def checked(self, *args, **kwargs):
        result = await _awaited(method, method(self, *args, **kwargs))
        check(method, result)
        return result

    setattr(cls, name, checked)


async def _awaited(method, call):
    """Awaits the call of a method."""
    if not inspect.isawaitable(call):
        text = f"`{method.__name__}` returned {_brief(call)}, which cannot be awaited: write "
        raise WrongReturn(f"{text}`async def {method.__name__}`", method)
    return await call


def _accept(_method, _result):
    """Accepts every result."""


def _check_collected(method, result):
    _check_pair(method, result, "the group (or None)")


def _check_pair(method, result, first):
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    if not is_pair or not hasattr(result[1], "__len__"):
        need = PAIR.format(first)
        raise WrongReturn(f"`{method.__name__}` returned {_brief(result)}, and {need}", method)


def _check_fields(content, method):
    """Raises `WrongReturn` unless a rollout or group is a dictionary with the fields of all."""
    if not isinstance(content, dict):
        text = f"`{method.__name__}` returned {_brief(content)} in place of a dictionary"
        raise WrongReturn(text, method)
    missing = [name for name in REQUIRED if name not in content]
    if missing:
        text = f"what `{method.__name__}` returned has no {', '.join(missing)}"
        raise WrongReturn(f"{text}; it has: {', '.join(map(str, content))}", method)


def _maker_of_groups(env):
    """Returns the method that made the groups of an environment: the last one that is its
    author's."""
    for name in ("postprocess_histories", "collect_trajectories"):
        if not _is_of_atropos(env, name):
            return getattr(env, name)
    return env.collect_trajectory


def _is_of_atropos(env, name):
    """Returns whether an environment has a method from Atropos itself."""
    owner = next(cls for cls in type(env).__mro__ if name in vars(cls))
    return owner.__module__.startswith("atroposlib.")


def _place_of_method(method):
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None:  # any object can be called
        return repr(method)
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def _brief(value):
    """Returns a value as a few characters."""
    text = repr(value)
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}... ({type(value).__name__})"
    return text
