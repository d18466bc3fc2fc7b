"""The results of one call on many workers.

A wait is one `ray.get` of all references, which costs what Ray costs. Where it takes
longer than a second, the wait looks once a second whether a worker of the group has
failed, also one that it does not wait for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray import ObjectRefGenerator

from rl_distributed.cluster.watch import raise_if_lost
from rl_distributed.errors import (
    CallCancelledError,
    ConfigError,
    DeadlineExceededError,
    DistributedError,
)
from rl_distributed.workers.failures import (
    actor_of,
    failure_error,
    translate_failure,
    worker_of,
)

if TYPE_CHECKING:
    from rl_distributed.workers.group import RayWorkerGroup
    from rl_distributed.workers.supervise import GroupSupervisor

__all__ = [
    "DEFAULT_DEADLINE_S",
    "CallReferences",
    "MultiWorkerFuture",
    "WorkerResult",
    "end_of",
    "fetch",
]

DEFAULT_DEADLINE_S = 3_600.0
_MOST_NAMED = 8
# A wait shorter than this costs what Ray costs; longer ones look around so often.
_LOOK_S = 1.0
_SHORTEST_S = 0.001


class WorkerResult(NamedTuple):
    """One result of one worker; from `RayWorkerGroup.iter_results`."""

    rank: int
    position: int
    """0, 1, 2, ... for the items of a generator method; 0 for other methods."""
    value: Any


class CallReferences(list[Any]):
    """Ray references of one call, one for each called worker, in the order of ranks."""

    def __init__(
        self,
        references: Sequence[Any],
        method_name: str,
        called_workers: Sequence[int],
        repeat: Callable[[int], Any] | None = None,
    ) -> None:
        super().__init__(references)
        self.method_name = method_name
        self.called_workers = called_workers
        self.repeat = repeat
        """Makes the call again on the worker at a position; None: it may run once."""


@dataclass
class MultiWorkerFuture:
    """What `RayWorkerGroup.run_all_workers_sharded_data` returns."""

    futures: list[Any]
    """One Ray reference, or generator of references, for each called worker."""
    return_from_workers: list[int] | None = None
    """Workers whose results are kept; None: all that were called."""
    called_workers: list[int] | None = None
    """The worker of each future; None: worker i for future i."""
    method_name: str = ""
    """For messages."""
    group: RayWorkerGroup | None = field(default=None, repr=False, compare=False)
    """The group that was called."""
    repeat: Callable[[int], Any] | None = field(default=None, repr=False, compare=False)
    """Makes the call again on the worker at a position; None: it may run once."""
    _is_cancelled: bool = field(default=False, init=False, repr=False, compare=False)

    def get_results(
        self,
        worker_group: RayWorkerGroup | None = None,
        return_generators_as_proxies: bool = False,
        deadline_s: float | None = None,
    ) -> list[Any]:
        """Wait for all workers and return the results in the order of the workers.

        Items of generator methods come in one flat list, all of the first worker's
        before the second's. The failure of any worker of the group ends the wait.

        Args:
            worker_group: the group that was called; gives messages its name, and the
                deadline where none is given. None: the group that made the call.
            return_generators_as_proxies: return the generators of references instead
                of their items.
            deadline_s: how long to wait for all of them together.

        Raises:
            WorkerMethodError: a method raised; `UserError` comes as itself.
            WorkerDiedError: a worker is gone; raised at once, whatever the others do.
            WorkerHungError: a worker gives no sign of life, or is past the deadline of
                its call.
            CallCancelledError: the call was cancelled.
            DeadlineExceededError: the time is up.
        """
        group = worker_group or self.group
        wait = _Wait(group, self._what(group), deadline_s, self.method_name)
        while True:
            try:
                return self._collect(wait, return_generators_as_proxies)
            except DistributedError as error:
                if not self._is_called_again(group, error):
                    raise

    def iter_results(
        self, *, ordered: bool = True, deadline_s: float | None = None
    ) -> Iterator[WorkerResult]:
        """Results one by one, while the workers go on.

        Args:
            ordered: all of one worker before those of the next, in the order of the
                workers; False: whatever comes first. The items of one worker are in
                order in either case.
            deadline_s: how long all of them together may take.

        Yields:
            Every result once, with its worker and its index there. When an error is
            raised, all that was yielded before it is whole and final.

        Raises:
            Error: like `get_results`.
        """
        wait = _Wait(self.group, self._what(self.group), deadline_s, self.method_name)
        self._check_cancelled()
        try:
            yield from self._in_turn(wait) if ordered else self._as_they_come(wait)
        except DistributedError:
            if self.group is not None:
                self.group.supervisor.recover(self.group, is_patient=False)
            raise

    def _as_they_come(self, wait: _Wait) -> Iterator[WorkerResult]:
        called, places = self._places()
        kept = {called[place] for place in places}
        # Those that answer nothing may still fail.
        return (r for r in wait.items(self.futures, called) if r.rank in kept)

    def _in_turn(self, wait: _Wait) -> Iterator[WorkerResult]:
        called, places = self._places()
        turns = [called[place] for place in places]
        waiting: dict[int, list[WorkerResult]] = {rank: [] for rank in turns}
        open_ranks = set(called)
        turn = 0
        for result in wait.items(self.futures, called, open_ranks):
            if result.rank in waiting:
                waiting[result.rank].append(result)
            while turn < len(turns):
                yield from waiting[turns[turn]]
                waiting[turns[turn]].clear()
                if turns[turn] in open_ranks:
                    break
                turn += 1
        for rank in turns[turn:]:
            yield from waiting[rank]

    def cancel(self, *, grace_s: float = 5.0, force: bool = True) -> bool:
        """Give the call up.

        Calls that have not begun are dropped when it is their turn. A running method
        finds out by `is_cancelled()`; generator methods stop at their next item and
        async methods at their next `await`. Who asks for results gets
        `CallCancelledError`.

        Args:
            grace_s: how long a running method may take to notice.
            force: end workers that go on after that. The policy of the group decides
                whether they are started again.

        Returns:
            True if no worker went on.
        """
        self._is_cancelled = True
        if self.group is None:
            for future in self.futures:
                ray.cancel(future, force=False, recursive=False)
            return True
        called, _ = self._places()
        watch = self.group.supervisor.watch
        ends = {end_of(f): rank for rank, f in zip(called, self.futures, strict=True)}
        for end, rank in ends.items():
            watch.cancel(rank, end.task_id().hex())
        _, pending = ray.wait(
            list(ends), num_returns=len(ends), timeout=grace_s, fetch_local=False
        )
        beats = watch.ask([ends[end] for end in pending], _LOOK_S)
        running = [
            end
            for end in pending
            if (beat := beats.get(ends[end])) and end.task_id().hex() in beat.calls
        ]
        if running and force:
            cause = (
                f"it went on with method {self.method_name!r} for {grace_s:g} s after "
                "the call was cancelled"
            )
            actors = {actor_of(reference) for reference in running}
            self.group.supervisor.end_calls(actors, "cancelled", cause)
        return not running

    def _what(self, group: RayWorkerGroup | None) -> str:
        method = f"method {self.method_name!r}" if self.method_name else "a call"
        return method if group is None else f"{method} of group {group.name!r}"

    def _places(self) -> tuple[Sequence[int], list[int]]:
        """The worker of each future, and which futures answer."""
        called = (
            range(len(self.futures))
            if self.called_workers is None
            else self.called_workers
        )
        kept = self.return_from_workers
        if kept is None or kept == called:
            return called, list(range(len(called)))
        position = {worker: place for place, worker in enumerate(called)}
        return called, [position[worker] for worker in kept]

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise CallCancelledError(
                f"{self._what(self.group)} was cancelled; it has no results"
            )

    def _collect(self, wait: _Wait, as_proxies: bool) -> list[Any]:
        self._check_cancelled()
        called, places = self._places()
        if any(isinstance(future, ObjectRefGenerator) for future in self.futures):
            if as_proxies:
                return [self.futures[place] for place in places]
            streams: dict[int, list[Any]] = {rank: [] for rank in called}
            for rank, _, value in wait.items(self.futures, called):
                streams[rank].append(value)
            return [item for place in places for item in streams[called[place]]]
        results = wait.all(self.futures)
        if len(places) == len(results):
            return results
        return [results[place] for place in places]

    def _is_called_again(
        self, group: RayWorkerGroup | None, error: DistributedError
    ) -> bool:
        """After a failure: let the group recover; whether the call was made again."""
        if group is None or group.supervisor.incident is None:
            return False
        if isinstance(error, CallCancelledError):
            return False
        called, _ = self._places()
        before = [group.incarnation(rank) for rank in called]
        group.supervisor.recover(group, is_patient=self.repeat is not None)
        if self.repeat is None or group.supervisor.incident is not None:
            return False
        again = [
            place
            for place, rank in enumerate(called)
            if group.incarnation(rank) != before[place]
        ]
        for place in again:
            self.futures[place] = self.repeat(place)
        return bool(again)


def fetch(references: Sequence[Any], what: str, deadline_s: float) -> list[Any]:
    """Wait for Ray references; raise the first failure at once, as one of our errors.

    Args:
        references: what to wait for.
        what: what is going on, for messages.
        deadline_s: how long to wait for all of them together.
    """
    return _Wait(None, what, deadline_s).all(references)


class _Wait:
    """One wait for the results of a group, with one deadline for all of it."""

    def __init__(
        self,
        group: RayWorkerGroup | None,
        what: str,
        deadline_s: float | None,
        method_name: str = "",
    ) -> None:
        if deadline_s is None:
            deadline_s = DEFAULT_DEADLINE_S if group is None else group.call_deadline_s
        if not deadline_s > 0:
            raise ConfigError(f"deadline_s must be positive: got {deadline_s}")
        self._supervisor: GroupSupervisor | None = (
            None if group is None else (group.supervisor)
        )
        self._what = what
        self._method_name = method_name
        self._deadline_s = deadline_s
        self._began = time.monotonic()

    def all(self, references: Sequence[Any]) -> list[Any]:
        """All values, in order."""
        references = list(references)
        first_s = min(self._left(), _LOOK_S)
        try:
            results: list[Any] = ray.get(references, timeout=first_s)
        except ray.exceptions.GetTimeoutError:
            return self._all_late(references)
        except ray.exceptions.RayError as error:
            explained = self._explained(error, references)
            raise explained from explained.__cause__
        return results

    def _all_late(self, references: Sequence[Any]) -> list[Any]:
        """The same for calls that take longer: look around from time to time."""
        pending = list(dict.fromkeys(references))
        values: dict[Any, Any] = {}
        while pending:
            left_s = self._left()
            ready, pending = ray.wait(
                pending,
                num_returns=len(pending),
                timeout=min(left_s, _LOOK_S),
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
                list(pending), num_returns=1, timeout=min(left_s, _LOOK_S)
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

    def _look_around(self) -> None:
        """Whether a worker has failed that this wait does not itself wait for."""
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
    """The reference that is ready when a call has ended."""
    return stream._generator_ref if isinstance(stream, ObjectRefGenerator) else stream
