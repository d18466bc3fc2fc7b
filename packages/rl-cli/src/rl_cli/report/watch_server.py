"""HTTP server of the page of runs, for one user of this machine.

| route | response |
|---|---|
| `/?token=T` | the current page |
| `/data?seen=N` | data of the page if newer than version N, otherwise 204 |
| `/chunk?name=C` | answers |

Every request needs the token, in its address or as `Authorization: Bearer T`, and must
be addressed to this machine: requests by pages of other origins, or through another
name for this address (DNS rebinding), are refused. No request contains a file path.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import signal
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

from rl_cli.report.live_runs import LiveRuns
from rl_cli.report.page import render_page
from rl_cli.report.sample_chunks import script_json
from rl_distributed.errors import ConfigError
from rl_models.serving.config import is_loopback

__all__ = ["HOST", "bound_socket", "serve", "watch_app"]

HOST = "127.0.0.1"
_CLOSE_S = 1.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def refusal(request: web.Request, digest: bytes) -> str | None:
    """Return why a request is refused; None: it is not.

    Args:
        request: The request.
        digest: Digest of the token.
    """
    try:
        name = urlsplit(f"//{request.headers.get('Host', '')}").hostname
        is_own = is_loopback(name or "")
    except ValueError:
        is_own = False
    if not is_own:
        return "use 127.0.0.1 or localhost: the page is for this machine only"
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"http://{request.headers['Host']}":
        return "requests from pages of other origins are refused"
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return "requests from pages of other origins are refused"
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = request.query.get("token", "")
    # Constant-time comparison of equal lengths, so that timing reveals nothing.
    if not hmac.compare_digest(_digest(token), digest):
        return "the token is missing or wrong: open the address that rl watch printed"
    return None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def watch_app(runs: LiveRuns, token: str) -> web.Application:
    """Return the application.

    Args:
        runs: The runs to show.
        token: Token required in every request.
    """
    digest = _digest(token)

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        reason = refusal(request, digest)
        response: web.StreamResponse
        if reason is not None:
            response = web.Response(status=403, text=f"{reason}\n")
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = web.Response(status=error.status, text=f"{error.reason}\n")
        response.headers.update(_HEADERS)
        return response

    async def page(request: web.Request) -> web.Response:
        # In a thread: reading a long run's files would block other requests.
        version, names, shown = await asyncio.to_thread(runs.page_text)
        live = {"version": version, "token": token, "poll_s": runs.poll_s}
        data = f'{shown[:-1]},"live":{script_json(live)}}}'
        text = render_page(data, names, may_ask=True)
        return web.Response(text=text, content_type="text/html")

    async def data(request: web.Request) -> web.Response:
        version, _, shown = await asyncio.to_thread(runs.page_text)
        if request.query.get("seen") == str(version):
            return web.Response(status=204)
        text = f'{shown[:-1]},"version":{version}}}'
        return web.Response(text=text, content_type="application/json")

    async def chunk(request: web.Request) -> web.Response:
        name = request.query.get("name", "")
        found = await asyncio.to_thread(runs.chunk, name)
        if found is None:
            raise web.HTTPNotFound
        return web.Response(text=found, content_type="application/json")

    app = web.Application(middlewares=[guarded])
    app.router.add_get("/", page)
    app.router.add_get("/data", data)
    app.router.add_get("/chunk", chunk)
    return app


def bound_socket(port: int) -> socket.socket:
    """Return a socket that listens on this machine only.

    Args:
        port: The port; 0: any free one.

    Raises:
        ConfigError: Another program listens there, or this user may not.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(16)
    except OSError as error:
        listener.close()
        remedy = (
            "another program is listening there; stop it, or use another port"
            if error.errno == errno.EADDRINUSE
            else "use another port"
        )
        raise ConfigError(
            f"cannot listen on {HOST}:{port} ({error.strerror}): {remedy}, as in "
            "--port 0 for any free one"
        ) from error
    return listener


async def serve(
    app: web.Application, listener: socket.socket, ready: Callable[[], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        app: Result of `watch_app`.
        listener: Result of `bound_socket`; closed at the end.
        ready: Called once requests are accepted.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    # No access log, because the addresses contain the token.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        ready()
        await stop.wait()
    finally:
        await runner.cleanup()
