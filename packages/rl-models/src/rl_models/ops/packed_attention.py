"""Attention over packed rows on any device; needs no model code of transformers.

A packed call has one row of T tokens that holds n sequences one after the other; the
keyword arguments `cu_seq_lens_q`, `cu_seq_lens_k` ([n + 1] int32 borders) and
`max_length_q`, `max_length_k` describe it, as for flash attention. Attention is
computed per sequence: rows of similar length share one padded call to torch's
`scaled_dot_product_attention`, so neither time nor memory grows with T x T. Sequences
that begin with the same tokens may share them: everything but attention is then
computed once for these. In transformers' models its name is `rl_varlen`
(`rl_models.ops.varlen_attention`).

Letters in shapes: n sequences, T packed tokens, P padded slots (P >= T), H heads,
D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = [
    "ATTENTION_NAME",
    "VarlenLayout",
    "packed_attention",
    "packed_model_inputs",
]

ATTENTION_NAME = "rl_varlen"

# Rows whose lengths differ by at most this factor share a padded call. Calls are fewer
# and larger that way, and at most a fifth of their slots is padding.
_WIDTH_RATIO = 1.25


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Rows `[first_slot, first_slot + num_rows * width)` of the padded slots."""

    first_slot: int
    num_rows: int
    width: int


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """Places of the tokens of a packed row in the padded buckets, and back."""

    buckets: tuple[_Bucket, ...]
    token_of_slot: Tensor | None
    """[P] packed position that fills each slot (padding repeats a token of its row);
    None when the packed row already is the padded form."""
    slot_of_token: Tensor | None
    """[T] slot of each packed position."""
    is_shared: bool = False
    """Whether several rows may share a token, which then fills a slot in each."""

    @classmethod
    def from_lengths(cls, lengths: np.ndarray, device: torch.device) -> VarlenLayout:
        """Plan the buckets of sequences with these lengths, in packed order."""
        lengths = np.asarray(lengths, dtype=np.int64)
        # An empty sequence has borders but no token, and would make a bucket of width
        # 0.
        lengths = lengths[lengths > 0]
        # Rows of one length are their own padded form: attention reads them in place.
        if lengths.size and (lengths == lengths[0]).all():
            bucket = _Bucket(0, int(lengths.size), int(lengths[0]))
            return cls((bucket,), None, None)
        starts = np.cumsum(lengths) - lengths
        # Stable, so that equal batches are padded alike and give equal results to the
        # bit.
        order = np.argsort(lengths, kind="stable")
        buckets: list[_Bucket] = []
        token_of_slot: list[np.ndarray] = []
        slot_of_token = np.empty(int(lengths.sum()), dtype=np.int64)
        first_slot = 0
        for rows in _rows_of_buckets(lengths, order):
            width = int(lengths[rows[-1]])
            offsets = np.arange(width)
            # Padding repeats the last token of its row: zeros would need a buffer, and
            # another row's token would mix sequences if a mask were ever wrong.
            positions = starts[rows, None] + np.minimum(
                offsets, lengths[rows, None] - 1
            )
            slots = first_slot + np.arange(rows.size * width).reshape(-1, width)
            real = offsets < lengths[rows, None]
            slot_of_token[positions[real]] = slots[real]
            token_of_slot.append(positions.reshape(-1))
            buckets.append(_Bucket(first_slot, int(rows.size), width))
            first_slot += rows.size * width
        return cls(
            tuple(buckets),
            # Planned with numpy and copied once: the loop would launch a kernel per
            # step.
            torch.from_numpy(np.concatenate(token_of_slot)).to(device),
            torch.from_numpy(slot_of_token).to(device),
        )

    def shared(self, token_of_position: np.ndarray) -> VarlenLayout:
        """Return the layout of the same rows if several begin with the same tokens.

        Args:
            token_of_position: [P] the number of the token at each packed position of
                this layout; tokens are numbered in the order of their first positions.
        """
        device = torch.device("cpu")
        if self.token_of_slot is None or self.slot_of_token is None:
            position_of_slot = slot_of_position = np.arange(token_of_position.size)
        else:
            device = self.token_of_slot.device
            position_of_slot = self.token_of_slot.cpu().numpy()
            slot_of_position = self.slot_of_token.cpu().numpy()
        first = _first_positions(token_of_position)
        return VarlenLayout(
            self.buckets,
            torch.from_numpy(token_of_position[position_of_slot]).to(device),
            torch.from_numpy(slot_of_position[first]).to(device),
            is_shared=True,
        )


def _first_positions(token_of_position: np.ndarray) -> np.ndarray:
    """[T] the first position of each token."""
    first = np.empty(int(token_of_position.max(initial=-1)) + 1, dtype=np.int64)
    # Of several assignments to one element the last one stays, hence the reversal.
    first[token_of_position[::-1]] = np.arange(token_of_position.size)[::-1]
    return first


def _rows_of_buckets(lengths: np.ndarray, order: np.ndarray) -> list[np.ndarray]:
    """Split rows sorted by length where a row outgrows the shortest by the ratio."""
    groups: list[np.ndarray] = []
    first = 0
    ordered = lengths[order]
    while first < order.size:
        # The factor alone would give each length of short rows a call of its own.
        limit = max(int(ordered[first] * _WIDTH_RATIO), int(ordered[first]) + 2)
        last = int(np.searchsorted(ordered, limit, side="right"))
        groups.append(order[first:last])
        first = last
    return groups


