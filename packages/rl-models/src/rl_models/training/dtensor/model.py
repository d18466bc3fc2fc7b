"""The model of one rank: loaded, sharded over the data-parallel mesh, or plain.

With one rank the model stays a plain module. With more, each decoder layer and the
root are sharded along dimension 0 (FSDP2), and gradients are *summed* over the ranks,
because losses are divided by global counts already.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from rl_distributed.errors import ConfigError
from rl_models.checkpoint.context_length import context_length
from rl_models.config import PolicyConfig
from rl_models.errors import UnsupportedModelError
from rl_models.ops.causal_lm import (
    DTYPES,
    load_causal_lm,
    packing_obstacle as _packing_obstacle,
)
from rl_models.ops.scalar_head import load_scalar_model
from rl_models.ops.varlen_attention import ATTENTION_NAME
from rl_models.training.process_group import Ranks

__all__ = ["RankModel", "load_model", "load_weights_into", "local_part"]

_SMALL_BYTES = 32 * 1024**2


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _counts_each_row(config: Any) -> bool:
    """Whether a token differs from row to row, or is counted once for each."""
    dropouts = [
        value
        for name, value in config.to_dict().items()
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float)
    ]
    return any(dropouts) or bool(getattr(config, "output_router_logits", False))


def load_model(config: PolicyConfig) -> Any:
    """Load the float32 model of a config and checks that it can do what is asked.

    Raises:
        ConfigError: `max_total_sequence_length` exceeds the model's context.
        UnsupportedModelError: Packing is asked for and the model cannot be packed.
    """
    model = _load(config, config.model_name)
    limit = context_length(model.config)
    if limit is not None and (config.max_total_sequence_length or 0) > limit:
        raise ConfigError(
            "policy.max_total_sequence_length must not exceed the context of "
            f"{config.model_name}: got {config.max_total_sequence_length} with a "
            f"context of {limit}; use at most {limit}"
        )
    obstacle = _packing_obstacle(model)
    if config.sequence_packing is not None and obstacle is not None:
        raise UnsupportedModelError(
            f"policy.sequence_packing cannot be used with {config.model_name}: "
            f"{obstacle}; set it to null, and use policy.dynamic_batching instead"
        )
    if config.dtensor.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def load_weights_into(model: RankModel, config: PolicyConfig, folder: Any) -> None:
    """Take the weights of a model folder, a new head included if it has none."""
    model.copy_from(_load(config, folder))


def _load(config: PolicyConfig, source: Any) -> Any:
    overrides = config.hf_config_overrides
    if config.head == "lm":
        return load_causal_lm(source, "float32", overrides)
    return load_scalar_model(source, config.head, overrides, config.seed)


class RankModel:
    """A causal LM, or a model with a scalar head, on one rank.

    Args:
        model: The loaded model, the same on every rank.
        config: The policy's config.
        ranks: This rank and its device.
        trainable: False for a frozen copy.
    """

    def __init__(
        self, model: Any, config: PolicyConfig, ranks: Ranks, *, trainable: bool = True
    ) -> None:
        self.module = model
        self.ranks = ranks
        self.can_pack = _packing_obstacle(model) is None
        self.takes_logit_index = (
            "logits_to_keep" in inspect.signature(model.forward).parameters
        )
        self.shares_prefixes = (
            self.can_pack
            and self.attention == ATTENTION_NAME
            and ranks.device.type == "cpu"
            and not _counts_each_row(model.config)
        )
        """Whether a token may be computed once for several rows."""
        self._bfloat16 = config.precision == "bfloat16"
        model.requires_grad_(trainable)
        if ranks.world_size > 1:
            _shard(model, config, ranks)
        else:
            model.to(ranks.device)
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        """Parameters in Hugging Face names, tied ones once; sharded when sharded."""

    @property
    def attention(self) -> str:
        """Name of the attention implementation."""
        return str(self.module.config._attn_implementation)

    def first_row(self, parameter: Tensor) -> int:
        """Index in the whole parameter of this rank's first row."""
        if not isinstance(parameter, DTensor):
            return 0
        rows = parameter.shape[0]
        return min(rows, -(-rows // self.ranks.world_size) * self.ranks.rank)

    def copy_from(self, source: Any) -> None:
        """Take this rank's rows of the parameters of an unsharded model."""
        self.free_gathered()
        values = dict(source.named_parameters())
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                local = local_part(parameter)
                first = self.first_row(parameter)
                rows = values[name]
                if isinstance(parameter, DTensor):
                    rows = rows[first : first + local.shape[0]]
                local.copy_(rows)

    def compute(self) -> AbstractContextManager[Any]:
        """Context of every forward pass: the dtype of the computation."""
        if self._bfloat16 and self.ranks.world_size == 1:
            return torch.autocast(self.ranks.device.type, DTYPES["bfloat16"])
        return nullcontext()

    def _fsdp_modules(self) -> Iterator[FSDPModule]:
        return (m for m in self.module.modules() if isinstance(m, FSDPModule))

    def sync_gradients(self, enabled: bool) -> None:
        """Reduce gradients in the next backward pass, or only add them up locally."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(enabled)
            self.module.set_is_last_backward(enabled)

    def free_gathered(self) -> None:
        """Drop weights that a forward pass without backward left gathered."""
        for module in self._fsdp_modules():
            module.reshard()

    def whole_shapes(self) -> dict[str, Tensor]:
        """Each parameter and saved buffer once, for its whole shape and its dtype."""
        saved = self.module.state_dict(keep_vars=True)
        buffers = {n: b for n, b in self.module.named_buffers() if n in saved}
        return {**self.parameters, **buffers}

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter and saved buffer once, unsharded; collective on all ranks."""
        self.free_gathered()
        for name, tensor in self.whole_shapes().items():
            value = tensor.detach()
            yield name, value.full_tensor() if isinstance(value, DTensor) else value


def _decoder_layers(model: Any) -> list[nn.Module]:
    """Get the modules that the model says must not be split; else its longest list."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    layers = [m for m in model.modules() if type(m).__name__ in names]
    if layers:
        return layers
    longest: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > len(longest):
            longest = list(module)
    return longest


def _shard(model: Any, config: PolicyConfig, ranks: Ranks) -> None:
    mesh = init_device_mesh(
        ranks.device.type, (ranks.world_size,), mesh_dim_names=("data_parallel",)
    )
    policy = MixedPrecisionPolicy()
    if config.precision == "bfloat16":
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    offload = config.dtensor.cpu_offload and ranks.device.type == "cuda"
    reshards = config.dtensor.reshard_after_forward
    if reshards is None:
        reshards = ranks.device.type == "cuda"
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": reshards,
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    if not offload:
        model.to(ranks.device)
    by_layers = config.dtensor.shard_layers
    if by_layers is None:
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        by_layers = size > _SMALL_BYTES
    for layer in _decoder_layers(model) if by_layers else ():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The default is the mean over ranks; gloo and NCCL both have a plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
