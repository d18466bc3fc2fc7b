"""Device memory that one model frees for the next; in this process, without Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.build.model import ModelBuildConfig, build_model
from rl_models.config import PolicyConfig
from rl_models.generation.config import GenerationConfig
from rl_models.generation.huggingface import HuggingFaceGenerationBackend
from rl_models.training.worker import TrainingWorker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ROWS, WIDTH, HIDDEN = 512, 400, 128
CACHE_BYTES = 2 * ROWS * WIDTH * HIDDEN * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = ModelBuildConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=WIDTH + 8,
    )
    return build_model(config, tmp_path / "wide")


def freed_by(release: Callable[[], None]) -> int:
    """Return the bytes of device memory freed by a call."""
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    release()
    return int(torch.cuda.mem_get_info()[0] - before)


def test_a_generator_gives_its_cache_back_to_the_device(folder: Path) -> None:
    backend = HuggingFaceGenerationBackend()
    config = GenerationConfig(max_new_tokens=1, precision="float32")
    backend.setup(config.to_dict(), model_name=str(folder))
    rows = BatchedDataDict(
        input_ids=torch.full((ROWS, WIDTH), 3),
        input_lengths=torch.full((ROWS,), WIDTH),
        seeds=torch.arange(ROWS),
    )
    first = backend.generate(rows)["output_ids"]
    assert freed_by(backend.release_memory) > 0.8 * CACHE_BYTES
    assert torch.equal(backend.generate(rows)["output_ids"], first)


def test_a_trainer_gives_cached_memory_back_to_the_device(folder: Path) -> None:
    config = PolicyConfig.from_dict({"model_name": str(folder)})
    worker = TrainingWorker(config.to_dict())
    assert worker.setup(), "there is memory to free"
    try:
        rows = BatchedDataDict(
            input_ids=torch.full((64, WIDTH), 3),
            input_lengths=torch.full((64,), WIDTH),
        )
        first = worker.get_logprobs(rows, micro_batch_size=64)["logprobs"]
        assert freed_by(worker.finish_training) > 0
        worker.prepare_for_training()
        assert torch.equal(
            worker.get_logprobs(rows, micro_batch_size=64)["logprobs"], first
        )
    finally:
        worker.shutdown()
