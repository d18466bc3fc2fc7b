"""First-fit packing: each sequence goes into the first bin that has room for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["first_fit"]


def first_fit(
    lengths: NDArray[np.int64], order: Sequence[int], capacity: int
) -> list[list[int]]:
    """Put each sequence, in `order`, into the first bin with room.

    A tree holds the largest room below each node; bins that are not open yet have all
    their room, so "open a new bin" is no special case. Equal neighbours in `order` go
    into a bin together.
    """
    count = len(order)
    if count == 0:
        return []
    ordered = lengths[np.asarray(order)]
    # No two sequences above half a bin share one, so a prefix of them needs no search.
    not_large = np.flatnonzero(ordered * 2 <= capacity)
    start = int(not_large[0]) if not_large.size else count
    bins: list[list[int]] = [[index] for index in order[:start]]
    size = 1 << (count - 1).bit_length()
    tree = _tree_of_maxima(capacity - ordered[:start], capacity, size)
    values: list[int] = ordered.tolist()
    while start < count:
        length = values[start]
        node = 1
        while node < size:
            node *= 2
            if tree[node] < length:
                node += 1
        room = tree[node]
        end = start + 1
        room -= length
        while end < count and values[end] == length and room >= length:
            room -= length
            end += 1
        place = node - size
        if place == len(bins):
            bins.append([])
        bins[place].extend(order[start:end])
        start = end
        _lower(tree, node, room)
    return bins


def _tree_of_maxima(room: NDArray[np.int64], capacity: int, size: int) -> list[int]:
    """Lay out a binary heap: node n is the maximum of 2n and 2n + 1, leaves last."""
    # A power of two, so that every level halves. Unopened bins have all their room.
    level = np.full(size, capacity, dtype=np.int64)
    level[: room.size] = room
    levels = [level]
    while level.size > 1:
        level = level.reshape(-1, 2).max(axis=1)
        levels.append(level)
    tree: list[int] = np.concatenate([[capacity], *reversed(levels)]).tolist()
    return tree


def _lower(tree: list[int], node: int, room: int) -> None:
    """Set a leaf to `room` and update the maxima above it."""
    tree[node] = room
    while node > 1:
        sibling = tree[node ^ 1]
        node //= 2
        largest = room if room > sibling else sibling
        # The maxima above this node do not change.
        if tree[node] == largest:
            return
        tree[node] = room = largest
