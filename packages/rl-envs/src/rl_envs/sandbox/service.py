"""`SandboxService`: a sandbox behind an address, for programs of other machines.

See `remote` for the contract. Run it on a machine that has nothing to lose: programs
then run there, and not beside the training. Needs `rl-distributed[http]`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import functools
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from aiohttp import web

from rl_distributed.access.bound_socket import bound_socket
from rl_distributed.access.door import Door, FixedKey, is_loopback
from rl_distributed.access.http_app import (
    Handler,
    Route,
    RouteTable,
    error_response,
    guarded_app,
    json_object,
    metrics_route,
)
from rl_distributed.access.http_thread import HttpThread
from rl_distributed.access.key_file import KeyFile
from rl_distributed.access.listener_tls import server_context
from rl_distributed.access.roles import ROLES, Permission
from rl_distributed.security import TlsFiles
from rl_envs.errors import SandboxError
from rl_envs.sandbox.interface import Sandbox
from rl_envs.sandbox.runs import Command, SandboxLimits, SandboxResult

__all__ = ["SandboxService", "sandbox_routes"]

_LARGEST_REQUEST = 64 << 20
# A program that is cut off gets the status `sandbox` at its client, so closing need not
# wait for long ones.
_DRAIN_S = 5.0
_MAX_LIMITS = SandboxLimits(
    time_s=300.0, memory_bytes=8 << 30, output_bytes=64 << 20, scratch_bytes=1 << 30
)


class SandboxService:
    """Serve a sandbox over HTTP until it is closed.

    Running a program needs a key of the role `user`. Without any key, only programs of
    this machine are served.

    Args:
        sandbox: Runs the programs; it remains the caller's to close.
        host: Address to listen on.
        port: Port; 0 for any that is free.
        key: A single key that clients may send.
        keys_file: Keys with roles (`rl keys create`), beside or instead of `key`.
        tls: Encryption: certificate files, or True for a certificate made here.
        max_limits: Largest limits that a request may ask for.

    Raises:
        SandboxError: Other machines could use it without a key.
        ConfigError: The port is taken, or the address is not one of this machine.
        SecurityError: The keys or the certificate cannot be used.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
        keys_file: str | None = None,
        tls: bool | TlsFiles = False,
        max_limits: SandboxLimits = _MAX_LIMITS,
    ) -> None:
        keys = None if keys_file is None else KeyFile(keys_file)
        if keys is not None:
            keys.check()
        has_key = bool(key) or keys is not None
        if not is_loopback(host) and not has_key:
            raise SandboxError(
                f"a sandbox service at {host} needs a key: got none; give key or "
                "keys_file"
            )
        everything: Collection[Permission] = ROLES["user"]
        self.door = door = Door(
            "sandbox",
            key_file=keys,
            fixed=[FixedKey("key", key, ROLES["user"])] if key else [],
            # Without a key only this machine can connect, as checked above.
            anonymous=() if has_key else everything,
            is_loopback=is_loopback(host),
        )
        """Admits requests, and counts those that it refuses."""
        context = server_context(tls, host)
        listener = bound_socket(host, port, how_to_change="port and host")
        # A thread per slot: more requests wait here instead of in the sandbox.
        self._threads = ThreadPoolExecutor(
            sandbox.num_slots, thread_name_prefix="sandbox-service"
        )
        self.routes = sandbox_routes(sandbox, door, self._threads, max_limits)
        """The routes and the permission that each needs."""
        app = guarded_app(door, self.routes, max_body_bytes=_LARGEST_REQUEST)
        self._server = HttpThread(app, door, listener, tls=context, drain_s=_DRAIN_S)
        self.url = self._server.url
        """Address of the service."""

    def close(self) -> None:
        """Stop listening; may be called more than once."""
        self._server.close()
        # Programs end by their own time limits.
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> SandboxService:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def sandbox_routes(
    sandbox: Sandbox,
    door: Door,
    threads: ThreadPoolExecutor,
    max_limits: SandboxLimits = _MAX_LIMITS,
) -> RouteTable:
    """Return the routes of a sandbox service.

    Args:
        sandbox: Runs the programs.
        door: Door of the service, whose counts `/metrics` shows.
        threads: Threads in which programs are waited for.
        max_limits: Largest limits that a request may ask for.
    """

    async def about(request: web.Request) -> web.StreamResponse:
        # The first call looks for compilers and interpreters.
        loop = asyncio.get_running_loop()
        missing = await loop.run_in_executor(threads, sandbox.missing_languages)
        return web.json_response(
            {
                "level": sandbox.level.name.lower(),
                "missing_languages": missing,
                "num_slots": sandbox.num_slots,
            }
        )

    def running(
        run: Callable[[Sandbox, dict[str, Any], SandboxLimits], SandboxResult],
    ) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await json_object(request)
            limits = _limits(body.get("limits", {}), max_limits)
            work = functools.partial(run, sandbox, body, limits)
            try:
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(threads, work)
            except SandboxError as error:
                # 5xx: the client then blames the service, not the program.
                return error_response(503, "sandbox", str(error))
            return web.json_response(dataclasses.asdict(result))

        return handle

    return RouteTable(
        [
            Route("GET", "/v1/sandbox", "infer", about),
            Route("POST", "/v1/programs", "infer", running(_run_program)),
            Route("POST", "/v1/commands", "infer", running(_run_command)),
            metrics_route(door),
        ]
    )


def _run_program(
    sandbox: Sandbox, body: dict[str, Any], limits: SandboxLimits
) -> SandboxResult:
    language, code = body.get("language", "python"), body.get("code")
    stdin = body.get("stdin", "")
    if not all(isinstance(text, str) for text in (language, code, stdin)):
        raise _wrong("language, code and stdin must be texts")
    why = sandbox.missing_languages().get(language, "no such language")
    if why:
        raise _wrong(f"language {language!r}: {why}")
    return sandbox.run(str(code), stdin=stdin, limits=limits, language=language)


def _run_command(
    sandbox: Sandbox, body: dict[str, Any], limits: SandboxLimits
) -> SandboxResult:
    argv, files = body.get("argv"), body.get("files", {})
    stdin = body.get("stdin", "")
    if (
        not isinstance(argv, list)
        or not argv
        or not isinstance(files, dict)
        or not all(isinstance(text, str) for text in (*argv, stdin))
    ):
        raise _wrong("argv must be texts, files a mapping, and stdin a text")
    try:
        # Strict: without it Python skips characters that are not base64.
        data = {n: base64.b64decode(t, validate=True) for n, t in files.items()}
    except (binascii.Error, TypeError, ValueError):
        raise _wrong("files must be base64 texts by name") from None
    return sandbox.run_command(Command(tuple(argv), data, stdin), limits)


def _limits(given: Any, most: SandboxLimits) -> SandboxLimits:
    try:
        asked = SandboxLimits(**given)
        for name in asked.__slots__:
            # Written so that NaN fails, which no comparison holds for.
            if not getattr(asked, name) <= getattr(most, name):
                raise ValueError(f"{name} may be at most {getattr(most, name)}")
    except (TypeError, ValueError) as error:
        raise _wrong(f"limits: {error}") from None
    return asked


def _wrong(reason: str) -> web.HTTPBadRequest:
    # A reason phrase is one line.
    return web.HTTPBadRequest(reason=" ".join(reason.split()))
