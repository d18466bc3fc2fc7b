"""Which rows of a batch go to which replica."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

__all__ = ["num_parts", "split_rows"]

# Parts per replica where it works on several at a time.
_PARTS_AT_ONCE = 8


def num_parts(
    num_rows: int, num_replicas: int, rows_at_once: int | None, calls_at_once: int
) -> int:
    """How many parts a batch is cut into.

    A replica that takes one call at a time is fastest with all of its rows in one part,
    so there is a part for each replica, and more only where rows would wait anyway: the
    parts then go to whoever is done. One that takes several at a time gets smaller
    parts, by which the replicas stay equally busy to the end.

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
    """Contiguous and nearly equal parts `[start, end)` that keep equal rows together.

    A border moves to the nearest place between two different rows, by less than half a
    part, so that a shared prompt is prefilled by one replica only. Where one prompt
    fills a whole part and more, its rows are cut.

    Args:
        input_ids_B_S: Rows; equal prompts are expected side by side.
        num_parts: Number of replicas. Parts are empty where there are fewer rows.
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
