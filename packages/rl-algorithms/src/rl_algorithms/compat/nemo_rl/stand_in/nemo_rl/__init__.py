"""Stands for `nemo_rl` in processes that a program with the import map has started.

`finder.install` puts the folder of this package on PYTHONPATH, so that a Ray worker
that imports a module of the program finds the names, too. This module replaces itself
by the mapped one, or by the real package where a process has it.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

_FOLDER = str(Path(__file__).parents[1])
sys.path[:] = [path for path in sys.path if path != _FOLDER]
importlib.invalidate_caches()
del sys.modules["nemo_rl"]
if importlib.util.find_spec("nemo_rl") is None:
    importlib.import_module("rl_algorithms.compat.nemo_rl")
importlib.import_module("nemo_rl")
