"""Routes behind a door, as an application of aiohttp.

```
request -> head is HTTP? -> door: key, role, rate, once -> body within limit? -> handler
             | 400            | 401, 403, 429                | 413
             '----------------'------------------------------'---> counted, logged
```
A route says what it needs; one that is not in the table cannot be reached, and what is
no route at all is answered only to somebody who may look.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rl_distributed.access.door import AccessRequest, Caller, Door, Refusal
from rl_distributed.access.replay import NONCE_HEADER, TIME_HEADER
from rl_distributed.access.roles import Permission

__all__ = [
    "Handler",
    "Route",
    "RouteTable",
    "access_request",
    "current_caller",
    "error_response",
    "guarded_app",
    "http_logger",
    "json_object",
    "metrics_route",
    "refusal_headers",
]

_logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SAFE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_NOBODY = Caller()
current_caller: ContextVar[Caller] = ContextVar("rl_access_caller", default=_NOBODY)
"""Sender of the request that is being answered."""


@dataclass(frozen=True)
class Route:
    """A method and a path, and what they need."""

    method: str
    path: str
    needs: Permission | None
    """None: nothing; such as for a load balancer that asks for health."""
    handler: Handler
    is_page: bool = False
    """Whether browsers open it, so that a link on a page of another origin may."""

    @property
    def name(self) -> str:
        """Method and path."""
        return f"{self.method} {self.path}"


class RouteTable:
    """The routes of a listener.

    Args:
        routes: All of them.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)
        self._by_name = {(route.method, route.path): route for route in routes}

    def add_to(self, app: web.Application) -> None:
        """Give an application the routes."""
        for route in self.routes:
            if route.method == "GET":
                app.router.add_get(route.path, route.handler)
            else:
                app.router.add_route(route.method, route.path, route.handler)

    def needs(self, request: web.Request) -> Permission | None:
        """Return what a request needs."""
        route = self.find(request)
        if route is None:
            return "view"
        return route.needs

    def find(self, request: web.Request) -> Route | None:
        """Return the route of a request; None: it is that of no route.

        By the route that was found and not by the path that was sent, because one
        path can be spelled in several ways.
        """
        found = request.match_info
        resource = found.route.resource
        if found.http_exception is not None or resource is None:
            return None
        method = "GET" if request.method == "HEAD" else request.method
        return self._by_name[method, resource.canonical]


