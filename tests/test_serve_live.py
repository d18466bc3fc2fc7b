"""`rl serve` as a process, exposed to hostile and mistaken requests.

One server for all: on loopback without an API key, so within reach of browser pages,
and with a key for weights. After each attack it still answers.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from processes import is_running, kill_session, session_processes

from rl_models.build.config import TokenizerBuildConfig
from rl_models.testing import build_tiny_model

pytestmark = pytest.mark.slow

START_S, DEADLINE_S = 300.0, 120.0
WEIGHTS_KEY = "key-for-weights"
MAX_BODY = 100_000
JSON = {"Content-Type": "application/json"}
COMPLETION = {"model": "model", "prompt": "12=", "max_tokens": 2, "temperature": 0}


@dataclass
class Live:
    """A running server and the folders around its models."""

    process: subprocess.Popen[str]
    host: str
    port: int
    root: Path
    outside: Path

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """Send one request; return status, headers and body."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            sent = json.dumps(body).encode() if isinstance(body, dict) else body
            found = {**JSON, **(headers or {})}
            connection.request(method, path, body=sent, headers=found)
            answer = connection.getresponse()
            shown = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, shown, answer.read()
        finally:
            connection.close()

    def error(self, *arguments: Any, **more: Any) -> tuple[int, str]:
        """Return status and code of an error, which has OpenAI's form."""
        status, _, body = self.ask(*arguments, **more)
        error = json.loads(body)["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        return status, error["code"]

    def change_weights(self, path: str, key: str | None) -> tuple[int, str]:
        """Request other weights; return the status and the message of the refusal."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        status, _, body = self.ask("POST", "/rl/weights", {"path": path}, headers)
        return status, json.loads(body).get("error", {}).get("message", "")

    def raw(self, *parts: bytes) -> bytes:
        """Return the response to bytes that no client would send."""
        with socket.create_connection((self.host, self.port), DEADLINE_S) as sock:
            for part in parts:
                sock.sendall(part)
            found = b""
            while chunk := sock.recv(65_536):
                found += chunk
        return found

    def check_well(self) -> None:
        """Check that a plain request is answered."""
        status, _, body = self.ask("POST", "/v1/completions", COMPLETION)
        assert status == 200, body
        assert json.loads(body)["usage"]["completion_tokens"] >= 1


def _first_line(process: subprocess.Popen[str], deadline_s: float) -> str:
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    read = process.stdout.readline
    threading.Thread(target=lambda: lines.put(read()), daemon=True).start()
    return lines.get(timeout=deadline_s)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    root, outside = folder / "root", folder / "outside"
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tokenizer": TokenizerBuildConfig(characters="0123456789="),
    }
    build_tiny_model(root / "model", **shape)
    build_tiny_model(root / "later", seed=1, **shape)
    build_tiny_model(outside / "model", seed=2, **shape)
    (root / "link").symlink_to(outside / "model")
    shutil.copytree(root / "model", root / "mixed")
    (root / "mixed" / "model.safetensors").unlink()
    (root / "mixed" / "model.safetensors").symlink_to(
        outside / "model" / "model.safetensors"
    )
    command = [sys.executable, "-m", "rl_cli", "serve", str(root / "model")]
    command += ["--port", "0", "--json", "--weights-root", str(root)]
    errors = (folder / "stderr").open("w+")
    environment = {k: v for k, v in os.environ.items() if k != "RL_API_KEY"}
    process = subprocess.Popen(
        [*command, f"max_body_bytes={MAX_BODY}"],
        cwd=folder,
        env={**environment, "RL_WEIGHTS_KEY": WEIGHTS_KEY},
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )
    try:
        line = _first_line(process, START_S)
        assert line, (folder / "stderr").read_text()
        address = urlsplit(json.loads(line)["url"])
        assert address.hostname
        assert address.port
        yield Live(process, address.hostname, address.port, root, outside)
        # Ctrl-C stops it with all its child processes.
        family = session_processes(process)
        process.send_signal(2)
        assert process.wait(DEADLINE_S) == 0, (folder / "stderr").read_text()
        psutil.wait_procs(family, DEADLINE_S)
        assert [other for other in family if is_running(other)] == []
        assert "Traceback" not in (folder / "stderr").read_text()
    finally:
        kill_session(process)
        process.communicate()
        errors.close()


@pytest.fixture(autouse=True)
def _still_well(live: Live) -> Iterator[None]:
    yield
    live.check_well()


def test_weights_change_with_their_key_alone(live: Live) -> None:
    for key, status in ((None, 401), ("wrong", 401), ("", 401), (WEIGHTS_KEY, 200)):
        assert live.change_weights("later", key)[0] == status
    version = json.loads(live.ask("GET", "/rl/status")[2])["weight_version"]
    assert version == 1
    # The same key opens nothing else, and another spelling of a path does not get
    # around it.
    for path in ("/rl/%77eights", "/rl//weights", "/rl/weights/", "/rl/./weights"):
        status, _, _ = live.ask("POST", path, {"path": "model"})
        assert status in (401, 404), path
    assert json.loads(live.ask("GET", "/rl/status")[2])["weight_version"] == version


def test_paths_outside_are_refused_in_the_same_words(live: Live) -> None:
    paths = [
        str(live.outside / "model"),
        str(live.outside / "not-there"),
        "../outside/model",
        "../outside/not-there",
        "model/../../outside/model",
        "link",
        "mixed",
        "/etc/passwd",
        "/etc/not-there",
        "/",
        "model\0",
        "x/" * 3_000,
    ]
    said = {
        message.replace(repr(path), "PATH")
        for path in paths
        for status, message in [live.change_weights(path, WEIGHTS_KEY)]
        if status == 403
    }
    assert len(said) == 1
    statuses = {live.change_weights(path, WEIGHTS_KEY)[0] for path in paths}
    assert statuses == {403}
    # Without the key, not even that is revealed.
    assert live.change_weights("../outside/model", None)[0] == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/rl/status", "/metrics", "/nothing"])
def test_other_names_of_this_machine_are_refused(
    live: Live, host: str, path: str
) -> None:
    status, _, _ = live.ask("GET", path, headers={"Host": host})
    assert status in (400, 403)


def test_names_that_only_this_machine_has_are_answered(live: Live) -> None:
    for host in ("localhost", f"localhost:{live.port}", f"127.0.0.1:{live.port}"):
        assert live.ask("GET", "/v1/models", headers={"Host": host})[0] == 200


def test_pages_of_other_origins_get_no_leave(live: Live) -> None:
    """A browser sends a preflight or hides the response; JSON is never sent unasked."""
    origin = {"Origin": "http://evil.example"}
    asking = {
        **origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    for path in ("/v1/completions", "/rl/weights", "/v1/models"):
        status, headers, _ = live.ask("OPTIONS", path, headers=asking)
        assert status >= 400
        assert not [name for name in headers if name.startswith("access-control")]
    _, headers, _ = live.ask("GET", "/v1/models", headers=origin)
    assert not [name for name in headers if name.startswith("access-control")]
    # What a page may send without a preflight.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/x"):
        sent = {"Content-Type": kind}
        found = live.error("POST", "/v1/completions", COMPLETION, {**origin, **sent})
        assert found == (403, "other_origin")
        # Old browsers send no origin.
        found = live.error("POST", "/v1/completions", COMPLETION, sent)
        assert found == (400, "bad_content_type")


def test_large_bodies_are_refused_before_they_are_read(live: Live) -> None:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Type: application/json\r\n"
    )
    # Ten gigabytes are announced; the response comes before any arrives.
    with socket.create_connection((live.host, live.port), DEADLINE_S) as sock:
        sock.sendall(f"{head}Content-Length: 10000000000\r\n\r\n".encode())
        assert sock.recv(65_536).startswith(b"HTTP/1.1 413 ")
    # Chunked, the size is not announced; it is cut off at the limit.
    with socket.create_connection((live.host, live.port), DEADLINE_S) as sock:
        sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
        for _ in range(MAX_BODY // 0x4000 + 2):
            sock.sendall(chunk)
        assert sock.recv(65_536).startswith(b"HTTP/1.1 413 ")
    fitting = b" " * (MAX_BODY - 200) + json.dumps(COMPLETION).encode()
    assert live.ask("POST", "/v1/completions", fitting)[0] == 200
    found = live.error("POST", "/v1/completions", b" " * (MAX_BODY + 1))
    assert found == (413, "body_too_large")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nothing",
        b"[1]",
        b'"text"',
        b"null",
        b"\xff\xfe{}",
        b"{'model': 1}",
        b"[" * 50_000,
        b'{"a":' * 15_000,
        b"1" * 50_000,
    ],
    ids=range(11),
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bodies_that_are_no_json_object_are_named(
    live: Live, path: str, body: bytes
) -> None:
    assert live.error("POST", path, body) == (400, "bad_json")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model": "model"},
        {"model": "model", "prompt": {"a": 1}},
        {"model": "model", "prompt": "1", "max_tokens": "many"},
        {"model": "model", "prompt": "1", "max_tokens": -1},
        {"model": "model", "prompt": "1", "n": 10**12},
        {"model": "model", "prompt": [10**9]},
        {"model": "model", "prompt": [-1]},
        {"model": "model", "prompt": "1" * 5_000},
    ],
    ids=range(9),
)
def test_impossible_requests_are_errors_of_the_request(
    live: Live, fields: dict[str, Any]
) -> None:
    status, _, body = live.ask("POST", "/v1/completions", fields)
    assert 400 <= status < 500, body
    assert json.loads(body)["error"]["message"]


def test_long_and_broken_heads_are_refused(live: Live) -> None:
    start = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
    long = b"x" * 1_000_000
    for sent in (
        start + b"X-Long: " + long + b"\r\n\r\n",
        start + b"Authorization: Bearer " + long + b"\r\n\r\n",
        b"GET /" + long + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"no http at all\r\n\r\n",
        b"GET /v1/models HTTP/9.9\r\n\r\n",
        start + b"Content-Length: -5\r\n\r\n",
        start + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ):
        try:
            answer = live.raw(sent)
        except (BrokenPipeError, ConnectionResetError):
            continue  # it disconnected before all was sent
        assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), (sent[:80], answer)
        assert b"Traceback" not in answer


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("POST", "/collective_rpc", 404),
        ("POST", "/sleep", 404),
        ("GET", "/v1/../rl/status/../../etc/passwd", 404),
        ("GET", "/static/%2e%2e/%2e%2e/etc/passwd", 404),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/completions", 405),
    ],
)
def test_routes_that_do_not_exist_are_named(
    live: Live, method: str, path: str, status: int
) -> None:
    body = {} if method in ("POST", "PUT") else None
    assert live.error(method, path, body)[0] == status


def test_connections_that_say_nothing_keep_nobody_out(live: Live) -> None:
    idle = [
        socket.create_connection((live.host, live.port), DEADLINE_S) for _ in range(200)
    ]
    try:
        for sock in idle[::2]:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        live.check_well()
    finally:
        for sock in idle:
            sock.close()
