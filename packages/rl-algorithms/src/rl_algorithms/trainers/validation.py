"""What a validation finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ValidationResult"]


@dataclass(frozen=True)
class ValidationResult:
    """Metrics of the held-out data, and some answers to look at."""

    metrics: Mapping[str, Any]
    """Numbers by name, without the prefix `val:`."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Records with `prompt`, `response` and `reward`, where answers were sampled."""
