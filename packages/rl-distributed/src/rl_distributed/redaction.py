"""Keeping secrets out of logs, and out of what is sent to metrics services.

A name tells a secret: `HF_TOKEN`, `api_key`, `db_password`. Only texts are replaced, so
`num_tokens=512` stays. What the environment holds under such a name is also replaced
where it turns up in a message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "REDACTED",
    "hide_values",
    "is_secret_name",
    "redacted",
    "secret_values",
]

REDACTED = "***"
"""Stands where a secret was."""

# What the name of a key or variable ends with if it holds a secret. `num_tokens` and
# `token_path` hold none.
_SECRET_ENDING = re.compile(
    r"(^|_)(token|secret|password|passwd|passphrase|credentials?|authorization|cookie|"
    r"(api|access|private|secret|auth|signing|account)_?key)(_?\d+)?$"
)
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_PATTERNS = (
    # scheme://user:password@host
    (
        re.compile(r"(?i)\b([a-z][a-z0-9+.-]{0,30}://[^/\s:@]{0,200}:)[^/\s@]{1,999}@"),
        rf"\1{REDACTED}@",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {REDACTED}"),
    # SOME_TOKEN=value and "api_key": "value"
    (
        re.compile(
            r"(?i)((?<![a-z])(?:token|secret|password|passwd|api_?key|access_?key|"
            r"private_?key)[\"']?\s*[=:]\s*[\"']?)"
            # A number is a measure, as in seconds_per_token=0.5.
            r"(?!-?[\d.]+(?:e[+-]?\d+)?(?:[\s\"',;&\])}]|$))[^\s\"',;&]+"
        ),
        rf"\1{REDACTED}",
    ),
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END[^\n]*|$)", re.S),
        REDACTED,
    ),
)
_MAX_DEPTH = 16
# A shorter value turns up in texts by chance.
_SHORTEST_VALUE = 8


def is_secret_name(name: str) -> bool:
    """Whether a key or variable of this name is expected to hold a secret."""
    words = _WORD_START.sub("_", name).lower()
    return _SECRET_ENDING.search(re.sub(r"[^a-z0-9]+", "_", words)) is not None


def redacted(value: Any, depth: int = 0) -> Any:
    """A copy of plain data with secrets hidden, by the names of keys and by form.

    Of a text the passwords of URLs, bearer tokens, `..._TOKEN=` and private keys are
    hidden. Mappings, lists and tuples are gone through; other values come back as they
    are, and what is nested more than sixteen deep is hidden.
    """
    if isinstance(value, str):
        for pattern, replacement in _PATTERNS:
            value = pattern.sub(replacement, value)
        return value
    if depth >= _MAX_DEPTH:
        return REDACTED
    if isinstance(value, Mapping):
        return {
            key: REDACTED
            if isinstance(key, str)
            and isinstance(item, str)
            and item
            and is_secret_name(key)
            else redacted(item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(item, depth + 1) for item in value]
    return value


def secret_values(variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """What variables with the name of a secret hold; None: those of this process."""
    variables = os.environ if variables is None else variables
    found = {
        value
        for name, value in variables.items()
        if len(value) >= _SHORTEST_VALUE and is_secret_name(name)
    }
    # A secret that contains another is hidden as a whole.
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


def hide_values(text: str, values: Iterable[str] | None = None) -> str:
    """`text` without these values; None: without the secrets of the environment."""
    for value in secret_values() if values is None else values:
        text = text.replace(value, REDACTED)
    return text
