"""Requests that no client would send, drawn from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence

__all__ = ["malformed"]

_METHODS = [
    "GET",
    "POST",
    "PUT",
    "DELETE",
    "OPTIONS",
    "HEAD",
    "CONNECT",
    "PRI",
    "A" * 99,
]
_VERSIONS = ["HTTP/1.1", "HTTP/1.0", "HTTP/9.9", "HTTP/1.1.1", "HTTP/", "", "HTP/1.1"]
_ENDS = ["\r\n", "\n", "\r", "", "\r\n\r\n"]


def malformed(
    seed: int, paths: Sequence[str], keys: Sequence[str]
) -> Iterator[tuple[bytes, bool]]:
    """Yield endless requests, and whether their sender disconnects at once.

    Args:
        seed: Of the choice.
        paths: Paths of the listener.
        keys: Valid and invalid keys; most requests have none.
    """
    rng = random.Random(seed)
    kinds: list[Callable[[random.Random, str, str], bytes]] = [
        _noise, _torn, _head, _lengths, _chunks, _body, _headers, _path, _key, _smuggled
    ]  # fmt: skip
    while True:
        path, key = rng.choice(list(paths)), rng.choice([*keys, "", ""])
        yield rng.choice(kinds)(rng, path, key), rng.random() < 0.1


def _request(
    method: str, path: str, headers: Sequence[str], body: bytes = b"", key: str = ""
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


def _noise(rng: random.Random, path: str, key: str) -> bytes:
    return rng.randbytes(rng.choice([1, 7, 100, 5_000, 70_000]))


def _torn(rng: random.Random, path: str, key: str) -> bytes:
    whole = _request("POST", path, ["Content-Length: 40"], b"{" * 40, key)
    return whole[: rng.randrange(len(whole))]


def _head(rng: random.Random, path: str, key: str) -> bytes:
    parts = [rng.choice(_METHODS), path, rng.choice(_VERSIONS)]
    rng.shuffle(parts)
    line = rng.choice([" ", "  ", "\t", ""]).join(parts)
    return (line + rng.choice(_ENDS) * rng.randrange(4)).encode()


def _lengths(rng: random.Random, path: str, key: str) -> bytes:
    length = rng.choice(
        ["-1", "1e9", "99999999999999999999", "0x10", "5, 6", "", " ", "10", "70000"]
    )
    headers = [f"Content-Length: {length}"] * rng.randrange(1, 3)
    return _request("POST", path, [*headers, "Content-Type: application/json"],
                    b"{}" * rng.randrange(10), key)  # fmt: skip


def _chunks(rng: random.Random, path: str, key: str) -> bytes:
    sizes = ["5\r\nhello\r\n", "FFFFFFFFF\r\n", "-1\r\n", "zz\r\nx\r\n", "0\r\n\r\n",
             "5;" + "x" * 9_000 + "\r\nhello\r\n"]  # fmt: skip
    body = "".join(rng.choice(sizes) for _ in range(rng.randrange(1, 8)))
    kind = rng.choice(["chunked", "gzip, chunked", "chunked, chunked", "identity"])
    headers = [f"Transfer-Encoding: {kind}", "Content-Type: application/json"]
    return _request("POST", path, headers, body.encode(), key)


def _body(rng: random.Random, path: str, key: str) -> bytes:
    body = rng.choice(
        [
            b"[" * 60_000,
            b'{"a":' * 10_000,
            b"\xff\xfe\x00",
            b"null",
            b"NaN",
            b'{"deadline_s": 1e999}',
            b'{"deadline_s": -1}',
            b'{"changes": {"a": {"b": []}}, "deadline_s": 0.001}',
            b'{"path": "../../../etc/passwd"}',
            b'{"path": "\\u0000", "version": 1e400}',
            b'{"role": ["admin"], "name": {"a": 1}}',
            b'{"key": "' + b"x" * 60_000 + b'"}',
            json.dumps({str(n): n for n in range(3_000)}).encode(),
            b"1" * 60_000,
        ]
    )
    kind = rng.choice(["application/json", "text/plain", "multipart/form-data", "\x01"])
    headers = [f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    return _request("POST", path, headers, body, key)


def _headers(rng: random.Random, path: str, key: str) -> bytes:
    many = [
        f"X-{n}: {'v' * rng.choice([1, 100, 9_000])}"
        for n in range(rng.choice([3, 200]))
    ]
    odd = rng.choice(
        ["Host: ", "Host: [::1", "Origin: http://[", ": empty", "A\x00: b", "A : b",
         "X-RL-Time: nan", f"X-RL-Nonce: {'f' * 9_000}", "Upgrade: websocket",
         "Sec-Fetch-Site: \xff", "Expect: 100-continue", "Expect: \x7f",
         "Accept-Encoding: " + "gzip," * 900, "Accept: " + ";" * 3_000,
         "Accept: text/html,\xff<script>", "Accept: text/html\r\nOrigin: http://<b>",
         "Sec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document\r\nOrigin: null"]
    )  # fmt: skip
    return _request(rng.choice(["GET", "POST"]), path, [odd, *many], key=key)


def _path(rng: random.Random, path: str, key: str) -> bytes:
    other = rng.choice(
        [path + "/", "/" + path, path + "%00", path + "?" + "a=b&" * 1_500,
         "/" + "../" * 50 + "etc/passwd", "http://example.org" + path, "*", "%ff%fe",
         path.upper(), path + "#x", "/%2e%2e/%2e%2e/run.json", path + ";a=b",
         "/chunk?name=" + "9" * 2_000, "/data?seen=" + "%f0%9f" * 9, "/" + "a" * 9_000]
    )  # fmt: skip
    return _request(rng.choice(["GET", "POST"]), other, [], key=key)


def _key(rng: random.Random, path: str, key: str) -> bytes:
    value = rng.choice(
        [f"Bearer {key}x", f"bearer  {key}", f"Basic {key}", "Bearer", "rlk_",
         "Bearer \xff\xfe", "Bearer " + "A" * 8_000, f"Bearer {key} {key}",
         "Bearer rlk_" + "0" * 70]
    )  # fmt: skip
    return _request("GET", path, [f"Authorization: {value}"])


def _smuggled(rng: random.Random, path: str, key: str) -> bytes:
    inner = _request("POST", path, ["Content-Length: 2"], b"{}", key)
    headers = [f"Content-Length: {rng.randrange(3)}", "Transfer-Encoding: chunked"]
    rng.shuffle(headers)
    return _request("POST", path, headers, b"0\r\n\r\n" + inner * rng.randrange(4))
