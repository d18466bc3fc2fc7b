"""Data that crosses the borders of rl-models.

Conventions: `input_ids` is int64 and right-padded; `B` rows, `S` columns. Log-probs are
[B, S] with 0.0 at position 0 and `log p(token i | tokens < i)` at position i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypeAlias, TypedDict

from rl_distributed.batch.schema import ColumnSpec, Schema

if TYPE_CHECKING:
    from torch import Tensor

    from rl_distributed.batch.batched_data_dict import BatchedDataDict

__all__ = [
    "GENERATION_INPUT",
    "GENERATION_OUTPUT",
    "SEQUENCES",
    "TRAINING_ROWS",
    "GenerationDatumSpec",
    "GenerationInput",
    "GenerationOutput",
    "GenerationOutputSpec",
    "InputRows",
    "LogprobOutputSpec",
    "LossInputType",
    "LossType",
    "ReferenceLogprobOutputSpec",
    "SamplingParams",
    "SequenceDatumSpec",
    "TokenDatumSpec",
    "TopkOutputSpec",
    "TrainDatumSpec",
    "TrainOutput",
    "TrainingRows",
    "ValueOutputSpec",
]


class LossType(Enum):
    """The count that a loss is divided by."""

    TOKEN_LEVEL = "token_level"
    """The number of trained tokens in the global batch."""
    SEQUENCE_LEVEL = "sequence_level"
    """The number of trained sequences in the global batch."""


class LossInputType(Enum):
    """The output of the model that a loss is computed from."""

    LOGPROB = "logprob"
    """`next_token_logprobs` [B, S-1], 0.0 where `token_mask[:, 1:]` is 0."""
    LOGIT = "logit"
    """`logits` [B, S, V] in float32."""
    VALUE = "value"
    """`values` [B, S] of a model with a scalar head, as `ValueOutputSpec.values`."""
    DISTILLATION = "distillation"
    """`student_topk_logits` [B, S-1, k] of the tokens in the column `topk_indices`,
    `student_log_normalizer` [B, S-1], the logarithm of the sum over the whole
    vocabulary, and with the loss's attribute `needs_entropy` also `student_entropy`
    [B, S-1]; 0.0 where `token_mask[:, 1:]` is 0."""


class TokenDatumSpec(TypedDict):
    """Columns of all rows that go into a model."""

    input_ids: Annotated[Tensor, ColumnSpec(("rows", "tokens"), "integer")]
    """[B, S] int64, right-padded."""
    input_lengths: Annotated[Tensor, ColumnSpec(("rows",), "integer")]
    """[B] tokens per row."""


class SequenceDatumSpec(TokenDatumSpec):
    """Columns of rows that a model reads, as `get_logprobs` and `get_values` do."""

    token_mask: NotRequired[Annotated[Tensor, ColumnSpec(("rows", "tokens"), "number")]]
    """1 where the token is asked about."""
    value_mask: NotRequired[Annotated[Tensor, ColumnSpec(("rows", "tokens"), "number")]]
    """1 where a value is asked for; see `get_values`."""


class TrainDatumSpec(TokenDatumSpec):
    """Columns that every training batch has; a loss may need more."""

    token_mask: Annotated[Tensor, ColumnSpec(("rows", "tokens"), "number")]
    """[B, S] 1 where the token is trained on."""
    sample_mask: Annotated[Tensor, ColumnSpec(("rows",), "number")]
    """[B] 1 where the row counts."""


InputRows: TypeAlias = "BatchedDataDict[TokenDatumSpec]"
"""Rows that go into a model, with any further columns."""
TrainingRows: TypeAlias = "BatchedDataDict[TrainDatumSpec]"
"""Rows that are trained on, with any further columns."""


class LogprobOutputSpec(TypedDict):
    """Result of `get_logprobs`."""

    logprobs: Tensor
    """[B, S] float32; 0.0 at position 0, at padding and where it was not asked for."""


class ReferenceLogprobOutputSpec(TypedDict):
    """Result of `get_reference_policy_logprobs`."""

    reference_logprobs: Tensor
    """[B, S] float32, as `LogprobOutputSpec.logprobs`, of the frozen initial model."""


class ValueOutputSpec(TypedDict):
    """Result of `get_values`."""

    values: Tensor
    """[B, S] float32: entry i is the head's number after tokens 0 to i; 0.0 where it
    was not asked for."""


class TopkOutputSpec(TypedDict):
    """Result of `get_topk_logits`; entry i of a row is about the token at i + 1."""

    topk_logits: Tensor
    """[B, S, k] float32 logits of the k most probable next tokens, largest first,
    divided by the temperature; 0.0 where it was not asked for."""
    topk_indices: Tensor
    """[B, S, k] int32: which tokens these are."""
    topk_log_normalizer: Tensor
    """[B, S] float32: the logarithm of the sum of the exponentials of all logits, so
    that `topk_logits - topk_log_normalizer` are log-probs."""


class GenerationDatumSpec(TokenDatumSpec):
    """Input of `generate`."""

    stop_strings: NotRequired[
        Annotated[Sequence[Sequence[str] | None], ColumnSpec(("rows",), "list")]
    ]
    """Extra stop strings of each row."""
    seeds: NotRequired[Annotated[Tensor, ColumnSpec(("rows",), "int64")]]
    """[B] int64; a row's sample depends on its seed and its tokens only."""


