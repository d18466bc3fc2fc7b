"""`load_dataset_any`: load rows from Python objects, files, folders or the hub.

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

import dataclasses
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, cast

from rl_algorithms.data.config import SourceConfig
from rl_algorithms.data.formats import read_row
from rl_algorithms.data.progress import track
from rl_algorithms.data.readers import ENDINGS, read_columns, read_file
from rl_algorithms.data.types import Row, Rows
from rl_algorithms.errors import (
    ColumnError,
    DataError,
    DatasetNotFoundError,
    EmptyDatasetError,
)
from rl_distributed.suggestion import did_you_mean, did_you_mean_file
from rl_envs.registry import create_task_source
from rl_models.checkpoint.hub import why_not_on_hub

__all__ = [
    "Files",
    "as_row",
    "check_not_empty",
    "check_sources",
    "describe_source",
    "holds_saved_dataset",
    "load_configured",
    "load_dataset_any",
    "locate",
    "shape_row",
    "with_columns",
]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# An iterable that never ends would otherwise fill the memory.
_MAX_ROWS = 50_000_000


def load_dataset_any(
    source: Any, *, split: str | None = None, subset: str | None = None
) -> Rows:
    """Load rows.

    Args:
        source: See the table of the module.
        split: Split of a folder or hub dataset; default `train` if it exists.
        subset: Configuration of a hub dataset.

    Raises:
        DatasetNotFoundError: There is no such file, folder or hub dataset.
        DataError: A file or row cannot be read; the message names it.
        EmptyDatasetError: There are no rows.
    """
    name = describe_source(source)
    rows: Rows
    if isinstance(source, str | Path):
        found = locate(str(source), split, subset)
        rows = _read_files(found) if isinstance(found, Files) else found
    else:
        rows = _from_object(source, split, name)
    check_not_empty(rows, name)
    return rows


def check_not_empty(rows: Rows, name: str) -> None:
    """Check that a dataset has rows.

    Raises:
        EmptyDatasetError: The dataset has no rows.
    """
    if len(rows) == 0:
        raise EmptyDatasetError(
            f"dataset {name} is empty: it has no rows; give at least one"
        )


def load_configured(config: SourceConfig) -> tuple[Rows, str]:
    """Load the path or the tasks that a configuration names.

    Returns:
        The rows, and their name in messages.

    Raises:
        DataError: See `load_dataset_any`.
        RegistryError: The world is unknown.
    """
    if config.path is not None:
        rows = load_dataset_any(config.path, split=config.split, subset=config.subset)
        return with_columns(rows, config), describe_source(config.path)
    if config.tasks is None:
        raise DataError("a mixture has no rows of its own: load its sources")
    tasks = config.tasks
    source = create_task_source(tasks.world, {"seed": tasks.seed, **tasks.settings})
    parts = {
        "train": source.train,
        "held_out": source.held_out,
        "demonstrations": source.demonstrations,
    }
    rows = parts[tasks.part](tasks.num_rows)
    return with_columns(rows, config), f"tasks of {tasks.world!r} ({tasks.part})"


def check_sources(sources: Iterable[SourceConfig]) -> None:
    """Check that a source can be loaded, without loading it.

    Raises:
        DatasetNotFoundError: A file or folder does not exist.
        RegistryError: A world of tasks is unknown.
        ConfigError: The settings of a world are invalid.
    """
    for source in sources:
        if source.path is not None:
            _check_path(source.path)
        elif source.tasks is not None:
            create_task_source(source.tasks.world, source.tasks.settings)


def with_columns(rows: Rows, config: SourceConfig) -> Rows:
    """Convert rows by `config.format`, and rename columns by `config.columns`.

    Raises:
        ColumnError: A row lacks a column, or does not fit the format.
        EmptyDatasetError: The format drops every row.
    """
    if not config.columns and config.format is None:
        return rows
    found = [shape_row(row, index, config) for index, row in enumerate(rows)]
    kept = [row for row in found if row is not None]
    if not kept:
        raise EmptyDatasetError(
            f"dataset {config.title}: the format {config.format} drops all "
            f"{len(rows)} rows; give it other rows"
        )
    return kept


def shape_row(row: Row, index: int, config: SourceConfig) -> Row | None:
    """Convert one row by its format, and rename its columns.

    Returns:
        The row, or None if the format drops it.

    Raises:
        ColumnError: The row lacks a column, or does not fit the format.
    """
    if not config.columns and config.format is None:
        return row
    if config.format is not None:
        read = read_row(row, index, config.format, config.title)
        if read is None:
            return None
        row = read
    renamed = {old: new for new, old in config.columns.items()}
    missing = [old for old in renamed if old not in row]
    if missing:
        raise ColumnError(
            f"columns of dataset {config.title}: row {index} has no {missing[0]!r}"
            f"{did_you_mean(missing[0], list(row))}; it has "
            f"{', '.join(map(repr, row))}"
        )
    return {
        renamed.get(key, key): value
        for key, value in row.items()
        # A renamed column replaces one of its new name, whichever comes first.
        if key in renamed or key not in config.columns
    }


def describe_source(source: Any) -> str:
    """Return the name of a source in messages."""
    if isinstance(source, str | Path):
        return repr(str(source))
    return f"(a {type(source).__name__})"


def _from_object(source: Any, split: str | None, name: str) -> Rows:
    # Known by its attributes, because importing datasets takes a second.
    if hasattr(source, "column_names") and hasattr(source, "__getitem__"):
        if isinstance(source, Mapping):
            return cast("Rows", _pick_split(source, split, name))
        if hasattr(source, "__len__"):
            return source  # type: ignore[no-any-return]  # datasets.Dataset
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        return list(source.to_dict("records"))
    if isinstance(source, Mapping):
        return read_columns(source, name)
    if not isinstance(source, Iterable):
        raise DataError(
            f"a dataset must be a list or iterable of rows, a file, a folder or a hub "
            f"name: got {type(source).__name__}"
        )
    rows = list(islice(source, _MAX_ROWS + 1))
    if len(rows) > _MAX_ROWS:
        raise DataError(
            f"dataset {name} gave more than {_MAX_ROWS} rows: read an endless iterable "
            "with data.streaming=true, or cut it with itertools.islice"
        )
    return [as_row(row, index, name) for index, row in enumerate(rows)]


def as_row(row: Any, index: int, name: str) -> Row:
    """Convert a row of any supported type to columns.

    Raises:
        ColumnError: The row is neither a mapping, nor text, nor an object with fields.
    """
    # Returned as it is: copying millions of rows would take time and memory.
    if isinstance(row, dict):
        return row
    if isinstance(row, Mapping):
        return dict(row)
    if isinstance(row, str):
        return {"text": row}
    # Objects know best how to become a row; named tuples and dataclasses come after.
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
    """Turn the `metadata` of a task into columns, so that rewards can use them."""
    metadata = row.get("metadata")
    # The row's own columns win over equal names in its metadata.
    return {**metadata, **row} if isinstance(metadata, Mapping) else row


class Files(list[Path]):
    """Data files that together form one dataset."""


def locate(
    path: str, split: str | None, subset: str | None, *, streaming: bool = False
) -> Any:
    """Resolve a path or a name.

    Args:
        path: A file, a folder or a hub name.
        split: Split of a folder or hub dataset.
        subset: Configuration of a hub dataset.
        streaming: Whether to stream a hub dataset instead of downloading it.

    Returns:
        `Files` to read, or a Hugging Face dataset.

    Raises:
        DatasetNotFoundError: There is nothing of that name.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return Files([place])
    if place.is_dir():
        return _from_folder(place, split)
    _check_path(path)
    return _from_hub(path, split, subset, streaming)


