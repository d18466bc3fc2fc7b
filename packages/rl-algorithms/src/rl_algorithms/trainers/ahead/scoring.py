"""`EnvironmentDesk`: has the environment judge answers as they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from rl_algorithms.rollout.judge import Judge, Verdict
from rl_algorithms.trainers.ahead.jobs import Scoring
from rl_envs import RemoteEnvironment
from rl_envs.interfaces import EnvironmentInterface, EnvironmentReturn, Rewards

__all__ = ["EnvironmentDesk", "OneCallAtATime", "for_several_threads"]

# A call of quick verdicts takes about as long as this, and at least costs this much.
_CALL_S = 0.02
_LEAST_S = 1e-4
# Of the mean duration of a verdict, what the newest call counts for.
_NEWEST_SHARE = 0.2


class EnvironmentDesk:
    """Threads that call an environment, as many as it takes calls at once.

    Where there is one, it takes all that wait, as those would wait in any case. Where
    there are several, a call takes one answer, so that a slow one holds up nothing
    else; of an environment that is quick it takes several, as a call costs more than
    the verdicts then.

    Args:
        judge: The environment behind checks.
        calls_at_once: Threads.
        on_verdict: Is told of each verdict, in the thread that got it.
        on_failure: Is told what ended a thread.
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
        self._num_calls = 0
        self._is_closed = False
        # Until it is known, a verdict may take long.
        self._verdict_s = _CALL_S
        self._threads = [
            threading.Thread(target=self._run, name=f"ahead-score-{n}", daemon=True)
            for n in range(max(1, calls_at_once))
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, scorings: Sequence[Scoring]) -> None:
        """Have answers judged."""
        with self._changed:
            self._waiting.extend(scorings)
            self._changed.notify(len(scorings))

    @property
    def has_room(self) -> bool:
        """Whether a thread is free: not all of them hang."""
        with self._changed:
            return self._num_calls < len(self._threads)

    def close(self, deadline_s: float) -> None:
        """Begin nothing further, and wait for the calls that go on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_calls, deadline_s)

    def _run(self) -> None:
        try:
            while (taken := self._next()) is not None:
                try:
                    self._call(taken)
                finally:
                    with self._changed:
                        self._num_calls -= 1
                        self._changed.notify_all()
        except BaseException as error:
            self._on_failure(error)

    def _next(self) -> list[Scoring] | None:
        """Wait for answers; None: none come any more."""
        with self._changed:
            # Whoever asks or closes notifies; the schedule has the deadline.
            self._changed.wait_for(lambda: self._is_closed or bool(self._waiting))
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
        quick = int(_CALL_S / max(self._verdict_s, _LEAST_S))
        # No thread takes what another one could begin with now.
        return max(1, min(quick, -(-count // threads)))

    def _note_duration(self, verdict_s: float) -> None:
        with self._changed:
            # One slow verdict is enough for calls of one answer, for some time: where
            # there is one, there are more.
            self._verdict_s += _NEWEST_SHARE * (verdict_s - self._verdict_s)

    def _call(self, taken: Sequence[Scoring]) -> None:
        if not taken:
            return
        began_s = time.monotonic()
        conversations = [scoring.job.conversation for scoring in taken]
        verdict = self._judge.step(
            [conversation.log for conversation in conversations],
            [conversation.metadata for conversation in conversations],
        )
        self._note_duration((time.monotonic() - began_s) / len(taken))
        for place, scoring in enumerate(taken):
            self._on_verdict(scoring, verdict.row(place))


class OneCallAtATime(EnvironmentInterface[Any]):
    """An environment that several threads may call, and that sees one after the other.

    Args:
        environment: Any environment.
    """

    def __init__(self, environment: EnvironmentInterface[Any]) -> None:
        self._environment = environment
        self._lock = threading.Lock()

    def step(
        self,
        message_log_batch: Sequence[Sequence[Mapping[str, Any]]],
        metadata: Sequence[Any],
    ) -> EnvironmentReturn[Any]:
        """See `EnvironmentInterface`."""
        with self._lock:
            return self._environment.step(message_log_batch, metadata)

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
        return self._environment.tool_schemas()

    def shutdown(self) -> None:
        """See `EnvironmentInterface`."""
        self._environment.shutdown()


def for_several_threads(
    environment: EnvironmentInterface[Any],
) -> EnvironmentInterface[Any]:
    """Return an environment that validation and desk can call at the same time."""
    # The workers of a remote one are shared among calls by itself.
    if isinstance(environment, RemoteEnvironment) or calls_of(environment) > 1:
        return environment
    return OneCallAtATime(environment)


def calls_of(environment: EnvironmentInterface[Any]) -> int:
    """Return how many calls an environment takes at a time."""
    return max(1, int(getattr(environment, "calls_at_once", 1)))
