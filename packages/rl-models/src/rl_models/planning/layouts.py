"""Layouts: how ranks share a model, and which sizes divide it.

| size       | what it cuts                                       | `dtensor` runs it |
|------------|----------------------------------------------------|-------------------|
| `data`     | rows of a batch; weights and state too (FSDP)      | yes               |
| `tensor`   | heads, feed-forward columns, experts, vocabulary   | yes               |
| `pipeline` | layers                                             | alone or with     |
|            |                                                    | `tensor`, `data`  |
| `context`  | tokens of a row; weights and state too (FSDP)      | yes               |
| `expert`   | experts; its ranks are some with other tokens      | without `pipeline`|
|            |                                                    | and adapters      |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rl_models.planning.model_shape import ModelShape

__all__ = ["RUNNABLE", "Layout", "layout_problems", "possible_layouts", "sizes_near"]

RUNNABLE = ("data", "pipeline", "context", "tensor", "expert")
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
    backend: str = "dtensor"
    """Whose ranks they are; those of `megatron` that have other rows hold whole copies
    of what a tensor rank and stage has. Others are taken for `dtensor`."""
    has_adapters: bool = False
    """Whether adapters are trained in place of the weights."""

    @property
    def num_ranks(self) -> int:
        """All ranks of the model."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def shards(self) -> int:
        """Ranks that share weights and optimizer state by rows of the weights."""
        if self.backend == "megatron":
            return 1
        return self.data * self.context // self.replicas

    @property
    def is_sharded(self) -> bool:
        """Whether ranks with other tokens share weights and optimizer state."""
        return self.backend != "megatron" and self.data * self.context > 1

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

    @property
    def missing(self) -> tuple[str, ...]:
        """Sizes above 1 that the backend cannot run."""
        names = ("tensor", "pipeline", "context", "expert")
        beside = {
            "expert": self.pipeline + self.has_adapters,
            "pipeline": self.context * self.expert,
        }
        if self.backend == "megatron":
            beside = {"context": 2}
        return tuple(
            n
            for n in names
            if getattr(self, n) > 1 and (n not in RUNNABLE or beside.get(n, 1) > 1)
        )

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
    columns += experts
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


def layout_problems(shape: ModelShape, layout: Layout, num_ranks: int) -> list[str]:
    """Return why a model cannot be cut so, with the nearest sizes that it can.

    Args:
        shape: Sizes of the model.
        layout: Layout of the ranks that share it.
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
    others = layout.data * layout.context
    if layout.expert > 1 and others % layout.expert:
        near = sizes_near([others], layout.expert)
        found.append(
            f"expert must divide data x context ({others}), the ranks with other "
            f"tokens: got {layout.expert}; use {' or '.join(map(str, near))}"
        )
    shared = layout.tensor * layout.expert
    if layout.expert > 1 and shape.num_experts and shape.num_experts % shared:
        found.append(
            f"tensor x expert must divide the model's {shape.num_experts:,} experts: "
            f"got {layout.tensor} x {layout.expert}"
        )
    # Context ranks deal out the heads that a tensor-parallel rank has.
    heads = shape.num_heads // layout.tensor
    if heads % layout.context:
        near = sizes_near([heads], layout.context)
        found.append(
            f"context must divide the model's {shape.num_heads:,} attention heads, of "
            f"which a rank has {heads:,}: got {layout.context}; use "
            f"{' or '.join(map(str, near))}"
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
    shape: ModelShape,
    num_ranks: int,
    ranks_per_node: int,
    backend: str = "dtensor",
    *,
    has_adapters: bool = False,
) -> Iterator[Layout]:
    """Yield the layouts of a number of ranks that divide a model.

    Tensor-parallel ranks stay within a node, because they communicate several times in
    each layer.

    Args:
        shape: Sizes of the model.
        num_ranks: Number of ranks.
        ranks_per_node: Ranks on one node.
        backend: The training backend.
        has_adapters: Whether adapters are trained.
    """
    for tensor in _divisors(num_ranks):
        for pipeline in _divisors(num_ranks // tensor):
            for context in _divisors(num_ranks // tensor // pipeline):
                data = num_ranks // tensor // pipeline // context
                plain = Layout(
                    *(data, tensor, pipeline, context),
                    sequence=tensor > 1,
                    backend=backend,
                    has_adapters=has_adapters,
                )
                experts = _divisors(data * context) if shape.num_experts else [1]
                for layout in (replace(plain, expert=size) for size in experts):
                    fits = tensor <= ranks_per_node
                    if fits and not layout_problems(shape, layout, num_ranks):
                        yield layout


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
