from __future__ import annotations

import itertools
import json

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file

from rl_distributed.errors import CheckpointError
from rl_models.checkpoint.sharded import (
    Box,
    Shard,
    ShardedReader,
    write_shards,
    write_state,
)


def _parts(size, count):
    """Split a dimension as torch.chunk does: the last parts may be smaller or empty."""
    per_part = -(-size // count)
    borders = [min(size, per_part * part) for part in range(count + 1)]
    return [(a, b - a) for a, b in itertools.pairwise(borders)]


def _boxes(shape, grid):
    """Return each rank's box when dimensions are split as the grid says."""
    cuts = [_parts(n, count) for n, count in zip(shape, grid, strict=True)]
    for parts in itertools.product(*cuts):
        starts, sizes = zip(*parts, strict=True)
        yield Box(tuple(shape), starts, sizes)


def _write(folder, tensor, grid):
    boxes = list(_boxes(tensor.shape, grid))
    for rank, box in enumerate(boxes):
        shards = {"x": Shard(tensor[box.slices], box)}
        write_shards(folder, shards, rank, len(boxes))
    write_state(folder, {"rate": 0.1}, len(boxes))


_GRID = st.tuples(st.integers(1, 4), st.integers(1, 3))


@given(st.tuples(st.integers(1, 9), st.integers(1, 6)), _GRID, _GRID)
@settings(max_examples=40, deadline=None)
def test_any_part_can_be_read_in_any_layout(tmp_path_factory, shape, written, read):
    folder = tmp_path_factory.mktemp("shards")
    tensor = torch.randn(shape)
    _write(folder, tensor, written)
    reader = ShardedReader(folder)
    assert reader.state == {"rate": 0.1}
    for box in _boxes(shape, read):
        target = torch.zeros(box.sizes)
        reader.read_into("x", target, box)
        assert torch.equal(target, tensor[box.slices])
    whole = torch.zeros(shape)
    reader.read_into("x", whole)
    assert torch.equal(whole, tensor)


def test_the_format_before_is_read(tmp_path):
    tensor, number = torch.randn(5, 3), torch.tensor(2.5)
    for rank, (first, count) in enumerate(((0, 3), (3, 2))):
        rows = tensor[first : first + count].contiguous()
        name = tmp_path / f"rank_{rank:05d}_of_00002"
        save_file({"x": rows, "n": number}, name.with_suffix(".safetensors"))
        index = {
            "x": {"global_shape": [5, 3], "first_row": first, "num_rows": count},
            "n": {"global_shape": [], "first_row": 0, "num_rows": 1},
        }
        name.with_suffix(".json").write_text(json.dumps(index))
    record = {"format": "rl-models-sharded-1", "world_size": 2, "state": {}}
    (tmp_path / "state.json").write_text(json.dumps(record))
    reader = ShardedReader(tmp_path)
    columns = torch.zeros(5, 2)
    reader.read_into("x", columns, Box((5, 3), (0, 1), (5, 2)))
    assert torch.equal(columns, tensor[:, 1:])
    scalar = torch.zeros(())
    reader.read_into("n", scalar)
    assert scalar == number


def test_damage_is_named(tmp_path):
    _write(tmp_path, torch.randn(4, 2), (2, 1))
    reader = ShardedReader(tmp_path)
    with pytest.raises(CheckpointError, match="'y'"):
        reader.read_into("y", torch.zeros(4, 2))
    with pytest.raises(CheckpointError, match=r"shape \[4, 2\], and shape \[4, 3\]"):
        reader.read_into("x", torch.zeros(4, 3))
    beyond = Box((4, 2), (3, 0), (2, 2))
    with pytest.raises(CheckpointError, match="lacks 2 of the 4 numbers"):
        reader.read_into("x", torch.zeros(2, 2), beyond)
    path = tmp_path / "rank_00001_of_00002.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CheckpointError, match="rank_00001_of_00002"):
        ShardedReader(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        ShardedReader(tmp_path)


def test_a_folder_that_cannot_be_written_is_a_checkpoint_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match="free disk space"):
        write_shards(blocked, {"x": Shard(torch.zeros(2), Box.whole((2,)))}, 0, 1)
