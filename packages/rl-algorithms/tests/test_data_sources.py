from __future__ import annotations

import dataclasses
import itertools
import json
from typing import NamedTuple

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rl_algorithms.data import sources
from rl_algorithms.data.config import DatasetConfig, SourceConfig
from rl_algorithms.data.sources import load_configured, load_dataset_any
from rl_algorithms.errors import (
    ColumnError,
    DataError,
    DatasetNotFoundError,
    EmptyDatasetError,
)
from rl_distributed.errors import ConfigError, RegistryError
from rl_envs.tasks import Task

ROWS = [{"prompt": "1 2", "answer": "3"}, {"prompt": "2 2", "answer": "4"}]


class Pair(NamedTuple):
    prompt: str
    answer: str


@dataclasses.dataclass
class Record:
    prompt: str
    answer: str


@pytest.mark.parametrize(
    "source",
    [
        ROWS,
        tuple(ROWS),
        (row for row in ROWS),
        {"prompt": ["1 2", "2 2"], "answer": ["3", "4"]},
        [Pair("1 2", "3"), Pair("2 2", "4")],
        [Record("1 2", "3"), Record("2 2", "4")],
        [Task("1 2", "3"), Task("2 2", "4")],
        datasets.Dataset.from_list(ROWS),
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
    ],
    ids=lambda source: type(source).__name__,
)
def test_objects(source):
    assert [dict(row) for row in load_dataset_any(source)] == ROWS


def test_texts_and_metadata_of_tasks():
    assert load_dataset_any(["a", "b"]) == [{"text": "a"}, {"text": "b"}]
    (row,) = load_dataset_any([Task("p", "a", {"level": 3})])
    assert row == {"prompt": "p", "answer": "a", "level": 3}


def write(folder, name):
    path = folder / name
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".csv":
        path.write_text("prompt,answer\n1 2,3\n2 2,4\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_files(tmp_path, ending):
    path = write(tmp_path, f"rows.{ending}")
    assert load_dataset_any(path) == load_dataset_any(str(path)) == ROWS
    assert load_dataset_any(tmp_path) == ROWS


def test_json_with_data_key_or_columns(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"data": ROWS}))
    assert load_dataset_any(path) == ROWS
    path.write_text(json.dumps({"prompt": ["1 2", "2 2"], "answer": ["3", "4"]}))
    assert load_dataset_any(path) == ROWS


def test_folders_with_splits(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "train-0.jsonl")
    write(tmp_path / "data", "train-1.jsonl")
    (tmp_path / "test.jsonl").write_text('{"prompt": "held out"}\n')
    assert load_dataset_any(tmp_path) == ROWS + ROWS
    assert load_dataset_any(tmp_path, split="test") == [{"prompt": "held out"}]
    with pytest.raises(DatasetNotFoundError, match="no file of split 'dev'"):
        load_dataset_any(tmp_path, split="dev")


def test_folders_of_the_datasets_library(tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"a": dataset, "b": dataset}).save_to_disk(tmp_path / "two")
    assert list(load_dataset_any(tmp_path / "one")) == ROWS
    assert list(load_dataset_any(tmp_path / "two", split="b")) == ROWS
    with pytest.raises(DatasetNotFoundError, match="no split 'train': it has a, b"):
        load_dataset_any(tmp_path / "two")


def test_hub_names(monkeypatch):
    calls = []

    def load_dataset(name, subset, split):
        calls.append((name, subset, split))
        if name == "org/missing":
            raise ConnectionError("no route\nmore text")
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources, "why_not_on_hub", lambda name, kind: None)
    assert list(load_dataset_any("org/name", subset="main")) == ROWS
    assert calls == [("org/name", "main", None)]
    with pytest.raises(DatasetNotFoundError, match=r"\(ConnectionError: no route\)"):
        load_dataset_any("org/missing")
    monkeypatch.setattr(
        sources, "why_not_on_hub", lambda name, kind: f"no {kind} {name}"
    )
    with pytest.raises(DatasetNotFoundError, match="no dataset org/missing"):
        load_dataset_any("org/missing")
    assert len(calls) == 2


