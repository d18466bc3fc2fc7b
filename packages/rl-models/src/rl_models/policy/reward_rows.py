"""Training on rewards alone: REINFORCE on rows that were just sampled.

For rows y_i with rewards r_i the loss is -1/N sum_i (r_i - b_i) log p(y_i), whose
gradient estimates that of the expected reward (Williams, 1992, "Simple statistical
gradient-following algorithms for connectionist reinforcement learning"). The baseline
b_i is the mean reward of the rows with the same prompt, where every prompt has several
(Kool, van Hoof and Welling, 2019, "Buy 4 REINFORCE samples, get a baseline for free!"),
else that of the batch. The row's own reward is part of the mean, which scales the
gradient by (n - 1) / n and leaves its direction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.errors import BatchError
from rl_models.types import (
    LossInputType,
    LossType,
    TrainingRows,
)

__all__ = ["ReinforceLoss", "Rewards", "baselines", "reinforce_rows"]

Rewards: TypeAlias = "Tensor | Sequence[float] | Mapping[str, Any] | RewardsOfStep"
"""[B] numbers, several of them by name, or what an environment's `step` returned."""

_NEEDED = ("output_ids", "generation_lengths", "unpadded_sequence_lengths")


class RewardsOfStep(Protocol):
    """The part of an environment's step result that is used here."""

    @property
    def rewards(self) -> Any:
        """[B] numbers, or several of them by name."""
        ...

    @property
    def terminateds(self) -> Any:
        """[B] whether the conversation has ended."""
        ...


class ReinforceLoss:
    """The loss of this module, from the column `advantages` [B, S]."""

    loss_type: LossType = LossType.SEQUENCE_LEVEL
    input_type: LossInputType = LossInputType.LOGPROB

    def __call__(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **inputs: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the micro-batch's share of the loss, and its metrics."""
        # Columns from 1, because the log-prob at i belongs to the token at i + 1.
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        weights = data["advantages"][:, 1:] * mask
        total = -(inputs["next_token_logprobs"] * weights).sum()
        loss = total / global_valid_seqs.clamp(min=1)
        return loss, {"loss": loss.item()}


def reinforce_rows(data: Mapping[str, Any], rewards: Any) -> TrainingRows:
    """Make rows to train on with `ReinforceLoss`.

    Args:
        data: The result of `generate`: B rows.
        rewards: One number per row: a tensor, an array, a list, several of them by
            name, which add up, or the result of an environment's `step`. NaN: the row
            was not scored, and is not trained on.

    Returns:
        `input_ids`, `input_lengths`, `token_mask`, `sample_mask` and `advantages`, the
        rewards above their baseline, [B, S] float32.

    Raises:
        BatchError: Columns are missing, rewards are no finite numbers, one per row, or
            conversations go on after the answer.
    """
    missing = [name for name in _NEEDED if name not in data]
    if missing:
        raise BatchError(
            f"policy.train(batch, rewards) takes what generate gave: the batch lacks "
            f"{', '.join(missing)}; it has {', '.join(map(str, data))}"
        )
    ids = data["output_ids"]
    ends = data["unpadded_sequence_lengths"]
    starts = ends - data["generation_lengths"]
    values = _rewards(rewards, len(ids))
    scored = ~values.isnan()
    if not scored.any():
        raise BatchError(
            "rewards must score at least one row: all are NaN, which means not scored"
        )
    # Tuples of tokens as keys: prompts in groups may have any order.
    prompts = [
        tuple(row[:start])
        for row, start in zip(ids.tolist(), starts.tolist(), strict=True)
    ]
    # `where` and not a product with the mask, because 0 times NaN is NaN.
    gains = torch.where(scored, values - baselines(values, prompts), 0.0)
    positions = torch.arange(ids.shape[1], device=ids.device)
    token_mask = (positions >= starts[:, None]) & (positions < ends[:, None])
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": ends,
            "token_mask": token_mask.to(torch.int64),
            "sample_mask": scored.to(torch.float32),
            "advantages": (gains[:, None] * token_mask).to(torch.float32),
        }
    )


def baselines(rewards: Tensor, prompts: list[Any]) -> Tensor:
    """Return [B] baselines, see the module; NaN rewards are left out.

    Args:
        rewards: [B].
        prompts: Hashable prompts, by row.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        if not rewards[index].isnan():
            groups[prompt].append(index)
    if any(len(rows) < 2 for rows in groups.values()):
        return torch.full_like(rewards, float(rewards.nanmean()))
    found = torch.zeros_like(rewards)
    for rows in groups.values():
        found[rows] = rewards[rows].mean()
    return found


def _rewards(rewards: Any, size: int) -> Tensor:
    ends = getattr(rewards, "terminateds", None)
    if ends is not None and not torch.as_tensor(ends).bool().all():
        going_on = int((~torch.as_tensor(ends).bool()).sum())
        raise BatchError(
            f"policy.train(batch, rewards) takes conversations of one answer: "
            f"{going_on} of {size} go on; train on several turns with a trainer such "
            "as GRPOTrainer"
        )
    given = getattr(rewards, "rewards", rewards)
    if isinstance(given, Mapping):
        columns = torch.stack([_column(column, size) for column in given.values()])
        total = columns.nansum(0)
        total[columns.isnan().all(0)] = torch.nan
        return total
    return _column(given, size)


def _column(values: Any, size: int) -> Tensor:
    try:
        column = torch.as_tensor(values).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError):
        column = torch.empty(0, 0)
    if column.shape != (size,):
        raise BatchError(
            f"rewards must be {size} numbers, one per row of the batch: got "
            f"{_shown(values)}; without a loss, train takes rewards as its second "
            "argument"
        )
    if column.isinf().any():
        row = int(column.isinf().nonzero()[0])
        raise BatchError(
            f"rewards[{row}] must be a finite number, or NaN where the row was not "
            f"scored: got {float(column[row])}"
        )
    return column


def _shown(values: Any) -> str:
    shape = getattr(values, "shape", None)
    if shape is not None:
        return f"shape {tuple(shape)}"
    if isinstance(values, list | tuple):
        return f"{type(values).__name__} of {len(values)}: {values!r:.60}"
    return f"{type(values).__name__} {values!r:.60}"
