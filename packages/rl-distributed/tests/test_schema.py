"""Required columns of a batch, declared in a `TypedDict`."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np
import pytest
import torch

from rl_distributed.batch.schema import ColumnSpec, Schema
from rl_distributed.errors import BatchError


class Points(TypedDict):
    position: Annotated[Tensor, ColumnSpec(("rows", "axes"), "float")]  # noqa: F821
    kind: Annotated[Tensor, ColumnSpec(("rows",), "int64")]  # noqa: F821
    speed: NotRequired[
        Annotated[Tensor, ColumnSpec(("rows", "axes"), "number")]  # noqa: F821
    ]
    label: NotRequired[Annotated[list[str], ColumnSpec(("rows",), "list")]]
    anything: Any


POINTS = Schema.of(Points, "points", Tensor=object)


def points(**columns: Any) -> dict[str, Any]:
    return {"position": torch.zeros(3, 2), "kind": torch.zeros(3).long(), **columns}


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"position": torch.zeros(3, 2, dtype=torch.bfloat16)},
        {"position": np.zeros((3, 2))},
        {"speed": torch.zeros(3, 2, dtype=torch.bool), "label": ["a", "b", "c"]},
        {"speed": torch.zeros(3, 2, dtype=torch.uint8)},
        {"another": "of any kind"},
    ],
)
def test_what_fits_passes(columns):
    POINTS.check(points(**columns))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"position": torch.zeros(3, 2).long()},
            r"column 'position' of the points must be \[rows, axes\] of dtype float: "
            r"got \[3, 2\] of int64; make it dtype float",
        ),
        ({"kind": torch.zeros(3).int()}, "of int32; make it dtype int64"),
        ({"kind": [0, 0, 0]}, r"got \[3\] of list; make it dtype int64"),
        ({"label": torch.zeros(3)}, "of float32; make it a list"),
        ({"position": torch.zeros(3)}, r"the shape \[3\]; give it 2 dimensions"),
        ({"kind": torch.zeros(4).long()}, "got 4 rows where 'position' has 3"),
        (
            {"speed": torch.zeros(3, 5)},
            "got 5 axes where 'position' has 2; pad or cut one of them",
        ),
        ({"label": ["a"]}, "got 1 rows where 'position' has 3"),
    ],
)
def test_what_does_not_fit_is_named(columns, message):
    with pytest.raises(BatchError, match=message):
        POINTS.check(points(**columns))


def test_missing_columns_are_named_with_what_was_meant():
    with pytest.raises(
        BatchError,
        match="lacks position, kind; it has positions; did you mean 'positions'",
    ):
        POINTS.check({"positions": torch.zeros(3, 2)})
    assert list(POINTS.required) == ["position", "kind"]
    assert list(POINTS.optional) == ["speed", "label"]