class _Pad(torch.autograd.Function):
    """[T, C] -> [P, C]; each token's gradient is that of its own slot.

    Padding slots hold copies, but no real token attends to them and their outputs are
    dropped, so their gradients are zero and need not be added. The backward pass of
    `index_select` would add them, one by one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_slot: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return x.index_select(0, token_of_slot)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        return grads[0].index_select(0, slot), None, None


class _Unpad(torch.autograd.Function):
    """[P, C] -> [T, C]; padding slots get a zero gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_token)
        ctx.num_slots = x.shape[0]
        return x.index_select(0, slot_of_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (slot,) = ctx.saved_tensors
        out = grads[0].new_zeros(ctx.num_slots, grads[0].shape[1])
        return out.index_copy_(0, slot, grads[0]), None


# One layout per packed batch, because all layers of a forward pass share the borders
# tensor. The key is that tensor's identity, held weakly: the layout goes with the
# batch.
_layouts: Any = WeakTensorKeyDictionary()


def _layout_of(cu_seq_lens: Tensor, device: torch.device) -> VarlenLayout:
    layout: VarlenLayout | None = _layouts.get(cu_seq_lens)
    if layout is None:
        lengths = np.diff(cu_seq_lens.cpu().numpy())
        layout = VarlenLayout.from_lengths(lengths, device)
        _layouts[cu_seq_lens] = layout
    return layout


def packed_model_inputs(
    lengths: np.ndarray | Tensor,
    device: torch.device | None = None,
    attention: str = ATTENTION_NAME,
    token_of_position: np.ndarray | None = None,
) -> dict[str, Any]:
    """Return keyword arguments that describe to a model how `input_ids` is packed.

    Args:
        lengths: [n] sequence lengths in packed order.
        device: Where the model is; default CPU.
        attention: The model's attention implementation.
        token_of_position: Shares tokens that several sequences begin with, which are
            then computed once: for each position of the sequences, laid end to end, the
            token of `input_ids` [1, T]. Tokens are in the order of their first
            positions. Only for `rl_varlen`, on a CPU.

    Returns:
        `position_ids`, the borders and, for `rl_varlen`, a mask of one element: it only
        keeps transformers from building a T x T mask that nothing reads.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    device = device or torch.device("cpu")
    # The kernels of flash attention accept int32 only.
    borders = np.zeros(lengths.size + 1, dtype=np.int32)
    np.cumsum(lengths, out=borders[1:])
    positions = np.arange(int(borders[-1])) - np.repeat(borders[:-1], lengths)
    cu_seq_lens = torch.from_numpy(borders)
    layout = VarlenLayout.from_lengths(lengths, device)
    if token_of_position is not None:
        layout = layout.shared(token_of_position)
        positions = positions[_first_positions(token_of_position)]
    cu_seq_lens = cu_seq_lens.to(device)
    # Stored here, where the lengths are at hand: a layer would have to fetch the
    # borders from the device, and wait for it.
    _layouts[cu_seq_lens] = layout
    longest = int(lengths.max()) if lengths.size else 0
    needs_mask = attention == ATTENTION_NAME
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool) if needs_mask else None
    return {
        "position_ids": torch.from_numpy(positions)[None].to(device),
        "attention_mask": mask,
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Attention of one layer, causal within each sequence.

    Args:
        query: [1, H, T, D].
        key: [1, H_kv, T, D].
        value: [1, H_kv, T, D_v].
        cu_seq_lens: [n + 1] borders of the sequences.
        dropout: Probability to drop an attention weight.
        scaling: Factor of the scores; default `D ** -0.5`.
        sliding_window: Number of tokens that a token sees, itself included.

    Returns:
        [1, T, H, D_v].
    """
    layout = _layout_of(cu_seq_lens, query.device)
    rows = [_token_rows(x) for x in (query, key, value)]
    if layout.token_of_slot is not None and layout.is_shared:
        # Not `_Pad`: the gradient of a shared token is the sum over its rows.
        rows = [x.index_select(0, layout.token_of_slot) for x in rows]
    elif layout.token_of_slot is not None:
        pad: Any = _Pad.apply
        rows = [pad(x, layout.token_of_slot, layout.slot_of_token) for x in rows]
    heads = [x.shape[1] for x in (query, key, value)]
    outputs = [
        _attend(bucket, rows, heads, dropout, scaling, sliding_window)
        for bucket in layout.buckets
    ]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if layout.slot_of_token is not None:
        unpad: Any = _Unpad.apply
        out = unpad(out, layout.slot_of_token)
    return out.view(1, out.shape[0], heads[0], -1)


def _token_rows(x: Tensor) -> Tensor:
    """[1, H, T, D] -> [T, H * D], a view in the layout that models use."""
    return x[0].transpose(0, 1).reshape(x.shape[2], -1)


def _attend(
    bucket: _Bucket,
    rows: list[Tensor],
    heads: list[int],
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """Causal attention within each row of a bucket: [num_rows * width, H * D_v]."""
    n, width = bucket.num_rows, bucket.width
    query, key, value = (
        x.narrow(0, bucket.first_slot, n * width)
        .view(n, width, num_heads, -1)
        .transpose(1, 2)
        for x, num_heads in zip(rows, heads, strict=True)
    )
    # Only rows longer than the window need a mask. With `is_causal` alone torch can
    # choose a kernel that never builds one.
    mask = None
    if sliding_window is not None and width > sliding_window:
        position = torch.arange(width, device=query.device)
        distance = position[:, None] - position[None, :]
        mask = (distance >= 0) & (distance < sliding_window)
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=mask is None and width > 1,
        enable_gqa=heads[0] != heads[1],
    )
    return out.transpose(1, 2).reshape(n * width, -1)
