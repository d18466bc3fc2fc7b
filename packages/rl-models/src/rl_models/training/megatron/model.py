"""One rank's part of a model, loaded and exported under Hugging Face's names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rl_models.checkpoint.mixture_files import MixtureFiles
from rl_models.checkpoint.sharded import Box
from rl_models.checkpoint.weight_files import WeightFiles
from rl_models.config import PolicyConfig
from rl_models.errors import UnsupportedModelError
from rl_models.ops.causal_lm import DTYPES
from rl_models.ops.scalar_head import scalar_head_name, scalar_model_skeleton
from rl_models.training.megatron.architecture import HiddenStates, build_gpt
from rl_models.training.megatron.conversion import (
    Entry,
    box_of,
    entries,
    join,
    split,
    unite,
)
from rl_models.training.megatron.families import model_config
from rl_models.training.megatron.layout import RankLayout
from rl_models.training.megatron.master_weights import MasterWeights

__all__ = ["EMBEDDING", "MegatronModel"]

EMBEDDING = "embedding.word_embeddings.weight"
"""Megatron-core's name of the embedding."""
_OUTPUT = "output_layer.weight"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


class MegatronModel:
    """A causal LM of Megatron-core on one rank.

    Args:
        config: The policy's config.
        layout: This rank's place.
        trainable: False for a frozen copy.

    Raises:
        ConfigError: `max_total_sequence_length` exceeds the model's context.
        ModelLoadError: The folder is missing or incomplete, or the name unknown.
        UnsupportedModelError: Megatron-core would compute something else.
    """

    def __init__(
        self, config: PolicyConfig, layout: RankLayout, *, trainable: bool = True
    ) -> None:
        self.layout = layout
        self.config = model_config(config)
        self.dtype = DTYPES[config.precision]
        """Data type of weights that compute, and of hidden states."""
        self.whole = _whole_model(config, self.config)
        """The model of transformers, for names, shapes and config; only a new scalar
        head has data."""
        head = [] if config.head == "lm" else _head_parameters(self.whole)
        self.shapes = {n: p.shape for n, p in self.whole.named_parameters()}
        recompute = config.megatron.activation_checkpointing
        own = list(entries(self.config, head))
        _check_names(own, self.shapes)
        self.entries = {entry.name: entry for entry in own}
        self._head = frozenset(head)
        self.chunks: list[HiddenStates] = []
        """Parts of the layers of this rank, in their order."""
        computed: dict[str, nn.Parameter] = {}
        for number in range(layout.num_chunks):
            # Megatron-core creates some buffers on CUDA, whether or not there is a GPU.
            with layout.devices():
                chunk = build_gpt(
                    self.config, layout, number, dtype=self.dtype, recompute=recompute
                )
                if head and layout.has_head(number):
                    _replace_head(chunk, self.whole)
            chunk = chunk.to(layout.device).requires_grad_(trainable)
            self.chunks.append(chunk)
            # Megatron-core numbers the layers of each part from 0.
            virtual = number if layout.num_chunks > 1 else None
            offset = get_transformer_layer_offset(
                chunk.config, virtual, pp_rank=layout.stage
            )
            for name, parameter in chunk.named_parameters():
                computed[_counted_over_stages(name, offset)] = parameter
        self.sums_over_tensor_ranks = [
            name
            for name, parameter in computed.items()
            if getattr(parameter, "sums_over_tensor_ranks", False)
            # Set by Megatron-core's router, which sees this rank's tokens then.
            or getattr(parameter, "sequence_parallel", False)
        ]
        """Parameters that tensor ranks have a part of the gradient of each."""
        self._computed = computed
        self.masters = MasterWeights(
            computed,
            {name for name in computed if self.entry(name).is_of_experts},
            layout,
            is_shared=trainable and config.megatron.distributed_optimizer,
            has_copies=trainable,
        )
        """What is trained, by Megatron-core's names, layers counted over all stages."""
        self.load(config.model_name)

    def train(self, mode: bool = True) -> None:
        """Set all parts to training or evaluation."""
        for chunk in self.chunks:
            chunk.train(mode)

    @property
    def output_weight(self) -> Tensor:
        """[V/R, hidden] weight of the language-model head; on the last stage."""
        last = self.chunks[-1]
        if self.config.tie_word_embeddings:
            shared: Tensor = last.shared_embedding_or_output_weight()
            return shared
        weight: Tensor = last.output_layer.weight
        return weight

    def scores(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N] float32 numbers of the scalar head; on the last stage."""
        name = scalar_head_name(self.whole)
        layer = cast(nn.Linear, self.chunks[-1].get_submodule(name))
        bias = None if layer.bias is None else layer.bias.float()
        found = nn.functional.linear(hidden.float(), layer.weight.float(), bias)
        return found.squeeze(-1)

    @property
    def embedding_copy(self) -> str | None:
        """Name of the copy of a tied embedding on the last of several stages."""
        is_copy = not self.layout.is_first_stage and self.config.tie_word_embeddings
        return _OUTPUT if is_copy and _OUTPUT in self._computed else None

    def stage_of(self, entry: Entry) -> int:
        """Return the stage that has a parameter."""
        last = self.layout.num_stages - 1
        if entry.layer is None:
            return 0 if entry.name == EMBEDDING else last
        num_parts = self.layout.num_stages * self.layout.num_chunks
        per_part = int(self.config.num_hidden_layers) // num_parts
        return entry.layer // per_part % self.layout.num_stages

    def load(self, source: str | Path) -> None:
        """Load this rank's part of a folder or hub name, tensor after tensor."""
        # Not by transformers, which would load the whole model on every rank.
        files = MixtureFiles(WeightFiles(source))
        for name in self._computed:
            entry = self.entry(name)
            if name in self._head and name not in files.shapes:
                # The folder is a language model's, so the head is a new one.
                self.masters.assign(name, self.whole.get_parameter(name).detach())
                continue
            parts = [
                files.read_part(source, self.shapes[source], box.slices)
                for source, box in zip(entry.sources, self.boxes(entry), strict=True)
            ]
            self.masters.assign(name, self.joined(name, parts))

    def entry(self, name: str) -> Entry:
        """Return the entry of a parameter of this rank; of the original for a copy."""
        return self.entries[name if name in self.entries else EMBEDDING]

    def has(self, entry: Entry) -> bool:
        """Return whether this rank has a part of a parameter."""
        return entry.name in self._computed

    def computed(self, name: str) -> Tensor:
        """Return a parameter of this rank as the model computes with it."""
        return self._computed[name].detach()

    def boxes(self, entry: Entry) -> list[Box]:
        """Return which parts of the tensors of Hugging Face this rank has."""
        layout = self.layout
        rank, size = layout.tensor_rank, layout.tensor_size
        if entry.is_of_experts:
            rank, size = layout.expert_rank, layout.expert_size
        shapes = (self.shapes[source] for source in entry.sources)
        return [box_of(entry.kind, shape, rank, size) for shape in shapes]

    def joined(self, name: str, parts: list[Tensor]) -> Tensor:
        """Return a parameter of this rank from its parts of Hugging Face's tensors."""
        kind, like = self.entry(name).kind, self._computed[name].shape
        return join(kind, parts, self._num_groups, like)

    def parts(self, entry: Entry, own: Tensor) -> list[Tensor]:
        """Return this rank's parts of Hugging Face's tensors; inverse of `joined`."""
        return split(entry.kind, own, self.boxes(entry), self._num_groups)

    @property
    def _num_groups(self) -> int:
        return int(self.config.num_key_value_heads) // self.layout.tensor_size

    def whole_parts(self, entry: Entry, own: Tensor | None) -> list[Tensor]:
        """Return the whole tensors of Hugging Face; collective on all ranks.

        Args:
            entry: The parameter.
            own: This rank's part; None on stages without the parameter.
        """
        if own is not None:
            shards = [own]
            if entry.is_of_experts:
                shards = self.layout.gather_over_experts(own)
            elif entry.is_cut:
                shards = self.layout.gather_over_tensor(own)
            pieces = [
                unite(entry.kind, of_source)[: shape[0]]
                for of_source, shape in zip(
                    zip(*(self._pieces(entry, s) for s in shards), strict=True),
                    (self.shapes[source] for source in entry.sources),
                    strict=True,
                )
            ]
        else:
            device = self.layout.device
            pieces = [
                torch.empty(self.shapes[source], device=device)
                for source in entry.sources
            ]
        stage = self.stage_of(entry)
        # Broadcasts take dense memory only.
        return [self.layout.from_stage(p.contiguous(), stage) for p in pieces]

    def _pieces(self, entry: Entry, shard: Tensor) -> list[Tensor]:
        # Padding of a vocabulary stays until the parts of all ranks are together.
        return [shard] if entry.kind == "vocabulary" else self.parts(entry, shard)

    def full_tensors(self, *, computed: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Each parameter of Hugging Face once, whole; collective on all ranks.

        Args:
            computed: As the model computes with it, rounded where that is in bfloat16.
        """
        for entry in self.entries.values():
            own = None
            if self.has(entry) and computed:
                own = self._computed[entry.name].detach().float()
            elif self.has(entry):
                own = self.masters.whole(entry.name)
            yield from zip(entry.sources, self.whole_parts(entry, own), strict=True)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each gradient of a step, summed, like `full_tensors`."""
        masters = self.masters
        for entry in self.entries.values():
            own = None
            if self.has(entry):
                own = masters.whole(entry.name, masters.parameters[entry.name].grad)
            yield from zip(entry.sources, self.whole_parts(entry, own), strict=True)


def _whole_model(policy: PolicyConfig, config: Any) -> Any:
    """Build the model of transformers without data, except for a new head.

    A model with a scalar head uses its embedding once, so it is not tied.
    """
    if policy.head == "lm":
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    config.tie_word_embeddings = False
    whole = scalar_model_skeleton(
        policy.model_name, policy.head, policy.hf_config_overrides, policy.seed
    )
    if whole is None:
        raise UnsupportedModelError(
            f"the training backend 'megatron' cannot build {policy.model_name} with "
            f"policy.head {policy.head!r}; use the backend dtensor"
        )
    return whole


def _head_parameters(whole: nn.Module) -> list[str]:
    name = scalar_head_name(whole)
    layer = whole.get_submodule(name)
    return [f"{name}.{part}" for part, _ in layer.named_parameters()]


def _replace_head(module: HiddenStates, whole: nn.Module) -> None:
    """Replace the language-model head of the last stage by a scalar head."""
    name = scalar_head_name(whole)
    layer = cast(nn.Linear, whole.get_submodule(name))
    del module.output_layer
    has_bias = any(part == "bias" for part, _ in layer.named_parameters())
    module.add_module(name, nn.Linear(layer.in_features, 1, bias=has_bias))


def _check_names(own: list[Entry], shapes: dict[str, torch.Size]) -> None:
    """Refuse a model with parameters that the conversion does not know."""
    # A parameter without an entry would keep the memory that it was allocated with.
    known = {source for entry in own for source in entry.sources}
    odd = sorted(known ^ set(shapes))
    if odd:
        raise UnsupportedModelError(
            "the training backend 'megatron' does not know how the model is made up: "
            f"{', '.join(odd[:3])} is only in one of the two; use the backend dtensor"
        )


def _counted_over_stages(name: str, offset: int) -> str:
    found = _LAYER.match(name)
    if found is None:
        return name
    return f"decoder.layers.{int(found[1]) + offset}.{name[found.end() :]}"
