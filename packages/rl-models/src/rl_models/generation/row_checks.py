"""Checks by the driver of rows that go to replicas and return."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from rl_distributed.batch.batched_data_dict import (
    AnyRows,
    BatchedDataDict,
)
from rl_distributed.errors import BatchError
from rl_models.errors import GenerationError
from rl_models.types import (
    GENERATION_INPUT,
    GenerationInput,
    GenerationOutput,
)

__all__ = ["check_same_rows", "check_versions", "columns_to_sample", "rows_digest"]


def columns_to_sample(
    data: AnyRows,
) -> GenerationInput:
    """Return the columns that replicas need.

    Raises:
        BatchError: Columns are missing or have another shape or dtype, or there are no
            rows.
    """
    GENERATION_INPUT.check(data)
    rows: GenerationInput = BatchedDataDict(
        {name: column for name, column in data.items() if name in GENERATION_INPUT}
    )
    if not rows.size:
        raise BatchError("The batch has no rows; generate needs at least one.")
    return rows


def check_versions(outputs: Sequence[GenerationOutput], oldest: int) -> None:
    """Refuse rows of older weights than those served when the call began.

    Raises:
        GenerationError: Some rows are older.
    """
    for part in outputs:
        served = torch.unique(part["weight_version"]).tolist()
        if served[0] < oldest:
            raise GenerationError(
                f"A replica sampled with weights of version {served}, but all have "
                f"confirmed version {oldest}. Was it updated by somebody else? "
                "Call WeightSynchronizer.sync_weights()."
            )


def rows_digest(output: GenerationOutput) -> int:
    """Return a number that differs if the sampled tokens of two workers do."""
    # A checksum is enough, and spares sending the rows of every worker.
    return zlib.crc32(output["output_ids"].contiguous().numpy().tobytes())


def check_same_rows(
    output: GenerationOutput,
    digests: Sequence[int | None],
    replica: int,
) -> None:
    """Check that workers that hold one model together sampled the same tokens.

    Args:
        output: The rows of the first worker.
        digests: `rows_digest` of the others' rows; None: they were compared token by
            token already.
        replica: Number of the replica.

    Raises:
        GenerationError: They diverged: later tokens are of no model at all.
    """
    if any(digest not in (None, rows_digest(output)) for digest in digests):
        raise GenerationError(
            f"The workers of generation replica {replica} sampled different tokens of "
            "the same rows, so that their parts of the model do not fit together. They "
            "must have GPUs and software of the same kind."
        )
