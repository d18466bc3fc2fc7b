"""Columns of training rows as tensors and JSON texts, with their digests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.errors import ColumnError
from rl_distributed.transfer.manifest import digest_of, dtype_name

__all__ = ["describe", "joined_columns", "split_columns"]


def split_columns(
    rows: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of rows, and their lists as JSON texts.

    Raises:
        ColumnError: A list holds values that JSON cannot hold.
    """
    tensors, lists = {}, {}
    for name, value in rows.items():
        if isinstance(value, Tensor):
            tensors[name] = value
            continue
        try:
            text = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ColumnError(
                f"column {name!r} of the training rows cannot be recorded, because it "
                f"is a list of values that are not JSON ({error}): train on rows "
                "without it, or set record_training=false"
            ) from error
        if json.loads(text) != value:
            raise ColumnError(
                f"column {name!r} of the training rows cannot be recorded, because its "
                "values would come back from JSON as others (such as tuples, or "
                "numbers as keys): train on rows without it, or set "
                "record_training=false"
            )
        lists[name] = text
    return tensors, lists


def joined_columns(
    tensors: Mapping[str, Tensor], lists: Mapping[str, str]
) -> dict[str, Any]:
    """Undo `split_columns`."""
    return {**tensors, **{name: json.loads(text) for name, text in lists.items()}}


def describe(
    tensors: Mapping[str, Tensor], lists: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return data type, shape and digest of each column."""
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        found[name] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "digest": digest_of(flat),
        }
    for name, text in lists.items():
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        found[name] = {"dtype": "list", "shape": [], "digest": digest_of(data)}
    return found
