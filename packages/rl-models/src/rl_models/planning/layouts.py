"""How the ranks of a model share it: which sizes divide it, and which do not.

| size       | what it cuts                                       | `dtensor` runs it |
|------------|----------------------------------------------------|-------------------|
| `data`     | rows of a batch; weights and state too (FSDP)      | yes               |
| `tensor`   | heads, feed-forward columns, vocabulary            | without experts   |
| `pipeline` | layers                                             | not yet           |
| `context`  | tokens of a row                                    | not yet           |
| `expert`   | experts; its ranks are some of the `data` ones     | not yet           |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rl_models.planning.model_shape import ModelShape

__all__ = ["RUNNABLE", "Layout", "layout_problems", "possible_layouts", "sizes_near"]

RUNNABLE = ("data", "tensor")
"""Sizes above 1 that the `dtensor` backend can run."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes; the ranks are `data x tensor x pipeline x context`."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence: bool = False
    """Tensor-parallel ranks share the tokens between the cut parts of a layer."""
    replicas: int = 1
    """Groups of `data` ranks that each hold all shards (HSDP)."""

    @property
    def num_ranks(self) -> int:
        """All ranks of the model."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def shards(self) -> int:
        """Ranks that share weights and optimizer state by rows of the weights."""
        return self.data // self.replicas

    @property
    def splits_of_hidden(self) -> int:
        """Ranks that share what flows between the cut parts of a layer."""
        return self.tensor if self.sequence else 1

    def vocabulary_parts(self, shape: ModelShape) -> int:
        """Return how many ranks share the logits of one position."""
        return self.tensor if shape.vocab_size % self.tensor == 0 else 1

    def layer_parameters_of_rank(self, shape: ModelShape) -> int:
        """Return a layer's parameters before data-parallel ranks share them."""
        experts = shape.num_experts * shape.expert_parameters if (
            shape.num_expert_layers
        ) else 0  # fmt: skip
        cut = shape.largest_layer_parameters - shape.norm_parameters - experts
        own = experts // (self.tensor * self.expert)
        return shape.norm_parameters + cut // self.tensor + own

    def parameters_of_rank(self, shape: ModelShape) -> int:
        """Return the parameters of a rank before data-parallel ranks share them.

        Of a pipeline, that is the stage with the larger of the two ends.
        """
        norms = shape.num_layers * shape.norm_parameters
        ends = shape.embedding_parameters + shape.head_parameters
        experts = shape.num_expert_parameters
        rest = shape.num_parameters - norms - ends - experts - shape.hidden_size
        layers = norms + rest // self.tensor + experts // (self.tensor * self.expert)
        end = max(shape.embedding_parameters, shape.head_parameters)
        ends = ends if self.pipeline == 1 else end
        return (
            -(-layers // self.pipeline)
            + ends // self.vocabulary_parts(shape)
            + shape.hidden_size
        )

    def missing(self, shape: ModelShape) -> tuple[str, ...]:
        """Return the sizes above 1 that `dtensor` cannot run for a model."""
        names = ("tensor", "pipeline", "context", "expert")
        runnable = RUNNABLE if shape.num_experts == 0 else ("data",)
        return tuple(n for n in names if getattr(self, n) > 1 and n not in runnable)

    def describe(self) -> str:
        """Name the sizes that are not 1."""
        names = ("data", "tensor", "pipeline", "context", "expert")
        sizes = [f"{n} {getattr(self, n)}" for n in names if getattr(self, n) > 1]
        if self.sequence:
            sizes.append("sequence")
        if self.replicas > 1:
            sizes.append(f"in {self.replicas} replicas")
        return ", ".join(sizes) or "data 1"


def _counts(shape: ModelShape) -> dict[str, tuple[tuple[str, int], ...]]:
    """Return what each size has to divide."""
    columns = [("feed-forward columns", shape.intermediate_size)]
    experts = [("experts", shape.num_experts)] if shape.num_experts else []
    if shape.num_expert_layers:
        columns.append(("columns of an expert", shape.expert_size))
    heads = ("attention heads", shape.num_heads)
    return {
        "tensor": (heads, ("key-value heads", shape.num_key_value_heads), *columns),
        "pipeline": (("layers", shape.num_layers),),
        "expert": tuple(experts),
    }


def sizes_near(counts: list[int], size: int) -> list[int]:
    """Return the one or two sizes next to `size` that divide all counts."""
    most = min(counts)
    fits = [n for n in range(1, most + 1) if all(c % n == 0 for c in counts)]
    return sorted(sorted(fits, key=lambda n: (abs(n - size), n))[:2])


def layout_problems(
    shape: ModelShape, layout: Layout, row_length: int, num_ranks: int
) -> list[str]:
    """Return why a model cannot be cut so, with the nearest sizes that it can.

    Args:
        shape: Sizes of the model.
        layout: Who shares it.
        row_length: Longest row.
        num_ranks: Ranks that there are.
    """
    found = []
    for name, what in _counts(shape).items():
        size = getattr(layout, name)
        if size == 1:
            continue
        if not what:
            found.append(f"{name} must be 1 for a model without experts: got {size}")
            continue
        wrong = [f"{count:,} {label}" for label, count in what if count % size]
        if wrong:
            near = sizes_near([count for _, count in what], size)
            found.append(
                f"{name} must divide the model's {' and '.join(wrong)}: got {size}; "
                f"use {' or '.join(map(str, near))}"
            )
    if layout.expert > 1 and layout.data % layout.expert:
        near = sizes_near([layout.data], layout.expert)
        found.append(
            f"expert must divide data ({layout.data}), whose ranks share the experts: "
            f"got {layout.expert}; use {' or '.join(map(str, near))}"
        )
    if row_length % (2 * layout.context) and layout.context > 1:
        found.append(
            "twice context must divide policy.max_total_sequence_length "
            f"({row_length}): got {layout.context}; use a length of "
            f"{-(-row_length // (2 * layout.context)) * 2 * layout.context}"
        )
    if layout.data % layout.replicas:
        near = sizes_near([layout.data], layout.replicas)
        found.append(
            f"policy.dtensor.data_replicas must divide data ({layout.data}): got "
            f"{layout.replicas}; use {' or '.join(map(str, near))}"
        )
    if layout.num_ranks != num_ranks:
        found.append(
            f"data x tensor x pipeline x context must be the number of ranks "
            f"({num_ranks}): got {layout.num_ranks} ({layout.describe()})"
        )
    return found


def possible_layouts(
    shape: ModelShape, num_ranks: int, row_length: int, ranks_per_node: int
) -> Iterator[Layout]:
    """Yield the layouts of a number of ranks that divide a model.

    Tensor-parallel ranks stay within a node: they talk several times in each layer.

    Args:
        shape: Sizes of the model.
        num_ranks: Ranks that there are.
        row_length: Longest row.
        ranks_per_node: Ranks on one node.
    """
    for tensor in _divisors(num_ranks):
        for pipeline in _divisors(num_ranks // tensor):
            for context in _divisors(num_ranks // tensor // pipeline):
                data = num_ranks // tensor // pipeline // context
                plain = Layout(data, tensor, pipeline, context, sequence=tensor > 1)
                experts = _divisors(data) if shape.num_experts else [1]
                for layout in (replace(plain, expert=size) for size in experts):
                    fits = tensor <= ranks_per_node
                    if fits and not layout_problems(
                        shape, layout, row_length, num_ranks
                    ):
                        yield layout


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
