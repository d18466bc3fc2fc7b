"""`PolicyServer`: the HTTP address at which agents reach the policy.

It listens on 127.0.0.1, in a thread of the driver.

| route | admits |
|---|---|
| `POST /v1/chat/completions`, `GET /v1/models` | the key of a task, to that task only |
| `GET /metrics` | keys with the role `viewer`, to the counts of refused requests |

Agents run programs that a model wrote, so a key of a task opens nothing else, and a key
with a role does not use the policy.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from rl_algorithms.rollout.agents.model import ServedModel
from rl_algorithms.rollout.agents.session import AgentSession, ended
from rl_distributed.access.door import Caller, Door, Refusal
from rl_distributed.access.http_app import (
    Route,
    RouteTable,
    access_request,
    http_logger,
    metrics_route,
    refusal_headers,
)
from rl_distributed.access.key_file import KeyFile, default_key_file
from rl_distributed.access.refusals import shown_text
from rl_distributed.access.roles import Permission
from rl_distributed.errors import ConfigError
from rl_distributed.logs.logging import get_logger
from rl_models.serving.access import key_digest, token_digest
from rl_models.serving.errors import ApiError, error_body
from rl_models.serving.json_body import read_json, too_large
from rl_models.serving.openai_answer import OpenAIAnswer
from rl_models.serving.openai_request import CHAT

__all__ = ["PolicyServer"]

_logger = get_logger(__name__)

_MOST_BYTES = 16 << 20
_BODY_S = 60.0
_START_S = 10.0
_MOST_ENDED = 1 << 14
_BACKLOG = 1024
_VERSION_HEADER = "x-rl-weight-version"
_TASK = Caller("task", permissions=frozenset(("infer",)))

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PolicyServer:
    """Serves sessions until it is closed.

    Args:
        model: The policy.
        key_file: Keys of those who may read `/metrics`; None: the file that all
            listeners of this user take unless another one is named.
    """

    def __init__(self, model: ServedModel, key_file: KeyFile | None = None) -> None:
        self._model = model
        viewers = _default_keys() if key_file is None else key_file
        self.door = Door("agents", key_file=viewers, own_host_only=True)
        """Admits those who look, and counts all requests."""
        # A door of its own, so that no key of the file is one of an agent.
        self._tasks_door = Door(
            "agents", issued=self._holder, own_host_only=True, counts=self.door.counts
        )
        self.routes = RouteTable(
            [
                Route("POST", CHAT, "infer", self._chat),
                Route("GET", "/v1/models", "infer", self._models),
                metrics_route(self.door),
            ]
        )
        """What it answers."""
        self._sessions: dict[bytes, AgentSession] = {}
        # Bounded, as a long run has many tasks; an older key only gets a less precise
        # error.
        self._ended: deque[bytes] = deque(maxlen=_MOST_ENDED)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="agent-server", daemon=True
        )
        self._thread.start()
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)
        self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        """Base URL for clients."""
        self._run(self._start(listener))
        _logger.info(
            "agents reach the policy at %s; /metrics there counts refused requests, "
            "for viewers of the keys in %s",
            self.base_url.removesuffix("/v1"),
            "no file" if viewers is None else viewers.path,
        )

    def open(self, session: AgentSession) -> None:
        """Answer requests with the key of a session."""
        # Calls reach the loop in order, so `_open` runs before any `_end` of the
        # session.
        self._loop.call_soon_threadsafe(self._open, session)

    def end(self, session: AgentSession, then: Callable[[], None]) -> None:
        """Reject further requests of a session, and end pending ones.

        Args:
            session: The session.
            then: Called in the server's thread, once the recording is final.
        """
        self._loop.call_soon_threadsafe(self._end, session, then)

    def close(self) -> None:
        """End all sessions and stop listening; idempotent."""
        if self._loop.is_closed():
            return
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)
        # A loop that still runs cannot be closed; its thread is a daemon.
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, work: Any) -> None:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            future.result(_START_S)
        except TimeoutError:
            future.cancel()
            raise ConfigError(
                f"the address for agents was not ready within {_START_S:g} s: the "
                "machine is overloaded; try again"
            ) from None

    # --- in the event loop ------------------------------------------------------------

    async def _start(self, listener: socket.socket) -> None:
        app = web.Application(middlewares=[self._guard], client_max_size=_MOST_BYTES)
        self.routes.add_to(app)
        # A client that disconnects cancels its handler, but the answer is still sampled
        # and kept for a retry.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=http_logger(self.door),
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=_BACKLOG).start()

    async def _stop(self) -> None:
        for session in list(self._sessions.values()):
            self._end(session, lambda: None)
        await self._runner.cleanup()

    def _open(self, session: AgentSession) -> None:
        self._sessions[key_digest(session.key)] = session

    def _end(self, session: AgentSession, then: Callable[[], None]) -> None:
        digest = key_digest(session.key)
        if self._sessions.pop(digest, None) is not None:
            self._ended.append(digest)
        session.close()
        then()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        """Check host, origin and key, and convert every error to OpenAI's format."""
        try:
            self._admit(request)
            return await handler(request)
        except ApiError as error:
            problem = error
        except web.HTTPRequestEntityTooLarge:
            problem = too_large(_MOST_BYTES)
        except web.HTTPException as error:
            problem = ApiError(
                error.status,
                f"{request.method} {request.path}: {error.reason}. There are POST "
                f"{CHAT} and GET /v1/models; a client of the Responses interface must "
                "be set to chat completions.",
                "not_found" if error.status == 404 else "bad_request",
            )
        except ConnectionError:
            # The client is gone: nobody reads the answer, and there is nothing to log.
            return web.Response(status=499)
        except Exception:
            _logger.exception("%s %s failed", request.method, request.path)
            problem = ApiError(500, "The run failed; see its log.", "server_error")
        if problem.status == 413:
            what = f"{request.method} {request.path}"
            self.door.counts.refused("too_large", what, request.remote or "")
        return web.json_response(
            error_body(problem), status=problem.status, headers=problem.headers
        )

    def _admit(self, request: web.Request) -> None:
        """Admit a request by the door of its route.

        Raises:
            ApiError: It is refused.
        """
        seen, route = access_request(request), self.routes.find(request)
        # An agent whose client asks for another interface must read which one there is.
        is_lost_agent = route is None and self._holder(seen.key) is not None
        needs: Permission | None = "infer" if is_lost_agent else "view"
        if route is not None:
            needs = route.needs
        try:
            (self._tasks_door if needs == "infer" else self.door).admit(seen, needs)
        except Refusal as refusal:
            raise _told(refusal, needs, seen.host) from None

    def _holder(self, key: str) -> Caller | None:
        digest = key_digest(key)
        # An ended task is told so by the handler, rather than that its key is unknown.
        return _TASK if digest in self._sessions or digest in self._ended else None

    def _session(self, request: web.Request) -> AgentSession:
        """Return the session of an admitted request.

        Raises:
            ApiError: It has ended.
        """
        session = self._sessions.get(token_digest(request))
        if session is None:
            raise ended()
        return session

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {
            "id": self._model.limits.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "rl",
            "max_model_len": self._model.row_limit,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        body, fields = await read_json(request, _MOST_BYTES, _BODY_S)
        self._model.check_name(fields)
        asked = session.ask(fields, body, request.headers)
        # Between `ask` and this nothing else runs, so a retry finds it counted.
        asked.join()
        try:
            # Shielded, because a retry of the request takes the answer over.
            answer = await asyncio.shield(asked.task)
        except asyncio.CancelledError:
            if asked.task.cancelled():
                # The session ended, not the client: it still waits for an answer.
                raise ended() from None
            asked.leave()
            raise
        # Marked before it is sent: by the time the last write returns, the agent may
        # have ended and its recording been read.
        for one in asked.answers:
            one.is_given = True
        try:
            return await _send(request, answer, stream=bool(fields.get("stream")))
        except (ConnectionError, asyncio.CancelledError):
            asked.leave()
            raise


def _default_keys() -> KeyFile | None:
    try:
        return KeyFile(default_key_file())
    except RuntimeError:
        # A user without a home folder, as in a container: nobody may look.
        return None


def _told(refusal: Refusal, needs: Permission | None, host: str) -> ApiError:
    """Return the error of a refused request, in the words of clients of a model."""
    message, code = str(refusal), refusal.reason
    if refusal.status == 401 and needs == "infer":
        code = "invalid_api_key"
        message = (
            "The API key is missing or is that of no task; send the one that the "
            "agent was given (api_key, OPENAI_API_KEY) as 'Authorization: Bearer KEY'."
        )
    elif refusal.reason == "other_host":
        code = "forbidden_host"
        message = (
            f"The address of a run for agents is a loopback address, and was asked for "
            f"as {shown_text(host)!r}; call it 127.0.0.1 or localhost."
        )
    return ApiError(refusal.status, message, code, headers=refusal_headers(refusal))


async def _send(
    request: web.Request, answer: OpenAIAnswer, *, stream: bool
) -> web.StreamResponse:
    """Write an answer; raise where the client has gone before its end."""
    headers = {_VERSION_HEADER: str(answer.version)}
    if not stream:
        response: web.StreamResponse = web.json_response(
            answer.whole(), headers=headers
        )
        await response.prepare(request)
    else:
        response = web.StreamResponse(
            headers={**headers, "Content-Type": "text/event-stream"}
        )
        await response.prepare(request)
        for event in _events(answer):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _events(answer: OpenAIAnswer) -> list[dict[str, Any]]:
    for choice in answer.choices:
        choice.num_sent = 0  # it may be sent for the second time
    found = [*answer.opening_events()]
    found += [
        event
        for index in range(len(answer.choices))
        if (event := answer.event(index)) is not None
    ]
    usage = answer.usage_event()
    return found if usage is None else [*found, usage]
