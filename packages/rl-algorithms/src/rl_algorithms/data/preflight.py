"""Check data settings and columns before a tokenizer is loaded."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from rl_algorithms.data.columns import answer_column, find_columns
from rl_algorithms.data.config import DataConfig, DataKind, SourceConfig
from rl_algorithms.data.preference_columns import find_pair_columns
from rl_algorithms.data.readers import read_file
from rl_algorithms.data.sources import (
    Files,
    check_not_empty,
    check_sources,
    describe_source,
    holds_saved_dataset,
    load_configured,
    locate,
    with_columns,
)
from rl_algorithms.data.text_files import check_text_files
from rl_algorithms.data.types import Rows
from rl_distributed.errors import ConfigError

__all__ = ["NO_SOURCE", "answers_of", "check_data"]

NO_SOURCE = (
    "data.train is not set and no dataset was given: set data.train to a file, folder "
    "or hub name, or in Python pass dataset="
)
NUM_ROWS = 1000
"""Number of rows read of each file; the others are read when the run begins."""


def check_data(config: DataConfig, kind: DataKind | None) -> None:
    """Check that there are data to train on, and that their columns can be used.

    Of a file, the first `NUM_ROWS` rows are read. Hub datasets and folders written by
    `Dataset.save_to_disk` are not loaded.

    Args:
        config: Section `data`.
        kind: Use of the rows; None: columns are not checked.

    Raises:
        ConfigError: There is nothing to train on.
        DataError: A source does not exist, cannot be read, or lacks a column.
        RegistryError: A world of tasks is unknown.
    """
    if config.train is None:
        raise ConfigError(NO_SOURCE)
    check_sources(config.sources)
    check_text_files(config)
    for source in config.sources:
        rows, name = _first_rows(source)
        if rows and kind is not None:
            _check_columns(rows, config, kind, name)


def answers_of(path: str) -> str | None:
    """Return the name under which a reward gets a dataset's answers; None if none.

    Args:
        path: A file, a folder, or a hub name; hub datasets are assumed to have answers.

    Raises:
        DataError: The file does not exist, cannot be read, or has no prompts.
    """
    source = SourceConfig(path=path)
    check_sources([source])
    rows, name = _first_rows(source)
    # A rollout passes the answer on under this name, whatever its column is called.
    return (
        "answer" if not rows or find_columns(rows, DataConfig(), name).answer else None
    )


def _first_rows(source: SourceConfig) -> tuple[Rows, str]:
    """Return the first rows of a source, or none if they cannot be read quickly."""
    if source.tasks is not None:
        # All tasks of a world have the same columns, and generating one is fast.
        few = source.tasks.replace(num_rows=1)
        return load_configured(source.replace(tasks=few))
    if source.path is None:
        return [], ""
    name, place = describe_source(source.path), Path(source.path).expanduser()
    # These need the network, or a library that takes a second to import.
    if not place.exists() or holds_saved_dataset(place):
        return [], name
    found = locate(source.path, source.split, source.subset)
    assert isinstance(found, Files)
    rows = list(islice((row for file in found for row in read_file(file)), NUM_ROWS))
    check_not_empty(rows, name)
    return with_columns(rows, source), name


def _check_columns(rows: Rows, config: DataConfig, kind: DataKind, name: str) -> None:
    if kind == "preferences":
        find_pair_columns(rows, config, name)
        return
    columns = find_columns(rows, config, name)
    if kind == "demonstrations" and columns.prompt is not None:
        answer_column(columns, rows[0], name)
