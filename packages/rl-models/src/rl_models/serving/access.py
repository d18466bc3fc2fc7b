"""Who may send requests: an API key, and on loopback only programs of this machine."""

from __future__ import annotations

import hashlib
import hmac

from aiohttp import web

from rl_models.serving.config import is_loopback
from rl_models.serving.errors import ApiError

__all__ = ["Access"]


class Access:
    """Lets requests in, or not.

    Without a key the server listens on loopback, where any page in a browser could
    reach it under a name of its own (DNS rebinding); so the name that was asked for
    must be one of this machine. A page cannot send JSON elsewhere without asking first,
    which the router does not answer.

    Args:
        key: The API key; None: none is needed.
    """

    def __init__(self, key: str | None) -> None:
        self._digest = None if key is None else _digest(key)

    def check(self, request: web.Request) -> None:
        """Let a request in.

        Raises:
            ApiError: It lacks the key, or was sent to another name.
        """
        if self._digest is None:
            self._check_name(request)
            return
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = _digest(token if scheme.lower() == "bearer" else "")
        # Digests have one length, and their comparison takes one time.
        if not hmac.compare_digest(given, self._digest):
            said = "is wrong" if token else "is missing"
            raise ApiError(
                401,
                f"The API key {said}; send it as 'Authorization: Bearer KEY'. It is "
                "what the server was started with (--api-key or RL_API_KEY).",
                "invalid_api_key",
            )

    @staticmethod
    def _check_name(request: web.Request) -> None:
        name = request.url.host or ""
        if not is_loopback(name):
            raise ApiError(
                403,
                f"The server listens on loopback without an API key, and was asked for "
                f"as {name!r}; call it 127.0.0.1 or localhost, or start it with "
                "--api-key.",
                "forbidden_host",
            )


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
