"""Takes the rights from root that root has over other processes and files. The kernel then treats
it like any other user, to whom the files of root belong.

    python -m tests.unprivileged COMMAND ...

runs a command so. A test process that needs its rights later forks before it gives them up.
"""

import ctypes
import os
import sys

PR_CAPBSET_DROP = 24
CAPABILITY_VERSION = 0x20080522
CAPABILITIES = 41  # that Linux has


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def give_up_rights() -> None:
    """Gives up all capabilities of this thread, and those that root would get by executing a
    program. Does nothing for other users, who have none."""
    if os.geteuid() != 0:
        return
    library = ctypes.CDLL(None, use_errno=True)
    for capability in range(CAPABILITIES):
        library.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = _Header(CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if library.capset(ctypes.byref(header), ctypes.byref(nothing)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    give_up_rights()
    os.execvp(sys.argv[1], sys.argv[1:])
