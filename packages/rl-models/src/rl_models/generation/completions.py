"""Completions of rows by an engine, and batches joined from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_models.types import GenerationOutput

__all__ = ["Completion", "join_rows"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Completion:
    """The completion of one row."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    """Version of the weights that sampled each token."""
    truncated: bool


def join_rows(
    input_ids: torch.Tensor,
    lengths: IntArray,
    completions: Sequence[Completion],
    pad_token_id: int,
) -> GenerationOutput:
    """Return inputs and completions as one batch."""
    new_lengths = np.array([len(row.tokens) for row in completions], dtype=np.int64)
    totals = lengths + new_lengths
    num_rows, input_width = input_ids.shape
    width = max(input_width, int(totals.max(initial=0)))
    output_ids = np.full((num_rows, width), pad_token_id, dtype=np.int64)
    logprobs = np.zeros((num_rows, width), dtype=np.float32)
    versions = np.full((num_rows, width), -1, dtype=np.int64)
    given = input_ids.numpy()
    for row, completion in enumerate(completions):
        start, end = int(lengths[row]), int(totals[row])
        output_ids[row, :start] = given[row, :start]
        output_ids[row, start:end] = completion.tokens
        logprobs[row, start:end] = completion.logprobs
        versions[row, start:end] = completion.versions
    oldest = [min(completion.versions) for completion in completions]
    truncated = [completion.truncated for completion in completions]
    return BatchedDataDict(
        {
            "output_ids": torch.from_numpy(output_ids),
            "generation_lengths": torch.from_numpy(new_lengths),
            "unpadded_sequence_lengths": torch.from_numpy(totals),
            "logprobs": torch.from_numpy(logprobs),
            "truncated": torch.tensor(truncated, dtype=torch.bool),
            "weight_version": torch.tensor(oldest, dtype=torch.int64),
            "token_versions": torch.from_numpy(versions),
        }
    )
