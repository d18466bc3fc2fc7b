"""Forwarding of a request to a replica, and to another one if that dies.

```
request -> least loaded replica --answer--> client
              | died before the first byte: next replica, at most three in all
              | died later: the stream ends with an error event
              | deadline or shutdown: likewise, or status 504 or 503
```
A replica sends the first byte once it has a token. Until then the client has seen
nothing, so the request can be sent again without being answered twice.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from rl_models.serving.balancer import Balancer, Endpoint
from rl_models.serving.client_response import Outgoing
from rl_models.serving.engine_failure import (
    REQUEST_ID_HEADER,
    EngineFailure,
    is_failure,
)
from rl_models.serving.errors import ApiError, error_body

__all__ = ["REPLICA_HEADER", "VERSION_HEADER", "Call", "Forwarder", "is_alive"]

VERSION_HEADER, REPLICA_HEADER = "x-rl-weight-version", "x-rl-replica"
_MAX_ATTEMPTS = 3
_CONNECT_S, _LOOK_S = 5.0, 2.0
_CLIENT_ERRORS = (aiohttp.ClientError, TimeoutError)


@dataclass(frozen=True)
class Call:
    """A request as a replica gets it."""

    method: str
    path: str
    body: bytes
    tokens: int
    """Its estimated work."""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    """Names it in logs and to the client."""


class _ReplicaLostError(Exception):
    """A replica did not answer to the end."""


class Forwarder:
    """Sends requests to replicas and their answers to clients.

    Args:
        balancer: Chooses the replica.
        session: Connections to the replicas.
        key: The API key of replicas.
        deadline_s: How long a request may take in all.
        on_lost: Called with a replica that is dead, and why.
    """

    def __init__(
        self,
        balancer: Balancer,
        session: aiohttp.ClientSession,
        *,
        key: str,
        deadline_s: float,
        on_lost: Callable[[Endpoint, str], None],
    ) -> None:
        self._balancer = balancer
        self._session = session
        self._headers = {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
        }
        self._deadline_s = deadline_s
        self._on_lost = on_lost
        self._limits: set[asyncio.Timeout] = set()
        self._is_cut = False
        self.num_requests = 0
        """Number of requests in progress, including those that wait for a replica."""

    def cut(self) -> None:
        """End all requests in progress now, with an error."""
        self._is_cut = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            # A timeout that has expired cannot be rescheduled.
            with suppress(RuntimeError):
                limit.reschedule(now)

    async def answer(self, request: web.Request, call: Call) -> web.StreamResponse:
        """Answer a request by a replica, or by an error."""
        outgoing = Outgoing(request)
        self.num_requests += 1
        try:
            return await self._within_deadline(call, outgoing)
        except ApiError as error:
            return await outgoing.fail(error)
        finally:
            self.num_requests -= 1

    async def _within_deadline(
        self, call: Call, outgoing: Outgoing
    ) -> web.StreamResponse:
        limit = asyncio.timeout(self._deadline_s)
        try:
            async with limit:
                self._limits.add(limit)
                try:
                    return await self._try_replicas(call, outgoing)
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            raise self._late() from None

    def _late(self) -> ApiError:
        if self._is_cut:
            return ApiError(
                503, "The server is shutting down; send the request again.", "shutdown"
            )
        return ApiError(
            504,
            f"The request did not end within {self._deadline_s:g} s; ask for fewer "
            "tokens, or start the server with a larger request_deadline_s.",
            "deadline_exceeded",
        )

    async def _try_replicas(self, call: Call, outgoing: Outgoing) -> web.StreamResponse:
        lost: set[Endpoint] = set()
        reason = ""
        for _ in range(_MAX_ATTEMPTS):
            endpoint = await self._balancer.wait_for_one(lost)
            if endpoint is None:
                raise ApiError(
                    503, "No replica is left; see the server's log.", "no_replica"
                )
            try:
                with self._balancer.load(endpoint, call.tokens):
                    return await self._attempt(endpoint, call, outgoing)
            except _ReplicaLostError as error:
                reason = str(error)
                lost.add(endpoint)
                await self._look_after(endpoint, reason)
            if outgoing.has_begun:
                raise ApiError(
                    502,
                    f"Replica {endpoint.replica} was lost in the middle of this answer "
                    f"({reason}); what came before is valid. Send the request again.",
                    "replica_lost",
                )
        raise ApiError(
            502,
            f"{_MAX_ATTEMPTS} replicas were lost with this request, the last one "
            f"because {reason}.",
            "replica_lost",
        )

    async def _look_after(self, endpoint: Endpoint, reason: str) -> None:
        """Report a replica, unless only a connection was lost."""
        if not await is_alive(self._session, endpoint, _LOOK_S):
            self._on_lost(endpoint, reason)

    async def _attempt(
        self, endpoint: Endpoint, call: Call, outgoing: Outgoing
    ) -> web.StreamResponse:
        # No limit of its own on the answer: the deadline of the request covers it, and
        # the first token may take long.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        try:
            async with self._session.request(
                call.method,
                endpoint.url + call.path,
                data=call.body,
                headers={**self._headers, REQUEST_ID_HEADER: call.request_id},
                timeout=timeout,
            ) as answer:
                # Before anything is passed on, so that another replica can answer.
                if answer.status >= 500:
                    await self._check_engine(endpoint)
                headers = _passed_on(answer, endpoint)
                headers[REQUEST_ID_HEADER] = call.request_id
                what = f"{call.method} {call.path}"
                failure = EngineFailure(call.request_id, what, endpoint.replica)
                if answer.content_type == "text/event-stream":
                    return await _stream(answer, outgoing, headers, failure)
                data = await answer.read()
        except _CLIENT_ERRORS as error:
            said = str(error) or type(error).__name__
            raise _ReplicaLostError(f"its connection failed: {said}") from error
        if is_failure(answer.status):
            told = failure.report(answer.status, data)
            data = json.dumps(error_body(told)).encode()
            headers["Content-Type"] = "application/json"
        return web.Response(body=data, status=answer.status, headers=headers)

    async def _check_engine(self, endpoint: Endpoint) -> None:
        """Raise if an error comes from a dead engine and not from the request."""
        if not await is_alive(self._session, endpoint, _LOOK_S):
            raise _ReplicaLostError("its engine is dead")


async def is_alive(
    session: aiohttp.ClientSession, endpoint: Endpoint, deadline_s: float
) -> bool:
    """Return whether a replica reports to be healthy, on a new connection."""
    # A pooled connection may be broken although the server is well.
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    headers = {"Connection": "close"}
    try:
        async with session.get(
            endpoint.url + "/health", timeout=timeout, headers=headers
        ) as answer:
            return answer.status == 200
    except _CLIENT_ERRORS:
        return False


async def _stream(
    answer: aiohttp.ClientResponse,
    outgoing: Outgoing,
    headers: Mapping[str, str],
    failure: EngineFailure,
) -> web.StreamResponse:
    """Pass on whole events only, so that an error after them is a valid event."""
    pending, last = b"", b""
    async for chunk in answer.content.iter_any():
        whole, mark, pending = (pending + chunk).rpartition(b"\n\n")
        if mark:
            await outgoing.write(failure.checked(whole) + mark, headers)
            last = whole
    # Only this mark shows that a stream is complete.
    if not last.endswith(b"data: [DONE]"):
        raise _ReplicaLostError("its stream broke off")
    return await outgoing.finish()


def _passed_on(answer: aiohttp.ClientResponse, endpoint: Endpoint) -> dict[str, str]:
    headers = {
        "Content-Type": answer.headers.get("Content-Type", "application/json"),
        REPLICA_HEADER: str(endpoint.replica),
    }
    if VERSION_HEADER in answer.headers:
        headers[VERSION_HEADER] = answer.headers[VERSION_HEADER]
    return headers
