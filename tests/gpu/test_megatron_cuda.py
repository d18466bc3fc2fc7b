"""The backend `megatron` on one GPU, in this process and without Ray."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

pytest.importorskip("megatron.core")

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.config import PolicyConfig
from rl_models.registry import get_training_backend
from rl_models.testing import TokenCrossEntropy, reference_logprobs

ROWS, WIDTH, VOCABULARY = 8, 12, 32
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = {
    "qwen3": Qwen3Config(**_SIZES),
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, **_EXPERTS),
}

pytestmark = [
    pytest.mark.gpu,
    # From Megatron-core, about packages that are not installed.
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, config in MODELS.items():
        torch.manual_seed(0)
        found[name] = tmp_path_factory.mktemp("model") / name
        AutoModelForCausalLM.from_config(config).save_pretrained(found[name])
    return found


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)


def rows() -> BatchedDataDict[Any]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, WIDTH + 1, (ROWS,), generator=generator)
    inside = torch.arange(WIDTH) < lengths[:, None]
    ids = torch.randint(2, VOCABULARY, (ROWS, WIDTH), generator=generator) * inside
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=lengths,
        token_mask=inside.long(),
        sample_mask=torch.ones(ROWS),
    )


def made(name: str, folder: Path, **settings: Any) -> Any:
    config = PolicyConfig.from_dict(
        {
            "model_name": str(folder),
            "backend": name,
            "max_total_sequence_length": 32,
            "optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}},
            **settings,
        },
        source="test",
    )
    # Only here, as it imports Megatron-core, which warns.
    backend = get_training_backend(name)()
    backend.setup(config.to_dict())
    return backend


def train(backend: Any, steps: int = 3) -> list[float]:
    return [
        backend.train_step(
            rows(), TokenCrossEntropy(), global_batch_size=ROWS, micro_batch_size=4
        )["loss"].item()
        for _ in range(steps)
    ]


def logprobs(backend: Any) -> torch.Tensor:
    """Return the log-probs of all tokens that have one, in one row."""
    found = backend.get_logprobs(rows(), micro_batch_size=ROWS).cpu().double()
    return found[:, 1:][rows()["token_mask"][:, 1:].bool()]


def reference(folder: Path) -> torch.Tensor:
    found = reference_logprobs(folder, rows()["input_ids"])
    return found[:, 1:][rows()["token_mask"][:, 1:].bool()]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_it_computes_and_trains_as_dtensor_does(
    folders: dict[str, Path], name: str
) -> None:
    other = made("dtensor", folders[name])
    expected, losses = logprobs(other), train(other)
    other.shutdown()
    backend = made("megatron", folders[name])
    assert (logprobs(backend) - expected).abs().max() < 1e-3
    assert train(backend) == pytest.approx(losses, rel=1e-4)
    backend.shutdown()


def test_half_precision_and_the_shared_optimizer(folders: dict[str, Path]) -> None:
    backend = made(
        "megatron",
        folders["qwen3"],
        precision="bfloat16",
        megatron={"distributed_optimizer": True, "activation_checkpointing": True},
    )
    assert (logprobs(backend) - reference(folders["qwen3"])).abs().max() < 0.1
    losses = train(backend, 10)
    assert losses[-1] < losses[0]
    backend.shutdown()
