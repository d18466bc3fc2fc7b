"""Message logs: conversations whose messages carry their own tokens.

A log is a list of messages with `role`, `content` and tensors of one length each:
`token_ids`, and where they were added `token_loss_mask` and `generation_logprobs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.data.encoding import encode_conversations, render_conversation
from rl_algorithms.data.types import LLMMessageLogType, Tokenizer
from rl_algorithms.errors import ColumnError
from rl_distributed.batched_data_dict import BatchedDataDict

__all__ = [
    "add_loss_mask_to_message_log",
    "batched_message_log_to_flat_message",
    "get_formatted_message_log",
    "get_keys_from_message_log",
    "message_log_to_flat_messages",
]


def message_log_to_flat_messages(message_log: LLMMessageLogType) -> dict[str, Any]:
    """Concatenate a conversation's messages key by key.

    Tensors are concatenated along their first dimension; other values become lists.

    Raises:
        ColumnError: A tensor is there in some messages only, or dtypes differ.
    """
    flat: dict[str, Any] = {}
    keys = dict.fromkeys(key for message in message_log for key in message)
    for key in keys:
        values = [message[key] for message in message_log if key in message]
        if not isinstance(values[0], Tensor):
            flat[key] = values
            continue
        if len(values) != len(message_log):
            lacking = [i for i, m in enumerate(message_log) if key not in m]
            raise ColumnError(
                f"message log: {key!r} is missing in message(s) {lacking}: each "
                "message needs it, or none"
            )
        if len({(value.dtype, value.device) for value in values}) > 1:
            found = ", ".join(f"{value.dtype} on {value.device}" for value in values)
            raise ColumnError(
                f"message log: {key!r} must have one dtype and device: got {found}"
            )
        flat[key] = torch.cat(values)
    return flat


def get_keys_from_message_log(
    message_log: LLMMessageLogType, keys: Sequence[str]
) -> LLMMessageLogType:
    """Return the conversation with only these keys in each message."""
    return [
        {key: message[key] for key in keys if key in message} for message in message_log
    ]


def add_loss_mask_to_message_log(
    message_logs: Sequence[LLMMessageLogType],
    roles_to_train_on: Sequence[str] = ("assistant",),
    only_unmask_final: bool = False,
) -> None:
    """Write `token_loss_mask` into each message, in place.

    Args:
        message_logs: Conversations with `token_ids`.
        roles_to_train_on: Roles whose tokens are learned.
        only_unmask_final: Only the last message of a conversation is.
    """
    for log in message_logs:
        for place, message in enumerate(log):
            learned = (
                place == len(log) - 1
                if only_unmask_final
                else message["role"] in roles_to_train_on
            )
            message["token_loss_mask"] = torch.full_like(
                message["token_ids"], int(learned)
            )


def batched_message_log_to_flat_message(
    message_logs: Sequence[LLMMessageLogType],
    pad_value_dict: Mapping[str, int | float] | None = None,
    make_sequence_length_divisible_by: int = 1,
) -> tuple[BatchedDataDict[Any], Tensor]:
    """Concatenate each conversation, and right-pad all to one width.

    Args:
        message_logs: B conversations.
        pad_value_dict: Padding by key; default 0.
        make_sequence_length_divisible_by: Round the width up to a multiple of this.

    Returns:
        Columns of B rows, and [B] int32 lengths.
    """
    pads = pad_value_dict or {}
    flat = [message_log_to_flat_messages(log) for log in message_logs]
    if not flat:
        return BatchedDataDict(), torch.zeros(0, dtype=torch.int32)
    lengths = [
        next((len(v) for v in row.values() if isinstance(v, Tensor)), 0) for row in flat
    ]
    multiple = make_sequence_length_divisible_by
    width = -(-max(lengths) // multiple) * multiple
    columns: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in flat for key in row):
        values = [row.get(key) for row in flat]
        if not any(isinstance(value, Tensor) for value in values):
            columns[key] = values
            continue
        columns[key] = torch.stack(
            [_padded(value, width, pads.get(key, 0), key) for value in values]
        )
    return BatchedDataDict(columns), torch.tensor(lengths, dtype=torch.int32)


def _padded(value: Any, width: int, pad: int | float, key: str) -> Tensor:
    if not isinstance(value, Tensor) or value.dim() != 1:
        raise ColumnError(
            f"message logs: {key!r} must be a 1-D tensor in each conversation: got "
            f"{type(value).__name__}"
        )
    return torch.nn.functional.pad(value, (0, width - len(value)), value=pad)


def get_formatted_message_log(
    message_log: Sequence[Mapping[str, str]], tokenizer: Tokenizer
) -> LLMMessageLogType:
    """Tokenise a conversation by the chat template, and share the tokens out.

    The tokens of all messages together are those of the conversation rendered at once.
    What stands before a message's own part, such as its header, belongs to it too.

    Returns:
        The messages with `token_ids`, and with `token_loss_mask` 1 on what the model
        would write in an answer's place.
    """
    log = [{"role": m["role"], "content": m["content"]} for m in message_log]
    conversation = render_conversation(tokenizer, log, range(len(log)))
    ((ids, owners),) = encode_conversations(tokenizer, [conversation])
    tokens = torch.tensor(ids, dtype=torch.int64)
    owner = torch.tensor(owners, dtype=torch.int64)
    # A header's tokens have no owner: they belong to the next message that has one.
    place = owner.flip(0).where(owner.flip(0) >= 0, len(log)).cummin(0).values.flip(0)
    place = place.clamp(max=len(log) - 1)
    return [
        {
            **message,
            "token_ids": tokens[place == index],
            "token_loss_mask": (
                (owner[place == index] == index) & (message["role"] == "assistant")
            ).to(torch.int64),
        }
        for index, message in enumerate(log)
    ]
