"""`Trajectories`: everything known about N played rows.

Shapes: N rows, S tokens wide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.data.types import LLMMessageLogType
from rl_algorithms.rollout.branches import Branch
from rl_algorithms.rollout.result import TrajectorySpec
from rl_algorithms.rollout.versions import without_stale
from rl_distributed.batch.batched_data_dict import (
    AnyRows,
    BatchedDataDict,
)
from rl_distributed.batch.columns import concat_columns
from rl_envs.outcomes import ConversationOutcome

__all__ = ["PlayedRow", "Trajectories", "TrajectoryNotes"]


@dataclass
class TrajectoryNotes:
    """Facts about rows that do not become columns of the result."""

    is_active: Tensor
    """[N] bool, whether the row continues."""
    cut_answers: Tensor
    """[N] int64, number of answers cut by a length limit."""
    turn_limit_reached: Tensor
    """[N] bool, whether the limit of turns ended the row."""
    prompt_lengths: Tensor
    """[N] int64, number of tokens of the first prompt."""
    env_tokens: Tensor
    """[N] int64, number of tokens that the environment added."""
    errors: list[Exception | None]
    message_logs: list[LLMMessageLogType]
    num_prompt_messages: list[int]
    answers: list[str | None]
    extra_env_info: list[dict[str, Any]]


@dataclass
class Trajectories:
    """Rows of a rollout, before they become its result.

    The columns are those of `RolloutResult.rows`, under the same names.
    """

    input_ids: Tensor
    input_lengths: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    generation_logprobs: Tensor | None
    """None if an answer came without them."""
    token_versions: Tensor
    rewards: Tensor
    named_rewards: dict[str, Tensor]
    """Columns `reward/<name>`."""
    group_index: Tensor
    truncated: Tensor
    generation_lengths: Tensor
    num_turns: Tensor
    weight_version: Tensor
    outcome: Tensor
    branches: list[tuple[Branch, ...]]
    texts: list[str]
    metadata: list[Any]
    ending: list[ConversationOutcome]
    notes: TrajectoryNotes

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.outcome)

    def rows(self) -> BatchedDataDict[TrajectorySpec]:
        """Return the columns of the result."""
        columns: dict[str, Any] = {}
        for name, value in self.__dict__.items():
            if name == "named_rewards":
                columns |= value
            elif name != "notes" and value is not None:
                columns[name] = value
        return BatchedDataDict(columns)

    def select(self, rows: Tensor) -> Trajectories:
        """Return the given rows, in their order."""
        return self._like(self._columns().select_indices(rows))

    def replaced(
        self, rows: Tensor, others: Trajectories, pads: Mapping[str, int | float]
    ) -> Trajectories:
        """Return a copy in which M other rows replace `rows` [M].

        Args:
            rows: Indices of the rows to replace.
            others: Their replacements.
            pads: Padding of the token columns, by name.
        """
        # The replacements come after all rows, and the order then picks from both.
        order = torch.arange(self.size)
        order[rows] = self.size + torch.arange(others.size)
        joined = AnyRows(_join([self, others], pads))
        return self._like(joined.select_indices(order))

    @classmethod
    def joined(
        cls, rows: Sequence[PlayedRow], pads: Mapping[str, int | float]
    ) -> Trajectories:
        """Return a copy of rows, in their order.

        Args:
            rows: At least one.
            pads: Padding of the token columns, by name.
        """
        batches = {id(each.batch): each.batch for each in rows}
        places: dict[int, list[int]] = {key: [] for key in batches}
        for place, each in enumerate(rows):
            places[id(each.batch)].append(place)
        # Selected before they are joined: a batch may have many rows for other steps.
        parts = [
            batch.select(torch.tensor([rows[place].row for place in places[key]]))
            if batch.size > 1
            else batch
            for key, batch in batches.items()
        ]
        joined = AnyRows(_join(parts, pads))
        order = torch.tensor([place for found in places.values() for place in found])
        return parts[0]._like(joined.select_indices(order.argsort()))

    def narrowed(self) -> Trajectories:
        """Return the rows, no wider than the longest."""
        width = int(self.input_lengths.max())
        if self.input_ids.shape[1] == width:
            return self
        logprobs = self.generation_logprobs
        if logprobs is not None:
            logprobs = logprobs[:, :width].clone()
        return replace(
            self,
            # Copies, as views would keep what was cut off alive.
            input_ids=self.input_ids[:, :width].clone(),
            token_mask=self.token_mask[:, :width].clone(),
            generation_logprobs=logprobs,
            token_versions=self.token_versions[:, :width].clone(),
        )

    def mark_stale(self, current_version: int, max_staleness: int) -> None:
        """See `versions.mark_stale`."""
        self.outcome, self.sample_mask, _ = without_stale(
            self.outcome,
            self.sample_mask,
            current_version - self.weight_version,
            max_staleness,
        )

    def _columns(self) -> AnyRows:
        return AnyRows(self._plain_columns())

    def _plain_columns(self) -> dict[str, Any]:
        """Return all columns, unchecked."""
        columns = self.__dict__ | self.notes.__dict__ | self.named_rewards
        del columns["notes"], columns["named_rewards"]
        if self.generation_logprobs is None:
            del columns["generation_logprobs"]
        return columns

    def _like(self, columns: Mapping[str, Any]) -> Trajectories:
        noted = {field.name for field in fields(self.notes)}
        own = {field.name for field in fields(self)}
        return Trajectories(
            **{"generation_logprobs": None}
            | {name: columns[name] for name in own if name in columns},
            named_rewards={n: columns[n] for n in columns if n not in own | noted},
            notes=TrajectoryNotes(**{name: columns[name] for name in noted}),
        )


@dataclass(frozen=True, slots=True)
class PlayedRow:
    """A row of a batch of played rows, which may have others for other steps."""

    batch: Trajectories
    row: int = 0

    def alone(self) -> Trajectories:
        """Return the row by itself, no wider than its tokens."""
        if self.batch.size == 1:
            return self.batch
        return self.batch.select(torch.tensor([self.row])).narrowed()


def _join(
    parts: Sequence[Trajectories], pads: Mapping[str, int | float]
) -> dict[str, Any]:
    """Concatenate columns; parts may have different named rewards."""
    # Plain dicts: the checks of a batch take longer than the columns of a single row.
    rows = [part._plain_columns() for part in parts]
    names = {name: None for row in rows for name in row}
    # Log-probs of some rows are of no use: a loss needs them for all.
    if any(part.generation_logprobs is None for part in parts):
        names.pop("generation_logprobs", None)
    return {
        name: concat_columns(
            name,
            [
                # A named reward that only some of the parts have.
                row[name] if name in row else torch.full((part.size,), torch.nan)
                for row, part in zip(rows, parts, strict=True)
            ],
            pads.get(name, 0),
        )
        for name in names
    }
