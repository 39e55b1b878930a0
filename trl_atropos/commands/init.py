"""Runs `trl-atropos init`: writes an environment and recipes to change into a new folder."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from trl_atropos.activity import activity
from trl_atropos.commands.words import command_parser, require_words
from trl_atropos.terminal import fitted

RECIPES = Path(__file__).parents[1] / "recipes"  # a link in a checkout, files in a wheel
NAME = re.compile(r"[\w./-]+")  # of a new folder: it becomes a part of recipes and of commands
INIT = """\
Writes the folder NAME with an environment to change, two recipes that train on
it, a tiny model for the one without a GPU, the script of that, and a README.
The environment works as it stands: the tiny model learns its task in minutes."""
README = """\
Run every command from the folder that contains `{name}`:

```bash
{commands}
```

The environment asks to continue a row of letters, such as `cccccccc`, and a
tiny random model learns that without a GPU.

1. Change `environment.py` at its marks (1) to (4), then `try` it again. `try`
   shows the rollouts of one group, or your code's traceback.
2. `trl-atropos check {name}/cpu.yaml` finds what is wrong with a recipe.
3. `cpu.yaml` trains the model in `model`, which `make_model.py` has made. It
   cannot read: to see it learn, give its first answers partial credit.
4. With a GPU, `colocate.yaml` trains a real model on the same environment.
"""


def init(words: list[str]) -> None:
    """Writes the template of an environment into a new folder."""
    parser = command_parser("init", "NAME", INIT)
    parser.add_argument("folder", metavar="NAME", help="a folder that does not exist")
    require_words(parser, words, "a new folder")
    options = parser.parse_args(words)
    folder = Path(options.folder)
    name = options.folder.rstrip("/")
    if not NAME.fullmatch(name) or folder.name in ("", ".."):
        message = f"trl-atropos init: {name!r} is no name for a folder here."
        sys.exit(fitted(f"{message} Use letters, digits and any of - _ . /"))
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        message = f"trl-atropos init: the folder {name} cannot be made ({error.strerror})."
        sys.exit(fitted(f"{message} Name another one."))
    try:
        _write_template(folder, name)
    except OSError as error:
        shutil.rmtree(folder)
        message = f"trl-atropos init: the folder {name} cannot be filled ({error.strerror}), and is"
        sys.exit(fitted(f"{message} removed again. Make room, or name a folder on another disk."))
    command = [sys.executable, folder / "make_model.py", folder / "model"]
    with activity("Making a tiny model"):
        process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        message = f"trl-atropos init: the model could not be made:\n{process.stderr}"
        sys.exit(fitted(message))
    content = ", ".join(sorted(os.listdir(folder)))
    lines = [f"Wrote {name}/: {content}.", "Next:"]
    for step in _first_commands(name):
        lines.append(f"  {step}")
    lines.append(f"What to change then: {name}/README.md")
    message = "\n".join(lines)
    sys.stdout.write(fitted(f"{message}\n", sys.stdout))


def _write_template(folder: Path, name: str) -> None:
    """Writes the files of the template. Raises `OSError` if the disk does not take them."""
    template = RECIPES / "own_environment"
    files = [template / "environment.py", *template.glob("*.yaml")]
    files.append(RECIPES / "quickstart" / "make_model.py")
    for path in files:
        text = _renamed(path.read_text(encoding="utf-8"), name)
        (folder / path.name).write_text(text, encoding="utf-8")
    commands = "\n".join(_first_commands(name))
    readme = README.format(name=name, commands=commands)
    (folder / "README.md").write_text(readme, encoding="utf-8")


def _first_commands(name: str) -> list[str]:
    """Returns the commands to type after `init`, each with what it does as the shell's comment."""
    commands = {
        f"trl-atropos try {name}/cpu.yaml": "see one group",
        f"trl-atropos train {name}/cpu.yaml": "two minutes",
        f"trl-atropos report runs/{Path(name).name}-cpu": "its page",
    }
    longest = max(map(len, commands))
    return [f"{command:{longest}}  # {text}" for command, text in commands.items()]


def _renamed(text: str, name: str) -> str:
    """Returns the text of a file of the template, with the names that its files have in the new
    folder."""
    text = re.sub(
        r"(?s)accelerate launch .*?-m trl_atropos\.train --config (\S+)",
        r"trl-atropos train \1",
        text,
    )
    names = {
        "recipes/quickstart/make_model.py": f"{name}/make_model.py",
        "runs/quickstart/model": f"{name}/model",
        "recipes/own_environment": name,
        "runs/own-environment": f"runs/{Path(name).name}",
    }
    for old, new in names.items():
        text = text.replace(old, new)
    return text
