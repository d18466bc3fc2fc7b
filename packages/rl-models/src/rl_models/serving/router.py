"""The front end: an HTTP server that admits requests and forwards them to replicas.

Shutdown order: the listening socket, then new requests on open connections (503), then
the wait for requests in progress, then an error to those that are left, then all
connections.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from contextlib import suppress
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from rl_distributed.access.door import is_loopback
from rl_distributed.access.http_app import (
    Handler,
    Route,
    RouteTable,
    current_caller,
    http_logger,
)
from rl_distributed.access.http_thread import IDLE_S
from rl_distributed.access.key_file import KeyFile
from rl_distributed.access.key_routes import key_routes
from rl_distributed.errors import DistributedError, UserError
from rl_distributed.security.audit import audit
from rl_models.serving.access import Access
from rl_models.serving.balancer import Balancer, Endpoint, estimated_tokens
from rl_models.serving.client_response import ClientGoneError
from rl_models.serving.config import ServeConfig
from rl_models.serving.errors import ApiError, error_body
from rl_models.serving.exposition import merged_metrics
from rl_models.serving.fleet import UpdateReport
from rl_models.serving.forward import Call, Forwarder, is_alive
from rl_models.serving.json_body import read_json, too_large
from rl_models.serving.weights_root import WeightsRoot

__all__ = ["Admin", "Router"]

logger = logging.getLogger(__name__)


_PROBE_EVERY_S, _METRICS_S, _CUT_S = 1.0, 5.0, 2.0
_POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
_KEEP_ALIVE_S = 15.0


class Admin(Protocol):
    """The owner of the replicas, as the router needs it."""

    def status(self) -> dict[str, Any]:
        """Return the replicas and their versions, as JSON values."""
        ...

    def update_weights(
        self, path: str, version: int | None = None, *, by: str = "program"
    ) -> UpdateReport:
        """Load other weights on all replicas; blocks."""
        ...

    def report_lost(self, endpoint: Endpoint, reason: str) -> None:
        """Record that a process of a replica is dead; does not block."""
        ...


class Router:
    """Serves HTTP in the event loop that `start` is called in.

    Args:
        config: Limits and deadlines.
        admin: Owns the replicas.
        api_key: The key of clients; None: none is needed.
        weights_key: The key for changing weights; None: they cannot be changed.
        weights_root: Folder of the weights that requests may name.
        replica_key: The key of replicas.
        key_file: Keys with roles; None: there are none.
        tls: How it encrypts; None: it does not.
    """

    def __init__(
        self,
        config: ServeConfig,
        admin: Admin,
        *,
        api_key: str | None,
        weights_key: str | None = None,
        weights_root: WeightsRoot | None = None,
        replica_key: str = "",
        key_file: KeyFile | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.balancer = Balancer()
        self._config = config
        self._admin = admin
        self._access = Access(
            api_key,
            weights_key,
            key_file=key_file,
            is_loopback=is_loopback(config.host),
        )
        self._tls = tls
        self.routes = self._table(key_file)
        """All that can be asked."""
        self._weights_root = weights_root
        self._replica_key = replica_key
        self._is_ending = False
        self._is_hurried = False
        self._probes: dict[Endpoint, asyncio.Task[None]] = {}
        self._began_s = time.time()
        self._num_refused = 0

    async def start(self, listener: socket.socket) -> None:
        """Begin to listen on a socket that is bound."""
        # `max_requests` is the limit. Proxies of the environment are ignored, because
        # replicas are on this machine.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        self._forwarder = Forwarder(
            self.balancer,
            self._session,
            key=self._replica_key,
            deadline_s=self._config.request_deadline_s,
            on_lost=self._lose,
        )
        app = web.Application(
            middlewares=[self._guard], client_max_size=self._config.max_body_bytes
        )
        self.routes.add_to(app)
        # A client that hangs up cancels its request, and thereby the replica's work.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=http_logger(self._access.door),
            keepalive_timeout=IDLE_S,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        self._site = web.SockSite(self._runner, listener, ssl_context=self._tls)
        await self._site.start()

    def _table(self, key_file: KeyFile | None) -> RouteTable:
        return RouteTable(
            [
                *(Route("POST", path, "infer", self._generate) for path in _POSTS),
                Route("GET", "/v1/models", "infer", self._models),
                # Load balancers ask without a key; the answer has no content.
                Route("GET", "/health", None, self._health),
                Route("GET", "/metrics", "view", self._metrics),
                Route("GET", "/rl/status", "view", self._status),
                Route("POST", "/rl/weights", "operate", self._weights),
                *key_routes(key_file),
            ]
        )

    async def stop(self, drain_s: float) -> bool:
        """Stop listening, wait for requests in progress, and end the rest.

        Args:
            drain_s: How long to wait.

        Returns:
            Whether all requests came to their own end.
        """
        self._is_ending = True
        await self._site.stop()
        clean = await self._all_done(drain_s)
        if not clean:
            self._forwarder.cut()
            await self._all_done(_CUT_S, certain=True)
        for probe in self._probes.values():
            probe.cancel()
        await self._runner.cleanup()
        await self._session.close()
        return clean

    def hurry(self) -> None:
        """Have a running `stop` wait no longer for requests in progress."""
        self._is_hurried = True

    async def _all_done(self, deadline_s: float, *, certain: bool = False) -> bool:
        end = time.monotonic() + deadline_s
        while self._forwarder.num_requests and time.monotonic() < end:
            if self._is_hurried and not certain:
                break
            await asyncio.sleep(0.02)
        return self._forwarder.num_requests == 0

    async def add(self, endpoint: Endpoint) -> None:
        """Let a replica take requests, and watch it."""
        await self.balancer.put(endpoint)
        self._probes[endpoint] = asyncio.create_task(self._probe(endpoint))

    def remove(self, endpoint: Endpoint) -> None:
        """Give a replica no more requests."""
        self.balancer.take_out(endpoint)
        probe = self._probes.pop(endpoint, None)
        # The probe itself may be what found the loss.
        if probe is not None and probe is not asyncio.current_task():
            probe.cancel()

    def _lose(self, endpoint: Endpoint, reason: str) -> None:
        if endpoint in self.balancer.endpoints:
            self.remove(endpoint)
            self._admin.report_lost(endpoint, reason)

    async def _probe(self, endpoint: Endpoint) -> None:
        """Notice the death or a hang of a replica that has no requests."""
        deadline_s = self._config.hang_deadline_s
        while await is_alive(self._session, endpoint, deadline_s):
            await asyncio.sleep(_PROBE_EVERY_S)
        self._lose(
            endpoint, f"its server is gone, or does not answer within {deadline_s:g} s"
        )

    # --- requests -----------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        """Check the key, and give every error OpenAI's form."""
        try:
            needs = self.routes.needs(request)
            current_caller.set(self._access.check(request, needs))
            if self._is_ending and needs is not None:
                raise ApiError(503, "The server is shutting down.", "shutdown")
            return await handler(request)
        except ApiError as error:
            problem = error
        except web.HTTPRequestEntityTooLarge:
            problem = too_large(self._config.max_body_bytes)
        except web.HTTPException as error:
            problem = ApiError(
                error.status,
                f"{request.method} {request.path}: {error.reason}. There are "
                f"POST {', '.join(_POSTS)} and /rl/weights, and GET /v1/models, "
                "/health, /metrics and /rl/status.",
                "not_found" if error.status == 404 else "bad_request",
            )
        except ClientGoneError:
            return web.Response(status=499)
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            problem = ApiError(500, "The server failed; see its log.", "server_error")
        self._num_refused += 1
        if problem.status == 413:
            what = f"{request.method} {request.path}"
            self._access.door.counts.refused("too_large", what, request.remote or "")
        return web.json_response(
            error_body(problem), status=problem.status, headers=problem.headers
        )

    async def _json(self, request: web.Request) -> tuple[bytes, dict[str, Any]]:
        config = self._config
        return await read_json(
            request, config.max_body_bytes, config.request_deadline_s
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body, fields = await self._json(request)
        if self._forwarder.num_requests >= self._config.max_requests:
            raise ApiError(
                429,
                f"{self._config.max_requests} requests are in progress; come back "
                "later, or start the server with a larger max_requests.",
                "too_many_requests",
            )
        tokens = estimated_tokens(request.path, fields)
        call = Call("POST", request.path, body, tokens)
        return await self._forwarder.answer(request, call)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return await self._forwarder.answer(request, Call("GET", "/v1/models", b"", 0))

    async def _health(self, request: web.Request) -> web.StreamResponse:
        well = bool(self.balancer.endpoints) and not self._is_ending
        return web.Response(status=200 if well else 503)

    # --- for those who run the server ---------------------------------------------

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        endpoints = self.balancer.endpoints
        texts = await asyncio.gather(*map(self._metrics_of, endpoints))
        found = {
            endpoint.replica: text
            for endpoint, text in zip(endpoints, texts, strict=True)
        }
        own = {
            "rl_serve_replicas": len(endpoints),
            "rl_serve_requests_in_progress": self._forwarder.num_requests,
            "rl_serve_errors": self._num_refused,
            "rl_serve_up_seconds": time.time() - self._began_s,
        }
        counts = self._access.door.counts
        return web.Response(text=merged_metrics(found, own) + counts.exposition())

    async def _metrics_of(self, endpoint: Endpoint) -> str:
        timeout = aiohttp.ClientTimeout(total=_METRICS_S)
        headers = {"Authorization": f"Bearer {self._replica_key}"}
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.get(
                endpoint.url + "/metrics", timeout=timeout, headers=headers
            ) as answer:
                return await answer.text()
        return ""

    async def _status(self, request: web.Request) -> web.StreamResponse:
        status = self._admin.status()
        loads = {endpoint.replica: endpoint for endpoint in self.balancer.endpoints}
        for row in status["replicas"]:
            endpoint = loads.get(row["replica"])
            row["requests"] = endpoint.num_requests if endpoint else 0
            row["tokens"] = endpoint.num_tokens if endpoint else 0
            row["served"] = endpoint.num_served if endpoint else 0
        return web.json_response(status)

    async def _weights(self, request: web.Request) -> web.StreamResponse:
        _, fields = await self._json(request)
        path, version = _update_of(fields)
        update = asyncio.to_thread(self._update, path, version)  # with the caller
        try:
            # Shielded: a client that hangs up must not leave replicas half updated.
            report = await asyncio.shield(asyncio.ensure_future(update))
        except UserError as error:
            raise ApiError(400, str(error), "weights_refused") from error
        except DistributedError as error:
            raise ApiError(500, str(error), "update_failed") from error
        if report.problems:
            failed = "; ".join(f"{n}: {why}" for n, why in report.problems.items())
            raise ApiError(
                500,
                f"{len(report.problems)} replicas could not load version "
                f"{report.version} and take no more requests ({failed}). "
                f"{report.num_updated} serve it.",
                "update_incomplete",
                version=report.version,
                num_updated=report.num_updated,
                failed=sorted(report.problems),
            )
        return web.json_response(
            {"version": report.version, "num_updated": report.num_updated}
        )

    def _update(self, path: str, version: int | None) -> UpdateReport:
        by = str(current_caller.get())
        if self._weights_root is None:
            raise ApiError(
                403,
                "The server takes no weights over HTTP; whoever runs it can start it "
                "with --weights-root.",
                "weights_off",
            )
        try:
            folder = self._weights_root.folder_of(path)
        except ApiError:
            audit("serve.weights", path, outcome="refused", by=by)
            raise
        return self._admin.update_weights(str(folder), version, by=by)


def _update_of(fields: dict[str, Any]) -> tuple[str, int | None]:
    unknown = sorted(set(fields) - {"path", "version"})
    path, version = fields.get("path"), fields.get("version")
    number = version is None or (
        isinstance(version, int) and not isinstance(version, bool)
    )
    if unknown or not isinstance(path, str) or not number:
        raise ApiError(
            400,
            'The body must be {"path": folder, "version": number}, the version being '
            f"optional: got the keys {sorted(fields)}.",
            "bad_request",
        )
    return path, version
