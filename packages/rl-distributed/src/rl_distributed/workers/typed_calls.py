"""Calls of workers as calls: `group.all.run(lr=0.1)`, `group[0].run(lr=0.1)`.

```python
group: RayWorkerGroup[Trial] = RayWorkerGroup(cluster, Trial)
group.all.call(Trial.run, lr=0.1).result()       # list[float]: mypy knows Trial.run
group.all.run(lr=0.1).result()                   # the same, unchecked
group[3].options(call_deadline_s=30).call(Trial.run, lr=0.1).result()
group.each.run(lr=[0.1, 0.2]).result()           # one item for each worker
group.sharded("data").embed(rows=shards).result()
```
They send what the `run_*` methods of the group send; the layer below is the same.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast

from ray import ObjectRefGenerator

from rl_distributed.errors import ConfigError
from rl_distributed.workers.future import MultiWorkerFuture
from rl_distributed.workers.wait import WorkerOutcome, WorkerResult

__all__ = ["AllCalls", "CallFuture", "EachCalls", "OneCalls", "ShardedCalls"]

_BY_PLACE = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class CallFuture(Generic[T]):
    """The results of a call: to wait for, to await, or to take as they come.

    Args:
        future: of the call.
        unpack: from the results of all workers to what `result` returns.
    """

    def __init__(
        self, future: MultiWorkerFuture, unpack: Callable[[list[Any]], T]
    ) -> None:
        self.future = future
        """The future of the layer below, with Ray's references."""
        self._unpack = unpack

    def result(self, deadline_s: float | None = None) -> T:
        """Wait for all workers that were called.

        Args:
            deadline_s: how long; None: `call_deadline_s` of the group.

        Raises:
            Error: like `MultiWorkerFuture.get_results`.
        """
        return self._unpack(self.future.get_results(deadline_s=deadline_s))

    def __await__(self) -> Generator[Any, None, T]:
        # Ray's wait looks around for failed workers; it has a thread of its own here.
        return asyncio.to_thread(self.result).__await__()

    def __iter__(self) -> Iterator[WorkerResult]:
        """Iterate over the results as they come, of whichever worker."""
        return self.future.iter_results(ordered=False)

    def outcomes(self, deadline_s: float | None = None) -> Iterator[WorkerOutcome]:
        """Iterate over how the call ended on each worker; see `MultiWorkerFuture`."""
        return self.future.outcomes(deadline_s)

    def cancel(self, *, grace_s: float = 5.0, force: bool = True) -> bool:
        """Give the call up; see `MultiWorkerFuture.cancel`."""
        return self.future.cancel(grace_s=grace_s, force=force)


class CallableGroup(Protocol):
    """The part of a group that these calls need."""

    def future_of(
        self, references: MultiWorkerFuture | Sequence[Any]
    ) -> MultiWorkerFuture:
        """Return the future of a call that returned references."""

    def call_workers(
        self,
        method_name: str,
        ranks: Sequence[int] | None,
        arguments: Mapping[str, Any],
        call_deadline_s: float | None,
    ) -> MultiWorkerFuture:
        """Call a method of some workers, or of all, with the same arguments."""

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *,
        split_kwargs: Mapping[str, Sequence[Any]] | None = None,
        call_deadline_s: float | None = None,
    ) -> Sequence[Any]:
        """Call a method of all workers, each with its own items."""

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *,
        in_sharded_axes: Sequence[str] | None = None,
        replicate_on_axes: Sequence[str] | None = None,
        output_is_replicated: Sequence[str] | None = None,
        common_kwargs: Mapping[str, Any] | None = None,
        split_kwargs: Mapping[str, Any] | None = None,
        call_deadline_s: float | None = None,
    ) -> MultiWorkerFuture:
        """Call a method with arguments that are split along named axes."""


@dataclass(frozen=True)
class _Calls(Generic[W]):
    """Base of all ways to call.

    Its own names begin with an underscore, but for `call` and `options`: a method of
    the worker with one of these names is called by `call(Worker.options, ...)`.
    """

    _group: CallableGroup
    _call_deadline_s: float | None = None

    def options(self, *, call_deadline_s: float | None = None) -> Self:
        """Return the same way to call, with options apart from arguments.

        Args:
            call_deadline_s: how long a call may take before its worker is considered
                hung; None: no limit of its own.
        """
        return replace(self, _call_deadline_s=call_deadline_s)

    def _send(self, name: str, kwargs: Mapping[str, Any]) -> CallFuture[Any]:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Callable[..., CallFuture[Any]]:
        # copy, pickle and notebooks probe for such names and take any
        # answer as support.
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> CallFuture[Any]:
            if args:
                raise ConfigError(
                    f"arguments of {name!r} are given by name: got {len(args)} by "
                    f"position; name them, or pass the method itself: "
                    f"call(Worker.{name}, ...)"
                )
            return self._send(name, kwargs)

        return call


