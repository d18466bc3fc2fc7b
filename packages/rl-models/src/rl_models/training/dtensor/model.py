"""The model of one rank: loaded, cut and sharded over the ranks, or plain.

With one rank the model stays a plain module. Ranks that share a model build it without
memory for its weights, and each reads its part once that is known (`weight_source`).
Tensor-parallel ranks first cut the layers between them (`tensor_parallel`).
Data-parallel and context-parallel ranks then shard each decoder layer and the root
along dimension 0 (`sharding`), and gradients are *summed* over them, because losses are
divided by global counts already. Stages keep some of the layers, whole or cut
(`pipeline_parallel`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from rl_distributed.errors import ConfigError
from rl_models.checkpoint.context_length import context_length
from rl_models.checkpoint.model_folder import read_model_config
from rl_models.checkpoint.sharded import Box
from rl_models.config import PolicyConfig
from rl_models.errors import UnsupportedModelError
from rl_models.logit_chunks import logit_chunk_size
from rl_models.ops.causal_lm import DTYPES, packing_obstacle as _packing_obstacle
from rl_models.ops.varlen_attention import ATTENTION_NAME
from rl_models.parallelism import check_model_divides
from rl_models.training.dtensor.chunked_head import ChunkedHead
from rl_models.training.dtensor.collectives import RankGroup, TensorRanks
from rl_models.training.dtensor.context_parallel import (
    check_context_layer,
    share_attention,
)
from rl_models.training.dtensor.experts import ExpertParallel, probed
from rl_models.training.dtensor.layout import Layout
from rl_models.training.dtensor.pipeline_parallel import PipelineStage, check_stages
from rl_models.training.dtensor.router_loss import RouterLoss
from rl_models.training.dtensor.sharding import (
    compile_layers,
    decoder_layers,
    home,
    local_part,
    shard,
)
from rl_models.training.dtensor.tensor_parallel import TensorParallel
from rl_models.training.dtensor.weight_source import (
    LoadedWeights,
    WeightSource,
    allocate,
    fill_for_probe,
    move,
    open_model,
)
from rl_models.weights.adapters import plain_name

if TYPE_CHECKING:
    from rl_models.training.dtensor.lora import Adapters

__all__ = ["RankModel", "load_model", "load_weights_into"]

Known = TypeVar("Known")


def _counts_each_row(config: Any) -> bool:
    """Return whether a shared token would count or be computed once per row."""
    # Dropout draws other numbers for each row, and the loss of routers counts tokens.
    dropouts = [
        value
        for name, value in config.to_dict().items()
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float)
    ]
    return any(dropouts) or bool(getattr(config, "output_router_logits", False))


def load_model(config: PolicyConfig, layout: Layout) -> tuple[Any, WeightSource | None]:
    """Load the float32 model of a config and check that it supports the settings.

    Returns:
        The model; and its weights, if ranks share it and each has to read its part.

    Raises:
        ConfigError: `max_total_sequence_length` exceeds the model's context, or its
            heads, layers or experts cannot be cut as `parallelism` says.
        UnsupportedModelError: The config asks for packing or stages, which the model
            does not support.
    """
    model, weights = open_model(config, config.model_name, shared=layout.shares_model)
    # The driver has checked folders: it cannot read the config of a model of the hub.
    if read_model_config(config.model_name) is None:
        sizes = model.config.to_dict()
        check_model_divides(config.parallelism, sizes, config.model_name)
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
    if layout.num_stages > 1:
        check_stages(model, config.model_name)
    if config.dtensor.activation_checkpointing:
        # torch's reentrant form gives no gradients where no input of a layer needs one,
        # as with embeddings that are frozen under adapters.
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, weights


def load_weights_into(model: RankModel, config: PolicyConfig, folder: Any) -> None:
    """Load the weights of a model folder, with a new head if it has none."""
    loaded, weights = open_model(config, folder, shared=model.layout.shares_model)
    model.copy_from(weights or LoadedWeights(loaded))


class RankModel:
    """A causal LM, or a model with a scalar head, on one rank.

    Args:
        model: The model, the same on every rank; its parameters may be on the meta
            device.
        weights: Source of these parameters; None if the model has memory.
        config: The policy's config.
        layout: The place of this rank among all.
        trainable: False for a frozen copy.
        keeps_base: Whether `base` is asked for, with adapters.

    Raises:
        UnsupportedModelError: The layout has ranks that share layers or tokens, and
            this is not supported for the model.
    """

    def __init__(
        self,
        model: Any,
        weights: WeightSource | None,
        config: PolicyConfig,
        layout: Layout,
        *,
        trainable: bool = True,
        keeps_base: bool = False,
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
            and model.config._attn_implementation == ATTENTION_NAME
            and ranks.device.type == "cpu"
            and not _counts_each_row(model.config)
        )
        """Whether a token may be computed once for several rows."""
        self.attention = str(model.config._attn_implementation)
        """Name of the attention implementation, by which rows are packed."""
        _fill_probed(model, weights, layout)
        self.context = self._token_ranks(config)
        """Ranks that share the tokens of each row; None: this rank has all."""
        self._reduces_each = config.dtensor.reduce_each_micro_batch
        self._bfloat16 = config.precision == "bfloat16"
        model.requires_grad_(trainable)
        self.adapters: Adapters | None = None
        """Trained in place of the weights, which are then frozen."""
        if config.lora is not None and trainable:
            self.adapters = _adapters(model, config)
            self.shares_prefixes = self.shares_prefixes and not config.lora.dropout
        self.base_is_given = True
        """Whether frozen weights are those of `policy.model_name`."""
        self.tensor_parallel: TensorParallel | None = None
        if layout.tensor_size > 1:
            self.tensor_parallel = TensorParallel(model, layout, config.model_name)
        self.router_loss: RouterLoss | None = None
        """Added to losses, so that experts are used equally."""
        weight = config.dtensor.router_loss_weight
        if weight and trainable:
            name, num_alike = config.model_name, layout.tensor_size
            self.router_loss = RouterLoss(model, weight, num_alike, name)
            # Its loss counts tokens, and a shared one counts for each of its rows.
            self.shares_prefixes = False
        self.expert_parallel: ExpertParallel | None = None
        if layout.expert_size > 1:
            self.expert_parallel = ExpertParallel(
                model,
                decoder_layers(model),
                RankGroup(layout.expert_group()),
                ranks.device,
                config.model_name,
                None if self.tensor_parallel is None else self.tensor_parallel.ask,
            )
        self.pipeline: PipelineStage | None = None
        """The layers of this rank, and the ranks of the others; None: it has all."""
        self._place(config)
        self._add_chunked_head(config)
        if weights is not None:
            # Only now, because parameters have the size of this rank's part.
            allocate(model, home(config, layout))
        # Read only now: cutting and sharding replace the parameter objects.
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        """Parameters by name, tied ones once; sharded when sharded.

        The names are those of Hugging Face, and with adapters those of peft.
        """
        if weights is not None:
            self._fill(weights)
        self._keeps_base = keeps_base
        self._base_modules: dict[str, Tensor] = {}
        self._keep_base_modules()
        self._fill_given()

    def _place(self, config: PolicyConfig) -> None:
        """Keep this rank's layers, and shard them over the ranks with other tokens."""
        layout, model = self.layout, self.module
        if layout.num_stages > 1:
            dtype = config.precision if layout.is_sharded else "float32"
            self.pipeline = PipelineStage(model, layout, DTYPES[dtype])
            if self.tensor_parallel is not None and layout.splits_tokens:
                self.pipeline.split_tokens(self.tensor_parallel)
            if self.adapters is not None:
                self.adapters.keep_those_of(model)
        # After layers are cut, which changes their forward methods.
        compile_layers(model, config.dtensor.compile)
        if layout.is_sharded:
            experts = self.expert_parallel
            shard(model, config, layout, experts.modules if experts else [])
        else:
            move(model, layout.ranks.device)
        if self.pipeline is not None:
            # After sharding: for a model without FSDP, registering does nothing.
            self.pipeline.register_output()

    def _token_ranks(self, config: PolicyConfig) -> RankGroup | None:
        """Return the ranks that share tokens, after making attention share them."""
        layout, model, name = self.layout, self.module, config.model_name
        if layout.context_size == 1:
            return None
        group = RankGroup(layout.context_group())
        share_attention(model, name, group.size)
        first = decoder_layers(model)[0]
        check_context_layer(model.base_model, first, group, self.ranks.device, name)
        return group

    def _add_chunked_head(self, config: PolicyConfig) -> None:
        if config.head != "lm" or not self.has_head:
            return
        self._chunk_size = config.dtensor.logprob_chunk_size
        head = ChunkedHead(
            self.vocabulary_ranks,
            config.model_name,
            asked=self._chunk_size is not None,
        )
        self._vocabulary = self.module.get_output_embeddings().weight.shape[0]
        self.module.chunked_logprobs = partial(head.logprobs, self.module)
        # FSDP gathers weights only during methods that are registered.
        register_fsdp_forward_method(self.module, "chunked_logprobs")

    def logit_chunk_size(self, num_positions: int) -> int | None:
        """Return the number of positions whose logits exist at once; None: all."""
        on_gpu = self.ranks.device.type == "cuda"
        return logit_chunk_size(
            self._chunk_size, num_positions, self._vocabulary, on_gpu=on_gpu
        )

    @property
    def has_head(self) -> bool:
        """Whether this rank has the last layers, and thus computes the results."""
        return self.pipeline is None or self.pipeline.is_last

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained."""
        return {n: p for n, p in self.parameters.items() if p.requires_grad}

    @property
    def vocabulary_ranks(self) -> TensorRanks | None:
        """Ranks that share the vocabulary; None: this rank has all of it."""
        cutter = self.tensor_parallel
        return cutter.ranks if cutter is not None and cutter.splits_vocabulary else None

    def box(self, name: str) -> Box:
        """Return which part of the whole parameter this rank has."""
        sizes = list(self.parameters[name].shape)
        shape, starts = list(sizes), [0] * len(sizes)
        layout = self.layout
        num_shards, shard = layout.shard_size, layout.shard_rank
        dim = self._cut_dim(name)
        if self._is_dealt_out(name):
            shape[0] *= layout.expert_size
            shard, expert_rank = divmod(shard, layout.expert_size)
            num_shards //= layout.expert_size
            starts[0] = sizes[0] * expert_rank
        if dim is not None:
            # Tensor-parallel ranks were first to cut it.
            starts[dim] += shape[dim] * layout.tensor_rank
            shape[dim] *= layout.tensor_size
        if layout.is_sharded:
            # FSDP splits rows as torch.chunk does: the last ranks may have fewer.
            per_rank = -(-sizes[0] // num_shards)
            first = min(sizes[0], per_rank * shard)
            starts[0] += first
            sizes[0] = min(per_rank, sizes[0] - first)
        return Box(tuple(shape), tuple(starts), tuple(sizes))

    def num_holders(self, name: str) -> int:
        """Return the number of ranks that hold the same part of a parameter."""
        cut = self._cut_dim(name) is not None
        stages = 1 if self.pipeline is None else self.pipeline.num_stages_with(name)
        alike = 1 if cut else self.layout.tensor_size
        return self.layout.num_replicas * stages * alike

    def writes(self, name: str) -> bool:
        """Return whether this rank writes its part of a parameter to the state.

        Of the ranks that hold the same part, the first one does. A frozen base is not
        written, because it can be read from its own folder again.
        """
        frozen = self.base_is_given and not self.parameters[name].requires_grad
        if frozen or self.layout.replica_rank:
            return False
        if self.pipeline is not None and not self.pipeline.owns(name):
            return False
        return self._cut_dim(name) is not None or self.layout.tensor_rank == 0

    def expected_in(self, saved: Set[str]) -> Set[str]:
        """Return the parameters that a training state must have, given those it has.

        A state without the frozen base refers to that of `policy.model_name`, which
        this rank must still have.
        """
        if self.base_is_given and not self.has_base(saved):
            return self._all_trained
        self.base_is_given = False
        return set(self.parameters if self.pipeline is None else self.pipeline.names)

    def has_base(self, saved: Set[str]) -> bool:
        """Return whether a training state with these parameters has frozen ones."""
        return not saved <= self._all_trained

    @property
    def _all_trained(self) -> set[str]:
        """Names of the trained parameters of all stages."""
        return set(self.trained if self.pipeline is None else self.pipeline.trained)

    def of_all_stages(
        self, scalars: dict[str, dict[str, float]]
    ) -> dict[str, dict[str, float]]:
        """Return numbers by parameter, including other stages; collective."""
        return scalars if self.pipeline is None else self.pipeline.of_all(scalars)

    def from_last_stage(self, value: Known) -> Known:
        """Return the value of the stage with the head; collective on all stages."""
        return value if self.pipeline is None else self.pipeline.from_last(value)

    def _cut_dim(self, name: str) -> int | None:
        cutter = self.tensor_parallel
        return None if cutter is None else cutter.dim_of(name)

    def _is_dealt_out(self, name: str) -> bool:
        """Whether a parameter is of experts that ranks with other tokens share."""
        return self.expert_parallel is not None and self.expert_parallel.has(name)

    def copy_from(self, weights: WeightSource) -> None:
        """Load this rank's part of other weights."""
        # Weights that are still gathered would hide the shards that are written here.
        self.free_gathered()
        self._fill(weights)
        if self.adapters is not None:
            # New weights are a new base, for which the adapters were not trained.
            self.adapters.reset(self.parameters)
            self.base_is_given = False
            self._keep_base_modules()

    @torch.no_grad()
    def _keep_base_modules(self) -> None:
        """Copy what is trained whole beside adapters, if the base is asked for."""
        if self.adapters is not None and self._keeps_base:
            self._base_modules = {
                name: local_part(self.parameters[name]).clone()
                for name in self.adapters.modules
                if name in self.parameters
            }

    def forget_base(self) -> None:
        """Keep no copies for `base`, which is not asked for any more."""
        self._keeps_base, self._base_modules = False, {}

    @torch.no_grad()
    def _fill_given(self) -> None:
        """Load what an adapter's folder has of modules that are trained whole."""
        given = {} if self.adapters is None else self.adapters.given
        for name, whole in given.items():
            if name in self.parameters:
                part = whole[self.box(name).slices]
                local_part(self.parameters[name]).copy_(part)

    @contextmanager
    def base(self) -> Iterator[None]:
        """Compute with the base alone, without what is trained."""
        assert self.adapters is not None
        trained = {
            name: local_part(self.parameters[name].detach()).clone()
            for name in self._base_modules
        }
        self._write_parts(self._base_modules)
        try:
            with self.adapters.off():
                yield
        finally:
            self._write_parts(trained)

    @torch.no_grad()
    def _write_parts(self, parts: Mapping[str, Tensor]) -> None:
        if parts:
            self.free_gathered()
        for name, part in parts.items():
            local_part(self.parameters[name]).copy_(part)

    @torch.no_grad()
    def _fill(self, weights: WeightSource) -> None:
        for name, parameter in self.parameters.items():
            plain = self._plain_name(name)
            if plain is not None:
                local_part(parameter).copy_(weights.part(plain, self.box(name)))

    def _plain_name(self, name: str) -> str | None:
        return name if self.adapters is None else plain_name(name)

    def compute(self) -> AbstractContextManager[Any]:
        """Return the context of every forward pass: the dtype of the computation."""
        # FSDP casts by itself (`shard`); autocast would cast a second time.
        if self._bfloat16 and not self.layout.is_sharded:
            return torch.autocast(self.ranks.device.type, DTYPES["bfloat16"])
        return nullcontext()

    def routing(self, is_token: Tensor | None) -> AbstractContextManager[Any]:
        """Return the context of every forward pass for `router_loss`.

        Args:
            is_token: See `RouterLoss.watching`.
        """
        if self.router_loss is None:
            return nullcontext()
        return self.router_loss.watching(is_token)

    def _fsdp_modules(self) -> Iterator[FSDPModule]:
        return (m for m in self.module.modules() if isinstance(m, FSDPModule))

    def sync_gradients(self, is_last: bool) -> None:
        """Set whether the next backward pass is the last one of an optimizer step.

        It reduces gradients over the ranks; earlier ones only accumulate them locally,
        unless the config says otherwise.
        """
        if isinstance(self.module, FSDPModule):
            reduces = is_last or self._reduces_each
            self.module.set_requires_gradient_sync(reduces)
            self.module.set_is_last_backward(is_last)

    def finish_gradients(self) -> None:
        """Complete gradients after the last backward pass of a step."""
        if self.tensor_parallel is not None:
            self.tensor_parallel.add_partial_gradients(self.parameters)
        if self.pipeline is not None:
            self.pipeline.add_tied_gradient(self.parameters)

    def free_gathered(self) -> None:
        """Drop weights that forward passes without a backward pass left gathered."""
        if self.pipeline is not None:
            self.pipeline.finish_sends()
        for module in self._fsdp_modules():
            module.reshard()

    def whole_shapes(self) -> dict[str, Tensor]:
        """Return the tensors of `full_tensors`, without data."""
        return {
            plain: tensor
            for name, tensor in self.part_shapes().items()
            if (plain := self._plain_name(name)) is not None
        }

    def part_shapes(self, *, trained: bool = False) -> dict[str, Tensor]:
        """Return the tensors of `full_parts`, without data."""
        if self.pipeline is not None:
            names = self.pipeline.trained if trained else self.pipeline.names
            return {name: self._whole_like(name) for name in names}
        shapes = {name: self.box(name).global_shape for name in self.parameters}
        return {
            name: torch.empty(
                shapes.get(name, tensor.shape), dtype=tensor.dtype, device="meta"
            )
            for name, tensor in (self.trained if trained else self.saved()).items()
        }

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight and saved buffer once, unsharded; collective on all ranks.

        Adapters are merged into the weights that they belong to.
        """
        parts = self.full_parts()
        yield from parts if self.adapters is None else self.adapters.merged(parts)

    def full_parts(self, *, trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `full_tensors`, but weights and adapters apart.

        Args:
            trained: Only parameters that are trained.
        """
        self.free_gathered()
        if self.pipeline is not None:
            names = self.pipeline.trained if trained else self.pipeline.names
            yield from self._of_stages(self.parameters, names)
            return
        for name, tensor in (self.trained if trained else self.saved()).items():
            yield name, self._whole(name, tensor)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each gradient, unsharded; collective on all ranks."""
        if self.pipeline is not None:
            own = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
            yield from self._of_stages(own, self.pipeline.trained)
            return
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                yield name, self._whole(name, parameter.grad)

    def _of_stages(
        self, own: Mapping[str, Tensor], names: Iterable[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield a tensor per parameter, from the stage that owns it; collective."""
        assert self.pipeline is not None
        for name in names:
            owns = self.pipeline.owns(name)
            value = self._whole(name, own[name]) if owns else None
            yield name, self.pipeline.from_owner(name, value, self._whole_like(name))

    def _whole_like(self, name: str) -> Tensor:
        """Return a whole parameter of any stage as a tensor without data."""
        assert self.pipeline is not None
        shape = list(self.pipeline.shape(name))
        dim = self._cut_dim(name)
        if dim is not None:
            shape[dim] *= self.layout.tensor_size
        return torch.empty(shape, dtype=self.pipeline.dtype_of(name), device="meta")

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        value = tensor.detach()
        # FSDP was applied last and is undone first.
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if self.expert_parallel is not None:
            value = self.expert_parallel.whole(name, value)
        if self.tensor_parallel is not None:
            value = self.tensor_parallel.whole(name, value)
        return value

    def saved(self) -> dict[str, Tensor]:
        """Return the parameters and saved buffers of this rank, sharded."""
        saved = self.module.state_dict(keep_vars=True)
        buffers = {n: b for n, b in self.module.named_buffers() if n in saved}
        return {**self.parameters, **buffers}


def _adapters(model: Any, config: PolicyConfig) -> Adapters:
    # Only a policy with adapters needs peft, which is an extra.
    from rl_models.training.dtensor.lora import Adapters  # noqa: PLC0415

    assert config.lora is not None
    layers = decoder_layers(model)
    return Adapters(model, layers, config.lora, config.model_name, config.seed)


def _fill_probed(model: Any, weights: WeightSource | None, layout: Layout) -> None:
    # Ranks that share a layer compare it with the whole one, which needs its weights
    # and those of the layers before it.
    if weights is not None and layout.shares_layers:
        layers = decoder_layers(model)
        fill_for_probe(model, layers[layers.index(probed(layers)) + 1 :], weights)
