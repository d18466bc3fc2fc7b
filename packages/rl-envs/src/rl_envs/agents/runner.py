"""`AgentRunner`: runs tasks of an agent, many at a time, in an event loop of its own.

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| loop (thread) | jobs | results | agents | answers of the model, time limits |
| `finished` (caller) | results | a list | the first result | the loop, its deadline |

Shutdown order: all tasks are cancelled, then the loop stops.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from rl_envs.agents.config import AgentConfig
from rl_envs.agents.functions import RunAgent
from rl_envs.agents.tasks import (
    AgentJob,
    AgentResult,
    AgentReward,
    AgentTask,
)
from rl_envs.errors import AgentError

__all__ = ["AgentRunner", "Reward"]

Reward = Callable[[AgentTask, Any], Awaitable[AgentReward]]
"""From what an agent returned to its reward."""

_CLOSE_S = 5.0
# Results that come close together are handed out together.
_GATHER_S = 0.005
_MOST_RESULTS = 256
_SHOWN_LINES = 6


class AgentRunner:
    """Runs jobs; `close` ends them all.

    Args:
        agent: Runs one task.
        reward: Reads what the agent returned.
        config: Limits.
    """

    def __init__(self, agent: RunAgent, reward: Reward, config: AgentConfig) -> None:
        self._agent, self._reward, self._config = agent, reward, config
        self._results: queue.SimpleQueue[AgentResult] = queue.SimpleQueue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(config.max_at_once)
        self._loop = asyncio.new_event_loop()
        # A thread of its own, as `finished` blocks its caller while agents go on.
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="agents", daemon=True
        )
        self._thread.start()

    def begin(self, jobs: Sequence[AgentJob]) -> None:
        """Run tasks as soon as there is room for them."""
        if jobs:
            self._do(self._begin(jobs))

    def cancel(self, numbers: Sequence[int]) -> None:
        """End tasks, whose results nobody wants."""
        if numbers:
            self._do(self._cancel(numbers))

    def finished(self, wait_s: float) -> list[AgentResult]:
        """Return results that are new; wait a little for the first."""
        found: list[AgentResult] = []
        try:
            found.append(self._results.get(timeout=wait_s))
            while len(found) < _MOST_RESULTS:
                found.append(self._results.get(timeout=_GATHER_S))
        except queue.Empty:
            pass
        return found

    def close(self) -> None:
        """End everything that runs."""
        if self._loop.is_closed():
            return
        self._do(self._cancel(list(self._tasks)))
        self._loop.call_soon_threadsafe(self._loop.stop)
        # An agent may block the loop; its thread is a daemon and ends with the process.
        self._thread.join(_CLOSE_S)
        # A loop that still runs cannot be closed.
        if not self._thread.is_alive():
            self._loop.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(_CLOSE_S)
        except TimeoutError:
            future.cancel()
            raise AgentError(
                "the event loop of the agents does not answer, because an agent blocks "
                "it: await what takes time, or write the agent as a plain function, "
                "which gets a thread of its own"
            ) from None

    # --- in the loop ------------------------------------------------------------------

    async def _begin(self, jobs: Sequence[AgentJob]) -> None:
        for job in jobs:
            self._tasks[job.number] = asyncio.create_task(self._run(job))

    async def _cancel(self, numbers: Sequence[int]) -> None:
        # A job may have ended before the request to cancel it arrived.
        tasks = [self._tasks.pop(n) for n in numbers if n in self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            # Programs are ended within it.
            await asyncio.wait(tasks, timeout=_CLOSE_S / 2)

    async def _run(self, job: AgentJob) -> None:
        async with self._room:
            result = await self._result(job)
        self._results.put(result)
        self._tasks.pop(job.number, None)

    async def _result(self, job: AgentJob) -> AgentResult:
        task = AgentTask(job.messages, job.columns, self._config.model_name)
        limit_s = self._config.time_limit_s
        if job.time_limit_s is not None:
            limit_s = min(limit_s, job.time_limit_s)
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                value = await self._agent(task, job.base_url, job.api_key)
                reward = await self._reward(task, value)
        except BaseException as error:
            # Cancelled from outside: nobody waits for a result. An agent may also await
            # something of its own that was cancelled.
            own = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and own and own.cancelling():
                raise
            # The agent itself may raise TimeoutError, which is its own error.
            if isinstance(error, TimeoutError) and limit.expired():
                said = f"the agent did not end within {limit_s:g} s (time_limit_s)"
                return AgentResult(job.number, "limit", error=said)
            return AgentResult(job.number, "error", error=_told(error))
        return AgentResult(job.number, "done", reward)


def _told(error: BaseException) -> str:
    """Return an exception with the place in the agent that raised it."""
    if isinstance(error, AgentError):
        return str(error)
    # Without the heading, and without the exception, which begins the message.
    lines = traceback.format_exception(error)[1:-1]
    # The user's frames only: those of this package say nothing about the mistake.
    own = [line for line in lines if "/rl_envs/agents/" not in line]
    last = "".join(own[-_SHOWN_LINES:])
    return f"{type(error).__name__}: {error}" + (f"\n{last}" if last else "")
