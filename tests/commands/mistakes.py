"""The mistakes that people make in an environment's code, and what is said of each.

A row has what an author wrote in place of a good method, and what a message has to hold: the cause,
the place in the author's file, and what to do. `test_mistakes.py` runs the real process of each
environment, with a real Atropos API, and reads what a run or `trl-atropos try` would say.
Mistakes in a recipe are in `tests/recipe/mistakes.py`.
"""

import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.check.desk import Desk

# A good environment, method by method. A mistake replaces some of them.
PARTS = {
    "imports": "import os, sys\nfrom atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig",
    "class": "class Mine(BaseEnv):",
    "config_init": """
    @classmethod
    def config_init(cls):
        return BaseEnvConfig(group_size=2), APIServerConfig()""",
    "setup": """
    async def setup(self):
        self.count = 0""",
    "get_next_item": """
    async def get_next_item(self):
        self.count += 1
        return {"number": self.count}""",
    "collect": """
    async def collect_trajectories(self, item):
        tokens = [[7, 8, 9], [7, 8, 10]]
        masks = [[-100, 8, 9], [-100, 8, 10]]
        scores = [self.score(item, 0), self.score(item, 1)]
        logprobs = [[1.0, -0.5, -0.5], [1.0, -0.5, -0.5]]
        group = {"tokens": tokens, "masks": masks, "scores": scores}
        return group | {"inference_logprobs": logprobs}, []""",
    "score": """
    def score(self, item, index):
        return float(index)""",
    "evaluate": """
    async def evaluate(self, *args, **kwargs):
        pass""",
    "end": "\n\nif __name__ == '__main__':\n    Mine.cli()\n",
}


@dataclass(frozen=True)
class Mistake:
    """
    A mistake of an environment's author.

    Attributes:
        parts: What stands in place of parts of the good environment. The wrong line has `# HERE`.
        cause: What the message says has happened, as a regular expression.
        place: Function that the message names behind file and line; the line is that of `# HERE`.
            Empty if the message names no line of the environment.
        fix: What the message says to do, as a regular expression.
        config: Settings of the environment.
    """

    parts: dict[str, str]
    cause: str
    place: str
    fix: str = ""
    config: tuple[tuple[str, object], ...] = ()

    def source(self) -> str:
        """Returns the environment's script."""
        return "\n".join((PARTS | self.parts).values())


def line_of(source: str) -> int:
    """Returns the number of the line that is wrong."""
    lines = source.splitlines()
    return next(number for number, line in enumerate(lines, start=1) if "# HERE" in line)


def method(name: str, line: str, arguments: str = "self", kind: str = "async def") -> str:
    """Returns a method of one line, which is the wrong one."""
    return f"\n    {kind} {name}({arguments}):\n        {line}  # HERE"


def result(name: str, line: str, arguments: str = "self", kind: str = "async def") -> str:
    """Returns a method whose result is wrong. The message names where it begins."""
    return f"\n    {kind} {name}({arguments}):  # HERE\n        {line}"


