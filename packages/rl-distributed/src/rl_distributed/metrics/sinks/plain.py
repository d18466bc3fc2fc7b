"""Values in the few forms that files and services take."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["flattened", "grouped", "plain_tree", "valid_text"]

_GROUP = re.compile(r"(\w+):(?=.)")


def grouped(name: str) -> str:
    """Return a name as services have it that group by slashes: `train/loss`."""
    return _GROUP.sub(r"\1/", name, count=1) if _GROUP.match(name) else name


def valid_text(text: str) -> str:
    """Return a text that is valid UTF-8: lone surrogates are written out."""
    return text.encode("utf-8", errors="backslashreplace").decode()


def plain_tree(value: Any) -> Any:
    """Make a tree JSON: non-finite numbers become the text that `float` reads."""
    if isinstance(value, float):
        # JSON has no such numbers, and strict readers reject Python's spelling.
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, Mapping):
        return {valid_text(str(key)): plain_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_tree(item) for item in value]
    if value is None or isinstance(value, int):
        return value
    if callable(getattr(value, "tolist", None)):
        return plain_tree(value.tolist())
    return valid_text(str(value))


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the leaves of a tree as texts, by their dotted paths."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = valid_text(f"{prefix}.{key}" if prefix else str(key))
        if isinstance(value, Mapping):
            flat.update(flattened(value, name))
        else:
            flat[name] = valid_text(str(value))
    return flat
