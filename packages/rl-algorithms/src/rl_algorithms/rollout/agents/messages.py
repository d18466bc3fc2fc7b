"""Messages of OpenAI's interface: what they are to a template, and which are the same.

What a client sends back of an answer is compared with what it was given, not with what
was sampled: fields that mean nothing, blanks around a text and the spelling of JSON do
not make another message of it.
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
"""What stands around a tool call in an answer: the form of Hermes and Qwen models."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Heard:
    """A message of a request.

    Args:
        message: As it came.

    Raises:
        ApiError: It is no message.
    """

    def __init__(self, message: Any) -> None:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise _bad(
                f"messages must hold objects whose role is one of {', '.join(_ROLES)}"
            )
        self.role = str(message["role"]).replace("developer", "system")
        text = content_text(message.get("content"))
        calls = [_call(call) for call in message.get("tool_calls") or ()]
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
        """As a chat template is given it: calls of tools are text, as they are in what
        the policy writes."""
        # Whose call a result is of makes no difference to an answer that was recorded.
        shown = [] if self.role == "assistant" else sorted(more.items())
        self.key = json.dumps([self.role, text.strip(), calls, shown])
        """Equal for messages that are the same."""


def hear(messages: Any) -> list[Heard]:
    """Return the messages of a request.

    Raises:
        ApiError: They are none.
    """
    if not isinstance(messages, list) or not messages:
        raise _bad("messages must be a list with at least one message")
    return [Heard(message) for message in messages]


def histories(begin: str, keys: Sequence[str]) -> list[bytes]:
    """Return a digest of each beginning of a conversation, the shortest first.

    Args:
        begin: What all of it depends on, such as the tools.
        keys: Of its messages.
    """
    digest = hashlib.sha256(begin.encode("utf-8", "surrogatepass")).digest()
    found = []
    for key in keys:
        both = digest + key.encode("utf-8", "surrogatepass")
        digest = hashlib.sha256(both).digest()
        found.append(digest)
    return found


def _call(call: Any) -> str:
    """Return a tool call as a policy writes it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad("tool_calls must hold objects with function.name and .arguments")
    given = function.get("arguments") or "{}"
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        arguments = given
    text = json.dumps({"name": function["name"], "arguments": arguments})
    return f"{CALL_BEGIN}\n{text}\n{CALL_END}"


def _bad(message: str) -> ApiError:
    return ApiError(400, f"{message}.", "bad_request", param="messages")
