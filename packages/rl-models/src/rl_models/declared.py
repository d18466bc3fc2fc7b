"""Optional attributes of an object of the user's, completed by defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Self

__all__ = ["Declared"]


class Declared:
    """Base of frozen dataclasses whose fields are such attributes, by their names."""

    @classmethod
    def of(cls, thing: object) -> Self:
        """Return what an object declares, completed by the defaults of the fields."""
        # Not `isinstance` of a protocol: from Python 3.12 on it does not see what a
        # wrapper passes on, so the default would be taken without an error.
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        return cls(**{n: getattr(thing, n) for n in names if hasattr(thing, n)})
