"""Write into every answer the versions of the weights that sampled it.

vLLM's engine records the version of each token, but its server does not return it. So
the engine's outputs are watched on their way to the server, and its answers on their
way out: each choice gets `weight_versions`, the spans of its tokens by version, and the
answer a header with the oldest one (for a stream, with the present one).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

__all__ = ["VersionStamp"]

_HEADER = b"x-rl-weight-version"
_PATHS = ("/v1/chat/completions", "/v1/completions")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Spans = list[dict[str, int]]


class _Record:
    """The versions of one request's choices."""

    def __init__(self) -> None:
        self.spans: dict[int, Spans] = {}
        self._num_prompts = 0

    def follow(self, stream: Any, samples: int) -> AsyncIterator[Any]:
        """Pass on the outputs for one more prompt of the request."""
        first = self._num_prompts * samples
        self._num_prompts += 1
        return self._watch(stream, first)

    async def _watch(self, stream: Any, first: int) -> AsyncIterator[Any]:
        async with aclosing(stream):
            async for output in stream:
                for choice in output.outputs:
                    if choice.weight_versions:
                        self.spans[first + choice.index] = [
                            {
                                "version": int(span.version),
                                "start": span.start,
                                "end": span.end,
                            }
                            for span in choice.weight_versions
                        ]
                yield output

    @property
    def oldest(self) -> int | None:
        """The oldest version of any token; None: none is known."""
        versions = [span["version"] for spans in self.spans.values() for span in spans]
        return min(versions, default=None)

    def add_to(self, answer: Any) -> bool:
        """Write the versions into an answer or the last event of a choice."""
        changed = False
        for choice in answer.get("choices", ()) if isinstance(answer, dict) else ():
            spans = self.spans.get(choice.get("index", 0))
            if spans is not None and choice.get("finish_reason") is not None:
                choice["weight_versions"] = spans
                changed = True
        return changed


# A context variable, because vLLM's server lies between: it runs a request in the
# context of its ASGI call, and passes nothing of ours to the engine.
_record: ContextVar[_Record | None] = ContextVar("record", default=None)


class VersionStamp:
    """ASGI middleware around vLLM's server.

    Args:
        app: vLLM's server.
        engine: Its engine, whose `generate` is watched from now on.
    """

    def __init__(self, app: Any, engine: Any) -> None:
        self._app = app
        self._generate = engine.generate
        engine.generate = self._watched
        self.version = 0
        """Version that the engine serves at present."""

    def _watched(self, prompt: Any, sampling_params: Any, *args: Any, **kw: Any) -> Any:
        stream = self._generate(prompt, sampling_params, *args, **kw)
        record = _record.get()
        if record is None:
            return stream
        return record.follow(stream, getattr(sampling_params, "n", 1))

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] not in _PATHS:
            await self._app(scope, receive, send)
            return
        record = _Record()
        _record.set(record)
        await self._app(scope, receive, _Stamping(self, record, send))


class _Stamping:
    """Sends one answer on, with its versions."""

    def __init__(self, stamp: VersionStamp, record: _Record, send: Send) -> None:
        self._stamp, self._record, self._send = stamp, record, send
        self._start: Message = {}
        self._is_stream = False
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            headers = dict(message.get("headers", ()))
            kind = headers.get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            # A stream's headers go out before its versions are known; those of a whole
            # answer wait for its body, whose length changes.
            if self._is_stream:
                await self._begin(self._stamp.version)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._is_stream:
            body = self._stamped_event(message.get("body", b""))
            await self._send({**message, "body": body})
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_whole()

    async def _begin(self, version: int, length: int | None = None) -> None:
        headers = [
            (name, value)
            for name, value in self._start.get("headers", ())
            if length is None or name != b"content-length"
        ]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        headers.append((_HEADER, str(version).encode()))
        await self._send({**self._start, "headers": headers})

    async def _send_whole(self) -> None:
        oldest = self._record.oldest
        if oldest is not None:
            answer = json.loads(self._body)
            if self._record.add_to(answer):
                self._body = json.dumps(answer, ensure_ascii=False).encode()
        version = self._stamp.version if oldest is None else oldest
        await self._begin(version, len(self._body))
        await self._send({"type": "http.response.body", "body": self._body})

    def _stamped_event(self, event: bytes) -> bytes:
        """Return the last event of a choice with its versions, others unchanged."""
        # Looked at as bytes first: parsing every event would cost more than sending it.
        if b'"finish_reason":"' not in event or not event.startswith(b"data: {"):
            return event
        answer = json.loads(event.removeprefix(b"data: "))
        if not self._record.add_to(answer):
            return event
        return b"data: " + json.dumps(answer, ensure_ascii=False).encode() + b"\n\n"
