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

# A call that takes longer has a slow verdict in it.
_SLOW_S = 0.1
# Share of the longest duration that is remembered after each further call: a slow
# verdict of 5 s counts for some 200 calls, because slow ones come in groups.
_REMEMBERED = 0.98


class EnvironmentDesk:
    """Threads that call an environment, one for each call that it takes at a time.

    A single thread takes all waiting answers, which would have to wait anyway. With
    several threads a call takes one answer, so that a slow one delays nothing else.
    While all verdicts are quick, one call at a time takes all waiting answers, because
    a call then costs more than the verdicts, and the environment shares its rows among
    its workers; a call that turns out slow holds up no other.

    Args:
        judge: The environment behind checks.
        calls_at_once: Number of threads.
        on_verdict: Called with each verdict, in the thread that received it.
        on_failure: Called with an exception that ended a thread.
    """

    def __init__(
        self,
        judge: Judge,
        calls_at_once: int,
        on_verdict: Callable[[Scoring, Verdict], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._judge, self._on_verdict = judge, on_verdict
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting: list[Scoring] = []
        self._ended: list[Any] = []
        self._began_s: dict[int, float] = {}
        """Start of each call in flight, by the number of its thread."""
        self._is_closed = False
        # Verdicts are assumed to be slow until measured.
        self._longest_s = _SLOW_S
        self._threads = [
            threading.Thread(
                target=self._run, args=(n,), name=f"ahead-score-{n}", daemon=True
            )
            for n in range(max(1, calls_at_once))
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, scorings: Sequence[Scoring]) -> None:
        """Request verdicts for answers."""
        with self._changed:
            self._waiting.extend(scorings)
            self._changed.notify(1 if self._is_quick else len(scorings))

    def end(self, metadata: Sequence[Any]) -> None:
        """Close conversations that have ended, in a thread of the desk."""
        if not metadata:
            return
        with self._changed:
            self._ended.extend(metadata)
            self._changed.notify()

    @property
    def has_room(self) -> bool:
        """Whether a thread is free, so that not all of them hang."""
        with self._changed:
            return len(self._began_s) < len(self._threads)

    def close(self, deadline_s: float) -> None:
        """Begin no further call, and wait for those in flight."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._began_s, deadline_s)
            ended, self._ended = self._ended, []
        # No thread of the desk gets to them any more.
        if ended:
            self._judge.close(ended)

    def _run(self, thread: int) -> None:
        try:
            while (taken := self._next(thread)) is not None:
                try:
                    self._call(taken)
                finally:
                    self._note_end(thread)
        except BaseException as error:
            self._on_failure(error)

    def _next(self, thread: int) -> list[Scoring] | None:
        """Wait for answers; return None once the desk is closed."""
        with self._changed:
            # `ask`, `end`, `close` and the end of a call notify. The deadline of the
            # wait is the schedule's.
            while not (self._is_closed or self._ended or self._may_call):
                self._changed.wait(
                    (self._until_slow_s or 0.0) if self._waiting else None
                )
            if self._is_closed:
                return None
            self._waiting = [
                scoring
                for scoring in self._waiting
                if not (scoring.is_cancelled or scoring.job.is_cancelled)
            ]
            takes_all = self._is_quick or len(self._threads) == 1
            size = len(self._waiting) if takes_all else 1
            if not self._may_call:
                size = 0  # conversations are closed meanwhile
            taken, self._waiting = self._waiting[:size], self._waiting[size:]
            self._began_s[thread] = time.monotonic()
            return taken

    @property
    def _is_quick(self) -> bool:
        return self._longest_s < _SLOW_S

    @property
    def _may_call(self) -> bool:
        return bool(self._waiting) and not (self._is_quick and self._until_slow_s)

    @property
    def _until_slow_s(self) -> float | None:
        """Seconds until all calls in flight count as slow; None if all do."""
        newest_s = max(self._began_s.values(), default=0.0)
        left_s = newest_s + _SLOW_S - time.monotonic()
        return left_s if left_s > 0.0 else None

    def _note_end(self, thread: int) -> None:
        with self._changed:
            took_s = time.monotonic() - self._began_s.pop(thread)
            self._longest_s = max(_REMEMBERED * self._longest_s, took_s)
            if self._is_closed:
                self._changed.notify_all()
            elif not self._is_quick:
                # While verdicts are quick, this thread takes all that waits.
                self._changed.notify(len(self._waiting))

    def _call(self, taken: Sequence[Scoring]) -> None:
        with self._changed:
            ended, self._ended = self._ended, []
        if ended:
            self._judge.close(ended)
        if not taken:
            return
        conversations = [scoring.job.conversation for scoring in taken]
        verdict = self._judge.step(
            [conversation.log for conversation in conversations],
            [conversation.metadata for conversation in conversations],
            [scoring.job.begin() for scoring in taken],
        )
        for place, scoring in enumerate(taken):
            self._on_verdict(scoring, verdict.row(place))


class OneCallAtATime(EnvironmentInterface[Any]):
    """Wraps an environment so that calls of several threads reach it one at a time.

    Args:
        environment: The environment.
    """

    def __init__(self, environment: EnvironmentInterface[Any]) -> None:
        self._environment = environment
        self.task_limits = environment.task_limits
        self._lock = threading.Lock()

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
        if not has_own(self._environment, "reset"):
            return metadata
        with self._lock:
            return self._environment.reset(metadata, seeds)

    def close(self, metadata: Sequence[Any]) -> None:
        """See `EnvironmentInterface`."""
        if has_own(self._environment, "close"):
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