# What ends the process: the run ends at once, with this.
FATAL = {
    "a module that is not installed": Mistake(
        {"imports": "import torchvisio  # HERE\nfrom atroposlib.envs.base import *"},
        "ModuleNotFoundError: No module named 'torchvisio'",
        "<module>",
    ),
    "a line that is no Python": Mistake(
        {"setup": "\n    async def setup(self)  # HERE\n        pass"},
        "SyntaxError: expected ':'",
        "<module>",
    ),
    "a script without `.cli()`": Mistake(
        {"end": "\n"},
        "came to its end and started no environment: write `Mine.cli\\(\\)` as its last line",
        "",
    ),
    "a script without an environment": Mistake(
        dict.fromkeys(PARTS, "") | {"imports": "print('hello')"},
        "it has no class that descends from Atropos' `BaseEnv`",
        "",
    ),
    "a method that is missing": Mistake(
        {"evaluate": "", "end": "\nMine.cli()  # HERE"},
        "TypeError: Can't instantiate abstract class Mine with abstract method.* evaluate",
        "<module>",
    ),
    "`config_init` without `@classmethod`": Mistake(
        {"config_init": result("config_init", "return None", "cls", "def")},
        "`config_init` is no class method: write `@classmethod` above it",
        "config_init",
    ),
    "`config_init` that returns nothing": Mistake(
        {
            "config_init": result("config_init", "BaseEnvConfig()", "cls", "def").replace(
                "    def", "    @classmethod  # HERE\n    def"
            )
        },
        "`config_init` returned None, and Atropos needs a pair: the environment's config",
        "config_init",
    ),
    "an exception in `config_init`": Mistake(
        {
            "config_init": "\n    @classmethod\n    def config_init(cls):\n"
            "        return {}['config']  # HERE"
        },
        "KeyError: 'config'",
        "config_init",
    ),
    "a setting of the wrong type": Mistake(
        {"end": "\nMine.cli()  # HERE"},
        "ValidationError: 1 validation error for BaseEnvConfig group_size Input should be a valid",
        "<module>",
        config=(("group_size", "many"),),
    ),
    "a file that is not there, in `setup`": Mistake(
        {"setup": method("setup", "open('/no/such/data.jsonl')")},
        r"FileNotFoundError: \[Errno 2\] No such file or directory: '/no/such/data.jsonl'",
        "setup",
    ),
    "a setup that is not async": Mistake(
        {"setup": result("setup", "self.count = 0", kind="def")},
        "`setup` returned None, which cannot be awaited: write `async def setup`",
        "setup",
    ),
    "a bare assertion in `setup`": Mistake(
        {"setup": method("setup", "assert self.config.group_size > 2")},
        "AssertionError",
        "setup",
    ),
    "an exception of one megabyte": Mistake(
        {"setup": method("setup", "raise ValueError('x' * 2**20)")},
        "ValueError: x{200}",
        "setup",
    ),
    "output of one megabyte without a newline": Mistake(
        {"setup": method("setup", "print('x' * 2**20, end='', flush=True); {}['data']")},
        "KeyError: 'data'",
        "setup",
    ),
    "`sys.exit` with a text": Mistake(
        {"setup": method("setup", "sys.exit('no GPU of mine')")},
        r"its code called sys.exit\(no GPU of mine\)",
        "setup",
    ),
    "`sys.exit` with 0": Mistake(
        {"setup": method("setup", "sys.exit(0)")},
        r"its code called sys.exit\(0\)",
        "setup",
    ),
    "an exit that nothing can catch": Mistake(
        {"setup": method("setup", "os._exit(0)")},
        "ended with exit code 0 while the run needs it",
        "",
        "look for a place where its code ends the process, such as `os._exit`",
    ),
    "a crash of the interpreter": Mistake(
        {"setup": method("setup", "os.kill(os.getpid(), 11)")},
        r"exit code 139 \(SIGSEGV\)",
        "setup",
    ),
    "an exception that is no `Exception`": Mistake(
        {
            "imports": PARTS["imports"] + "\nclass Stop(BaseException): pass",
            "setup": method("setup", "raise Stop('enough')"),
        },
        "Stop: enough",
        "setup",
    ),
    "no more problems, by an exception": Mistake(
        {"get_next_item": method("get_next_item", "raise IndexError('no problem left')")},
        "IndexError: no problem left",
        "get_next_item",
    ),
    "a problem that is not async": Mistake(
        {"get_next_item": result("get_next_item", "return {'number': 1}", kind="def")},
        "`get_next_item` returned {'number': 1}, which cannot be awaited: write `async def",
        "get_next_item",
    ),
    "groups larger than a batch": Mistake(
        {"end": "\nMine.cli()  # HERE"},
        r"ValueError: group_size \(64\) must be less than batch_size \(8\)",
        "<module>",
        config=(("group_size", 64),),
    ),
}

