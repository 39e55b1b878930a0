"""Every Python runs this first if the folder is in its `PYTHONPATH`: Transformers then finds no torch.

For environments that make their rollouts up, and need a tokenizer only.
"""

import gc
import sys

gc.set_threshold(100_000, 50, 50)  # as in `tests/site`
sys.modules["torch"] = None
