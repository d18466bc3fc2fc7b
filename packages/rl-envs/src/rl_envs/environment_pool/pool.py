"""`EnvironmentPool`: scores conversations without collecting them into batches.

```
step(name, conversation) --> Lane of the environment --> its reply
```
`lane` has the queue and the instances, `slots` the callers waiting for capacity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
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
    """Scores conversations one by one, with several instances of each environment.

    Each environment has its own processes, its own limit on pending conversations, and
    its own metrics. A conversation is scored as soon as an instance is free, together
    with the others waiting at that moment. A worker that dies or exceeds its deadline
    is replaced while the others continue, and its conversations are retried one by one;
    a conversation that kills every worker fails alone. Only the `role` and `content`
    of messages are sent.

    Args:
        environments: By the name used in `step`: a registered name, a class, an
            environment, a reward function, or an `EnvironmentSpec`.
        config: Settings of each; None: `LaneConfig()`.
        configs: Settings of individual environments, by name, in place of `config`.

    Raises:
        UserError: A name or setting is wrong.
        WorkerStartError: A worker does not start.
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
        # If one lane fails to start, stop the processes of those before it.
        with ExitStack() as undo:
            # Registered before the first start, and dropped once all lanes are up.
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
        seed: int | None = None,
        timeout_s: float | None = None,
    ) -> Future[Result]:
        """Queue a conversation, blocking while the environment is at its limit.

        Args:
            name: Name of the environment.
            message_log: The conversation, ending with the response.
            metadata: Columns of the data set in the first turn, then the metadata
                returned by the last turn.
            seed: Seed of a conversation that begins, for the environment's `reset`;
                None: it has begun, or the environment has no `reset`.
            timeout_s: Seconds to wait for a free slot; None: no limit.

        Returns:
            A future of an `EnvironmentReturn` with B = 1, or of the exception that the
            environment raised.

        Raises:
            ConfigError: There is no environment of that name.
            DeadlineExceededError: No slot became free in time.
            WorkerDiedError: The pool is closed.
        """
        lane = self._lane(name)
        # Before there is a slot, which an error here would keep taken for good.
        log = log_as_text(message_log)
        ticket = lane.slots.take()
        try:
            ticket.result(timeout_s)
        except KeyboardInterrupt:
            lane.slots.abandon(ticket)
            raise
        except TimeoutError:
            lane.slots.abandon(ticket)
            raise DeadlineExceededError(
                f"environment {name!r} had {lane.slots.taken} pending conversations, "
                f"its maximum, for {timeout_s:g} s: use more workers, or raise "
                "max_pending"
            ) from None
        return lane.put(log, metadata, seed)

    async def step(
        self,
        name: str,
        message_log: MessageLog,
        metadata: Any,
        *,
        seed: int | None = None,
    ) -> Result:
        """Score a conversation without blocking the event loop.

        Args:
            name: Name of the environment.
            message_log: The conversation, ending with the response.
            metadata: As for `submit`.
            seed: As for `submit`.

        Raises:
            ConfigError: There is no environment of that name.
            WorkerDiedError: The pool is closed, or each worker that tried the
                conversation died.
            DistributedError: The environment raised it, or its worker failed.
        """
        lane = self._lane(name)
        # As in `submit`.
        log = log_as_text(message_log)
        ticket = lane.slots.take()
        try:
            await asyncio.wrap_future(ticket)
        except asyncio.CancelledError:
            # The slot may be granted in this very moment, and would then be lost.
            lane.slots.abandon(ticket)
            raise
        return await asyncio.wrap_future(lane.put(log, metadata, seed))

    def end(self, name: str, metadata: Sequence[Any]) -> None:
        """Tell an environment's instances that conversations have ended.

        Their `close` is called after the calls in progress; nobody waits for it.

        Args:
            name: Name of the environment.
            metadata: The latest metadata of each conversation.

        Raises:
            ConfigError: There is no environment of that name.
        """
        self._lane(name).end(metadata)

    def metrics(self) -> dict[str, float]:
        """Return metrics since the start, as `<environment>/<metric>`.

        `rows` and `failed_rows`; `calls` and `rows_per_call`; `lost_workers` that died
        or hung; `wait_s_mean` and `wait_s_max`, time in the queue; `call_s_mean` and
        `call_s_max`; `pending` conversations now, and their maximum, `pending_max`.
        """
        return {
            f"{name}/{count}": value
            for name, lane in self._lanes.items()
            for count, value in lane.metrics().items()
        }

    def close(self) -> None:
        """Stop all workers; waiting conversations fail. Safe to call again."""
        # An ExitStack closes the other lanes even if one raises.
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