class AllCalls(_Calls[W]):
    """`group.all`: every worker, the same arguments; results in the order of ranks."""

    def call(
        self,
        method: Callable[Concatenate[W, P], R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> CallFuture[list[R]]:
        """Call a method of the class of the workers, with arguments that mypy checks.

        Args:
            method: such as `Trial.run`.
            *args: its arguments.
            **kwargs: its arguments by name.
        """
        arguments = _by_name(method, args, kwargs)
        return cast("CallFuture[list[R]]", self._send(method.__name__, arguments))

    def _send(self, name: str, kwargs: Mapping[str, Any]) -> CallFuture[Any]:
        future = self._group.call_workers(name, None, kwargs, self._call_deadline_s)
        return CallFuture(future, list)


@dataclass(frozen=True)
class OneCalls(_Calls[W]):
    """`group[rank]`: one worker; `result` is what its method returned.

    Of a generator method, `result` is the list of its items.
    """

    _rank: int = 0

    def call(
        self,
        method: Callable[Concatenate[W, P], R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> CallFuture[R]:
        """Call a method of the class of the worker, with arguments that mypy checks.

        Args:
            method: such as `Trial.run`.
            *args: its arguments.
            **kwargs: its arguments by name.
        """
        arguments = _by_name(method, args, kwargs)
        return cast("CallFuture[R]", self._send(method.__name__, arguments))

    def _send(self, name: str, kwargs: Mapping[str, Any]) -> CallFuture[Any]:
        ranks = (self._rank,)
        future = self._group.call_workers(name, ranks, kwargs, self._call_deadline_s)
        is_stream = isinstance(future.futures[0], ObjectRefGenerator)
        return CallFuture(future, list if is_stream else itemgetter(0))


class EachCalls(_Calls[W]):
    """`group.each`: every worker, its own item of each list."""

    def call(
        self, method: Callable[Concatenate[W, ...], R], /, **lists: Sequence[Any]
    ) -> CallFuture[list[R]]:
        """Call a method of the class of the workers.

        Args:
            method: such as `Trial.run`.
            **lists: for each argument, one item for each worker.
        """
        return cast("CallFuture[list[R]]", self._send(method.__name__, lists))

    def _send(self, name: str, kwargs: Mapping[str, Any]) -> CallFuture[Any]:
        references = self._group.run_all_workers_multiple_data(
            name, split_kwargs=kwargs, call_deadline_s=self._call_deadline_s
        )
        return CallFuture(self._group.future_of(references), list)


@dataclass(frozen=True)
class ShardedCalls(_Calls[W]):
    """`group.sharded(...)`: arguments that are split along named axes."""

    _axes: tuple[str, ...] = ()
    _replicate: tuple[str, ...] = ()
    _same_output: tuple[str, ...] = ()
    _common: Mapping[str, Any] | None = None

    def call(
        self, method: Callable[Concatenate[W, ...], R], /, **shards: Any
    ) -> CallFuture[list[R]]:
        """Call a method of the class of the workers.

        Args:
            method: such as `Embedder.embed`.
            **shards: for each argument, nested lists with one item for each coordinate
                of the axes.
        """
        return cast("CallFuture[list[R]]", self._send(method.__name__, shards))

    def _send(self, name: str, kwargs: Mapping[str, Any]) -> CallFuture[Any]:
        future = self._group.run_all_workers_sharded_data(
            name,
            in_sharded_axes=self._axes,
            replicate_on_axes=self._replicate,
            output_is_replicated=self._same_output,
            common_kwargs=self._common,
            split_kwargs=kwargs,
            call_deadline_s=self._call_deadline_s,
        )
        return CallFuture(future, list)


def _by_name(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a method by their names, as workers take them."""
    if not args:
        return kwargs
    parameters = list(inspect.signature(method).parameters.values())
    # Arguments travel by name, and variadic ones have none.
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ConfigError(
            f"arguments of {method.__name__!r} are sent by name, and *args have none: "
            "give the method parameters with names"
        )
    # The first is the worker itself.
    by_place = [p.name for p in parameters if p.kind in _BY_PLACE][1:]
    if len(args) > len(by_place):
        raise ConfigError(
            f"{method.__name__!r} takes {len(by_place)} arguments by place"
            f" ({', '.join(by_place) or 'none'}): got {len(args)}; leave out the "
            "others, or give them by name"
        )
    named = dict(zip(by_place, args, strict=False))
    twice = sorted(named.keys() & kwargs.keys())
    if twice:
        raise ConfigError(
            f"arguments of {method.__name__!r} must be given once: got {twice[0]!r} by "
            "place and by name; leave out one of the two"
        )
    return {**named, **kwargs}
