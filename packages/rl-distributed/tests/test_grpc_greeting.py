from __future__ import annotations

import socket
import struct
import threading
from concurrent import futures

import pytest

from rl_distributed.cluster import grpc_greeting
from rl_distributed.cluster.grpc_greeting import Greeting, greet

METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = struct.pack(">I", len(payload))[1:]
    return size + struct.pack(">BBI", kind, flags, stream) + payload


# Recorded from heads of Ray 2.60.
SETTINGS = frame(4, 0, 0, bytes.fromhex("000400400000000500400000"))
ACKNOWLEDGED = frame(4, 1, 0)
WINDOW = frame(8, 0, 0, b"\x00\x3f\x00\x01")
PING = frame(6, 0, 0, bytes(8))
HEADERS = frame(1, 4, 1, b"\x88@\x0ccontent-type\x10application/grpc")
ANSWER = frame(0, 0, 1, bytes(5) + b"\n\x00\x12\x1cidentifier")
DONE = frame(1, 5, 1, b"@\x0bgrpc-status\x010")
REFUSED = frame(
    1,
    5,
    1,
    b"\x88@\x0ccontent-type\x10application/grpc\x00\x0bgrpc-status\x0216"
    b"\x00\x0cgrpc-message>InvalidAuthToken: Authentication token is missing",
)
UNKNOWN = frame(1, 5, 1, b"\x88\x00\x0bgrpc-status\x0212\x00\x0cgrpc-message\x01?")
BEFORE = SETTINGS + WINDOW + ACKNOWLEDGED + PING


def greeted(
    answer: bytes, *, piece: int = 10_000, close: bool = True, token: str = ""
) -> Greeting:
    """Greet a peer that sends `answer` in pieces and then closes or stays silent."""
    ours, theirs = socket.socketpair()
    done = threading.Event()

    def serve() -> bytes:
        with theirs:
            theirs.settimeout(60)
            request = theirs.recv(65_536)
            for start in range(0, len(answer), piece):
                theirs.sendall(answer[start : start + piece])
            if not close:
                done.wait(60)
            return request

    with futures.ThreadPoolExecutor(1) as pool, ours:
        served = pool.submit(serve)
        # A silent peer is given up soon; the others get all the time that they need.
        ours.settimeout(60 if close else 0.2)
        try:
            return greet(ours, METHOD, token)
        finally:
            done.set()
            request = served.result(60)
            assert request.startswith(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert METHOD.encode() in request
            assert (f"Bearer {token}".encode() in request) == bool(token)


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_who_asks_for_a_token_and_who_does_not(piece: int) -> None:
    is_open = BEFORE + HEADERS + ANSWER + DONE
    assert greeted(is_open, piece=piece) == Greeting(True, demands_token=False)
    assert greeted(BEFORE + REFUSED, piece=piece) == Greeting(True, demands_token=True)


def test_a_token_is_presented() -> None:
    assert greeted(BEFORE + REFUSED, token="ab" * 16).demands_token is True
    assert greeted(BEFORE + ANSWER, token="ab" * 500).demands_token is False


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, "00"), (126, "7e"), (127, "7f00"), (254, "7f7f"), (255, "7f8001")],
)
def test_lengths_of_texts(size: int, expected: str) -> None:
    # The examples follow RFC 7541, 5.1, with a prefix of seven bits.
    assert grpc_greeting._length(size).hex() == expected


@pytest.mark.parametrize(
    "rest", [UNKNOWN, HEADERS + DONE, b"", HEADERS, frame(7, 0, 0, bytes(8)), b"\x00"]
)
def test_who_does_not_say(rest: bytes) -> None:
    assert greeted(BEFORE + rest) == Greeting(True, demands_token=None)


def test_who_stops_after_the_settings() -> None:
    assert greeted(SETTINGS, close=False) == Greeting(True, demands_token=None)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"",
        b"\x00\x00",
        HEADERS,
        b"\x7f\xff\xff\x04\x00\x00\x00\x00\x00",
    ],
)
def test_what_is_no_grpc_server(answer: bytes) -> None:
    assert greeted(answer) == Greeting(is_grpc=False)


def test_who_says_nothing() -> None:
    with pytest.raises(TimeoutError):
        greeted(b"", close=False)
