"""Distribution of the rows of a batch over replicas."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

__all__ = ["num_parts", "split_rows"]

# Parts per replica that works on several at a time.
_PARTS_AT_ONCE = 8


def num_parts(
    num_rows: int, num_replicas: int, rows_at_once: int | None, calls_at_once: int
) -> int:
    """Return the number of parts that a batch is cut into.

    A replica that takes one call at a time is fastest with all of its rows in one part,
    so there is one part per replica, and more only if rows would have to wait anyway:
    parts then go to whichever replica is free. One that takes several calls at a time
    gets smaller parts, so that the replicas stay equally busy to the end.

    Args:
        num_rows: Rows of the batch.
        num_replicas: Replicas that share them.
        rows_at_once: Rows that a replica decodes at a time; None: all it is given.
        calls_at_once: Calls that a replica takes at a time.
    """
    if num_replicas == 1:
        return 1
    parts = num_replicas
    if calls_at_once > 1:
        parts *= min(calls_at_once, _PARTS_AT_ONCE)
    if rows_at_once is not None:
        full = -(-num_rows // rows_at_once)
        parts = max(parts, -(-full // num_replicas) * num_replicas)
    return max(1, min(parts, num_rows))


def split_rows(
    input_ids_B_S: npt.NDArray[np.int64], num_parts: int
) -> list[tuple[int, int]]:
    """Return contiguous, nearly equal parts `[start, end)`; equal rows stay together.

    A border moves to the nearest place between two different rows, by less than half a
    part, so that a shared prompt is prefilled by one replica only. The rows of a prompt
    that fills more than a part are split.

    Args:
        input_ids_B_S: Rows; equal prompts are expected side by side.
        num_parts: Number of replicas. Parts are empty if there are fewer rows.
    """
    num_rows = len(input_ids_B_S)
    ideal = np.arange(num_parts + 1) * num_rows / num_parts
    borders = np.rint(ideal).astype(np.int64)
    if num_parts > 1 and num_rows:
        changes = (input_ids_B_S[1:] != input_ids_B_S[:-1]).any(axis=1)
        allowed = np.flatnonzero(changes) + 1
        reach = num_rows / num_parts / 2
        for part in range(1, num_parts):
            if not len(allowed):
                break
            nearest = int(allowed[np.abs(allowed - ideal[part]).argmin()])
            if abs(nearest - ideal[part]) < reach:
                borders[part] = nearest
    return [(int(a), int(b)) for a, b in itertools.pairwise(borders)]
