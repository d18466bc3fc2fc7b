"""Check how rl-distributed handles numeric columns, with torch and without.

`test_without_torch.py` blocks torch for it, and `tools/wheels.py` runs it with what the
wheel installs, with the extra `torch` and without.
"""

from __future__ import annotations

import json
import os
import pickle
import pkgutil
import sys
import tempfile
from pathlib import Path

import numpy as np

import rl_distributed as rd
from rl_distributed import checkpoint, errors, metrics, transfer
from rl_distributed.batch.arrays import to_numpy
from rl_distributed.batch.tensor_buffers import EncodedTensor, decode
from rl_distributed.collectives import process_group
from rl_distributed.extras import installed_torch
from rl_distributed.queues import BoundedQueue
from rl_distributed.testing import check_transfer

# Workers find their class here by module name.
sys.path.append(str(Path(__file__).parent))
LENGTHS = [3, 1, 4, 1, 5, 2, 2, 3]
DEADLINE_S = 120.0
HAS_TORCH = installed_torch() is not None


class Doubler:
    """A worker: a plain class that reads numpy columns."""

    def double(self, data):
        assert type(data["values"]) is kind()
        own = data.writable()
        own["values"] *= 2
        return own

    def has_torch(self):
        return "torch" in sys.modules


def kind():
    """Return the type of a numeric column here."""
    torch = installed_torch()
    return np.ndarray if torch is None else torch.Tensor


def sample():
    return rd.BatchedDataDict(
        values=np.arange(8, dtype=np.float32),
        ids=np.arange(40).reshape(8, 5),
        lengths=np.array(LENGTHS),
        flags=np.array([True, False] * 4),
        text=[f"row {row}" for row in range(8)],
    )


def same(one, other):
    assert list(one) == list(other)
    for key, column in one.items():
        assert type(column) is type(other[key]), key
        assert np.array_equal(column, other[key]), key


def check_imports():
    for name in rd.__all__:
        getattr(rd, name)
    # Only the wheel is available: every module must import.
    for found in pkgutil.walk_packages(rd.__path__, "rl_distributed."):
        try:
            __import__(found.name)
        except ModuleNotFoundError as error:
            # Installed by the extras `http` and `tls`, which are not requested here.
            if error.name not in ("aiohttp", "cryptography"):
                raise


def check_batches():
    batch = sample()
    assert all(type(batch[k]) is kind() for k in batch if k != "text")
    assert repr(batch).startswith("BatchedDataDict(values=float32[8], ids=int64[8, 5]")
    same(batch, pickle.loads(pickle.dumps(batch, protocol=5)))
    same(batch.to("cpu"), sample())
    assert batch.select_indices([6, 1])["values"].tolist() == [6, 1]
    assert batch.select_indices(batch["flags"])["values"].tolist() == [0, 2, 4, 6]
    twice = batch.repeat_interleave(2)
    assert twice["ids"].shape == (16, 5)
    assert twice["values"][:4].tolist() == [0, 0, 1, 1]
    narrow = rd.BatchedDataDict(ids=np.ones((2, 3), dtype=np.int64))
    ids = rd.BatchedDataDict(ids=batch["ids"])
    joined = rd.BatchedDataDict.from_batches([ids, narrow], {"ids": -1})
    assert joined["ids"][-1].tolist() == [1, 1, 1, -1, -1]
    cut = batch.copy()
    cut.truncate_tensors(1, 2)
    assert cut["ids"].shape == (8, 2)
    ids = to_numpy(batch["ids"])
    assert np.shares_memory(to_numpy(cut["ids"]), ids)
    assert not np.shares_memory(to_numpy(batch.clone()["ids"]), ids)
    for wrong in (np.array(["2020-01-01"], dtype="datetime64[D]"), np.float32(1)):
        refused(errors.BatchError, lambda wrong=wrong: rd.BatchedDataDict(a=wrong))


def check_read_only_arrays():
    frozen = np.arange(3)
    frozen.flags.writeable = False
    batch = rd.BatchedDataDict(a=frozen, b=[{"x": frozen}] * 3)
    assert batch["a"] is frozen
    own = batch.writable()
    for array in (own["a"], own["b"][2]["x"]):
        assert array.flags.writeable
        assert array.tolist() == [0, 1, 2]
    assert own.writable()["a"] is own["a"]


