"""Forward passes: log-probs or values at needed positions, or whole logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_models.ops.logprobs import token_logprobs
from rl_models.training.dtensor.collectives import vocabulary_logprobs
from rl_models.training.dtensor.microbatch import ModelBatch
from rl_models.training.dtensor.model import RankModel

__all__ = ["forward_logits", "forward_logprobs", "forward_values", "needed_logits"]


def forward_logprobs(
    model: RankModel, input_ids: Tensor, needed: Tensor, temperature: float
) -> Tensor:
    """Log-probs of needed tokens.

    Args:
        model: The model.
        input_ids: [b, S] int64 on the CPU.
        needed: [b, S - 1] bool; entry i stands for the token at i + 1.
        temperature: Divides the logits.

    Returns:
        [b, S - 1] float32, 0.0 where not needed.
    """
    batch, logits = _own_logits(model, input_ids, needed)
    shared = model.vocabulary_ranks
    if shared is None:
        found = token_logprobs(logits, batch.targets, temperature)
    else:
        found = vocabulary_logprobs(logits, batch.targets, temperature, shared)
    return batch.spread(found)


def needed_logits(
    model: RankModel, input_ids: Tensor, needed: Tensor
) -> tuple[ModelBatch, Tensor]:
    """Return the [N, V] logits of needed tokens, and where they belong.

    Args:
        model: The model.
        input_ids: As in `forward_logprobs`.
        needed: As in `forward_logprobs`.
    """
    batch, logits = _own_logits(model, input_ids, needed)
    return batch, _whole_vocabulary(model, logits)


def _whole_vocabulary(model: RankModel, logits: Tensor) -> Tensor:
    shared = model.vocabulary_ranks
    return logits if shared is None else shared.join_vocabulary(logits)


def _own_logits(
    model: RankModel, input_ids: Tensor, needed: Tensor
) -> tuple[ModelBatch, Tensor]:
    """Return the logits of this rank's part of the vocabulary, and their places."""
    device = model.ranks.device
    attention = model.attention if model.can_pack else None
    batch = ModelBatch.for_logprobs(
        input_ids, needed, device, attention, model.shares_prefixes
    )
    with model.compute():
        return batch, _logits_at(model, batch)


def forward_values(model: RankModel, input_ids: Tensor, needed: Tensor) -> Tensor:
    """Numbers of a scalar head.

    Args:
        model: A model with such a head.
        input_ids: [b, S] int64 on the CPU.
        needed: [b, S] bool; entry i stands for the state after tokens 0 to i.

    Returns:
        [b, S] float32, 0.0 where not needed.
    """
    attention = model.attention if model.can_pack else None
    batch = ModelBatch.for_values(
        input_ids, needed, model.ranks.device, attention, model.shares_prefixes
    )
    with model.compute():
        values = model.module(positions=batch.positions, **batch.inputs)
    return batch.spread(values)


def forward_logits(model: RankModel, input_ids: Tensor) -> Tensor:
    """Logits of every position of right-padded rows: [b, S] -> [b, S, V] float32."""
    with model.compute():
        ids = input_ids.to(model.ranks.device)
        output = model.module(input_ids=ids, use_cache=False)
    logits: Tensor = _whole_vocabulary(model, output.logits)
    return logits.float()


def _logits_at(model: RankModel, batch: ModelBatch) -> Tensor:
    """[N, V] logits at the needed positions."""
    module: Any = model.module
    takes_index = model.takes_logit_index
    if batch.is_packed and takes_index:
        kept = module(**batch.inputs, logits_to_keep=batch.positions).logits
        return torch.as_tensor(kept[0])
    if batch.is_packed or not takes_index:
        logits = module(**batch.inputs).logits
        return torch.as_tensor(logits.flatten(0, 1)[batch.positions])
    # One index serves all rows: keep each column that some row needs.
    width = batch.inputs["input_ids"].shape[1]
    column = (batch.positions % width).cpu().numpy()
    columns, which = np.unique(column, return_inverse=True)
    kept = torch.from_numpy(columns).to(batch.positions.device)
    logits = module(**batch.inputs, logits_to_keep=kept).logits
    at = (batch.positions // width).cpu() * columns.size + torch.from_numpy(which)
    return torch.as_tensor(logits.flatten(0, 1)[at.to(logits.device)])
