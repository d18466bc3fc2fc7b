"""Message-log helpers for programs written for NeMo RL.

This package itself does not use them: it keeps tokens in columns (`rollout`) and
encodes conversations with `encoding`.

A message log is a conversation whose messages carry their own tokens: a list of
messages with `role`, `content` and tensors of equal length, namely `token_ids` and
optionally `token_loss_mask` and `generation_logprobs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.data.encoding import encode_conversations, render_conversation
from rl_algorithms.data.types import LLMMessageLogType, Tokenizer
from rl_algorithms.errors import ColumnError
from rl_distributed.batch.batched_data_dict import (
    AnyRows,
    BatchedDataDict,
)

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
        ColumnError: Only some messages have a tensor under a key, or the tensors of a
            key differ in dtype, device or in dimensions other than the first.
    """
    flat: dict[str, Any] = {}
    # Not a set, which would lose the order of the keys.
    keys = dict.fromkeys(key for message in message_log for key in message)
    for key in keys:
        values = [message[key] for message in message_log if key in message]
        if not any(isinstance(value, Tensor) for value in values):
            flat[key] = values
            continue
        lacking = [
            place
            for place, message in enumerate(message_log)
            if not isinstance(message.get(key), Tensor)
        ]
        if lacking:
            raise ColumnError(
                f"message log: {key!r} is missing in message(s) {lacking}, or no "
                "tensor there: each message needs one, or none"
            )
        _check_alike(f"message log: {key!r}", "message", dict(enumerate(values)))
        flat[key] = torch.cat(values)
    return flat


def _check_alike(name: str, each: str, values: Mapping[int, Tensor]) -> None:
    """Check that tensors can be concatenated without converting any of them.

    Args:
        name: Name of the tensors in error messages.
        each: Noun for the owner of one tensor, such as `message`.
        values: The tensors by the index of their owner.

    Raises:
        ColumnError: The tensors cannot be concatenated.
    """
    for place, value in values.items():
        if value.dim() == 0:
            raise ColumnError(
                f"{name} must have one entry per token: {each} {place} has a single "
                "number; give it a first dimension"
            )
    kinds: dict[tuple[Any, ...], int] = {}
    for place, value in values.items():
        kind = (value.dtype, str(value.device), tuple(value.shape[1:]))
        kinds.setdefault(kind, place)
    if len(kinds) > 1:
        found = ", ".join(
            f"{dtype} on {device} of shape [{', '.join(('n', *map(str, rest)))}] in "
            f"{each} {place}"
            for (dtype, device, rest), place in kinds.items()
        )
        raise ColumnError(
            f"{name} must have one dtype and device, and one shape but for the first "
            f"dimension: got {found}; convert them first"
        )


def get_keys_from_message_log(
    message_log: LLMMessageLogType, keys: Sequence[str]
) -> LLMMessageLogType:
    """Return the conversation, keeping only these keys of each message."""
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
        roles_to_train_on: Roles whose tokens are trained on.
        only_unmask_final: Train only on the last message of a conversation.

    Raises:
        ColumnError: A message has no role or no `token_ids`.
    """
    for row, log in enumerate(message_logs):
        for place, message in enumerate(log):
            if missing := [key for key in ("role", "token_ids") if key not in message]:
                raise ColumnError(
                    f"message log {row}: message {place} needs {' and '.join(missing)}:"
                    f" got {', '.join(message) or 'nothing'}"
                )
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
) -> tuple[AnyRows, Tensor]:
    """Concatenate each conversation and right-pad all of them to one width.

    Args:
        message_logs: B conversations.
        pad_value_dict: Padding by key; default 0.
        make_sequence_length_divisible_by: Round the width up to a multiple of this.

    Returns:
        Columns of B rows, and [B] int32 lengths.

    Raises:
        ColumnError: A tensor does not have one entry per token, conversations differ
            in dtype or device, the multiple is not positive, or the column's dtype
            cannot hold the padding.
    """
    pads = pad_value_dict or {}
    multiple = make_sequence_length_divisible_by
    if multiple < 1:
        raise ColumnError(
            f"make_sequence_length_divisible_by must be at least 1: got {multiple}"
        )
    flat = [message_log_to_flat_messages(log) for log in message_logs]
    if not flat:
        return BatchedDataDict(), torch.zeros(0, dtype=torch.int32)
    lengths = [_length(place, row) for place, row in enumerate(flat)]
    width = -(-max(lengths) // multiple) * multiple
    columns: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in flat for key in row):
        values = [row.get(key) for row in flat]
        if not any(isinstance(value, Tensor) for value in values):
            columns[key] = values
            continue
        columns[key] = _padded(values, width, pads.get(key, 0), key)
    return BatchedDataDict(columns), torch.tensor(lengths, dtype=torch.int32)


def _length(place: int, row: Mapping[str, Any]) -> int:
    """Return the number of tokens of a conversation, the length of its tensors."""
    lengths = {key: len(v) for key, v in row.items() if isinstance(v, Tensor)}
    # Padded to one width, a shorter tensor would look complete.
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise ColumnError(
            f"message log {place}: all tensors must have one entry per token: {found}"
        )
    return next(iter(lengths.values()), 0)


def _padded(values: Sequence[Any], width: int, pad: int | float, key: str) -> Tensor:
    """Pad B tensors [n] to one tensor [B, width]."""
    name = f"message logs: {key!r}"
    for place, value in enumerate(values):
        if not isinstance(value, Tensor) or value.dim() != 1:
            got = (
                f"the shape {list(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise ColumnError(
                f"{name} must be a 1-D tensor in each conversation: got {got} in "
                f"conversation {place}"
            )
    _check_alike(name, "conversation", dict(enumerate(values)))
    if not values[0].is_floating_point() and not float(pad).is_integer():
        raise ColumnError(
            f"{name} is {values[0].dtype} and cannot be padded with {pad}; give a "
            "whole number in pad_value_dict"
        )
    pad_one = torch.nn.functional.pad
    return torch.stack([pad_one(v, (0, width - len(v)), value=pad) for v in values])


def get_formatted_message_log(
    message_log: Sequence[Mapping[str, str]], tokenizer: Tokenizer
) -> LLMMessageLogType:
    """Tokenise a conversation with the chat template and assign tokens to messages.

    Concatenated, the tokens of all messages equal those of the conversation rendered
    at once. Text before a message's own content, such as its header, belongs to it.

    Returns:
        The messages with `token_ids`, and with `token_loss_mask` 1 on the tokens that
        the model itself would generate.
    """
    log = [{"role": m["role"], "content": m["content"]} for m in message_log]
    conversation = render_conversation(tokenizer, log, range(len(log)))
    ((ids, owners),) = encode_conversations(tokenizer, [conversation])
    tokens = torch.tensor(ids, dtype=torch.int64)
    owner = torch.tensor(owners, dtype=torch.int64)
    # Header tokens lie in no message's span, so the next message takes them.
    place = owner.flip(0).where(owner.flip(0) >= 0, len(log)).cummin(0).values.flip(0)
    # Tokens after the last message belong to it.
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
