"""`EnvironmentPool`: conversations that never wait for a batch.

```
step(name, conversation) --> Lane of the environment --> its answer
```
`lane` has the queue and the instances, `slots` who waits for room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeAlias

from rl_distributed.errors import ConfigError, DeadlineExceededError
from rl_distributed.process.closing import close_after
from rl_envs.environment_pool.lane import Lane, LaneConfig
from rl_envs.interfaces import EnvironmentReturn, MessageLog, log_as_text
from rl_envs.registry import EnvironmentSpec

__all__ = ["EnvironmentPool"]

Result: TypeAlias = EnvironmentReturn[Any]


class EnvironmentPool:
    """Judges conversations one by one, with several instances of each environment.

    Each environment has processes of its own, a bound on the conversations that it
    holds, and counts. A conversation is judged as soon as an instance is free, together
    with those that wait at that moment. A worker that dies or exceeds its deadline is
    replaced while the others go on, and its conversations are tried again, each alone;
    one that ends every worker it meets fails by itself. Only `role` and `content` of
    messages travel.

    Args:
        environments: By the name for `step`: a registered name, a class, an
            environment, a reward function, or an `EnvironmentSpec`.
        config: How each runs; None: `LaneConfig()`.
        configs: How some run, by name, in place of `config`.

    Raises:
        UserError: A name or settings are wrong.
        WorkerStartError: A worker does not come up.
    """

    def __init__(
        self,
        environments: Mapping[str, Any],
        config: LaneConfig | None = None,
        *,
        configs: Mapping[str, LaneConfig] | None = None,
    ) -> None:
        own = dict(configs or {})
        if not environments:
            raise ConfigError("environments must be at least one: got none")
        unknown = sorted(set(own) - set(environments))
        if unknown:
            raise ConfigError(
                f"configs must be for environments of the pool: got {unknown[0]!r}; "
                f"they are {', '.join(environments)}"
            )
        specs = {
            name: env if isinstance(env, EnvironmentSpec) else EnvironmentSpec.of(env)
            for name, env in environments.items()
        }
        self._lanes: dict[str, Lane] = {}
        with ExitStack() as undo:
            undo.callback(self.close)
            for name, spec in specs.items():
                lane_config = own.get(name, config or LaneConfig())
                self._lanes[name] = Lane(spec, lane_config)
            undo.pop_all()

    def submit(
        self,
        name: str,
        message_log: MessageLog,
        metadata: Any,
        *,
        timeout_s: float | None = None,
    ) -> Future[Result]:
        """Let a conversation be judged; wait while the environment holds too many.

        Args:
            name: Which environment.
            message_log: The conversation, which ends with the response.
            metadata: Columns of the data set in the first turn, then what the last turn
                returned.
            timeout_s: Seconds to wait for room; None: no limit.

        Returns:
            The answer to be, of one row: `EnvironmentReturn` with B = 1, or what the
            environment raised.

        Raises:
            ConfigError: There is no environment of that name.
            DeadlineExceededError: There was no room in time.
            WorkerDiedError: The pool is closed.
        """
        lane = self._lane(name)
        ticket = lane.slots.take()
        try:
            ticket.result(timeout_s)
        except TimeoutError:
            lane.slots.abandon(ticket)
            raise DeadlineExceededError(
                f"environment {name!r} held {lane.slots.taken} conversations for "
                f"{timeout_s:g} s, and had no room for another: take more workers, or "
                "raise max_pending"
            ) from None
        return lane.put(log_as_text(message_log), metadata)

    async def step(self, name: str, message_log: MessageLog, metadata: Any) -> Result:
        """Judge a conversation; the loop goes on meanwhile.

        Args:
            name: Which environment.
            message_log: The conversation, which ends with the response.
            metadata: As for `submit`.

        Raises:
            ConfigError: There is no environment of that name.
            WorkerDiedError: The pool is closed, or the workers that judge the
                conversation die.
            DistributedError: As the environment raised it, or its worker failed.
        """
        lane = self._lane(name)
        ticket = lane.slots.take()
        try:
            await asyncio.wrap_future(ticket)
        except asyncio.CancelledError:
            lane.slots.abandon(ticket)
            raise
        return await asyncio.wrap_future(lane.put(log_as_text(message_log), metadata))

    def metrics(self) -> dict[str, float]:
        """Return what was counted since the start, as `<environment>/<count>`.

        `rows` and `failed_rows`; `calls` and `rows_per_call`; `lost_workers` that died
        or hung; `wait_s_mean` and `wait_s_max`, what rows waited for an instance;
        `call_s_mean` and `call_s_max`; `pending` conversations now, and `pending_max`.
        """
        return {
            f"{name}/{count}": value
            for name, lane in self._lanes.items()
            for count, value in lane.metrics().items()
        }

    def close(self) -> None:
        """End all workers; conversations that wait fail. It may be called again."""
        with ExitStack() as closing:
            for lane in self._lanes.values():
                closing.callback(lane.close)

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        close_after(error, self.close, "environment pool")

    def _lane(self, name: str) -> Lane:
        try:
            return self._lanes[name]
        except KeyError:
            raise ConfigError(
                f"the pool has no environment {name!r}; it has {', '.join(self._lanes)}"
            ) from None
