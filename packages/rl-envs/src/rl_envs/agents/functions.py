"""From a function of the user's to a coroutine that runs a task.

| parameters | arguments |
|---|---|
| `(task, client)` | `openai.AsyncOpenAI`, or `openai.OpenAI` where it is no coroutine |
| `(task, base_url, api_key)` | the address and the key, for a client of its own |
"""

from __future__ import annotations

import asyncio
import inspect
import string
import threading
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote, unquote

from rl_envs.agents.tasks import AgentTask
from rl_envs.errors import AgentSetupError

__all__ = [
    "CONVERSATION_HEADER",
    "RunAgent",
    "build_agent",
    "conversation",
    "conversation_name",
]

RunAgent = Callable[[AgentTask, str, str], Awaitable[Any]]
"""Runs a task with an address and a key; returns what the agent returns."""

CONVERSATION_HEADER = "X-RL-Conversation"
"""Header by which a request names its conversation; `conversation_name` reads it."""
# Written as they are; clients take headers of ASCII only.
_PLAIN = (
    string.ascii_letters + string.digits + string.punctuation.replace("%", "") + " "
)


def conversation(client: Any, name: str) -> Any:
    """Return a client whose requests belong to a conversation of this name.

    The rewards of a task may have one for each name; see `AgentReward`.

    Args:
        client: An `openai` client.
        name: Such as the role of a sub-agent.
    """
    header = {CONVERSATION_HEADER: quote(name, safe=_PLAIN)}
    return client.with_options(default_headers=header)


def conversation_name(header: str) -> str:
    """Return the name that a header of a request stands for."""
    return unquote(header)


def build_agent(function: Callable[..., Any]) -> RunAgent:
    """Return how to run a function as an agent.

    Args:
        function: See the module; an object with `__call__` as well.

    Raises:
        AgentSetupError: Its parameters cannot be filled, or `openai` is not installed.
    """
    wants_client = _wants_client(function)
    # An object is called by its class's `__call__`, which is what may be a coroutine
    # function.
    call = function if inspect.isroutine(function) else type(function).__call__
    is_async = inspect.iscoroutinefunction(call)
    clients = _Clients(is_async=is_async) if wants_client else None

    async def run(task: AgentTask, base_url: str, api_key: str) -> Any:
        if clients is None:
            given: dict[str, Any] = {"base_url": base_url, "api_key": api_key}
        else:
            given = {"client": clients.make(base_url, api_key)}
        if is_async:
            return await function(task, **given)
        found = await _in_a_thread(lambda: function(task, **given))
        # A plain function may still return a coroutine, such as one behind a decorator.
        return await found if inspect.isawaitable(found) else found

    return run


def _wants_client(function: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise AgentSetupError(
            f"the agent {function!r} cannot be called: {error}"
        ) from error
    # The first parameter is the task, whatever it is called.
    names = {parameter.name for parameter in parameters[1:]}
    needed = {p.name for p in parameters[1:] if p.default is inspect.Parameter.empty}
    if "client" in names and needed <= {"client"}:
        return True
    if names >= {"base_url", "api_key"} and needed <= {"base_url", "api_key"}:
        return False
    shown = ", ".join(parameter.name for parameter in parameters)
    raise AgentSetupError(
        f"an agent must take (task, client) or (task, base_url, api_key): got ({shown})"
    )


async def _in_a_thread(work: Callable[[], Any]) -> Any:
    """Run a function that may block for ever: its thread does not outlive the process.

    A pool of threads would be full of those that never end.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        # The task was cancelled at its limit while the thread went on.
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as raised:
            error = raised
        if isinstance(error, StopIteration):  # a future takes none
            error = RuntimeError("the agent raised StopIteration")
        # The environment may have been shut down while the agent was blocked.
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await future


class _Clients:
    """Clients that share their connections; keys and addresses differ.

    Args:
        is_async: Whether they are for coroutines.
    """

    def __init__(self, *, is_async: bool) -> None:
        try:
            import httpx  # noqa: PLC0415 - optional
            import openai  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise AgentSetupError(
                "an agent with a parameter client needs the package openai; run: pip "
                "install openai, or take base_url and api_key in its place"
            ) from error
        self._class = openai.AsyncOpenAI if is_async else openai.OpenAI
        http = httpx.AsyncClient if is_async else httpx.Client
        # A client of its own per task would load certificates each time. The address is
        # on this machine, so proxies of the environment do not count.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http: Any = http(
            limits=limits, timeout=httpx.Timeout(600.0), trust_env=False
        )

    def make(self, base_url: str, api_key: str) -> Any:
        """Return the client of a task."""
        return self._class(base_url=base_url, api_key=api_key, http_client=self._http)
