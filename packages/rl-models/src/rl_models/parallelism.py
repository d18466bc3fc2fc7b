"""Layout of a policy's workers over a model and its rows. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from rl_distributed.config import Config
from rl_distributed.errors import ConfigError
from rl_distributed.named_sharding import NamedSharding

__all__ = [
    "DATA_AXIS",
    "MODEL_AXES",
    "ParallelismConfig",
    "check_axes",
    "check_model_divides",
]

DATA_AXIS = "data_parallel"
"""Axis of the workers whose coordinates get different rows."""
MODEL_AXES = ("pipeline", "context", "tensor")
"""Axes whose workers hold one copy of the model together, outermost first."""


class ParallelismConfig(Config):
    """Section `policy.parallelism`: how many workers share what.

    The number of workers is `data x pipeline x context x tensor`.
    """

    data: int | None = Field(None, gt=0)
    """Copies of the model that share the rows of a batch; null: as many as the workers
    are enough for. With the `dtensor` backend they also share weights, gradients and
    optimizer state (FSDP)."""
    tensor: int = Field(1, gt=0)
    """Workers that share each layer: every one has some of the attention heads, of the
    feed-forward columns and of the vocabulary."""
    sequence: bool = False
    """Between the shared parts of a layer, each of the `tensor` workers keeps its part
    of the tokens: less memory for activations, at the same traffic."""
    pipeline: int = Field(1, gt=0)
    """Workers that each have some of the layers."""
    context: int = Field(1, gt=0)
    """Workers that share the tokens of each row, and its attention heads. With the
    `dtensor` backend they share the weights as the `data` ones do."""
    expert: int = Field(1, gt=0)
    """Workers that share the experts of a mixture: some of those that have other
    tokens (`data` and `context`), neighbours first."""

    @model_validator(mode="after")
    def _check(self) -> ParallelismConfig:
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "sequence needs tensor > 1, the workers that share the tokens: got "
                "tensor = 1; set sequence to false or tensor to 2 or more"
            )
        return self

    @property
    def model_size(self) -> int:
        """Workers that hold one copy of the model together."""
        return self.pipeline * self.context * self.tensor

    def data_size(self, num_workers: int) -> int:
        """Return the number of shares that the rows of a batch are cut into.

        Args:
            num_workers: Workers of the policy.

        Raises:
            ConfigError: The layout does not fit that number of workers.
        """
        size, left = divmod(num_workers, self.model_size)
        token_workers = size * self.context
        product = " x ".join(
            f"{name} {value}" for name, value in self._model_sizes() if value > 1
        )
        if left or not size:
            above = (size + 1) * self.model_size
            near = f"{size * self.model_size} or {above}" if size else str(above)
            raise ConfigError(
                f"policy.parallelism ({product}) needs a multiple of "
                f"{self.model_size} workers: got {num_workers}; use {near} workers "
                "(cluster.workers_per_node)"
            )
        if self.data is not None and self.data != size:
            raise ConfigError(
                f"policy.parallelism.data must be {size}, the workers that "
                f"{product or 'one copy of the model'} leaves of {num_workers}: got "
                f"{self.data}; leave it null, or use "
                f"{self.data * self.model_size} workers (cluster.workers_per_node)"
            )
        if token_workers % self.expert:
            raise ConfigError(
                "policy.parallelism.expert must divide the workers that have other "
                f"tokens, data x context ({token_workers}): got {self.expert}; use "
                f"{_near([token_workers], self.expert)}"
            )
        return size

    def sharding(
        self, num_workers: int, *, stages_outermost: bool = False
    ) -> NamedSharding:
        """Return the grid of the workers, `data_parallel` outermost.

        Args:
            num_workers: Workers of the policy.
            stages_outermost: Number the workers stage by stage: those of a stage with
                other rows are neighbours then, in place of the stages of one copy.

        Raises:
            ConfigError: The layout does not fit that number of workers.
        """
        sizes = [self.data_size(num_workers)]
        names = [DATA_AXIS]
        for name, size in self._model_sizes():
            if size > 1:
                names.append(f"{name}_parallel")
                sizes.append(size)
        if stages_outermost and self.pipeline > 1:
            # `data` and `pipeline` are the two outermost axes.
            shape = [sizes[1], sizes[0], *sizes[2:]]
            ranks = np.arange(num_workers).reshape(shape).swapaxes(0, 1)
        else:
            ranks = np.arange(num_workers).reshape(sizes)
        return NamedSharding(ranks, names)

    def _model_sizes(self) -> list[tuple[str, int]]:
        return [(name, getattr(self, name)) for name in MODEL_AXES]


def check_axes(
    parallelism: ParallelismConfig, offered: tuple[str, ...], backend: str
) -> None:
    """Refuse axes that a training backend does not have.

    Args:
        parallelism: The layout.
        offered: Names of the axes besides `data` that the backend has.
        backend: Its name, for the message.

    Raises:
        ConfigError: An axis that it does not have is larger than 1.
    """
    for name in (*MODEL_AXES, "expert"):
        size = getattr(parallelism, name)
        if size > 1 and name not in offered:
            has = ", ".join(("data", *offered))
            raise ConfigError(
                f"policy.parallelism.{name} must be 1 with the training backend "
                f"{backend!r}, which has {has}: got {size}"
            )


_DIVIDED_BY: Mapping[str, tuple[tuple[str, str], ...]] = {
    "tensor": (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "key-value heads"),
        ("intermediate_size", "feed-forward columns"),
        ("num_experts", "experts"),
        ("num_local_experts", "experts"),
    ),
    "pipeline": (("num_hidden_layers", "layers"),),
    "expert": (("num_experts", "experts"), ("num_local_experts", "experts")),
}


def check_model_divides(
    parallelism: ParallelismConfig, model_config: Mapping[str, Any], model_name: str
) -> None:
    """Refuse a layout that the model's heads, layers or experts cannot be cut into.

    Args:
        parallelism: The layout.
        model_config: What the model's `config.json` says, overrides included.
        model_name: For the message.

    Raises:
        ConfigError: A size does not divide; with the nearest sizes that do.
    """
    text: Any = model_config.get("text_config")
    shape = {**model_config, **(text if isinstance(text, Mapping) else {})}
    for axis, fields in _DIVIDED_BY.items():
        size = getattr(parallelism, axis)
        counts = {
            what: shape[field]
            for field, what in fields
            if isinstance(shape.get(field), int)
        }
        if all(count % size == 0 for count in counts.values()):
            if axis == "expert" and size > 1 and shape and not counts:
                raise ConfigError(
                    f"policy.parallelism.expert must be 1 with {model_name}, which has "
                    f"no experts: got {size}"
                )
            continue
        has = ", ".join(f"{count} {what}" for what, count in counts.items())
        raise ConfigError(
            f"policy.parallelism.{axis} must divide what {model_name} has ({has}): got "
            f"{size}; use {_near(counts.values(), size)}"
        )
    _check_heads(parallelism, shape.get("num_attention_heads"), model_name)
    _check_experts(parallelism, shape, model_name)


def _check_experts(
    parallelism: ParallelismConfig, shape: Mapping[str, Any], model_name: str
) -> None:
    """Refuse more ranks that share experts than divide them."""
    # Tensor-parallel ranks deal them out too.
    size = parallelism.tensor * parallelism.expert
    for field in ("num_experts", "num_local_experts"):
        count = shape.get(field)
        if parallelism.expert > 1 and isinstance(count, int) and count % size:
            raise ConfigError(
                "policy.parallelism.tensor x expert must divide what "
                f"{model_name} has ({count} experts): got {parallelism.tensor} x "
                f"{parallelism.expert}; use expert = "
                f"{_near([count // parallelism.tensor], parallelism.expert)}"
            )


def _check_heads(parallelism: ParallelismConfig, count: Any, model_name: str) -> None:
    """Refuse workers that share tokens where each does not get as many heads."""
    size, tensor = parallelism.context, parallelism.tensor
    if not isinstance(count, int) or count % tensor:
        return
    own = count // tensor
    if own % size:
        of_rank = f", {own} for each of {tensor} tensor" if tensor > 1 else ""
        raise ConfigError(
            f"policy.parallelism.context must divide what {model_name} has ({count} "
            f"attention heads{of_rank}): got {size}; use {_near([own], size)}"
        )


def _near(counts: Collection[int], size: int) -> str:
    """Name the sizes next to one that divide all counts."""
    possible = [
        n for n in range(1, min(counts) + 1) if all(count % n == 0 for count in counts)
    ]
    near = sorted(sorted(possible, key=lambda n: abs(n - size))[:2])
    return " or ".join(map(str, near))
