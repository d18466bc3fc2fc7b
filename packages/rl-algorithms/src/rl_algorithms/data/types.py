"""Types of raw and processed rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NotRequired,
    Protocol,
    TypeAlias,
    TypedDict,
)

from rl_distributed.batch.schema import ColumnSpec, Schema

if TYPE_CHECKING:
    from torch import Tensor

    from rl_distributed.batch.batched_data_dict import BatchedDataDict

__all__ = [
    "PROMPT_ROWS",
    "DatumSpec",
    "LLMMessageLogType",
    "PromptRows",
    "PromptSpec",
    "Row",
    "Rows",
    "Tokenizer",
]

LLMMessageLogType = list[dict[str, Any]]
"""Messages with `role` and `content`; if present, `token_ids`, `token_loss_mask` and
`generation_logprobs` are tensors of equal length."""

Row = Mapping[str, Any]
"""One row of a dataset by column name."""
Rows = Sequence[Row]
"""A dataset as loaded."""


class DatumSpec(TypedDict):
    """One processed row."""

    message_log: LLMMessageLogType
    """The conversation: up to the prompt, or the whole demonstration."""
    length: int
    """Number of tokens of the message log."""
    extra_env_info: dict[str, Any]
    """All columns of the row for the environment, including `answer`."""
    loss_multiplier: float
    """Weight of the row in the loss; 0 excludes it."""
    idx: int
    """Index of the row in its dataset."""
    token_ids: Tensor
    """[length] int64: the tokens of the whole message log."""
    token_mask: NotRequired[Tensor]
    """[length] 1 on the tokens of a demonstration that are trained on."""
    task_name: NotRequired[str]
    """Environment of the row, if there are several."""
    stop_strings: NotRequired[list[str] | None]
    """Stop strings of the row's answer."""


class PromptSpec(TypedDict):
    """Prompts as columns, made by `rl_collate_fn` as the input of a rollout."""

    input_ids: Annotated[Tensor, ColumnSpec(("rows", "tokens"), "integer")]
    """Right-padded."""
    input_lengths: Annotated[Tensor, ColumnSpec(("rows",), "integer")]
    """Number of tokens per row."""
    message_log: Annotated[list[LLMMessageLogType], ColumnSpec(("rows",), "list")]
    """`DatumSpec.message_log`; the following columns also have the names of fields."""
    loss_multiplier: NotRequired[Annotated[Tensor, ColumnSpec(("rows",), "number")]]
    extra_env_info: NotRequired[
        Annotated[list[dict[str, Any]], ColumnSpec(("rows",), "list")]
    ]
    stop_strings: NotRequired[
        Annotated[list[list[str] | None], ColumnSpec(("rows",), "list")]
    ]


PromptRows: TypeAlias = "BatchedDataDict[PromptSpec]"
"""Prompts, with any further columns."""
PROMPT_ROWS = Schema.of(PromptSpec, "prompts", Tensor=object)


class Tokenizer(Protocol):
    """Methods of a Hugging Face tokenizer that data and rollouts call."""

    eos_token_id: int | None
    pad_token_id: int | None
    bos_token_id: int | None
    chat_template: Any

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        """Tokenise one text or several."""
        ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Decode the tokens of one row."""
        ...

    def batch_decode(self, sequences: Any, **kwargs: Any) -> list[str]:
        """Decode the tokens of several rows."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token."""
        ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Render a conversation."""
        ...
