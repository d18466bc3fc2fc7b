"""Computation in bfloat16 on a GPU, padded and packed (flash attention)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.config import PolicyConfig
from rl_models.testing import TokenCrossEntropy, build_tiny_model, reference_logprobs
from rl_models.training.dtensor import DTensorTrainingBackend

ROWS, WIDTH = 8, 24

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def rows() -> BatchedDataDict[Any]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, WIDTH + 1, (ROWS,), generator=generator)
    inside = torch.arange(WIDTH) < lengths[:, None]
    ids = torch.randint(2, 14, (ROWS, WIDTH), generator=generator) * inside
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=lengths,
        token_mask=inside.long(),
        sample_mask=torch.ones(ROWS),
    )


def made(folder: Path, *, packed: bool) -> DTensorTrainingBackend:
    packing = {"sequence_packing": {"train_mb_tokens": 64}} if packed else {}
    config = PolicyConfig.from_dict(
        {
            "model_name": str(folder),
            "max_total_sequence_length": 32,
            "precision": "bfloat16",
            "optimizer": {"kwargs": {"lr": 1e-3}},
            **packing,
        },
        source="test",
    )
    backend = DTensorTrainingBackend()
    backend.setup(config.to_dict())
    return backend


@pytest.mark.parametrize("packed", [False, True])
def test_logprobs_agree_with_float64(folder: Path, packed: bool) -> None:
    backend, data = made(folder, packed=packed), rows()
    found = backend.get_logprobs(data, micro_batch_size=ROWS).cpu().double()
    mask = data["token_mask"].bool()
    mask[:, 0] = False
    error = (found - reference_logprobs(folder, data["input_ids"]))[mask].abs()
    assert error.max() < 0.1
    assert error.mean() < 0.02
    backend.shutdown()


@pytest.mark.parametrize("packed", [False, True])
def test_weights_stay_in_float32_and_the_loss_falls(folder: Path, packed: bool) -> None:
    backend, data = made(folder, packed=packed), rows()
    losses = [
        backend.train_step(
            data, TokenCrossEntropy(), global_batch_size=ROWS, micro_batch_size=4
        )["loss"].item()
        for _ in range(10)
    ]
    assert losses[-1] < losses[0]
    dtypes = {p.dtype for p in backend.model.parameters.values()}
    assert dtypes == {torch.float32}
    backend.shutdown()
