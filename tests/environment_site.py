"""The modules of `trl_atropos/environment_site/`, imported as in an environment's process: by their
own names, as that folder is on its path."""

import importlib
import sys
from types import ModuleType

from trl_atropos.environment_entry import SITE


def site_module(name: str) -> ModuleType:
    sys.path.insert(0, SITE)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(SITE)
