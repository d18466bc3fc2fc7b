"""Differentiable collectives between ranks that share a model.

Between ranks that share a layer, a hidden state is *whole* (every rank has all tokens),
*split* (every rank has its part of the tokens), or *partial* (the ranks' sum is the
hidden state). Each function takes one form to another, and its backward pass takes the
gradient back.

Letters in shapes: B rows, T tokens, H hidden size, N positions, V vocabulary, R ranks.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["RankGroup", "TensorRanks", "vocabulary_logprobs"]


class RankGroup:
    """Ranks that share something.

    Args:
        group: Their process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()

    def sum(self, partial: Tensor) -> Tensor:
        """Make a partial tensor whole: its sum over the ranks, on each of them."""
        return _apply(_Sum, partial, self)

    def join(self, part: Tensor, dim: int) -> Tensor:
        """Concatenate the parts of all ranks, which then compute alike with the whole.

        The gradient of each rank is therefore its part of the whole one.
        """
        return _apply(_JoinParts, part, self, dim)

    def exchange(
        self,
        for_ranks: Tensor,
        sent: list[int] | None = None,
        received: list[int] | None = None,
    ) -> Tensor:
        """Send each rank its rows, and receive the rows for this one.

        Args:
            for_ranks: Rows for the first rank, then those for the next one.
            sent: Number of rows for each rank; None: the same number for each.
            received: Number of rows from each rank; None: the same number from each.
        """
        return _apply(_Exchange, for_ranks, self, sent, received)

    def exchanged(
        self,
        for_ranks: Tensor,
        sent: list[int] | None = None,
        received: list[int] | None = None,
    ) -> Tensor:
        """Do as `exchange` does, without a gradient."""
        # torch's collectives take dense memory only.
        for_ranks = for_ranks.contiguous()
        shape = for_ranks.shape if received is None else (
            sum(received), *for_ranks.shape[1:]
        )  # fmt: skip
        arrived = for_ranks.new_empty(shape)
        dist.all_to_all_single(arrived, for_ranks, received, sent, group=self.group)
        return arrived

    def joined(self, part: Tensor, dim: int) -> Tensor:
        """Return the parts of all ranks, end to end along a dimension."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, dim=dim)

    def total(self, partial: Tensor) -> Tensor:
        """Return the sum over the ranks; `partial` is left as it is."""
        # A copy, because all_reduce writes to its argument, which autograd may still
        # need.
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total


class TensorRanks(RankGroup):
    """The ranks that share each layer.

    Args:
        group: Their process group.
        splits_tokens: Whether hidden states between the shared parts are split.
    """

    def __init__(self, group: dist.ProcessGroup, splits_tokens: bool) -> None:
        super().__init__(group)
        self.splits_tokens = splits_tokens
        self.num_tokens = 0
        """T of the current forward pass, which split parts do not show."""

    def into_shared(self, hidden: Tensor) -> Tensor:
        """Make a hidden state whole for a part of the layer that the ranks share.

        Each rank computes with its share of the weights, so gradients come back
        partial.
        """
        if self.splits_tokens:
            return _apply(_Gather, hidden, self)
        return _apply(_Copy, hidden, self)

    def out_of_shared(self, partial: Tensor) -> Tensor:
        """Take the sum of what the ranks computed with their shares."""
        if self.splits_tokens:
            return _apply(_ReduceScatter, partial, self)
        return self.sum(partial)

    def copy(self, whole: Tensor) -> Tensor:
        """Pass a whole tensor on, whose gradient comes back partial."""
        return _apply(_Copy, whole, self)

    def split(self, whole_B_T_H: Tensor) -> Tensor:
        """Keep this rank's part of the tokens."""
        self.num_tokens = whole_B_T_H.shape[1]
        return _apply(_Split, whole_B_T_H, self)

    def join_tokens(self, split: Tensor) -> Tensor:
        """Make a split hidden state whole, for what every rank computes alike."""
        return _apply(_Join, split, self)

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this rank's tokens [B, ceil(T / R), ...], padded with zeros."""
        # Equal parts, because the collectives take equal sizes only; any T will do.
        per_rank = -(-self.num_tokens // self.size)
        first = min(self.num_tokens, self.rank * per_rank)
        last = min(self.num_tokens, first + per_rank)
        return _filled(whole[:, first:last], per_rank).contiguous()

    def all_of(self, part: Tensor) -> Tensor:
        """Return the tokens of all ranks [B, T, ...]."""
        return self.joined(part, 1)[:, : self.num_tokens]

    def sum_of_part(self, partial: Tensor) -> Tensor:
        """Return this rank's tokens of the sum over the ranks."""
        per_rank = -(-self.num_tokens // self.size)
        filled = _filled(partial, per_rank * self.size)
        by_rank = [part.contiguous() for part in filled.chunk(self.size, dim=1)]
        part = torch.empty_like(by_rank[0])
        dist.reduce_scatter(part, by_rank, group=self.group)
        return part


def _filled(tokens: Tensor, count: int) -> Tensor:
    missing = count - tokens.shape[1]
    if not missing:
        return tokens
    zeros = tokens.new_zeros(tokens.shape[0], missing, *tokens.shape[2:])
    return torch.cat([tokens, zeros], dim=1)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    apply: Any = function.apply
    return cast(Tensor, apply(*arguments))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.total(grads[0]), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, ranks: RankGroup) -> Tensor:
        return ranks.total(partial)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    """Split to whole; the gradient of a whole one is partial."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_of(part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum_of_part(grads[0]), None


class _ReduceScatter(torch.autograd.Function):
    # Each rank's partial tensor has a share in every part, so its gradient is whole.
    @staticmethod
    def forward(ctx: Any, partial: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum_of_part(partial)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.all_of(grads[0]), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.part_of(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.all_of(grads[0]), None


class _Join(torch.autograd.Function):
    """Split to whole; every rank has the same gradient and keeps its part of it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_of(part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.part_of(grads[0]), None


class _JoinParts(torch.autograd.Function):
    # All ranks compute the same with the whole, so adding their gradients up would
    # count each of them once per rank.
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: RankGroup, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return ranks.joined(part, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].chunk(ctx.ranks.size, ctx.dim)[ctx.ranks.rank], None, None


class _Exchange(torch.autograd.Function):
    """An all-to-all; gradients take the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        for_ranks: Tensor,
        ranks: RankGroup,
        sent: list[int] | None,
        received: list[int] | None,
    ) -> Tensor:
        ctx.ranks, ctx.sent, ctx.received = ranks, sent, received
        return ranks.exchanged(for_ranks, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = ctx.ranks.exchanged(grads[0], ctx.received, ctx.sent)
        return grad, None, None, None


class _VocabularyLogprobs(torch.autograd.Function):
    """Saves this rank's logits and one number per row, as `ops.logprobs` does."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, scale: float, ranks: TensorRanks
    ) -> Tensor:
        scaled = logits.float() * scale
        own = targets - ranks.rank * logits.shape[-1]
        is_own = (own >= 0) & (own < logits.shape[-1])
        own = own.clamp(0, logits.shape[-1] - 1)
        largest = scaled.amax(dim=-1)
        # All ranks must subtract the same number, for their sums to be added up.
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=ranks.group)
        chosen = scaled.gather(-1, own[:, None]).squeeze(-1) * is_own
        total = (scaled - largest[:, None]).exp_().sum(dim=-1)
        # One collective for both sums.
        sums = torch.stack([total, chosen])
        dist.all_reduce(sums, group=ranks.group)
        log_sum = largest + sums[0].log()
        ctx.save_for_backward(logits, own, is_own, log_sum)
        ctx.scale = scale
        return sums[1] - log_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, own, is_own, log_sum = ctx.saved_tensors
        weight = (grads[0] * ctx.scale)[:, None]
        grad = (logits.float() * ctx.scale - log_sum[:, None]).exp_().mul_(-weight)
        grad.scatter_add_(-1, own[:, None], weight * is_own[:, None])
        return grad.to(logits.dtype), None, None, None


def vocabulary_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, ranks: TensorRanks
) -> Tensor:
    """Log-probability of one token per position, where ranks share the vocabulary.

    Args:
        logits: [N, V / R], those of this rank's tokens.
        targets: [N] int64 token ids, the same on all ranks.
        temperature: Divides the logits.
        ranks: The ranks that hold the other logits.

    Returns:
        [N] float32, the same on all ranks.
    """
    return _apply(_VocabularyLogprobs, logits, targets, 1.0 / temperature, ranks)
