"""The longest sequence of a model, by its config; needs no model code."""

from __future__ import annotations

from typing import Any

__all__ = ["CONTEXT_KEYS", "context_length"]

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Names of a model's longest sequence in its config; the first one found counts."""


def context_length(config: Any) -> int | None:
    """Return the longest sequence of a model's config, None if it has none."""
    for section in (config, config.get_text_config()):
        for name in CONTEXT_KEYS:
            value = getattr(section, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None
