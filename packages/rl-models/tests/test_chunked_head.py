"""Log-probs computed in chunks, against those from all logits at once."""

from __future__ import annotations

import os
import socket

import pytest
import ray
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
)

from rl_models import logit_chunks
from rl_models.config import PolicyConfig
from rl_models.errors import UnsupportedModelError
from rl_models.logit_chunks import logit_chunk_size
from rl_models.training.dtensor import DTensorTrainingBackend

VOCABULARY = 30
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
FAMILIES = {
    "tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "untied": (LlamaConfig, {"tie_word_embeddings": False}),
    "capped": (Gemma2Config, {"final_logit_softcapping": 2.0}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    config_class, settings = FAMILIES[request.param]
    return _save(tmp_path_factory.mktemp("chunked"), config_class, **settings)


def _save(folder, config_class, **settings):
    torch.manual_seed(0)
    config = config_class(**SIZES, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _backend(model, chunk_size, **settings):
    config = PolicyConfig(
        model_name=str(model),
        max_total_sequence_length=64,
        max_grad_norm=None,
        optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}},
        dtensor={"logprob_chunk_size": chunk_size},
        **settings,
    )
    backend = DTensorTrainingBackend()
    backend.setup(config.to_dict())
    return backend


def _step(backend, data, loss_fn, micro_batch_size=12):
    """Return log-probs before a step of SGD, its loss, and its parameter changes."""
    before = {n: p.detach().clone() for n, p in backend.model.parameters.items()}
    logprobs = backend.get_logprobs(data, micro_batch_size=micro_batch_size)
    result = backend.train_step(
        data, loss_fn, global_batch_size=data.size, micro_batch_size=micro_batch_size
    )
    moved = {n: before[n] - p.detach() for n, p in backend.model.parameters.items()}
    return logprobs, result["loss"], moved


def _assert_equal(got, expected):
    for (name, value), wanted in zip(got.items(), expected.values(), strict=True):
        largest = wanted.abs().max()
        assert largest > 0, name
        assert (value - wanted).abs().max() <= 1e-5 * largest, name


class Widest(TorchDispatchMode):
    """Tracks the most rows of a tensor whose last dimension is the vocabulary."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.shape[-1:] == (VOCABULARY,):
                self.rows = max(self.rows, leaf.numel() // VOCABULARY)
        return result


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_all_logits(
    model, make_batch, nll_loss, temperature
):
    data = make_batch()
    settings = {"generation": {"max_new_tokens": 4, "temperature": temperature}}
    expected = _step(_backend(model, 0, **settings), data, nll_loss)
    chunked = _backend(model, 7, **settings)
    with Widest() as widest:
        got = _step(chunked, data, nll_loss)
    assert widest.rows <= max(7, SIZES["hidden_size"])
    torch.testing.assert_close(got[0], expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got[1], expected[1], atol=1e-6, rtol=1e-6)
    _assert_equal(got[2], expected[2])


def test_packed_rows_and_half_precision(tmp_path, make_batch, nll_loss):
    model = _save(tmp_path, Qwen2Config, tie_word_embeddings=True)
    data = make_batch()
    packing = {
        "sequence_packing": {"train_mb_tokens": 64},
        "precision": "bfloat16",
    }
    expected = _step(_backend(model, 0, **packing), data, nll_loss)
    got = _step(_backend(model, 7, **packing), data, nll_loss)
    # The products are the same; the rest is float32 with different rounding.
    torch.testing.assert_close(got[0], expected[0], atol=2e-6, rtol=0)
    for name, value in expected[2].items():
        assert (got[2][name] - value).abs().max() <= 2e-2 * value.abs().max(), name


def test_a_head_that_is_not_known(tmp_path, make_batch, nll_loss, monkeypatch, caplog):
    model = _save(tmp_path, GraniteConfig, logits_scaling=3.0)
    data = make_batch()
    expected = _step(_backend(model, 0), data, nll_loss)
    with pytest.raises(UnsupportedModelError, match=r"logprob_chunk_size .* to 0"):
        _backend(model, 7).get_logprobs(data, micro_batch_size=12)
    monkeypatch.setattr(logit_chunks, "_KEPT_BYTES", 0)
    got = _step(_backend(model, None), data, nll_loss)
    assert "logits are computed all at once" in caplog.text
    torch.testing.assert_close(got[0], expected[0], atol=1e-6, rtol=1e-6)
    _assert_equal(got[2], expected[2])


def test_chunks_by_memory():
    vocabulary = 152_000
    for on_gpu, limit in ((False, 64 * 1024**2), (True, 1024**3)):
        assert logit_chunk_size(None, 1024, vocabulary, on_gpu=on_gpu) is None
        size = logit_chunk_size(None, 4096, vocabulary, on_gpu=on_gpu)
        assert 0.5 * limit < size * vocabulary * 4 <= limit
        assert logit_chunk_size(0, 10**6, vocabulary, on_gpu=on_gpu) is None
        assert logit_chunk_size(5, 1, vocabulary, on_gpu=on_gpu) == 5


def test_the_gradient_of_packed_logits_is_not_copied(tiny_model, make_batch):
    from rl_models.training.dtensor.forward import needed_logits  # noqa: PLC0415

    data = make_batch()
    backend = _backend(tiny_model, 0)
    module, seen = backend.model.module, []

    def watch(layer, args, output):
        output.register_hook(lambda gradient: seen.append(gradient.data_ptr()))

    module.lm_head.register_forward_hook(watch)
    needed = data["token_mask"][:, 1:] != 0
    _, logits = needed_logits(backend.model, data["input_ids"], needed)
    gradient = torch.ones_like(logits)
    logits.backward(gradient)
    assert seen == [gradient.data_ptr()]


WAYS = {
    "fsdp": {"dtensor": {"shard_layers": True, "reshard_after_forward": True}},
    "tensor": {"parallelism": {"tensor": 2, "sequence": True}},
    "context": {"parallelism": {"context": 2}},
}


@pytest.fixture(scope="module")
def ranks(ray_cluster, make_batch, nll_loss, tmp_path_factory):
    """Return the results of two ranks in each of `WAYS`, in chunks and at once."""
    folder = _save(tmp_path_factory.mktemp("ranks"), Qwen2Config)

    def steps(rank, port, folder, ways, data, loss_fn):
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        found = {}
        for way, settings in ways.items():
            for chunk_size in (0, 3):
                dtensor = settings.get("dtensor", {})
                config = PolicyConfig(
                    model_name=folder,
                    max_total_sequence_length=64,
                    max_grad_norm=None,
                    optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}},
                    **{
                        **settings,
                        "dtensor": {**dtensor, "logprob_chunk_size": chunk_size},
                    },
                )
                backend = DTensorTrainingBackend()
                backend.setup(config.to_dict())
                rows = data.slice(rank * 6, rank * 6 + 6) if way == "fsdp" else data
                before = {n: v.clone() for n, v in backend.model.full_tensors()}
                logprobs = backend.get_logprobs(rows, micro_batch_size=12)
                backend.train_step(
                    rows, loss_fn, global_batch_size=12, micro_batch_size=3
                )
                moved = {n: before[n] - v for n, v in backend.model.full_tensors()}
                found[way, chunk_size] = logprobs, moved
        backend.shutdown()
        return found

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    task = ray.remote(num_cpus=1)(steps)
    arguments = (port, str(folder), WAYS, make_batch(), nll_loss)
    return ray.get([task.remote(r, *arguments) for r in range(2)], timeout=240)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_share_the_head(ranks, way):
    for found in ranks:
        expected, got = found[way, 0], found[way, 3]
        torch.testing.assert_close(got[0], expected[0], atol=1e-6, rtol=1e-6)
        _assert_equal(got[1], expected[1])
