"""`TokenRows`: the tokens of N conversations in columns that grow turn by turn.

Sampled tokens are copied unchanged and never pass through text, because decoding and
encoding them again may give other tokens. The columns are arrays of numpy, whose
operations take less time than those of torch if there is a single row.
Shapes: N rows, S tokens wide, M active rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rl_algorithms.rollout.branches import Branch

__all__ = ["TokenRows"]

_WIDE = ("input_ids", "token_mask", "logprobs", "versions")


class TokenRows:
    """Token columns of conversations.

    Args:
        input_ids: [N, S] prompts, right-padded; never changed in place.
        input_lengths: [N].
        pad_token_id: Token that pads rows on the right.
    """

    def __init__(
        self,
        input_ids: NDArray[np.int64],
        input_lengths: NDArray[np.int64],
        pad_token_id: int,
    ) -> None:
        self.input_ids = input_ids
        self.lengths = input_lengths
        self.prompt_lengths = input_lengths
        self.token_mask = np.zeros(input_ids.shape, np.float32)
        self.logprobs = np.zeros(input_ids.shape, np.float32)
        self.versions = np.full(input_ids.shape, -1, np.int64)
        """[N, S] version of the weights that sampled each token; -1 elsewhere."""
        self.has_logprobs = True
        """Whether every answer came with log-probs."""
        self._pads = {"input_ids": pad_token_id, "versions": -1}

    def add_sampled(
        self,
        active: NDArray[np.int64] | None,
        output_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        logprobs: NDArray[np.float32] | None,
        versions: NDArray[np.int64],
    ) -> None:
        """Add the rows that a generator returned.

        Args:
            active: [M] indices of these rows; None for all, in order.
            output_ids: [M, S'] input and sampled tokens, right-padded.
            lengths: [M] number of tokens of each row.
            logprobs: [M, S'] of the sampled tokens, 0.0 elsewhere; None if unknown.
            versions: [M, S'] or [M, 1] weight versions of the sampled tokens.
        """
        if logprobs is None:
            self.has_logprobs = False
            # Placeholders, which keep the columns alike; `has_logprobs` says not to use
            # them.
            logprobs = np.zeros(output_ids.shape, np.float32)
        if len(self.lengths) == 1:
            self._add_to_only_row(output_ids, lengths, logprobs, versions)
            return
        position = np.arange(output_ids.shape[1])
        before = self.lengths if active is None else self.lengths[active]
        sampled = (position >= before[:, None]) & (position < lengths[:, None])
        # Generators may give one version per row; tokens of the prompt have none.
        versions = np.where(sampled, versions, -1)
        # The first answers of all rows, in most runs the only ones, need no copy.
        if active is None and not self.token_mask.any():
            self.input_ids = output_ids
            self.logprobs = logprobs
            self.token_mask = sampled.astype(np.float32)
            self.versions = versions
            self.lengths = lengths
            return
        self._widen(output_ids.shape[1])
        rows = np.arange(len(self.lengths)) if active is None else active
        width = output_ids.shape[1]
        columns: tuple[tuple[NDArray[Any], NDArray[Any]], ...] = (
            (self.input_ids, output_ids),
            (self.logprobs, logprobs),
            (self.token_mask, sampled.astype(np.float32)),
            (self.versions, versions),
        )
        for column, values in columns:
            # Only sampled tokens: a generator may cut or pad the input differently.
            held = column[rows, :width]
            column[rows, :width] = np.where(sampled, values, held)
        # Not in place: `prompt_lengths` may be the same array.
        self.lengths = self.lengths.copy()
        self.lengths[rows] = lengths

    def _add_to_only_row(
        self,
        output_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        versions: NDArray[np.int64],
    ) -> None:
        """Add an answer to a conversation that is played by itself.

        This is what a run with many of them does most, and slices take a third of the
        time of masks.
        """
        end = int(lengths[0])
        sampled = slice(int(self.lengths[0]), end)
        self._widen(end)
        self.input_ids[0, sampled] = output_ids[0, sampled]
        self.logprobs[0, sampled] = logprobs[0, sampled]
        self.token_mask[0, sampled] = 1.0
        one = versions.shape[1] == 1
        self.versions[0, sampled] = versions[0, 0] if one else versions[0, sampled]
        self.lengths = lengths.copy()

    def split(self) -> list[TokenRows]:
        """Return each row by itself, no wider than its tokens."""
        found = []
        for row, length in enumerate(self.lengths.tolist()):
            one = TokenRows.__new__(TokenRows)
            one.__dict__.update(self.__dict__)
            # Copies, as views would keep the columns of all rows alive until the last
            # of them has ended.
            one.input_ids = self.input_ids[row : row + 1, :length].copy()
            one.token_mask = self.token_mask[row : row + 1, :length].copy()
            one.logprobs = self.logprobs[row : row + 1, :length].copy()
            one.versions = self.versions[row : row + 1, :length].copy()
            one.lengths = self.lengths[row : row + 1]
            one.prompt_lengths = self.prompt_lengths[row : row + 1]
            found.append(one)
        return found

    def part(self, rows: NDArray[np.int64]) -> TokenRows:
        """Return a copy of some rows, no wider than their tokens."""
        one = TokenRows.__new__(TokenRows)
        one.__dict__.update(self.__dict__)
        one.lengths = self.lengths[rows]
        one.prompt_lengths = self.prompt_lengths[rows]
        width = int(one.lengths.max())
        for name in _WIDE:
            setattr(one, name, getattr(self, name)[rows, :width])
        return one

    def append(self, rows: NDArray[np.int64], tokens: Sequence[Sequence[int]]) -> None:
        """Append tokens that were not sampled: messages of the environment.

        Args:
            rows: [M] indices of the rows.
            tokens: M token lists.
        """
        if len(rows) == 1:
            self._append_to_row(int(rows[0]), tokens[0])
            return
        # One scatter for all rows: a loop with an array per row costs more than the
        # tokens.
        counts = np.fromiter((len(row) for row in tokens), np.int64, len(tokens))
        start = self.lengths[rows]
        self._widen(int((start + counts).max(initial=0)))
        flat = np.fromiter(
            (token for row in tokens for token in row), np.int64, int(counts.sum())
        )
        row_of = np.repeat(rows, counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        column_of = np.repeat(start, counts) + np.arange(len(flat)) - first
        self.input_ids[row_of, column_of] = flat
        self.lengths = self.lengths.copy()
        self.lengths[rows] += counts

    def _append_to_row(self, row: int, tokens: Sequence[int]) -> None:
        start = int(self.lengths[row])
        end = start + len(tokens)
        self._widen(end)
        self.input_ids[row, start:end] = tokens
        # Not in place: `prompt_lengths` and generators may hold the same array.
        self.lengths = self.lengths.copy()
        self.lengths[row] = end

    def branch(self, row: int, limit: int | None = None) -> Branch:
        """Return a copy of one row in its current state, cut to `limit` tokens."""
        length = int(self.lengths[row])
        length = length if limit is None else min(length, limit)
        return Branch(
            input_ids=torch.from_numpy(self.input_ids[row, :length].copy()),
            token_mask=torch.from_numpy(self.token_mask[row, :length].copy()),
            generation_logprobs=torch.from_numpy(self.logprobs[row, :length].copy()),
            token_versions=torch.from_numpy(self.versions[row, :length].copy()),
        )

    def restart(self, row: int, tokens: Sequence[int]) -> None:
        """Replace one row by tokens that were not sampled."""
        self._widen(0)
        for name in _WIDE:
            getattr(self, name)[row] = self._pads.get(name, 0)
        # A copy: `prompt_lengths` and generators may hold the same array.
        lengths = self.lengths.copy()
        lengths[row] = 0
        self.lengths = lengths
        self.append(np.array([row]), [tokens])

    def select(
        self, rows: NDArray[np.int64] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens and lengths of some rows, no wider than the longest.

        Args:
            rows: [M] indices; None for all rows, as wide as they are.
        """
        if rows is None:
            return self.input_ids, self.lengths
        lengths = self.lengths[rows]
        width = int(lengths.max()) if len(lengths) else 0
        return self.input_ids[rows, :width], lengths

    def cut(self, limit: int) -> NDArray[np.bool_]:
        """Cut rows to `limit` tokens; return [N] bool, whether a row lost any."""
        over: NDArray[np.bool_] = self.lengths > limit
        if over.any():
            for name in _WIDE:
                # A copy, as a view would keep the wide array alive.
                setattr(self, name, getattr(self, name)[:, :limit].copy())
            self.lengths = self.lengths.clip(max=limit)
        return over

    def _widen(self, width: int) -> None:
        """Make all columns own at least `width` tokens, to be written to in place."""
        height, held = self.input_ids.shape
        for name in _WIDE:
            column = getattr(self, name)
            # Writing in place needs a copy: the generator's columns may be shared with
            # other readers, or be read-only memory of the object store.
            shape = (height, max(width, held))
            wide = np.full(shape, self._pads.get(name, 0), column.dtype)
            wide[:, :held] = column
            setattr(self, name, wide)
