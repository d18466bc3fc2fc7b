"""`RowLimits`: limits of the tasks of a rollout's rows.

Shapes: N rows, M of them active.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_envs.outcomes import ConversationOutcome
from rl_envs.task_limits import LIMITS_KEY, TaskLimits, limits_of
from rl_models.types import GenerationOutputSpec

__all__ = ["RowLimits"]

_NO_LIMIT = np.iinfo(np.int64).max


class RowLimits:
    """Limits of N rows, each with those of its task.

    Args:
        limits: One per row.
    """

    def __init__(self, limits: Sequence[TaskLimits]) -> None:
        self._limits = limits
        self._turns = np.array([each.turns or _NO_LIMIT for each in limits], np.int64)
        self._tokens = np.array([each.tokens or _NO_LIMIT for each in limits], np.int64)
        self._seconds = np.array(
            [np.inf if each.seconds is None else each.seconds for each in limits]
        )
        self._begin_s: float | None = None

    @classmethod
    def of(
        cls,
        columns: Sequence[Mapping[str, Any]],
        prompts: Sequence[int],
        default: TaskLimits | None,
    ) -> RowLimits | None:
        """Return the limits of rows, or None if no task has any.

        Args:
            columns: Columns of each prompt.
            prompts: [N] prompt of each row.
            default: Limits of tasks that declare none.

        Raises:
            TaskError: A row's column `task_limits` is wrong.
        """
        default = default or TaskLimits()
        # First, as most runs have no limits, and this must cost next to nothing then.
        has_none = default == TaskLimits()
        if has_none and not [each for each in columns if LIMITS_KEY in each]:
            return None
        limits = [limits_of(each, default) for each in columns]
        return cls([limits[prompt] for prompt in prompts])

    def part(self, rows: Sequence[int]) -> RowLimits:
        """Return the limits of some rows, with the same clock."""
        part = RowLimits([self._limits[row] for row in rows])
        part._begin_s = self._begin_s
        return part

    def told(self, metadata: Sequence[Any]) -> list[Any]:
        """Return metadata with the limits in force, for environments that read them."""
        return [
            {**columns, LIMITS_KEY: dict(each)}
            if isinstance(columns, Mapping)
            else columns
            for columns, each in zip(metadata, self._limits, strict=True)
        ]

    def begin(self) -> None:
        """Start the clock, with the first answer."""
        if self._begin_s is None:
            self._begin_s = time.monotonic()

    def cut(
        self,
        output: BatchedDataDict[GenerationOutputSpec],
        rows: NDArray[np.int64],
        used: NDArray[np.int64],
        pad_token_id: int,
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Cut answers to the number of tokens that their tasks may still sample.

        Args:
            output: M rows that a generator returned.
            rows: [M] their indices.
            used: [N] number of tokens sampled before.
            pad_token_id: Token that pads rows on the right.
        """
        sampled = output["generation_lengths"].to(torch.int64)
        left = torch.from_numpy(self._tokens[rows] - used[rows])
        over = (sampled - left).clamp(min=0)
        if not bool(over.any()):
            return output
        lengths = output["unpadded_sequence_lengths"].to(torch.int64) - over
        cut = output.copy()
        cut["generation_lengths"] = sampled - over
        cut["unpadded_sequence_lengths"] = lengths
        cut["truncated"] = output["truncated"].bool() | (over > 0)
        beyond = torch.arange(output["output_ids"].shape[1]) >= lengths[:, None]
        cut["output_ids"] = output["output_ids"].masked_fill(beyond, pad_token_id)
        if "logprobs" in output:
            cut["logprobs"] = output["logprobs"].masked_fill(beyond, 0.0)
        return cut

    def met(
        self,
        rows: NDArray[np.int64],
        turns: NDArray[np.int64],
        tokens: NDArray[np.int64],
    ) -> Iterator[tuple[NDArray[np.bool_], ConversationOutcome]]:
        """Yield [M] bool, the rows that have met a limit, for each kind of limit.

        Args:
            rows: [M] indices.
            turns: [N] number of answers.
            tokens: [N] number of sampled tokens.
        """
        begin_s = time.monotonic() if self._begin_s is None else self._begin_s
        # Time last: the others are the same in each run, and so are their names.
        yield turns[rows] >= self._turns[rows], ConversationOutcome.OUT_OF_TURNS
        yield tokens[rows] >= self._tokens[rows], ConversationOutcome.OUT_OF_TOKENS
        elapsed_s = time.monotonic() - begin_s
        yield self._seconds[rows] <= elapsed_s, ConversationOutcome.OUT_OF_TIME
