"""Detect that an engine with rows to sample makes no more steps.

A process can hang without being stopped and without holding Python's lock: two ranks
that wait for each other, or a thread of the engine that waits forever. Such an engine
completes no steps.

A step that merely takes long must not count as a hang. So the limit follows the slowest
step so far, and is long until there were some; and on a CPU, time in which a thread of
the engine is at work counts for little.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["EngineProgress", "StallWatch"]

_LOOK_S = 0.5
# The first steps may compile or load something, and get the deadline of a start.
_WARM_STEPS = 8
_FACTOR = 5.0
# Weight of the duration of the first steps, which are slower than later ones.
_COLD_WEIGHT = 0.4
# Weight of an interval in which a thread was at work.
_BUSY_WEIGHT = 0.1


class EngineProgress:
    """Progress that an engine reports about its steps; thread-safe.

    Args:
        clock: Returns seconds since some moment.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began_s = clock()
        self._num_steps = 0
        self._slowest_s = 0.0
        self._num_tokens = 0
        self._most_tokens = 1
        self._num_pauses = 0
        self._moves = 0

    @contextmanager
    def sampling(self, num_tokens: int) -> Iterator[None]:
        """Mark that rows are sampled whose prompts have this number of tokens."""
        with self._lock:
            if not self._num_tokens:
                # Otherwise the rest before it would count as a part of the first step.
                self._move()
            self._num_tokens += num_tokens
        try:
            yield
        finally:
            with self._lock:
                self._num_tokens -= num_tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Mark a deliberate pause of the steps, while weights are replaced."""
        with self._lock:
            self._num_pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_pauses -= 1
                self._move()

    def step(self) -> None:
        """Record that a step has ended."""
        with self._lock:
            # The time of a step that ends in a pause includes a part of the update.
            if not self._num_pauses:
                is_cold = self._num_steps < _WARM_STEPS
                lasted_s = self._clock() - self._began_s
                counted_s = lasted_s * (_COLD_WEIGHT if is_cold else 1.0)
                self._slowest_s = max(self._slowest_s, counted_s)
            self._num_steps += 1
            self._most_tokens = max(self._most_tokens, self._num_tokens)
            self._move()

    def _move(self) -> None:
        self._moves += 1
        self._began_s = self._clock()

    def moves(self) -> int | None:
        """Return a number that grows with progress; None if no step is expected now."""
        with self._lock:
            is_due = self._num_tokens and not self._num_pauses
            return self._moves if is_due else None

    def limit_s(self, given_s: float | None, warm_up_s: float, least_s: float) -> float:
        """Return how long the next step may take.

        Args:
            given_s: The user's limit; None: derived from the steps so far.
            warm_up_s: Limit of the first steps, which may compile or load something.
            least_s: Lower bound of the derived limit.
        """
        with self._lock:
            if self._num_steps < _WARM_STEPS:
                return max(warm_up_s, given_s or 0.0)
            if given_s is not None:
                return given_s
            # More prompt tokens than ever before may make a longer step than ever.
            growth = max(1.0, self._num_tokens / self._most_tokens)
            return max(least_s, _FACTOR * self._slowest_s * growth)


class StallWatch:
    """Watches the steps of an engine from a thread, until they stop or it is closed.

    Args:
        progress: Progress of the engine.
        on_stall: Called once with the problem, in the thread.
        limit_s: See `EngineProgress.limit_s`.
        warm_up_s: See `EngineProgress.limit_s`.
        least_s: See `EngineProgress.limit_s`.
        is_busy: Returns whether the engine is at work although it completes no step.
    """

    def __init__(
        self,
        progress: EngineProgress,
        on_stall: Callable[[str], None],
        *,
        limit_s: float | None,
        warm_up_s: float,
        least_s: float,
        is_busy: Callable[[], bool],
    ) -> None:
        self._progress = progress
        self._on_stall = on_stall
        self._limit_s = limit_s
        self._warm_up_s = warm_up_s
        self._least_s = least_s
        self._is_busy = is_busy
        self._moves: int | None = None
        self._stalled_s = 0.0
        self._closed = threading.Event()
        # A daemon: a watch that was not closed must not keep the process alive.
        self._thread = threading.Thread(
            target=self._run, name="stall-watch", daemon=True
        )

    def start(self) -> None:
        """Begin to watch, in a thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._closed.wait(_LOOK_S):
            now_s = time.monotonic()
            # More time than that has passed only if this process got no turn or was
            # stopped, and then so was the engine.
            if self.look(min(now_s - last_s, 2.0 * _LOOK_S)):
                return
            last_s = now_s

    def look(self, passed_s: float) -> bool:
        """Look at the steps after some time; return whether they have stopped."""
        moves = self._progress.moves()
        if moves is None or moves != self._moves:
            self._moves, self._stalled_s = moves, 0.0
            return False
        self._stalled_s += passed_s * (_BUSY_WEIGHT if self._is_busy() else 1.0)
        limit_s = self._progress.limit_s(self._limit_s, self._warm_up_s, self._least_s)
        if self._stalled_s < limit_s:
            return False
        self._on_stall(
            f"vLLM's engine has rows to sample and made no step for {limit_s:.3g} s"
        )
        return True
