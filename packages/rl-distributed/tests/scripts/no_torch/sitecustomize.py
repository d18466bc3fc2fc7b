"""Blocks torch in every process that has this folder on PYTHONPATH."""

from __future__ import annotations

import sys


class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r} (refused)", name=name)


sys.meta_path.insert(0, Refusal())
