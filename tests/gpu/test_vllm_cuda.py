"""vLLM's sleep mode, in this process: run it in the environment of rl-models[vllm]."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.generation.config import GenerationConfig
from rl_models.generation.vllm import VllmGenerationBackend
from rl_models.testing import build_tiny_model, reference_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
_CACHE_GIB = 1.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Flash attention needs head sizes of at least 32.
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    target = tmp_path_factory.mktemp("model") / "tiny"
    return build_tiny_model(target, **shape, max_position_embeddings=128)


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[VllmGenerationBackend]:
    pytest.importorskip("vllm")
    engine = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.3}
    config = GenerationConfig(
        backend="vllm", max_new_tokens=8, stop_token_ids=[], vllm=engine
    )
    made = VllmGenerationBackend()
    made.setup(config.to_dict(), model_name=str(folder))
    yield made
    made.shutdown()


def sampled(backend: VllmGenerationBackend) -> Any:
    rows = BatchedDataDict(
        input_ids=torch.arange(3, 11).repeat(4, 1),
        input_lengths=torch.full((4,), 8),
        seeds=torch.arange(4),
    )
    return backend.generate(rows)


def test_sleep_frees_the_device_and_weights_come_back(
    backend: VllmGenerationBackend, folder: Path
) -> None:
    first = sampled(backend)
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    backend.release_memory()
    freed = torch.cuda.mem_get_info()[0] - before
    assert freed > _CACHE_GIB * 2**30, "most of it is the key-value cache"
    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = ((n, p.detach().cuda()) for n, p in model.named_parameters())
    assert backend.load_weights(weights, 3) == 3
    again = sampled(backend)
    assert again["weight_version"].tolist() == [3] * 4
    assert torch.equal(again["output_ids"], first["output_ids"])
    truth = reference_logprobs(folder, again["output_ids"])
    assert (again["logprobs"].double() - truth)[:, 8:].abs().max() < 0.1
