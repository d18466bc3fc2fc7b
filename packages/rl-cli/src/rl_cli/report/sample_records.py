"""Validated answers of a run: only known fields with the right types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

__all__ = ["checked_record"]

_LONGEST_TEXT = 200_000
_TEXTS = (
    "prompt",
    "response",
    "dataset",
    "outcome",
    "ending",
    "answer",
    "second_check",
)
_NUMBERS = ("reward", "group", "length", "advantage")
_BY_TOKEN = ("logprobs", "trainer_logprobs", "advantages")


def checked_record(record: Any) -> dict[str, Any] | None:
    """Return the fields of a line that are shown on a page.

    Args:
        record: The parsed line; malformed fields are ignored.

    Returns:
        `step` and, if present, the texts `prompt`, `response`, `expected`, `dataset`,
        `outcome`, `ending`, `answer` and `second_check`, the numbers `reward`, `group`,
        `length` and `advantage`, `rewards` by name, `messages` as [role, text] and
        `tokens` with `logprobs`, `trainer_logprobs`, `advantages` and `versions`. None
        if there is no step.
    """
    if not isinstance(record, Mapping):
        return None
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    found: dict[str, Any] = {"step": step}
    for name in _TEXTS:
        if isinstance(text := record.get(name), str):
            found[name] = text[:_LONGEST_TEXT]
    for name in _NUMBERS:
        if _is_number(number := record.get(name)):
            found[name] = number
    if (expected := record.get("expected")) is not None:
        found["expected"] = str(expected)[:_LONGEST_TEXT]
    rewards = record.get("rewards")
    if isinstance(rewards, Mapping):
        parts = {str(name): v for name, v in rewards.items() if _is_number(v)}
        found |= {"rewards": parts} if parts else {}
    return found | _conversation(record) | _tokens(record)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and isfinite(value)


def _conversation(record: Mapping[str, Any]) -> dict[str, Any]:
    messages = record.get("messages")
    if not isinstance(messages, list):
        return {}
    return {"messages": [_message(m) for m in messages if isinstance(m, Mapping)]}


def _message(message: Mapping[str, Any]) -> list[str]:
    who = str(message.get("role", ""))
    if (name := message.get("name")) is not None:
        who = f"{who} {name}"
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content)
    if calls := message.get("tool_calls"):
        text = f"{text if content else ''}\n{json.dumps(calls, ensure_ascii=False)}"
    return [who, text.strip("\n")[:_LONGEST_TEXT]]


def _tokens(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampled tokens with their columns that have matching lengths."""
    tokens = record.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        return {}
    known: dict[str, Any] = {}
    for name in _BY_TOKEN:
        values = record.get(name)
        if isinstance(values, list) and len(values) == len(tokens):
            # Check for plain floats first, as a run has millions of them.
            known[name] = [
                v if (type(v) is float and isfinite(v)) or _is_number(v) else None
                for v in values
            ]
    if (versions := _versions(record.get("versions"), len(tokens))) is not None:
        known["versions"] = versions
    # Without a column there is nothing to show by token, and the text is there already.
    return {"tokens": list(map(str, tokens)), **known} if known else {}


def _versions(runs: Any, num_tokens: int) -> list[list[int]] | None:
    """Return runs of [version, number of tokens] if they cover all tokens."""
    if not isinstance(runs, list):
        return None
    for run in runs:
        is_pair = isinstance(run, list) and len(run) == 2
        if not is_pair or not all(type(value) is int for value in run):
            return None
    return runs if sum(count for _, count in runs) == num_tokens else None
