"""Sizes of the adapters of `policy.lora`: how many numbers, and on which rank.

Beside a linear layer with `n` inputs and `m` outputs there are `A`, [r, n], and `B`,
[m, r]. Tensor-parallel ranks cut the one that lies along the cut side of the layer, and
each keeps the other whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_models.lora_config import LoRAConfig
from rl_models.planning.layouts import Layout
from rl_models.planning.model_shape import ModelShape

__all__ = ["AdapterShape"]


@dataclass(frozen=True, slots=True)
class _Linear:
    """One kind of linear layer."""

    inputs: int
    outputs: int
    cut: Literal["inputs", "outputs"]
    """The side that tensor-parallel ranks share."""
    count: int
    """Number of them in the model."""


def _linear_layers(shape: ModelShape) -> dict[str, _Linear]:
    """Return the linear layers by their names in a decoder layer.

    Experts are none of them: they get no adapters.
    """
    hidden, columns = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.query_size, shape.key_value_size
    layers, dense = shape.num_layers, shape.num_dense_layers
    found = {
        "q_proj": _Linear(hidden, queries, "outputs", layers),
        "k_proj": _Linear(hidden, keys, "outputs", layers),
        "v_proj": _Linear(hidden, keys, "outputs", layers),
        "o_proj": _Linear(queries, hidden, "inputs", layers),
        "gate_proj": _Linear(hidden, columns, "outputs", dense),
        "up_proj": _Linear(hidden, columns, "outputs", dense),
        "down_proj": _Linear(columns, hidden, "inputs", dense),
    }
    return {name: linear for name, linear in found.items() if linear.count}


class AdapterShape:
    """The adapters of a model.

    Args:
        shape: Sizes of the model.
        lora: Section `policy.lora`.
    """

    def __init__(self, shape: ModelShape, lora: LoRAConfig) -> None:
        self._rank = lora.r
        self._num_layers = shape.num_layers
        self._shape = shape
        self._modules = lora.modules_to_save or []
        names = lora.target_modules
        self._targets = [
            linear
            for name, linear in _linear_layers(shape).items()
            if names is None or name in names
        ]

    @property
    def num_parameters(self) -> int:
        """Numbers of all adapters."""
        return self.parameters_of_rank(Layout())

    def parameters_of_rank(self, layout: Layout) -> int:
        """Return the numbers of a rank before data-parallel ranks share them.

        Args:
            layout: Layout of the ranks that share the model.
        """
        numbers = 0
        for linear in self._targets:
            inputs, outputs = linear.inputs, linear.outputs
            if linear.cut == "inputs":
                inputs //= layout.tensor
            else:
                outputs //= layout.tensor
            numbers += linear.count * self._rank * (inputs + outputs)
        return -(-numbers // layout.pipeline)

    @property
    def trains_head(self) -> bool:
        """Whether `modules_to_save` has the head, or the embedding that is the head."""
        names = {name.rpartition(".")[2] for name in self._modules}
        is_tied = self._shape.ties_embeddings and "embed_tokens" in names
        return "lm_head" in names or is_tied

    def modules_of_rank(self, layout: Layout) -> int:
        """Return the numbers of `modules_to_save` on a rank that has them.

        Embedding and head are counted; norms are too small to matter.

        Args:
            layout: Layout of the ranks that share the model.
        """
        shape = self._shape
        tables = self.trains_head + any(
            name.rpartition(".")[2] == "embed_tokens" for name in self._modules
        )
        num_tables = min(tables, 1) if shape.ties_embeddings else tables
        return num_tables * shape.embedding_parameters // layout.tensor

    @property
    def saved_per_token(self) -> float:
        """Numbers that one decoder layer keeps per token for the backward pass.

        These are the results of `A`. What enters `A` is kept for the layer beside it.
        """
        count = sum(linear.count for linear in self._targets)
        return self._rank * count / self._num_layers
