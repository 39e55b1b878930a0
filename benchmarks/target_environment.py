"""The arithmetic environment of `trl-atropos bench target`: the recipe's own, which also notes when
it asks its first problem, because the clock of a run starts there."""

import os
import sys
import time
from pathlib import Path

# A recipe's folder is no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes/arithmetic"))

from environment import ArithmeticEnv

FIRST_REQUEST = "BENCH_TARGET_FIRST_REQUEST"  # variable: the file that gets the time


class TimedArithmeticEnv(ArithmeticEnv):
    async def get_next_item(self):
        note = Path(os.environ[FIRST_REQUEST])
        if not note.exists():
            note.write_text(repr(time.time()))
        return await super().get_next_item()


if __name__ == "__main__":
    TimedArithmeticEnv.cli()
