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

from rl_models.checkpoint.weight_files import WeightFiles
from rl_models.config import PolicyConfig
from rl_models.errors import UnsupportedModelError
from rl_models.ops.scalar_head import scalar_head_name, scalar_model_skeleton
from rl_models.training.megatron.architecture import HiddenStates, build_gpt
from rl_models.training.megatron.conversion import Entry, entries, join, split
from rl_models.training.megatron.families import model_config
from rl_models.training.megatron.layout import RankLayout

__all__ = ["MegatronModel"]

_EMBEDDING = "embedding.word_embeddings.weight"
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
        self.whole = _whole_model(config, self.config)
        """The model of transformers, for names, shapes and config; only a new scalar
        head has data."""
        head = [] if config.head == "lm" else _head_parameters(self.whole)
        self.shapes = {n: p.shape for n, p in self.whole.named_parameters()}
        recompute = config.megatron.activation_checkpointing
        # Megatron-core creates some buffers on CUDA, whether or not there is a GPU.
        with layout.devices():
            module = build_gpt(self.config, layout, recompute=recompute)
            if head and layout.is_last_stage:
                _replace_head(module, self.whole)
        self.module: HiddenStates = module.to(layout.device)
        self.module.requires_grad_(trainable)
        own = list(entries(self.config, head))
        _check_names(own, self.shapes)
        # Megatron-core numbers the layers of each stage from 0.
        offset = get_transformer_layer_offset(module.config, pp_rank=layout.stage)
        self.parameters: dict[str, nn.Parameter] = {
            _counted_over_stages(name, offset): parameter
            for name, parameter in module.named_parameters()
        }
        """Parameters in Megatron-core's names, layers counted over all stages."""
        self.entries = {entry.name: entry for entry in own}
        self._head = frozenset(head)
        self.load(config.model_name)

    @property
    def output_weight(self) -> Tensor:
        """[V/R, hidden] weight of the language-model head; on the last stage."""
        if self.config.tie_word_embeddings:
            shared: Tensor = self.module.shared_embedding_or_output_weight()
            return shared
        weight: Tensor = self.module.output_layer.weight
        return weight

    def scores(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N] float32 numbers of the scalar head; on the last stage."""
        name = scalar_head_name(self.whole)
        layer = cast(nn.Linear, self.module.get_submodule(name))
        bias = None if layer.bias is None else layer.bias.float()
        found = nn.functional.linear(hidden.float(), layer.weight.float(), bias)
        return found.squeeze(-1)

    @property
    def embedding_copy(self) -> nn.Parameter | None:
        """The copy of a tied embedding on the last of several stages."""
        if self.layout.is_first_stage or not self.config.tie_word_embeddings:
            return None
        return self.parameters.get(_OUTPUT)

    def stage_of(self, entry: Entry) -> int:
        """Return the stage that has a parameter."""
        last = self.layout.num_stages - 1
        if entry.layer is None:
            return 0 if entry.name == _EMBEDDING else last
        per_stage = int(self.config.num_hidden_layers) // self.layout.num_stages
        return entry.layer // per_stage

    def load(self, source: str | Path) -> None:
        """Load the weights of a folder or hub name, one tensor after the other."""
        # Not by transformers, which would load the whole model on every rank.
        files = WeightFiles(source)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                entry = self.entry(name)
                if name in self._head and name not in files.shapes:
                    # The folder is a language model's, so the head is a new one.
                    parameter.copy_(self.whole.get_parameter(name))
                    continue
                parts = [files.read(n, self.shapes[n]) for n in entry.sources]
                parameter.copy_(self.own_part(entry, parts))

    def entry(self, name: str) -> Entry:
        """Return the entry of a parameter of this rank; of the original for a copy."""
        return self.entries[name if name in self.entries else _EMBEDDING]

    def own_part(self, entry: Entry, parts: list[Tensor]) -> Tensor:
        """Return this rank's part of whole tensors of Hugging Face."""
        groups = self.config.num_key_value_heads
        rank, size = self.layout.tensor_rank, self.layout.tensor_size
        return join(entry.kind, parts, groups, rank, size)

    def whole_parts(self, entry: Entry, part: Tensor | None) -> list[Tensor]:
        """Return the whole tensors of Hugging Face; collective on all ranks.

        Args:
            entry: The parameter.
            part: This rank's part; None on stages without the parameter.
        """
        shapes = [self.shapes[source] for source in entry.sources]
        groups = self.config.num_key_value_heads
        if part is not None:
            shards = [part]
            if entry.is_sharded:
                shards = self.layout.gather_over_tensor(part)
            pieces = split(entry.kind, shards, shapes, groups)
        else:
            device = self.layout.device
            pieces = [torch.empty(shape, device=device) for shape in shapes]
        stage = self.stage_of(entry)
        # Broadcasts take dense memory only.
        return [self.layout.from_stage(p.contiguous(), stage) for p in pieces]

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter of Hugging Face once, whole; collective on all ranks."""
        for entry in self.entries.values():
            parameter = self.parameters.get(entry.name)
            own = None if parameter is None else parameter.detach()
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
