"""Forward passes: log-probs or values at needed positions, or all logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_models.ops.logprobs import token_logprobs
from rl_models.training.dtensor.collectives import vocabulary_logprobs
from rl_models.training.dtensor.context_parallel import ContextTokens
from rl_models.training.dtensor.microbatch import ModelBatch
from rl_models.training.dtensor.model import RankModel

__all__ = ["forward_logits", "forward_logprobs", "forward_values", "needed_logits"]


def forward_logprobs(
    model: RankModel, input_ids: Tensor, needed: Tensor, temperature: float
) -> Tensor:
    """Return the log-probs of needed tokens.

    Args:
        model: The model.
        input_ids: [b, S] int64 on the CPU.
        needed: [b, S - 1] bool; entry i stands for the token at i + 1.
        temperature: Divides the logits.

    Returns:
        [b, S - 1] float32, 0.0 where not needed.
    """
    batch = _planned(model, input_ids, needed)
    entered = _entered(model, batch)
    if entered is None:
        return batch.nothing()
    batch = entered
    chunk_size = model.logit_chunk_size(batch.targets.numel())
    # A method of the model, because only those gather FSDP's weights.
    if chunk_size is not None:
        with model.compute(), model.routing(batch.is_token):
            found = model.module.chunked_logprobs(
                batch.inputs, batch.positions, batch.targets, temperature, chunk_size
            )
        return batch.spread(found)
    logits = _own_logits(model, batch)
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

    Logits are zeros where `model.has_head` is False.
    """
    batch = _planned(model, input_ids, needed)
    entered = _entered(model, batch)
    if entered is None:
        size = model.module.config.get_text_config().vocab_size
        # Expanded, so that a result that nobody reads takes no memory.
        return batch, torch.zeros(()).expand(batch.targets.numel(), size)
    batch = entered
    return batch, _whole_vocabulary(model, _own_logits(model, batch))


def _whole_vocabulary(model: RankModel, logits: Tensor) -> Tensor:
    shared = model.vocabulary_ranks
    return logits if shared is None else shared.join(logits, -1)


def _planned(model: RankModel, input_ids: Tensor, needed: Tensor) -> ModelBatch:
    device = model.ranks.device
    attention = model.attention if model.can_pack else None
    batch = ModelBatch.plan(input_ids, needed, device, attention, model.shares_prefixes)
    return batch if model.context is None else batch.shared(model.context)


def _entered(model: RankModel, batch: ModelBatch) -> ModelBatch | None:
    """Return the batch that the last stage computes results from; None elsewhere.

    The other stages have then computed and sent their hidden states.
    """
    pipeline = model.pipeline
    if pipeline is None:
        return batch
    inputs = pipeline.enter(batch.inputs)
    if pipeline.is_last:
        return replace(batch, inputs=inputs)
    with model.compute():
        pipeline.leave(inputs)
    return None


def _own_logits(model: RankModel, batch: ModelBatch) -> Tensor:
    """[N, V] logits of this rank's part of the vocabulary."""
    with model.compute(), model.routing(batch.is_token):
        return _logits_at(model, batch)


def forward_values(model: RankModel, input_ids: Tensor, needed: Tensor) -> Tensor:
    """Return the outputs of a scalar head.

    Args:
        model: A model with such a head.
        input_ids: [b, S] int64 on the CPU.
        needed: [b, S] bool; entry i stands for the state after tokens 0 to i.

    Returns:
        [b, S] float32, 0.0 where not needed.
    """
    batch = _planned(model, input_ids, needed)
    entered = _entered(model, batch)
    if entered is None:
        return batch.nothing()
    batch = entered
    with model.compute(), model.routing(batch.is_token):
        values = model.module(positions=batch.positions, **batch.inputs)
    return batch.spread(values)


def forward_logits(model: RankModel, input_ids: Tensor) -> Tensor:
    """Return the logits of right-padded rows: [b, S] -> [b, S, V] float32."""
    ids = input_ids.to(model.ranks.device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if model.pipeline is not None:
        inputs = model.pipeline.enter(inputs)
        if not model.pipeline.is_last:
            with model.compute():
                model.pipeline.leave({**inputs, "use_cache": False})
            return torch.zeros(())
    context = None
    if model.context is not None:
        context = ContextTokens(model.context, ids.shape[1])
        inputs = context.inputs(ids)
    with model.compute(), model.routing(None):
        output = model.module(**inputs, use_cache=False)
    logits: Tensor = _whole_vocabulary(model, output.logits)
    return (logits if context is None else context.join(logits)).float()


def _logits_at(model: RankModel, batch: ModelBatch) -> Tensor:
    """[N, V] logits at the needed positions."""
    module: Any = model.module
    takes_index = model.takes_logit_index
    if batch.is_packed and takes_index:
        kept = module(**batch.inputs, logits_to_keep=batch.positions).logits
        # Not `kept[0]`: the gradient of an index is a padded copy of the logits, that
        # of a squeeze is a view.
        return torch.as_tensor(kept.squeeze(0))
    if batch.is_packed or not takes_index:
        logits = module(**batch.inputs).logits
        return torch.as_tensor(logits.flatten(0, 1)[batch.positions])
    # The model takes one index for all rows, so keep each column that any row needs.
    given = batch.inputs.get("input_ids", batch.inputs.get("inputs_embeds"))
    width = torch.as_tensor(given).shape[1]
    column = (batch.positions % width).cpu().numpy()
    columns, which = np.unique(column, return_inverse=True)
    kept = torch.from_numpy(columns).to(batch.positions.device)
    logits = module(**batch.inputs, logits_to_keep=kept).logits
    at = (batch.positions // width).cpu() * columns.size + torch.from_numpy(which)
    return torch.as_tensor(logits.flatten(0, 1)[at.to(logits.device)])
