"""Parsing tool calls from a model's response."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["JsonToolCallParser", "ToolCall", "ToolCallParser"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call, possibly malformed."""

    name: str
    """Name of the tool; empty if it cannot be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Syntax error, as shown to the model; None: well-formed."""


class ToolCallParser(Protocol):
    """Parses the calls in a response, in order; none means that it is an answer."""

    def __call__(self, response: str) -> list[ToolCall]:
        """Return the calls; a malformed one has `error` set."""
        ...


@dataclass(frozen=True, slots=True)
class JsonToolCallParser:
    """Reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    This is the format of Hermes and Qwen models. A final call without a closing tag
    also counts, because generation may stop there. Calls within a model's thoughts, up
    to `</think>`, are ignored.
    """

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"
    end_of_thought: str | None = "</think>"

    def __call__(self, response: str) -> list[ToolCall]:
        """See `ToolCallParser`."""
        if self.end_of_thought is not None:
            # The last one: a thought may itself quote the marker.
            response = response.rpartition(self.end_of_thought)[2]
        pattern = f"{re.escape(self.opening)}(.*?)(?:{re.escape(self.closing)}|\\Z)"
        return [_read(text) for text in re.findall(pattern, response, re.DOTALL)]


def _read(text: str) -> ToolCall:
    try:
        call = json.loads(text)
        if not isinstance(call, dict):
            return ToolCall("", error="a call must be a JSON object")
        # Llama models say "parameters"; some models encode the arguments as JSON text.
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        return ToolCall("", error=f"the call is not valid JSON: {error}")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall("", error='the call lacks "name"')
    if not isinstance(arguments, dict):
        return ToolCall(name, error='"arguments" must be a JSON object')
    return ToolCall(name, arguments)
