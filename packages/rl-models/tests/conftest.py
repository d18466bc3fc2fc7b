"""Tiny models, batches and one Ray for the tests of rl-models."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.testing import local_ray
from rl_models.testing import build_tiny_model

VOCABULARY = 29


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray with as many CPUs as all groups of the tests need together."""
    with local_ray(4):
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Qwen2 of about 20 k parameters and tied weights."""
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
    """Build a batch of rows of different lengths; the last third is trained on."""

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
    """Return the mean negative log-prob of trained tokens, by the public protocol."""
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
def signal_in_generation() -> Callable[..., AbstractContextManager[None]]:
    """Signal a replica's process, or another one, once the replica generates."""

    @contextmanager
    def signalling(
        policy: Any, rank: int, number: int, process: int | None = None
    ) -> Iterator[None]:
        missed: list[str] = []

        def run() -> None:
            end = time.monotonic() + 60
            pause = threading.Event()
            # Fresh signs of life: the last ones may stem from the previous call.
            ask = policy.group.supervisor.watch.ask
            while (beat := ask([rank], 1.0).get(rank)) is None or (
                beat.method != "generate"
            ):
                if time.monotonic() > end:
                    missed.append(f"replica {rank} did not generate")
                    return
                pause.wait(0.02)
            os.kill(process or policy.group.worker_pids[rank], number)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            thread.join()
        assert not missed

    return signalling


@pytest.fixture(scope="session")
def vllm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with room for prompts longer than a block of vLLM's cache."""
    folder = tmp_path_factory.mktemp("models") / "long"
    return build_tiny_model(folder, max_position_embeddings=512)


@pytest.fixture(scope="session")
def vllm_policy(ray_cluster: None, vllm_folder: Path) -> Iterator[Any]:
    """Two vLLM replicas, the only ones of the session, as engines start slowly.

    Their weights and settings are as the previous test left them.
    """
    from rl_distributed.cluster.virtual_cluster import RayVirtualCluster  # noqa: PLC0415
    from rl_models import PolicyConfig, VllmGeneration  # noqa: PLC0415
    from rl_models.generation.config import GenerationConfig  # noqa: PLC0415

    config = GenerationConfig(
        backend="vllm",
        max_new_tokens=24,
        max_restarts=20,
        vllm={"kv_cache_gib": 0.125, "max_num_seqs": 64},  # type: ignore[arg-type]
    )
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        policy = VllmGeneration(
            cluster, PolicyConfig(model_name=str(vllm_folder), generation=config)
        )
        yield policy
        assert policy.shutdown()


@pytest.fixture(scope="session")
def in_replica(vllm_policy: Any) -> Callable[..., Any]:
    """Run functions of the worker in a replica's process.

    A function must be local to its test, so that it reaches the process by value.
    """

    def run(replica: int, work: Callable[..., Any], *arguments: Any) -> Any:
        def call(host: Any, arguments: tuple[Any, ...]) -> Any:
            return work(host._worker, *arguments)

        handle = vllm_policy.group.workers[replica]
        return ray.get(handle.__ray_call__.remote(call, arguments), timeout=200)

    return run


@pytest.fixture(scope="session")
def vllm_engine(in_replica: Callable[..., Any]) -> Callable[..., Any]:
    """Run functions of the backend in the process of replica 0; see `in_replica`."""

    def run(work: Callable[..., Any], *arguments: Any) -> Any:
        def call(worker: Any, *arguments: Any) -> Any:
            return work(worker._backend, *arguments)

        return in_replica(0, call, *arguments)

    return run
