"""`run_agents`: runs agents whose requests a function answers, in place of a policy.

```
tasks -> agents of an environment --requests--> 127.0.0.1 -> answer(question) -> reply
              |                                                                   |
              +--results                    <----- chat completions --------------+
```

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| `run_agents` (caller) | results | a list | all tasks | the environment, its deadline |
| listener (thread) | requests | replies | `answer` | `answer`, the end of the run |

Needs `rl-distributed[http]`.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from rl_distributed.access.bound_socket import bound_socket
from rl_distributed.access.door import Door, FixedKey
from rl_distributed.access.http_app import (
    Route,
    RouteTable,
    current_caller,
    error_response,
    guarded_app,
    json_object,
)
from rl_distributed.access.http_thread import HttpThread
from rl_distributed.access.roles import ROLES
from rl_envs.agents.functions import CONVERSATION_HEADER, conversation_name
from rl_envs.agents.tasks import (
    MAIN,
    AgentHost,
    AgentJob,
    AgentLimits,
    AgentResult,
    agent_limits_of,
)
from rl_envs.errors import AgentError, AgentSetupError
from rl_envs.interfaces import MessageLog

__all__ = [
    "AgentQuestion",
    "AgentReply",
    "PlayedTask",
    "UnansweredError",
    "run_agents",
]

_MOST_BYTES = 16 << 20
_POLL_S = 0.2
# For tasks that end by their time limit, and the start of what they need.
_GRACE_S = 60.0


@dataclass(frozen=True)
class AgentQuestion:
    """A request of an agent."""

    task: int
    """Index of its task."""
    number: int
    """How many requests of the task came before it."""
    conversation: str
    """Name of its conversation; `main` without one."""
    fields: Mapping[str, Any]
    """The body of the request, in OpenAI's form."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far."""
        messages: list[dict[str, Any]] = self.fields["messages"]
        return messages


@dataclass(frozen=True)
class AgentReply:
    """What the agent is told."""

    message: Mapping[str, Any]
    """The message, with `content` and perhaps `tool_calls`."""
    is_cut: bool = False
    """Whether it was cut off at a limit of tokens."""
    num_tokens: int | None = None
    """Its length; None: unknown."""
    time_s: float = 0.0
    """Seconds that it took."""

    @classmethod
    def of(cls, text: str) -> AgentReply:
        """Return a reply of text alone."""
        return cls({"role": "assistant", "content": text})


@dataclass
class PlayedTask:
    """A task, once its agent has ended."""

    result: AgentResult
    exchanges: list[tuple[AgentQuestion, AgentReply]] = field(default_factory=list)
    """What was asked and replied, in order."""


class UnansweredError(AgentError):
    """Raised by `answer`: this request has no reply, and others go on."""


Answer = Callable[[AgentQuestion], Awaitable[AgentReply]]


def run_agents(
    environment: AgentHost,
    tasks: Sequence[tuple[MessageLog, Mapping[str, Any]]],
    answer: Answer,
) -> list[PlayedTask]:
    """Run an agent on each task, answering its requests by a function.

    Args:
        environment: Such as an `AgentEnvironment`; it remains the caller's to shut
            down.
        tasks: Initial messages of each task, and the columns of its row.
        answer: Called for each request, in the event loop of the listener; many may
            wait at the same time.

    Returns:
        One entry per task, in their order.

    Raises:
        AgentError: Tasks have not ended in time.
        AgentSetupError: The environment runs no agents.
        Exception: What `answer` has raised, which ends the run, unless it is an
            `UnansweredError`, which the agent is told of.
    """
    limits = agent_limits_of(environment)
    if limits is None:
        raise AgentSetupError(
            "run_agents needs an environment that runs agents: "
            f"{type(environment).__name__} judges answers instead; use its step"
        )
    if not tasks:
        return []
    stand_in = _StandIn(answer, len(tasks), limits)
    try:
        return stand_in.run(environment, tasks)
    finally:
        stand_in.close()


