"""Only callers with the key reach a replica."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rl_models.serving.replica_access import Gate


def _enter(scope: dict[str, Any]) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "inside"})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Gate(app, "key")(scope, None, send))
    return sent


@pytest.mark.parametrize(
    ("kind", "path", "header", "found"),
    [
        ("http", "/v1/completions", b"Bearer key", "inside"),
        ("http", "/health", b"", "inside"),
        ("lifespan", "", b"", "inside"),
        ("http", "/v1/completions", b"", "http.response.start"),
        ("http", "/invocations", b"Bearer kex", "http.response.start"),
        ("http", "/health/../invocations", b"Bearer", "http.response.start"),
        ("websocket", "/v1/realtime", b"Bearer key", "websocket.close"),
    ],
)
def test_every_path_but_health_wants_the_key(
    kind: str, path: str, header: bytes, found: str
) -> None:
    headers = [(b"authorization", header)] if header else []
    sent = _enter({"type": kind, "path": path, "headers": headers})
    assert sent[0]["type"] == found
    if found == "http.response.start":
        assert sent[0]["status"] == 401