COLLECT = "collect_trajectories"
# What an environment survives: a run warns of it, and ends after 32 groups; `try` shows it.
SURVIVED = {
    "nothing returned for a group": Mistake(
        {"collect": result(COLLECT, "pass", "self, item")},
        "`collect_trajectories` returned None, and Atropos needs a pair",
        COLLECT,
    ),
    "a group without the list behind it": Mistake(
        {"collect": result(COLLECT, "return {'tokens': []}", "self, item")},
        "`collect_trajectories` returned {'tokens': ..}, and Atropos needs a pair",
        COLLECT,
    ),
    "no list behind a group": Mistake(
        {"collect": result(COLLECT, "return None, None", "self, item")},
        r"`collect_trajectories` returned \(None, None\), and Atropos needs a pair",
        COLLECT,
    ),
    "a group that is a text": Mistake(
        {"collect": result(COLLECT, "return 'answer', []", "self, item")},
        "`collect_trajectories` returned 'answer' in place of a dictionary",
        COLLECT,
    ),
    "a group without masks": Mistake(
        {
            "collect": result(
                COLLECT, "return {'tokens': [[7], [8]], 'scores': [0, 1]}, []", "self, item"
            )
        },
        "what `collect_trajectories` returned has no masks; it has: tokens, scores",
        COLLECT,
    ),
    "nothing returned for a rollout": Mistake(
        {"collect": result("collect_trajectory", "pass", "self, item")},
        "`collect_trajectory` returned None, and Atropos needs a pair: the rollout, a dictionary",
        "collect_trajectory",
    ),
    "a rollout without scores": Mistake(
        {
            "collect": result(
                "collect_trajectory", "return {'tokens': [7], 'masks': [7]}, []", "self, item"
            )
        },
        "what `collect_trajectory` returned has no scores; it has: tokens, masks",
        "collect_trajectory",
    ),
    "a rollout that is not async": Mistake(
        {"collect": result("collect_trajectory", "return {}, []", "self, item", "def")},
        r"`collect_trajectory` returned \({}, \[\]\), which cannot be awaited: write `async def",
        "collect_trajectory",
    ),
    "a group scored to nothing": Mistake(
        {
            "score": PARTS["score"]
            + result("postprocess_histories", "return {'answers': 3}", "self, groups")
        },
        "what `postprocess_histories` returned has no tokens, masks, scores; it has: answers",
        "postprocess_histories",
    ),
    "a key that a problem does not have": Mistake(
        {"score": method("score", "return item['weight']", "self, item, index", "def")},
        "KeyError: 'weight'",
        "score",
    ),
}

# What no method sees: an exception that Atropos does not catch, or in a task of the author's own.
LOST = {
    "an exception of a group that is no `Exception`": Mistake(
        {
            "imports": PARTS["imports"] + "\nclass Stop(BaseException): pass",
            "score": method("score", "raise Stop('enough')", "self, item, index", "def"),
        },
        "it lost a task, which nobody awaited, to an exception; the last error was Stop: enough",
        "score",
    ),
    "an exception in a task that nobody awaits": Mistake(
        {
            "imports": PARTS["imports"] + "\nimport asyncio, gc",
            "setup": PARTS["setup"]
            + "\n        asyncio.create_task(self.look())\n        await asyncio.sleep(.1)\n        gc.collect()"
            + method("look", "raise OSError('no such board')"),
        },
        "it lost a task, which nobody awaited, to an exception; the last error was OSError: no such",
        "look",
    ),
    "nothing returned for a group of a run": Mistake(
        {"collect": result(COLLECT, "pass", "self, item")},
        "it failed to collect a group; the last error was WrongReturn: `collect_trajectories` "
        "returned None, and Atropos needs a pair",
        COLLECT,
    ),
    "a group without masks in a run": Mistake(
        {
            "collect": result(
                COLLECT, "return {'tokens': [[7], [8]], 'scores': [0, 1]}, []", "self, item"
            )
        },
        "it failed to deliver a group, because something in it is missing or wrong; the last error "
        "was WrongReturn: what `collect_trajectories` returned has no masks",
        COLLECT,
    ),
}


