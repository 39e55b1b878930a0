"""Every Python runs this first where the folder is in its `PYTHONPATH`: vLLM then forks its engine,
environments find no torch, and imports are not looked through for garbage.

By default vLLM spawns the engine, which imports all of vLLM again; and Transformers, of which an
environment needs a tokenizer only, takes twice as long to import with torch.
"""

import gc
import os
import socket
import sys
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
# A quarter of what vLLM's imports take is for garbage that there is not.
gc.set_threshold(100_000, 50, 50)

is_environment = any("/environment_site/" in word for word in sys.orig_argv)
loads_data = any("recipes/gsm8k/" in word for word in sys.orig_argv)  # by `datasets`, with torch
if is_environment and not loads_data:
    sys.modules["torch"] = None
