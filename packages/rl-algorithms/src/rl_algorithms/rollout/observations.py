"""From what an environment says to the tokens that continue a conversation.

With a chat template, a message is not only its text: the end of the policy's own turn,
the header of the message and the header of the next answer belong to it. They are found
by rendering a conversation with a marker in place of the policy's answer and taking
what follows the marker. So the sampled tokens stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_algorithms.data.types import Tokenizer
from rl_algorithms.errors import RolloutError

__all__ = ["ObservationEncoder"]

_MARKER = "\u2402answer\u2403"


class ObservationEncoder:
    """Tokenises environment messages so that a conversation goes on in format.

    Args:
        tokenizer: The policy's tokenizer.
        use_chat_template: Whether prompts were formatted by the chat template; default:
            if the tokenizer has one.
    """

    def __init__(
        self, tokenizer: Tokenizer, use_chat_template: bool | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._use_template = (
            bool(tokenizer.chat_template)
            if use_chat_template is None
            else use_chat_template
        )
        self._eos_text = (
            tokenizer.decode([tokenizer.eos_token_id])
            if tokenizer.eos_token_id is not None
            else ""
        )

    def encode(
        self, observations: Sequence[Mapping[str, Any]], last_tokens: Sequence[int]
    ) -> list[list[int]]:
        """Return the tokens to append to each row.

        Args:
            observations: One message (`role`, `content`) per row.
            last_tokens: The last sampled token of each row: where it is the end of
                sequence, the template's own is left out.
        """
        texts = [
            self._text(message, last == self._tokenizer.eos_token_id)
            for message, last in zip(observations, last_tokens, strict=True)
        ]
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [list(row) for row in encoded]

    def _text(self, message: Mapping[str, Any], ended: bool) -> str:
        content = str(message["content"])
        if not self._use_template:
            return content
        rendered = self._tokenizer.apply_chat_template(
            [
                {"role": "user", "content": "."},
                {"role": "assistant", "content": _MARKER},
                {"role": message["role"], "content": content},
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        _, found, text = rendered.partition(_MARKER)
        if not found:
            raise RolloutError(
                "the tokenizer's chat template leaves out earlier answers, so a "
                "conversation cannot go on in its format: use another template, or "
                "rollout.max_turns=1"
            )
        return str(text.removeprefix(self._eos_text) if ended else text)
