"""The token budget of micro-batches: its settings, and what fits into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from rl_distributed.errors import BatchError, PackingError
from rl_distributed.suggestion import did_you_mean

__all__ = [
    "DynamicBatchingArgs",
    "SequencePackingArgs",
    "check_args",
    "check_budget",
    "check_shortest",
    "greedy_cuts",
    "padded_widths",
    "round_up",
]

Rows: TypeAlias = NDArray[np.int64]


class DynamicBatchingArgs(TypedDict):
    """Micro-batches of rows of similar length, up to a number of padded tokens."""

    max_tokens_per_microbatch: int
    """The most tokens of a micro-batch: its rows times its padded length."""
    sequence_length_round: int
    """A padded length is rounded up to a multiple of this, at most to the width."""
    input_key: str
    """The column whose width is the longest possible padded length."""
    input_lengths_key: str
    """The column of the rows' lengths."""


class SequencePackingArgs(TypedDict):
    """Micro-batches of rows that are meant to be laid end to end in one sequence."""

    max_tokens_per_microbatch: int
    """The most tokens of a packed sequence."""
    input_key: str
    """The column that will be packed."""
    input_lengths_key: str
    """The column of the rows' lengths."""
    algorithm: str
    """A `PackingAlgorithm` by name."""
    microbatch_order: NotRequired[Literal["packer", "largest_first"]]
    """The order of a rank's micro-batches: as packed (default), or largest first."""
    sequence_length_pad_multiple: int
    """Each length counts as rounded up to a multiple of this."""


def round_up(lengths: Rows, multiple: int) -> Rows:
    """Round lengths up to a multiple."""
    rounded: Rows = -(-lengths // multiple) * multiple
    return rounded


def padded_widths(lengths: Rows, width: int, multiple: int) -> Rows:
    """Return the widths that rows are padded to: at least one token."""
    # Empty rows count as one token, or any number of them would fit.
    return np.minimum(round_up(np.maximum(lengths, 1), multiple), width)


def greedy_cuts(sizes: list[int], budget: int) -> list[tuple[int, int]]:
    """Cut non-decreasing `sizes` so that count times largest stays within `budget`."""
    bounds: list[tuple[int, int]] = []
    start = 0
    for place, size in enumerate(sizes):
        if (place - start + 1) * size > budget:
            bounds.append((start, place))
            start = place
    if sizes:
        bounds.append((start, len(sizes)))
    return bounds


def check_budget(
    lengths: Rows, padded: Rows, budget: int, column: str, shortest: int = 0
) -> None:
    """Check that each row fits into a micro-batch of its own.

    Args:
        lengths: Tokens of each row.
        padded: The same with padding, which is what counts.
        budget: Tokens of a micro-batch.
        column: Where the lengths come from, for the message.
        shortest: Least length of a row.

    Raises:
        PackingError: A row is too long or too short.
    """
    if lengths.size == 0:
        return
    check_shortest(lengths, column, shortest)
    row = int(padded.argmax())
    if padded[row] > budget:
        raise PackingError(
            f"row {row} has {lengths[row]} tokens ({padded[row]} with padding), but "
            f"max_tokens_per_microbatch is {budget}; raise it or shorten the row"
        )


def check_shortest(lengths: Rows, column: str, shortest: int) -> None:
    """Raise `PackingError` if a row is shorter than this."""
    row = int(lengths.argmin()) if lengths.size else 0
    if lengths.size and lengths[row] < shortest:
        rule = "positive" if shortest else "at least 0"
        raise PackingError(f"{column} must be {rule}: row {row} has {lengths[row]}")


def check_args(args: Mapping[str, Any], kind: Any) -> None:
    """Check the settings of a budget.

    Args:
        args: The settings.
        kind: `DynamicBatchingArgs` or `SequencePackingArgs`.

    Raises:
        BatchError: A key is unknown, missing, or no positive number.
    """
    name, known = kind.__name__, list(kind.__annotations__)
    unknown = [key for key in args if key not in known]
    if unknown:
        raise BatchError(
            f"{name} has no key {unknown[0]!r}{did_you_mean(unknown[0], known)}"
        )
    missing = sorted(set(known) - set(args) - {"microbatch_order"})
    if missing:
        raise BatchError(f"{name} needs {', '.join(missing)}")
    for key in known:
        value = args.get(key)
        counts = key.startswith(("max_tokens", "sequence_length"))
        if counts and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise BatchError(f"{name}: {key} must be a positive integer: got {value!r}")
