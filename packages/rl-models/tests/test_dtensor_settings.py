"""Settings of the section `policy.dtensor` that must not change results."""

from __future__ import annotations

import os
import socket

import pytest
import ray
import torch

from rl_distributed.errors import ConfigError
from rl_models.config import PolicyConfig
from rl_models.training.dtensor import DTensorTrainingBackend

COMPILED = {"compile": "aot_eager"}
BY_LAYERS = {"shard_layers": True, "reshard_after_forward": True}
WAYS = {
    "plain": ({}, BY_LAYERS),
    "reduced": ({}, {**BY_LAYERS, "reduce_each_micro_batch": True}),
    "compiled": ({}, {**BY_LAYERS, **COMPILED}),
    "tensor": ({"tensor": 2}, {}),
    "compiled tensor": ({"tensor": 2}, COMPILED),
}


def _config(model, parallelism, dtensor):
    return PolicyConfig(
        model_name=str(model),
        max_total_sequence_length=64,
        max_grad_norm=None,
        optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}},
        parallelism=parallelism,
        dtensor=dtensor,
    )


@pytest.fixture(scope="module")
def ranks(ray_cluster, tiny_model, make_batch, nll_loss):
    """Return a step's changes in each of `WAYS`, and gradients held before its end."""

    def steps(rank, port, configs, data, loss_fn):
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        found = {}
        for way, config in configs.items():
            backend = DTensorTrainingBackend()
            backend.setup(config)
            held = []

            def watched(batch, *arguments, model=backend.model, held=held, **inputs):
                # Those of the previous micro-batch.
                held.append(sum(p.grad is not None for p in model.parameters.values()))
                return loss_fn(batch, *arguments, **inputs)

            watched.loss_type, watched.input_type = (
                loss_fn.loss_type,
                loss_fn.input_type,
            )
            whole = config["parallelism"]["tensor"] == 2
            rows = data if whole else data.slice(rank * 6, rank * 6 + 6)
            before = {n: v.clone() for n, v in backend.model.full_tensors()}
            result = backend.train_step(
                rows, watched, global_batch_size=12, micro_batch_size=6 if whole else 3
            )
            moved = {n: before[n] - v for n, v in backend.model.full_tensors()}
            found[way] = result["loss"], moved, held
        backend.shutdown()
        return found

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    task = ray.remote(num_cpus=1)(steps)
    configs = {
        way: _config(tiny_model, *settings).to_dict() for way, settings in WAYS.items()
    }
    calls = [task.remote(r, port, configs, make_batch(), nll_loss) for r in range(2)]
    return ray.get(calls, timeout=240)


def _assert_equal(got, expected):
    torch.testing.assert_close(got[0], expected[0], atol=1e-6, rtol=1e-6)
    for name, wanted in expected[1].items():
        largest = wanted.abs().max()
        assert (got[1][name] - wanted).abs().max() <= 1e-5 * largest, name


@pytest.mark.parametrize("way", ["reduced", "compiled", "compiled tensor"])
def test_the_step_is_the_same(ranks, way):
    for found in ranks:
        plain = found["tensor" if "tensor" in way else "plain"]
        _assert_equal(found[way], plain)


def test_shards_of_gradients_are_held_between_micro_batches(ranks):
    for found in ranks:
        assert found["plain"][2] == [0, 0]
        number = len(found["reduced"][1])
        assert found["reduced"][2] == [0, number]


# Torch's own, when it inspects a layer's inputs and calls.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_gives_the_same_loss(tiny_model, make_batch, nll_loss):
    losses = []
    for dtensor in ({}, COMPILED):
        backend = DTensorTrainingBackend()
        backend.setup(_config(tiny_model, {}, dtensor).to_dict())
        steps = [
            backend.train_step(
                make_batch(seed=seed),
                nll_loss,
                global_batch_size=12,
                micro_batch_size=6,
            )["loss"]
            for seed in range(3)
        ]
        losses.append(torch.cat(steps))
        layers = backend.model.module.model.layers
        assert all(layer._compiled_call_impl is not None for layer in layers) == bool(
            dtensor
        )
    torch.testing.assert_close(losses[1], losses[0], atol=1e-6, rtol=1e-6)


def test_an_unknown_compiler_is_refused(tiny_model):
    config = _config(tiny_model, {}, {"compile": "inducto"})
    with pytest.raises(ConfigError, match=r"dtensor\.compile .*inducto.* inductor"):
        DTensorTrainingBackend.check_config(config)
