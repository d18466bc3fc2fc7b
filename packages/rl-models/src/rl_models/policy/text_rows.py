"""Batches of texts for `generate`: encode prompts, decode answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rl_distributed.batch.batched_data_dict import (
    AnyRows,
    BatchedDataDict,
)
from rl_distributed.errors import BatchError
from rl_models.tokens.chat import encode_prompt
from rl_models.tokens.tokenizer import decode_rows, load_tokenizer, pad_token_id
from rl_models.types import (
    GenerationInput,
    GenerationOutput,
)

__all__ = ["TextRows", "has_texts"]

_FOR_GENERATE = ("seeds", "stop_strings")


def has_texts(data: Mapping[str, Any]) -> bool:
    """Return whether a batch has prompts as texts, and no tokens."""
    return "prompt" in data and "input_ids" not in data


class TextRows:
    """Encodes and decodes the texts of a model.

    Args:
        tokenizer_name: Folder or hub name; loaded when it is first needed.
        chat_template: In place of the tokenizer's own.
    """

    def __init__(self, tokenizer_name: str, chat_template: str | None = None) -> None:
        self._name = tokenizer_name
        self._template = chat_template
        self._tokenizer: Any = None

    def sample(
        self,
        data: AnyRows,
        generate: Callable[
            [GenerationInput],
            GenerationOutput,
        ],
    ) -> GenerationOutput:
        """Sample answers to the texts of a batch.

        Args:
            data: A batch with a column `prompt`, of texts or conversations.
            generate: Samples for a batch of tokens.

        Returns:
            All columns of `data`, those of `generate`, and the answers as texts in the
            column `response`, without special tokens.

        Raises:
            BatchError: There are no rows, or a prompt is neither text nor messages, or
                has no tokens.
        """
        # On first use: batches of tokens need none, and loading one takes seconds.
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._name, self._template)
        rows = self._encoded(data)
        output = generate(rows)
        texts = decode_rows(
            self._tokenizer,
            output["output_ids"],
            rows["input_lengths"],
            output["unpadded_sequence_lengths"],
        )
        return BatchedDataDict({**data, **output, "response": texts})

    def _encoded(self, data: AnyRows) -> GenerationInput:
        prompts = data["prompt"]
        if not len(prompts):
            raise BatchError("The batch has no rows; generate needs at least one.")
        ids = [self._ids(index, prompt) for index, prompt in enumerate(prompts)]
        lengths = torch.tensor([len(row) for row in ids])
        width = int(lengths.max())
        pad = pad_token_id(self._tokenizer)
        padded = [row + [pad] * (width - len(row)) for row in ids]
        # Other columns are for the caller, and rejoin the result.
        kept = {name: data[name] for name in _FOR_GENERATE if name in data}
        return BatchedDataDict(
            {"input_ids": torch.tensor(padded), "input_lengths": lengths, **kept}
        )

    def _ids(self, index: int, prompt: Any) -> list[int]:
        is_text = isinstance(prompt, str)
        if not is_text and not _are_messages(prompt):
            raise BatchError(
                f"prompt[{index}] must be text, or a list of messages with role and "
                f"content: got {prompt!r:.60}; texts go in the column prompt, tokens "
                "in input_ids and input_lengths"
            )
        ids = encode_prompt(self._tokenizer, prompt)
        if not ids:
            raise BatchError(
                f"prompt[{index}] has no tokens: got {prompt!r:.60}; leave the row "
                "out, or give it a text"
            )
        return ids


def _are_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) for message in prompt)
    )
