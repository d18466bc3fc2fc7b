"""Which rows of a batch go to which replica."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

__all__ = ["split_rows"]


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
