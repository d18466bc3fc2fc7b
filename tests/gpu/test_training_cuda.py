"""The training and generation workers on a GPU, in this process and without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.config import PolicyConfig
from rl_models.generation.config import GenerationConfig
from rl_models.generation.worker import GenerationWorker
from rl_models.testing import TokenCrossEntropy, build_tiny_model, reference_logprobs
from rl_models.training.worker import TrainingWorker
from rl_models.weight_request import WeightRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def rows(count: int = 8, width: int = 12) -> BatchedDataDict[Any]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, width + 1, (count,), generator=generator)
    ids = torch.randint(2, 14, (count, width), generator=generator)
    inside = torch.arange(width) < lengths[:, None]
    return BatchedDataDict(
        {
            "input_ids": ids * inside,
            "input_lengths": lengths,
            "token_mask": inside.long(),
            "sample_mask": torch.ones(count),
        }
    )


def worker(folder: Path, **settings: Any) -> TrainingWorker:
    config = PolicyConfig.from_dict(
        {
            "model_name": str(folder),
            "max_total_sequence_length": 32,
            "train_global_batch_size": 8,
            "train_micro_batch_size": 4,
            "optimizer": {"kwargs": {"lr": 1e-3}},
            **settings,
        },
        source="test",
    )
    made = TrainingWorker(config.to_dict())
    made.setup()
    return made


@pytest.mark.parametrize("packed", [False, True])
def test_logprobs_agree_with_float64(folder: Path, packed: bool) -> None:
    packing = {"sequence_packing": {"train_mb_tokens": 64}} if packed else {}
    made = worker(folder, **packing)
    data = rows()
    found = made.get_logprobs(data, micro_batch_size=8)["logprobs"].cpu()
    expected = reference_logprobs(folder, data["input_ids"])
    mask = data["token_mask"].bool()
    mask[:, 0] = False
    assert (found.double() - expected)[mask].abs().max() < 1e-3
    made.shutdown()


def test_training_lowers_the_loss(folder: Path) -> None:
    made = worker(folder)
    losses = [
        float(made.train(rows(), TokenCrossEntropy(), False, 8, 4)["loss"][0])
        for _ in range(5)
    ]
    assert losses[-1] < losses[0]
    made.shutdown()


def test_generation_serves_the_weights_of_the_trainer(folder: Path) -> None:
    trainer = worker(folder)
    trainer.train(rows(), TokenCrossEntropy(), False, 8, 4)
    config = GenerationConfig(max_new_tokens=6, stop_token_ids=[])
    sampler = GenerationWorker(config.to_dict(), {"model_name": str(folder)})
    sampler.setup()
    request = WeightRequest(1)
    messages = trainer.export_weights(request, 0, is_last=True)
    assert messages is not None
    assert sampler.load_weights([messages], request).version == 1
    data = rows()
    prompts = BatchedDataDict(
        {"input_ids": data["input_ids"], "input_lengths": data["input_lengths"]}
    )
    out = sampler.generate(prompts, greedy=True)
    full = BatchedDataDict(
        {
            "input_ids": out["output_ids"],
            "input_lengths": out["unpadded_sequence_lengths"],
        }
    )
    trained = trainer.get_logprobs(full, micro_batch_size=8)["logprobs"].cpu()
    position = torch.arange(full["input_ids"].shape[1])
    starts, ends = prompts["input_lengths"][:, None], full["input_lengths"][:, None]
    sampled = (position >= starts) & (position < ends)
    assert (trained - out["logprobs"])[sampled].abs().max() < 1e-3
    trainer.shutdown()
