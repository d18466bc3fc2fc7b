"""Conversion of messages to text and tokens by a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from rl_distributed.errors import ConfigError

__all__ = [
    "DEFAULT_CHAT_TEMPLATE",
    "encode_messages",
    "encode_prompt",
    "has_chat_template",
    "render_chat",
]

Message = Mapping[str, Any]

DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""A plain template for models that have none."""


def has_chat_template(tokenizer: Any) -> bool:
    """Return whether the tokenizer has a chat template."""
    return getattr(tokenizer, "chat_template", None) is not None


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    template: str | None = None,
    **variables: Any,
) -> str:
    """Return the text of a conversation.

    Args:
        tokenizer: Its chat template is used.
        messages: Each with `role` and `content`.
        add_generation_prompt: End with the prompt for the model's answer.
        template: Used in place of the tokenizer's own.
        variables: Further variables of the template.

    Raises:
        ConfigError: There is no template, a message lacks a key, or the template
            refuses the conversation.
    """
    if template is None and not has_chat_template(tokenizer):
        raise ConfigError(
            "The tokenizer has no chat template, so messages cannot be turned into "
            "text. Set policy.tokenizer.chat_template to one (for a plain one: "
            "rl_models.tokens.chat.DEFAULT_CHAT_TEMPLATE), or use plain text prompts."
        )
    for index, message in enumerate(messages):
        missing = [key for key in ("role", "content") if key not in message]
        if missing:
            raise ConfigError(
                f"Message {index} of a conversation lacks {' and '.join(missing)}: "
                f"got the keys {sorted(message)}."
            )
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            # None takes the tokenizer's own.
            chat_template=template,
            **variables,
        )
    except TemplateError as error:
        roles = [str(message["role"]) for message in messages]
        raise ConfigError(
            f"The chat template refuses a conversation with the roles {roles}: {error}"
        ) from error
    return text


def encode_messages(
    tokenizer: Any, messages: Sequence[Message], **settings: Any
) -> list[int]:
    """Return the token ids of a conversation; `settings` as for `render_chat`.

    The template writes the special tokens itself, so none are added here.
    """
    text = render_chat(tokenizer, messages, **settings)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def encode_prompt(
    tokenizer: Any, prompt: str | Sequence[Message], *, chat: bool | None = None
) -> list[int]:
    """Return the token ids of a prompt.

    Args:
        tokenizer: Its chat template is used for messages, and for a text if it has
            one: the text is then the message of a user.
        prompt: A text, or messages.
        chat: Whether to use the template for a text; None: if there is one.

    Raises:
        ConfigError: See `render_chat`.
    """
    if isinstance(prompt, str):
        if not (has_chat_template(tokenizer) if chat is None else chat):
            return list(tokenizer(prompt, verbose=False)["input_ids"])
        prompt = [{"role": "user", "content": prompt}]
    text = render_chat(tokenizer, prompt)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
