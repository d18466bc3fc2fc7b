"""`load_dataset_any`: rows from whatever a user has.

| given | read as |
|---|---|
| a list or any iterable | rows: mappings, dataclass objects, named tuples or text |
| a mapping of lists | columns |
| a data frame, a Hugging Face dataset | rows |
| `*.jsonl`, `*.json`, `*.parquet`, `*.csv` | one file |
| a folder | what `save_to_disk` wrote, or data files, by split |
| another name | a dataset on the hub |

Text rows become `{"text": ...}`.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from rl_algorithms.data.config import DatasetConfig
from rl_algorithms.data.types import Row, Rows
from rl_algorithms.errors import (
    ColumnError,
    DataError,
    DatasetNotFoundError,
    EmptyDatasetError,
)
from rl_envs.registry import create_task_source

__all__ = ["describe_source", "load_configured", "load_dataset_any"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MAX_ROWS = 50_000_000


def load_dataset_any(
    source: Any, *, split: str | None = None, subset: str | None = None
) -> Rows:
    """Load rows.

    Args:
        source: See the table of the module.
        split: Part of a folder or hub dataset; default `train` where there is one.
        subset: Configuration of a hub dataset.

    Raises:
        DatasetNotFoundError: There is no such file, folder or hub dataset.
        DataError: A file or row cannot be read; the message says which.
        EmptyDatasetError: There are no rows.
    """
    name = describe_source(source)
    rows = (
        _from_path(str(source), split, subset)
        if isinstance(source, str | Path)
        else _from_object(source, split, name)
    )
    if len(rows) == 0:
        raise EmptyDatasetError(
            f"dataset {name} is empty: it has no rows; give at least one"
        )
    return rows


def load_configured(config: DatasetConfig) -> tuple[Rows, str]:
    """Load what a configuration names: a path, or the tasks of a world.

    Returns:
        The rows, and what to call them in messages.

    Raises:
        DataError: As `load_dataset_any`.
        RegistryError: The world is unknown.
    """
    if config.path is not None:
        rows = load_dataset_any(config.path, split=config.split, subset=config.subset)
        return rows, describe_source(config.path)
    assert config.tasks is not None  # the class checks that one of both is given
    tasks = config.tasks
    source = create_task_source(tasks.world, {"seed": tasks.seed, **tasks.settings})
    parts = {
        "train": source.train,
        "held_out": source.held_out,
        "demonstrations": source.demonstrations,
    }
    return parts[tasks.part](tasks.num_rows), f"tasks of {tasks.world!r} ({tasks.part})"


def describe_source(source: Any) -> str:
    """Return what to call a source in messages."""
    if isinstance(source, str | Path):
        return repr(str(source))
    return f"(a {type(source).__name__})"


def _from_object(source: Any, split: str | None, name: str) -> Rows:
    if hasattr(source, "column_names") and hasattr(source, "__getitem__"):
        if isinstance(source, Mapping):
            return _pick_split(source, split, name)
        if hasattr(source, "__len__"):
            return source  # type: ignore[no-any-return]  # datasets.Dataset
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        return list(source.to_dict("records"))
    if isinstance(source, Mapping):
        return _from_columns(source, name)
    if not isinstance(source, Iterable):
        raise DataError(
            f"a dataset must be a list or iterable of rows, a file, a folder or a hub "
            f"name: got {type(source).__name__}"
        )
    rows = list(islice(source, _MAX_ROWS + 1))
    if len(rows) > _MAX_ROWS:
        raise DataError(
            f"dataset {name} gave more than {_MAX_ROWS} rows: an endless iterable "
            "cannot be shuffled or resumed; cut it with itertools.islice"
        )
    return [_as_row(row, index, name) for index, row in enumerate(rows)]


def _from_columns(columns: Mapping[str, Any], name: str) -> Rows:
    for key, values in columns.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ColumnError(
                f"dataset {name}: column {key!r} must be a list, one value per row: "
                f"got {type(values).__name__}; for a single row give [row]"
            )
    lengths = {key: len(values) for key, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ColumnError(f"dataset {name}: columns differ in length: {lengths}")
    names = list(columns)
    return [
        dict(zip(names, row, strict=True))
        for row in zip(*columns.values(), strict=True)
    ]


def _as_row(row: Any, index: int, name: str) -> Row:
    if isinstance(row, dict):
        return row
    if isinstance(row, Mapping):
        return dict(row)
    if isinstance(row, str):
        return {"text": row}
    if hasattr(row, "to_row"):
        return dict(row.to_row())
    if hasattr(row, "_asdict"):
        return _with_metadata(row._asdict())
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        fields = (field.name for field in dataclasses.fields(row))
        return _with_metadata({field: getattr(row, field) for field in fields})
    raise ColumnError(
        f"dataset {name}: row {index} must be a mapping of columns or a text: got "
        f"{type(row).__name__}"
    )


def _with_metadata(row: dict[str, Any]) -> dict[str, Any]:
    """Spread the `metadata` of a task over columns, which rewards can ask for."""
    metadata = row.get("metadata")
    return {**metadata, **row} if isinstance(metadata, Mapping) else row


def _from_path(path: str, split: str | None, subset: str | None) -> Rows:
    place = Path(path).expanduser()
    if place.is_file():
        return _from_file(place)
    if place.is_dir():
        return _from_folder(place, split)
    if place.suffix in _READERS or not _HUB_NAME.fullmatch(path):
        raise DatasetNotFoundError(
            f"dataset {path!r} does not exist: there is no such file or folder "
            f"(looked in {Path.cwd()}); correct the path"
        )
    return _from_hub(path, split, subset)


def _from_file(path: Path) -> Rows:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"dataset {str(path)!r} has the unknown ending {path.suffix!r}: use one of "
            f"{', '.join(_READERS)}"
        )
    try:
        return reader(path)
    except UnicodeDecodeError as error:
        raise DataError(f"dataset {str(path)!r} is not UTF-8 text: {error}") from error


def _read_jsonl(path: Path) -> Rows:
    rows: list[Row] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"dataset {str(path)!r}, line {number}: not valid JSON: {error}"
                ) from error
            if not isinstance(value, dict):
                raise DataError(
                    f"dataset {str(path)!r}, line {number}: must be a JSON object with "
                    f"one key per column: got {type(value).__name__}"
                )
            rows.append(value)
    return rows


def _read_json(path: Path) -> Rows:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(
            f"dataset {str(path)!r} is not valid JSON: {error}; a file with one object "
            "per line must end in .jsonl"
        ) from error
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    name = repr(str(path))
    if isinstance(value, dict):
        return _from_columns(value, name)
    if not isinstance(value, list):
        raise DataError(
            f"dataset {name} must be a JSON list of objects: got {type(value).__name__}"
        )
    return [_as_row(row, index, name) for index, row in enumerate(value)]


def _read_csv(path: Path) -> Rows:
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            rows = list(reader)
        except csv.Error as error:
            raise DataError(
                f"dataset {str(path)!r}, line {reader.line_num}: {error}"
            ) from error
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise DataError(
                f"dataset {str(path)!r}, line {number}: has another number of fields "
                f"than the header ({', '.join(reader.fieldnames or [])})"
            )
    return rows


def _read_parquet(path: Path) -> Rows:
    # pyarrow takes long to import, and only this needs it.
    parquet = import_module("pyarrow.parquet")
    try:
        return parquet.read_table(path).to_pylist()  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise DataError(
            f"dataset {str(path)!r} is not a readable parquet file: {error}"
        ) from error


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}


def _from_folder(path: Path, split: str | None) -> Rows:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        # The datasets library takes a second to import, and only this needs it.
        loaded = import_module("datasets").load_from_disk(str(path))
        if isinstance(loaded, Mapping):
            return _pick_split(loaded, split, repr(str(path)))
        return loaded  # type: ignore[no-any-return]
    files = sorted(
        file
        for file in [*path.iterdir(), *path.glob("data/*")]
        if file.is_file() and file.suffix.lower() in _READERS
    )
    if not files:
        raise DatasetNotFoundError(
            f"dataset folder {str(path)!r} holds no data: expected what "
            f"Dataset.save_to_disk writes, or files ending in {', '.join(_READERS)}"
        )
    chosen = [file for file in files if file.stem.startswith(split or "train")]
    if not chosen and split is not None:
        raise DatasetNotFoundError(
            f"dataset folder {str(path)!r} has no file of split {split!r}: it holds "
            f"{', '.join(file.name for file in files)}"
        )
    return [row for file in chosen or files for row in _from_file(file)]


def _pick_split(splits: Mapping[str, Any], split: str | None, name: str) -> Rows:
    wanted = split if split is not None else "train"
    if wanted in splits:
        return splits[wanted]  # type: ignore[no-any-return]
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    raise DatasetNotFoundError(
        f"dataset {name} has no split {wanted!r}: it has {', '.join(splits)}; set "
        "split to one of them"
    )


def _from_hub(name: str, split: str | None, subset: str | None) -> Rows:
    datasets = import_module("datasets")
    try:
        loaded = datasets.load_dataset(name, subset, split=split)
    except Exception as error:
        # Which exceptions come depends on the versions of datasets, huggingface_hub
        # and the HTTP client; all mean that this name gives no data.
        reason = str(error).strip().splitlines()
        raise DatasetNotFoundError(
            f"dataset {name!r} is no file or folder here, and the hub did not give it "
            f"({type(error).__name__}: {reason[0] if reason else 'no reason given'}); "
            "correct the name, or download it and give the folder"
        ) from error
    if isinstance(loaded, Mapping):
        return _pick_split(loaded, split, repr(name))
    return loaded  # type: ignore[no-any-return]
