"""`Lane`: the instances of one environment and the queue of rows in front of them.

```
submit --slot--> queue --thread per instance--> WorkerPool --> Future of each row
```

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| caller | a slot | a row | a free slot, its result | a result, `close` |
| thread | rows, up to a limit | their results | the queue, its call | a row, `close` |
| worker | a call | a reply | the environment | the environment, its death |

A thread takes all waiting rows, up to a limit, without waiting for more: under light
load each row gets a call of its own, under heavy load rows share calls.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ray
from pydantic import Field

from rl_distributed.config import Config
from rl_distributed.errors import DistributedError, WorkerDiedError, WorkerHungError
from rl_distributed.workers import Retry, TaskResult, WorkerPool
from rl_envs.environment_host import EnvironmentHost
from rl_envs.environment_pool.lane_metrics import LaneMetrics
from rl_envs.environment_pool.slots import Slots
from rl_envs.environment_workers import worker_builder, worker_cluster
from rl_envs.errors import EnvironmentContractError
from rl_envs.interfaces import EnvironmentReturn
from rl_envs.joined_returns import split_return
from rl_envs.registry import EnvironmentSpec

__all__ = ["Lane", "LaneConfig"]

Result: TypeAlias = EnvironmentReturn[Any]

_LOSSES = (WorkerDiedError, WorkerHungError)
_SHUTDOWN_S = 5.0
_END_S = 60.0


class LaneConfig(Config):
    """Settings of one environment of an `EnvironmentPool`."""

    num_workers: int = Field(1, ge=1)
    """Number of processes, each with its own instance."""
    num_cpus: float = Field(0.0, ge=0.0)
    """CPUs that Ray reserves for each; 0 fits into a full cluster."""
    rows_per_call: int = Field(32, ge=1)
    """Maximum number of conversations per call of an instance."""
    max_pending: int = Field(1024, ge=1)
    """Maximum number of conversations waiting or being scored; more callers block."""
    deadline_s: float = Field(60.0, gt=0.0)
    """Time limit of a call in seconds; a worker that exceeds it is replaced."""
    attempts: int = Field(2, ge=1)
    """Number of attempts for a single conversation on which workers die or hang."""
    start_deadline_s: float = Field(120.0, gt=0.0)
    """Time limit for the workers to start, in seconds."""


@dataclass(slots=True)
class _Row:
    """A conversation waiting for its result."""

    log: list[dict[str, Any]]
    metadata: Any
    seed: int | None = None
    """Seed of a conversation that begins."""
    result: Future[Result] = field(default_factory=Future)
    since_s: float = field(default_factory=time.monotonic)


class Lane:
    """Scores conversations with one environment, each independently of the others.

    Args:
        spec: How to create the environment.
        config: Settings of the lane.

    Raises:
        WorkerStartError: A worker does not start.
        ActorEnvironmentError: The declared environment cannot be built.
    """

    def __init__(self, spec: EnvironmentSpec, config: LaneConfig) -> None:
        self.name = spec.name
        self.slots = Slots(config.max_pending)
        self._rows_per_call = config.rows_per_call
        self._deadline_s = config.deadline_s
        self._retry = Retry(config.attempts)
        self._metrics = LaneMetrics()
        self._closed = False
        # Makes the check of `_closed` and the queueing one step: no row is left behind.
        self._closing = threading.Lock()
        # Needs no bound of its own, since each row in it holds a slot.
        self._queue: queue.SimpleQueue[_Row | None] = queue.SimpleQueue()
        self._cluster = worker_cluster(
            spec.name,
            num_workers=config.num_workers,
            num_cpus=config.num_cpus,
            start_deadline_s=config.start_deadline_s,
        )
        try:
            self._pool: WorkerPool[EnvironmentHost] = WorkerPool(
                self._cluster,
                worker_builder(spec),
                name=f"environment-{spec.name}",
                start_deadline_s=config.start_deadline_s,
            )
        except BaseException:
            self._cluster.shutdown()
            raise
        # A daemon must not keep the program alive if nobody closes the pool.
        self._threads = [
            threading.Thread(
                target=self._work, name=f"environment-{spec.name}-{index}", daemon=True
            )
            for index in range(config.num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def put(
        self, log: list[dict[str, Any]], metadata: Any, seed: int | None = None
    ) -> Future[Result]:
        """Queue a conversation; its slot is freed together with its result.

        Raises:
            WorkerDiedError: The lane is closed.
        """
        row = _Row(log, metadata, seed)
        with self._closing:
            if self._closed:
                self.slots.give()
                raise self._closed_error()
            self._queue.put(row)
        return row.result

    def end(self, metadata: Sequence[Any]) -> None:
        """Tell all instances that conversations have ended, without waiting."""
        for health in self._pool.group.health():
            # Best effort: what a dead worker kept is gone, and its successor has none.
            if health.failure is None and not self._closed:
                with suppress(DistributedError):
                    self._pool.group.run_single_worker_single_data(
                        "close", health.rank, common_kwargs={"metadata": list(metadata)}
                    )

    def metrics(self) -> dict[str, float]:
        """Return the counts so far and the number of pending conversations."""
        return self._metrics.to_dict() | {
            "pending": float(self.slots.taken),
            "pending_max": float(self.slots.peak),
        }

    def close(self) -> None:
        """Stop the workers; conversations that wait or are being scored fail.

        New rows are refused first, then waiting rows and callers get an error, then the
        environments shut down, and the threads end with their calls.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self.slots.close(self._closed_error())
        # Before the end markers, so that threads do not start on waiting rows.
        self._drain()
        for _ in self._threads:
            self._queue.put(None)
        try:
            self._shut_down_environments()
        finally:
            self._pool.close()
            for thread in self._threads:
                thread.join(_END_S)
            # A thread that did not end in time may have left rows behind.
            self._drain()
            self._cluster.shutdown()

    def _closed_error(self) -> WorkerDiedError:
        return WorkerDiedError(
            f"environment {self.name!r} of a pool was shut down; create a new pool"
        )

    def _drain(self) -> None:
        """Fail the waiting rows; end markers of threads stay in the queue."""
        ends = 0
        while True:
            try:
                row = self._queue.get_nowait()
            except queue.Empty:
                break
            if row is None:
                ends += 1
            else:
                self._fail(row, self._closed_error())
        for _ in range(ends):
            self._queue.put(None)

    def _shut_down_environments(self) -> None:
        """Shut down the environments of idle workers."""
        if not ray.is_initialized():
            return
        calls: list[dict[str, Any]] = [{} for _ in range(self._pool.num_idle)]
        # Best effort: an environment that raises or hangs here is killed next.
        with suppress(DistributedError):
            for _ in self._pool.map(
                "shutdown", calls, retries=Retry(1), call_deadline_s=_SHUTDOWN_S
            ):
                continue

    def _work(self) -> None:
        while (rows := self._take()) is not None:
            if rows:
                try:
                    self._judge(rows)
                except Exception as error:
                    # No worker is left, or Ray is gone, and only these rows can report
                    # it. While closing, any error just means that the pool was closed.
                    said = self._closed_error() if self._closed else error
                    for row in rows:
                        self._fail(row, said)

    def _take(self) -> list[_Row] | None:
        """Wait for a row and take those behind it; None: the lane is closed."""
        found = self._queue.get()
        rows: list[_Row] = []
        while found is not None:
            # From here on the caller can no longer cancel it, so its result can be set
            # safely.
            if found.result.set_running_or_notify_cancel():
                rows.append(found)
            else:
                # Its caller has cancelled it.
                self.slots.give()
            if len(rows) == self._rows_per_call:
                return rows
            try:
                found = self._queue.get_nowait()
            except queue.Empty:
                return rows
        if rows:
            # Keep the end marker for the next call, by this thread or another.
            self._queue.put(None)
            return rows
        return None

    def _judge(self, rows: Sequence[_Row]) -> None:
        """Score rows together; if that fails, alone, as one row may be at fault."""
        # Once only: a retry of the whole call would again fail for all if one row is at
        # fault.
        if len(rows) > 1 and self._try(rows, Retry(1)) is None:
            return
        for row in rows:
            if not row.result.done():
                error = self._try([row], self._retry)
                if error is not None:
                    # Before the result: callers may read the counts once they have it.
                    self._metrics.add_rows(1, failed=True)
                    self._fail(row, error)

    def _try(self, rows: Sequence[_Row], retries: Retry) -> Exception | None:
        """Make one call and set the rows' results; return the error if it failed."""
        begin_s = time.monotonic()
        item = {
            "message_logs": [row.log for row in rows],
            "metadata": [row.metadata for row in rows],
            "seeds": [row.seed for row in rows],
        }
        task: TaskResult[Any, Result]
        [task] = self._pool.map(
            "begin_and_step", [item], retries=retries, call_deadline_s=self._deadline_s
        )
        took_s = time.monotonic() - begin_s
        self._metrics.add_call(took_s, [begin_s - row.since_s for row in rows])
        self._metrics.add_losses(sum(isinstance(e, _LOSSES) for e in task.errors))
        if task.error is not None:
            return self._named(task.error)
        try:
            results = split_return(task.get(), len(rows))
        except EnvironmentContractError as error:
            return error
        self._metrics.add_rows(len(rows), failed=False)
        for row, result in zip(rows, results, strict=True):
            # Before the result, so that its caller can submit the next row at once.
            self.slots.give()
            row.result.set_result(result)
        return None

    def _fail(self, row: _Row, error: BaseException) -> None:
        """Set an error on a row, unless it already has a result."""
        # Its slot was freed together with that result, and must not be freed twice.
        if row.result.done() and not row.result.cancelled():
            return
        self.slots.give()
        if row.result.running() or row.result.set_running_or_notify_cancel():
            row.result.set_exception(error)

    def _named(self, error: DistributedError) -> DistributedError:
        error.add_note(f"environment {self.name!r} of a pool")
        return error