def access_request(
    request: web.Request, *, takes_query_key: bool = False, is_page: bool = False
) -> AccessRequest:
    """Return what a door looks at of a request.

    Args:
        request: The request.
        takes_query_key: Whether a key may stand in the address, as `?token=KEY`.
        is_page: Whether its route is a page, which browsers open.
    """
    headers = request.headers
    # Not a frame, whose destination is `iframe`, nor a form, whose method is POST.
    in_tab = (headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest"))
    is_opened = request.method == "GET" and in_tab == ("navigate", "document")
    return AccessRequest(
        what=f"{request.method} {request.path}",
        client=request.remote or "",
        authorization=headers.get("Authorization", ""),
        query_key=request.query.get("token", "") if takes_query_key else "",
        host=headers.get("Host", ""),
        origin=headers.get("Origin"),
        fetch_site=headers.get("Sec-Fetch-Site"),
        opens_page=is_page and is_opened,
        nonce=headers.get(NONCE_HEADER, ""),
        time=headers.get(TIME_HEADER, ""),
    )


def guarded_app(
    door: Door,
    table: RouteTable,
    *,
    max_body_bytes: int = 65_536,
    takes_query_key: bool = False,
    refusal_page: Callable[[Refusal], str] | None = None,
) -> web.Application:
    """Return an application whose routes are behind a door.

    Args:
        door: Admits requests.
        table: The routes.
        max_body_bytes: Largest body of a request.
        takes_query_key: Whether a key may stand in the address, as `?token=KEY`.
        refusal_page: Returns the HTML page that a browser gets in place of JSON when it
            is refused; None: browsers get JSON, too.
    """

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await _answer(request, handler)
        if not response.prepared:
            response.headers.update(SAFE_HEADERS)
        return response

    async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = table.find(request)
        seen = access_request(
            request,
            takes_query_key=takes_query_key,
            is_page=route is not None and route.is_page,
        )
        try:
            caller = door.admit(seen, table.needs(request))
            current_caller.set(caller)
            # Known in advance, so nothing of it is read. A body in chunks is read up
            # to the limit.
            if (request.content_length or 0) > max_body_bytes:
                raise web.HTTPRequestEntityTooLarge(
                    max_size=max_body_bytes, actual_size=request.content_length or 0
                )
            return await handler(request)
        except Refusal as refusal:
            if refusal_page is not None and _is_browser(request):
                return _refusal_as_page(refusal, refusal_page(refusal))
            return refusal_response(refusal)
        except web.HTTPRequestEntityTooLarge:
            door.counts.refused("too_large", seen.what, seen.client)
            return error_response(
                413, "too_large", f"The body has more than {max_body_bytes} bytes."
            )
        except web.HTTPException as error:
            code = HTTPStatus(error.status).phrase.lower().replace(" ", "_")
            return error_response(error.status, code, f"{error.reason}.")
        except Exception:
            _logger.exception("%s %s failed", request.method, request.path)
            return error_response(500, "failed", "The listener failed; see its log.")

    app = web.Application(middlewares=[guarded], client_max_size=max_body_bytes)
    table.add_to(app)
    return app


async def json_object(request: web.Request) -> dict[str, Any]:
    """Return the body of a request, which must be a JSON object.

    Raises:
        web.HTTPException: It is another thing, or of another type.
    """
    # A page of another origin may not send this type unasked.
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(
            reason="Content-Type must be application/json"
        )
    try:
        content = json.loads(await request.read())
    except (ValueError, RecursionError):  # deep nesting recurses
        raise web.HTTPBadRequest(reason="The body is no JSON") from None
    if not isinstance(content, dict):
        raise web.HTTPBadRequest(reason="The body must be a JSON object")
    return content


def error_response(status: int, code: str, message: str) -> web.Response:
    """Return an error as JSON: `{"error": {"code", "message"}}`."""
    body = {"error": {"code": code, "message": message}}
    return web.json_response(body, status=status)


def refusal_response(refusal: Refusal) -> web.Response:
    """Return what the sender of a refused request gets."""
    response = error_response(refusal.status, refusal.reason, str(refusal))
    response.headers.update(refusal_headers(refusal))
    return response


def _is_browser(request: web.Request) -> bool:
    """Return whether a person reads the answer; scripts accept anything."""
    return "text/html" in request.headers.get("Accept", "").lower()


def _refusal_as_page(refusal: Refusal, page: str) -> web.Response:
    return web.Response(
        text=page,
        status=refusal.status,
        content_type="text/html",
        headers=refusal_headers(refusal),
    )


def refusal_headers(refusal: Refusal) -> dict[str, str]:
    """Return the headers of the answer to a refused request."""
    if refusal.retry_after_s is not None:
        return {"Retry-After": str(int(refusal.retry_after_s) + 1)}
    return {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}


def metrics_route(door: Door) -> Route:
    """Return the route of a listener that shows how many requests were refused."""

    async def metrics(request: web.Request) -> web.StreamResponse:
        return web.Response(text=door.counts.exposition())

    return Route("GET", "/metrics", "view", metrics)


def http_logger(door: Door) -> logging.Logger:
    """Return a logger for the server of a listener, which counts malformed heads.

    They never reach the application. Their lines are left out: clients must not be
    able to fill the log with a traceback for each.
    """
    logger = logging.Logger(f"{__name__}.{door.counts.listener}")
    logger.parent = _logger
    # aiohttp logs some malformed heads at this level only.
    logger.setLevel(logging.DEBUG)

    def is_about_the_server(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ConnectionError):
            return False  # the client has hung up
        if not isinstance(error, HttpProcessingError):
            return _logger.isEnabledFor(record.levelno)
        client = str(record.args[0]) if isinstance(record.args, tuple) else ""
        door.counts.refused("malformed", "a malformed request", client)
        return False

    logger.addFilter(is_about_the_server)
    return logger
