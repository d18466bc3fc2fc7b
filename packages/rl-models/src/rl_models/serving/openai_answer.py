"""Samples of the backend `huggingface` in the formats of OpenAI's interface."""

from __future__ import annotations

import time
import uuid
from typing import Any

from rl_models.serving.openai_request import OpenAIRequest

__all__ = ["Choice", "OpenAIAnswer"]

# Shown by a tokenizer in place of bytes that are no complete character yet.
_REPLACEMENT = "\ufffd"


class Choice:
    """One answer to one prompt, while it grows.

    Args:
        tokenizer: The model's tokenizer.
        stop: Texts that end the answer and are not part of it.
    """

    def __init__(self, tokenizer: Any, stop: list[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self._num_sent_characters = self.num_sent = 0

    def add(self, token: int, logprob: float) -> None:
        """Take the next token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)

    @property
    def text(self) -> str:
        """The whole text, up to a stop text."""
        # All tokens are decoded together: characters may span several of them.
        text: str = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        found = [text.find(stop) for stop in self._stop if stop in text]
        return text[: min(found)] if found else text

    def new_text(self) -> str:
        """Return the new text since the last call, as far as it is final."""
        text = self.text
        if self.finish_reason is None:
            if text.endswith(_REPLACEMENT):
                return ""
            # The end may be the beginning of a stop text.
            held = max((len(stop) - 1 for stop in self._stop), default=0)
            text = text[: len(text) - held]
        new = text[self._num_sent_characters :]
        self._num_sent_characters += len(new)
        return new

    def message(self) -> dict[str, Any]:
        """Return the whole answer as the fields of a message."""
        return {"content": self.text}

    def delta(self) -> dict[str, Any] | None:
        """Return what is new of that message; None: nothing that can be shown yet."""
        text = self.new_text()
        return {"content": text} if text or self.finish_reason is not None else None

    def piece(self, token: int) -> str:
        """Return the text of one token."""
        return str(self._tokenizer.decode([token]))


class OpenAIAnswer:
    """Writes the answer to one request, whole or as events.

    Args:
        request: The request.
        model_name: What requests call the model.
        choices: Its answers, those to one prompt side by side.
    """

    def __init__(
        self,
        request: OpenAIRequest,
        model_name: str,
        choices: list[Choice],
    ) -> None:
        self._request = request
        self.choices = choices
        self.version = 0
        """Version of the weights that sample it."""
        kind = "chatcmpl" if request.is_chat else "cmpl"
        self._head = {
            "id": f"{kind}-{uuid.uuid4().hex[:16]}",
            "created": int(time.time()),
            "model": model_name,
        }

    def whole(self) -> dict[str, Any]:
        """Return the answer in one piece."""
        kind = "chat.completion" if self._request.is_chat else "text_completion"
        rows = []
        for index, choice in enumerate(self.choices):
            row = self._row(index, 0)
            if self._request.is_chat:
                row["message"] = {"role": "assistant", **choice.message()}
            else:
                row["text"] = choice.text
                if self._request.return_token_ids:
                    row["prompt_token_ids"] = self._prompt(index)
            rows.append(row)
        answer = {**self._head, "object": kind, "choices": rows, "usage": self._usage()}
        if self._request.is_chat and self._request.return_token_ids:
            answer["prompt_token_ids"] = self._prompt(0)
        return answer

    def opening_events(self) -> list[dict[str, Any]]:
        """Return what a stream of a chat begins with: who speaks."""
        if not self._request.is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        rows = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(len(self.choices))
        ]
        return [self._event([row]) for row in rows]

    def event(self, index: int) -> dict[str, Any] | None:
        """Return what is new of a choice; None: nothing that can be shown yet."""
        choice = self.choices[index]
        delta = choice.delta()
        if delta is None:
            return None
        row = self._row(index, choice.num_sent)
        choice.num_sent = len(choice.tokens)
        if self._request.is_chat:
            row["delta"] = delta
        else:
            row["text"] = delta["content"]
        return self._event([row])

    def usage_event(self) -> dict[str, Any] | None:
        """Return the last event, where the request asks for it."""
        if not self._request.include_usage:
            return None
        return {**self._event([]), "usage": self._usage()}

    def _event(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        chat = self._request.is_chat
        kind = "chat.completion.chunk" if chat else "text_completion"
        return {**self._head, "object": kind, "choices": rows}

    def _row(self, index: int, first: int) -> dict[str, Any]:
        choice = self.choices[index]
        row: dict[str, Any] = {
            "index": index,
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs(choice, first),
        }
        if self._request.return_token_ids:
            row["token_ids"] = choice.tokens[first:]
        if choice.finish_reason is not None:
            span = {"version": self.version, "start": 0, "end": len(choice.tokens)}
            row["weight_versions"] = [span]
        return row

    def _logprobs(self, choice: Choice, first: int) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        pieces = [choice.piece(token) for token in choice.tokens[first:]]
        values = choice.logprobs[first:]
        if self._request.is_chat:
            content = [
                {
                    "token": piece,
                    "logprob": value,
                    "bytes": list(piece.encode()),
                    "top_logprobs": [],
                }
                for piece, value in zip(pieces, values, strict=True)
            ]
            return {"content": content}
        return {"tokens": pieces, "token_logprobs": values, "top_logprobs": None}

    def _prompt(self, index: int) -> list[int]:
        return self._request.prompts[index // self._request.n]

    def _usage(self) -> dict[str, int]:
        asked = sum(map(len, self._request.prompts))
        given = sum(len(choice.tokens) for choice in self.choices)
        return {
            "prompt_tokens": asked,
            "completion_tokens": given,
            "total_tokens": asked + given,
        }
