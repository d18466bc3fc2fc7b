"""Several validation sets, measured one by one."""

from __future__ import annotations

from collections.abc import Mapping

from rl_algorithms.data.loader import Loader

__all__ = ["Loaders", "ValidationParts"]


class ValidationParts(dict[str, Loader]):
    """The loaders of the validation sets by name.

    A trainer's `_load_data` may return it as the validation data; `_validate` is then
    called once per loader.

    Args:
        parts: Arguments of `_validate` by the name of the set.
        num_rows: Number of rows of each set, the weights of averages over the sets.
    """

    def __init__(
        self, parts: Mapping[str, Loader], num_rows: Mapping[str, int]
    ) -> None:
        super().__init__(parts)
        self.num_rows = dict(num_rows)


Loaders = tuple[Loader, Loader | ValidationParts | None]
"""Training data and, if any, validation data of a trainer."""
