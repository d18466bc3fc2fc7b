"""The address at which Prometheus asks for metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from rl_distributed.access.bound_socket import bound_socket
from rl_distributed.access.door import Door, is_loopback
from rl_distributed.access.http_app import Route, RouteTable, guarded_app
from rl_distributed.access.http_thread import HttpThread
from rl_distributed.access.key_file import KeyFile
from rl_distributed.access.listener_tls import server_context
from rl_distributed.access.roles import Permission
from rl_distributed.logs.logging import get_logger
from rl_distributed.security.tls_files import TlsFiles

__all__ = ["MetricsServer", "scraped_routes"]

_logger = get_logger(__name__)

_ANYBODY: frozenset[Permission] = frozenset(("view",))

Answer = Callable[[str], tuple[str, bytes]]
"""Takes the header `Accept`; returns the content type and the metrics."""


def scraped_routes(answer: Answer, door: Door) -> RouteTable:
    """Return the routes.

    Args:
        answer: Makes the answer, in another thread.
        door: Its counts are among the metrics.
    """

    async def metrics(request: web.Request) -> web.StreamResponse:
        accepts = request.headers.get("Accept", "")
        kind, data = await asyncio.to_thread(answer, accepts)
        is_open = "openmetrics" in kind
        own = door.counts.exposition(is_open=is_open).encode()
        # The end mark of OpenMetrics stands behind everything.
        end = b"# EOF\n" if is_open else b""
        response = web.Response(
            body=data.removesuffix(end) + own + end, headers={"Content-Type": kind}
        )
        response.enable_compression()  # for those who accept it
        return response

    return RouteTable(
        [
            Route("GET", "/metrics", "view", metrics),
            # What scrapes by hand looks here first.
            Route("GET", "/", "view", metrics),
        ]
    )


class MetricsServer:
    """Answers until it is closed.

    Args:
        address: Where to listen.
        port: Port; 0: a free one.
        answer: Makes the answer, in another thread.
        keys_file: Keys that may read; None: none is needed.
        tls: How to encrypt.

    Raises:
        ConfigError: The port is not free, or the address is not this machine's.
        SecurityError: The keys or the certificate cannot be used.
    """

    def __init__(
        self,
        address: str,
        port: int,
        answer: Answer,
        keys_file: str | None,
        tls: bool | TlsFiles,
    ) -> None:
        keys = None if keys_file is None else KeyFile(keys_file)
        if keys is not None:
            keys.check()
        elif not is_loopback(address):
            _logger.warning(
                "anybody who reaches %s reads the metrics of the run: name keys in "
                "logger.sink_settings.prometheus.keys_file",
                address,
            )
        self.door = door = Door(
            "metrics",
            key_file=keys,
            anonymous=_ANYBODY if keys is None else frozenset(),
            is_loopback=is_loopback(address),
        )
        """Also counts what was refused."""
        context = server_context(tls, address)
        place = "logger.sink_settings.prometheus."
        listener = bound_socket(
            address, port, how_to_change=f"{place}port and {place}address"
        )
        self.port = int(listener.getsockname()[1])
        """The port that it listens on."""
        app = guarded_app(door, scraped_routes(answer, door))
        self._server = HttpThread(app, door, listener, tls=context)
        self.url = self._server.url
        """Its address."""

    def close(self) -> None:
        """Stop answering and give back the port."""
        self._server.close()
