"""The results of one call on many workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray import ObjectRefGenerator

from rl_distributed.errors import CallCancelledError, DistributedError
from rl_distributed.workers.failures import actor_of
from rl_distributed.workers.supervise import GroupSupervisor
from rl_distributed.workers.wait import (
    DEFAULT_DEADLINE_S,
    LOOK_S,
    Wait,
    WorkerOutcome,
    WorkerResult,
    end_of,
)

__all__ = ["CallReferences", "CalledGroup", "MultiWorkerFuture"]


class CalledGroup(Protocol):
    """The group as its futures see it; `RayWorkerGroup` implements it."""

    name: str
    call_deadline_s: float
    supervisor: GroupSupervisor

    def incarnation(self, rank: int) -> int:
        """Return how many processes the worker of this rank has had before."""


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
    """The results of one call on several workers, some of which may still run."""

    futures: list[Any]
    """One Ray reference, or generator of references, for each called worker."""
    return_from_workers: list[int] | None = None
    """Workers whose results are kept; None: all that were called."""
    called_workers: list[int] | None = None
    """The worker of each future; None: worker i for future i."""
    method_name: str = ""
    """For messages."""
    group: CalledGroup | None = field(default=None, repr=False, compare=False)
    """The group that was called."""
    repeat: Callable[[int], Any] | None = field(default=None, repr=False, compare=False)
    """Makes the call again on the worker at a position; None: it may run once."""
    _is_cancelled: bool = field(default=False, init=False, repr=False, compare=False)

    def get_results(
        self,
        worker_group: CalledGroup | None = None,
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
        wait = self._wait(group, deadline_s)
        while True:
            try:
                return self._collect(wait, return_generators_as_proxies)
            except DistributedError as error:
                if not self._is_called_again(group, error):
                    raise

    def iter_results(
        self, *, ordered: bool = True, deadline_s: float | None = None
    ) -> Iterator[WorkerResult]:
        """Yield results one by one, while the workers continue.

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
        wait = self._wait(self.group, deadline_s)
        self._check_cancelled()
        try:
            yield from self._in_turn(wait) if ordered else self._as_they_come(wait)
        except DistributedError:
            if self.group is not None:
                # Items have been yielded already, so the call is not retried and its
                # caller should not wait for a node.
                self.group.supervisor.recover(is_patient=False)
            raise

    def outcomes(self, deadline_s: float | None = None) -> Iterator[WorkerOutcome]:
        """Yield how the call ended on each worker; failures are not raised.

        For work that continues without some of the workers. Nothing is restarted or
        retried here: `RayWorkerGroup.recover` and `restart` do that.

        Args:
            deadline_s: how long to wait for all of them together. A worker that has
                not ended by then has a `DeadlineExceededError`.

        Yields:
            One outcome for each worker that answers: its value, or an error explained
            as `get_results` would raise it.

        Raises:
            ClusterLostError: Ray itself is gone, and with it every worker.
            CallCancelledError: the call was cancelled before.
        """
        self._check_cancelled()
        called, places = self._places()
        kept = {called[place] for place in places}
        wait = self._wait(self.group, deadline_s)
        return (o for o in wait.outcomes(self.futures, called) if o.rank in kept)

    def _as_they_come(self, wait: Wait) -> Iterator[WorkerResult]:
        called, places = self._places()
        kept = {called[place] for place in places}
        # Workers whose results are dropped are waited for too, as they may fail.
        return (r for r in wait.items(self.futures, called) if r.rank in kept)

    def _in_turn(self, wait: Wait) -> Iterator[WorkerResult]:
        called, places = self._places()
        turns = [called[place] for place in places]
        # Items that arrive out of turn are buffered, so that no worker blocks another.
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
        """Cancel the call.

        Calls that have not started are dropped when their turn comes. A running method
        finds out by `is_cancelled()`; generator methods stop at their next item and
        async methods at their next `await`. Asking for results then raises
        `CallCancelledError`.

        Args:
            grace_s: how long a running method may take to notice.
            force: terminate workers that continue after that. The policy of the group
                decides whether they are restarted.

        Returns:
            True if no worker continued.
        """
        self._is_cancelled = True
        if self.group is None:
            for future in self.futures:
                ray.cancel(future, force=False, recursive=False)
            return True
        called, _ = self._places()
        # Through the watch: Ray's own flag can miss a call in transit and
        # stay set for the next.
        watch = self.group.supervisor.watch
        ends = {end_of(f): rank for rank, f in zip(called, self.futures, strict=True)}
        for end, rank in ends.items():
            watch.cancel(rank, end.task_id().hex())
        _, pending = ray.wait(
            list(ends), num_returns=len(ends), timeout=grace_s, fetch_local=False
        )
        beats = watch.ask([ends[end] for end in pending], LOOK_S)
        # Pending calls that have not started are dropped when their turn comes; only
        # workers that are running the call may have to be ended.
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

    def _wait(self, group: CalledGroup | None, deadline_s: float | None) -> Wait:
        supervisor = None if group is None else group.supervisor
        if deadline_s is None:
            deadline_s = DEFAULT_DEADLINE_S if group is None else group.call_deadline_s
        return Wait(supervisor, self._what(group), deadline_s, self.method_name)

    def _what(self, group: CalledGroup | None) -> str:
        method = f"method {self.method_name!r}" if self.method_name else "a call"
        return method if group is None else f"{method} of group {group.name!r}"

    def _places(self) -> tuple[Sequence[int], list[int]]:
        """Return the worker of each future, and which futures answer."""
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

    def _collect(self, wait: Wait, as_proxies: bool) -> list[Any]:
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
        self, group: CalledGroup | None, error: DistributedError
    ) -> bool:
        """Let the group recover from a failure; return whether the call is retried."""
        if group is None or group.supervisor.incident is None:
            return False
        if isinstance(error, CallCancelledError):
            return False
        called, _ = self._places()
        # A worker that was not replaced has finished the call or is still running it,
        # and must not run it twice.
        before = [group.incarnation(rank) for rank in called]
        group.supervisor.recover(is_patient=self.repeat is not None)
        # An incident that is still open means that the workers did not come back.
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
