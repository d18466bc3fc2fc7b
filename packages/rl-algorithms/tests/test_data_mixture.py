"""Mixtures: proportions, order, resume, configuration."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from rl_algorithms import Mixture
from rl_algorithms.data.config import DataConfig
from rl_algorithms.data.loader import BatchedDataLoader
from rl_algorithms.data.mixture import MixtureOrder, quotas
from rl_algorithms.data.module import DataModule
from rl_algorithms.errors import ColumnError, DataError
from rl_distributed.errors import ConfigError
from rl_models.build.model import TokenizerBuildConfig, build_tokenizer

SOURCES = st.lists(
    st.tuples(st.integers(1, 12), st.floats(0.05, 1.0)), min_size=1, max_size=4
)


def owners(order, sizes, epoch):
    """Return the source index of each row of an epoch."""
    return np.searchsorted(np.cumsum(sizes), order.indices(epoch), side="right")


def make_order(pairs, **options):
    sizes, weights = zip(*pairs, strict=True)
    num_rows, total = sum(sizes), sum(weights)
    # A source whose share is below one row is rejected; tested elsewhere.
    assume(all(weight / total * num_rows >= 1 for weight in weights))
    return MixtureOrder(sizes, weights, **options), sizes


@settings(max_examples=150, deadline=None)
@given(pairs=SOURCES, epoch=st.integers(0, 3), seed=st.integers(0, 5))
def test_every_stretch_has_the_proportions(pairs, epoch, seed):
    order, sizes = make_order(pairs, seed=seed)
    found, num = owners(order, sizes, epoch), sum(sizes)
    for source, (_, quota) in enumerate(order.state()):
        counts = np.cumsum(found == source)
        assert counts[-1] == quota
        ideal = np.arange(1, num + 1) * quota / num
        bound = 0.5 + len(sizes) * quota / num / 2
        assert np.abs(counts - ideal).max() <= bound + 1e-9


@settings(max_examples=100, deadline=None)
@given(pairs=SOURCES, seed=st.integers(0, 5), shuffle=st.booleans())
def test_no_row_comes_again_before_all_of_its_source_came(pairs, seed, shuffle):
    order, sizes = make_order(pairs, seed=seed, shuffle=shuffle)
    rows = np.concatenate([order.indices(epoch) for epoch in range(4)])
    first = 0
    for size in sizes:
        mine = rows[(rows >= first) & (rows < first + size)]
        for start in range(0, len(mine), size):
            part = mine[start : start + size]
            assert len(set(part.tolist())) == len(part)
        first += size


@given(
    weights=st.lists(st.floats(0.1, 1.0), min_size=1, max_size=5),
    num_rows=st.integers(60, 500),
)
def test_quotas_add_up_and_are_rounded_shares(weights, num_rows):
    shares = quotas(weights, num_rows)
    assert sum(shares) == num_rows
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - weight / sum(weights) * num_rows) < 1


@settings(max_examples=60, deadline=None)
@given(taken=st.integers(0, 12), seed=st.integers(0, 3), endless=st.booleans())
def test_resuming_continues_with_the_next_sample(taken, seed, endless):
    def make():
        return BatchedDataLoader(
            list(range(17)),
            3,
            endless=endless,
            collate_fn=list,
            order=MixtureOrder([5, 12], [0.7, 0.3], seed=seed),
        )

    def take(loader, count):
        found = []
        while len(found) < count:
            for batch in loader:
                found.append(batch)
                if len(found) == count:
                    break
        return found

    whole = take(make(), taken + 8)
    first = make()
    take(first, taken)
    second = make()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(second, 8) == whole[taken:]


def test_each_source_has_an_order_of_its_own():
    rows = MixtureOrder([20, 20], [1, 1], seed=4).indices(0)
    first, second = rows[rows < 20], rows[rows >= 20] - 20
    assert sorted(first) == sorted(second)
    assert first.tolist() != second.tolist()


def test_other_weights_cannot_be_resumed():
    def make(weights):
        order = MixtureOrder([5, 5], weights)
        return BatchedDataLoader(list(range(10)), 2, order=order)

    with pytest.raises(DataError, match="mixture was"):
        make([1, 1]).load_state_dict(make([1, 4]).state_dict())


ROWS = {
    "sums": [{"prompt": f"{i}+", "answer": "1"} for i in range(6)],
    "words": [{"prompt": f"{i}:", "answer": "2"} for i in range(3)],
}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(TokenizerBuildConfig())


def write(folder, name, rows):
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def names(batches):
    return [
        info["dataset_name"] for batch in batches for info in batch["extra_env_info"]
    ]


def test_of_objects(tokenizer):
    mixture = Mixture(ROWS, weights={"sums": 1, "words": 2})
    module = DataModule(
        DataConfig(), tokenizer, kind="prompts", batch_size=3, train=mixture
    )
    epoch = names(module.train_loader)
    assert (epoch.count("sums"), epoch.count("words")) == (3, 6)
    assert epoch[:3].count("words") == 2


def test_of_files_with_columns_and_a_validation_per_source(tokenizer, tmp_path):
    other = [{"problem": row["prompt"], "solution": "2"} for row in ROWS["words"]]
    config = DataConfig.from_dict(
        {
            "train": [
                write(tmp_path, "sums", ROWS["sums"]),
                {
                    "path": write(tmp_path, "other", other),
                    "name": "words",
                    "columns": {"prompt": "problem", "answer": "solution"},
                },
            ],
            "split_validation_size": 3,
        }
    )
    module = DataModule(config, tokenizer, kind="prompts", batch_size=3)
    assert module.counts()["num_train_rows"] == 6
    parts = module.validation_loader()
    assert parts.num_rows == {"sums": 2, "words": 1}
    assert names(parts["words"]) == ["words"]
    assert parts["words"].batch_size == 3
    answers = [d["extra_env_info"]["answer"] for d in module.train_dataset]
    assert sorted(answers) == ["1"] * 4 + ["2"] * 2


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"path": "a", "mixture": ["b"]}, "only one of them"),
        ([{"path": "a", "weight": 1}, "b"], "b has none"),
        (["x/a.jsonl", "y/a.jsonl"], "called 'a'"),
        ([{"split": "train"}], r"mixture\[0\] needs either"),
        ({"mixture": ["a"], "columns": {"prompt": "q"}}, "belong to the sources"),
        ({"path": "a", "columns": {"x": "c", "y": "c"}}, "two names to one column"),
        ([{"path": "a", "weight": 0}], "greater than 0"),
        (["a", {"path": "b", "weigth": 1}], "did you mean 'weight'.*source 2"),
    ],
)
def test_bad_configurations(train, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig.from_dict({"train": train})


def test_bad_input(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="must name exactly"):
        Mixture(ROWS, weights={"sums": 1})
    with pytest.raises(ConfigError, match="above 0"):
        Mixture({"a": ROWS["sums"]}, weights={"a": 0})
    with pytest.raises(ConfigError, match="at least one source"):
        Mixture({})
    with pytest.raises(ConfigError, match="too small"):
        MixtureOrder([3, 3], [1.0, 1e-9])
    path = write(tmp_path, "sums", ROWS["sums"])
    config = DataConfig.from_dict(
        {"train": {"path": path, "columns": {"prompt": "promt"}}}
    )
    with pytest.raises(ColumnError, match="did you mean 'prompt'"):
        DataModule(config, tokenizer, kind="prompts", batch_size=2)
