"""`TokenRows`: the tokens of N conversations in columns that grow turn by turn.

Sampled tokens are copied unchanged and never pass through text, because decoding and
encoding them again may give other tokens. Shapes: N rows, S tokens wide, M active rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_algorithms.rollout.branches import Branch

__all__ = ["TokenRows"]

_WIDE = ("input_ids", "token_mask", "logprobs", "versions")


class TokenRows:
    """Token columns of conversations.

    Args:
        input_ids: [N, S] prompts, right-padded.
        input_lengths: [N].
        pad_token_id: Token that pads rows on the right.
    """

    def __init__(
        self, input_ids: Tensor, input_lengths: Tensor, pad_token_id: int
    ) -> None:
        self.input_ids = input_ids
        self.lengths = input_lengths
        self.prompt_lengths = input_lengths
        self.token_mask = torch.zeros(input_ids.shape, dtype=torch.float32)
        self.logprobs = torch.zeros(input_ids.shape, dtype=torch.float32)
        self.versions = torch.full(input_ids.shape, -1, dtype=torch.int64)
        """[N, S] version of the weights that sampled each token; -1 elsewhere."""
        self.has_logprobs = True
        """Whether every answer came with log-probs."""
        self._pads = {"input_ids": pad_token_id, "versions": -1}

    def add_sampled(
        self,
        active: Tensor | None,
        output_ids: Tensor,
        lengths: Tensor,
        logprobs: Tensor | None,
        versions: Tensor,
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
            logprobs = torch.zeros(output_ids.shape)
        if len(self.lengths) == 1 and bool(self.token_mask.any()):
            self._add_to_only_row(output_ids, lengths, logprobs, versions)
            return
        position = torch.arange(output_ids.shape[1])
        before = self.lengths if active is None else self.lengths[active]
        sampled = (position >= before[:, None]) & (position < lengths[:, None])
        # Generators may give one version per row; tokens of the prompt have none.
        versions = torch.where(sampled, versions, -1)
        # The first answers of all rows, in most runs the only ones, need no copy.
        if active is None and not self.token_mask.any():
            self.input_ids = output_ids
            self.logprobs = logprobs.to(torch.float32)
            self.token_mask = sampled.to(torch.float32)
            self.versions = versions
            self.lengths = lengths
            return
        self._widen(output_ids.shape[1])
        rows = torch.arange(len(self.lengths)) if active is None else active
        width = output_ids.shape[1]
        for column, values in (
            (self.input_ids, output_ids),
            (self.logprobs, logprobs.to(torch.float32)),
            (self.token_mask, sampled.to(torch.float32)),
            (self.versions, versions),
        ):
            # Only sampled tokens: a generator may cut or pad the input differently.
            held = column[rows, :width]
            column[rows, :width] = torch.where(sampled, values, held)
        # Not in place: `prompt_lengths` may be the same tensor.
        self.lengths = self.lengths.index_copy(0, rows, lengths)

    def _add_to_only_row(
        self, output_ids: Tensor, lengths: Tensor, logprobs: Tensor, versions: Tensor
    ) -> None:
        """Add a later answer to a conversation that is played by itself.

        This is what a run with many of them does most, and slices take a third of the
        time of masks.
        """
        sampled = slice(int(self.lengths[0]), int(lengths[0]))
        self._widen(output_ids.shape[1])
        self.input_ids[0, sampled] = output_ids[0, sampled]
        self.logprobs[0, sampled] = logprobs[0, sampled].to(torch.float32)
        self.token_mask[0, sampled] = 1.0
        self.versions[0, sampled] = versions.expand_as(output_ids)[0, sampled]
        self.lengths = lengths.clone()

    def append(self, rows: Tensor, tokens: Sequence[Sequence[int]]) -> None:
        """Append tokens that were not sampled: messages of the environment.

        Args:
            rows: [M] indices of the rows.
            tokens: M token lists.
        """
        if len(rows) == 1:
            self._append_to_row(int(rows[0]), tokens[0])
            return
        # One scatter for all rows: a loop with a tensor per row costs more than the
        # tokens.
        counts = np.fromiter((len(row) for row in tokens), np.int64, len(tokens))
        start = self.lengths[rows].numpy()
        self._widen(int((start + counts).max(initial=0)))
        flat = np.fromiter(
            (token for row in tokens for token in row), np.int64, int(counts.sum())
        )
        row_of = np.repeat(rows.numpy(), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        column_of = np.repeat(start, counts) + np.arange(len(flat)) - first
        self.input_ids[torch.from_numpy(row_of), torch.from_numpy(column_of)] = (
            torch.from_numpy(flat)
        )
        self.lengths = self.lengths.index_add(0, rows, torch.from_numpy(counts))

    def _append_to_row(self, row: int, tokens: Sequence[int]) -> None:
        start = int(self.lengths[row])
        end = start + len(tokens)
        self._widen(end)
        self.input_ids[row, start:end] = torch.tensor(tokens, dtype=torch.int64)
        # Not in place: `prompt_lengths` and generators may hold the same tensor.
        self.lengths = self.lengths.clone()
        self.lengths[row] = end

    def branch(self, row: int, limit: int | None = None) -> Branch:
        """Return a copy of one row in its current state, cut to `limit` tokens."""
        length = int(self.lengths[row])
        length = length if limit is None else min(length, limit)
        return Branch(*(getattr(self, name)[row, :length].clone() for name in _WIDE))

    def restart(self, row: int, tokens: Sequence[int]) -> None:
        """Replace one row by tokens that were not sampled."""
        self._widen(0)
        for name in _WIDE:
            getattr(self, name)[row] = self._pads.get(name, 0)
        # A copy: `prompt_lengths` and generators may hold the same tensor.
        lengths = self.lengths.clone()
        lengths[row] = 0
        self.lengths = lengths
        self.append(torch.tensor([row]), [tokens])

    def select(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and lengths of some rows, no wider than the longest."""
        lengths = self.lengths[rows]
        width = int(lengths.max()) if len(lengths) else 0
        return self.input_ids[rows, :width], lengths

    def cut(self, limit: int) -> Tensor:
        """Cut rows to `limit` tokens; return [N] bool, whether a row lost any."""
        over = self.lengths > limit
        if bool(over.any()):
            for name in _WIDE:
                # Contiguous, as a view would keep the wide tensor alive.
                setattr(self, name, getattr(self, name)[:, :limit].contiguous())
            self.lengths = self.lengths.clamp(max=limit)
        return over

    def _widen(self, width: int) -> None:
        missing = width - self.input_ids.shape[1]
        for name in _WIDE:
            column = getattr(self, name)
            if missing > 0:
                pad = self._pads.get(name, 0)
                column = torch.nn.functional.pad(column, (0, missing), value=pad)
            else:
                # Writing in place needs a copy: the generator's columns may be shared
                # with other readers, or be read-only memory of the object store.
                column = column.clone()
            setattr(self, name, column)
