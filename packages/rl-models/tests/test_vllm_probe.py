"""What digests cannot see of a real vLLM engine, the probe sees."""

from __future__ import annotations

import pytest
import torch

from rl_distributed.batched_data_dict import BatchedDataDict
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
        return {"logprobs": self.backend.get_logprobs(rows, mbs=4)}

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
        self.backend.train_step(rows, TokenCrossEntropy(), gbs=4, mbs=4)


class Engine:
    """The engine of the session as the only replica."""

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
        self.run(work, weights, self.version)

    def changed_weights(self, replica):
        return None

    def refuse(self, reason):
        self.refusal = reason


@pytest.fixture
def both(vllm_engine, vllm_folder):
    """Trainer, engine with its weights, and a probe that has run on them."""
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
    _, engine, probe = both
    with pytest.raises(WeightSyncError, match=r"replica 0 does not.*version 2.*read"):
        probe.check(2)
    assert "replica 0" in engine.refusal


def test_a_prefix_cache_that_was_not_reset(both):
    trainer, engine, probe = both

    def keep_cache(backend):
        backend.engine._llm.reset_prefix_cache = lambda *args, **more: True

    def restore(backend):
        del backend.engine._llm.reset_prefix_cache

    engine.run(keep_cache)
    try:
        engine.load(trainer.weights())
        with pytest.raises(WeightSyncError, match=r"replica 0 does not compute"):
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
        with pytest.raises(WeightSyncError, match=r"replica 0 does not compute"):
            probe.check(2)
    finally:
        engine.run(restore)
    engine.load(trainer.weights())
    probe.check(3)
