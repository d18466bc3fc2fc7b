"""Environment variables whose values nobody may see: not in a log, error or `repr`.

Wider than `redaction.is_secret_name`, which judges any key of any data: a variable that
is taken for a secret without being one only travels another way.
"""

from __future__ import annotations

from collections.abc import Mapping

from rl_distributed.redaction import REDACTED, hide_values

__all__ = ["is_secret_variable", "scrubbed", "secrets_of", "shown_variables"]

_PARTS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
# Shorter values turn up in ordinary text by chance.
_SHORTEST_VALUE = 6


def is_secret_variable(name: str) -> bool:
    """Whether a variable is taken for a secret.

    True where its name holds TOKEN, KEY, SECRET, PASSWORD, PASSWD or CREDENTIAL, in
    upper or lower case.
    """
    upper = name.upper()
    return any(part in upper for part in _PARTS)


def shown_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """A copy for people to read, without the values of secrets."""
    return {
        name: REDACTED if is_secret_variable(name) else value
        for name, value in variables.items()
    }


def secrets_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Only the secrets."""
    return {k: v for k, v in variables.items() if is_secret_variable(k)}


def scrubbed(text: str, variables: Mapping[str, str]) -> str:
    """`text` without the values that secrets have in these variables."""
    values = [v for v in secrets_of(variables).values() if len(v) >= _SHORTEST_VALUE]
    # The longest first: one may be part of another.
    return hide_values(text, sorted(values, key=len, reverse=True))
