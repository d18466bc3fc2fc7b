"""`GeneratorDesk`: batches waiting rows into calls, and loads weights.

| thread | consumes | produces | waits for | is unblocked by |
|---|---|---|---|---|
| of a call | waiting rows | answers | a row, the end of a load | `ask`, the load |
| of a load | a version | `on_loaded` | no call in flight, if between calls | a call |

The deadlines of these waits are those of the schedule that gives the desk its work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from rl_algorithms.errors import AlgorithmError
from rl_algorithms.rollout.call_rows import CallRows, SampledRow
from rl_distributed.batch.batched_data_dict import (
    BatchedDataDict,
)
from rl_distributed.errors import DeadlineExceededError, WorkerError
from rl_models.errors import GenerationError, WeightSyncError
from rl_models.interfaces import GenerationInterface
from rl_models.model_traits import GeneratorTraits
from rl_models.types import (
    GenerationOutputSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GeneratorDesk", "LoadableWeights"]

# A generator with more replicas than that spreads the rows of each call over several.
_MOST_CALLS = 64


class LoadableWeights(Protocol):
    """Versions of weights that a generator may have to load."""

    def number_of(self, version: int) -> int:
        """Return the generator's own number of a version.

        Raises:
            WeightSyncError: There is no such version any more.
        """
        ...

    def load(self, version: int) -> int:
        """Load a version into the generator; return the generator's number of it.

        Raises:
            WeightSyncError: It could not be loaded.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Served:
    """Weights that the generator had when a call began."""

    version: int
    number: int
    num_loads: int = 0
    """Number of loads until then."""
    num_failures: int = 0
    """Number of loads until then that have failed."""


