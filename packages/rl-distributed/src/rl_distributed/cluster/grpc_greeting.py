"""A first request to a gRPC server, spoken by hand.

A client's own library retries in silence, and ends the process, where the other side
is not what it expects. One exchange of HTTP/2 frames (RFC 9113) shows what is there,
and whether it answers a caller with a certain token, or with none.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["Greeting", "greet"]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_STREAM = 1
_HEAD_BYTES = 9
# A server of another kind might send without end.
_MOST_BYTES = 1 << 20
_PREFIX = 127
# A gRPC server's refusal of a caller, without compression.
_UNAUTHENTICATED = (b"grpc-status\x0216", b"InvalidAuthToken")


@dataclass(frozen=True, slots=True)
class Greeting:
    """The kind of a server, by its answer."""

    is_grpc: bool
    """Whether it speaks HTTP/2 first, as gRPC servers do."""
    demands_token: bool | None = None
    """Whether it refuses a request without a token, or with the one that was presented;
    None: it does not say."""


def greet(link: socket.socket, method: str, token: str = "") -> Greeting:
    """Call a method without arguments.

    Args:
        link: A new connection, plain or TLS, with a time limit.
        method: Path of the method, `/package.Service/Method`.
        token: The token to present; empty: none.

    Returns:
        The kind of the server, and whether it wants a token.

    Raises:
        TimeoutError: It says nothing at all.
        OSError: It breaks off before it has said anything.
    """
    link.sendall(_request(method, token))
    reader = _Frames(link)
    first = reader.next()
    if first is None or first.kind != _SETTINGS:
        return Greeting(is_grpc=False)
    # It is a gRPC server by now; one that stops here is left to the real client.
    with suppress(OSError):
        return Greeting(True, _demands_token(reader))
    return Greeting(is_grpc=True)


@dataclass(frozen=True, slots=True)
class _Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


class _Frames:
    """The frames that come over a connection."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._left = _MOST_BYTES

    def next(self) -> _Frame | None:
        """Return the next frame; None at the end, or where there is none."""
        head = self._read(_HEAD_BYTES)
        if len(head) < _HEAD_BYTES:
            return None
        size = int.from_bytes(head[:3], "big")
        if size > self._left:
            return None
        payload = self._read(size)
        return _Frame(head[3], head[4], int.from_bytes(head[5:], "big"), payload)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._link.recv(size - len(data))
            if not part:
                break
            data += part
        self._left -= len(data)
        return data


def _demands_token(reader: _Frames) -> bool | None:
    headers = b""
    while (frame := reader.next()) is not None:
        # Settings and window updates belong to the connection, not to the request.
        if frame.stream != _STREAM:
            continue
        # Data means an answer, so the request was accepted.
        if frame.kind == _DATA:
            return False
        headers += frame.payload
        if frame.flags & _END_STREAM:
            break
    # Other errors, such as an unknown method, say nothing about the token.
    return True if any(text in headers for text in _UNAUTHENTICATED) else None


def _request(method: str, token: str) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    # Each as a literal without index (RFC 7541, 6.2.2): no state, no compression.
    headers = b"".join(
        b"\x00" + _text(name) + _text(value) for name, value in fields.items()
    )
    if token:
        # Marked so that no proxy on the way may index it (RFC 7541, 6.2.3).
        headers += b"\x10" + _text("authorization") + _text(f"Bearer {token}")
    nothing = bytes(5)  # a message that is not compressed and has no bytes
    return b"".join(
        [
            _PREFACE,
            # Each side must open with a SETTINGS frame, even an empty one
            # (RFC 9113, 3.4).
            _frame(_SETTINGS, 0, 0, b""),
            _frame(_HEADERS, _END_HEADERS, _STREAM, headers),
            _frame(_DATA, _END_STREAM, _STREAM, nothing),
        ]
    )


def _text(text: str) -> bytes:
    data = text.encode()
    return _length(len(data)) + data


def _length(size: int) -> bytes:
    """Write a number with a prefix of seven bits (RFC 7541, 5.1)."""
    if size < _PREFIX:
        return bytes([size])
    rest, more = size - _PREFIX, [_PREFIX]
    while rest >= 128:
        more.append(rest % 128 + 128)
        rest //= 128
    return bytes([*more, rest])


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = struct.pack(">I", len(payload))[1:]
    return size + struct.pack(">BBI", kind, flags, stream) + payload
