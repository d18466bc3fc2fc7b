"""A server in a thread of its own, for programs that do something else.

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| its thread | requests | answers | requests | `close` |
| `close` | - | - | answers in progress | its deadline |
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading

from aiohttp import web

from rl_distributed.access.bound_socket import url_of
from rl_distributed.access.door import Door
from rl_distributed.access.http_app import http_logger
from rl_distributed.errors import DeadlineExceededError

__all__ = ["IDLE_S", "HttpThread"]

IDLE_S = 30.0
"""A connection without a request for so long is closed, also one without its first."""
_DEADLINE_S = 10.0


class HttpThread:
    """Serves an application until it is closed.

    Args:
        app: The application.
        door: Its door, which counts malformed requests too.
        listener: A bound socket; it is closed with this.
        tls: How it encrypts; None: it does not.
        drain_s: How long `close` waits for answers in progress.

    Raises:
        DeadlineExceededError: It does not start.
    """

    def __init__(
        self,
        app: web.Application,
        door: Door,
        listener: socket.socket,
        *,
        tls: ssl.SSLContext | None = None,
        drain_s: float = 1.0,
    ) -> None:
        self.url = url_of(listener, tls=tls is not None)
        """Its address."""
        self._drain_s = drain_s
        self._listener, self._tls = listener, tls
        self._runner = web.AppRunner(
            app,
            # Otherwise the handler of a client that disconnects while sending its
            # body would run to its end.
            handler_cancellation=True,
            # Without a log of requests: their addresses may hold keys.
            access_log=None,
            logger=http_logger(door),
            keepalive_timeout=IDLE_S,
            shutdown_timeout=drain_s,
        )
        self._loop = asyncio.new_event_loop()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(
            target=self._work, name=f"http {door.counts.listener}", daemon=True
        )
        self._thread.start()
        if not self._is_ready.wait(_DEADLINE_S):
            raise DeadlineExceededError(
                f"the server at {self.url} did not start within {_DEADLINE_S:g} s"
            )

    def close(self) -> None:
        """Stop listening and end; may be called more than once."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self._drain_s + _DEADLINE_S)
        self._listener.close()

    def _work(self) -> None:
        self._loop.run_until_complete(self._start())
        self._is_ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _start(self) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener, ssl_context=self._tls).start()
