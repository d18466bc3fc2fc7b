"""`Lane`: the instances of one environment, and the rows that wait for them.

```
submit --slot--> queue --thread per instance--> WorkerPool --> Future of each row
```

| part | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| caller | a slot | a row | a free slot, its result | a result, `close` |
| thread | rows, up to a limit | their results | the queue, its call | a row, `close` |
| worker | a call | an answer | the environment | the environment, its end |

A thread takes all rows that wait, up to a limit, and waits for no further ones: under
little load a row goes alone, under much load rows share calls.
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
from rl_envs.interfaces import EnvironmentReturn, as_columns
from rl_envs.registry import EnvironmentSpec

__all__ = ["Lane", "LaneConfig"]

Result: TypeAlias = EnvironmentReturn[Any]

_LOSSES = (WorkerDiedError, WorkerHungError)
_SHUTDOWN_S = 5.0
_END_S = 60.0


class LaneConfig(Config):
    """How an environment of an `EnvironmentPool` runs."""

    num_workers: int = Field(1, ge=1)
    """Processes that each hold an instance."""
    num_cpus: float = Field(0.0, ge=0.0)
    """CPUs that Ray sets aside for each; 0 fits into a full cluster."""
    rows_per_call: int = Field(32, ge=1)
    """Most conversations that an instance is given at a time."""
    max_pending: int = Field(1024, ge=1)
    """Most conversations that wait or are judged at a time; further ones wait with
    their caller."""
    deadline_s: float = Field(60.0, gt=0.0)
    """Seconds that a call may take; a worker that exceeds it is ended and replaced."""
    attempts: int = Field(2, ge=1)
    """How often a conversation is tried alone, where workers die or hang of it."""
    start_deadline_s: float = Field(120.0, gt=0.0)
    """Seconds that the workers may take to start."""


@dataclass(slots=True)
class _Row:
    """A conversation that waits for its verdict."""

    log: list[dict[str, Any]]
    metadata: Any
    result: Future[Result] = field(default_factory=Future)
    since_s: float = field(default_factory=time.monotonic)


class Lane:
    """Judges conversations of one environment, each by itself.

    Args:
        spec: How to make the environment.
        config: How it runs.

    Raises:
        WorkerStartError: A worker does not come up.
        ActorEnvironmentError: The declared environment cannot be made.
    """

    def __init__(self, spec: EnvironmentSpec, config: LaneConfig) -> None:
        self.name = spec.name
        self.slots = Slots(config.max_pending)
        self._rows_per_call = config.rows_per_call
        self._deadline_s = config.deadline_s
        self._retry = Retry(config.attempts)
        self._metrics = LaneMetrics()
        self._closed = False
        # Between the look at `_closed` and the queue: no row is left behind.
        self._closing = threading.Lock()
        # Unbounded by itself: each row in it holds a slot.
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
        self._threads = [
            threading.Thread(
                target=self._work, name=f"environment-{spec.name}-{index}", daemon=True
            )
            for index in range(config.num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, log: list[dict[str, Any]], metadata: Any) -> Future[Result]:
        """Let a conversation be judged; its slot is freed with its result.

        Raises:
            WorkerDiedError: The lane is closed.
        """
        row = _Row(log, metadata)
        with self._closing:
            if self._closed:
                self.slots.give()
                raise self._closed_error()
            self._queue.put(row)
        return row.result

    def metrics(self) -> dict[str, float]:
        """Return what was counted, and how many conversations there are now."""
        return self._metrics.to_dict() | {
            "pending": float(self.slots.taken),
            "pending_max": float(self.slots.peak),
        }

    def close(self) -> None:
        """End the workers; conversations that wait, or are being judged, fail.

        First no row comes in, then waiting rows and callers have an error, then the
        environments shut down, and the threads end with their calls.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self.slots.close(self._closed_error())
        self._drain()
        for _ in self._threads:
            self._queue.put(None)
        try:
            self._shut_down_environments()
        finally:
            self._pool.close()
            for thread in self._threads:
                thread.join(_END_S)
            self._drain()
            self._cluster.shutdown()

    def _closed_error(self) -> WorkerDiedError:
        return WorkerDiedError(
            f"environment {self.name!r} of a pool was shut down; make a new pool"
        )

    def _drain(self) -> None:
        """Fail the rows that wait; the ends of threads stay in the queue."""
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
        """Shut down the environments of the workers that have nothing to do."""
        if not ray.is_initialized():
            return
        calls: list[dict[str, Any]] = [{} for _ in range(self._pool.num_idle)]
        # An environment that raises or hangs now is ended like the others.
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
                    # No worker is left, or Ray is gone: nobody else would say so. What
                    # is raised while the workers are ended means no more than that.
                    said = self._closed_error() if self._closed else error
                    for row in rows:
                        self._fail(row, said)

    def _take(self) -> list[_Row] | None:
        """Wait for a row, and take those behind it; None: the lane is closed."""
        found = self._queue.get()
        rows: list[_Row] = []
        while found is not None:
            if found.result.set_running_or_notify_cancel():
                rows.append(found)
            else:
                # Its caller waits no longer.
                self.slots.give()
            if len(rows) == self._rows_per_call:
                return rows
            try:
                found = self._queue.get_nowait()
            except queue.Empty:
                return rows
        if rows:
            # The end is for a later call of this, or another thread's.
            self._queue.put(None)
            return rows
        return None

    def _judge(self, rows: Sequence[_Row]) -> None:
        """Judge rows together; where that fails, each alone, as one may be to blame."""
        if len(rows) > 1 and self._try(rows, Retry(1)) is None:
            return
        for row in rows:
            if not row.result.done():
                error = self._try([row], self._retry)
                if error is not None:
                    # Before the caller has it: then the numbers are up to date.
                    self._metrics.add_rows(1, failed=True)
                    self._fail(row, error)

    def _try(self, rows: Sequence[_Row], retries: Retry) -> Exception | None:
        """Make one call, and give the rows their results; return why it failed."""
        begin_s = time.monotonic()
        item = {
            "message_logs": [row.log for row in rows],
            "metadata": [row.metadata for row in rows],
        }
        task: TaskResult[Any, Result]
        [task] = self._pool.map(
            "step", [item], retries=retries, call_deadline_s=self._deadline_s
        )
        took_s = time.monotonic() - begin_s
        self._metrics.add_call(took_s, [begin_s - row.since_s for row in rows])
        self._metrics.add_losses(sum(isinstance(e, _LOSSES) for e in task.errors))
        if task.error is not None:
            return self._named(task.error)
        try:
            results = _by_row(task.get(), len(rows))
        except EnvironmentContractError as error:
            return error
        self._metrics.add_rows(len(rows), failed=False)
        for row, result in zip(rows, results, strict=True):
            self.slots.give()
            row.result.set_result(result)
        return None

    def _fail(self, row: _Row, error: BaseException) -> None:
        """Give a row an error, unless it has a result already."""
        if row.result.done() and not row.result.cancelled():
            return
        self.slots.give()
        if row.result.running() or row.result.set_running_or_notify_cancel():
            row.result.set_exception(error)

    def _named(self, error: DistributedError) -> DistributedError:
        error.add_note(f"environment {self.name!r} of a pool")
        return error


