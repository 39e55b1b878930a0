"""An agent that runs as another user reaches neither the run's token nor another session's URL.
One that runs as the run's user can reach some of it, as docs/agents.md says."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trl_atropos.agents.agent_process import run_agent
from trl_atropos.services import guard as guard_script

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can name users")
# Prints which secrets it finds in variables, command lines and files of the machine's processes.
SPY = """
import json, os, pathlib, sys
found = []
for entry in pathlib.Path("/proc").iterdir():
    if not entry.name.isdigit() or int(entry.name) == os.getpid():
        continue
    for name in ("environ", "cmdline"):
        try:
            content = (entry / name).read_bytes()
        except OSError:
            continue
        found += [word for word in sys.argv[1:] if word[::-1].encode() in content]
for path in ("secret.txt",):
    try:
        found.append(open(os.path.join(os.environ["OTHER"], path)).read())
    except OSError:
        pass
pathlib.Path("mine.txt").write_text("written")
print(json.dumps([os.getuid(), sorted(set(found))]))
"""
PYTHON = os.path.realpath(sys.executable)


@pytest.fixture
def folders():
    """Two folders of episodes that other users may pass by."""
    root = Path(tempfile.mkdtemp(dir="/tmp"))
    root.chmod(0o711)
    made = []
    for number in range(2):
        folder = root / str(number)
        folder.mkdir(mode=0o700)
        os.chown(folder, 60001 + number, 60001 + number)
        made.append(folder)
    yield made
    shutil.rmtree(root)


def python_for_all() -> str | None:
    """An interpreter that every user can start."""
    for python in (PYTHON, "/usr/bin/python3"):
        command = [python, "-I", "-S", "-c", "pass"]
        try:
            subprocess.run(command, user=60001, group=60001, extra_groups=[], check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return python
    return None


@pytest.mark.parametrize("user", ["60002", None])
def test_agent_reaches_only_what_the_page_says(folders, user):
    python = python_for_all()
    if python is None:
        pytest.skip("no interpreter here is open to other users")
    token = "token-5c1e"
    url = "session-9a7f"
    (folders[0] / "secret.txt").write_text("another episode's file")
    # a process of the run, and the agent of another episode
    run = subprocess.Popen(["sleep", "60"], env={"TRL_ATROPOS_TOKEN": token})
    other = subprocess.Popen(
        ["sleep", "60"],
        env={"OPENAI_BASE_URL": url},
        **({"user": 60001, "group": 60001, "extra_groups": []} if user else {}),
    )
    try:
        # backwards: the words would be found in the command line of the spy itself
        command = [python, "-I", "-S", "-c", SPY, token[::-1], url[::-1]]
        result = asyncio.run(
            run_agent(
                command,
                env={"PATH": os.defpath, "OTHER": str(folders[0])},
                folder=str(folders[1]),
                timeout=60.0,
                max_output=10_000,
                user=user,
            )
        )
    finally:
        for process in (run, other):
            process.kill()
            process.wait()
    assert result.failure is None, result.errors
    uid, found = json.loads(result.output)
    if user is None:
        assert uid == os.geteuid()
        assert found == sorted(["another episode's file", token[::-1], url[::-1]])
    else:
        assert uid == int(user)
        assert found == []
    assert (folders[1] / "mine.txt").read_text() == "written"


def test_guard_is_closed_to_its_own_user(folders):
    """The guard of an agent, or of a server, is closed to processes of the same user who is not
    root. A foreign program below it is not: each program is open again once it is executed."""
    python = python_for_all()
    if python is None:
        pytest.skip("no interpreter here is open to other users")
    guard = Path(guard_script.__file__).read_text()
    script = folders[0] / "guard.py"  # this checkout may be closed to others
    script.write_text(guard)
    spy = (
        "import os, pathlib\n"
        "for pid in (os.getppid(), os.getpid()):\n"
        "    for name in ('environ', 'fd/0', 'maps'):\n"
        "        try:\n"
        "            path = pathlib.Path(f'/proc/{pid}/{name}')\n"
        "            path.readlink() if name == 'fd/0' else path.read_bytes()\n"
        "            print('open', end=' ')\n"
        "        except PermissionError:\n"
        "            print('closed', end=' ')\n"
    )
    options = ["--parent", str(os.getpid()), "--grace", "1"]
    result = subprocess.run(
        [python, "-I", "-S", str(script), *options, "--", python, "-I", "-S", "-c", spy],
        user=60001,
        group=60001,
        extra_groups=[],
        env={"TRL_ATROPOS_TOKEN": "secret"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.split() == ["closed"] * 3 + ["open"] * 3, result.stderr
