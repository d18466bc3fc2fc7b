"""Admit only the router to a replica.

vLLM's own check of a key leaves open some paths that generate (`/invocations`); any
program on the machine could use them to bypass the router's key and limits.
"""

from __future__ import annotations

import hmac
from typing import Any

__all__ = ["Gate"]

_OPEN = "/health"


class Gate:
    """ASGI middleware that requires a key for every path but `/health`.

    Args:
        app: The guarded application.
        key: The key, sent as `Authorization: Bearer KEY`.
    """

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        self._wanted = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Let a request through, or answer it with 401."""
        if scope["type"] == "lifespan" or scope["path"] == _OPEN:
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if scope["type"] == "http" and hmac.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"Unauthorized"})
        else:
            await send({"type": "websocket.close", "code": 1008})
