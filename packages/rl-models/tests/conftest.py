"""Tiny models, batches and one Ray for the tests of rl-models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from rl_distributed.batched_data_dict import BatchedDataDict
from rl_distributed.testing import local_ray
from rl_models.testing import build_tiny_model

VOCABULARY = 29


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray with two CPUs."""
    with local_ray(2):
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Qwen2 of about 20 k parameters, weights tied."""
    transformers_logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen2 and a tokenizer of 16 tokens."""
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Any]:
    """Builds a batch of rows whose lengths differ; the last third is trained on."""

    def make(num_rows: int = 12, width: int = 20, seed: int = 0) -> Any:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, width + 1, (num_rows,), generator=generator)
        column = torch.arange(width)
        mask = (column >= lengths[:, None] // 3 + 1) & (column < lengths[:, None])
        ids = torch.randint(0, VOCABULARY, (num_rows, width), generator=generator)
        return BatchedDataDict(
            input_ids=ids * (column < lengths[:, None]),
            input_lengths=lengths,
            token_mask=mask.long(),
            sample_mask=torch.ones(num_rows),
        )

    return make


@pytest.fixture(scope="session")
def nll_loss() -> Any:
    """Mean negative log-prob of the trained tokens, by the public protocol."""
    from rl_models.types import LossInputType, LossType  # noqa: PLC0415

    class NegativeLogprob:  # local, so that it reaches workers by value
        loss_type = LossType.TOKEN_LEVEL
        input_type = LossInputType.LOGPROB

        def __call__(
            self,
            data: Any,
            global_valid_seqs: Any,
            global_valid_toks: Any,
            next_token_logprobs: Any,
        ) -> tuple[Any, dict[str, Any]]:
            mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
            loss = -(next_token_logprobs * mask).sum() / global_valid_toks
            return loss, {"loss": loss.detach(), "rows": float(mask.shape[0])}

    return NegativeLogprob()
