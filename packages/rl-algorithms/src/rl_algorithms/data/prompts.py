"""Prompts for reinforcement learning: columns -> templates -> tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_algorithms.data.columns import (
    ColumnMap,
    find_columns,
    messages_of,
    text_of,
)
from rl_algorithms.data.config import DataConfig
from rl_algorithms.data.dataset import ProcessedDataset
from rl_algorithms.data.encoding import TextEncoder, uses_chat_template
from rl_algorithms.data.length_limit import apply_length_limit
from rl_algorithms.data.progress import track
from rl_algorithms.data.text_files import text_or_file
from rl_algorithms.data.types import DatumSpec, Row, Rows, Tokenizer
from rl_algorithms.errors import ColumnError, DataError
from rl_models.tokens.chat import render_chat

__all__ = ["PromptFormat", "plain_text", "process_prompts"]


class PromptFormat:
    """The templates around a prompt.

    Args:
        config: Template and system prompt, as text or as files.
    """

    def __init__(self, config: DataConfig) -> None:
        self._template = text_or_file(
            config.prompt_template, config.prompt_file, "prompt_file"
        )
        self.system_prompt = text_or_file(
            config.system_prompt, config.system_prompt_file, "system_prompt_file"
        )

    def user_text(self, prompt: str, row: Row, index: int, name: str) -> str:
        """Fill the template.

        Raises:
            ColumnError: The template names a column that the row does not have.
        """
        if self._template is None:
            return prompt
        try:
            return self._template.format_map({**row, "prompt": prompt})
        except KeyError as error:
            raise ColumnError(
                f"data.prompt_template names {{{error.args[0]}}}, which is no column "
                f"of dataset {name}, row {index}: it has {', '.join(map(repr, row))} "
                "(and {prompt}); write literal braces twice"
            ) from error
        except (ValueError, IndexError, AttributeError) as error:
            # Raised for unbalanced braces, for {} and {0}, and for {column.attribute}.
            raise DataError(
                f"data.prompt_template cannot be filled: {error}; it may hold "
                "{prompt} and {column} fields, and literal braces must be written twice"
            ) from error

    def with_system(self, messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        """Put the system prompt first, unless there is one."""
        if self.system_prompt is None or messages[0]["role"] == "system":
            return list(messages)
        return [{"role": "system", "content": self.system_prompt}, *messages]


def process_prompts(
    rows: Rows,
    tokenizer: Tokenizer,
    config: DataConfig | None = None,
    *,
    max_length: int | None = None,
    name: str = "prompts",
) -> ProcessedDataset:
    """Turn rows into prompts.

    A prompt is text or messages. A conversation that ends with an answer is cut before
    it. The environment gets all columns, with the answer under the name `answer`
    whatever its column is called.

    Args:
        rows: Loaded rows.
        tokenizer: The policy's tokenizer.
        config: Columns, templates and limits.
        max_length: Maximum prompt length in tokens.
        name: Name of the dataset in messages.

    Raises:
        ColumnError: A column is missing or holds another type.
        PromptTooLongError: A prompt is too long, and `on_overlong` is `error`.
    """
    config = config if config is not None else DataConfig()
    columns = find_columns(rows, config, name)
    layout = PromptFormat(config)
    logs: list[list[dict[str, str]]] = []
    infos: list[dict[str, Any]] = []
    for index, row in enumerate(track(rows, "reading prompts", total=len(rows))):
        log, answer = _prompt_of(row, columns, layout, index, name)
        logs.append(log)
        # A copy, as the caller's row must not gain a column.
        info = dict(row)
        if answer is not None:
            # A column that is named `answer` wins.
            info.setdefault("answer", answer)
        infos.append(info)
    encoder = TextEncoder(tokenizer, config.add_bos)
    if uses_chat_template(config, tokenizer):
        # Without BOS, which a template that wants one has written itself.
        tokens = encoder.continuations([render_chat(tokenizer, log) for log in logs])
    else:
        tokens = encoder.starts([plain_text(log) for log in logs])
    # A model cannot be asked to continue nothing.
    for index, ids in enumerate(tokens):
        if not ids:
            raise ColumnError(
                f"dataset {name}, row {index}: the prompt is empty (no tokens); drop "
                "the row, or set data.prompt_template"
            )
    data = [
        _datum(index, log, ids, info)
        for index, (log, ids, info) in enumerate(zip(logs, tokens, infos, strict=True))
    ]
    return apply_length_limit(
        data, max_length=max_length, config=config, name=name, noun="prompt"
    )


def plain_text(messages: Sequence[dict[str, str]]) -> str:
    """Return messages as plain text: their contents joined by newlines."""
    return "\n".join(message["content"] for message in messages)


def _prompt_of(
    row: Row, columns: ColumnMap, layout: PromptFormat, index: int, name: str
) -> tuple[list[dict[str, str]], Any]:
    """Return the messages of a prompt, and the answer if the row has one."""
    answer = row.get(columns.answer) if columns.answer is not None else None
    if columns.prompt is not None and isinstance(row.get(columns.prompt), list):
        messages = messages_of(row, columns.prompt, index, name)
    elif columns.prompt is not None:
        text = text_of(row, columns.prompt, index, name)
        messages = [
            {"role": "user", "content": layout.user_text(text, row, index, name)}
        ]
    elif columns.messages is not None:
        messages = messages_of(row, columns.messages, index, name)
        if messages[-1]["role"] == "assistant":
            answer = messages[-1]["content"] if answer is None else answer
            # The policy is to write the answer itself.
            messages = messages[:-1]
        if not messages:
            raise ColumnError(
                f"dataset {name}, row {index}: column {columns.messages!r} has no "
                "message before the answer"
            )
    else:
        text = text_of(row, columns.text or "text", index, name)
        messages = [
            {"role": "user", "content": layout.user_text(text, row, index, name)}
        ]
    return layout.with_system(messages), answer


def _datum(
    index: int, log: list[dict[str, str]], ids: list[int], info: dict[str, Any]
) -> DatumSpec:
    token_ids = torch.tensor(ids, dtype=torch.int64)
    # Headers and turn ends belong to no single message, so the prompt is not split:
    # its last message carries all tokens.
    empty = token_ids[:0]
    messages: list[dict[str, Any]] = [
        {**message, "token_ids": empty} for message in log[:-1]
    ]
    messages.append({**log[-1], "token_ids": token_ids})
    datum: DatumSpec = {
        "message_log": messages,
        "length": len(ids),
        "extra_env_info": info,
        "loss_multiplier": 1.0,
        "idx": index,
        "token_ids": token_ids,
    }
    if isinstance(info.get("task_name"), str):
        datum["task_name"] = info["task_name"]
    if info.get("stop_strings"):
        datum["stop_strings"] = list(info["stop_strings"])
    return datum