def check_sharding():
    batch = sample()
    shards = batch.shard_by_batch_size(2, batch_size=4)
    assert [s["values"].tolist() for s in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert shards[0].get_batch(1, 2)["text"] == ["row 4", "row 5"]
    packed, order = batch.shard_by_batch_size(
        2,
        sequence_packing_args={
            "max_tokens_per_microbatch": 8,
            "input_key": "ids",
            "input_lengths_key": "lengths",
            "algorithm": "modified_first_fit_decreasing",
            "sequence_length_pad_multiple": 1,
        },
    )
    for shard in packed:
        for part in shard.make_microbatch_iterator_for_packable_sequences():
            assert 0 < part["lengths"].sum() <= 8
    joined = rd.BatchedDataDict.from_batches(packed)
    joined.reorder_data(order)
    same(joined, rd.BatchedDataDict.from_batches([batch]))
    dynamic, _ = batch.shard_by_batch_size(
        2,
        dynamic_batching_args={
            "max_tokens_per_microbatch": 8,
            "sequence_length_round": 1,
            "input_key": "ids",
            "input_lengths_key": "lengths",
        },
    )
    for shard in dynamic:
        for part in shard.make_microbatch_iterator_with_dynamic_shapes():
            assert to_numpy(part["ids"]).size <= 8
            assert part["ids"].shape[1] >= part["lengths"].max()


def check_config_metrics_checkpoints(folder):
    class Run(rd.Config):
        lr: float = 0.1

    assert Run.from_dict({"lr": 0.5}, source="test").lr == 0.5
    refused(rd.ConfigError, lambda: Run.from_dict({"rl": 1}, source="test"))
    means = metrics.reduce_metrics([{"a": metrics.Mean(1.0)}, {"a": 3.0}])
    assert means["a"].value == 2.0
    config = checkpoint.CheckpointingConfig(checkpoint_dir=str(folder / "checkpoints"))
    manager = rd.CheckpointManager(config)
    place = manager.init_tmp_checkpoint(1, {"loss": 0.5})
    (Path(place) / "state.json").write_text("{}")
    manager.finalize_checkpoint(place)
    latest = manager.get_latest_checkpoint_path()
    assert (Path(latest) / "state.json").read_text() == "{}"


def check_workers():
    rd.init_ray(num_cpus=2)
    cluster = rd.RayVirtualCluster(bundle_ct_per_node_list=[2], use_gpus=False)
    group = rd.RayWorkerGroup(
        cluster,
        rd.RayWorkerBuilder("numpy_or_torch.Doubler"),
        sharding_annotations=rd.NamedSharding([[0, 1]], ["replica", "data"]),
    )
    shards = sample().shard_by_batch_size(2)
    future = group.run_all_workers_sharded_data(
        "double", data=shards, in_sharded_axes=["data"]
    )
    results = rd.BatchedDataDict.from_batches(group.get_all_worker_results(future))
    assert results["values"].tolist() == [2.0 * row for row in range(8)]
    loaded = group.run_all_workers_single_data("has_torch")
    assert group.get_all_worker_results(loaded) == [HAS_TORCH] * 2
    queue = BoundedQueue.create(2)
    queue.put(sample(), deadline_s=DEADLINE_S)
    same(queue.get(deadline_s=DEADLINE_S), sample())
    group.shutdown()
    cluster.shutdown()
    rd.shutdown_ray()


def check_what_needs_torch():
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost")
    os.environ.update(MASTER_PORT="1")
    bf16 = EncodedTensor(np.zeros(2, dtype=np.int16), "bfloat16")
    for what, call in (
        ("BatchedDataDict.all_gather", lambda: sample().all_gather()),
        ("moving columns to the device 'cuda'", lambda: sample().to("cuda")),
        ("a tensor of bfloat16, a dtype that numpy lacks,", lambda: decode(bf16)),
        ("process_group", lambda: process_group("gloo").__enter__()),
        ("FileLink.sender", lambda: transfer.FileLink("unused").sender()),
        ("CudaIpcLink", lambda: transfer.CudaIpcLink.create().sender()),
        ("CollectiveLink.sender", lambda: transfer.CollectiveLink.local().sender()),
        ("check_transfer", lambda: check_transfer(transfer.SharedMemoryLink.create)),
    ):
        said = refused(errors.MissingExtraError, call)
        assert said.startswith(f"{what} needs the package torch, which cannot be"), said
        assert said.endswith("pip install 'rl-distributed[torch]'"), said


def refused(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


if __name__ == "__main__":
    check_imports()
    check_batches()
    check_sharding()
    if not HAS_TORCH:
        check_read_only_arrays()
        check_what_needs_torch()
    with tempfile.TemporaryDirectory() as made:
        check_config_metrics_checkpoints(Path(made))
    check_workers()
    sys.stdout.write(json.dumps({"torch": "torch" in sys.modules}) + "\n")
