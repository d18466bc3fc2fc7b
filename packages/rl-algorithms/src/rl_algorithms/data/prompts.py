"""Prompts for reinforcement learning: rows -> messages -> tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_algorithms.data.config import DataConfig
from rl_algorithms.data.dataset import ProcessedDataset
from rl_algorithms.data.encoding import TextEncoder, uses_chat_template
from rl_algorithms.data.length_limit import apply_length_limit
from rl_algorithms.data.prompt_rows import plain_text, read_prompts
from rl_algorithms.data.types import DatumSpec, Rows, Tokenizer
from rl_algorithms.errors import ColumnError
from rl_models.tokens.chat import render_chat

__all__ = ["process_prompts"]


def process_prompts(
    rows: Rows,
    tokenizer: Tokenizer,
    config: DataConfig | None = None,
    *,
    max_length: int | None = None,
    name: str = "prompts",
) -> ProcessedDataset:
    """Turn rows into prompts: see `read_prompts`.

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
    read = read_prompts(rows, config, name)
    logs = [row.messages for row in read]
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
        _datum(index, row.messages, ids, row.columns, name)
        for index, (row, ids) in enumerate(zip(read, tokens, strict=True))
    ]
    return apply_length_limit(
        data, max_length=max_length, config=config, name=name, noun="prompt"
    )


def _datum(
    index: int,
    log: list[dict[str, str]],
    ids: list[int],
    info: dict[str, Any],
    name: str,
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
        datum["stop_strings"] = _stop_strings(info["stop_strings"], index, name)
    return datum


def _stop_strings(value: Any, index: int, name: str) -> list[str]:
    # A text is a sequence as well, and would stop answers at each of its characters.
    found = [value] if isinstance(value, str) else value
    if isinstance(found, Sequence) and all(isinstance(s, str) and s for s in found):
        return list(found)
    raise ColumnError(
        f"dataset {name}, row {index}: column 'stop_strings' must be a text or a list "
        f"of texts that are not empty: got {value!r:.80}"
    )
