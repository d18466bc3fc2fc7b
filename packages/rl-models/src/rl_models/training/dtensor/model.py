"""The model of one rank: loaded, cut and sharded over the ranks, or plain.

With one rank the model stays a plain module. Tensor-parallel ranks first cut the layers
between them (`tensor_parallel`). Data-parallel ranks then shard each decoder layer and
the root along dimension 0 (FSDP2), and gradients are *summed* over them, because losses
are divided by global counts already.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

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

from rl_distributed.errors import ConfigError
from rl_models.checkpoint.context_length import context_length
from rl_models.checkpoint.sharded import Box
from rl_models.config import PolicyConfig
from rl_models.errors import UnsupportedModelError
from rl_models.ops.causal_lm import (
    DTYPES,
    load_causal_lm,
    packing_obstacle as _packing_obstacle,
)
from rl_models.ops.scalar_head import load_scalar_model
from rl_models.ops.varlen_attention import ATTENTION_NAME
from rl_models.training.dtensor.collectives import TensorRanks
from rl_models.training.dtensor.layout import Layout
from rl_models.training.dtensor.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from rl_models.training.dtensor.lora import Adapters

__all__ = ["RankModel", "load_model", "load_weights_into", "local_part"]

_SMALL_BYTES = 32 * 1024**2


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, sharing its memory."""
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
        layout: This rank, its device, and who shares what with it.
        trainable: False for a frozen copy.

    Raises:
        UnsupportedModelError: The layout has tensor-parallel ranks, and it is not known
            how the model is cut between them.
    """

    def __init__(
        self,
        model: Any,
        config: PolicyConfig,
        layout: Layout,
        *,
        trainable: bool = True,
    ) -> None:
        ranks = layout.ranks
        self.module = model
        self.ranks = ranks
        self.layout = layout
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
        self.adapters: Adapters | None = None
        """What is trained in place of the weights, which are then frozen."""
        if config.lora is not None and trainable:
            self.adapters = _adapters(model, config)
            self.shares_prefixes = self.shares_prefixes and not config.lora.dropout
        self.base_is_given = True
        """Whether frozen weights are those of `policy.model_name`."""
        self.tensor_parallel: TensorParallel | None = None
        if layout.tensor_size > 1:
            self.tensor_parallel = TensorParallel(model, layout, config.model_name)
        if layout.data_size > 1:
            _shard(model, config, layout)
        else:
            model.to(ranks.device)
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        """Parameters by name, tied ones once; sharded when sharded.

        The names are those of Hugging Face, and with adapters those of peft.
        """

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained."""
        return {n: p for n, p in self.parameters.items() if p.requires_grad}

    @property
    def attention(self) -> str:
        """Name of the attention implementation."""
        return str(self.module.config._attn_implementation)

    @property
    def vocabulary_ranks(self) -> TensorRanks | None:
        """The ranks that share the vocabulary; None: this rank has all of it."""
        cutter = self.tensor_parallel
        return cutter.ranks if cutter is not None and cutter.splits_vocabulary else None

    def box(self, name: str) -> Box:
        """Return which part of the whole parameter this rank has."""
        sizes = list(self.parameters[name].shape)
        shape, starts = list(sizes), [0] * len(sizes)
        dim = self._cut_dim(name)
        if dim is not None:
            shape[dim] *= self.layout.tensor_size
            starts[dim] = sizes[dim] * self.layout.tensor_rank
        if self.layout.data_size > 1:
            # Rows are dealt out as torch.chunk does: the last ranks may have fewer.
            per_rank = -(-sizes[0] // self.layout.shard_size)
            first = min(sizes[0], per_rank * self.layout.shard_rank)
            starts[0] += first
            sizes[0] = min(per_rank, sizes[0] - first)
        return Box(tuple(shape), tuple(starts), tuple(sizes))

    def num_holders(self, name: str) -> int:
        """Return how many ranks hold the same part of a parameter as this one."""
        cut = self._cut_dim(name) is not None
        return self.layout.num_replicas * (1 if cut else self.layout.tensor_size)

    def writes(self, name: str) -> bool:
        """Whether this rank writes its part of a parameter to the training state.

        Of those that hold the same part it is the first. A frozen base is read from
        where it comes from.
        """
        frozen = self.base_is_given and not self.parameters[name].requires_grad
        if frozen or self.layout.replica_rank:
            return False
        return self._cut_dim(name) is not None or self.layout.tensor_rank == 0

    def expected_in(self, saved: Set[str]) -> Set[str]:
        """Return the parameters that a training state must have, by those it has.

        A state without the frozen base means that of `policy.model_name`, which this
        rank must still have.
        """
        if self.base_is_given and not saved - set(self.trained):
            return set(self.trained)
        self.base_is_given = False
        return set(self.parameters)

    def _cut_dim(self, name: str) -> int | None:
        cutter = self.tensor_parallel
        return None if cutter is None else cutter.dim_of(name)

    def copy_from(self, source: Any) -> None:
        """Take this rank's part of the parameters of an unsharded model."""
        self.free_gathered()
        values = dict(source.named_parameters())
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                plain = self._plain_name(name)
                if plain is not None:
                    part = values[plain][self.box(name).slices]
                    local_part(parameter).copy_(part)
        if self.adapters is not None:
            self.adapters.reset(self.parameters)
            self.base_is_given = False

    def _plain_name(self, name: str) -> str | None:
        return name if self.adapters is None else self.adapters.plain_name(name)

    def compute(self) -> AbstractContextManager[Any]:
        """Context of every forward pass: the dtype of the computation."""
        if self._bfloat16 and self.layout.data_size == 1:
            return torch.autocast(self.ranks.device.type, DTYPES["bfloat16"])
        return nullcontext()

    def _fsdp_modules(self) -> Iterator[FSDPModule]:
        return (m for m in self.module.modules() if isinstance(m, FSDPModule))

    def sync_gradients(self, enabled: bool) -> None:
        """Reduce gradients in the next backward pass, or only add them up locally."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(enabled)
            self.module.set_is_last_backward(enabled)

    def finish_gradients(self) -> None:
        """Complete gradients after the last backward pass of a step."""
        if self.tensor_parallel is not None:
            self.tensor_parallel.add_partial_gradients(self.parameters)

    def free_gathered(self) -> None:
        """Drop weights that a forward pass without backward left gathered."""
        for module in self._fsdp_modules():
            module.reshard()

    def whole_shapes(self) -> dict[str, Tensor]:
        """Each parameter and saved buffer once, whole, as tensors without data."""
        shapes = {name: self.box(name).global_shape for name in self.parameters}
        return {
            plain: torch.empty(
                shapes.get(name, tensor.shape), dtype=tensor.dtype, device="meta"
            )
            for name, tensor in self._saved().items()
            if (plain := self._plain_name(name)) is not None
        }

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight and saved buffer once, unsharded; collective on all ranks.

        Adapters are merged into the weights that they belong to.
        """
        parts = self.full_parts()
        yield from parts if self.adapters is None else self.adapters.merged(parts)

    def full_parts(self, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """As `full_tensors`, with weights and their adapters apart.

        Args:
            trained: Only parameters that are trained.
        """
        self.free_gathered()
        for name, tensor in (self.trained if trained else self._saved()).items():
            yield name, self._whole(name, tensor)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each gradient, unsharded; collective on all ranks."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                yield name, self._whole(name, parameter.grad)

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        value = tensor.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if self.tensor_parallel is not None:
            value = self.tensor_parallel.whole(name, value)
        return value

    def _saved(self) -> dict[str, Tensor]:
        saved = self.module.state_dict(keep_vars=True)
        buffers = {n: b for n, b in self.module.named_buffers() if n in saved}
        return {**self.parameters, **buffers}


def _adapters(model: Any, config: PolicyConfig) -> Adapters:
    # Only a policy with adapters needs peft, which is an extra.
    from rl_models.training.dtensor.lora import Adapters  # noqa: PLC0415

    assert config.lora is not None
    layers = _decoder_layers(model)
    return Adapters(model, layers, config.lora, config.model_name, config.seed)


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


def _shard(model: Any, config: PolicyConfig, layout: Layout) -> None:
    device = layout.ranks.device
    policy = MixedPrecisionPolicy()
    if config.precision == "bfloat16":
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    offload = config.dtensor.cpu_offload and device.type == "cuda"
    reshards = config.dtensor.reshard_after_forward
    if reshards is None:
        reshards = device.type == "cuda"
    options: dict[str, Any] = {
        "mesh": layout.data_mesh,
        "mp_policy": policy,
        "reshard_after_forward": reshards,
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    if not offload:
        model.to(device)
    by_layers = config.dtensor.shard_layers
    if by_layers is None:
        size = sum(local_part(p).nbytes for p in model.parameters())
        by_layers = size > _SMALL_BYTES
    for layer in _decoder_layers(model) if by_layers else ():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The default is the mean over ranks; gloo and NCCL both have a plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
