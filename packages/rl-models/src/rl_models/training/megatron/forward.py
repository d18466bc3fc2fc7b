"""Forward passes of one micro-batch: hidden states, then the head where needed.

Letters in shapes: b rows, S columns, N needed positions, V vocabulary, R tensor ranks.
"""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from rl_models.training.dtensor.microbatch import ModelBatch
from rl_models.training.megatron.model import MegatronModel

__all__ = ["hidden_states", "logits_of", "logprobs_of", "plan"]


def plan(model: MegatronModel, input_ids: Tensor, needed: Tensor) -> ModelBatch:
    """Return the model's input for log-probs, and where they belong.

    Args:
        model: The model.
        input_ids: [b, S] int64 on the CPU.
        needed: [b, S - 1] bool; entry i stands for the token at i + 1.
    """
    return ModelBatch.for_logprobs(input_ids, needed, model.layout.device, None)


def hidden_states(model: MegatronModel, input_ids: Tensor) -> Tensor:
    """Run this rank's layers.

    Returns:
        [S, b, hidden], or [S/R, b, hidden] under sequence parallelism; S may be padded.
    """
    if model.layout.parallelism.sequence:
        missing = -input_ids.shape[1] % model.layout.tensor_size
        input_ids = torch.nn.functional.pad(input_ids, (0, missing))
    width = input_ids.shape[1]
    device = input_ids.device
    column = torch.arange(width, device=device)
    positions = column.expand_as(input_ids)
    # Rows are padded on the right, where nothing that counts looks.
    is_later = column[None, :] > column[:, None]
    hidden: Tensor = model.module(input_ids, positions, is_later[None, None])
    return hidden


def logprobs_of(
    model: MegatronModel, hidden: Tensor, batch: ModelBatch, temperature: float
) -> Tensor:
    """Log-probs of needed tokens: [b, S - 1] float32, 0.0 where not needed."""
    width = batch.inputs["input_ids"].shape[1]
    logits = _own_logits(model, _rows_of(model, hidden, width)[batch.positions])
    if temperature != 1.0:
        logits = logits / temperature
    # It writes over its argument, which nothing reads again: `_own_logits` is new.
    losses = tensor_parallel.vocab_parallel_cross_entropy(logits, batch.targets)
    return batch.spread(-losses)


def logits_of(model: MegatronModel, hidden: Tensor, rows: int, columns: int) -> Tensor:
    """Logits of every position: [b, S, V] float32, whole on each tensor rank."""
    logits = _own_logits(model, _rows_of(model, hidden, columns))
    whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
    real: Tensor = whole[:, : model.config.vocab_size]
    return real.view(rows, columns, -1)


def _rows_of(model: MegatronModel, hidden: Tensor, width: int) -> Tensor:
    """[b * width, hidden] in the order of rows; gradients come back whole."""
    sequence = model.layout.parallelism.sequence
    if sequence:
        # The backward pass adds up the parts that the ranks' vocabularies give.
        hidden = tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True
        )
    rows = hidden.transpose(0, 1)[:, :width].flatten(0, 1)
    if sequence:
        return rows
    # Only after `flatten`: Megatron-core adds up a copy of a gradient that is not
    # contiguous, as that of `transpose`, and gives back the gradient itself.
    copied: Tensor = tensor_parallel.copy_to_tensor_model_parallel_region(rows)
    return copied


def _own_logits(model: MegatronModel, hidden: Tensor) -> Tensor:
    """[N, V/R] float32 of this rank's tokens; padded ones are never chosen."""
    weight = model.output_weight
    logits = torch.nn.functional.linear(hidden, weight).float()
    first = model.layout.tensor_rank * weight.shape[0]
    num_real = model.config.vocab_size - first
    if num_real >= weight.shape[0]:
        return logits
    # Zeros would enter the softmax.
    is_padding = torch.arange(weight.shape[0], device=weight.device) >= num_real
    return logits.masked_fill(is_padding, float("-inf"))