def _by_row(result: Any, num_rows: int) -> list[Result]:
    """Return the answer to a batch as one answer per row.

    Raises:
        EnvironmentContractError: There is not one of each per row.
    """
    whole = as_columns(result)
    rewards = whole.rewards if isinstance(whole.rewards, dict) else {"": whole.rewards}
    columns = {
        "observations": whole.observations,
        "metadata": whole.metadata,
        "next_stop_strings": whole.next_stop_strings,
        "terminateds": whole.terminateds,
        "answers": whole.answers if whole.answers is not None else [None] * num_rows,
        **rewards,
    }
    wrong = {name: len(c) for name, c in columns.items() if len(c) != num_rows}
    if wrong:
        raise EnvironmentContractError(
            f"step must return one of each per row: got {wrong} for {num_rows} rows; "
            "test the environment with check_environment"
        )
    parts = []
    for row in range(num_rows):
        here = slice(row, row + 1)
        own = {name: column[here] for name, column in rewards.items()}
        parts.append(
            EnvironmentReturn(
                observations=[whole.observations[row]],
                metadata=[whole.metadata[row]],
                next_stop_strings=[whole.next_stop_strings[row]],
                rewards=own if isinstance(whole.rewards, dict) else own[""],
                terminateds=whole.terminateds[here],
                answers=None if whole.answers is None else [whole.answers[row]],
            )
        )
    return parts
