"""What a type checker knows about the columns of a batch, and runtime checks."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated, NotRequired, TypedDict

import numpy as np
import pytest

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.batch.schema import ColumnSpec, Schema
from rl_distributed.errors import BatchError

PROGRAM = """
from typing import TypedDict
from rl_distributed.batch.batched_data_dict import AnyRows, BatchedDataDict

class Points(TypedDict):
    position: list[float]

class Named(Points):
    name: list[str]

def mean(rows: BatchedDataDict[Points]) -> float: ...
def passed_on(rows: AnyRows) -> None: ...

def use(points: BatchedDataDict[Points], named: BatchedDataDict[Named]) -> None:
    reveal_type(points.columns["position"])
    reveal_type(named.slice(0, 1).columns["name"])
    mean(named)
    passed_on(points)
    points.columns["name"]
    takes_names(points)

def unknown(rows: AnyRows) -> None:
    mean(rows)

def takes_names(rows: BatchedDataDict[Named]) -> None: ...
"""


def test_mypy_knows_columns_and_takes_rows_with_more_of_them(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict"),
            *("--disable-error-code", "empty-body", "--cache-dir", tmp_path, program),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    said = [line.split(": ", 1)[1] for line in done.stdout.splitlines()[:-1]]
    assert said == [
        'note: Revealed type is "list[float]"',
        'note: Revealed type is "list[str]"',
        'error: TypedDict "Points" has no key "name"  [typeddict-item]',
        'error: Argument 1 to "takes_names" has incompatible type '
        '"BatchedDataDict[Points]"; expected "BatchedDataDict[Named]"  [arg-type]',
        'error: Argument 1 to "mean" has incompatible type '
        '"BatchedDataDict[object]"; expected "BatchedDataDict[Points]"  [arg-type]',
    ], done.stdout


class Points(TypedDict):
    position: Annotated[np.ndarray, ColumnSpec(("rows", "axes"), "float")]
    label: NotRequired[Annotated[list[str], ColumnSpec(("rows",), "list")]]


POINTS = Schema.of(Points, "points")


def test_checked_rows_are_the_same_rows():
    batch = BatchedDataDict(position=np.zeros((2, 3)), other=[1, 2])
    points = POINTS.checked(batch)
    assert points is batch
    assert points.columns["position"] is batch["position"]
    with pytest.raises(BatchError, match="lacks position"):
        POINTS.checked(BatchedDataDict(other=[1]))
