"""Tensors between two processes on the same GPU, without Ray."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from rl_distributed.transfer import CudaIpcLink, receive_tensors, send_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEADLINE_S = 120


def receive(link: CudaIpcLink, results: Any) -> None:
    """Receive two transfers; send back what arrived."""
    end = link.receiver()
    for _ in range(2):
        stream = receive_tensors(end, deadline_s=DEADLINE_S)
        tensors = stream.read()
        assert all(tensor.is_cuda for tensor in tensors.values())
        sums = {name: tensor.double().sum().item() for name, tensor in tensors.items()}
        results.put((sums, stream.manifest.digest if stream.manifest else None))


def test_blocks_stay_on_the_gpu() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with CudaIpcLink.create() as link:
        process = context.Process(target=receive, args=(link, results), daemon=True)
        process.start()
        try:
            sender = link.sender()
            for seed in range(2):
                torch.manual_seed(seed)
                tensors = {
                    "a": torch.randn(1000, 1000, device="cuda"),
                    "b": torch.randn(7, device="cuda").bfloat16(),
                    "c": torch.arange(5),
                }
                sent = send_tensors(
                    sender, tensors, bucket_bytes=1 << 20, deadline_s=DEADLINE_S
                )
                sums, digest = results.get(timeout=DEADLINE_S)
                assert digest == sent.digest
                for name, tensor in tensors.items():
                    assert sums[name] == pytest.approx(tensor.double().sum().item())
        finally:
            process.kill()
            process.join(30)
