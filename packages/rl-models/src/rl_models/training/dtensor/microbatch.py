"""Conversion of batch rows to model inputs, and of results back to rows.

Only tokens that a needed log-prob depends on go through the model: each row is cut
after the last needed position, rows that need nothing are left out, and models that
take packed rows get no padding. Consecutive rows that begin with the same tokens, none
of whose log-probs are needed, such as answers to one question, share these tokens. The
language-model head runs at needed positions only.

Letters in shapes: b rows of a micro-batch, S columns, T packed tokens, N needed
positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_models.ops.packed_attention import packed_model_inputs
from rl_models.training.dtensor.collectives import RankGroup
from rl_models.training.dtensor.context_parallel import ContextTokens

__all__ = ["ModelBatch"]

# With at least this share of real tokens, a rectangle is faster than gathering rows in
# each layer.
_RECTANGLE_MIN_FILL = 0.88
# With at least this share of tokens in common with another row, they are computed once.
_SHARED_MIN = 0.1


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """Arguments of the model, and the places of its results."""

    inputs: dict[str, Any]
    """Keyword arguments of the model, `logits_to_keep` not included."""
    positions: Tensor
    """[N] index of each needed position in the flattened model output."""
    targets: Tensor
    """[N] the token after each needed position: the one whose log-prob is needed."""
    places: Tensor
    """[N] flat index of each result in `shape`."""
    shape: tuple[int, int]
    """Rows and columns of the result: (b, S - 1) log-probs, or (b, S) values."""
    is_packed: bool
    """Whether the model sees one row of T tokens."""
    is_token: Tensor | None = None
    """Whether each place of the input is a token and not padding; None: all are."""
    sharing: RankGroup | None = None
    """Ranks that have the results of other positions; None: all are here."""

    @classmethod
    def plan(
        cls,
        input_ids: Tensor,
        needed: Tensor,
        device: torch.device,
        attention: str | None,
        share_prefixes: bool = False,
    ) -> ModelBatch:
        """Plan the forward pass that gives log-probs or values at needed positions.

        Args:
            input_ids: [b, S] int64 on the CPU.
            needed: [b, S - 1] bool for log-probs: entry i stands for the token at
                i + 1, whose log-prob depends on tokens 0 to i. [b, S] bool for values:
                entry i stands for the state after tokens 0 to i.
            device: Where the model is.
            attention: Attention implementation; None if the model takes no packed rows.
            share_prefixes: Whether the model may compute a token once for several rows.
        """
        ids, mask = input_ids.numpy(), needed.numpy()
        if not mask.shape[1]:
            # Rows of one token have no log-probs, and so no column to plan by.
            mask = np.zeros((len(mask), 1), dtype=bool)
        # Planned with numpy on the CPU, where the rows are: the shapes of what goes to
        # the device depend on the values of the mask.
        rows, columns = np.nonzero(mask)
        lengths = _last_needed(mask)
        if not lengths.any():
            # A forward pass over one token: collectives need all ranks.
            lengths[:1] = 1
        width = int(lengths.max())
        # The last column of values has no token after it; its target is never read.
        following = np.minimum(columns + 1, ids.shape[1] - 1)
        fields: dict[str, Any] = {
            "targets": _on(device, ids[rows, following]),
            "places": _on(device, rows * mask.shape[1] + columns),
            "shape": tuple(needed.shape),
        }
        if attention is None:
            inputs = {"input_ids": _on(device, ids[:, :width]), "use_cache": False}
            positions = _on(device, rows * width + columns)
            fields["is_token"] = _on(device, np.arange(width) < lengths[:, None])
            return cls(inputs, positions, is_packed=False, **fields)
        own_lengths = lengths
        tokens, starts, lengths = _flatten(ids, lengths, width)
        if tokens.size > own_lengths.sum():
            is_token = np.arange(width) < own_lengths[:, None]
            fields["is_token"] = _on(device, is_token.reshape(-1))[None]
        places = starts[rows] + columns
        shared = _shared_tokens(ids, mask, starts, lengths) if share_prefixes else None
        inputs = packed_model_inputs(lengths, device, attention, shared)
        if shared is not None:
            fed = np.empty(int(shared.max()) + 1, dtype=tokens.dtype)
            fed[shared] = tokens
            tokens, places = fed, shared[places]
        inputs.update(input_ids=_on(device, tokens)[None], use_cache=False)
        return cls(inputs, _on(device, places), is_packed=True, **fields)

    def shared(self, ranks: RankGroup) -> ModelBatch:
        """Return this rank's part of a batch whose tokens several ranks share."""
        input_ids = self.inputs["input_ids"]
        width = input_ids.shape[1]
        context = ContextTokens(ranks, width)
        told = context.inputs(input_ids, self.inputs.get("position_ids"))
        # Positions count in the whole rows [b, width]; here they count in this rank's
        # part.
        row, column = self.positions // width, self.positions % width
        is_own = column // context.per_rank == ranks.rank
        positions = row * context.per_rank + column - context.first
        return replace(
            self,
            inputs={**self.inputs, **told},
            positions=positions[is_own],
            targets=self.targets[is_own],
            places=self.places[is_own],
            sharing=ranks,
        )

    def nothing(self) -> Tensor:
        """Return `shape` zeros, for a rank whose results another rank has."""
        return torch.zeros(self.shape)

    def spread(self, results: Tensor) -> Tensor:
        """[N, ...] -> `shape` [...], zeros elsewhere; differentiable."""
        rows, columns = self.shape
        flat = results.new_zeros(rows * columns, *results.shape[1:])
        spread = flat.index_copy(0, self.places, results)
        if self.sharing is not None:
            # Each result is on one rank, and zero on the others.
            spread = self.sharing.sum(spread)
        return spread.view(rows, columns, *results.shape[1:])


