"""Filters that select the rows of a batch worth training on.

They return masks and counts, and never drop a row silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.advantages.baselines import calculate_baseline_and_std_per_group
from rl_algorithms.advantages.checks import check_rewards
from rl_algorithms.errors import LossInputError, NoLearningSignalError
from rl_algorithms.rollout.result import TrajectoryRows
from rl_distributed.batch.batched_data_dict import BatchedDataDict

__all__ = [
    "DynamicSamplingBuffer",
    "mask_sequence_logprob_error",
    "named_rewards",
    "rows_with_variance",
]


def rows_with_variance(
    rewards: Tensor,
    group_index: Tensor,
    valid_mask: Tensor | None = None,
    named_rewards: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Return [N] bool, whether the rewards of a row's group differ.

    A group whose answers all earn the same reward has zero advantages and no gradient.

    Args:
        rewards: [N].
        group_index: [N] group of each row.
        valid_mask: [N], 1 where the row counts; by default all do.
        named_rewards: [N] each; if given, a difference in any of these counts instead.

    Raises:
        LossInputError: The columns do not have the same rows.
    """
    check_rewards(
        rewards,
        group_index=group_index,
        valid_mask=valid_mask,
        **(named_rewards or {}),
    )
    valid = torch.ones_like(group_index) if valid_mask is None else valid_mask
    varied = torch.zeros_like(group_index, dtype=torch.bool)
    for values in [rewards] if named_rewards is None else named_rewards.values():
        applies = (valid != 0) & values.isfinite()
        _, std = calculate_baseline_and_std_per_group(
            group_index,
            # float64, in which sums of float32 rewards are exact: equal rewards must
            # have a deviation of exactly 0.
            torch.where(applies, values, 0.0).to(torch.float64),
            applies,
            leave_one_out_baseline=False,
        )
        varied |= std > 0
    return varied


def mask_sequence_logprob_error(
    sample_mask: Tensor,
    token_mask: Tensor,
    generation_logprobs: Tensor,
    prev_logprobs: Tensor,
    threshold: float,
) -> tuple[Tensor, int]:
    """Mask rows whose mean `exp|sampler - trainer|` exceeds `threshold`.

    Args:
        sample_mask: [N].
        token_mask: [N, S].
        generation_logprobs: [N, S] log-probs of the sampler.
        prev_logprobs: [N, S] log-probs of the trainer, by the same weights.
        threshold: Largest mean that is kept; 1 means perfect agreement.

    Returns:
        The new sample mask, and the number of rows that it lost.

    Raises:
        LossInputError: The columns do not have the same rows and tokens.
    """
    _check_shapes(
        token_mask.shape,
        generation_logprobs=generation_logprobs,
        prev_logprobs=prev_logprobs,
    )
    _check_shapes(token_mask.shape[:1], sample_mask=sample_mask)
    trained = token_mask != 0
    error = torch.where(trained, (generation_logprobs - prev_logprobs).abs().exp(), 0.0)
    # A row without trained tokens has no error, and 0 / 0 would drop it.
    mean = error.sum(-1) / trained.sum(-1).clamp(min=1)
    # Not written as `>`, which would keep rows with NaN.
    dropped = ~(mean <= threshold) & (sample_mask != 0)
    return sample_mask.masked_fill(dropped, 0), int(dropped.sum())


def _check_shapes(shape: torch.Size, **columns: Tensor) -> None:
    for name, value in columns.items():
        if value.shape != shape:
            raise LossInputError(
                f"{name} must have the shape of the rows that it filters, "
                f"{list(shape)}: got {list(value.shape)}"
            )


def named_rewards(rows: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the columns `reward/<name>` of a rollout."""
    return {name: rows[name] for name in rows if name.startswith("reward/")}


class DynamicSamplingBuffer:
    """Collects groups with variance until a training batch is full (DAPO).

    A training batch takes at most `max_gen_batches` generation batches. Rows left over
    when it is full are dropped and counted, because older weights sampled them than the
    next batch will use.

    Args:
        num_rows: Number of rows of a training batch.
        max_gen_batches: Maximum number of generation batches per training batch.
        pad_values: Padding of the columns, by name.
        by_named_rewards: Whether to keep groups in which any column `reward/...`
            varies, instead of their sum.
    """

    def __init__(
        self,
        num_rows: int,
        max_gen_batches: int,
        pad_values: dict[str, int | float] | None = None,
        *,
        by_named_rewards: bool = False,
    ) -> None:
        self._by_named_rewards = by_named_rewards
        self._num_rows, self._max_gen_batches = num_rows, max_gen_batches
        self._pad_values = dict(pad_values or {})
        self._batches: list[TrajectoryRows] = []
        self._num_kept = 0
        self.num_gen_batches = 0
        """Number of generation batches since the last `take`."""
        self.num_generated = 0
        """Number of rows since the last `take`."""

    @property
    def is_full(self) -> bool:
        """Whether `take` can return a full training batch."""
        return self._num_kept >= self._num_rows

    def add(self, rows: TrajectoryRows) -> bool:
        """Keep the rows of groups with variance.

        Args:
            rows: Columns `rewards`, `group_index` and `sample_mask` among others; the
                rows of a group are adjacent.

        Returns:
            Whether the training batch is full.

        Raises:
            NoLearningSignalError: The last allowed generation batch did not fill it.
        """
        keep = rows_with_variance(
            rows["rewards"],
            rows["group_index"],
            rows["sample_mask"],
            named_rewards(rows) if self._by_named_rewards else None,
        )
        kept = rows.select_indices(keep.nonzero().flatten())
        self.num_gen_batches += 1
        self.num_generated += rows.size
        if kept.size:
            self._batches.append(kept)
            self._num_kept += kept.size
        if not self.is_full and self.num_gen_batches >= self._max_gen_batches:
            raise NoLearningSignalError(
                f"dynamic sampling found {self._num_kept} of {self._num_rows} rows "
                f"with different rewards in their group after {self.num_gen_batches} "
                "generation batches (dynamic_sampling_max_gen_batches): the task is "
                "too easy or too hard for the model; change the data, sample more "
                "answers per prompt, or raise the limit"
            )
        return self.is_full

    def take(self) -> tuple[TrajectoryRows | None, dict[str, float]]:
        """Return the training batch and start the next one.

        Group indices are renumbered in order of appearance, because each generation
        batch counts its groups from 0.

        Returns:
            The rows, or None if no group had variance; and metrics of the filter.
        """
        offset = 0
        for batch in self._batches:
            groups = batch["group_index"]
            batch["group_index"] = groups + offset
            # The largest index and not the number of groups, as the filter leaves gaps.
            offset += int(groups.max()) + 1
        rows: TrajectoryRows | None = None
        if self._batches:
            rows = BatchedDataDict.from_batches(
                self._batches, pad_value_dict=self._pad_values
            )
            # Groups are complete on both sides of the cut: a batch is a multiple of the
            # group size.
            rows = rows.slice(0, min(self._num_rows, rows.size))
        metrics = {
            "dynamic_sampling_num_gen_batches": float(self.num_gen_batches),
            "dynamic_sampling_kept_rate": self._num_kept / max(self.num_generated, 1),
            "dynamic_sampling_num_discarded": float(
                max(self._num_kept - self._num_rows, 0)
            ),
        }
        self._batches, self._num_kept = [], 0
        self.num_gen_batches, self.num_generated = 0, 0
        return rows, metrics
