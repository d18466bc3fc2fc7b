"""Every form of dispatch on a grid of workers, here plain objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rl_distributed.errors import (
    ConfigError,
    ShardingError,
    WorkerError,
    WorkerMethodError,
)
from rl_distributed.named_sharding import NamedSharding
from rl_distributed.workers.calls import CallSender
from rl_distributed.workers.group import RayWorkerGroup
from rl_distributed.workers.policy import FailFast, RestartWorker

SIZES = {"stage": 2, "data": 2, "tensor": 2}
GRID = NamedSharding(np.arange(8).reshape(2, 2, 2), list(SIZES))


class Method:
    """Records what one worker was sent."""

    def __init__(self, rank: int, how: str, sent: list[Any]) -> None:
        self.rank, self.how, self.sent = rank, how, sent

    def remote(self, first: Any, context: Any = None, **kwargs: Any) -> str:
        method, arguments = first, kwargs
        if self.how == "packed":
            method, arguments, _ = first
        self.sent.append((self.rank, self.how, method, dict(arguments)))
        return f"reference {len(self.sent)} of worker {self.rank}"


class Group(RayWorkerGroup):
    def __init__(self, sharding=GRID, size=8, policy=None):
        self.sent: list[Any] = []
        self.name = "fake"
        self.sharding_annotations = sharding
        self.supervisor = SimpleNamespace(incident=None, policy=policy or FailFast())
        self._workers = [
            SimpleNamespace(
                incarnation=0,
                handle=SimpleNamespace(
                    call=Method(rank, "plain", self.sent),
                    call_packed=Method(rank, "packed", self.sent),
                    stream=Method(rank, "stream", self.sent),
                ),
            )
            for rank in range(size)
        ]
        description = SimpleNamespace(
            methods=frozenset({"step", "items"}),
            generator_methods=frozenset({"items"}),
            has_dynamic_methods=False,
        )
        self._sender = CallSender(
            self.name, self._workers, description, self.supervisor, sharding
        )

    def arguments(self) -> dict[int, dict[str, Any]]:
        return {rank: arguments for rank, _, _, arguments in self.sent}


def coords(rank):
    return GRID.get_worker_coords(rank)


def test_shard_replicate_and_free_axes_together():
    group = Group()
    future = group.run_all_workers_sharded_data(
        "step",
        row=[10, 20],
        in_sharded_axes=["data"],
        replicate_on_axes=["tensor"],
        output_is_replicated=["tensor"],
        common_kwargs={"scale": 2},
    )
    # stage is free: only coordinate 0 is called.
    assert group.arguments() == {
        0: {"row": 10, "scale": 2},
        1: {"row": 10, "scale": 2},
        2: {"row": 20, "scale": 2},
        3: {"row": 20, "scale": 2},
    }
    assert future.called_workers == [0, 1, 2, 3]
    assert future.return_from_workers == [0, 2]


def test_dummy_calls_on_free_axes():
    group = Group()
    future = group.run_all_workers_sharded_data(
        "step",
        row=[10, 20],
        in_sharded_axes=["data"],
        replicate_on_axes=["tensor"],
        make_dummy_calls_to_free_axes=True,
        common_kwargs={"scale": 2},
    )
    sent = group.arguments()
    assert {rank: sent[rank]["row"] for rank in range(8)} == {
        **{0: 10, 1: 10, 2: 20, 3: 20},
        **dict.fromkeys(range(4, 8)),
    }
    assert all(arguments["scale"] == 2 for arguments in sent.values())
    assert future.called_workers == list(range(8))
    assert future.return_from_workers == [0, 1, 2, 3]


@given(
    kinds=st.tuples(*[st.sampled_from("srf")] * 3),
    order=st.permutations(list(SIZES)),
    dummies=st.booleans(),
)
def test_every_worker_gets_the_item_at_its_coordinates(kinds, order, dummies):
    kind = dict(zip(SIZES, kinds, strict=True))
    split = [axis for axis in order if kind[axis] == "s"]
    group = Group()
    shape = [SIZES[axis] for axis in split]
    rows = np.arange(int(np.prod(shape))).reshape(shape).tolist() if split else 5
    group.run_all_workers_sharded_data(
        "step",
        row=rows,
        in_sharded_axes=split,
        replicate_on_axes=[axis for axis in order if kind[axis] == "r"],
        make_dummy_calls_to_free_axes=dummies,
    )
    sent = group.arguments()
    for rank in range(8):
        at = coords(rank)
        if any(kind[axis] == "f" and at[axis] for axis in SIZES):
            assert sent.get(rank) == ({"row": None} if dummies else None)
            continue
        expected = rows
        for axis in split:
            expected = expected[at[axis]]
        assert sent[rank] == {"row": expected}


def test_calls_of_coordinate_zero_only():
    group = Group()
    group.run_all_workers_single_data(
        "step", run_rank_0_only_axes=["tensor", "stage"], row=1
    )
    assert group.arguments() == {0: {"row": 1}, 2: {"row": 1}}
    group = Group()
    group.run_all_workers_multiple_data(
        "step", run_rank_0_only_axes=["data"], row=[1, 2, 3, 4]
    )
    assert group.arguments() == {
        rank: {"row": row} for row, rank in enumerate([0, 1, 4, 5], start=1)
    }


def test_generator_methods_are_streamed():
    group = Group()
    group.run_all_workers_single_data("items", size=2)
    assert {how for _, how, _, _ in group.sent} == {"stream"}
    references = group.run_all_workers_single_data("step", size=2)
    assert {how for _, how, _, _ in group.sent[8:]} == {"packed"}
    assert references == [f"reference {9 + rank} of worker {rank}" for rank in range(8)]
    assert references.method_name == "step"


def test_only_calls_that_may_be_repeated_keep_their_arguments():
    group = Group(policy=RestartWorker(retry_calls=["step"]))
    references = group.run_all_workers_multiple_data("step", row=list(range(8)))
    references.repeat(3)
    assert group.sent[-1] == (3, "packed", "step", {"row": 3})
    assert group.run_all_workers_single_data("items").repeat is None
    assert Group().run_all_workers_single_data("step").repeat is None


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda g: g.run_all_workers_single_data("stop"), WorkerMethodError, "step"),
        (
            lambda g: g.run_all_workers_sharded_data(
                "step", in_sharded_axes=["data"], row=[1]
            ),
            ShardingError,
            "2 coordinates",
        ),
        (
            lambda g: g.run_all_workers_single_data("step", call_deadline_s=0),
            ConfigError,
            "call_deadline_s must be positive: got 0",
        ),
        (
            lambda g: g.run_single_worker_single_data("step", 8),
            IndexError,
            "workers 0 to 7: got worker_idx 8",
        ),
    ],
)
def test_wrong_calls_send_nothing(call, error, words):
    group = Group()
    with pytest.raises(error, match=words):
        call(group)
    assert group.sent == []


def test_group_that_is_gone_or_has_no_axes():
    with pytest.raises(WorkerError, match="was shut down"):
        Group(size=0, sharding=None).run_all_workers_single_data("step")
    with pytest.raises(ShardingError, match="without sharding_annotations"):
        Group(sharding=None).run_all_workers_sharded_data("step")
