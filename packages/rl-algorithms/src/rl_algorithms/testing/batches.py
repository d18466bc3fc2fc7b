"""Batches for the conformance checks, and transformations of them.

Shapes: B rows, S columns; the log-probs of the next tokens have S - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["LossBatch", "RewardBatch", "reward_batch", "token_batch"]


@dataclass(frozen=True)
class LossBatch:
    """The inputs of a loss."""

    data: Mapping[str, Tensor]
    """Columns of the batch, [B, ...] or [B, S, ...]. With a column `token_mask`, the
    batch has a width S, of which a row uses its `input_lengths`, if present."""
    inputs: Mapping[str, Tensor]
    """Differentiable inputs by argument of the loss: [B, ...], [B, S-1, ...] or
    [B, S, ...], in float64."""
    rows_per_unit: int = 1
    """Rows that belong together and stay in order: 2 where chosen and rejected
    alternate."""

    @property
    def num_rows(self) -> int:
        """B."""
        return len(next(iter(self.inputs.values())))

    @property
    def width(self) -> int | None:
        """S, or None for a batch without tokens."""
        return self.data["token_mask"].shape[1] if "token_mask" in self.data else None

    def counts(self) -> tuple[Tensor, Tensor]:
        """Return the trained sequences and tokens, as training backends count them."""
        rows = self.data["sample_mask"].double()
        if self.width is None:
            return rows.sum(), rows.sum() * 0
        return rows.sum(), (self.data["token_mask"][:, 1:].double().sum(1) * rows).sum()

    def lengths(self) -> Tensor:
        """Return [B], the number of columns that each row uses."""
        if "input_lengths" in self.data:
            return self.data["input_lengths"]
        if self.width is None:
            return torch.ones(self.num_rows, dtype=torch.int64)
        place = torch.arange(1, self.width + 1)
        return (place * (self.data["token_mask"] != 0)).amax(1).clamp(min=2)

    def rows(self, index: Tensor) -> LossBatch:
        """Return these rows."""
        return replace(
            self,
            data={name: value[index] for name, value in self.data.items()},
            inputs={name: value[index] for name, value in self.inputs.items()},
        )

    def with_width(self, width: int, junk: float = 0.0) -> LossBatch:
        """Cut or pad to `width` columns.

        Inputs, masks and columns of integers are padded with 0, as training backends
        do, and other columns with `junk`.
        """
        if self.width is None:
            return self
        extra = width - self.width
        data = {
            name: _extend(
                value,
                extra,
                junk if value.is_floating_point() and "mask" not in name else 0.0,
            )
            if _is_token_column(value, self.width)
            else value
            for name, value in self.data.items()
        }
        inputs = {
            name: _extend(value, extra, 0.0)
            if _is_token_column(value, self.width, self.width - 1)
            else value
            for name, value in self.inputs.items()
        }
        return replace(self, data=data, inputs=inputs)

    def replaced(self, **columns: Tensor) -> LossBatch:
        """Return the batch with these columns added or replaced."""
        return replace(self, data={**self.data, **columns})

    def cast(self, dtype: torch.dtype) -> LossBatch:
        """Return the batch with floating-point values converted to `dtype`."""

        def convert(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: value.to(dtype) if value.is_floating_point() else value
                for name, value in values.items()
            }

        return replace(self, data=convert(self.data), inputs=convert(self.inputs))


def _is_token_column(value: Tensor, *widths: int) -> bool:
    return value.dim() >= 2 and value.shape[1] in widths


def _extend(value: Tensor, extra: int, filler: float) -> Tensor:
    behind = [0, 0] * (value.dim() - 2)
    return pad(value, [*behind, 0, extra], value=filler)


def token_batch(
    seed: int,
    *,
    num_rows: int = 6,
    width: int = 9,
    temperature: float = 0.4,
    **columns: Tensor,
) -> LossBatch:
    """Return rows of different lengths, as from a rollout, in float64.

    Each row is a prompt and an answer, and in long rows the third token of the answer
    is masked. One row is masked as a whole. Columns: `input_ids`, `input_lengths`,
    `token_mask`, `sample_mask`, `advantages` [B], `prev_logprobs`,
    `generation_logprobs`, `reference_policy_logprobs`; input: `next_token_logprobs`.
    Masked positions hold junk, which no loss may read.

    Args:
        seed: Seed of the batch.
        num_rows: B.
        width: S, at least 4.
        temperature: Spread of the differences between the log-probs.
        **columns: Columns to add or replace.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float, *shape: int) -> Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    place = torch.arange(width)
    lengths = integers(4, width + 1, num_rows)
    prompts = integers(1, 4, num_rows)
    answer = (place >= prompts[:, None]) & (place < lengths[:, None])
    tool = (place == prompts[:, None] + 2) & (place < lengths[:, None] - 1)
    mask = (answer & ~tool).double()
    sample_mask = torch.ones(num_rows, dtype=torch.float64)
    if num_rows > 1:
        sample_mask[integers(0, num_rows, 1)] = 0
    prev = -2 + normal(0.5, num_rows, width)
    data: dict[str, Tensor] = {
        "input_ids": integers(0, 16, num_rows, width),
        "input_lengths": lengths,
        "token_mask": mask,
        "sample_mask": sample_mask,
        "advantages": normal(1.0, num_rows),
        "prev_logprobs": prev,
        "generation_logprobs": prev + normal(0.75 * temperature, num_rows, width),
        "reference_policy_logprobs": prev + normal(1.25 * temperature, num_rows, width),
    }
    current = prev[:, 1:] + normal(temperature, num_rows, width - 1)
    return LossBatch(
        data={**data, **columns}, inputs={"next_token_logprobs": current * mask[:, 1:]}
    )


