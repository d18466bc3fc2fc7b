"""Drop, truncate or reject rows that have too many tokens; never silently."""

from __future__ import annotations

from collections.abc import Sequence

from rl_algorithms.data.config import DataConfig
from rl_algorithms.data.dataset import ProcessedDataset
from rl_algorithms.data.types import DatumSpec
from rl_algorithms.errors import EmptyDatasetError, PromptTooLongError
from rl_distributed.logs.logging import get_logger

__all__ = ["apply_length_limit"]

_logger = get_logger(__name__)


def apply_length_limit(
    rows: Sequence[DatumSpec],
    *,
    max_length: int | None,
    config: DataConfig,
    name: str,
    noun: str,
) -> ProcessedDataset:
    """Apply `config.on_overlong` to rows longer than `max_length` tokens.

    Args:
        rows: Processed rows.
        max_length: Limit in tokens; None: no limit.
        config: Holds `on_overlong`.
        name: Name of the dataset in messages.
        noun: Noun for a row: `prompt` or `demonstration`.

    Raises:
        PromptTooLongError: There are such rows, and `on_overlong` is `error`.
        EmptyDatasetError: No row is left.
    """
    over = [
        row for row in rows if max_length is not None and row["length"] > max_length
    ]
    if not over or max_length is None:
        return ProcessedDataset(rows, name=name, max_length=max_length)
    longest = max(over, key=lambda row: row["length"])
    finding = (
        f"{len(over)} of {len(rows)} {noun}s of dataset {name} are longer than "
        f"{max_length} tokens (the longest: row {longest['idx']} with "
        f"{longest['length']})"
    )
    if config.on_overlong == "error" or (
        config.on_overlong == "truncate" and noun == "prompt"
    ):
        cannot = (
            "; a prompt cannot be truncated" if config.on_overlong == "truncate" else ""
        )
        raise PromptTooLongError(
            f"{finding}{cannot}: leave them out with data.on_overlong=drop, raise "
            "data.max_input_seq_length or policy.max_total_sequence_length, or shorten "
            "them"
        )
    if config.on_overlong == "truncate":
        kept = [_truncate(row, max_length) for row in rows]
        if not any(row["loss_multiplier"] for row in kept):
            raise EmptyDatasetError(
                f"{finding}: nothing to learn is left in any of them once they are "
                "cut; raise data.max_input_seq_length or "
                "policy.max_total_sequence_length"
            )
        _logger.warning("%s; they are cut at their end", finding)
    else:
        kept = [row for row in rows if row["length"] <= max_length]
        _logger.warning("%s; they are left out", finding)
    if not kept:
        raise EmptyDatasetError(f"{finding}: none is left to train on; raise the limit")
    return ProcessedDataset(
        kept,
        name=name,
        num_source_rows=len(rows),
        num_overlong=len(over),
        max_length=max_length,
    )


def _truncate(row: DatumSpec, max_length: int) -> DatumSpec:
    if row["length"] <= max_length:
        return row
    cut = row.copy()
    cut["token_ids"] = row["token_ids"][:max_length]
    cut["token_mask"] = row["token_mask"][:max_length]
    cut["length"] = max_length
    # Without a token to train on, the row must not count as a sequence in the loss. The
    # first one has nothing before it to be predicted from.
    if not bool(cut["token_mask"][1:].any()):
        cut["loss_multiplier"] = 0.0
    return cut
