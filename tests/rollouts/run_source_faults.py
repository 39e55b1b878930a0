"""python -m tests.rollouts.run_source_faults [--faults 2000] [--seed 0] [--trainer]: see
`source_faults.py`.

With `--trainer`, they befall the whole trainer: see `tests/trainer/trainer_faults.py`.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainer", action="store_true")
    arguments = parser.parse_args()

    from tests.rollouts.source_faults import run_faults

    options = {}
    if arguments.trainer:
        from tests.trainer import trainer_faults

        options = {"of": trainer_faults.Run, "kinds": trainer_faults.KINDS}

    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="source-faults-"))
    counts = run_faults(folder, arguments.faults, arguments.seed, **options)
    shutil.rmtree(folder)
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
    seconds = time.monotonic() - began
    print(
        f"{counts.total()} faults in {seconds:.0f} s, seed {arguments.seed}, and the books "
        f"balance: {kinds}"
    )


if __name__ == "__main__":
    main()
