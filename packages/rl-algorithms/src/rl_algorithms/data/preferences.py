"""Preferences: pairs of answers to one prompt, the better one first.

| a row has | the prompt is | the answers are |
|---|---|---|
| prompt, chosen, rejected | the prompt: text or messages | what follows it; messages may repeat the prompt |
| chosen, rejected as messages | the messages that both begin with | the rest of each |
| chosen, rejected as texts | empty | both texts as they are |
| prompt, `completions`: `[{"rank": ..., "completion": ...}]` | the prompt | the best and the worst by rank (0 is best) |

With a chat template, the loss covers the model's own text in the assistant turns of an
answer; without one, the answer and its EOS token. Shapes: B pairs, S tokens.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from rl_algorithms.data.collate import pad_rows
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
from rl_algorithms.data.preference_columns import Messages, find_pairs
from rl_algorithms.data.prompt_rows import PromptFormat, plain_text
from rl_algorithms.data.types import Rows, Tokenizer
from rl_algorithms.errors import DataError, EmptyDatasetError
from rl_distributed.batch.batched_data_dict import (
    BatchedDataDict,
)
from rl_distributed.logs.logging import get_logger
from rl_models.types import TrainingRows

__all__ = [
    "PreferenceCollator",
    "PreferenceDatumSpec",
    "process_preferences",
]

_logger = get_logger(__name__)


class PreferenceDatumSpec(TypedDict):
    """One processed pair."""

    message_log_chosen: Messages
    message_log_rejected: Messages
    token_ids_chosen: Tensor
    """[length_chosen] int64: prompt and better answer."""
    token_ids_rejected: Tensor
    token_mask_chosen: Tensor
    """[length_chosen] 1 on the tokens of the answer."""
    token_mask_rejected: Tensor
    length_chosen: int
    length_rejected: int
    length: int
    """Number of tokens of the longer answer with its prompt."""
    loss_multiplier: float
    """Weight of the pair in the loss; 0 excludes it."""
    idx: int
    """Index of the pair in its dataset."""
    extra_env_info: dict[str, Any]
    """All columns of the row."""


def process_preferences(
    rows: Rows,
    tokenizer: Tokenizer,
    config: DataConfig | None = None,
    *,
    max_length: int | None = None,
    name: str = "preferences",
) -> ProcessedDataset:
    """Turn rows into pairs of token rows with loss masks.

    A pair whose answers have the same tokens gives no signal: it is dropped and
    counted.

    Args:
        rows: Loaded rows.
        tokenizer: The policy's tokenizer.
        config: Columns, templates and limits.
        max_length: Maximum length of a prompt with an answer in tokens; a longer pair
            is an error, dropped, or truncated (`config.on_overlong`).
        name: Name of the dataset in messages.

    Returns:
        A dataset of `PreferenceDatumSpec`.

    Raises:
        ColumnError: A column is missing or holds another type.
        DataError: An answer has no token.
        PromptTooLongError: A pair is too long, and `on_overlong` is `error`.
        EmptyDatasetError: No pair is left.
    """
    config = config if config is not None else DataConfig()
    pairs = find_pairs(rows, config, PromptFormat(config), name)
    encode = _encode_chat if uses_chat_template(config, tokenizer) else _encode_plain
    heads = [len(pair.prompt) for pair in pairs]
    chosen = encode([pair.chosen for pair in pairs], heads, tokenizer, config)
    rejected = encode([pair.rejected for pair in pairs], heads, tokenizer, config)
    data: list[PreferenceDatumSpec] = []
    for index, (pair, better, worse) in enumerate(
        zip(pairs, chosen, rejected, strict=True)
    ):
        for side, (_, mask) in (("chosen", better), ("rejected", worse)):
            # The first token has nothing before it to be predicted from.
            if not any(mask[1:]):
                raise DataError(
                    f"dataset {name}, row {index}: the {side} answer has no token to "
                    "learn; leave the row out, or give it an answer"
                )
        # Tokens and not texts: the tokenizer or the template may drop the difference.
        if better[0] == worse[0]:
            continue
        data.append(
            {
                "message_log_chosen": pair.chosen,
                "message_log_rejected": pair.rejected,
                **_tokens(better, worse),  # type: ignore[typeddict-item]
                "loss_multiplier": 1.0,
                "idx": index,
                "extra_env_info": dict(rows[index]),
            }
        )
    _report_equal(len(rows), len(data), name)
    return _limited(data, len(rows), max_length, config, name)


_Encoded = tuple[list[int], list[int]]
"""Tokens of one answer with its prompt, and their loss mask."""


def _tokens(better: _Encoded, worse: _Encoded) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for side, (ids, mask) in (("chosen", better), ("rejected", worse)):
        values[f"token_ids_{side}"] = torch.tensor(ids, dtype=torch.int64)
        values[f"token_mask_{side}"] = torch.tensor(mask, dtype=torch.int64)
        values[f"length_{side}"] = len(ids)
    return {**values, "length": max(len(better[0]), len(worse[0]))}


def _encode_chat(
    logs: Sequence[Messages],
    heads: Sequence[int],
    tokenizer: Tokenizer,
    config: DataConfig,
) -> list[_Encoded]:
    """Render each conversation; the loss covers assistant turns after the prompt."""
    rendered = []
    for log, head in zip(logs, heads, strict=True):
        # Assistant turns of the prompt are shared by both answers and tell nothing.
        learned = [i for i in range(head, len(log)) if log[i]["role"] == "assistant"]
        rendered.append(render_conversation(tokenizer, log, learned))
    return [
        (ids, [int(owner >= 0) for owner in owners])
        for ids, owners in encode_conversations(tokenizer, rendered)
    ]


def _encode_plain(
    logs: Sequence[Messages],
    heads: Sequence[int],
    tokenizer: Tokenizer,
    config: DataConfig,
) -> list[_Encoded]:
    """Tokenise prompt and answer separately, as answers are sampled."""
    end = end_tokens(tokenizer, config)
    encoder = TextEncoder(tokenizer, config.add_bos)
    pieces = list(zip(logs, heads, strict=True))
    # Prompt and answer apart, because a sampled answer never merges with the prompt's
    # tokens.
    prompts = encoder.starts([plain_text(log[:head]) for log, head in pieces])
    answers = encoder.continuations([plain_text(log[head:]) for log, head in pieces])
    return [
        (first + rest + end, [0] * len(first) + [1] * (len(rest) + len(end)))
        for first, rest in zip(prompts, answers, strict=True)
    ]


def _report_equal(num_rows: int, num_left: int, name: str) -> None:
    if num_left == num_rows:
        return
    finding = (
        f"{num_rows - num_left} of {num_rows} pairs of dataset {name} have the same "
        "tokens as chosen and as rejected"
    )
    if not num_left:
        raise EmptyDatasetError(
            f"{finding}: none is left to train on; check data.chosen_key and "
            "data.rejected_key"
        )
    _logger.warning("%s; they are left out", finding)


def _limited(
    pairs: list[PreferenceDatumSpec],
    num_rows: int,
    max_length: int | None,
    config: DataConfig,
    name: str,
) -> ProcessedDataset:
    """Apply `on_overlong`; a pair is as long as its longer answer."""
    rows = cast("list[Any]", pairs)
    num_overlong = 0
    if config.on_overlong == "truncate" and max_length is not None:
        num_overlong = sum(pair["length"] > max_length for pair in pairs)
        rows = [_cut(pair, max_length) for pair in pairs]
        if num_overlong:
            _logger.warning(
                "%d of %d pairs of dataset %s are longer than %d tokens; they are cut "
                "at their end",
                num_overlong,
                len(pairs),
                name,
                max_length,
            )
        if not any(row["loss_multiplier"] for row in rows):
            raise EmptyDatasetError(
                f"all pairs of dataset {name} are the same once they are cut to "
                f"{max_length} tokens: raise policy.max_total_sequence_length"
            )
    limited = apply_length_limit(
        rows, max_length=max_length, config=config, name=name, noun="pair"
    )
    return ProcessedDataset(
        list(limited),
        name=name,
        num_source_rows=num_rows,
        # After truncation no row is too long any more, so `limited` counts none.
        num_overlong=num_overlong or limited.num_overlong,
        max_length=max_length,
    )


def _cut(pair: PreferenceDatumSpec, max_length: int) -> PreferenceDatumSpec:
    """Truncate both rows; a pair whose rows have become equal does not count."""
    if pair["length"] <= max_length:
        return pair
    cut: Any = dict(pair)
    for side in ("chosen", "rejected"):
        for column in ("token_ids", "token_mask"):
            cut[f"{column}_{side}"] = cut[f"{column}_{side}"][:max_length]
        cut[f"length_{side}"] = len(cut[f"token_ids_{side}"])
    cut["length"] = max_length
    is_empty = not all(
        bool(cut[f"token_mask_{side}"][1:].any()) for side in ("chosen", "rejected")
    )
    if is_empty or torch.equal(cut["token_ids_chosen"], cut["token_ids_rejected"]):
        cut["loss_multiplier"] = 0.0
    return cast("PreferenceDatumSpec", cut)


class PreferenceCollator:
    """Collate pairs into 2 B rows: chosen, rejected, chosen, rejected, ...

    Args:
        pad_token_id: Padding token.
        make_sequence_length_divisible_by: Round the width up to a multiple of this.
    """

    def __init__(
        self, pad_token_id: int, make_sequence_length_divisible_by: int = 1
    ) -> None:
        self._pad_token_id = pad_token_id
        self._multiple = make_sequence_length_divisible_by

    def __call__(self, batch: Sequence[PreferenceDatumSpec]) -> TrainingRows:
        """Return `input_ids`, `input_lengths`, `token_mask` and `sample_mask`.

        Both rows of a pair have the same `sample_mask`.
        """
        input_ids, lengths = pad_rows(
            [
                ids
                for pair in batch
                for ids in (pair["token_ids_chosen"], pair["token_ids_rejected"])
            ],
            pad_value=self._pad_token_id,
            multiple=self._multiple,
        )
        token_mask, _ = pad_rows(
            [
                mask
                for pair in batch
                for mask in (pair["token_mask_chosen"], pair["token_mask_rejected"])
            ],
            pad_value=0,
            multiple=self._multiple,
        )
        weights = torch.tensor([pair["loss_multiplier"] for pair in batch])
        return BatchedDataDict(
            {
                "input_ids": input_ids,
                "input_lengths": lengths,
                "token_mask": token_mask.to(torch.float32),
                "sample_mask": weights.to(torch.float32).repeat_interleave(2),
            }
        )
