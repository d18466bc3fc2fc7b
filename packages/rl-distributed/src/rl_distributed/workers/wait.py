"""Waiting for Ray references: one deadline, and failures as soon as they are known.

A wait is one `ray.get` of all references, which costs what Ray costs. Where it takes
longer than a second, the wait looks once a second whether a worker of the group has
failed, also one that it does not wait for itself.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import ray
from ray import ObjectRefGenerator

from rl_distributed.cluster.watch import raise_if_lost
from rl_distributed.errors import (
    ConfigError,
    DeadlineExceededError,
    DistributedError,
)
from rl_distributed.failures.worker import WorkerFailure
from rl_distributed.workers.failures import failure_error, translate_failure, worker_of

__all__ = [
    "DEFAULT_DEADLINE_S",
    "LOOK_S",
    "Supervisor",
    "Wait",
    "WorkerOutcome",
    "WorkerResult",
    "end_of",
    "fetch",
    "open_waits",
]

DEFAULT_DEADLINE_S = 3_600.0
LOOK_S = 1.0
"""A wait shorter than this costs what Ray costs; longer ones look around so often."""

# More names than this tell a reader nothing new.
_MOST_NAMED = 8
# Values that have already arrived are still returned at the deadline.
_SHORTEST_S = 0.001
# An open wait looks around once a second, unless its results keep arriving.
_STILL_OPEN_S = 5.0

# Weak, because a wait that is abandoned says nothing. For a report of who waits.
_looking: weakref.WeakSet[Wait] = weakref.WeakSet()
_looking_lock = threading.Lock()


class Supervisor(Protocol):
    """The part of a group's supervisor that a wait needs."""

    def failure_since(self, began: float) -> WorkerFailure | None:
        """Return the root of the incident that is open, if it began after `began`."""

    def failure_of(self, rank: int) -> WorkerFailure | None:
        """Return why this worker is away; None: it is not."""

    def explain(
        self,
        error: BaseException,
        what: str,
        references: Sequence[Any],
        method_name: str = "",
    ) -> DistributedError:
        """Return the error to raise in place of that of Ray."""


class WorkerResult(NamedTuple):
    """One result of one worker; from `RayWorkerGroup.iter_results`."""

    rank: int
    position: int
    """0, 1, 2, ... for the items of a generator method; 0 for other methods."""
    value: Any


class WorkerOutcome(NamedTuple):
    """Outcome of a call on one worker; from `MultiWorkerFuture.outcomes`."""

    rank: int
    value: Any
    """The method's return value, or the list of items of a generator method."""
    error: DistributedError | None = None
    """Why there is no value, explained as `get_results` would raise it."""


def fetch(references: Sequence[Any], what: str, deadline_s: float) -> list[Any]:
    """Wait for Ray references; raise the first failure at once, as one of our errors.

    Args:
        references: what to wait for.
        what: description of the wait, for messages.
        deadline_s: how long to wait for all of them together.
    """
    return Wait(None, what, deadline_s).all(references)


def open_waits() -> list[tuple[str, float]]:
    """Return the waits of this process that take longer: for what, and the time left.

    Waits shorter than a second are not among them.
    """
    with _looking_lock:
        waits = list(_looking)
    now = time.monotonic()
    return [
        (wait._what, wait._left())
        for wait in waits
        if now - wait._looked_at < _STILL_OPEN_S
    ]


