"""Sharding of a model over the ranks with different tokens (FSDP2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from rl_models.config import PolicyConfig
from rl_models.training.dtensor.layout import Layout
from rl_models.training.dtensor.weight_source import move

__all__ = ["compile_layers", "decoder_layers", "home", "local_part", "shard"]

# Below this size the whole model is gathered at once: collectives for each layer would
# take longer than the memory is worth.
_SMALL_BYTES = 32 * 1024**2


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the modules that the model says must not be split, or its longest list."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    layers = [m for m in model.modules() if type(m).__name__ in names]
    if layers:
        return layers
    longest: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > len(longest):
            longest = list(module)
    return longest


def compile_layers(model: Any, compiler: str | None) -> None:
    """Compile the decoder layers on their first use, if the config asks for it."""
    # Layer by layer: they are alike, so one compilation serves all, and FSDP gathers
    # the weights of each in between.
    for layer in decoder_layers(model) if compiler is not None else ():
        layer.compile(backend=compiler)


def _offloads(config: PolicyConfig, layout: Layout) -> bool:
    return config.dtensor.cpu_offload and layout.ranks.device.type == "cuda"


def home(config: PolicyConfig, layout: Layout) -> torch.device:
    """Return the device of this rank's parameters."""
    if layout.is_sharded and _offloads(config, layout):
        return torch.device("cpu")
    return layout.ranks.device


def shard(
    model: Any, config: PolicyConfig, layout: Layout, dealt_out: list[nn.Module]
) -> None:
    """Shard a model over ranks with different tokens, and experts over fewer."""
    device = layout.ranks.device
    policy = MixedPrecisionPolicy()
    if config.precision == "bfloat16":
        # Gradients are added up over ranks and micro-batches, where bfloat16 would lose
        # bits.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    offload = _offloads(config, layout)
    reshards = config.dtensor.reshard_after_forward
    if reshards is None:
        # Gathering again in the backward pass buys memory, which is scarce on GPUs.
        reshards = device.type == "cuda"
    options: dict[str, Any] = {
        "mesh": layout.data_mesh,
        "mp_policy": policy,
        "reshard_after_forward": reshards,
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    if not offload:
        move(model, device)
    by_layers = config.dtensor.shard_layers
    if by_layers is None:
        size = sum(local_part(p).nbytes for p in model.parameters())
        by_layers = size > _SMALL_BYTES
    # Experts first: FSDP leaves out of a module what was sharded within it.
    for experts in dealt_out:
        fully_shard(experts, **{**options, "mesh": layout.shards_of_experts})
    for layer in decoder_layers(model) if by_layers else ():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # FSDP's default is the mean over ranks, but losses are already divided by
            # global counts. A forced sum, because gloo lacks NCCL's scaled sums.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
