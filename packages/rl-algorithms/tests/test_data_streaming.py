"""Streams: rows are read while training is under way."""

from __future__ import annotations

import itertools
import json

import datasets
import pytest
from hypothesis import given, settings, strategies as st

from rl_algorithms.data.config import DataConfig, SourceConfig
from rl_algorithms.data.module import DataModule
from rl_algorithms.data.streaming import RowStream, StreamLoader
from rl_algorithms.errors import DataError, EmptyDatasetError
from rl_distributed.errors import ConfigError
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer


def endless():
    for i in itertools.count():
        yield {"prompt": f"{i}:"}


def finite(count=11):
    return [{"prompt": f"{i}:"} for i in range(count)]


def numbers(rows, name):
    """Return numbers; multiples of five are dropped, as over-long rows are."""
    found = [int(row["prompt"][:-1]) for row in rows]
    kept = [number for number in found if number % 5]
    if not kept:
        raise EmptyDatasetError("none is left")
    return kept


def make(source=endless, batch_size=3, block_rows=4, **options):
    return StreamLoader(
        RowStream(source), batch_size, process=numbers, block_rows=block_rows, **options
    )


def take(loader, count):
    found = []
    while len(found) < count:
        for batch in loader:
            found.append(batch)
            if len(found) == count:
                break
    return found


def test_order_and_ends():
    loader = make(finite())
    assert list(loader) == [[1, 2, 3], [4, 6, 7], [8, 9]]
    assert list(loader) == [[1, 2, 3], [4, 6, 7], [8, 9]], "a second pass"
    assert list(make(finite(), drop_last=True)) == [[1, 2, 3], [4, 6, 7]]
    assert not hasattr(loader, "__len__")


def test_passes_are_shuffled_within_blocks():
    loader = make(finite(40), block_rows=20, shuffle=True, seed=3)
    first, second = (list(itertools.chain(*loader)) for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == [n for n in range(40) if n % 5]
    assert sorted(first[:16]) == [n for n in range(20) if n % 5]
    # Each block is shuffled independently.
    assert [n - 20 for n in first[16:]] != first[:16]


@settings(max_examples=100, deadline=None)
@given(
    count=st.one_of(st.none(), st.integers(4, 30)),
    taken=st.integers(0, 12),
    batch_size=st.integers(1, 7),
    block_rows=st.integers(2, 9),
    shuffle=st.booleans(),
    once=st.booleans(),
)
def test_resuming_continues_with_the_next_sample(
    count, taken, batch_size, block_rows, shuffle, once
):
    def loader():
        source = endless if count is None else finite(count)
        if once:
            source = iter(endless()) if count is None else finite(count)
        options = {"shuffle": shuffle, "seed": 1}
        return make(source, batch_size, block_rows, **options)

    whole = take(loader(), taken + 5)
    first = loader()
    take(first, taken)
    second = loader()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(second, 5) == whole[taken:]


def test_hugging_face_streams_skip(monkeypatch):
    skipped = []
    original = datasets.IterableDataset.skip

    def skip(self, n):
        skipped.append(n)
        return original(self, n)

    monkeypatch.setattr(datasets.IterableDataset, "skip", skip)
    source = datasets.IterableDataset.from_generator(lambda: iter(finite()))
    loader = make(source)
    whole = list(loader)
    first = make(source)
    take(first, 2)
    second = make(source)
    second.load_state_dict(first.state_dict())
    assert take(second, 1) == whole[2:]
    assert skipped == [4]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_files_are_read_lazily(tmp_path, ending):
    path = tmp_path / f"rows.{ending}"
    data = datasets.Dataset.from_list(finite())
    {"jsonl": data.to_json, "csv": data.to_csv, "parquet": data.to_parquet}[ending](
        path
    )
    assert list(RowStream(str(path)).rows()) == finite()
    config = SourceConfig(path=str(path), columns={"text": "prompt"})
    assert next(RowStream(None, config).rows(skip=2)) == {"text": "2:"}


def test_bad_sources():
    with pytest.raises(DataError, match="got int"):
        RowStream(3)
    with pytest.raises(EmptyDatasetError, match="has no rows"):
        make([])
    with pytest.raises(DataError, match=r"8 usable rows, less than a step takes \(9\)"):
        list(make(finite(), batch_size=9, drop_last=True))
    loader = make(iter(finite()))
    assert not loader.is_used_up
    list(loader)
    assert loader.is_used_up
    with pytest.raises(DataError, match="only once"):
        list(loader)
    with pytest.raises(DataError, match="block_rows was 4"):
        make(block_rows=5).load_state_dict(make().state_dict())
    with pytest.raises(DataError, match="not saved by a stream"):
        make().load_state_dict({"epoch": 1})


def test_of_a_module(tmp_path):
    tokenizer = build_tokenizer(TokenizerBuildConfig())
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, finite())))
    for config, train in (
        (DataConfig.from_dict({"train": str(path), "streaming": True}), None),
        (DataConfig(streaming=True), finite()),
        (DataConfig(), lambda: iter(finite())),
    ):
        module = DataModule(
            config, tokenizer, kind="prompts", batch_size=2, train=train
        )
        batches = list(module.train_loader)
        assert len(batches) == 5
        idx = [info["prompt"] for b in batches for info in b["extra_env_info"]]
        assert len(set(idx)) == 10
        assert module.train_dataset[0]["length"] > 0
    with pytest.raises(ConfigError, match="a stream has no tasks"):
        DataModule(DataConfig(streaming=True), tokenizer, kind="prompts", batch_size=2)
    for wrong in ({"split_validation_size": 2}, {"train": ["a", "b"]}):
        with pytest.raises(ConfigError, match="streaming"):
            DataConfig.from_dict({"streaming": True, **wrong})
