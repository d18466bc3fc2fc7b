"""Log-probs from hidden states, without the logits of all positions at once.

Logits are computed for some positions at a time, forward and again backward, so that
only a few rows of [N, V] exist at once. The gradient of the head's weight is added up
in one buffer. This costs one more product with the weight; small logits are kept
instead (`logit_chunks`).

Letters in shapes: N positions, n positions of a chunk, H hidden size, V vocabulary
(this rank's part of it where ranks share it).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.modeling_outputs import BaseModelOutputWithPast

from rl_distributed.logs.logging import get_logger
from rl_models.errors import UnsupportedModelError
from rl_models.ops.logprobs import token_logprobs
from rl_models.training.dtensor.collectives import TensorRanks, vocabulary_logprobs

__all__ = ["ChunkedHead"]

_log = get_logger(__name__)

_NUM_CHECKED = 2
# Relative to the largest logit. The same products differ by rounding alone; a factor or
# an activation that is not known here makes far more of a difference.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class _Head:
    """Settings of the head: from hidden states to logits, and on to log-probs."""

    scale: float
    """Factor of the logits."""
    cap: float | None
    """Soft limit of the logits, by tanh."""
    chunk_size: int
    dtype: torch.dtype
    """Data type of the products."""
    ranks: TensorRanks | None
    """Ranks that share the vocabulary."""

    def logits(self, hidden_n_H: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[n, V], as the model computes them."""
        logits = linear(hidden_n_H.to(self.dtype), weight, bias)
        if self.cap is None:
            return logits
        # In place, as nothing else holds them: a chunk is the largest tensor here.
        return logits.div_(self.cap).tanh_().mul_(self.cap)

    def scaled(self, logits: Tensor) -> Tensor:
        """Return logits divided by the temperature; they may be changed."""
        # In float32, as half precision would round a second time.
        return logits if self.scale == 1.0 else logits.float().mul_(self.scale)

    def chunks(self, count: int) -> Iterator[slice]:
        """Yield the positions of each chunk."""
        for start in range(0, count, self.chunk_size):
            yield slice(start, min(start + self.chunk_size, count))

    def own(self, targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return where targets are in this rank's vocabulary, and whether they are."""
        if self.ranks is None:
            return targets, torch.ones_like(targets, dtype=torch.bool)
        own = targets - self.ranks.rank * size
        # Clamped, so that `gather` finds a number for foreign tokens too; it is masked
        # then.
        return own.clamp(0, size - 1), (own >= 0) & (own < size)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: _Head,
    ) -> Tensor:
        at, is_own = head.own(targets, weight.shape[0])
        found: Tensor = hidden.new_empty(len(hidden), dtype=torch.float32)
        log_sum, chosen = torch.empty_like(found), torch.empty_like(found)
        # Cast once, and not for each chunk as autocast would.
        used, used_bias = _cast(weight, head.dtype), _cast(bias, head.dtype)
        for rows in head.chunks(len(hidden)):
            scaled = head.scaled(head.logits(hidden[rows], used, used_bias))
            # One kernel reads the logits once; their largest number, the exponentials
            # and the sum apart would pass over all of them four times.
            logprobs = torch.log_softmax(scaled, dim=-1, dtype=torch.float32)
            found[rows] = logprobs.gather(-1, at[rows, None]).squeeze(-1)
            of_token = scaled.gather(-1, at[rows, None]).squeeze(-1).float()
            log_sum[rows] = of_token - found[rows]
            chosen[rows] = of_token * is_own[rows]
        if head.ranks is not None:
            largest = log_sum.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=head.ranks.group)
            # One collective for both. Only the rank with the token has a number in
            # `chosen`.
            sums = torch.stack([(log_sum - largest).exp(), chosen])
            total, chosen = head.ranks.total(sums)
            log_sum = largest + total.log()
            found = chosen - log_sum
        ctx.save_for_backward(hidden, weight, bias, at, is_own, log_sum)
        ctx.head = head
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, at, is_own, log_sum = ctx.saved_tensors
        head: _Head = ctx.head
        used, used_bias = _cast(weight, head.dtype), _cast(bias, head.dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Summing many chunks in half precision would lose more than one product does.
        of_weight = _zeros(weight) if needs_weight else None
        of_bias = _zeros(bias) if needs_bias else None
        factor = grads[0] * head.scale
        # For each row, size (p - onehot) is computed, which takes one exponential of
        # all logits; the sign goes into the products, which have fewer numbers.
        size, sign = factor.abs(), -factor.sign()
        shift = log_sum - size.log()
        for rows in head.chunks(len(hidden)):
            logits = head.logits(hidden[rows], used, used_bias)
            # The derivative of the cap. Before `scaled`, which changes logits in place.
            slope = None if head.cap is None else 1 - (logits.float() / head.cap) ** 2
            scaled, at_rows = head.scaled(logits), at[rows, None]
            of_token = scaled.gather(-1, at_rows).squeeze(-1).float() - log_sum[rows]
            # Not by the matrix: half precision would lose the small difference of a
            # likely token.
            difference = (of_token.exp() - is_own[rows].float()) * size[rows]
            gradient = _exponentials(scaled, shift[rows, None], slope, head.dtype)
            if slope is not None:
                difference *= slope.gather(-1, at_rows).squeeze(-1)
            gradient.scatter_(-1, at_rows, difference[:, None].to(head.dtype))
            if of_hidden is not None:
                of_hidden[rows] = (gradient @ used) * sign[rows, None]
            if of_weight is not None:
                states = (hidden[rows] * sign[rows, None]).to(head.dtype)
                # `addmm_` needs equal data types; it saves a matrix of the weight's
                # size.
                if head.dtype == torch.float32:
                    of_weight.addmm_(gradient.T, states)
                else:
                    of_weight += gradient.T @ states
            if of_bias is not None:
                of_bias += sign[rows] @ gradient.float()
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            None,
            None,
        )


