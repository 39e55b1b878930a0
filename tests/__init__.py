"""The tests, in rooms as in the package."""

import email
import importlib.metadata
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # of the repository

# A package's metadata is read and parsed as an e-mail each time that somebody asks whether it is
# installed. accelerate asks for many packages whenever a trainer is made, which took a sixth of the
# time of short trainings.
email.message_from_string = cache(email.message_from_string)
importlib.metadata.metadata = cache(importlib.metadata.metadata)
