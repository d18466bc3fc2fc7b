"""Several held-out sets, measured one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ValidationParts"]


class ValidationParts(dict[str, Any]):
    """The loader of each held-out set by its name.

    A trainer's `_load_data` may return it as the validation data: `_validate` is then
    called with one loader after the other.

    Args:
        parts: What `_validate` takes, by name.
        num_rows: Rows of each, by which plain metrics are averaged over the sets.
    """

    def __init__(self, parts: Mapping[str, Any], num_rows: Mapping[str, int]) -> None:
        super().__init__(parts)
        self.num_rows = dict(num_rows)