def _last_needed(mask: np.ndarray) -> np.ndarray:
    """Return [b] the number of positions up to the last needed one."""
    width = mask.shape[1]
    from_end = np.argmax(mask[:, ::-1], axis=1)
    return np.where(mask.any(axis=1), width - from_end, 0).astype(np.int64)


def _flatten(
    ids: np.ndarray, lengths: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens end to end, the start of each row, and the lengths used.

    Rows of nearly equal length stay a rectangle, which attention takes as it is.
    """
    if lengths.sum() >= _RECTANGLE_MIN_FILL * width * lengths.size:
        tokens = np.ascontiguousarray(ids[:, :width]).reshape(-1)
        starts = np.arange(lengths.size) * width
        return tokens, starts, np.full_like(lengths, width)
    tokens = ids[:, :width][np.arange(width) < lengths[:, None]]
    return tokens, np.cumsum(lengths) - lengths, lengths


def _shared_tokens(
    ids: np.ndarray, mask: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> np.ndarray | None:
    """Return the token at each packed position if rows share prefixes.

    A prefix ends with the first needed position. None if too little is shared.
    """
    rows = np.arange(lengths.size)
    prefix = np.where(mask.any(axis=1), mask.argmax(axis=1) + 1, 0)
    differs = ids[1:] != ids[:-1]
    # Compared with the row before only: answers to a question stand side by side.
    num_equal = np.where(differs.any(axis=1), differs.argmax(axis=1), ids.shape[1])
    follows = np.zeros(lengths.size, dtype=bool)
    # Prefixes of equal length, so that a copy refers to the first row of its run and
    # never to a copy.
    follows[1:] = (prefix[1:] == prefix[:-1]) & (num_equal >= prefix[1:])
    if prefix[follows].sum() < _SHARED_MIN * lengths.sum():
        return None
    first = np.maximum.accumulate(np.where(follows, 0, rows))
    row = np.repeat(rows, lengths)
    offset = np.arange(row.size) - starts[row]
    is_copy = follows[row] & (offset < prefix[row])
    token = np.cumsum(~is_copy) - 1
    token[is_copy] = token[starts[first[row[is_copy]]] + offset[is_copy]]
    return token


def _on(device: torch.device, array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
