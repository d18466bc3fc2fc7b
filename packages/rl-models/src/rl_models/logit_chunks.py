"""Number of positions whose logits exist at once, in training and in plans."""

from __future__ import annotations

__all__ = ["logit_chunk_size"]

# Up to this size all logits are kept: chunks cost a second product with the weight.
_KEPT_BYTES = 1024**3
# Measured with 1,024 tokens of a vocabulary of 152 k: chunks of 39, 78 and 156 MB took
# 15.7, 14.6 and 13.7 s and peaked at 618, 693 and 840 MB; all logits at once took 8.3 s
# and 1,798 MB.
_CHUNK_BYTES = 64 * 1024**2
# A GPU starts kernels for each chunk and adds a gradient of the weight's size: with
# chunks of 64 MiB that took longer than all layers of a model of 0.5 B parameters.
_GPU_CHUNK_BYTES = 1024**3


def logit_chunk_size(
    asked: int | None, num_positions: int, vocabulary: int, *, on_gpu: bool
) -> int | None:
    """Return the number of positions whose logits exist at once; None: all.

    Args:
        asked: `policy.dtensor.logprob_chunk_size`.
        num_positions: Positions of a micro-batch.
        vocabulary: Logits of a position on a rank.
        on_gpu: Whether they are computed on a GPU.
    """
    if asked is not None:
        return asked or None
    # In float32, which log-probs are computed in.
    bytes_each = 4 * vocabulary
    if num_positions * bytes_each <= _KEPT_BYTES:
        return None
    return max(1, (_GPU_CHUNK_BYTES if on_gpu else _CHUNK_BYTES) // bytes_each)
