import dataclasses
import pickle

import numpy as np
import pytest
import torch

from rl_models.errors import WeightSyncError
from rl_models.weights.loading import load_bundle
from rl_models.weights.manifest import WeightBundle


def tensors():
    return [
        ("a.weight", torch.randn(3, 4)),
        ("b.weight", torch.randn(5).to(torch.bfloat16)),
        ("c.scale", torch.tensor(2.0)),
        ("empty", torch.empty(0, 3)),
    ]


def test_round_trip_through_pickle_keeps_every_bit():
    sent = tensors()
    bundle = pickle.loads(pickle.dumps(WeightBundle.pack(sent, 4)))
    bundle.verify()
    got = dict(bundle.tensors())
    assert bundle.version == 4
    assert bundle.num_bytes == 13 * 4 + 5 * 2
    for name, tensor in sent:
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


def test_read_only_buffers_can_be_read():
    bundle = WeightBundle.pack(tensors())
    for buffer in bundle.buffers.values():
        buffer.setflags(write=False)
    bundle.verify()
    assert len(dict(bundle.tensors())) == 4


@pytest.mark.parametrize("damage", ["flip", "truncate", "missing"])
def test_damage_is_found_and_named(damage):
    bundle = WeightBundle.pack(tensors(), 2)
    buffers = dict(bundle.buffers)
    if damage == "flip":
        buffers["bfloat16"] = buffers["bfloat16"].copy()
        buffers["bfloat16"][2] ^= 1
    elif damage == "truncate":
        buffers["bfloat16"] = buffers["bfloat16"][:-1]
    else:
        del buffers["bfloat16"]
    broken = dataclasses.replace(bundle, buffers=buffers)
    with pytest.raises(WeightSyncError, match=r"version 2 .*replica 3.*b\.weight"):
        broken.verify("replica 3")


def test_digest_follows_the_content():
    first, second = tensors(), tensors()
    assert WeightBundle.pack(first).digest == WeightBundle.pack(first).digest
    assert WeightBundle.pack(first).digest != WeightBundle.pack(second).digest


def make_model():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, False))
    model[1].weight = model[0].weight
    return model


def test_tied_weights_need_one_name():
    model, value = make_model(), torch.randn(4, 3)
    load_bundle(model, WeightBundle.pack([("0.weight", value)]), 1, "replica 0")
    assert torch.equal(model[1].weight, value)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([], "0.weight is missing"),
        ([("0.weight", torch.zeros(4, 3)), ("x", torch.zeros(1))], "x is unknown"),
        ([("0.weight", torch.zeros(3, 4))], r"0.weight has shape \(3, 4\) instead"),
    ],
)
def test_another_model_is_refused_and_nothing_is_loaded(sent, message):
    model = make_model()
    before = model[0].weight.detach().clone()
    with pytest.raises(WeightSyncError, match=f"replica 1.*{message}"):
        load_bundle(model, WeightBundle.pack(sent), 1, "replica 1")
    assert torch.equal(model[0].weight, before)


def test_another_version_is_refused():
    bundle = WeightBundle.pack([("0.weight", torch.zeros(4, 3))], version=7)
    with pytest.raises(WeightSyncError, match="told to load weights of version 8"):
        load_bundle(make_model(), bundle, 8, "replica 0")


def test_packing_moves_many_types():
    sent = [
        (str(dtype), torch.arange(6).to(dtype))
        for dtype in (torch.float16, torch.int64, torch.float8_e4m3fn)
    ]
    got = dict(WeightBundle.pack(sent).tensors())
    for name, tensor in sent:
        assert np.array_equal(got[name].float().numpy(), tensor.float().numpy())
