"""The token that this process presents to a Ray cluster, and errors about it.

Ray looks for one in `RAY_AUTH_TOKEN`, then in the file that `RAY_AUTH_TOKEN_PATH`
names, then in the home folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray import _raylet

from rl_distributed.errors import SecurityError

__all__ = [
    "Token",
    "check_token_file",
    "find_token",
    "has_token",
    "missing_token",
    "refused_token",
]

_MODE = "RAY_AUTH_MODE"
_TOKEN, _TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_HOW_TO_GET = (
    f"put the cluster's own token into {_TOKEN}, or the name of a file that holds it "
    f"into {_TOKEN_PATH} (`ray get-auth-token` on the head prints it)"
)


@dataclass(frozen=True, slots=True)
class Token:
    """The token of this process, and its source."""

    value: str = field(repr=False)
    place: str
    """Where it was found."""


def find_token() -> Token | None:
    """Return the token that Ray presents for this process; None: it presents none."""
    if os.environ.get(_MODE, "").lower() != "token" or not has_token():
        return None
    value = str(_token_loader().get_raw_token(ignore_auth_mode=True))
    if os.environ.get(_TOKEN):
        return Token(value, _TOKEN)
    if path := os.environ.get(_TOKEN_PATH):
        return Token(value, f"the file {path} ({_TOKEN_PATH})")
    return Token(value, f"the file {_home_token()}")


def missing_token(address: str) -> SecurityError:
    """Return the error of a process without a token that the cluster asks for.

    Args:
        address: Of the cluster.
    """
    if os.environ.get(_MODE, "").lower() == "disabled":
        return SecurityError(
            f"the Ray cluster at '{address}' asks for a token, and this process "
            f"presents none, because {_MODE}=disabled is set; remove the variable, and "
            f"{_HOW_TO_GET}"
        )
    return SecurityError(
        f"the Ray cluster at '{address}' asks for a token, and this process has none: "
        f"{_TOKEN} and {_TOKEN_PATH} are not set, and there is no file {_home_token()};"
        f" {_HOW_TO_GET}"
    )


def refused_token(address: str, token: Token) -> SecurityError:
    """Return the error of a process whose token is not that of the cluster.

    Args:
        address: Of the cluster.
        token: The token that was presented.
    """
    return SecurityError(
        f"the Ray cluster at '{address}' refuses the token of this process, which was "
        f"found in {token.place}: the cluster has another one; {_HOW_TO_GET}"
    )


def _home_token() -> Path:
    return Path.home() / ".ray" / "auth_token"


def check_token_file() -> None:
    """Check the token file that Ray will read: without one, Ray ends the process.

    Raises:
        SecurityError: `RAY_AUTH_TOKEN_PATH` names a file without a token.
    """
    path = os.environ.get(_TOKEN_PATH, "")
    # The variable takes precedence, so Ray then never reads the file.
    if not path or os.environ.get(_TOKEN):
        return
    try:
        is_empty = not Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise SecurityError(
            f"RAY_AUTH_TOKEN_PATH names {path}, which cannot be read: {error}"
        ) from error
    if is_empty:
        raise SecurityError(f"RAY_AUTH_TOKEN_PATH names {path}, which holds no token")


def has_token() -> bool:
    """Whether Ray finds a token in this process's environment or home folder."""
    loader = _token_loader()
    return loader is not None and bool(loader.has_token(ignore_auth_mode=True))


def _token_loader() -> Any:
    # Older versions of Ray have no tokens.
    loader: Any = getattr(_raylet, "AuthenticationTokenLoader", None)
    return None if loader is None else loader.instance()
