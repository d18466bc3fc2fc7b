"""The probe detects faults of a real vLLM engine that digests cannot see."""

from __future__ import annotations

import re
from contextlib import contextmanager

import pytest
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.transfer import Manifest, TensorEntry, digest_of
from rl_distributed.transfer.manifest import dtype_name
from rl_models.config import PolicyConfig
from rl_models.errors import WeightSyncError
from rl_models.generation.config import GenerationConfig
from rl_models.testing import TokenCrossEntropy
from rl_models.training.dtensor import DTensorTrainingBackend
from rl_models.weights.config import ProbeConfig
from rl_models.weights.probe import Probe

pytestmark = pytest.mark.slow


class Trainer:
    def __init__(self, folder):
        self.config = PolicyConfig(
            model_name=str(folder),
            max_total_sequence_length=256,
            optimizer={"kwargs": {"lr": 1e-2}},
        )
        self.backend = DTensorTrainingBackend()
        self.backend.setup(self.config.to_dict())

    def get_logprobs(self, rows):
        return {"logprobs": self.backend.get_logprobs(rows, micro_batch_size=4)}

    def weights(self):
        pairs = self.backend.export_weights("float32")
        return [(name, value.detach().clone()) for name, value in pairs]

    def learn(self):
        mask = torch.ones(4, 12)
        mask[:, 0] = 0
        rows = BatchedDataDict(
            input_ids=torch.randint(3, 13, (4, 12)),
            input_lengths=torch.full((4,), 12),
            token_mask=mask,
            sample_mask=torch.ones(4),
        )
        self.backend.train_step(
            rows, TokenCrossEntropy(), global_batch_size=4, micro_batch_size=4
        )


class Engine:
    """The session's engine as the only replica."""

    config = GenerationConfig(max_new_tokens=24)

    def __init__(self, run):
        self.run = run
        self.refusal = ""
        self.version = 100

    def generate_on_each(self, rows, sampling):
        def work(backend, rows, sampling):
            return backend.generate(rows, sampling=sampling)

        return {0: self.run(work, rows, sampling)}

    def load(self, weights):
        def work(backend, weights, version):
            backend.load_weights(iter(weights), version)

        self.version += 1
        self.sent = weights
        self.run(work, weights, self.version)

    def changed_weights(self, replica):
        def work(backend, manifest):
            return backend.changed_weights(manifest)

        entries = (
            TensorEntry(
                name, dtype_name(value.dtype), tuple(value.shape), digest(value)
            )
            for name, value in self.sent
        )
        return self.run(work, Manifest(tuple(entries)))

    def refuse(self, reason):
        self.refusal = reason


def digest(tensor):
    return digest_of(tensor.contiguous().view(-1).view(torch.uint8))


@contextmanager
def loading_otherwise(engine, old=(), swapped=None):
    """Make the engine load old values of some tensors, and others at wrong places."""

    def patch(backend, old, swapped):
        def load_weights(tensors, version):
            renamed = ((swapped.get(name, name), value) for name, value in tensors)
            mixed = ((name, old.get(name, value)) for name, value in renamed)
            return type(backend).load_weights(backend, mixed, version)

        backend.load_weights = load_weights

    def restore(backend):
        del backend.load_weights

    engine.run(patch, dict(old), {**(swapped or {})})
    try:
        yield
    finally:
        engine.run(restore)


@pytest.fixture
def both(vllm_engine, vllm_folder):
    """The trainer, the engine with its weights, and a probe that has run on them."""
    trainer, engine = Trainer(vllm_folder), Engine(vllm_engine)
    engine.load(trainer.weights())
    probe = Probe(ProbeConfig(), trainer, engine)
    probe.check(1)
    trainer.learn()
    return trainer, engine, probe


def test_updates_pass_the_probe(both):
    trainer, engine, probe = both
    engine.load(trainer.weights())
    probe.check(2)
    assert engine.refusal == ""


def test_weights_that_were_not_loaded(both):
    trainer, engine, probe = both
    with loading_otherwise(engine, old=engine.sent):
        engine.load(trainer.weights())
        with pytest.raises(
            WeightSyncError,
            match=r"replica 0 does not compute.*of version 2.*other values of "
            r"model\.embed_tokens\.weight, (\S+, ){4}\.\.\.",
        ):
            probe.check(2)
    assert "replica 0" in engine.refusal
    engine.load(trainer.weights())
    probe.check(3)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
    ],
)
def test_a_tensor_that_the_engine_drops_is_named(both, name):
    trainer, engine, probe = both
    old = [(each, value) for each, value in engine.sent if each == name]
    with loading_otherwise(engine, old=old):
        engine.load(trainer.weights())
        assert engine.changed_weights(0) == [name]
        with pytest.raises(WeightSyncError, match=f"other values of {re.escape(name)}"):
            probe.check(2)


@pytest.mark.parametrize(
    "names",
    [
        [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1)],
        [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")],
    ],
)
def test_tensors_that_the_engine_swaps_are_named(both, names):
    trainer, engine, probe = both
    with loading_otherwise(engine, swapped=dict(zip(names, names[::-1], strict=True))):
        engine.load(trainer.weights())
        with pytest.raises(WeightSyncError) as caught:
            probe.check(2)
    assert f"it holds other values of {', '.join(names)}." in str(caught.value)


def test_a_prefix_cache_that_was_not_reset(both):
    trainer, engine, probe = both

    def keep_cache(backend):
        backend.engine._llm.reset_prefix_cache = lambda *args, **more: True

    def restore(backend):
        del backend.engine._llm.reset_prefix_cache

    engine.run(keep_cache)
    try:
        engine.load(trainer.weights())
        with pytest.raises(WeightSyncError, match=r"replica 0 does not.* a cache, a"):
            probe.check(2)
    finally:
        engine.run(restore)
    engine.load(trainer.weights())
    probe.check(3)


def test_a_tied_head_that_was_not_packed_again(both):
    trainer, engine, probe = both

    def keep_head(backend):
        def patch(model):
            old = model.lm_head.weight.detach().clone()

            def apply(layer, x, bias=None):
                return torch.nn.functional.linear(x, old, bias)

            model.lm_head.quant_method.apply = apply

        backend.engine._llm.apply_model(patch)

    def restore(backend):
        def patch(model):
            del model.lm_head.quant_method.apply

        backend.engine._llm.apply_model(patch)

    engine.run(keep_head)
    try:
        engine.load(trainer.weights())
        with pytest.raises(WeightSyncError, match=r"replica 0 does not.* a cache, a"):
            probe.check(2)
    finally:
        engine.run(restore)
    engine.load(trainer.weights())
    probe.check(3)