class Wait:
    """One wait for the results of a group, with one deadline for all of it.

    Args:
        supervisor: of the group; None: the references are of no group.
        what: the call, for messages.
        deadline_s: how long to wait for everything together.
        method_name: the method that was called.
    """

    def __init__(
        self,
        supervisor: Supervisor | None,
        what: str,
        deadline_s: float,
        method_name: str = "",
    ) -> None:
        if not deadline_s > 0:
            raise ConfigError(f"deadline_s must be positive: got {deadline_s}")
        self._supervisor = supervisor
        self._what = what
        self._method_name = method_name
        self._deadline_s = deadline_s
        self._began = self._looked_at = time.monotonic()

    def all(self, references: Sequence[Any]) -> list[Any]:
        """All values, in order."""
        references = list(references)
        # One call for the usual case, in which all answer soon: each further call of
        # Ray costs as much as a small result.
        first_s = min(self._left(), LOOK_S)
        try:
            results: list[Any] = ray.get(references, timeout=first_s)
        except ray.exceptions.GetTimeoutError:
            return self._all_late(references)
        except ray.exceptions.RayError as error:
            explained = self._explained(error, references)
            raise explained from explained.__cause__
        return results

    def _all_late(self, references: Sequence[Any]) -> list[Any]:
        """Wait longer for all values, and look around from time to time."""
        # The same reference may stand for several places, and Ray refuses to wait for
        # it twice.
        pending = list(dict.fromkeys(references))
        values: dict[Any, Any] = {}
        while pending:
            left_s = self._left()
            ready, pending = ray.wait(
                pending,
                num_returns=len(pending),
                timeout=min(left_s, LOOK_S),
                # Only whether they have ended: fetching is counted against the deadline
                # below, where it can be told apart.
                fetch_local=False,
            )
            try:
                # Large values may take a while to come from another node.
                got = ray.get(ready, timeout=max(self._left(), _SHORTEST_S))
            except ray.exceptions.GetTimeoutError:
                raise self._late(ready) from None
            except ray.exceptions.RayError as error:
                explained = self._explained(error, references)
                raise explained from explained.__cause__
            values.update(zip(ready, got, strict=True))
            if pending:
                self._look_around()
                if self._left() <= 0:
                    raise self._late(pending)
        return [values[reference] for reference in references]

    def items(
        self,
        streams: Sequence[Any],
        ranks: Sequence[int],
        open_ranks: set[int] | None = None,
    ) -> Iterator[WorkerResult]:
        """Items of generators, and plain results, as they come.

        Args:
            streams: references or generators of references.
            ranks: the worker of each.
            open_ranks: workers are taken out of it when they have no more items.
        """
        open_ranks = set() if open_ranks is None else open_ranks
        counts = dict.fromkeys(ranks, 0)
        pending = dict(zip(streams, ranks, strict=True))
        while pending:
            left_s = self._left()
            ready, _ = ray.wait(
                list(pending), num_returns=1, timeout=min(left_s, LOOK_S)
            )
            if not ready:
                self._look_around()
                if left_s <= 0:
                    raise self._late(list(pending))
                continue
            (stream,) = ready
            rank = pending[stream]
            reference = stream
            if isinstance(stream, ObjectRefGenerator):
                reference = next(stream, None)
                ended = reference is None
            else:
                ended = True
            if ended:
                del pending[stream]
                open_ranks.discard(rank)
            if reference is not None:
                value = self._item(reference, streams, counts)
                yield WorkerResult(rank, counts[rank], value)
                counts[rank] += 1

    def outcomes(
        self, streams: Sequence[Any], ranks: Sequence[int]
    ) -> Iterator[WorkerOutcome]:
        """Yield how the call ended on each worker; failures are not raised.

        Args:
            streams: references or generators of references.
            ranks: the worker of each.

        Raises:
            ClusterLostError: Ray itself is gone, and with it every worker.
        """
        ends = [end_of(stream) for stream in streams]
        pending = dict(zip(streams, ranks, strict=True))
        items: dict[int, list[Any]] = {rank: [] for rank in ranks}
        while pending:
            left_s = self._left()
            ready, _ = ray.wait(
                list(pending), num_returns=1, timeout=min(left_s, LOOK_S)
            )
            if not ready:
                yield from self._failed_or_late(pending, left_s)
                continue
            (stream,) = ready
            rank = pending[stream]
            is_stream = isinstance(stream, ObjectRefGenerator)
            reference = next(stream, None) if is_stream else stream
            try:
                if reference is None:
                    value: Any = items[rank]
                else:
                    left_s = max(self._left(), _SHORTEST_S)
                    value = ray.get(reference, timeout=left_s)
            except ray.exceptions.GetTimeoutError:
                outcome = WorkerOutcome(rank, None, self._late([reference]))
            except ray.exceptions.RayError as error:
                outcome = WorkerOutcome(rank, None, self._explained(error, ends))
            else:
                if is_stream and reference is not None:
                    items[rank].append(value)
                    continue
                outcome = WorkerOutcome(rank, value)
            del pending[stream]
            yield outcome

    def _failed_or_late(
        self, pending: dict[Any, int], left_s: float
    ) -> Iterator[WorkerOutcome]:
        """Remove the workers that can no longer answer."""
        self._note_look()
        raise_if_lost()
        for stream, rank in list(pending.items()):
            # Of a worker on a lost node, Ray itself says nothing for a long time.
            supervisor = self._supervisor
            failure = None if supervisor is None else supervisor.failure_of(rank)
            if failure is not None:
                del pending[stream]
                error = failure_error(failure, self._what, self._method_name)
                yield WorkerOutcome(rank, None, error)
            elif left_s <= 0:
                del pending[stream]
                yield WorkerOutcome(rank, None, self._late([stream]))

    def _item(
        self, reference: Any, streams: Sequence[Any], counts: Mapping[int, int]
    ) -> Any:
        try:
            return ray.get(reference, timeout=max(self._left(), _SHORTEST_S))
        except ray.exceptions.GetTimeoutError:
            raise self._late([reference]) from None
        except ray.exceptions.RayError as error:
            ends = [end_of(stream) for stream in streams]
            explained = self._explained(error, ends)
            came = ", ".join(f"worker {r}: {n}" for r, n in counts.items())
            explained.add_note(f"results that had come before: {came}")
            raise explained from explained.__cause__

    def _left(self) -> float:
        # Ray takes a negative time for no limit in one call, for an error in another.
        return max(0.0, self._began + self._deadline_s - time.monotonic())

    def _note_look(self) -> None:
        self._looked_at = time.monotonic()
        with _looking_lock:
            _looking.add(self)

    def _look_around(self) -> None:
        """Raise if a worker has failed, even one that this wait does not wait for."""
        self._note_look()
        raise_if_lost()
        if self._supervisor is None:
            return
        root = self._supervisor.failure_since(self._began)
        if root is not None:
            raise failure_error(root, self._what, self._method_name)

    def _explained(
        self, error: BaseException, references: Sequence[Any]
    ) -> DistributedError:
        if not isinstance(error, ray.exceptions.RayTaskError):
            # Whatever is said of one worker, nothing else is behind it.
            raise_if_lost()
        if self._supervisor is None:
            return translate_failure(error, self._what)
        return self._supervisor.explain(
            error, self._what, references, self._method_name
        )

    def _late(self, late: Sequence[Any]) -> DeadlineExceededError:
        names = [worker_of(reference) for reference in late[:_MOST_NAMED]]
        if len(late) > _MOST_NAMED:
            names.append(f"{len(late) - _MOST_NAMED} more")
        return DeadlineExceededError(
            f"{self._what} did not end in {self._deadline_s:g} s; still waiting for "
            f"{', '.join(names)}. They may be at work or stuck: look at their logs, or "
            "raise the deadline"
        )


def end_of(stream: Any) -> Any:
    """Return the reference that is ready when a call has ended."""
    return stream._generator_ref if isinstance(stream, ObjectRefGenerator) else stream
