"""Forward passes of distillation: the most probable tokens, and the logits of given ones.

Letters in shapes: b rows of a micro-batch, B rows of a shard, S columns, V vocabulary,
N needed positions, k tokens per position.
"""  # noqa: E501

from __future__ import annotations

import torch
from torch import Tensor

from rl_distributed.errors import BatchError
from rl_models.training.dtensor.forward import needed_logits
from rl_models.training.dtensor.model import RankModel
from rl_models.training.global_batch import micro_batches, part_of
from rl_models.training.positions import needed_for_logprobs
from rl_models.types import (
    InputRows,
    TrainingRows,
)

__all__ = ["student_inputs", "topk_of_shard"]


def topk_of_shard(
    model: RankModel,
    data: InputRows,
    *,
    k: int,
    micro_batch_size: int,
    temperature: float,
) -> dict[str, Tensor]:
    """Return the columns of `TopkOutputSpec` for the rows of a shard.

    Raises:
        BatchError: The model has fewer than k tokens.
    """
    model.module.eval()
    input_ids = data.columns["input_ids"]
    columns = {
        "topk_logits": torch.zeros(*input_ids.shape, k),
        # Half the size of torch's int64, and enough for any vocabulary: these columns
        # travel.
        "topk_indices": torch.zeros(*input_ids.shape, k, dtype=torch.int32),
        "topk_log_normalizer": torch.zeros(input_ids.shape),
    }
    for rows in micro_batches(data, micro_batch_size):
        part = part_of(data, rows)
        needed = needed_for_logprobs(part)
        with torch.no_grad():
            batch, logits_N_V = needed_logits(model, part.columns["input_ids"], needed)
            if k > logits_N_V.shape[-1]:
                raise BatchError(
                    "get_topk_logits: k must be at most the size of the vocabulary "
                    f"({logits_N_V.shape[-1]}): got {k}"
                )
            # After `needed_logits`, because every stage takes part in its forward pass.
            if not model.has_head:
                continue
            # In float32, where the normalizer is a sum over the vocabulary.
            scaled_N_V = logits_N_V.float() / temperature
            logits_N_k, indices_N_k = scaled_N_V.topk(k, dim=-1)
            found = {
                "topk_logits": logits_N_k,
                "topk_indices": indices_N_k.to(torch.int32),
                "topk_log_normalizer": torch.logsumexp(scaled_N_V, dim=-1),
            }
        for name, values in found.items():
            spread = batch.spread(values).cpu()
            columns[name][rows.start : rows.stop, : spread.shape[1]] = spread
    model.free_gathered()
    return model.from_last_stage(columns)


def student_inputs(
    model: RankModel,
    part: TrainingRows,
    temperature: float,
    *,
    needs_entropy: bool,
) -> dict[str, Tensor]:
    """Return the inputs of a loss of `LossInputType.DISTILLATION`.

    Args:
        model: The model that is trained.
        part: A micro-batch with `topk_indices` [b, S, k].
        temperature: Divides the logits.
        needs_entropy: Whether to return `student_entropy` as well.

    Raises:
        BatchError: `topk_indices` is missing, or names tokens that the model lacks.
    """
    indices = part.get("topk_indices")
    if indices is None:
        raise BatchError(
            "a distillation loss needs the column 'topk_indices' of the teacher's "
            "get_topk_logits: it is missing"
        )
    needed = needed_for_logprobs(part)
    batch, logits_N_V = needed_logits(model, part.columns["input_ids"], needed)
    if not model.has_head:
        return {}
    scaled_N_V = logits_N_V.float() / temperature
    k = indices.shape[-1]
    flat = indices[:, :-1].reshape(-1, k).to(scaled_N_V.device, torch.int64)
    indices_N_k = flat[batch.places]
    size = scaled_N_V.shape[-1]
    # On a GPU `gather` would fail with a device-side assertion that names no cause and
    # leaves the process unusable.
    if indices_N_k.numel() and int(indices_N_k.max()) >= size:
        raise BatchError(
            f"topk_indices names token {int(indices_N_k.max())}, but the student has "
            f"{size} tokens: teacher and student must share one vocabulary"
        )
    normalizer_N = torch.logsumexp(scaled_N_V, dim=-1)
    inputs = {
        "student_topk_logits": batch.spread(scaled_N_V.gather(-1, indices_N_k)),
        "student_log_normalizer": batch.spread(normalizer_N),
    }
    if needs_entropy:
        probs_N_V = (scaled_N_V - normalizer_N[:, None]).exp()
        entropy_N = normalizer_N - (probs_N_V * scaled_N_V).sum(-1)
        inputs["student_entropy"] = batch.spread(entropy_N)
    return inputs
