"""`Schema`: the columns that a batch must have, with their shapes and dtypes.

Columns are declared once, in a `TypedDict`, so that a type checker and the check at run
time read the same line:

    class Points(TypedDict):
        position: Annotated[Tensor, ColumnSpec(("rows", "axes"), "float")]
        label: NotRequired[Annotated[list[str], ColumnSpec(("rows",), "list")]]

    POINTS = Schema.of(Points, "points", Tensor=object)
    points = POINTS.checked(batch)  # BatchedDataDict[Points]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NotRequired,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from rl_distributed.errors import BatchError
from rl_distributed.suggestion import did_you_mean

if TYPE_CHECKING:
    from rl_distributed.batch.batched_data_dict import AnyRows, BatchedDataDict

__all__ = ["ColumnSpec", "Schema"]

SpecT = TypeVar("SpecT", covariant=True)

_KINDS = {
    "integer": ("int", "uint"),
    "float": ("float", "bfloat"),
    "number": ("int", "uint", "float", "bfloat", "bool"),
}


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """Shape and dtype of a column."""

    dims: tuple[str, ...]
    """Names of its dimensions, `rows` first. Columns of a batch that name the same
    dimension have the same size there."""
    dtype: str
    """`list`, the name of a dtype, such as `int64`, or `integer`, `float` or `number`,
    which is any of the two or bool."""

    def takes(self, dtype: str) -> bool:
        """Whether numbers of a dtype may stand in this column."""
        # No dtype begins with a dash.
        return dtype == self.dtype or dtype.startswith(_KINDS.get(self.dtype, "-"))

    def __str__(self) -> str:
        return f"[{', '.join(self.dims)}] of dtype {self.dtype}"


@dataclass(frozen=True, slots=True)
class Schema(Generic[SpecT]):
    """The columns that a batch must have; it may have others besides."""

    title: str
    """Name of the rows in messages."""
    required: Mapping[str, ColumnSpec]
    optional: Mapping[str, ColumnSpec]

    @classmethod
    def of(cls, spec: type[SpecT], title: str, **names: Any) -> Schema[SpecT]:
        """Read the columns that a `TypedDict` declares.

        Args:
            spec: Its fields are `Annotated[..., ColumnSpec(...)]`; fields without a
                `ColumnSpec` are not checked.
            title: Name of the rows in messages.
            names: Stand-ins for names that its module imports for type checkers only.
        """
        required: dict[str, ColumnSpec] = {}
        optional: dict[str, ColumnSpec] = {}
        hints = get_type_hints(spec, localns=names, include_extras=True)
        for name, hint in hints.items():
            columns = required
            if get_origin(hint) is NotRequired:
                columns, (hint,) = optional, get_args(hint)
            for note in getattr(hint, "__metadata__", ()):
                if isinstance(note, ColumnSpec):
                    columns[name] = note
        return cls(title, required, optional)

    def check(self, batch: Mapping[str, Any]) -> None:
        """Compare names, dtypes and shapes; the numbers themselves are not read.

        Raises:
            BatchError: A column is missing, or has another dtype or shape.
        """
        missing = [name for name in self.required if name not in batch]
        if missing:
            hint = did_you_mean(missing[0], [key for key in batch if key not in self])
            raise BatchError(
                f"the batch lacks {', '.join(missing)}; it has "
                f"{', '.join(map(str, batch))}{hint}"
            )
        # The column that first set each dimension's size, for the message.
        sizes: dict[str, tuple[int, str]] = {}
        for specs in (self.required, self.optional):
            for name, spec in specs.items():
                if name in batch:
                    self._check_column(name, spec, batch[name], sizes)

    def checked(self, batch: AnyRows) -> BatchedDataDict[SpecT]:
        """Return the batch itself, as rows whose columns are now known.

        Raises:
            BatchError: See `check`.
        """
        self.check(batch)
        return cast("BatchedDataDict[SpecT]", batch)

    def __contains__(self, name: object) -> bool:
        return name in self.required or name in self.optional

    def _check_column(
        self,
        name: str,
        spec: ColumnSpec,
        column: Any,
        sizes: dict[str, tuple[int, str]],
    ) -> None:
        if isinstance(column, list):
            shape: tuple[int, ...] = (len(column),)
            dtype = "list"
        else:
            shape = tuple(column.shape)
            dtype = str(column.dtype).removeprefix("torch.")
        if not spec.takes(dtype):
            remedy = "a list" if spec.dtype == "list" else f"dtype {spec.dtype}"
            raise self._error(
                name, spec, f"{list(shape)} of {dtype}", f"make it {remedy}"
            )
        if len(shape) != len(spec.dims):
            remedy = f"give it {len(spec.dims)} dimensions"
            raise self._error(name, spec, f"the shape {list(shape)}", remedy)
        for dim, size in zip(spec.dims, shape, strict=True):
            first_size, first_name = sizes.setdefault(dim, (size, name))
            if size != first_size:
                raise self._error(
                    name,
                    spec,
                    f"{size} {dim} where {first_name!r} has {first_size}",
                    f"pad or cut one of them to the same number of {dim}",
                )

    def _error(self, name: str, spec: ColumnSpec, got: str, remedy: str) -> BatchError:
        return BatchError(
            f"column {name!r} of the {self.title} must be {spec}: got {got}; {remedy}"
        )
