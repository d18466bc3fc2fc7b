"""Message-log functions with the signatures of NeMo RL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from rl_algorithms.data import compat
from rl_algorithms.data.types import LLMMessageLogType, Tokenizer
from rl_distributed.batch.batched_data_dict import (
    AnyRows,
)
from rl_distributed.errors import ConfigError

__all__ = [
    "FlatMessagesType",
    "add_loss_mask_to_message_log",
    "batched_message_log_to_flat_message",
    "get_formatted_message_log",
    "message_log_shape",
]

FlatMessagesType: TypeAlias = dict[str, Any]
"""What `message_log_to_flat_messages` returns: tensors and lists by key."""


def add_loss_mask_to_message_log(
    batch_message_log: Sequence[LLMMessageLogType],
    roles_to_train_on: Sequence[str] = ("assistant",),
    only_unmask_final: bool = False,
) -> None:
    """See `rl_algorithms.data.compat`; roles are compared in lower case."""
    roles = [role.lower() for role in roles_to_train_on]
    compat.add_loss_mask_to_message_log(batch_message_log, roles, only_unmask_final)


def batched_message_log_to_flat_message(
    message_log_batch: Sequence[LLMMessageLogType],
    pad_value_dict: Mapping[str, int | float] | None = None,
    make_sequence_length_divisible_by: int = 1,
) -> tuple[AnyRows, Tensor]:
    """See `rl_algorithms.data.compat`, where the first argument is `message_logs`."""
    return compat.batched_message_log_to_flat_message(
        message_log_batch, pad_value_dict, make_sequence_length_divisible_by
    )


def get_formatted_message_log(
    message_log: Sequence[Mapping[str, str]],
    tokenizer: Tokenizer,
    task_data_spec: Any = None,
    add_bos_token: bool = True,
    add_eos_token: bool = True,
    add_generation_prompt: bool = False,
    tools: Any = None,
) -> LLMMessageLogType:
    """See `rl_algorithms.data.compat`; the tokens are those of the chat template.

    Args:
        message_log: The conversation.
        tokenizer: A tokenizer with a chat template.
        task_data_spec: Must not have prompts.
        add_bos_token: Ignored, because the template decides.
        add_eos_token: Ignored, likewise.
        add_generation_prompt: Not supported.
        tools: Not supported.

    Raises:
        ConfigError: An argument requests an unsupported feature.
    """
    for name in ("prompt", "system_prompt"):
        if getattr(task_data_spec, name, None):
            raise ConfigError(
                f"get_formatted_message_log: task_data_spec.{name} is not here; put "
                "it into the conversation"
            )
    given = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    for name, value in given.items():
        if value:
            raise ConfigError(
                f"get_formatted_message_log: {name}={value!r:.60} is not here; "
                "rl_algorithms.RolloutEngine renders prompts and tools"
            )
    return compat.get_formatted_message_log(message_log, tokenizer)


def message_log_shape(message_log: LLMMessageLogType) -> list[dict[str, Any]]:
    """Return the shape of each tensor of each message, by key."""
    return [
        {key: value.shape for key, value in message.items() if hasattr(value, "shape")}
        for message in message_log
    ]
