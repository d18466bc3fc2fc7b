"""Conversion of Hugging Face weights to Megatron-core's and back; needs neither."""

from __future__ import annotations

import pytest
import torch

from rl_models.training.megatron.conversion import box_of, join, split, unite

GROUPS = 4
"""Key-value groups of the whole model."""
SOURCES = {
    "whole": [(6,)],
    "columns": [(3, 8)],
    "gated": [(8, 3), (8, 3)],
    "vocabulary": [(11, 3)],
    "attention": [(16, 3), (8, 3), (8, 3)],
    "experts": [(8, 4, 3)],
}


def _wholes(kind):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in SOURCES[kind]]


def _like(kind, parts, size):
    """Return the shape of a rank's Megatron-core parameter."""
    rows = sum(part.shape[0] for part in parts)
    if kind == "vocabulary":
        rows = -(-11 // size)
    return (rows, *parts[0].shape[1:])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", SOURCES)
def test_parts_of_all_ranks_are_the_whole(kind, size):
    wholes = _wholes(kind)
    groups = GROUPS // size
    found = []
    for rank in range(size):
        boxes = [box_of(kind, whole.shape, rank, size) for whole in wholes]
        parts = [whole[box.slices] for whole, box in zip(wholes, boxes, strict=True)]
        own = join(kind, parts, groups, _like(kind, parts, size))
        back = split(kind, own, boxes, groups)
        assert all(map(torch.equal, back, parts))
        found.append(back)
    for number, whole in enumerate(wholes):
        assert torch.equal(unite(kind, [parts[number] for parts in found]), whole)


def test_queries_keys_and_values_of_a_group_are_together():
    query, key, value = _wholes("attention")
    parts = [query[8:], key[4:], value[4:]]  # of the second of two ranks
    own = join("attention", parts, 2, (16, 3))
    # Four rows of queries, two of the key and two of the value: groups 2 and 3.
    wanted = [query[8:12], key[4:6], value[4:6], query[12:], key[6:], value[6:]]
    assert torch.equal(own, torch.cat(wanted))


def test_gates_of_a_rank_are_above_the_columns_that_they_gate():
    gate, up = _wholes("gated")
    boxes = [box_of("gated", gate.shape, 1, 2)] * 2
    own = join("gated", [gate[4:], up[4:]], 2, (8, 3))
    assert torch.equal(own, torch.cat([gate[4:], up[4:]]))
    assert boxes[0].slices == (slice(4, 8), slice(0, 3))


def test_rows_that_pad_a_vocabulary_are_zero():
    (table,) = _wholes("vocabulary")
    box = box_of("vocabulary", table.shape, 3, 4)
    assert box.sizes == (2, 3)
    own = join("vocabulary", [table[box.slices]], 1, (3, 3))
    assert torch.equal(own[2], torch.zeros(3))
