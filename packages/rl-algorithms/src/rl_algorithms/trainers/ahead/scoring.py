"""`EnvironmentDesk`: passes answers to the environment as they arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from rl_algorithms.rollout.judge import Judge, Verdict
from rl_algorithms.trainers.ahead.jobs import Scoring
from rl_envs import RemoteEnvironment
from rl_envs.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    Rewards,
    has_own,
)

__all__ = ["EnvironmentDesk", "OneCallAtATime", "for_several_threads"]

# Target duration of a call with quick verdicts, the least duration of one that leaves
# answers to other threads, and the least that a verdict counts for.
_CALL_S = 0.1
_LEAST_CALL_S = 0.01
_LEAST_S = 1e-4
# Weight of the newest call in the moving average of a verdict's duration.
_NEWEST_SHARE = 0.2


class EnvironmentDesk:
    """Threads that call an environment, one for each call that it takes at a time.

    A single thread takes all waiting answers, which would have to wait anyway. With
    several threads a call takes one answer, so that a slow one delays nothing else. If
    the environment is quick, a call takes several, because the call then costs more
    than the verdicts.

    Args:
        judge: The environment behind checks.
        calls_at_once: Number of threads.
        on_verdicts: Called with answers and the verdict on them, a row for each, in
            the thread that received it.
        on_failure: Called with an exception that ended a thread.
    """

    def __init__(
        self,
        judge: Judge,
        calls_at_once: int,
        on_verdicts: Callable[[Sequence[Scoring], Verdict], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._judge, self._on_verdicts = judge, on_verdicts
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting: list[Scoring] = []
        self._ended: list[Any] = []
        self._num_calls = 0
        self._is_closed = False
        # Verdicts are assumed to be slow until measured, so that the first calls take
        # one answer each.
        self._verdict_s = _CALL_S
        self._threads = [
            threading.Thread(target=self._run, name=f"ahead-score-{n}", daemon=True)
            for n in range(max(1, calls_at_once))
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, scorings: Sequence[Scoring]) -> None:
        """Request verdicts for answers."""
        with self._changed:
            self._waiting.extend(scorings)
            self._changed.notify(len(scorings))

    def end(self, metadata: Sequence[Any]) -> None:
        """Close conversations that have ended, in a thread of the desk."""
        if not metadata or not self._judge.closes:
            return  # not to wake a thread for nothing
        with self._changed:
            self._ended.extend(metadata)
            self._changed.notify()

    @property
    def has_room(self) -> bool:
        """Whether a thread is free, so that not all of them hang."""
        with self._changed:
            return self._num_calls < len(self._threads)

    def close(self, deadline_s: float) -> None:
        """Begin no further call, and wait for those in flight."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_calls, deadline_s)
            ended, self._ended = self._ended, []
        # No thread of the desk gets to them any more.
        self.end_now(ended, deadline_s)

    def end_now(self, metadata: Sequence[Any], deadline_s: float) -> None:
        """Close conversations once the desk is closed, and wait for that.

        Args:
            metadata: Their metadata.
            deadline_s: How long to wait: a call that hangs may hold the environment.
        """
        if not metadata or not self._judge.closes:
            return
        closing = threading.Thread(
            target=self._judge.close, args=(metadata,), name="ahead-end", daemon=True
        )
        closing.start()
        closing.join(deadline_s)

    def _run(self) -> None:
        try:
            while (taken := self._next()) is not None:
                try:
                    self._call(taken)
                finally:
                    with self._changed:
                        self._num_calls -= 1
                        # Nobody but `close` waits for this; to wake all threads would
                        # cost more than the call.
                        if self._is_closed:
                            self._changed.notify_all()
        except BaseException as error:
            self._on_failure(error)

    def _next(self) -> list[Scoring] | None:
        """Wait for answers; return None once the desk is closed."""
        with self._changed:
            # `ask` and `close` notify. The deadline of the wait is the schedule's.
            self._changed.wait_for(
                lambda: self._is_closed or bool(self._waiting or self._ended)
            )
            if self._is_closed:
                return None
            self._waiting = [
                scoring
                for scoring in self._waiting
                if not (scoring.is_cancelled or scoring.job.is_cancelled)
            ]
            size = self._size_of_call()
            taken, self._waiting = self._waiting[:size], self._waiting[size:]
            self._num_calls += 1
            return taken

    def _size_of_call(self) -> int:
        count, threads = len(self._waiting), len(self._threads)
        if threads == 1:
            return count
        # A remote environment measures where it runs: the time of a call here is mostly
        # a wait for processors that are busy.
        row_s = self._judge.row_s
        verdict_s = max(self._verdict_s if row_s is None else row_s, _LEAST_S)
        # Leave a fair share of the waiting answers to the other threads, unless it
        # takes less time than another call.
        share = max(-(-count // threads), int(_LEAST_CALL_S / verdict_s))
        return max(1, min(int(_CALL_S / verdict_s), share, count))

    def _note_duration(self, verdict_s: float) -> None:
        with self._changed:
            # A moving average: one slow verdict makes calls take single answers for
            # some time, because slow ones tend to come in groups.
            self._verdict_s += _NEWEST_SHARE * (verdict_s - self._verdict_s)

    def _call(self, taken: Sequence[Scoring]) -> None:
        with self._changed:
            ended, self._ended = self._ended, []
        if ended:
            self._judge.close(ended)
        if not taken:
            return
        began_s = time.monotonic()
        conversations = [scoring.job.conversation for scoring in taken]
        verdict = self._judge.step(
            [conversation.log for conversation in conversations],
            [conversation.metadata for conversation in conversations],
            [s.job.begin() for s in taken] if self._judge.begins else None,
        )
        self._note_duration((time.monotonic() - began_s) / len(taken))
        self._on_verdicts(taken, verdict)


class OneCallAtATime(EnvironmentInterface[Any]):
    """Wraps an environment so that calls of several threads reach it one at a time.

    Args:
        environment: The environment.
    """

    def __init__(self, environment: EnvironmentInterface[Any]) -> None:
        self._environment = environment
        self.task_limits = environment.task_limits
        self._lock = threading.Lock()

    def has_own(self, method: str) -> bool:
        """Return whether the wrapped environment has its own `reset` or `close`."""
        return has_own(self._environment, method)

    def step(
        self,
        message_log_batch: Sequence[Sequence[Mapping[str, Any]]],
        metadata: Sequence[Any],
    ) -> EnvironmentReturn[Any]:
        """See `EnvironmentInterface`."""
        with self._lock:
            return self._environment.step(message_log_batch, metadata)

    def reset(self, metadata: Sequence[Any], seeds: Sequence[int]) -> Sequence[Any]:
        """See `EnvironmentInterface`."""
        if not self.has_own("reset"):
            return metadata
        with self._lock:
            return self._environment.reset(metadata, seeds)

    def close(self, metadata: Sequence[Any]) -> None:
        """See `EnvironmentInterface`."""
        if self.has_own("close"):
            with self._lock:
                self._environment.close(metadata)

    def score_groups(
        self,
        message_logs: Sequence[Sequence[Sequence[Mapping[str, Any]]]],
        metadata: Sequence[Sequence[Any]],
    ) -> list[Rewards] | None:
        """See `EnvironmentInterface`."""
        with self._lock:
            return self._environment.score_groups(message_logs, metadata)

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """See `EnvironmentInterface`."""
        with self._lock:
            return self._environment.global_post_process_and_metrics(batch)

    def unusable_rows(self, metadata: Sequence[Any]) -> dict[int, str]:
        """See `EnvironmentInterface`."""
        with self._lock:
            return self._environment.unusable_rows(metadata)

    def tool_schemas(self) -> list[dict[str, Any]]:
        """See `EnvironmentInterface`."""
        # No lock: schemas do not change, and `shutdown` must not wait for a call that
        # hangs.
        return self._environment.tool_schemas()

    def shutdown(self) -> None:
        """See `EnvironmentInterface`."""
        self._environment.shutdown()


def for_several_threads(
    environment: EnvironmentInterface[Any],
) -> EnvironmentInterface[Any]:
    """Return an environment that validation and desk may call at the same time."""
    # A remote environment distributes concurrent calls over its workers by itself.
    if isinstance(environment, RemoteEnvironment) or calls_of(environment) > 1:
        return environment
    return OneCallAtATime(environment)


def calls_of(environment: EnvironmentInterface[Any]) -> int:
    """Return the number of calls that an environment takes at a time."""
    return max(1, environment.calls_at_once)
