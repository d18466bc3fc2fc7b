"""The results of one call on many workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRefGenerator

from rl_distributed.errors import ConfigError, DeadlineExceededError
from rl_distributed.workers.failures import translate_failure, worker_of

if TYPE_CHECKING:
    from rl_distributed.workers.group import RayWorkerGroup

__all__ = ["DEFAULT_DEADLINE_S", "MultiWorkerFuture", "fetch"]

DEFAULT_DEADLINE_S = 3_600.0
_MOST_NAMED = 8


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

    def get_results(
        self,
        worker_group: RayWorkerGroup | None = None,
        return_generators_as_proxies: bool = False,
        deadline_s: float | None = None,
    ) -> list[Any]:
        """Wait for all workers and return the results in the order of the workers.

        Items of generator methods come in one flat list, all of the first worker's
        before the second's.

        Args:
            worker_group: the group that was called; gives messages its name, and the
                deadline where none is given.
            return_generators_as_proxies: return the generators of references instead
                of their items.
            deadline_s: how long to wait for all of them together.

        Raises:
            WorkerMethodError: a method raised; `UserError` comes as itself.
            WorkerDiedError: a worker is gone; raised at once, whatever the others do.
            DeadlineExceededError: the time is up.
        """
        if deadline_s is None:
            deadline_s = (
                DEFAULT_DEADLINE_S
                if worker_group is None
                else worker_group.call_deadline_s
            )
        group = "" if worker_group is None else f" of group {worker_group.name!r}"
        called = (
            list(range(len(self.futures)))
            if self.called_workers is None
            else self.called_workers
        )
        kept = called if self.return_from_workers is None else self.return_from_workers
        position = {worker: place for place, worker in enumerate(called)}
        places = [position[worker] for worker in kept]
        method = f"method {self.method_name!r}" if self.method_name else "a call"
        what = method + group

        if any(isinstance(future, ObjectRefGenerator) for future in self.futures):
            if return_generators_as_proxies:
                return [self.futures[place] for place in places]
            streams = _drain(self.futures, what, deadline_s)
            return [item for place in places for item in streams[place]]
        results = fetch(self.futures, what, deadline_s)
        return [results[place] for place in places]


def fetch(references: Sequence[Any], what: str, deadline_s: float) -> list[Any]:
    """Wait for Ray references; raise the first failure at once, as one of our errors.

    Args:
        references: what to wait for.
        what: what is going on, for messages.
        deadline_s: how long to wait for all of them together.
    """
    _check_deadline(deadline_s)
    try:
        results: list[Any] = ray.get(list(references), timeout=deadline_s)
    except ray.exceptions.GetTimeoutError:
        distinct = list(dict.fromkeys(references))
        _, late = ray.wait(
            distinct, num_returns=len(distinct), timeout=0, fetch_local=False
        )
        raise _deadline_error(what, deadline_s, late) from None
    except ray.exceptions.RayError as error:
        raise translate_failure(error, what) from None
    return results


def _drain(generators: Sequence[Any], what: str, deadline_s: float) -> list[list[Any]]:
    """Items of every generator; a failure of any is raised at once."""
    _check_deadline(deadline_s)
    end = time.monotonic() + deadline_s
    items: list[list[Any]] = [[] for _ in generators]
    pending = {generator: place for place, generator in enumerate(generators)}
    while pending:
        left = max(0.0, end - time.monotonic())
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=left)
        if not ready:
            raise _deadline_error(what, deadline_s, list(pending))
        for generator in ready:
            place = pending[generator]
            try:
                reference = next(generator)
            except StopIteration:
                del pending[generator]
                continue
            except ray.exceptions.RayError as error:
                raise translate_failure(error, what) from None
            items[place] += fetch([reference], what, max(0.001, end - time.monotonic()))
    return items


def _check_deadline(deadline_s: float) -> None:
    if not deadline_s > 0:
        raise ConfigError(f"deadline_s must be positive: got {deadline_s}")


def _deadline_error(
    what: str, deadline_s: float, late: Sequence[Any]
) -> DeadlineExceededError:
    names = [worker_of(reference) for reference in late[:_MOST_NAMED]]
    if len(late) > _MOST_NAMED:
        names.append(f"{len(late) - _MOST_NAMED} more")
    return DeadlineExceededError(
        f"{what} did not end in {deadline_s:g} s; still waiting for "
        f"{', '.join(names)}. They may be at work or stuck: look at their logs, or "
        "raise the deadline"
    )
