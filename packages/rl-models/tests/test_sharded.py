from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from rl_distributed.errors import CheckpointError
from rl_models.checkpoint.sharded import (
    Shard,
    ShardedReader,
    write_shards,
    write_state,
)


def _write(folder, tensor, world_size):
    chunk = -(-tensor.shape[0] // world_size)
    for rank in range(world_size):
        first = min(rank * chunk, tensor.shape[0])
        rows = tensor[first : first + chunk]
        shards = {"x": Shard(rows, tuple(tensor.shape), first)}
        write_shards(folder, shards, rank, world_size)
    write_state(folder, {"rate": 0.1}, world_size)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_any_rows_can_be_read_at_any_number_of_ranks(
    tmp_path_factory, rows, written, read
):
    folder = tmp_path_factory.mktemp("shards")
    tensor = torch.randn(rows, 2)
    _write(folder, tensor, written)
    reader = ShardedReader(folder)
    assert reader.state == {"rate": 0.1}
    chunk = -(-rows // read)
    for rank in range(read):
        first = min(rank * chunk, rows)
        target = torch.zeros_like(tensor[first : first + chunk])
        reader.read_into("x", target, first)
        assert torch.equal(target, tensor[first : first + chunk])


def test_damage_is_named(tmp_path):
    _write(tmp_path, torch.randn(4, 2), 2)
    reader = ShardedReader(tmp_path)
    with pytest.raises(CheckpointError, match="'y'"):
        reader.read_into("y", torch.zeros(4, 2))
    with pytest.raises(CheckpointError, match="does not fit"):
        reader.read_into("x", torch.zeros(4, 3))
    with pytest.raises(CheckpointError, match="lacks 2 of the rows"):
        reader.read_into("x", torch.zeros(4, 2), first_row=2)
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
        write_shards(blocked, {"x": Shard(torch.zeros(2), (2,))}, 0, 1)