class GeneratorDesk:
    """Threads that call a generator, one for each call that it takes at a time.

    There are 64 at most, however many replicas it has and rows are in flight.

    A call takes all waiting rows that are sampled alike, so that a generator that
    decodes batches gets them. Weights are loaded before any waiting call: while no call
    is in flight, or, with `in_flight`, at once. Nothing is sampled after a load that
    failed, or after restarted replicas could not get their weights, until another load
    succeeds.

    Args:
        generation: The generator.
        pad_token_id: Token that pads rows to one length.
        weights: The versions that it may have to load.
        version: Version that the generator serves now.
        in_flight: Whether weights are loaded while calls are in flight.
        on_answers: Called with rows that have arrived together, or with their error.
        on_loaded: Called with each version that the generator has loaded.
        on_failure: Called with an exception that ended a thread or a load, or that
            kept replicas from getting their weights again.
    """

    def __init__(
        self,
        generation: GenerationInterface,
        pad_token_id: int,
        weights: LoadableWeights,
        version: int,
        *,
        in_flight: bool = False,
        on_answers: Callable[[Sequence[Any], Exception | None], None],
        on_loaded: Callable[[int], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._generation, self._pad = generation, pad_token_id
        self._weights, self._in_flight = weights, in_flight
        number = generation.weight_version
        self._served = _Served(version, number)
        self._versions = {number: version}
        """First version of each of the generator's numbers, of those still served."""
        self._in_calls: list[_Served] = []
        """What the generator had when each call in flight began."""
        self._on_answers, self._on_loaded = on_answers, on_loaded
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting: list[SampledRow] = []
        self._due: int | None = None
        self._is_loading = self._is_closed = False
        self._has_weights = True
        # A generator that does not say so may not be safe to call from several threads.
        calls = GeneratorTraits.of(generation).calls_at_once
        self._max_calls = min(max(1, calls), _MOST_CALLS)
        # One more that can load while all others are in a call.
        num_threads = self._max_calls + (1 if in_flight else 0)
        self._threads = [
            threading.Thread(target=self._run, name=f"ahead-sample-{n}", daemon=True)
            for n in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, jobs: Sequence[SampledRow]) -> None:
        """Sample rows."""
        with self._changed:
            self._waiting.extend(jobs)
            # One thread is enough: it takes all waiting jobs.
            self._changed.notify()

    def take_stranded(self) -> list[SampledRow]:
        """Return the rows that wait for weights, which are not sampled any more.

        Empty while the generator has weights, or loads some.
        """
        with self._changed:
            if self._has_weights or self._is_loading or self._due is not None:
                return []
            rows, self._waiting = self._waiting, []
        return [row for row in rows if not row.is_cancelled]

    def load(self, version: int) -> None:
        """Load a version, now or once no call is in flight; none begins before that."""
        with self._changed:
            self._due = version
            self._changed.notify_all()

    def close(self, deadline_s: float) -> None:
        """Begin no further call, and wait for those in flight."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: not self._in_calls and not self._is_loading, deadline_s
            )

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                work()
        except BaseException as error:
            # Of any kind: a thread that ended unnoticed would leave the schedule
            # waiting.
            self._on_failure(error)

    def _next(self) -> Callable[[], None] | None:
        """Wait for work; return None once the desk is closed."""
        with self._changed:
            # `ask`, `load` and `close` notify. The deadline of the wait is the
            # schedule's.
            self._changed.wait_for(
                lambda: self._is_closed or self._may_load or self._may_call
            )
            if self._is_closed:
                return None
            if self._due is not None:
                # Loading comes before waiting calls, or a steady stream of answers
                # would keep old weights in use forever.
                version, self._due = self._due, None
                self._is_loading = True
                # Returned, not run here: the call takes long and must not hold the
                # lock.
                return lambda: self._load_now(version)
            waiting = [job for job in self._waiting if not job.is_cancelled]
            jobs = [job for job in waiting if job.sampling == waiting[0].sampling]
            self._waiting = [
                job for job in waiting if job.sampling != waiting[0].sampling
            ]
            if self._waiting:
                self._changed.notify()
            served = self._served
            self._in_calls.append(served)
            return lambda: self._call(jobs, served)

    @property
    def _may_load(self) -> bool:
        is_free = self._in_flight or not self._in_calls
        return self._due is not None and not self._is_loading and is_free

    @property
    def _may_call(self) -> bool:
        is_free = self._due is None and not self._is_loading and self._has_weights
        has_room = len(self._in_calls) < self._max_calls
        return is_free and has_room and bool(self._waiting)

    def _load_now(self, version: int) -> None:
        has_weights = False
        try:
            # Before the load: calls in flight may return tokens of these weights while
            # other replicas still load them.
            self._expect(version, self._weights.number_of(version))
            number = self._weights.load(version)
            with self._changed:
                num_loads = self._served.num_loads + 1
                self._served = replace(
                    self._served, version=version, number=number, num_loads=num_loads
                )
            has_weights = True
        except WeightSyncError as error:
            # The thread goes on: the weights may have been those of a trainer that is
            # lost, and the one that replaces it sends its own.
            self._on_failure(error)
        finally:
            with self._changed:
                # Some replicas may have the new weights and others not.
                self._is_loading, self._has_weights = False, has_weights
                if not has_weights:
                    num_failures = self._served.num_failures + 1
                    self._served = replace(self._served, num_failures=num_failures)
                self._changed.notify_all()
        if has_weights:
            self._on_loaded(version)

    def _expect(self, version: int, number: int) -> None:
        """Note which version a number of the generator stands for from now on."""
        with self._changed:
            # A trainer that was lost goes back in versions, and those above do not
            # count any more. Steps without training share a number.
            oldest = min((call.version for call in self._in_calls), default=version)
            known = {n: v for n, v in self._versions.items() if oldest <= v < version}
            self._versions = {number: version, **known}

    def _call(self, jobs: Sequence[SampledRow], served: _Served) -> None:
        try:
            if jobs:
                self._sample(jobs, served)
        finally:
            with self._changed:
                self._in_calls.remove(served)
                self._changed.notify_all()

    def _sample(self, jobs: Sequence[SampledRow], served: _Served) -> None:
        rows = CallRows(jobs)
        jobs = rows.rows
        batch = rows.questions(self._pad)
        try:
            greedy, sampling = jobs[0].sampling
            output = self._generation.generate(batch, greedy, sampling=sampling)
        except WeightSyncError as error:
            self._wait_for_weights(jobs, error, served)
            return
        except GenerationError:
            # Of a replica that has lost its weights in a load, whose failure is
            # reported by the load.
            if not self._has_failed_to_load(served):
                raise
            self._keep(jobs)
            return
        except (WorkerError, DeadlineExceededError) as error:
            # A lost or slow worker costs these answers, as in a synchronous rollout. An
            # exception of the generator's own code is a bug and ends the run.
            for job in jobs:
                job.note_version(served.version)
                job.fail(error)
            self._on_answers(jobs, error)
            return
        self._note_versions(jobs, output, served)
        rows.answer(output)
        self._on_answers(jobs, None)

    def _wait_for_weights(
        self, jobs: Sequence[SampledRow], error: WeightSyncError, served: _Served
    ) -> None:
        """Keep rows for the next load: restarted replicas could not get their weights.

        This happens while the trainer is lost as well. The rows have no token of this
        call, so they may be sampled with other weights.
        """
        with self._changed:
            # Otherwise a load has brought all replicas newer weights meanwhile.
            is_last = self._served.num_loads == served.num_loads
            if is_last:
                self._has_weights = False
            self._keep(jobs)
        if is_last:
            self._on_failure(error)

    def _keep(self, jobs: Sequence[SampledRow]) -> None:
        """Sample rows again once there are weights, before all others."""
        with self._changed:
            self._waiting[:0] = jobs
            self._changed.notify()

    def _has_failed_to_load(self, served: _Served) -> bool:
        """Return whether a load has failed since a call began."""
        with self._changed:
            # One replica may have failed while others still load. A load has deadlines.
            self._changed.wait_for(lambda: not self._is_loading)
            return self._served.num_failures > served.num_failures

    def _note_versions(
        self,
        jobs: Sequence[SampledRow],
        output: BatchedDataDict[GenerationOutputSpec],
        served: _Served,
    ) -> None:
        """Tell rows which versions have sampled their oldest and newest tokens."""
        with self._changed:
            versions: Mapping[int, int] = self._versions if self._in_flight else {}
        # What the generator had at first may have been the number of several versions,
        # of which it had the newest.
        versions = {**versions, served.number: served.version}
        rows = _numbers(output, of_tokens=self._in_flight)
        for job, numbers in zip(jobs, rows, strict=True):
            # A row that nobody wants may be of weights that were withdrawn.
            for number in [served.number] if job.is_cancelled else numbers:
                if versions.get(number, -1) < served.version:
                    raise AlgorithmError(
                        f"the generator sampled with weights {number} while it served "
                        f"{served.number}: its weights must change only by a weight "
                        "sync of the run"
                    )
                job.note_version(versions[number])


def _numbers(
    output: BatchedDataDict[GenerationOutputSpec], *, of_tokens: bool
) -> list[list[int]]:
    """Return the numbers of the weights that sampled each row, without repetition.

    Args:
        output: The rows.
        of_tokens: Return those of all tokens, or else that of the oldest one.
    """
    oldest: Tensor = output["weight_version"]
    versions: Tensor = oldest[:, None]
    if of_tokens:
        versions = output.get("token_versions", versions)
    return [
        sorted({first, *row} - {-1})
        for first, row in zip(oldest.tolist(), versions.tolist(), strict=True)
    ]