# ----------------------------------------------------------------------------------- the commands


@dataclass(frozen=True)
class Typed:
    """
    A command line that cannot work.

    Attributes:
        words: What is typed behind `trl-atropos`, in a folder with a good `recipe.yaml`.
        cause: What the message says has happened, as a regular expression.
        place: What it says was seen.
        fix: What it says to do.
        plant: What is there besides.
        code: The exit code.
    """

    words: str
    cause: str
    place: str
    fix: str
    plant: Callable[[Desk], Any] = Desk.recipe
    code: int = 1


def entry(**keys: Any) -> Callable[[Desk], Any]:
    """Returns what writes a recipe whose environment's entry has these keys."""

    def plant(desk: Desk) -> None:
        desk.recipe(keys)

    return plant


def setting(**settings: Any) -> Callable[[Desk], Any]:
    """Returns what writes a recipe with these settings."""

    def plant(desk: Desk) -> None:
        desk.recipe(**settings)

    return plant


def beside(name: str, content: str | None = None, **settings: Any) -> Callable[[Desk], Any]:
    """Returns what writes a recipe, and beside it a file of this content, or else a folder."""

    def plant(desk: Desk) -> None:
        desk.recipe(**settings)
        path = desk.folder / name
        if content is None:
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return plant


def on_full_disk(desk: Desk) -> None:
    """Lets no file grow above 100 bytes, as on a disk that is full."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))


def torn_optimizer(desk: Desk) -> None:
    desk.with_checkpoint("a", resume_from_checkpoint=str(desk.folder / "run" / "checkpoint-7"))
    (desk.folder / "run" / "checkpoint-7" / "optimizer.pt").write_bytes(b"PK but not to its end")


def taken_port(desk: Desk) -> None:
    """Listens where the recipe starts the Atropos API."""
    server = socket.create_server(("127.0.0.1", 0))
    desk.monkeypatch.setattr(Desk, "listening", server, raising=False)
    port = server.getsockname()[1]
    desk.recipe(start_atropos=True, atropos_url=f"http://127.0.0.1:{port}")


NAME_ONE = "name a recipe, a YAML file"
TYPED = {
    "a misspelt command": Typed(
        "trian recipe.yaml", "unknown command", "'trian'", "Did you mean `train`", code=2
    ),
    "a command like no other": Typed(
        "learn recipe.yaml", "unknown command", "'learn'", "--help` lists the commands", code=2
    ),
    "train without a recipe": Typed("train", NAME_ONE, "", "trl-atropos train --help", code=2),
    "check without a recipe": Typed("check", NAME_ONE, "", "trl-atropos check --help", code=2),
    "init without a name": Typed("init", "name a new folder", "", "init --help", code=2),
    "init in a file": Typed(
        "init recipe.yaml/mine",
        "cannot be made",
        "recipe.yaml/mine.*Not a directory",
        "Name another",
    ),
    "init on a full disk": Typed(
        "init mine", "cannot be filled", "mine.*File too large", "Make room", on_full_disk
    ),
    "a report of no run": Typed(
        "report nowhere", "no run|does not exist|no folder", "nowhere", "Name|Give"
    ),
    "a report of a file": Typed(
        "report recipe.yaml", "no run|is no folder", "recipe.yaml", "Name|Give"
    ),
    "a script for a folder that is not there": Typed(
        "slurm recipe.yaml --nodes 1 --output no/such/job.sh",
        "cannot be written",
        "No such file",
        "Name another",
    ),
    "a script on a full disk": Typed(
        "slurm recipe.yaml --nodes 1 --output /dev/full",
        "cannot be written",
        "No space left",
        "Name another",
    ),
    "a script of no recipe": Typed(
        "slurm nowhere.yaml --nodes 1",
        "does not exist",
        "'nowhere.yaml'",
        "Name the recipe's file first, as in",
    ),
    "a recipe that is a folder": Typed(
        "check mine",
        "is a folder, not a YAML file",
        "'mine'",
        "Check `--config`",
        beside("mine"),
        2,
    ),
    "a word for the processes of try": Typed(
        "try recipe.yaml --num_processes many",
        "`--num_processes` is no whole number",
        "seen: --num_processes many",
        "Say how many processes",
    ),
    "try without an environment": Typed(
        "try recipe.yaml",
        "names no environment",
        "",
        "Put its path under `environments`",
        setting(environments=None),
    ),
    "try without a server": Typed(
        "try recipe.yaml --vllm_server_base_url http://127.0.0.1:9",
        "No server answers at http://127.0.0.1:9",
        "refused",
        "Start it with `trl-atropos serve",
    ),
    "eval without evaluations": Typed(
        "eval recipe.yaml", "has no `evaluations`", "", "docs/evaluation.md shows how"
    ),
    "eval of a checkpoint that is not there": Typed(
        "eval recipe.yaml --checkpoint run/checkpoint-9",
        "There is no checkpoint",
        "run/checkpoint-9",
        "Name the folder of one",
        setting(start_vllm=True, evaluations=["environment.py"]),
    ),
    "eval of a run in place of a checkpoint": Typed(
        "eval recipe.yaml --checkpoint run",
        "holds neither a model nor an adapter",
        "'run'",
        "It has run/checkpoint-5",
        beside(
            "run/checkpoint-5/config.json", "{}", start_vllm=True, evaluations=["environment.py"]
        ),
    ),
    "groups of half a rollout": Typed(
        "check recipe.yaml",
        "'mine' has groups of 0.5 rollouts",
        "group_size: 0.5",
        "whole number that divides 8",
        entry(config={"group_size": 0.5}),
    ),
    "groups of nothing": Typed(
        "check recipe.yaml",
        "'mine' has groups of 0 rollouts",
        "group_size: 0",
        "whole number that divides 8",
        entry(config={"group_size": 0}),
    ),
    "an environment that is a folder": Typed(
        "check recipe.yaml",
        "'.' is a folder, not a script",
        "path: .",
        "such as `path: environment.py`",
        entry(path="."),
    ),
    "a Python that is a folder": Typed(
        "check recipe.yaml",
        "venv' is a folder, and no program to run",
        "venv",
        "name its Python: .*venv/bin/python",
        lambda desk: beside("venv")(desk) or entry(python="./venv")(desk),
    ),
    "a Python that may not be executed": Typed(
        "check recipe.yaml",
        "you may not execute",
        "python3",
        "chmod \\+x",
        lambda desk: beside("python3", "#!/bin/sh")(desk) or entry(python="./python3")(desk),
    ),
    "a folder of a model without its kind": Typed(
        "check recipe.yaml",
        "Unrecognized model in .*Should have a `model_type` key in its config.json",
        "model_name_or_path: .*/mine",
        "a folder with a config.json",
        beside("mine/config.json", "{}", model_name_or_path="./mine"),
    ),
    "a port that is taken": Typed(
        "check recipe.yaml",
        "is already in use",
        "port \\d+ on 127.0.0.1",
        "`atropos_url`",
        taken_port,
    ),
    "a torn state of the optimizer": Typed(
        "check recipe.yaml",
        "cannot be read .*: it was damaged",
        "optimizer.pt",
        "Resume from another checkpoint",
        torn_optimizer,
    ),
    "a word for a number on the command line": Typed(
        "check recipe.yaml --max_steps many",
        "invalid int value",
        "max_steps: many",
        "trl_atropos.train --help",
    ),
}
