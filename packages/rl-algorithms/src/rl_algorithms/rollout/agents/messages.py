"""Messages of the OpenAI API: conversion for chat templates, and comparison.

An answer that a client sends back is compared with the message that it received, not
with the sampled text. Fields without meaning, surrounding blanks and the formatting of
JSON make no difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from rl_models.serving.errors import ApiError
from rl_models.serving.openai_request import content_text

__all__ = ["CALL_BEGIN", "CALL_END", "Heard", "hear", "histories"]

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
"""Markers around a tool call in an answer, as in Hermes and Qwen models."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Heard:
    """A message of a request.

    Args:
        message: The message as received.

    Raises:
        ApiError: It is not a valid message.
    """

    def __init__(self, message: Any) -> None:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise _bad(
                f"messages must hold objects whose role is one of {', '.join(_ROLES)}"
            )
        # A newer name of the same role, which chat templates do not know.
        self.role = str(message["role"]).replace("developer", "system")
        text = content_text(message.get("content"))
        given = message.get("tool_calls") or []
        if not isinstance(given, list):
            raise _bad("tool_calls must be a list of objects")
        calls = [_call(call) for call in given]
        more = {
            name: str(message[name])
            for name in ("name", "tool_call_id")
            if message.get(name) is not None
        }
        self.logged: dict[str, Any] = {
            "role": self.role,
            "content": "\n".join([*([text] if text or not calls else []), *calls]),
            **more,
        }
        """Form for the chat template: tool calls are text, as the policy writes them.
        """
        # A name or call id on an assistant message does not change a recorded answer.
        shown = [] if self.role == "assistant" else sorted(more.items())
        self.key = json.dumps([self.role, text.strip(), calls, shown])
        """Key that is equal for equivalent messages."""


def hear(messages: Any) -> list[Heard]:
    """Return the messages of a request.

    Raises:
        ApiError: They are not a list of valid messages.
    """
    if not isinstance(messages, list) or not messages:
        raise _bad("messages must be a list with at least one message")
    return [Heard(message) for message in messages]


def histories(begin: str, keys: Sequence[str]) -> list[bytes]:
    """Return a digest of each prefix of a conversation, the shortest first.

    Args:
        begin: Context that all digests depend on, such as the tools.
        keys: Keys of the messages.
    """
    # Sampled text may contain lone surrogates, which plain UTF-8 refuses.
    digest = hashlib.sha256(begin.encode("utf-8", "surrogatepass")).digest()
    found = []
    for key in keys:
        both = digest + key.encode("utf-8", "surrogatepass")
        digest = hashlib.sha256(both).digest()
        found.append(digest)
    return found


def _call(call: Any) -> str:
    """Return a tool call in the form that the policy writes."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad("tool_calls must hold objects with function.name and .arguments")
    given = function.get("arguments") or "{}"
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        # The policy may have written anything; unreadable arguments are passed on as
        # text.
        arguments = given
    text = json.dumps({"name": function["name"], "arguments": arguments})
    return f"{CALL_BEGIN}\n{text}\n{CALL_END}"


def _bad(message: str) -> ApiError:
    return ApiError(400, f"{message}.", "bad_request", param="messages")
