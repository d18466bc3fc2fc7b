"""`Controller`: passes events to the schedule, one at a time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, TypeVar

from rl_algorithms.asynchronous.actions import Action
from rl_algorithms.asynchronous.event_log import EventLog
from rl_algorithms.asynchronous.events import Event, Tick, WorkerReady
from rl_algorithms.asynchronous.schedule import Schedule
from rl_algorithms.asynchronous.workers import Worker
from rl_distributed.errors import DeadlineExceededError
from rl_distributed.private_files import create_private_folder, private_opener

__all__ = ["Controller"]

T = TypeVar("T")
_ANSWER_S = 60.0
# Events after which `send` is called although more of them wait.
_MOST_UNSENT = 64


class Controller:
    """A thread that owns a schedule and receives events from all other threads.

    Args:
        schedule: The schedule.
        carry_out: Starts or prepares the schedule's actions without waiting for them;
            called in the controller's thread.
        send: Starts what `carry_out` has prepared, once no event waits; called in the
            controller's thread.
        on_failure: Called with an exception that ended the thread.
        alive: Returns the workers known not to hang; called when a deadline has passed,
            because the schedule considers a silent worker hung.
        log: File for events and actions; None for no log.
    """

    def __init__(
        self,
        schedule: Schedule,
        carry_out: Callable[[Sequence[Action]], None],
        send: Callable[[], None],
        on_failure: Callable[[BaseException], None],
        alive: Callable[[], Iterable[Worker]] = tuple,
        log: Path | None = None,
    ) -> None:
        self._schedule, self._carry_out, self._send = schedule, carry_out, send
        self._num_unsent = 0
        self._on_failure, self._alive = on_failure, alive
        # One queue for all, because the schedule is not thread-safe: one thread works
        # on it and needs no lock.
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._asked: set[Future[Any]] = set()
        """Questions without an answer."""
        self._has_ended = False
        self._asking = threading.Lock()
        self._log: EventLog | None = None
        self._log_path = log
        self._thread = threading.Thread(
            target=self._run, name="ahead-controller", daemon=True
        )

    def start(self, state: Any = None) -> None:
        """Start to process events.

        Args:
            state: State that the schedule was resumed from, for the log.
        """
        if self._log_path is not None:
            create_private_folder(self._log_path.parent)
            # A run that was resumed from an earlier step writes this log once more, and
            # two runs in one log could not be replayed.
            self._log_path.unlink(missing_ok=True)
            self._log = EventLog(self._schedule.settings, state)
        self._thread.start()

    def tell(self, kind: Callable[..., Event], **values: Any) -> None:
        """Report an event; may be called from any thread.

        Args:
            kind: Class of the event.
            **values: Fields of the event without its time, which is set when the event
                is processed.
        """
        # The time is read in the controller's thread: read here, events of several
        # threads could reach the schedule with times that run backwards.
        self.do(lambda: self._pass_on(kind(time.monotonic(), **values)))

    def tell_all(
        self, kind: Callable[..., Event], each: Sequence[Mapping[str, Any]]
    ) -> None:
        """Report events of one kind together, which wakes the thread once.

        Args:
            kind: Class of the events.
            each: Fields of each event, as for `tell`.
        """

        def pass_on() -> None:
            for values in each:
                self._pass_on(kind(time.monotonic(), **values))

        self.do(pass_on)

    def do(self, work: Callable[[], None]) -> None:
        """Run something in the controller's thread, in order with the events."""
        self._queue.put(work)

    def ask(self, question: Callable[[Schedule], T], timeout_s: float = _ANSWER_S) -> T:
        """Ask the schedule, after it has processed all events reported so far.

        Args:
            question: Called in the controller's thread.
            timeout_s: How long the answer may take.

        Raises:
            DeadlineExceededError: The controller has ended, or is too slow.
        """
        answer: Future[T] = Future()
        with self._asking:
            if self._has_ended:
                answer.cancel()
            self._asked.add(answer)
        self.do(lambda: answer.set_result(question(self._schedule)))
        try:
            return answer.result(timeout_s)
        except CancelledError:
            raise DeadlineExceededError(
                "the controller of the asynchronous run has ended"
            ) from None
        except TimeoutError:
            raise DeadlineExceededError(
                "the controller of the asynchronous run did not answer within "
                f"{timeout_s:g} s"
            ) from None
        finally:
            with self._asking:
                self._asked.discard(answer)

    def close(self, deadline_s: float) -> None:
        """Stop processing events."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def _run(self) -> None:
        try:
            while True:
                is_idle = self._queue.empty()
                if is_idle or self._num_unsent >= _MOST_UNSENT:
                    # Answers that arrive together are scored in few calls, and asked
                    # for as one batch. The limit is for a queue that is never empty.
                    self._num_unsent = 0
                    self._send()
                if is_idle:
                    # Write while idle, many events at once: opening the file takes as
                    # long as processing an event.
                    self._write()
                try:
                    work = self._queue.get(timeout=self._left_s())
                except queue.Empty:
                    # A deadline has passed only if no event is waiting: it may have
                    # been this process that was stopped, with the results in the queue.
                    for worker in self._alive():
                        self._pass_on(WorkerReady(time.monotonic(), worker, 0))
                    self._pass_on(Tick(time.monotonic()))
                    continue
                if work is None:
                    return
                work()
        except BaseException as error:
            # Whatever it is: the trainer waits for this thread, and would wait on.
            self._on_failure(error)
        finally:
            try:
                self._write()
            finally:
                self._refuse_questions()

    def _refuse_questions(self) -> None:
        """Answer no more, so that nobody waits for the thread that has ended."""
        with self._asking:
            self._has_ended = True
            for answer in self._asked:
                answer.cancel()

    def _left_s(self) -> float | None:
        end_s = self._schedule.next_deadline_s()
        return None if end_s is None else max(0.0, end_s - time.monotonic())

    def _pass_on(self, event: Event) -> None:
        if self._log is None:
            actions = self._schedule.on(event)
        else:
            actions = self._log.record(self._schedule, event)
        self._carry_out(actions)
        self._num_unsent += 1

    def _write(self) -> None:
        if self._log is None or self._log_path is None:
            return
        lines = "".join(f"{line}\n" for line in self._log.take_lines())
        if not lines:
            return
        with open(self._log_path, "a", opener=private_opener) as file:
            file.write(lines)
