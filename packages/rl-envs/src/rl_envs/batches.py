"""Conversion of batches returned by `generate` to conversations for an environment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rl_distributed.batch.arrays import is_array, to_numpy
from rl_envs.errors import MessageLogError

__all__ = ["conversations_of", "takes_batches"]

# Set on a `step` that already takes batches, so that subclasses do not wrap it twice.
_MARK = "_takes_batches"
# Inputs and outputs of `generate`; none of them is a column of the data set.
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
    """Return the message logs and metadata of a batch, as arguments of `step`.

    Args:
        batch: Columns of equal length: `response`, the texts to score, and either
            `message_log`, conversations, or `prompt`, texts or conversations. A row's
            metadata is its entry of `extra_env_info` or, without that column, a mapping
            of all columns that do not belong to the generation.

    Raises:
        MessageLogError: A column is missing, is empty, or has another length.
    """
    responses = _texts(batch)
    size = len(responses)
    name = "message_log" if "message_log" in batch else "prompt"
    if name not in batch:
        raise MessageLogError(
            f"the batch needs prompt or message_log beside response: it has "
            f"{', '.join(map(str, batch))}"
        )
    prompts = _rows(name, batch[name], size)
    cut = _flags("truncated", batch.get("truncated"), size)
    logs = [
        [
            *_messages(prompts[row], name, row),
            {"role": "assistant", "content": responses[row], "truncated": cut[row]},
        ]
        for row in range(size)
    ]
    return logs, _metadata(batch, size)


def takes_batches(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `step` of an environment so that it also accepts a single batch."""
    if getattr(step, _MARK, False):
        return step

    @functools.wraps(step)
    def step_of(self: Any, *arguments: Any, **named: Any) -> Any:
        # A mapping alone is a batch: message logs are never a mapping.
        if len(arguments) == 1 and not named and isinstance(arguments[0], Mapping):
            arguments = conversations_of(arguments[0])
        return step(self, *arguments, **named)

    setattr(step_of, _MARK, True)
    return step_of


def _texts(batch: Mapping[str, Any]) -> Sequence[str]:
    if "response" not in batch:
        raise MessageLogError(
            "the batch needs a column response with the answers as texts, which "
            "generate adds where the batch has a column prompt: it has "
            f"{', '.join(map(str, batch)) or 'no columns'}"
        )
    responses = _rows("response", batch["response"])
    if not len(responses):
        raise MessageLogError("the batch has no rows: step needs at least one")
    for row, text in enumerate(responses):
        if not isinstance(text, str):
            raise MessageLogError(
                f"response[{row}] must be text: got {type(text).__name__} {text!r:.60}"
            )
    return responses


def _messages(prompt: Any, name: str, row: int) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if (
        isinstance(prompt, Sequence)
        and len(prompt)
        and all(isinstance(message, Mapping) for message in prompt)
    ):
        return [dict(message) for message in prompt]
    raise MessageLogError(
        f"{name}[{row}] must be text or a list of messages, at least one: got "
        f"{type(prompt).__name__} {prompt!r:.60}"
    )


def _metadata(batch: Mapping[str, Any], size: int) -> list[Any]:
    if "extra_env_info" in batch:
        return list(_rows("extra_env_info", batch["extra_env_info"], size))
    columns = {
        name: _rows(name, column, size)
        for name, column in batch.items()
        # Arrays hold tokens or numbers per token; metadata travels to other processes.
        if name not in _OF_GENERATION and not is_array(column)
    }
    return [
        {name: column[row] for name, column in columns.items()} for row in range(size)
    ]


def _rows(name: str, column: Any, size: int | None = None) -> Sequence[Any]:
    """Return a column of a batch after checking its type and length."""
    if not isinstance(column, list | tuple):
        raise MessageLogError(
            f"{name} must be a list with one entry per row: got "
            f"{type(column).__name__} {column!r:.60}"
        )
    if size is not None and len(column) != size:
        raise MessageLogError(
            f"{name} must have one entry per row: got {len(column)} for {size} answers"
        )
    return column


def _flags(name: str, column: Any, size: int) -> list[bool]:
    if column is None:
        return [False] * size
    values = to_numpy(column) if is_array(column) else np.asarray(column)
    if values.shape != (size,):
        raise MessageLogError(
            f"{name} must have one entry per row: got shape {values.shape} for "
            f"{size} answers"
        )
    return [bool(value) for value in values]
