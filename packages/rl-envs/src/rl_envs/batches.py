"""Batches of columns, as `generate` gives them, as conversations for an environment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_distributed.arrays import is_array
from rl_envs.errors import MessageLogError

__all__ = ["conversations_of", "takes_batches"]

# What `generate` needs and adds; none of it is a column of the data set.
_OF_GENERATION = frozenset(
    {
        "input_ids",
        "input_lengths",
        "output_ids",
        "generation_lengths",
        "unpadded_sequence_lengths",
        "logprobs",
        "truncated",
        "weight_version",
        "token_versions",
        "seeds",
        "stop_strings",
        "response",
        "message_log",
    }
)


def conversations_of(
    batch: Mapping[str, Any],
) -> tuple[list[list[dict[str, Any]]], list[Any]]:
    """Return message logs and metadata of a batch, as `step` takes them.

    Args:
        batch: Columns of equal length. `response`, the answers as texts, and before
            them `message_log`, conversations, or `prompt`, texts or conversations. The
            metadata of a row are its entry of `extra_env_info`, or a mapping of all
            other columns but those of the generation.

    Raises:
        MessageLogError: A column is missing, is empty, or has another length.
    """
    responses = _texts(batch)
    size = len(responses)
    if not size:
        raise MessageLogError("the batch has no rows: step needs at least one")
    name = "message_log" if "message_log" in batch else "prompt"
    if name not in batch:
        raise MessageLogError(
            f"the batch needs prompt or message_log beside response: it has "
            f"{', '.join(map(str, batch))}"
        )
    _check_length(name, batch[name], size)
    cut = batch.get("truncated")
    cut = [False] * size if cut is None else list(cut)
    _check_length("truncated", cut, size)
    logs = [
        [
            *_messages(batch[name][row], name, row),
            {"role": "assistant", "content": responses[row], "truncated": bool(at)},
        ]
        for row, at in enumerate(cut)
    ]
    return logs, _metadata(batch, size)


def takes_batches(step: Callable[..., Any]) -> Callable[..., Any]:
    """Let the `step` of an environment also be called with a batch alone."""

    @functools.wraps(step)
    def step_of(
        self: Any, message_log_batch: Any = None, metadata: Any = None, **named: Any
    ) -> Any:
        if metadata is None and isinstance(message_log_batch, Mapping):
            message_log_batch, metadata = conversations_of(message_log_batch)
        elif metadata is None:
            raise TypeError(
                f"{type(self).__name__}.step takes message_log_batch and metadata, or "
                f"a batch of columns alone: got {type(message_log_batch).__name__} and "
                "no metadata"
            )
        return step(self, message_log_batch, metadata, **named)

    return step_of


def _texts(batch: Mapping[str, Any]) -> Sequence[str]:
    if "response" not in batch:
        raise MessageLogError(
            "the batch needs a column response with the answers as texts, which "
            "generate adds where the batch has a column prompt: it has "
            f"{', '.join(map(str, batch)) or 'no columns'}"
        )
    responses: Sequence[str] = batch["response"]
    for row, text in enumerate(responses):
        if not isinstance(text, str):
            raise MessageLogError(
                f"response[{row}] must be text: got {type(text).__name__} {text!r:.60}"
            )
    return responses


def _messages(prompt: Any, name: str, row: int) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, Sequence) and all(isinstance(m, Mapping) for m in prompt):
        return [dict(message) for message in prompt]
    raise MessageLogError(
        f"{name}[{row}] must be text or a list of messages: got "
        f"{type(prompt).__name__} {prompt!r:.60}"
    )


def _metadata(batch: Mapping[str, Any], size: int) -> list[Any]:
    if "extra_env_info" in batch:
        _check_length("extra_env_info", batch["extra_env_info"], size)
        return list(batch["extra_env_info"])
    columns = {
        name: column
        for name, column in batch.items()
        if name not in _OF_GENERATION and not is_array(column)
    }
    for name, column in columns.items():
        _check_length(name, column, size)
    return [
        {name: column[row] for name, column in columns.items()} for row in range(size)
    ]


def _check_length(name: str, column: Any, size: int) -> None:
    if len(column) != size:
        raise MessageLogError(
            f"{name} must have one entry per row: got {len(column)} for {size} answers"
        )
