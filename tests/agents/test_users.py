"""An agent that runs as another user reaches neither the run's token nor another session's URL.
One that runs as the run's user can reach some of it, as docs/agents.md says."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trl_atropos.agents.agent_process import run_agent

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
    import shutil
    import tempfile

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
    token, url = "token-5c1e", "session-9a7f"
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
