"""The page of runs over HTTP.

| route | response |
|---|---|
| `/?token=T` | the page as it is now |
| `/data?seen=N` | what the page shows, where that is newer than version N; else 204 |
| `/chunk?name=C` | answers |
| `/metrics` | how many requests were admitted, and why others were not |

Every request needs the token or a key with the role `viewer`, in its address or as
`Authorization: Bearer T`. On loopback it must be meant for this machine: one that was
sent to another name (DNS rebinding) is refused. A page of another origin is refused
everywhere, but a link on it may open `/`. A browser that is refused gets a page that
says why. No path of a file comes from outside.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Callable

from aiohttp import web

from rl_cli.report.live_runs import LiveRuns
from rl_cli.report.page import render_page
from rl_cli.report.refusal_page import refusal_page
from rl_cli.report.sample_chunks import script_json
from rl_distributed.access.door import Door, FixedKey
from rl_distributed.access.http_app import (
    Route,
    RouteTable,
    guarded_app,
    http_logger,
    metrics_route,
)
from rl_distributed.access.http_thread import IDLE_S
from rl_distributed.access.key_file import KeyFile
from rl_distributed.access.roles import ROLES

__all__ = ["HOST", "serve", "watch_app", "watch_door", "watch_routes"]

HOST = "127.0.0.1"
# Short, as a page that is cut off asks again.
_CLOSE_S = 1.0


def watch_door(
    token: str | None, *, key_file: KeyFile | None = None, is_loopback: bool = True
) -> Door:
    """Return the door of the page.

    Args:
        token: Admits whoever has it; None: only keys of the file do.
        key_file: Keys with roles; None: there are none.
        is_loopback: Whether only programs of this machine reach it.
    """
    fixed = [] if token is None else [FixedKey("token", token, ROLES["viewer"])]
    return Door(
        "watch",
        key_file=key_file,
        fixed=fixed,
        own_host_only=True,
        is_loopback=is_loopback,
    )


def watch_routes(runs: LiveRuns, door: Door) -> RouteTable:
    """Return the routes.

    Args:
        runs: What is shown.
        door: Admits requests.
    """

    async def page(request: web.Request) -> web.Response:
        # In a thread: an update reads files, and other requests must not wait for it.
        version, names, shown = await asyncio.to_thread(runs.page_text)
        live = {"version": version, "poll_s": runs.poll_s}
        data = f'{shown[:-1]},"live":{script_json(live)}}}'
        text = render_page(data, names, may_ask=True)
        return web.Response(text=text, content_type="text/html")

    async def data(request: web.Request) -> web.Response:
        version, _, shown = await asyncio.to_thread(runs.page_text)
        # A page asks every few seconds, and mostly nothing has changed.
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

    return RouteTable(
        [
            Route("GET", "/", "view", page, is_page=True),
            Route("GET", "/data", "view", data),
            Route("GET", "/chunk", "view", chunk),
            metrics_route(door),
        ]
    )


def watch_app(runs: LiveRuns, door: Door) -> web.Application:
    """Return the application.

    Args:
        runs: What it shows.
        door: Admits requests.
    """
    # A key in the address: a browser that opens a page sends no header of its own.
    return guarded_app(
        door,
        watch_routes(runs, door),
        takes_query_key=True,
        refusal_page=refusal_page,
    )


async def serve(
    app: web.Application,
    door: Door,
    listener: socket.socket,
    ready: Callable[[], None],
    *,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        app: From `watch_app`.
        door: Its door.
        listener: A bound socket; it is closed.
        ready: Called when requests are answered.
        tls: How it encrypts; None: it does not.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not by an exception, which would end whatever handler runs at that moment.
        loop.add_signal_handler(number, stop.set)
    # Without a log of requests: their addresses hold the token.
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=http_logger(door),
        keepalive_timeout=IDLE_S,
        shutdown_timeout=_CLOSE_S,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener, ssl_context=tls).start()
        ready()
        await stop.wait()
    finally:
        await runner.cleanup()