@dataclass(frozen=True)
class RewardBatch:
    """The inputs of an estimator."""

    rewards: Tensor
    """[N] float64."""
    group_index: Tensor
    """[N] rows of one prompt share an index."""
    valid_mask: Tensor
    """[N] 1 for valid rows."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `compute_advantage`: tensors [N, ...], or mappings of them
    by name."""

    def rows(self, index: Tensor) -> RewardBatch:
        """Return these rows."""
        return RewardBatch(
            self.rewards[index],
            self.group_index[index],
            self.valid_mask[index],
            {
                name: {key: part[index] for key, part in value.items()}
                if isinstance(value, Mapping)
                else value[index]
                for name, value in self.extra.items()
            },
        )

    def map_rewards(self, change: Any) -> RewardBatch:
        """Return the batch with `change` applied to every tensor [N] of rewards."""
        extra: dict[str, Any] = {}
        for name, value in self.extra.items():
            if isinstance(value, Mapping):
                extra[name] = {key: change(part) for key, part in value.items()}
            elif value.shape == self.rewards.shape and value.is_floating_point():
                extra[name] = change(value)
            else:
                extra[name] = value
        return replace(self, rewards=change(self.rewards), extra=extra)


def reward_batch(
    seed: int, *, group_sizes: tuple[int, ...] = (4, 2, 3, 1, 4), **extra: Any
) -> RewardBatch:
    """Return rewards of groups of several sizes, in float64 and shuffled.

    The rewards take few distinct values, so that there are ties; the last group has no
    spread; one row in six is invalid.

    Args:
        seed: Seed of the batch.
        group_sizes: Number of rows of each group.
        **extra: See `RewardBatch.extra`.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(group_sizes)
    groups = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    num_rows = len(groups)
    choices = torch.tensor([0.0, 0.25, 0.5, 1.0, -2.0], dtype=torch.float64)
    rewards = choices[torch.randint(0, 5, (num_rows,), generator=generator)]
    rewards = torch.where(groups == len(sizes) - 1, 0.5, rewards)
    valid = torch.rand(num_rows, generator=generator) > 1 / 6
    order = torch.randperm(num_rows, generator=generator)
    batch = RewardBatch(rewards, groups, valid.double(), extra)
    return batch.rows(order)