def _check_path(path: str) -> None:
    """Reject a path that neither exists nor can be the name of a hub dataset."""
    place = Path(path).expanduser()
    # A data file's ending means a path: `a/b.jsonl` would match a hub name as well.
    may_be_on_hub = place.suffix not in ENDINGS and _HUB_NAME.fullmatch(path)
    if not place.exists() and not may_be_on_hub:
        raise DatasetNotFoundError(
            f"dataset {path!r} does not exist: there is no such file or folder "
            f"(looked in {Path.cwd()}){did_you_mean_file(path) or '; correct the path'}"
        )


def _read_files(files: Files) -> Rows:
    name = files[0].name if len(files) == 1 else f"{len(files)} files"
    rows = (row for file in files for row in read_file(file))
    return list(track(rows, f"reading {name}"))


def holds_saved_dataset(path: Path) -> bool:
    """Return whether a folder was written by `Dataset.save_to_disk`."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def _from_folder(path: Path, split: str | None) -> Any:
    if holds_saved_dataset(path):
        # The datasets library takes a second to import, and only this needs it.
        loaded = import_module("datasets").load_from_disk(str(path))
        if isinstance(loaded, Mapping):
            return _pick_split(loaded, split, repr(str(path)))
        return loaded
    # iterdir has no order, but the rows need the same one in each run.
    files = sorted(
        file
        for file in [*path.iterdir(), *path.glob("data/*")]
        if file.is_file() and file.suffix.lower() in ENDINGS
    )
    if not files:
        raise DatasetNotFoundError(
            f"dataset folder {str(path)!r} holds no data: expected what "
            f"Dataset.save_to_disk writes, or files ending in {', '.join(ENDINGS)}"
        )
    chosen = [file for file in files if file.stem.startswith(split or "train")]
    if not chosen and split is not None:
        raise DatasetNotFoundError(
            f"dataset folder {str(path)!r} has no file of split {split!r}: it holds "
            f"{', '.join(file.name for file in files)}"
        )
    # Without a split in the names, all files form one dataset.
    return Files(chosen or files)


def _pick_split(splits: Mapping[str, Any], split: str | None, name: str) -> Any:
    wanted = split if split is not None else "train"
    if wanted in splits:
        return splits[wanted]
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    raise DatasetNotFoundError(
        f"dataset {name} has no split {wanted!r}: it has {', '.join(splits)}; set "
        "split to one of them"
    )


def _from_hub(name: str, split: str | None, subset: str | None, streaming: bool) -> Any:
    datasets = import_module("datasets")
    # A cached dataset can be used offline, so the hub is asked only without one.
    kept = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
    refusal = None if kept.is_dir() else why_not_on_hub(name, "dataset")
    if refusal is not None:
        raise DatasetNotFoundError(refusal)
    options = {"streaming": True} if streaming else {}
    try:
        loaded = datasets.load_dataset(name, subset, split=split, **options)
    except Exception as error:
        # The exception types depend on the versions of datasets, huggingface_hub and
        # the HTTP client; all of them mean that the name cannot be loaded.
        reason = str(error).strip().splitlines()
        raise DatasetNotFoundError(
            f"dataset {name!r} is no file or folder here, and the hub did not give it "
            f"({type(error).__name__}: {reason[0] if reason else 'no reason given'}); "
            "correct the name, or download it and give the folder"
        ) from error
    if isinstance(loaded, Mapping):
        return _pick_split(loaded, split, repr(name))
    return loaded
