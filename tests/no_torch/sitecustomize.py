"""Every Python runs this first if the folder is in its `PYTHONPATH`: Transformers then finds no torch.

For environments that make their rollouts up, and need a tokenizer only.
"""

import sys

sys.modules["torch"] = None