def _exponentials(
    logits: Tensor, shift: Tensor, slope: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return exp(logits - shift) * slope, in place where the data types allow."""
    if logits.dtype == torch.float32:
        shifted = logits.sub_(shift)
    else:
        shifted = torch.sub(logits, shift)  # float32, by promotion
    if slope is None and dtype != torch.float32:
        # Rounded as it is written: no second pass over all of them.
        return torch.exp(shifted, out=torch.empty_like(shifted, dtype=dtype))
    shifted.exp_()
    return (shifted if slope is None else shifted.mul_(slope)).to(dtype)


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    return None if tensor is None else tensor.detach().to(dtype)


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, dtype=torch.float32)


class _Given(nn.Module):
    """Replaces a decoder by hidden states that it has computed before."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self._hidden)


class ChunkedHead:
    """The head of a causal LM, for log-probs.

    Args:
        ranks: Ranks that share the vocabulary; None: this rank has all of it.
        name: The model's name, for messages.
        asked: Whether the config asks for chunks. Otherwise a head that cannot be
            computed in chunks computes all logits at once.
    """

    def __init__(self, ranks: TensorRanks | None, name: str, *, asked: bool) -> None:
        self._ranks = ranks
        self._name = name
        self._asked = asked
        self._is_known: bool | None = None

    def logprobs(
        self,
        model: Any,
        inputs: dict[str, Any],
        positions: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
    ) -> Tensor:
        """Return the log-probs of tokens after the given positions.

        Args:
            model: The model, whose weights are there.
            inputs: Arguments of its forward pass.
            positions: [N] in the flattened tokens.
            targets: [N] the tokens.
            temperature: Divides the logits.
            chunk_size: Positions whose logits are there at once.

        Returns:
            [N] float32.

        Raises:
            UnsupportedModelError: The model computes its logits in another way than as
                a linear layer, capped where its config says so.
        """
        states = model.base_model(**inputs).last_hidden_state
        hidden = states.flatten(0, 1)[positions]
        layer = model.get_output_embeddings()
        device = hidden.device.type
        computes_in = layer.weight.dtype
        if torch.is_autocast_enabled(device):
            computes_in = torch.get_autocast_dtype(device)
        config = model.config.get_text_config()
        head = _Head(
            scale=1.0 / temperature,
            cap=getattr(config, "final_logit_softcapping", None),
            chunk_size=chunk_size,
            dtype=computes_in,
            ranks=self._ranks,
        )
        # Once per model: the class of a model says nothing about what its forward pass
        # does to the logits.
        if self._is_known is None and len(hidden):
            self._is_known = self._knows(model, hidden.detach()[:_NUM_CHECKED], head)
        if self._is_known is False:
            logits = _logits_of(model, hidden)
            if self._ranks is not None:
                return vocabulary_logprobs(logits, targets, temperature, self._ranks)
            return token_logprobs(logits, targets, temperature)
        if self._ranks is not None:
            # The gradient of each rank is that of its part of the vocabulary.
            hidden = self._ranks.copy(hidden)
        apply: Any = _ChunkedLogprobs.apply
        # The function casts by itself, also in its backward pass, which autocast of the
        # forward pass would not reach.
        with torch.autocast(device, enabled=False):
            found = apply(hidden, layer.weight, layer.bias, targets, head)
        return cast(Tensor, found)

    @torch.no_grad()
    def _knows(self, model: Any, hidden: Tensor, head: _Head) -> bool:
        """Return whether logits of a few states equal those of the model."""
        expected = _logits_of(model, hidden).float()
        layer = model.get_output_embeddings()
        weight, bias = _cast(layer.weight, head.dtype), _cast(layer.bias, head.dtype)
        own = head.logits(hidden, weight, bias).float()
        difference = float((own - expected).abs().max() / expected.abs().max())
        if difference <= _TOLERANCE:
            return True
        reason = (
            f"{type(model).__name__} does more to its logits than a linear layer and a "
            f"cap (they differ by {difference:.1e})"
        )
        if self._asked:
            raise UnsupportedModelError(
                "policy.dtensor.logprob_chunk_size cannot be used with "
                f"{self._name}: {reason}; set it to 0"
            )
        _log.warning("%s: logits are computed all at once: %s", self._name, reason)
        return False


def _logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Return the [N, V] logits that a model computes from its last states [N, H]."""
    prefix = model.base_model_prefix
    base = model._modules[prefix]
    model._modules[prefix] = _Given(hidden[None])
    try:
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        # No call of the model, which would run FSDP's hooks within a forward pass.
        output = type(model).forward(model, input_ids=ids, use_cache=False)
    finally:
        model._modules[prefix] = base
    logits: Tensor = output.logits
    return logits.squeeze(0)