class GenerationOutputSpec(TypedDict):
    """Result of `generate`."""

    output_ids: Annotated[Tensor, ColumnSpec(("rows", "tokens"), "integer")]
    """[B, S] int64: the input followed by the sampled tokens, right-padded."""
    generation_lengths: Annotated[Tensor, ColumnSpec(("rows",), "integer")]
    """[B] number of sampled tokens."""
    unpadded_sequence_lengths: Annotated[Tensor, ColumnSpec(("rows",), "integer")]
    """[B] input length plus generation length."""
    logprobs: NotRequired[Annotated[Tensor, ColumnSpec(("rows", "tokens"), "float")]]
    """[B, S] float32 at the sampling temperature after top-k and top-p; 0.0 at the
    input positions and at padding. Absent where the backend gives none."""
    truncated: Annotated[Tensor, ColumnSpec(("rows",), "number")]
    """[B] bool: the length limit came before a stop."""
    weight_version: Annotated[Tensor, ColumnSpec(("rows",), "integer")]
    """[B] int64: the oldest version of the weights among the row's sampled tokens."""
    token_versions: Annotated[Tensor, ColumnSpec(("rows", "tokens"), "integer")]
    """[B, S] int64: version of the weights that sampled each token; -1 at the input
    positions and at padding."""


GenerationInput: TypeAlias = "BatchedDataDict[GenerationDatumSpec]"
"""Rows to continue, with any further columns."""
GenerationOutput: TypeAlias = "BatchedDataDict[GenerationOutputSpec]"
"""Sampled rows, with any further columns."""

# torch is imported by type checkers only, as this module is read at every start.
SEQUENCES = Schema.of(SequenceDatumSpec, "rows", Tensor=object)
TRAINING_ROWS = Schema.of(TrainDatumSpec, "training rows", Tensor=object)
GENERATION_INPUT = Schema.of(GenerationDatumSpec, "rows to continue", Tensor=object)
GENERATION_OUTPUT = Schema.of(GenerationOutputSpec, "sampled rows", Tensor=object)


class TrainOutput(TypedDict):
    """Result of `train`."""

    loss: Tensor
    """[num_global_batches] float32: the loss of each global batch."""
    grad_norm: Tensor
    """[num_global_batches] norm before clipping; 0.0 in eval mode."""
    lr: Tensor
    """[num_global_batches] learning rate that each optimizer step used."""
    all_mb_metrics: dict[str, list[Any]]
    """Metrics of every micro-batch of every rank: plain floats sum to the batch's
    value, `rl_distributed.metrics` values reduce by their type."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings for sampling tokens; `greedy=True` of `generate` overrides them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    max_new_tokens: int | None = None
    """None: the limit of the generation config."""
