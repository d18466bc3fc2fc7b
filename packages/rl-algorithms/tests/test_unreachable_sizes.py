"""Sizes that no run can reach are errors in every algorithm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rl_algorithms import algorithm_names
from rl_algorithms.registry import get_config_class
from rl_distributed.config.schema import SchemaNode
from rl_distributed.errors import ConfigError

REQUIRED = {
    "policy.dynamic_batching": {"train_mb_tokens": 4096},
    "policy.sequence_packing": {"train_mb_tokens": 4096},
    "early_stop": {"patience": 1},
    "env": {"name": "math"},
}


def whole_numbers(algorithm: str) -> Iterator[tuple[str, ...]]:
    for path, node in SchemaNode.of(get_config_class(algorithm)).walk():
        if int in node.types and bool not in node.types and "*" not in path:
            yield path


def tree_with(algorithm: str, path: tuple[str, ...], value: int) -> dict[str, object]:
    tree: dict[str, object] = {"policy": {"model_name": "m"}}
    if algorithm == "distillation":
        tree["teacher"] = "t"
    place = tree
    for depth, key in enumerate(path[:-1], start=1):
        section = place.get(key)
        if not isinstance(section, dict):
            section = dict(REQUIRED.get(".".join(path[:depth]), {}))
            if key in ("teacher", "critic"):
                section["model_name"] = "t"
            place[key] = section
        place = section
    place[path[-1]] = value
    return tree


@pytest.mark.parametrize("algorithm", algorithm_names())
def test_no_key_takes_a_number_beyond_all_bounds(algorithm):
    paths = list(whole_numbers(algorithm))
    assert len(paths) > 30
    for path in paths:
        for value in (10**30, 2**31 if "seed" not in path[-1] else 2**63):
            if path[-1].endswith("_bytes") and value < 2**63:
                continue
            tree = tree_with(algorithm, path, value)
            with pytest.raises(ConfigError) as caught:
                get_config_class(algorithm).from_dict(tree)
            said = str(caught.value)
            assert ".".join(path) in said, said
            assert f"got {value}" in said, said
            assert "must be" in said, said


@pytest.mark.parametrize("name", ["seed", "policy.seed"])
def test_the_largest_seed_is_one(name):
    path = tuple(name.split("."))
    schema = get_config_class("sft")
    schema.from_dict(tree_with("sft", path, 2**63 - 1))
    with pytest.raises(ConfigError, match="9223372036854775807 in size"):
        schema.from_dict(tree_with("sft", path, 2**63))
    with pytest.raises(ConfigError, match="at least 0: got -1"):
        schema.from_dict(tree_with("sft", path, -1))
