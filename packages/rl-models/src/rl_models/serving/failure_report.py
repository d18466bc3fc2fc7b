"""Add the reason of an engine's failure to the answer of vLLM's server.

vLLM answers "Internal server error" and logs the reason in the engine's process, where
nobody looks. Here the reason is put beside the error, under the key `CAUSE`; the router
logs it, and passes the error on without it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rl_models.serving.engine_failure import CAUSE, is_failure
from rl_models.serving.errors import ApiError, error_body

__all__ = ["FailureReport"]

_EVENT = b'data: {"error"'
# Logged by vLLM's scheduler if the grammar forbids every token of the vocabulary.
_DEAD_END = "grammar rejected tokens"

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Explain = Callable[[float, str], Awaitable[list[str]]]


class FailureReport:
    """ASGI middleware around vLLM's server.

    Args:
        app: The server.
        explain: Returns the lines that the engine has logged since a time about a
            request.
    """

    def __init__(self, app: Any, explain: Explain) -> None:
        self._app = app
        self._explain = explain

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        watch = _Watch(self._explain, request_id, send)
        await self._app(scope, receive, watch)


class _Watch:
    """Sends one answer on; a failure is held back until it is explained."""

    def __init__(self, explain: Explain, request_id: str, send: Send) -> None:
        self._explain, self._request_id, self._send = explain, request_id, send
        self._began_s = time.time()
        self._failed: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and is_failure(message["status"]):
            self._failed = message
        elif message["type"] == "http.response.body" and self._failed is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_failure(self._failed)
        elif message.get("body", b"").startswith(_EVENT):
            await self._send({**message, "body": await self._event(message["body"])})
        else:
            await self._send(message)

    async def _send_failure(self, start: Message) -> None:
        status, answer = await self._explained(start["status"], self._body)
        body = json.dumps(answer).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._send({**start, "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _event(self, event: bytes) -> bytes:
        text = event.removeprefix(b"data: ")
        status = _code_of(_parsed(text))
        if not is_failure(status):
            return event
        _, answer = await self._explained(status, text)
        return b"data: " + json.dumps(answer).encode() + b"\n\n"

    async def _explained(self, status: int, body: bytes) -> tuple[int, dict[str, Any]]:
        lines = await self._explain(self._began_s, self._request_id)
        # No fault of the engine, although it fails: the request asks for text that the
        # vocabulary cannot write.
        if any(_DEAD_END in line for line in lines):
            return 400, error_body(_no_token())
        answer = _parsed(body)
        error = answer.get("error")
        said = error.get("message") if isinstance(error, dict) else None
        words = said or body.decode("utf-8", "replace").strip()
        return status, {**answer, CAUSE: [*filter(None, [str(words)]), *lines]}


def _no_token() -> ApiError:
    return ApiError(
        400,
        "The answer cannot be written in the form that response_format (or "
        "structured_outputs, or a tool) asks for: the vocabulary of this model has no "
        "token for the characters that must come next. JSON needs at least "
        '{ } " : , and the letters of all keys. Ask for a form in other characters, '
        "or serve a model whose tokenizer can write any text (kind byte_bpe).",
        "form_not_in_vocabulary",
    )


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _code_of(answer: dict[str, Any]) -> int:
    error = answer.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 0
