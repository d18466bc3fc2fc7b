"""Answers of the policy as an agent receives them: text and tool calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_algorithms.rollout.agents.messages import CALL_BEGIN
from rl_envs.tools.calls import JsonToolCallParser
from rl_models.serving.errors import ApiError
from rl_models.serving.openai_answer import Choice

__all__ = ["AgentChoice", "ToolUse"]

_parse = JsonToolCallParser()


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and whether one must be called."""

    tools: Sequence[dict[str, Any]] = ()
    """The tools in the form of the chat template."""
    forced: str = ""
    """Forced beginning of the answer, which the policy completes."""

    @property
    def key(self) -> str:
        """Key that is equal for tools with the same rendering."""
        return json.dumps(self.tools, sort_keys=True) if self.tools else ""

    @classmethod
    def read(cls, fields: dict[str, Any]) -> ToolUse:
        """Read `tools` and `tool_choice`.

        Raises:
            ApiError: They are malformed, or name an unknown tool.
        """
        tools = fields.get("tools") or []
        choice = fields.get("tool_choice")
        names = [_name(tool) for tool in _listed(tools)]
        if choice == "none" or (choice in (None, "auto") and not tools):
            return cls()
        if choice in (None, "auto"):
            return cls(tools)
        if choice == "required" and tools:
            return cls(tools, f"{CALL_BEGIN}\n")
        wanted = _name(choice) if isinstance(choice, dict) else None
        if wanted is None or wanted not in names:
            raise _bad(
                "tool_choice must be none, auto, required or one of the tools "
                f"({', '.join(names) or 'there are none'}): got {choice!r:.80}",
                "tool_choice",
            )
        begun = f'{{"name": {json.dumps(wanted)}, "arguments": '
        return cls(tools, f"{CALL_BEGIN}\n{begun}")


def _listed(tools: Any) -> list[Any]:
    if not isinstance(tools, list):
        raise _bad("tools must be a list", "tools")
    return tools


def _name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or tool.get("type", "function") != "function":
        raise _bad("a tool must be of type function, and have function.name", "tools")
    return name


def _bad(message: str, param: str) -> ApiError:
    return ApiError(400, f"{message}.", "bad_request", param=param)


class AgentChoice(Choice):
    """One answer, whose tokens arrive all at once.

    Args:
        tokenizer: The policy's tokenizer.
        stop: Stop strings, which are not part of the answer.
        use: The tools that may be called.
    """

    def __init__(self, tokenizer: Any, stop: list[str], use: ToolUse) -> None:
        super().__init__(tokenizer, stop)
        self._use = use
        self._message: dict[str, Any] = {}
        self.raw = ""
        """The whole text, including its forced beginning."""

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[float], *, cut: bool
    ) -> None:
        """Set the sampled answer.

        Args:
            tokens: All tokens of the answer.
            logprobs: Their log-probs; empty if the generator returns none.
            cut: Whether the answer was cut off by a length limit.
        """
        self.tokens = list(tokens)
        # Clients that ask for log-probs need one per token.
        self.logprobs = list(logprobs) or [0.0] * len(self.tokens)
        sampled = str(self._tokenizer.decode(self.tokens, skip_special_tokens=True))
        self.raw = self._use.forced + sampled
        self._message = self._read(self._use.forced + self.text)
        calls = "tool_calls" in self._message
        self.finish_reason = "length" if cut else "tool_calls" if calls else "stop"

    def _read(self, text: str) -> dict[str, Any]:
        calls = _parse(text) if self._use.tools else []
        if not calls or any(call.error for call in calls):
            # A malformed call stays text, so that the agent can react to it.
            return {"content": text}
        before = text.partition(CALL_BEGIN)[0].strip()
        return {
            "content": before or None,
            "tool_calls": [
                {
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(dict(call.arguments)),
                    },
                }
                for call in calls
            ],
        }

    def message(self) -> dict[str, Any]:
        """See `Choice`."""
        return self._message

    def delta(self) -> dict[str, Any] | None:
        """Return the whole message, which arrived at once."""
        calls = self._message.get("tool_calls")
        if not calls:
            return self._message
        # Streamed calls are numbered, because clients assemble them by index.
        numbered = [{"index": place, **call} for place, call in enumerate(calls)]
        return {**self._message, "tool_calls": numbered}
