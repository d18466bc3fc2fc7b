"""Keeping secrets out of logs, and out of what is sent to metrics services.

A name tells a secret, by its words: `HF_TOKEN`, `api_key`, `db_password`. Only texts
are replaced, so `num_tokens=512` stays. What the environment holds under such a name is
also replaced where it turns up in a message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__all__ = [
    "REDACTED",
    "hide_values",
    "is_secret_name",
    "is_secret_variable",
    "named_secrets",
    "redacted",
    "secret_values",
]

REDACTED = "***"
"""Stands where a secret was."""

# Names are judged by their words: `monkey` and `keyboard` hold none of these.
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET = r"\w*(token|secret|password|passwd|passphrase)|pwd|credentials?"
_LAST_WORD = re.compile(rf"{_SECRET}|authorization|cookie|\w*(api|access|auth)key")
_ANY_WORD = re.compile(
    rf"{_SECRET}|secrets|passwords|key|\w*(api|access|auth|secret|private|ssh)keys?"
)
# Which keys unlock something, unlike a `sort_key`.
_KEYS = frozenset(
    ("api", "access", "private", "secret", "auth", "signing", "account", "encryption")
)
# Marks in a text, unlike an `auth_token`.
_MARKS = frozenset(("bos", "eos", "pad", "unk", "mask", "sep", "cls", "stop"))
# What a file is called, or where it lies, is no secret.
_PLACES = frozenset(("path", "file", "dir", "folder"))
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
_SHORTEST_NAMED = 4


def is_secret_name(name: str) -> bool:
    """Whether a key or variable of this name is expected to hold a secret.

    The last word decides: `HF_TOKEN`, `api_key`, `clientSecret` do, and `num_tokens`,
    `token_path`, `sort_key`, `eos_token` do not.
    """
    *before, last = _words(name)
    kind = before[-1] if before else ""
    if last == "key":
        return kind in _KEYS
    if (last == "token" and kind in _MARKS) or (last == "pwd" and not kind):
        return False
    return _LAST_WORD.fullmatch(last) is not None


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable, or a field of a log line, may hold a secret.

    Wider than `is_secret_name`, because one that is taken for a secret without being
    one only travels another way: true where any word of the name is or ends with TOKEN,
    SECRET, PASSWORD, PASSWD or PASSPHRASE, or is KEY, PWD or CREDENTIAL. Names of paths
    (`TOKEN_PATH`, `KEY_FILE`) are none, and `PWD` alone is the current folder.
    """
    words = _words(name)
    if words[-1] in _PLACES or words == ["pwd"]:
        return False
    return any(_ANY_WORD.fullmatch(word) for word in words)


def _words(name: str) -> list[str]:
    """Return the words of a name, in lower case, without a number at its end.

    At least one.
    """
    text = _WORD_START.sub("_", name).lower()
    return re.findall(r"[a-z0-9]+", re.sub(r"[^a-z]+$", "", text)) or [""]


def redacted(value: Any, depth: int = 0) -> Any:
    """Get a copy of plain data with secrets hidden, by the names of keys and by form.

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


def named_secrets(value: Any) -> tuple[str, ...]:
    """Return the texts that stand under the name of a secret in plain data.

    For `hide_values`, where a message about the data may quote them. Texts of fewer
    than four characters, which turn up by chance, are left out.
    """
    texts = _texts_of_secrets(value, 0)
    return _longest_first({text for text in texts if len(text) >= _SHORTEST_NAMED})


def _texts_of_secrets(value: Any, depth: int) -> Iterator[str]:
    if depth >= _MAX_DEPTH:
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            is_named = isinstance(key, str) and is_secret_name(key)
            if is_named and isinstance(item, str):
                yield item
            else:
                yield from _texts_of_secrets(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts_of_secrets(item, depth + 1)


def secret_values(variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return what variables with the name of a secret hold.

    None: those of this process.
    """
    variables = os.environ if variables is None else variables
    found = {
        value
        for name, value in variables.items()
        if len(value) >= _SHORTEST_VALUE and is_secret_name(name)
    }
    return _longest_first(found)


def _longest_first(values: Iterable[str]) -> tuple[str, ...]:
    # A secret that contains another is hidden as a whole.
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


def hide_values(text: str, values: Iterable[str] | None = None) -> str:
    """`text` without these values; None: without the secrets of the environment."""
    for value in secret_values() if values is None else values:
        text = text.replace(value, REDACTED)
    return text