@pytest.mark.parametrize(
    "name", ["/nowhere/rows.jsonl", "rows.jsonl", "./rows", "a/b/c", "~/rows"]
)
def test_missing_files_never_ask_the_hub(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "_from_hub", None)
    with pytest.raises(DatasetNotFoundError, match="does not exist"):
        load_dataset_any(name)


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{oops}\n', DataError, "line 2: not valid JSON"),
        ("a.jsonl", "[1]\n", DataError, "line 1: must be a JSON object.*got list"),
        ("a.jsonl", "", EmptyDatasetError, "is empty"),
        ("a.json", "{oops", DataError, "must end in .jsonl"),
        ("a.json", "3", DataError, "must be a JSON list"),
        ("a.json", "[3]", ColumnError, "row 0 must be a mapping"),
        ("a.csv", "a,b\n1\n", DataError, "line 2: has another number of fields"),
        ("a.csv", 'a,b\n1,"2\n3"\n\n4\n', DataError, "line 5: has another number"),
        ("a.csv", "a,b,a\n1,2,3\n", DataError, r"one name in the header \(a, b, a"),
        ("a.parquet", "junk", DataError, "not a readable parquet"),
        ("a.txt", "x", DataError, "unknown ending '.txt': use one of .jsonl"),
    ],
)
def test_bad_files(tmp_path, name, text, error, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(error, match=message):
        load_dataset_any(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"prompt": "1 2"}\n'),
        ("a.json", '[{"prompt": "1 2"}]'),
        ("a.csv", "prompt\n1 2\n"),
    ],
)
def test_a_mark_at_the_start_of_a_file_is_no_text(tmp_path, name, text):
    path = tmp_path / name
    path.write_text("\ufeff" + text, encoding="utf-8")
    assert load_dataset_any(path) == [{"prompt": "1 2"}]


def test_a_file_that_must_not_be_read(tmp_path, monkeypatch):
    path = write(tmp_path, "rows.jsonl")

    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError, match=r"rows.jsonl' cannot be read: Permission"):
        load_dataset_any(path)


def test_bad_objects(tmp_path, monkeypatch):
    with pytest.raises(EmptyDatasetError, match="is empty"):
        load_dataset_any([])
    with pytest.raises(ColumnError, match=r"row 1 must be a mapping .* got int"):
        load_dataset_any([{}, 3])
    with pytest.raises(ColumnError, match="differ in length"):
        load_dataset_any({"a": [1], "b": [1, 2]})
    with pytest.raises(ColumnError, match="'a' must be a list"):
        load_dataset_any({"a": "text"})
    with pytest.raises(DataError, match="must be a list or iterable"):
        load_dataset_any(3)
    with pytest.raises(DatasetNotFoundError, match="holds no data"):
        load_dataset_any(tmp_path)
    monkeypatch.setattr(sources, "_MAX_ROWS", 5)
    with pytest.raises(DataError, match="endless iterable"):
        load_dataset_any({"a": i} for i in itertools.count())
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"a": "\xe9"}\n')
    with pytest.raises(DataError, match="not UTF-8"):
        load_dataset_any(latin)


def tasks(**settings):
    return DatasetConfig.from_dict(
        {
            "tasks": {
                "world": "sorting",
                "part": "train",
                "num_rows": 6,
                "settings": {"num_digits": 4},
                **settings,
            }
        }
    )


def test_configured_sources(tmp_path):
    path = write(tmp_path, "rows.jsonl")
    rows, name = load_configured(DatasetConfig(path=str(path)))
    assert rows == ROWS
    assert name == repr(str(path))
    trained, name = load_configured(tasks())
    held_out, _ = load_configured(tasks(part="held_out"))
    assert len(trained) == len(held_out) == 6
    assert "sorting" in name
    assert not {r["prompt"] for r in trained} & {r["prompt"] for r in held_out}
    assert load_configured(tasks())[0] == trained


@pytest.mark.parametrize(
    "row", [{"answer": "3", "solution": "1 + 2"}, {"solution": "1 + 2", "answer": "3"}]
)
def test_a_renamed_column_replaces_one_of_its_name(row):
    source = SourceConfig(path="rows.jsonl", columns={"answer": "solution"})
    assert sources.with_columns([row], source) == [{"answer": "1 + 2"}]
    swapped = source.replace(columns={"answer": "solution", "solution": "answer"})
    assert sources.with_columns([row], swapped) == [
        {"answer": "1 + 2", "solution": "3"}
    ]


def test_bad_configured_sources():
    with pytest.raises(RegistryError, match="sorting"):
        load_configured(tasks(world="sortign"))
    with pytest.raises(ConfigError, match="settings of the tasks"):
        load_configured(tasks(settings={"nonsense": 1}))
    for bad in ({}, {"path": "x", "tasks": {}}, {"path": None}):
        with pytest.raises(ConfigError):
            DatasetConfig.from_dict(bad)
