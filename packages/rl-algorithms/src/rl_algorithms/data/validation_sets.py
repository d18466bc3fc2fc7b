"""Several held-out sets, measured one by one."""

from __future__ import annotations

from collections.abc import Mapping

from rl_algorithms.data.loader import Loader

__all__ = ["Loaders", "ValidationParts"]


class ValidationParts(dict[str, Loader]):
    """The loader of each held-out set by its name.

    A trainer's `_load_data` may return it as the validation data: `_validate` is then
    called with one loader after the other.

    Args:
        parts: What `_validate` takes, by the set's name.
        num_rows: Rows of each, by which plain metrics are averaged over the sets.
    """

    def __init__(
        self, parts: Mapping[str, Loader], num_rows: Mapping[str, int]
    ) -> None:
        super().__init__(parts)
        self.num_rows = dict(num_rows)


Loaders = tuple[Loader, Loader | ValidationParts | None]
"""What a trainer learns from, and what it is measured on, if anything."""
