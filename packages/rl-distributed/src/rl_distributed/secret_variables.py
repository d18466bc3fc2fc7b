"""Environment variables whose values nobody may see: not in a log, error or `repr`."""

from __future__ import annotations

from collections.abc import Mapping

from rl_distributed.redaction import REDACTED, hide_values, is_secret_variable

__all__ = ["scrubbed", "secret_texts", "secrets_of", "shown_variables"]

# Shorter values turn up in ordinary text by chance.
_SHORTEST_VALUE = 6


def shown_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return a copy for people to read, without the values of secrets."""
    return {
        name: REDACTED if is_secret_variable(name) else value
        for name, value in variables.items()
    }


def secrets_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Only the secrets."""
    return {k: v for k, v in variables.items() if is_secret_variable(k)}


def secret_texts(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return what to hide of these variables in a text, the longest first.

    Of a value with several lines, such as a private key, also each line: a program
    prints them one by one.
    """
    texts: set[str] = set()
    for value in secrets_of(variables).values():
        texts |= {value, *value.splitlines()}
    # One may be part of another.
    return tuple(
        sorted((t for t in texts if len(t) >= _SHORTEST_VALUE), key=_by_length)
    )


def _by_length(text: str) -> tuple[int, str]:
    return -len(text), text


def scrubbed(text: str, variables: Mapping[str, str]) -> str:
    """`text` without the values that secrets have in these variables."""
    return hide_values(text, secret_texts(variables))
