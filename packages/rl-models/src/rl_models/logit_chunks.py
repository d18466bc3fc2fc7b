"""How many positions have logits at once, in the `dtensor` backend and in a plan."""

from __future__ import annotations

__all__ = ["logit_chunk_size"]

_KEPT_BYTES = 1024**3
_CHUNK_BYTES = 64 * 1024**2


def logit_chunk_size(
    asked: int | None, num_positions: int, vocabulary: int
) -> int | None:
    """Return how many positions have logits at once; None: all of them.

    Args:
        asked: `policy.dtensor.logprob_chunk_size`.
        num_positions: Positions of a micro-batch.
        vocabulary: Logits of a position on a rank.
    """
    if asked is not None:
        return asked or None
    bytes_each = 4 * vocabulary
    if num_positions * bytes_each <= _KEPT_BYTES:
        return None
    return max(1, _CHUNK_BYTES // bytes_each)
