"""Tokenise conversations and texts, and map each token to its message.

A conversation is rendered as one text and tokenised once, so that its tokens are those
that the model sees at inference. The span of a message in the text is found by
rendering the prefixes of the conversation; token offsets then assign each token to its
message.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rl_algorithms.data.config import DataConfig
from rl_algorithms.data.progress import track
from rl_algorithms.data.types import Tokenizer
from rl_algorithms.errors import DataError
from rl_models.tokens.chat import has_chat_template, render_chat

__all__ = [
    "end_tokens",
    "Conversation",
    "TextEncoder",
    "encode_conversations",
    "render_conversation",
    "uses_chat_template",
]

T = TypeVar("T")
_CHUNK_ROWS = 1000


@dataclass(frozen=True, slots=True)
class Conversation:
    """A rendered conversation."""

    text: str
    """The text to tokenise."""
    spans: tuple[tuple[int, int], ...]
    """Characters of each message that the model itself would write in its place: the
    content and the end of the turn, without the header."""


def uses_chat_template(config: DataConfig, tokenizer: Tokenizer) -> bool:
    """Return whether prompts are formatted with a chat template.

    Raises:
        DataError: The configuration requires a template but the tokenizer has none.
    """
    if config.apply_chat_template is None:
        return has_chat_template(tokenizer)
    if config.apply_chat_template and not has_chat_template(tokenizer):
        raise DataError(
            "data.apply_chat_template is true but the tokenizer has no chat template: "
            "set policy.tokenizer.chat_template, or data.apply_chat_template=false"
        )
    return config.apply_chat_template


def render_conversation(
    tokenizer: Tokenizer, messages: Sequence[dict[str, str]], places: Container[int]
) -> Conversation:
    """Render a whole conversation and find the spans of the messages at `places`.

    Raises:
        DataError: The template changes earlier messages when later ones follow, so that
            spans cannot be found.
    """
    text = render_chat(tokenizer, messages, add_generation_prompt=False)
    spans = []
    for place, message in enumerate(messages):
        if place not in places:
            # Nothing is learned here, so the template may rewrite the message later.
            spans.append((0, 0))
            continue
        head = ""
        if place > 0:
            head = render_chat(
                tokenizer,
                messages[:place],
                # The header of an answer belongs to its prompt, because the model does
                # not write it.
                add_generation_prompt=message["role"] == "assistant",
            )
        whole = (
            text
            if place + 1 == len(messages)
            else render_chat(
                tokenizer, messages[: place + 1], add_generation_prompt=False
            )
        )
        if not (text.startswith(head) and text.startswith(whole)):
            raise DataError(
                f"the chat template writes message {place} ({message['role']}) "
                "differently once later messages follow, so its tokens cannot be "
                "found: train on the last answer only (data.only_unmask_final=true), "
                "or use a template that leaves earlier messages as they are"
            )
        spans.append((len(head), len(whole)))
    return Conversation(text, tuple(spans))


def encode_conversations(
    tokenizer: Tokenizer, conversations: Sequence[Conversation]
) -> list[tuple[list[int], list[int]]]:
    """Tokenise conversations.

    Returns:
        The tokens of each conversation, and for each token the index of the message in
        whose span it lies, or -1.
    """
    rows: list[tuple[list[int], list[int]]] = []
    for chunk in _chunks(conversations):
        encoded = tokenizer(
            [conversation.text for conversation in chunk],
            # The chat template has written them into the text.
            add_special_tokens=False,
            return_offsets_mapping=True,
        )
        rows += [
            (list(ids), _messages_of_tokens(conversation.spans, offsets))
            for conversation, ids, offsets in zip(
                chunk, encoded["input_ids"], encoded["offset_mapping"], strict=True
            )
        ]
    return rows


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield slices to tokenise at once, and show the progress."""
    starts = range(0, len(items), _CHUNK_ROWS)
    for start in track(starts, "tokenising", total=len(items), step=_CHUNK_ROWS):
        yield items[start : start + _CHUNK_ROWS]


def _messages_of_tokens(
    spans: tuple[tuple[int, int], ...], offsets: Sequence[tuple[int, int]]
) -> list[int]:
    starts = np.fromiter((start for start, _ in offsets), np.int64, len(offsets))
    owner = np.full(len(offsets), -1, np.int64)
    for place, (start, end) in enumerate(spans):
        # By its start: a token across a border belongs to the message in which it
        # begins.
        owner[(starts >= start) & (starts < end)] = place
    return owner.tolist()


class TextEncoder:
    """Tokenises plain text, in batches.

    Args:
        tokenizer: A Hugging Face tokenizer.
        add_bos: Begin with the BOS token; default: as the tokenizer does.
    """

    def __init__(self, tokenizer: Tokenizer, add_bos: bool | None = None) -> None:
        self._tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        if add_bos is None:
            # Tokenising an empty text reveals the tokens that are always added.
            add_bos = bos is not None and bos in list(tokenizer("")["input_ids"])[:1]
        elif add_bos and bos is None:
            raise DataError(
                "data.add_bos is true but the tokenizer has no BOS token: set it to "
                "false, or use another tokenizer"
            )
        self._first: list[int] = [bos] if add_bos and bos is not None else []

    def starts(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise texts that begin a sequence."""
        return [self._first + ids for ids in self.continuations(texts)]

    def continuations(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise texts that follow others."""
        rows: list[list[int]] = []
        for chunk in _chunks(texts):
            encoded: Any = self._tokenizer(list(chunk), add_special_tokens=False)
            rows += [list(ids) for ids in encoded["input_ids"]]
        return rows


def end_tokens(tokenizer: Tokenizer, config: DataConfig) -> list[int]:
    """Return the end of a plain text: the EOS token if `config.add_eos`, else nothing.

    Raises:
        DataError: The tokenizer has no EOS token.
    """
    if not config.add_eos:
        return []
    if tokenizer.eos_token_id is None:
        raise DataError(
            "data.add_eos is true but the tokenizer has no EOS token: set it to false, "
            "or use another tokenizer"
        )
    return [tokenizer.eos_token_id]
