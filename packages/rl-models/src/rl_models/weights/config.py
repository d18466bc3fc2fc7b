"""Section `policy.generation.weight_sync`: how weights reach the generators."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_distributed.config import Config

__all__ = ["ProbeConfig", "Transport", "WeightSyncConfig"]

Transport = Literal[
    "auto", "object_store", "shared_memory", "collective", "cuda_ipc", "file"
]


class ProbeConfig(Config):
    """Section `policy.generation.weight_sync.probe`: do both sides compute the same?"""

    period: int = Field(50, ge=0)
    """Syncs from one probe to the next; the first sync is probed, and the first of a
    replica that was started again. 0: none."""
    num_new_tokens: int = Field(8, gt=0)
    """Tokens that each probe row samples."""
    max_difference: float | None = Field(None, gt=0)
    """Largest difference of a token's log-prob; null: 1e-4 where both sides compute in
    float32, 0.05 in bfloat16, 0.1 where one does."""
    mean_difference: float | None = Field(None, gt=0)
    """Mean difference; null: 1e-4, 0.01 and 0.02 likewise."""


class WeightSyncConfig(Config):
    """Section `policy.generation.weight_sync`: the way of weights to the replicas."""

    transport: Transport = "auto"
    """`object_store`: Ray's store, any nodes; `shared_memory`: one machine;
    `collective`: broadcast by gloo, on GPUs by NCCL; `cuda_ipc`: trainer and replicas
    on one GPU; `file`: safetensors in `folder`; `auto`: `shared_memory` where all
    workers are on the driver's machine and 1 GiB of it is free, else `object_store`."""
    folder: str | None = None
    """Folder of transport `file`, which all nodes see; null: a temporary one."""
    bucket_bytes: int = Field(16 << 20, gt=0)
    """Tensors travel together up to this size; while replicas load one bucket, the
    trainer packs the next."""
    deadline_s: float = Field(600.0, gt=0)
    """A sync that has not ended by then is reported, with who did not answer."""
    link_deadline_s: float = Field(10.0, gt=0)
    """Trainer and replicas must have joined a new link by then."""
    probe: ProbeConfig = Field(default_factory=ProbeConfig)
    """Compares log-probs of trainer and replicas on fixed rows."""
