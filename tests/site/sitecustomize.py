"""Every Python runs this first where the folder is in its `PYTHONPATH`: vLLM then forks its engine.

By default it spawns it, and the engine imports all of vLLM again.
"""

import os
import socket
from multiprocessing import context


class Engine(context.ForkProcess):
    """A fork, which must not keep the port of its parent."""

    def run(self):
        for name in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(name))) as inherited:
                    family = inherited.family
            except OSError:  # is no socket
                continue
            if family in (socket.AF_INET, socket.AF_INET6):  # bound, and about to be listened on
                os.close(int(name))
        super().run()


context.SpawnContext.Process = Engine
