"""Forward passes of a micro-batch: hidden states, then the head at needed positions.

Letters in shapes: b rows, S columns, N needed positions, V vocabulary, R tensor ranks,
T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from rl_models.ops.packed_attention import ATTENTION_NAME, packed_model_inputs
from rl_models.training.dtensor.microbatch import ModelBatch
from rl_models.training.megatron.architecture import HiddenStates
from rl_models.training.megatron.attention import Attend, attending_by
from rl_models.training.megatron.model import MegatronModel

__all__ = [
    "hidden_states",
    "logits_of",
    "logprobs_of",
    "packed_logits",
    "plan",
    "values_of",
]


def plan(model: MegatronModel, input_ids: Tensor, needed: Tensor) -> ModelBatch:
    """Return the model's input, and the places of the results.

    Args:
        model: The model.
        input_ids: [b, S] int64 on the CPU.
        needed: [b, S - 1] or [b, S] bool; see `ModelBatch.plan`.
    """
    attention = _attention_of(model)
    return _even(
        model, ModelBatch.plan(input_ids, needed, model.layout.device, attention)
    )


def _attention_of(model: MegatronModel) -> str | None:
    """Return the attention of packed rows; None: micro-batches must have one shape."""
    return None if model.layout.num_chunks > 1 else ATTENTION_NAME


def _even(model: MegatronModel, batch: ModelBatch) -> ModelBatch:
    """Add a row of padding where tensor ranks need equal parts of packed tokens."""
    ids = batch.inputs["input_ids"]
    missing = -ids.shape[1] % _ranks_that_share_tokens(model)
    if not (batch.is_packed and missing):
        return batch
    lengths = batch.inputs["cu_seq_lens_q"].diff().tolist()
    inputs = packed_model_inputs(torch.tensor([*lengths, missing]), ids.device)
    padded = torch.nn.functional.pad(ids, (0, missing))
    return replace(batch, inputs={**inputs, "input_ids": padded})


def _ranks_that_share_tokens(model: MegatronModel) -> int:
    layout = model.layout
    return layout.tensor_size if layout.parallelism.sequence else 1


def hidden_states(
    model: MegatronModel,
    inputs: Mapping[str, Any],
    chunk: HiddenStates | None = None,
) -> Tensor:
    """Run this rank's layers.

    Args:
        model: The model.
        inputs: Of a `ModelBatch`; or [b, S] `input_ids` alone, for all of whose tokens
            there are to be results.
        chunk: The part of the layers to run; None: there is only one.

    Returns:
        [S, b, hidden], or [S/R, b, hidden] under sequence parallelism; S may be padded.
        Of packed rows S is T, and b is 1.
    """
    part = model.chunks[0] if chunk is None else chunk
    input_ids: Tensor = inputs["input_ids"]
    if "cu_seq_lens_q" in inputs:
        # The layers are called without the model around them, which has positions of
        # unpacked rows only.
        first = part.embedding(input_ids, None) if part.pre_process else None
        rotary = _rotary(model, inputs["position_ids"][0])
        borders = inputs["cu_seq_lens_q"]
        packed: Tensor = part.decoder(first, borders, rotary_pos_emb=rotary)
        return packed
    # Tensor ranks need equal parts of the tokens.
    missing = -input_ids.shape[1] % _ranks_that_share_tokens(model)
    input_ids = torch.nn.functional.pad(input_ids, (0, missing))
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)
    hidden: Tensor = part(input_ids, columns.expand_as(input_ids), None)
    return hidden


def _rotary(model: MegatronModel, positions: Tensor) -> Tensor:
    """Return [T, 1, 1, D] angles of tokens at these positions."""
    # Not by the module's own function, which caches its result: cached without
    # gradients, it could not be used in a backward pass later.
    frequencies: Tensor = model.chunks[0].rotary_pos_emb.inv_freq.to(positions.device)
    angles = positions[:, None] * frequencies
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def logprobs_of(
    model: MegatronModel, hidden: Tensor, batch: ModelBatch, temperature: float
) -> Tensor:
    """Return log-probs of needed tokens: [b, S - 1] float32, 0.0 where not needed."""
    width = batch.inputs["input_ids"].shape[1]
    logits = _own_logits(model, _rows_of(model, hidden, width)[batch.positions])
    if temperature != 1.0:
        logits = logits / temperature
    # It overwrites its argument, which is safe: `_own_logits` returns a new tensor.
    losses = tensor_parallel.vocab_parallel_cross_entropy(logits, batch.targets)
    # The cross-entropy of a single target is its negative log-prob.
    return batch.spread(-losses)


def values_of(model: MegatronModel, hidden: Tensor, batch: ModelBatch) -> Tensor:
    """Return outputs of a scalar head: [b, S] float32, 0.0 where not needed."""
    width = batch.inputs["input_ids"].shape[1]
    if model.layout.parallelism.sequence:
        # Each tensor rank has the whole head, and thus the whole gradient: a sum over
        # the ranks would count it several times.
        hidden = tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False
        )
    rows = hidden.transpose(0, 1)[:, :width].flatten(0, 1)
    return batch.spread(model.scores(rows[batch.positions]))


def logits_of(model: MegatronModel, hidden: Tensor, rows: int, columns: int) -> Tensor:
    """Return logits of every position: [b, S, V] float32, whole on each tensor rank."""
    logits = _own_logits(model, _rows_of(model, hidden, columns))
    whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
    real: Tensor = whole[:, : model.config.vocab_size]
    return real.view(rows, columns, -1)


def packed_logits(
    model: MegatronModel,
    tokens: Tensor,
    positions: Tensor,
    wanted: Tensor,
    attend: Attend,
) -> Tensor:
    """Run packed tokens; collective on the ranks that hold one copy of the model.

    Args:
        model: The model, in eval mode.
        tokens: [T] token ids, the same on these ranks.
        positions: [T] their positions in their rows.
        wanted: [N] indices of the tokens whose logits are needed.
        attend: Attention over these tokens and the cached ones before them.

    Returns:
        [N, V] logits, the same on these ranks.
    """
    layout = model.layout
    count = len(tokens)
    ranks = _ranks_that_share_tokens(model)
    padding = (0, -count % ranks)
    tokens = torch.nn.functional.pad(tokens, padding)
    rotary = _rotary(model, torch.nn.functional.pad(positions, padding))
    shape = (len(tokens) // ranks, 1, model.config.hidden_size)
    hidden = torch.empty(shape, dtype=model.dtype, device=tokens.device)
    last = layout.num_chunks * layout.num_stages - 1
    for part in range(last + 1):
        number, stage = divmod(part, layout.num_stages)
        if stage == layout.stage:
            chunk = model.chunks[number]
            first = chunk.embedding(tokens[None], None) if part == 0 else None
            # Megatron-core's way to give hidden states to a stage that embeds no
            # tokens.
            if part > 0:
                chunk.decoder.set_input_tensor(hidden)
            with attending_by(attend):
                hidden = chunk.decoder(first, None, rotary_pos_emb=rotary)
        if part < last:
            hidden = layout.from_stage(hidden, stage)
    logits = torch.empty(len(wanted), model.config.vocab_size, device=tokens.device)
    if layout.is_last_stage:
        own = _own_logits(model, _rows_of(model, hidden, count)[wanted])
        whole = tensor_parallel.gather_from_tensor_model_parallel_region(own)
        logits = whole[:, : model.config.vocab_size].contiguous()
    return layout.from_stage(logits, layout.num_stages - 1)


def _rows_of(model: MegatronModel, hidden: Tensor, width: int) -> Tensor:
    """Return [b * width, hidden] in the order of rows, with whole gradients."""
    sequence = model.layout.parallelism.sequence
    if sequence:
        # The backward pass adds up the gradients from the ranks' vocabularies.
        hidden = tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True
        )
    rows = hidden.transpose(0, 1)[:, :width].flatten(0, 1)
    if sequence:
        return rows
    # Only after `flatten`: if a gradient is not contiguous, as that of `transpose`,
    # Megatron-core reduces a copy of it and returns the unreduced gradient.
    copied: Tensor = tensor_parallel.copy_to_tensor_model_parallel_region(rows)
    return copied


def _own_logits(model: MegatronModel, hidden: Tensor) -> Tensor:
    """Return [N, V/R] float32 logits of this rank's tokens; -inf for padding."""
    weight = model.output_weight
    logits = torch.nn.functional.linear(hidden, weight).float()
    first = model.layout.tensor_rank * weight.shape[0]
    num_real = model.config.vocab_size - first
    if num_real >= weight.shape[0]:
        return logits
    # Weights of the padding are zero, and logits of 0 would enter the softmax.
    is_padding = torch.arange(weight.shape[0], device=weight.device) >= num_real
    return logits.masked_fill(is_padding, float("-inf"))
