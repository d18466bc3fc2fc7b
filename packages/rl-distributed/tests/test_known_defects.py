"""Defects that other projects have shipped, and the tests that find them.

| defect | tested in |
|---|---|
| dynamic batching of several global batches restores a wrong order | batches |
| dynamic batching fails where shards are uneven | batches |
| a slice past the end silently truncates lists | batches |
| a chunk number is compared with the wrong quantity | batches |
| axes of one name, negative or repeated ranks are accepted | named sharding |
| the caller's whole environment goes to workers, and into saved settings | workers |
| an environment is used before it is complete | actor environments |
| marking an iteration before the start is an UnboundLocalError | timing |
| a checkpoint counts as saved before its files are | checkpoint |
| tracked files and changes are uploaded without consent | metrics sinks |
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOUND_BY = [
    "test_batched_data_dict.py::test_dynamic_batching_restores_the_order_with_any_batch_size",
    "test_batched_data_dict.py::test_dynamic_batching_works_with_uneven_shards",
    "test_batched_data_dict.py::test_slices_never_truncate_silently",
    "test_batched_data_dict.py::test_chunks",
    "test_named_sharding.py::test_a_wrong_layout_is_refused",
    "test_workers_group.py::test_class_object_and_caller_environment",
    "test_actor_environments_store.py::test_many_processes_at_once_build_once",
    "test_timing.py::test_the_reserve_is_one_mean_iteration",
    "test_checkpoint.py::test_finalization_in_the_background",
    "test_metrics_sinks.py::test_wandb_keeps_the_contract_and_writes_an_offline_run",
]


@pytest.mark.parametrize("test", FOUND_BY)
def test_every_defect_has_its_test(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((Path(__file__).parent / file).read_text())
    assert name in {node.name for node in tree.body if hasattr(node, "name")}


def test_the_table_lists_them_all() -> None:
    rows = [line for line in (__doc__ or "").splitlines() if line.startswith("| ")]
    assert len(rows) - 1 == len(FOUND_BY)