class _StandIn:
    """Listens for requests of agents; each task has a key of its own."""

    def __init__(self, answer: Answer, num_tasks: int, limits: AgentLimits) -> None:
        self._answer, self._limits = answer, limits
        self._keys = [secrets.token_urlsafe(24) for _ in range(num_tasks)]
        self._exchanges: list[list[tuple[AgentQuestion, AgentReply]]] = [
            [] for _ in range(num_tasks)
        ]
        self._num_asked = [0] * num_tasks
        self._failure: Exception | None = None
        door = Door(
            "agents",
            fixed=[
                FixedKey(str(number), key, ROLES["user"])
                for number, key in enumerate(self._keys)
            ],
        )
        table = RouteTable(
            [
                Route("POST", "/v1/chat/completions", "infer", self._chat),
                Route("GET", "/v1/models", "infer", self._models),
            ]
        )
        self._server = HttpThread(
            guarded_app(door, table, max_body_bytes=_MOST_BYTES),
            door,
            bound_socket("127.0.0.1", 0, how_to_change="host"),
        )

    def run(
        self,
        environment: AgentHost,
        tasks: Sequence[tuple[MessageLog, Mapping[str, Any]]],
    ) -> list[PlayedTask]:
        jobs = [
            AgentJob(
                number,
                [dict(message) for message in messages],
                columns,
                f"{self._server.url}/v1",
                self._keys[number],
            )
            for number, (messages, columns) in enumerate(tasks)
        ]
        rounds = math.ceil(len(jobs) / self._limits.max_at_once)
        deadline_s = rounds * self._limits.time_limit_s + _GRACE_S
        end_s = time.monotonic() + deadline_s
        found: dict[int, AgentResult] = {}
        begin: list[AgentJob] = jobs
        while len(found) < len(jobs):
            poll = environment.poll_agents(begin, [], _POLL_S)
            begin = []
            found |= {result.number: result for result in poll.results}
            missing = [number for number in range(len(jobs)) if number not in found]
            if self._failure is not None:
                environment.poll_agents([], missing, 0.0)
                raise self._failure
            if missing and time.monotonic() > end_s:
                environment.poll_agents([], missing, 0.0)
                raise AgentError(
                    f"{len(missing)} of {len(jobs)} tasks did not end within "
                    f"{deadline_s:g} s, for {rounds} rounds of time_limit_s="
                    f"{self._limits.time_limit_s:g} s: their environment is stuck"
                )
        return [
            PlayedTask(found[number], self._exchanges[number])
            for number in range(len(jobs))
        ]

    def close(self) -> None:
        self._server.close()

    # --- in the event loop ------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.StreamResponse:
        model = {
            "id": self._limits.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "rl",
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        task = int(current_caller.get().name)
        fields = await json_object(request)
        problem = _problem(fields, self._limits.model_name)
        if problem is None and self._num_asked[task] >= self._limits.max_calls:
            problem = f"The task made {self._limits.max_calls} requests (max_calls)."
        if problem is not None:
            return error_response(400, "bad_request", problem)
        header = request.headers.get(CONVERSATION_HEADER, MAIN)
        conversation = conversation_name(header)
        question = AgentQuestion(task, self._num_asked[task], conversation, fields)
        self._num_asked[task] += 1
        try:
            reply = await self._answer(question)
        except asyncio.CancelledError:
            raise
        except UnansweredError as error:
            return error_response(400, "no_answer", str(error))
        except Exception as error:
            self._failure = self._failure or error
            # Not 5xx, which clients take for a reason to ask again.
            return error_response(400, "no_answer", "The run has ended.")
        self._exchanges[task].append((question, reply))
        if not fields.get("stream"):
            return web.json_response(_completion(reply, self._limits.model_name))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in _events(reply, fields, self._limits.model_name):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _problem(fields: Mapping[str, Any], model: str) -> str | None:
    """Return what is wrong with a request, or None."""
    messages = fields.get("messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) for message in messages)
    ):
        return "messages must be a list with at least one message."
    if fields.get("model") != model:
        return f"model must be {model!r}: got {fields.get('model')!r:.80}."
    if fields.get("n", 1) not in (1, None):
        return f"n must be 1 where no policy answers: got {fields['n']!r:.80}."
    return None


def _completion(reply: AgentReply, model: str) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", **reply.message},
        "finish_reason": _finish_reason(reply),
    }
    return {
        **_head(model, "chat.completion"),
        "choices": [choice],
        "usage": _usage(reply),
    }


def _events(
    reply: AgentReply, fields: Mapping[str, Any], model: str
) -> list[dict[str, Any]]:
    """Return a reply as the events of a stream, in one piece."""
    head = _head(model, "chat.completion.chunk")
    calls = [
        {"index": index, **call}
        for index, call in enumerate(reply.message.get("tool_calls") or ())
    ]
    delta = {"role": "assistant", "content": reply.message.get("content")}
    if calls:
        delta["tool_calls"] = calls
    first = {"index": 0, "delta": delta, "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": _finish_reason(reply)}
    events: list[dict[str, Any]] = [{**head, "choices": [one]} for one in (first, last)]
    if (fields.get("stream_options") or {}).get("include_usage"):
        events.append({**head, "choices": [], "usage": _usage(reply)})
    return events


def _head(model: str, kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-0", "object": kind, "created": 0, "model": model}


def _finish_reason(reply: AgentReply) -> str:
    if reply.message.get("tool_calls"):
        return "tool_calls"
    return "length" if reply.is_cut else "stop"


def _usage(reply: AgentReply) -> dict[str, int]:
    # Prompts are not counted here, as there is no tokenizer.
    count = reply.num_tokens or 0
    return {"prompt_tokens": 0, "completion_tokens": count, "total_tokens": count}
