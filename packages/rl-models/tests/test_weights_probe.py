"""Faults that digests cannot see: trainer and replicas in one process, without Ray."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.checkpoint.context_length import context_length
from rl_models.config import PolicyConfig
from rl_models.errors import GenerationError, WeightSyncError
from rl_models.generation.config import GenerationConfig
from rl_models.generation.worker import GenerationWorker
from rl_models.testing import TokenCrossEntropy, build_tiny_model
from rl_models.training.worker import TrainingWorker
from rl_models.weight_request import Pending
from rl_models.weights.config import WeightSyncConfig
from rl_models.weights.loading import loaded_tensors
from rl_models.weights.probe import probe_rows, vocabulary_and_context
from rl_models.weights.sync import WeightSynchronizer


class Trainer:
    """One rank."""

    def __init__(self, folder, **settings):
        self.config = PolicyConfig(
            model_name=str(folder),
            max_total_sequence_length=128,
            optimizer={"kwargs": {"lr": 1e-2}},
            **settings,
        )
        self.worker = TrainingWorker(self.config.to_dict())
        self.worker.setup()

    def start_weight_export(self, request, link=None):
        assert self.worker.weight_turns(request) == (0,)
        messages = self.worker.export_weights(request, 0, is_last=True)
        return Pending(lambda left_s: [None], (messages,))

    def get_logprobs(self, rows):
        return self.worker.get_logprobs(rows, micro_batch_size=4)

    def learn(self, seed):
        generator = torch.Generator().manual_seed(seed)
        mask = torch.ones(4, 12)
        mask[:, 0] = 0
        rows = BatchedDataDict(
            {
                "input_ids": torch.randint(3, 16, (4, 12), generator=generator),
                "input_lengths": torch.full((4,), 12),
                "token_mask": mask,
                "sample_mask": torch.ones(4),
            }
        )
        self.worker.train(rows, TokenCrossEntropy(), False, 4, 4)


class Replicas:
    """Two replicas."""

    def __init__(self, folder, **settings):
        self.config = GenerationConfig(max_new_tokens=8, stop_token_ids=[], **settings)
        context = {"model_name": str(folder), "load_weights": False}
        self.workers = []
        for replica in range(2):
            worker = GenerationWorker(self.config.to_dict(), context)
            worker.setup(replica)
            self.workers.append(worker)
        self.weight_version = 0
        self.refusal = ""

    def start_weight_update(self, source, request):
        def finish(left_s):
            reports = [w.load_weights(source, request) for w in self.workers]
            problems = [report.problem for report in reports if report.problem]
            if problems:
                raise WeightSyncError(" ".join(problems))
            self.weight_version = request.version

        return Pending(finish)

    def generate_on_each(self, rows, sampling):
        return {
            number: worker.generate(rows, sampling=sampling)
            for number, worker in enumerate(self.workers)
        }

    def changed_weights(self, replica):
        return self.workers[replica].changed_weights()

    def refuse(self, reason):
        self.refusal = reason


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("probe"))


@pytest.fixture
def trainer(folder):
    return Trainer(folder)


@pytest.fixture
def generation(folder):
    return Replicas(folder)


@pytest.fixture
def sync(trainer, generation):
    made = WeightSynchronizer(
        trainer, generation, WeightSyncConfig(probe={"period": 1})
    )
    made.sync_weights()
    trainer.learn(0)
    return made


def held(backend):
    return dict(loaded_tensors(backend.model))


O_PROJ = "model.layers.{}.self_attn.o_proj.weight"


def test_versions_follow_each_other_without_a_fault(sync, trainer):
    assert sync.sync_weights() == 2
    trainer.learn(1)
    assert sync.sync_weights() == 3


def test_a_tensor_that_the_trainer_drops(sync, trainer):
    export = trainer.worker._backend.export_weights
    trainer.worker._exported = lambda precision: (
        pair for pair in export(precision) if pair[0] != O_PROJ.format(1)
    )
    with pytest.raises(WeightSyncError, match=r"replica 0.*1\.self_attn\.o_proj.*miss"):
        sync.sync_weights()


def test_two_tensors_that_the_trainer_swaps(sync, trainer, generation):
    export = trainer.worker._backend.export_weights
    other = {O_PROJ.format(0): O_PROJ.format(1), O_PROJ.format(1): O_PROJ.format(0)}

    def swapped(precision):
        pairs = dict(export(precision))
        for name in pairs:
            yield name, pairs[other.get(name, name)]

    trainer.worker._exported = swapped
    with pytest.raises(
        WeightSyncError, match=r"replica 0 does not.*replica 1 does not.*export"
    ):
        sync.sync_weights()
    assert "replica 0" in generation.refusal


def test_a_tensor_that_a_replica_drops(sync, generation):
    backend = generation.workers[1]._backend
    load = backend.load_weights
    name = O_PROJ.format(0)

    def dropping(tensors, version):
        kept = held(backend)[name].clone()
        load(((n, kept if n == name else t) for n, t in tensors), version)
        return version

    backend.load_weights = dropping
    with pytest.raises(WeightSyncError) as caught:
        sync.sync_weights()
    assert "replica 1 does not compute with the weights of version 2" in str(
        caught.value
    )
    assert f"it holds other values of {name}." in str(caught.value)
    assert "replica 0" not in str(caught.value)


def test_two_tensors_that_a_replica_swaps(sync, generation):
    backend = generation.workers[0]._backend
    load = backend.load_weights
    names = [O_PROJ.format(0), O_PROJ.format(1)]
    other = {names[0]: names[1], names[1]: names[0]}
    backend.load_weights = lambda tensors, version: load(
        ((other.get(n, n), t) for n, t in tensors), version
    )
    with pytest.raises(WeightSyncError, match=", ".join(map(re.escape, names))):
        sync.sync_weights()


def test_a_replica_that_stays_stale_and_says_otherwise(sync, generation):
    backend = generation.workers[1]._backend

    def pretend(tensors, version):
        for _ in tensors:
            pass
        backend._turns.version = version
        return version

    backend.load_weights = pretend
    with pytest.raises(WeightSyncError, match=r"^Generation replica 1 does not.*o"):
        sync.sync_weights()


def test_packed_weights_that_are_not_packed_again(sync, generation):
    backend = generation.workers[0]._backend
    # The engine's own copies: q, k and v in one matrix, the tied head transposed.
    backend._sampler.decoder.refresh = lambda: None
    with pytest.raises(WeightSyncError, match=r"replica 0.*a packed copy"):
        sync.sync_weights()


def test_another_data_type(sync, trainer):
    start = trainer.start_weight_export

    def wide(request, link=None):
        return start(dataclasses.replace(request, precision="bfloat16"), link)

    trainer.start_weight_export = wide
    with pytest.raises(WeightSyncError, match=r"embed_tokens.* came as bfloat16"):
        sync.sync_weights()


def test_a_truncated_transfer(sync, trainer, generation):
    start = trainer.start_weight_export

    def short(request, link=None):
        export = start(request, link)
        return Pending(export.wait, (export.messages[0][:-1],))

    trainer.start_weight_export = short
    with pytest.raises(WeightSyncError, match="end before the end"):
        sync.sync_weights()
    rows = probe_rows(16, 10)
    with pytest.raises(GenerationError, match="replica 1 does not serve"):
        generation.workers[1].generate(rows)
    del trainer.start_weight_export
    sync.sync_weights()
    generation.workers[1].generate(rows)


def test_weights_that_are_not_numbers(sync, trainer):
    export = trainer.worker._backend.export_weights
    trainer.worker._exported = lambda precision: (
        (name, torch.full_like(tensor, torch.nan)) for name, tensor in export(precision)
    )
    with pytest.raises((WeightSyncError, GenerationError)):
        sync.sync_weights()


def test_logprobs_that_are_not_numbers_differ(sync, trainer, monkeypatch):
    given = trainer.get_logprobs

    def broken(rows):
        return {"logprobs": torch.full_like(given(rows)["logprobs"], torch.nan)}

    monkeypatch.setattr(trainer, "get_logprobs", broken)
    with pytest.raises(WeightSyncError, match="by nan at most and nan on average"):
        sync.sync_weights()


@pytest.mark.parametrize("trains_in", ["float32", "bfloat16"])
def test_a_generator_in_bfloat16_gets_bfloat16(folder, trains_in):
    trainer = Trainer(folder, precision=trains_in)
    generation = Replicas(folder, precision="bfloat16")
    # These weights are far larger than those of a trained model.
    probe = {"max_difference": 0.5, "mean_difference": 0.1}
    sync = WeightSynchronizer(trainer, generation, WeightSyncConfig(probe=probe))
    sync.sync_weights()
    model = trainer.worker._backend.model.parameters
    for name, tensor in held(generation.workers[0]._backend).items():
        if name in model:
            assert torch.equal(tensor, model[name].bfloat16())


def test_the_period_of_the_probe(trainer, generation):
    sync = WeightSynchronizer(
        trainer, generation, WeightSyncConfig(probe={"period": 3})
    )
    probed = []
    sync._probe.check = probed.append
    for _ in range(7):
        sync.sync_weights()
    assert probed == [1, 4, 7]
    generation.live_processes = lambda: [(0, 0), (1, 1)]
    sync.sync_weights()
    assert probed[3:] == [8]
    sync.sync_weights()
    assert probed[3:] == [8]


def test_probe_rows_are_fixed_and_longer_than_a_cache_block():
    rows = probe_rows(100, 1000)
    assert rows["input_ids"].shape == (4, 160)
    assert rows["input_lengths"].tolist() == [160, 160, 80, 8]
    assert torch.equal(rows["input_ids"], probe_rows(100, 1000)["input_ids"])
    assert rows["input_ids"].max() < 100
    short = probe_rows(100, 5)
    assert short["input_lengths"].tolist() == [5, 5, 2, 5]
    assert (short["input_ids"][2, 2:] == 0).all()


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "gemma3"])
@pytest.mark.parametrize("overrides", [{}, {"max_position_embeddings": 48}])
def test_vocabulary_and_context_are_those_that_transformers_reads(
    tmp_path, kind, overrides
):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, **overrides)
    expected = config.get_text_config().vocab_size, context_length(config)
    assert vocabulary_and_context(str(tmp_path), overrides) == expected


def test_the_config_of_a_folder_is_read_without_code_of_models(folder):
    program = (
        "import sys; from rl_models.weights.probe import vocabulary_and_context\n"
        "vocabulary_and_context(sys.argv[1], {})\n"
        "print('transformers.models.auto.auto_factory' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
