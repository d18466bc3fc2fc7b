"""Demonstrations for supervised training: columns -> tokens -> loss mask.

| a row has | tokens | learned |
|---|---|---|
| messages, or prompt and answer with a chat template | the rendered conversation | what the model writes in the roles to train on, ends of turns included |
| prompt and answer, no template | prompt + answer + EOS, tokenised apart | answer and EOS |
| text | text + EOS | all |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_algorithms.data.columns import (
    ColumnMap,
    answer_column,
    find_columns,
    messages_of,
    text_of,
)
from rl_algorithms.data.config import DataConfig
from rl_algorithms.data.dataset import ProcessedDataset
from rl_algorithms.data.encoding import (
    TextEncoder,
    encode_conversations,
    end_tokens,
    render_conversation,
    uses_chat_template,
)
from rl_algorithms.data.length_limit import apply_length_limit
from rl_algorithms.data.progress import track
from rl_algorithms.data.prompt_rows import PromptFormat, plain_text
from rl_algorithms.data.types import DatumSpec, Row, Rows, Tokenizer
from rl_algorithms.errors import DataError

__all__ = ["process_demonstrations"]

_FOLLOW_DIRECTLY = ("assistant", "environment", "tool")


def process_demonstrations(
    rows: Rows,
    tokenizer: Tokenizer,
    config: DataConfig | None = None,
    *,
    max_length: int | None = None,
    name: str = "demonstrations",
) -> ProcessedDataset:
    """Turn rows into token rows with loss masks.

    Args:
        rows: Loaded rows.
        tokenizer: The policy's tokenizer.
        config: Columns, templates and limits.
        max_length: Maximum length of a demonstration in tokens.
        name: Name of the dataset in messages.

    Raises:
        ColumnError: A column is missing or holds another type.
        DataError: A row has no token to train on.
        PromptTooLongError: A row is too long, and `on_overlong` is `error`.
    """
    config = config if config is not None else DataConfig()
    columns = find_columns(rows, config, name)
    template = uses_chat_template(config, tokenizer)
    if columns.prompt is None and columns.messages is None:
        data = _from_texts(rows, columns.text or "text", tokenizer, config, name)
    elif template:
        data = _from_conversations(rows, columns, tokenizer, config, name)
    else:
        data = _from_pairs(rows, columns, tokenizer, config, name)
    # Before rows are truncated: a row without any answer is a mistake in the data.
    for datum in data:
        # The first token has nothing before it to be predicted from.
        if not bool(datum["token_mask"][1:].any()):
            raise DataError(
                f"dataset {name}, row {datum['idx']}: no token would be learned; it "
                f"needs an answer that is not empty, from one of the roles "
                f"{', '.join(config.roles_to_train_on)} (data.roles_to_train_on)"
            )
    return apply_length_limit(
        data, max_length=max_length, config=config, name=name, noun="demonstration"
    )


def _conversation_of(
    row: Row, columns: ColumnMap, layout: PromptFormat, index: int, name: str
) -> list[dict[str, str]]:
    """Return the whole conversation of a row."""
    if columns.prompt is None and columns.messages is not None:
        return layout.with_system(messages_of(row, columns.messages, index, name))
    prompt, answer = columns.prompt or "prompt", answer_column(columns, row, name)
    if isinstance(row.get(prompt), list):
        messages = messages_of(row, prompt, index, name)
    else:
        text = text_of(row, prompt, index, name)
        messages = [
            {"role": "user", "content": layout.user_text(text, row, index, name)}
        ]
    if isinstance(row.get(answer), list):
        messages = messages + messages_of(row, answer, index, name)
    else:
        content = text_of(row, answer, index, name)
        messages = [*messages, {"role": "assistant", "content": content}]
    return layout.with_system(messages)


def _learned_places(messages: Sequence[dict[str, str]], config: DataConfig) -> set[int]:
    places = [
        place
        for place, message in enumerate(messages)
        if message["role"] in config.roles_to_train_on
    ]
    return set(places[-1:] if config.only_unmask_final else places)


def _from_conversations(
    rows: Rows, columns: ColumnMap, tokenizer: Tokenizer, config: DataConfig, name: str
) -> list[DatumSpec]:
    layout = PromptFormat(config)
    logs = [
        _conversation_of(row, columns, layout, index, name)
        for index, row in enumerate(rows)
    ]
    learned = [_learned_places(log, config) for log in logs]
    rendered = [
        render_conversation(tokenizer, log, places)
        for log, places in zip(
            track(logs, "rendering conversations", total=len(logs)),
            learned,
            strict=True,
        )
    ]
    encoded = encode_conversations(tokenizer, rendered)
    return [
        _datum(index, log, ids, [int(owner >= 0) for owner in owners], row)
        for index, (log, (ids, owners), row) in enumerate(
            zip(logs, encoded, rows, strict=True)
        )
    ]


def _from_pairs(
    rows: Rows, columns: ColumnMap, tokenizer: Tokenizer, config: DataConfig, name: str
) -> list[DatumSpec]:
    """Tokenise what comes before the first answer as one prompt, then each message."""
    layout = PromptFormat(config)
    logs = [
        _conversation_of(row, columns, layout, index, name)
        for index, row in enumerate(rows)
    ]
    heads = [_num_head_messages(log) for log in logs]
    encoder = TextEncoder(tokenizer, config.add_bos)
    firsts = encoder.starts(
        [plain_text(log[:head]) for log, head in zip(logs, heads, strict=True)]
    )
    texts = [
        _continued(message)
        for log, head in zip(logs, heads, strict=True)
        for message in log[head:]
    ]
    # The messages of all rows at once, because tokenizers are faster on many texts.
    rest = iter(encoder.continuations(texts))
    end = end_tokens(tokenizer, config)
    data = []
    for index, (log, head) in enumerate(zip(logs, heads, strict=True)):
        learned = _learned_places(log, config)
        # The head was tokenised as one text, so its messages share one mask.
        groups = [range(head), *(range(i, i + 1) for i in range(head, len(log)))]
        ids: list[int] = []
        mask: list[int] = []
        for places in groups:
            piece = firsts[index] if places.start == 0 else next(rest)
            # Sampling stops at EOS, so each answer must teach it.
            if log[places.start]["role"] == "assistant":
                piece = piece + end
            ids += piece
            mask += [int(not learned.isdisjoint(places))] * len(piece)
        data.append(_datum(index, log, ids, mask, rows[index]))
    return data


def _num_head_messages(log: Sequence[dict[str, str]]) -> int:
    """Return the number of messages before the first answer, at least one."""
    roles = [message["role"] for message in log]
    return max(roles.index("assistant") if "assistant" in roles else len(roles), 1)


def _continued(message: dict[str, str]) -> str:
    """Return the text of a message that is not the first.

    An answer follows its prompt directly and a message of the environment follows the
    answer directly, as in a rollout; other messages begin on a new line.
    """
    content = message["content"]
    return content if message["role"] in _FOLLOW_DIRECTLY else "\n" + content


def _from_texts(
    rows: Rows, column: str, tokenizer: Tokenizer, config: DataConfig, name: str
) -> list[DatumSpec]:
    texts = [text_of(row, column, index, name) for index, row in enumerate(rows)]
    end = end_tokens(tokenizer, config)
    tokens = TextEncoder(tokenizer, config.add_bos).starts(texts)
    return [
        _datum(
            index,
            [{"role": "assistant", "content": text}],
            ids + end,
            [1] * len(ids + end),
            row,
        )
        for index, (text, ids, row) in enumerate(zip(texts, tokens, rows, strict=True))
    ]


def _datum(
    index: int,
    log: Sequence[dict[str, str]],
    ids: list[int],
    mask: list[int],
    row: Row,
) -> DatumSpec:
    messages: list[dict[str, Any]] = [dict(message) for message in log]
    return {
        "message_log": messages,
        "length": len(ids),
        "extra_env_info": dict(row),
        "loss_multiplier": 1.0,
        "idx": index,
        "token_ids": torch.tensor(ids, dtype=torch.int64),
        "token_mask": torch.tensor(mask, dtype=torch.int64),
    }
