"""Commands of `trl-atropos` around a run: `train`, `eval`, `try`, `init`, `slurm` and `sessions`.

Each has a file. `cli.py` calls it with the words behind the command's name, which `words.py` tells
apart. The work of `try` is in `rehearsal.py`.
"""
