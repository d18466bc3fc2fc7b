"""Layouts as arithmetic, and those rejected before a worker starts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from rl_distributed.errors import ConfigError
from rl_models.config import PolicyConfig
from rl_models.parallelism import ParallelismConfig, check_axes, check_model_divides
from rl_models.policy.preflight import check_policy


@given(*(st.integers(1, 4) for _ in range(4)), st.booleans())
def test_the_grid_has_every_worker_once(data, tensor, context, pipeline, by_stage):
    layout = ParallelismConfig(tensor=tensor, context=context, pipeline=pipeline)
    num_workers = data * tensor * context * pipeline
    assert layout.data_size(num_workers) == data
    grid = layout.sharding(num_workers, stages_outermost=by_stage)
    assert sorted(grid.layout.ravel()) == list(range(num_workers))
    assert grid.names[0] == "data_parallel"
    assert grid.get_axis_size("data_parallel") == data
    sizes = {"pipeline": pipeline, "context": context, "tensor": tensor}
    large = {f"{name}_parallel": n for name, n in sizes.items() if n > 1}
    assert {name: grid.shape[name] for name in grid.names[1:]} == large
    if pipeline > 1:
        apart = num_workers // pipeline if by_stage else context * tensor
        places = [grid.get_worker_coords(n)["pipeline_parallel"] for n in (0, apart)]
        assert places == [0, 1]
    if tensor > 1:
        # Ranks that share a layer communicate most: they are neighbours.
        coords = [grid.get_worker_coords(rank) for rank in range(tensor)]
        assert [at["tensor_parallel"] for at in coords] == list(range(tensor))


@pytest.mark.parametrize(
    ("settings", "num_workers", "message"),
    [
        ({"tensor": 2}, 3, r"\(tensor 2\) needs a multiple of 2 workers: got 3; use 2"),
        ({"tensor": 4}, 2, r"multiple of 4 workers: got 2; use 4 workers"),
        ({"tensor": 2, "data": 3}, 4, r"data must be 2.*got 3.*use 6 workers"),
        ({"data": 3}, 4, r"data must be 4, the workers that one copy of the model"),
    ],
)
def test_a_layout_that_does_not_fit_the_workers(settings, num_workers, message):
    with pytest.raises(ConfigError, match=message):
        ParallelismConfig(**settings).data_size(num_workers)


def test_sequence_needs_workers_that_share_the_tokens():
    with pytest.raises(ConfigError, match="sequence needs tensor > 1"):
        ParallelismConfig(sequence=True)


def test_axes_that_a_backend_does_not_have():
    check_axes(ParallelismConfig(tensor=2), ("tensor",), "dtensor")
    for name in ("pipeline", "context", "expert"):
        layout = ParallelismConfig(**{name: 2})
        match = rf"parallelism\.{name} must be 1 .*'dtensor', which has data, tensor"
        with pytest.raises(ConfigError, match=match):
            check_axes(layout, ("tensor",), "dtensor")


@pytest.mark.parametrize(
    ("layout", "model", "message"),
    [
        (
            {"tensor": 3},
            {"num_attention_heads": 8, "num_key_value_heads": 4},
            r"tensor must divide what m has \(8 attention heads, 4 key-value heads\): "
            r"got 3; use 2 or 4",
        ),
        ({"pipeline": 5}, {"num_hidden_layers": 4}, r"4 layers\): got 5; use 2 or 4"),
        (
            {"context": 3, "tensor": 2},
            {"num_attention_heads": 8},
            r"context must divide what m has \(8 attention heads, 4 for each of 2 "
            r"tensor\): got 3; use 2 or 4",
        ),
        ({"expert": 3}, {"num_local_experts": 8}, r"8 experts\): got 3; use 2 or 4"),
        (
            {"tensor": 2},
            {"text_config": {"num_attention_heads": 3}},
            r"3 attention heads\): got 2; use 1 or 3",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_so(layout, model, message):
    with pytest.raises(ConfigError, match=message):
        check_model_divides(ParallelismConfig(**layout), model, "m")
    check_model_divides(ParallelismConfig(), model, "m")


@pytest.mark.parametrize(
    ("settings", "num_workers", "message"),
    [
        ({"parallelism": {"tensor": 8}}, 8, "use 1 or 2"),
        (
            {"parallelism": {"pipeline": 3}},
            3,
            r"pipeline must divide .* \(2 layers\): got 3; use 1 or 2",
        ),
        (
            {"parallelism": {"pipeline": 2, "context": 2}},
            4,
            r"context must be 1 with policy\.parallelism\.pipeline 2 .*: got 2; set "
            r"one of the two to 1",
        ),
        (
            {
                "parallelism": {"pipeline": 2},
                "dtensor": {"router_loss_weight": 0.5},
            },
            2,
            r"router_loss_weight must be 0 with policy\.parallelism\.pipeline 2 .*: "
            r"got 0\.5",
        ),
        (
            {"parallelism": {"context": 3}},
            3,
            r"\(4 attention heads\): got 3; use 2 or 4",
        ),
        ({"parallelism": {"tensor": 2}}, 3, "multiple of 2 workers"),
        ({"dtensor": {"data_replicas": 3}}, 4, "data_replicas must divide"),
        (
            {"parallelism": {"tensor": 2}, "train_global_batch_size": 3},
            4,
            "multiple of data-parallel size: got 3 with 2 ranks",
        ),
        (
            {
                "parallelism": {"tensor": 2},
                "optimizer": {"name": "torch.optim.Muon", "kwargs": {"lr": 0.1}},
            },
            2,
            "elementwise",
        ),
        (
            {
                "backend": "megatron",
                "parallelism": {"tensor": 2},
                "optimizer": {"name": "torch.optim.Muon", "kwargs": {"lr": 0.1}},
            },
            2,
            "elementwise",
        ),
        (
            {"backend": "megatron", "parallelism": {"pipeline": 3}},
            3,
            r"pipeline must divide .* \(2 layers\): got 3; use 1 or 2",
        ),
    ],
)
def test_a_policy_is_refused_before_a_worker_starts(
    tiny_model, settings, num_workers, message
):
    shape = json.loads((tiny_model / "config.json").read_text())
    assert shape["num_key_value_heads"] == 2
    config = PolicyConfig(
        model_name=str(tiny_model), max_total_sequence_length=32, **settings
    )
    with pytest.raises(ConfigError, match=message):
        check_policy(config, num_workers)
