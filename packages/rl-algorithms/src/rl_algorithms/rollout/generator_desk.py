"""`GeneratorDesk`: batches waiting rows into calls and loads weights between calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rl_algorithms.errors import AlgorithmError
from rl_distributed.batch.batched_data_dict import (
    BatchedDataDict,
)
from rl_distributed.errors import DeadlineExceededError, WorkerError
from rl_models.errors import WeightSyncError
from rl_models.interfaces import GenerationInterface
from rl_models.model_traits import GeneratorTraits
from rl_models.types import (
    GenerationDatumSpec,
    GenerationInput,
    GenerationOutputSpec,
    SamplingParams,
)

__all__ = ["GeneratorDesk", "SampledRow"]


class SampledRow(Protocol):
    """A row that waits for the generator; called in the threads of the desk."""

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        ...

    @property
    def sampling(self) -> tuple[bool, SamplingParams | None]:
        """Whether the most likely token is taken, and how to sample otherwise.

        Rows of one call share them; None: as the generator is set.
        """
        ...

    def note_version(self, version: int) -> None:
        """Be told which weights have sampled it, before it gets its answer."""
        ...

    def question(self) -> BatchedDataDict[GenerationDatumSpec]:
        """Return the row that `generate` takes."""
        ...

    def answer(self, output: BatchedDataDict[GenerationOutputSpec]) -> None:
        """Take the row that `generate` gave back."""
        ...

    def fail(self, error: Exception) -> None:
        """Be told why it could not be sampled."""
        ...


class GeneratorDesk:
    """Threads that call a generator, one for each call that it takes at a time.

    A call takes all waiting rows that are sampled alike, so that a generator that
    decodes batches gets them. Weights are loaded while no call is in flight, before any
    waiting call. Nothing is sampled after a load that failed, or after restarted
    replicas could not get their weights, until another load succeeds.

    Args:
        generation: The generator.
        pad_token_id: Token that pads rows to one length.
        load: Loads a weight version into the generator; returns the generator's own
            number of that version.
        version: Version that the generator serves now.
        on_answer: Called with each row that has arrived, or with the error.
        on_loaded: Called with each version that the generator has loaded.
        on_failure: Called with an exception that ended a thread or a load, or that
            kept replicas from getting their weights again.
    """

    def __init__(
        self,
        generation: GenerationInterface,
        pad_token_id: int,
        load: Callable[[int], int],
        version: int,
        *,
        on_answer: Callable[[Any, Exception | None], None],
        on_loaded: Callable[[int], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._generation, self._pad = generation, pad_token_id
        self._load, self._version = load, version
        self._number = generation.weight_version
        self._on_answer, self._on_loaded = on_answer, on_loaded
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting: list[SampledRow] = []
        self._due: int | None = None
        self._num_calls = 0
        self._is_loading = self._is_closed = False
        self._has_weights = True
        # A generator that does not say so may not be safe to call from several threads.
        limit = max(1, GeneratorTraits.of(generation).calls_at_once)
        self._threads = [
            threading.Thread(target=self._run, name=f"ahead-sample-{n}", daemon=True)
            for n in range(limit)
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
        """Load a version once no call is in flight; no call begins before that."""
        with self._changed:
            self._due = version
            self._changed.notify_all()

    def close(self, deadline_s: float) -> None:
        """Begin no further call, and wait for those in flight."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: not self._num_calls and not self._is_loading, deadline_s
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
            self._num_calls += 1
            return lambda: self._call(jobs)

    @property
    def _may_load(self) -> bool:
        return self._due is not None and not self._num_calls and not self._is_loading

    @property
    def _may_call(self) -> bool:
        is_free = self._due is None and not self._is_loading and self._has_weights
        return is_free and bool(self._waiting)

    def _load_now(self, version: int) -> None:
        has_weights = False
        try:
            self._number = self._load(version)
            self._version, has_weights = version, True
        except WeightSyncError as error:
            # The thread goes on: the weights may have been those of a trainer that is
            # lost, and the one that replaces it sends its own.
            self._on_failure(error)
        finally:
            with self._changed:
                # Some replicas may have the new weights and others not.
                self._is_loading, self._has_weights = False, has_weights
                self._changed.notify_all()
        if has_weights:
            self._on_loaded(version)

    def _call(self, jobs: Sequence[SampledRow]) -> None:
        try:
            if jobs:
                self._sample(jobs)
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def _sample(self, jobs: Sequence[SampledRow]) -> None:
        rows: list[GenerationInput] = [job.question() for job in jobs]
        if any("stop_strings" in row for row in rows):
            for row in rows:
                # A column must be in all rows or in none.
                row.setdefault("stop_strings", [None])
        batch: GenerationInput = BatchedDataDict.from_batches(
            rows, {"input_ids": self._pad}
        )
        # No weights are loaded while the call is in flight.
        version = self._version
        try:
            greedy, sampling = jobs[0].sampling
            output = self._generation.generate(batch, greedy, sampling=sampling)
        except WeightSyncError as error:
            self._wait_for_weights(jobs, error)
            return
        except (WorkerError, DeadlineExceededError) as error:
            # A lost or slow worker costs these answers, as in a synchronous rollout. An
            # exception of the generator's own code is a bug and ends the run.
            for job in jobs:
                job.note_version(version)
                job.fail(error)
                self._on_answer(job, error)
            return
        self._check(output["weight_version"].tolist())
        for place, job in enumerate(jobs):
            job.note_version(version)
            job.answer(output.slice(place, place + 1))
        for job in jobs:
            self._on_answer(job, None)

    def _wait_for_weights(
        self, jobs: Sequence[SampledRow], error: WeightSyncError
    ) -> None:
        """Keep rows for the next load: restarted replicas could not get their weights.

        This happens while the trainer is lost as well. The rows have no token of this
        call, so they may be sampled with other weights.
        """
        with self._changed:
            self._waiting[:0] = jobs
            self._has_weights = False
        self._on_failure(error)

    def _check(self, numbers: list[int]) -> None:
        wrong = sorted({number for number in numbers if number != self._number})
        if wrong:
            raise AlgorithmError(
                f"the generator sampled with weights {wrong} while it served "
                f"{self._number}: its weights must change only by a weight sync of the "
                "run"
            )
