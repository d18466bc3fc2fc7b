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
    """One local Ray; as many CPUs as all groups of the tests take together."""
    with local_ray(4):
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


@pytest.fixture(scope="session")
def vllm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with room for prompts longer than a block of vLLM's cache."""
    folder = tmp_path_factory.mktemp("models") / "long"
    return build_tiny_model(folder, max_position_embeddings=512)


@pytest.fixture(scope="session")
def vllm_engine(ray_cluster: None, vllm_folder: Path) -> Iterator[Callable[..., Any]]:
    """The only synchronous vLLM engine: runs functions of the backend in its process.

    A function must be local to its test, so that it reaches the process by value.
    """
    from rl_distributed.virtual_cluster import RayVirtualCluster  # noqa: PLC0415
    from rl_distributed.workers import (  # noqa: PLC0415
        RayWorkerBuilder,
        RayWorkerGroup,
    )
    from rl_models.environments import VLLM  # noqa: PLC0415
    from rl_models.generation.config import GenerationConfig  # noqa: PLC0415
    from rl_models.generation.vllm import engine_variables  # noqa: PLC0415

    config = GenerationConfig(
        backend="vllm",
        max_new_tokens=24,
        vllm={"kv_cache_gib": 0.125, "max_num_seqs": 64},  # type: ignore[arg-type]
    )

    class Host:
        def __init__(self, settings: dict[str, Any], folder: str) -> None:
            from rl_models.generation.vllm import (  # noqa: PLC0415
                VllmGenerationBackend,
            )

            self.backend = VllmGenerationBackend()
            self.backend.setup(settings, model_name=folder)

        def run(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
            return work(self.backend, *arguments)

    with (
        RayVirtualCluster(
            [1], use_gpus=False, max_colocated_worker_groups=2
        ) as cluster,
        RayWorkerGroup(
            cluster,
            RayWorkerBuilder(Host, config.to_dict(), str(vllm_folder)).with_options(
                environment=VLLM
            ),
            name_prefix="engine",
            env_vars=engine_variables(config, on_gpu=False),
            start_deadline_s=300,
        ) as group,
    ):

        def run(work: Callable[..., Any], *arguments: Any) -> Any:
            reference = group.run_single_worker_single_data(
                "run", 0, work=work, arguments=arguments
            )
            (result,) = group.get_all_worker_results([reference], deadline_s=200)
            return result

        yield run
