"""`RemoteSandbox`: programs sent to a service, which runs them on another machine.

The contract of such a service, JSON over HTTP (version 1; `service` is one):

| request | body | reply |
|---|---|---|
| `GET /v1/sandbox` | | `level`, `missing_languages`, `num_slots` |
| `POST /v1/programs` | `language`, `code`, `stdin`, `limits` | a `SandboxResult` |
| `POST /v1/commands` | `argv`, `files` (base64 by name), `stdin`, `limits` | the same |

`limits` has the fields of `SandboxLimits`. A key is sent as `Authorization: Bearer`.
A wrong request gets a status of 4xx and `{"error": {"code", "message"}}`; 5xx
or no reply means that the service failed, and the program is not to blame.
"""

from __future__ import annotations

import base64
import dataclasses
import http.client
import json
import os
import threading
import urllib.parse
from collections.abc import Mapping
from typing import Any

from rl_envs.errors import SandboxError
from rl_envs.sandbox.interface import Sandbox
from rl_envs.sandbox.languages import LANGUAGES
from rl_envs.sandbox.runs import (
    Command,
    Program,
    SandboxLevel,
    SandboxLimits,
    SandboxResult,
)

__all__ = ["RemoteSandbox"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LARGEST_REPLY = 64 << 20
_BUILD_S = 60.0


class RemoteSandbox(Sandbox):
    """Runs programs at a sandbox service.

    The level is what the service says of itself: nobody here can check it.

    Args:
        url: Where the service is, such as `https://sandbox.example:8443`.
        num_slots: Programs that are sent at the same time.
        level: Refuse a service that says less.
        key_variable: Environment variable with the service's key; None: it has none.
        wait_s: Seconds to wait for a reply beyond a program's limit of time: for a free
            slot there, and the way.
        allow_http: Send programs unencrypted to another machine.

    Raises:
        SandboxError: The service does not answer, answers something else, or says less
            than `level`.
    """

    def __init__(
        self,
        url: str,
        num_slots: int = 1,
        *,
        level: SandboxLevel = SandboxLevel.LANDLOCK,
        key_variable: str | None = None,
        wait_s: float = 60.0,
        allow_http: bool = False,
    ) -> None:
        if num_slots < 1:
            raise SandboxError(f"num_slots must be at least 1: got {num_slots}")
        self.num_slots = num_slots
        self._wait_s = wait_s
        self._address = _address(url, allow_http)
        self._key = _key(key_variable)
        self._free = threading.BoundedSemaphore(num_slots)
        self._is_closed = False
        said = self._request("GET", "/v1/sandbox", None, wait_s)
        try:
            self.level = SandboxLevel[str(said["level"]).upper()]
            self._missing = {
                name: str(said["missing_languages"].get(name, "the service lacks it"))
                for name in LANGUAGES
            }
        except (KeyError, AttributeError):
            raise SandboxError(
                f"the service at {url} must say its level and missing_languages: got "
                f"{said!r:.200}"
            ) from None
        if self.level < level:
            raise SandboxError(
                f"the sandbox must reach level {level.name}: the service at {url} says "
                f"{self.level.name}"
            )

    def run_command(
        self, command: Command, limits: SandboxLimits | None = None
    ) -> SandboxResult:
        """Run a command line at the service; wait for a free slot before.

        Raises:
            SandboxError: It is closed, or the service refuses the request.
        """
        files = {
            name: base64.b64encode(data).decode()
            for name, data in command.files.items()
        }
        body = {"argv": list(command.argv), "files": files, "stdin": command.stdin}
        return self._run("/v1/commands", body, limits or SandboxLimits(), 0.0)

    def run_built(
        self, program: Program, built: bytes, limits: SandboxLimits
    ) -> SandboxResult:
        """Run a program at the service, which builds it."""
        body = dataclasses.asdict(program)
        return self._run("/v1/programs", body, limits, _BUILD_S)

    def needs_build(self, program: Program) -> bool:
        """Return that nothing is built here."""
        return False

    def close(self) -> None:
        """Send nothing more."""
        self._is_closed = True

    def _run(
        self, path: str, body: Mapping[str, Any], limits: SandboxLimits, build_s: float
    ) -> SandboxResult:
        if self._is_closed:
            raise SandboxError("the sandbox is closed; make another RemoteSandbox")
        request = {**body, "limits": dataclasses.asdict(limits)}
        with self._free:
            try:
                wait_s = limits.time_s + build_s + self._wait_s
                said = self._request("POST", path, request, wait_s)
                return SandboxResult(**said)
            # A TypeError: the reply lacks fields of a result, or has others.
            except (_ServiceFailedError, TypeError) as error:
                told = f"the sandbox service failed: {error}"
                return SandboxResult("sandbox", "", told, None, None, 0.0, 0)

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, wait_s: float
    ) -> dict[str, Any]:
        """Return the reply to one request.

        Raises:
            SandboxError: The service refuses it.
            _ServiceFailedError: There is no reply, or none of the contract.
        """
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        # One per request: several threads ask at the same time, and a connection serves
        # one.
        connection = self._connection(wait_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._address.path + path, data, headers)
            reply = connection.getresponse()
            text = reply.read(_LARGEST_REPLY).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise _ServiceFailedError(
                f"{self._address.netloc}: {type(error).__name__}: {error}"
            ) from error
        finally:
            connection.close()
        # The request or the key is wrong, and would be again: raise instead of blaming
        # the run.
        if 400 <= reply.status < 500:
            raise SandboxError(
                f"the sandbox service refuses the request (status {reply.status}): "
                f"{text:.300}"
            )
        try:
            said = json.loads(text)
        except ValueError:
            said = None
        if reply.status != http.client.OK or not isinstance(said, dict):
            raise _ServiceFailedError(f"status {reply.status}: {text:.200}")
        return said

    def _connection(self, wait_s: float) -> http.client.HTTPConnection:
        of = (
            http.client.HTTPSConnection
            if self._address.scheme == "https"
            else http.client.HTTPConnection
        )
        return of(self._address.hostname or "", self._address.port, timeout=wait_s)


class _ServiceFailedError(SandboxError):
    """The service failed; the program is not to blame."""


def _address(url: str, allow_http: bool) -> urllib.parse.SplitResult:
    try:
        found = urllib.parse.urlsplit(url.rstrip("/"))
        # Parsed lazily: a bad port raises only when it is read.
        _ = found.port
    except ValueError:
        found = urllib.parse.SplitResult("", "", "", "", "")
    if found.scheme not in ("http", "https") or not found.hostname:
        raise SandboxError(f"url must be http://... or https://...: got {url!r}")
    is_local = found.hostname in _LOOPBACK
    if found.scheme == "http" and not is_local and not allow_http:
        raise SandboxError(
            f"url must begin with https:// for another machine: got {url!r}; in a "
            "network that you trust, set allow_http"
        )
    return found


def _key(variable: str | None) -> str:
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise SandboxError(
            f"the environment variable {variable} must hold the key of the sandbox "
            "service: it is empty (a worker gets it by env.pass_env)"
        )
    return key
