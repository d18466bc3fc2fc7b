"""`SandboxService`: a sandbox behind an address, for programs of other machines.

See `remote` for the contract. Run it on a machine that has nothing to lose: programs
then run there, and not beside the training.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hmac
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from rl_envs.errors import SandboxError
from rl_envs.sandbox.interface import Sandbox
from rl_envs.sandbox.runs import Command, SandboxLimits, SandboxResult

__all__ = ["SandboxService"]

_LARGEST_REQUEST = 64 << 20
_IDLE_S = 60.0
_END_S = 60.0
_MAX_LIMITS = SandboxLimits(
    time_s=300.0, memory_bytes=8 << 30, output_bytes=64 << 20, scratch_bytes=1 << 30
)


class SandboxService:
    """Serves a sandbox over HTTP until it is closed.

    Put a proxy with TLS before it where it is not on this machine.

    Args:
        sandbox: Where programs run; it stays the caller's.
        host: Address to listen at.
        port: Port; 0: any that is free.
        key: What clients must send; required unless `host` is of this machine.
        max_limits: Most that a request may ask for.

    Raises:
        SandboxError: Other machines could use it without a key.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
        max_limits: SandboxLimits = _MAX_LIMITS,
    ) -> None:
        if host not in ("127.0.0.1", "localhost", "::1") and not key:
            raise SandboxError(f"a service at {host} needs a key: got none")
        handler = type(
            "Handler",
            (_Handler,),
            {"sandbox": sandbox, "key": key or "", "max_limits": max_limits},
        )
        self._server = ThreadingHTTPServer((host, port), handler)
        self._server.daemon_threads = True
        name, number = str(self._server.server_address[0]), self._server.server_port
        self.url = f"http://{name}:{number}"
        """Where it listens."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="sandbox-service", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Listen no more; it may be called again."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_END_S)

    def __enter__(self) -> SandboxService:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _RefusedError(Exception):
    """The request is wrong; its status and what to say."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """Answers requests, each connection in a thread of its own."""

    sandbox: Sandbox
    key: str
    max_limits: SandboxLimits
    timeout = _IDLE_S

    def do_GET(self) -> None:
        """Say what the sandbox is."""
        self._answer(self._about)

    def do_POST(self) -> None:
        """Run a program or a command."""
        self._answer(self._run)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log: requests hold programs."""

    def _answer(self, work: Any) -> None:
        try:
            sent = self.headers.get("Authorization", "")
            if self.key and not hmac.compare_digest(
                sent.encode(), f"Bearer {self.key}".encode()
            ):
                raise _RefusedError(401, "the key is missing or wrong")
            self._send(200, work())
        except _RefusedError as error:
            self._send(error.status, {"error": str(error)})
        except SandboxError as error:
            self._send(503, {"error": str(error)})

    def _send(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _about(self) -> dict[str, Any]:
        if self.path != "/v1/sandbox":
            raise _RefusedError(404, f"there is no {self.path}")
        return {
            "level": self.sandbox.level.name.lower(),
            "missing_languages": self.sandbox.missing_languages(),
            "num_slots": self.sandbox.num_slots,
        }

    def _run(self) -> dict[str, Any]:
        body = self._body()
        limits = self._limits(body.get("limits", {}))
        if self.path == "/v1/programs":
            return dataclasses.asdict(self._run_program(body, limits))
        if self.path == "/v1/commands":
            return dataclasses.asdict(self._run_command(body, limits))
        raise _RefusedError(404, f"there is no {self.path}")

    def _run_program(
        self, body: dict[str, Any], limits: SandboxLimits
    ) -> SandboxResult:
        language, code = body.get("language", "python"), body.get("code")
        stdin = body.get("stdin", "")
        if not all(isinstance(text, str) for text in (language, code, stdin)):
            raise _RefusedError(400, "language, code and stdin must be texts")
        why = self.sandbox.missing_languages().get(language, "no such language")
        if why:
            raise _RefusedError(400, f"language {language!r}: {why}")
        return self.sandbox.run(
            str(code), stdin=stdin, limits=limits, language=language
        )

    def _run_command(
        self, body: dict[str, Any], limits: SandboxLimits
    ) -> SandboxResult:
        argv, files = body.get("argv"), body.get("files", {})
        stdin = body.get("stdin", "")
        if (
            not isinstance(argv, list)
            or not argv
            or not isinstance(files, dict)
            or not all(isinstance(text, str) for text in (*argv, stdin))
        ):
            raise _RefusedError(
                400, "argv must be texts, files a mapping, and stdin a text"
            )
        try:
            data = {n: base64.b64decode(t, validate=True) for n, t in files.items()}
        except (binascii.Error, TypeError, ValueError):
            raise _RefusedError(400, "files must be base64 texts by name") from None
        return self.sandbox.run_command(Command(tuple(argv), data, stdin), limits)

    def _body(self) -> dict[str, Any]:
        try:
            size = int(self.headers.get("Content-Length", ""))
        except ValueError:
            raise _RefusedError(411, "the request must say its length") from None
        if not 0 < size <= _LARGEST_REQUEST:
            raise _RefusedError(413, f"a request has at most {_LARGEST_REQUEST} bytes")
        try:
            body = json.loads(self.rfile.read(size))
        except (ValueError, RecursionError):
            raise _RefusedError(400, "the request must be JSON") from None
        if not isinstance(body, dict):
            raise _RefusedError(400, "the request must be a JSON object")
        return body

    def _limits(self, given: Any) -> SandboxLimits:
        try:
            asked = SandboxLimits(**given)
            for name in asked.__slots__:
                if not getattr(asked, name) <= getattr(self.max_limits, name):
                    most = getattr(self.max_limits, name)
                    raise ValueError(f"{name} may be at most {most}")
        except (TypeError, ValueError) as error:
            raise _RefusedError(400, f"limits: {error}") from None
        return asked
