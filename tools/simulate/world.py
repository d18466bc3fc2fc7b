"""`World`: a driver, its workers and a clock, all simulated, around a real schedule.

```
heap of (time, number, what) ─> message ─> Schedule.on ─> actions ─> new entries
                                    │                        │
                                    └──────> Ledger <────────┘      story, if wanted
```
All randomness comes from one generator seeded by the scenario, so runs are
reproducible.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tools.simulate.invariants import Ledger, ViolationError
from tools.simulate.processes import Process, Rows, Weights
from tools.simulate.scenario import Fault, Scenario
from tools.simulate.story import tell

from rl_algorithms.asynchronous import actions as act, events as ev
from rl_algorithms.asynchronous.event_log import EventLog
from rl_algorithms.asynchronous.schedule import Schedule
from rl_algorithms.asynchronous.workers import TRAINER, Worker
from rl_algorithms.errors import ScheduleError

__all__ = ["Outcome", "World", "simulate"]

_NET_S = 0.02
_MAX_EVENTS = 20_000
# Faults strike in any life of the driver.
_ALWAYS = -1
_SILENT = ("dies", "noticed_late", "vanishes", "hangs", "node_lost")


@dataclass
class Outcome:
    """The result of a simulated run."""

    scenario: Scenario
    violation: ViolationError | None = None
    num_events: int = 0
    ledger: Ledger | None = None
    logs: list[EventLog] = field(default_factory=list)
    """One for each life of the driver."""
    story: list[str] = field(default_factory=list)
    end: act.Finish | act.Fail | None = None


class World:
    """Runs a scenario.

    Args:
        scenario: What is simulated.
        tells: Whether to keep a story and the logs of the schedule.
    """

    def __init__(self, scenario: Scenario, *, tells: bool = False) -> None:
        self.scenario = scenario
        self.outcome = Outcome(scenario)
        self.ledger = self.outcome.ledger = Ledger(scenario)
        self._tells = tells
        self._rng = random.Random(scenario.seed * 2 + 1)
        self._now_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._count = 0
        self._life = 0
        self._durable: tuple[str, Any] | None = None
        """State and books of the newest complete checkpoint."""
        self._poison: set[int] = set()
        self._bad_starts: set[Worker] = set()
        self._never_starts: set[Worker] = set()
        self._bad_steps: set[int] = set()
        for fault in scenario.faults:
            self._at(fault.at_s, lambda fault=fault: self._strike(fault), life=_ALWAYS)  # type: ignore[misc]
        self._begin_life(None)

    # --- time -------------------------------------------------------------------------

    def _at(
        self, at_s: float, what: Callable[[], None], life: int | None = None
    ) -> None:
        self._count += 1
        number = self._life if life is None else life
        heapq.heappush(self._heap, (at_s, self._count, number, what))

    def _after(self, delay_s: float, what: Callable[[], None]) -> None:
        self._at(self._now_s + delay_s, what)

    def run(self) -> Outcome:
        """Run to the end, or to the first violation."""
        try:
            while self.outcome.end is None:
                self._next()
        except ViolationError as violation:
            self.outcome.violation = violation
        except (ScheduleError, AssertionError, KeyError, ValueError) as error:
            detail = f"{type(error).__name__}: {error}"
            self.outcome.violation = ViolationError(
                "the schedule does not raise", detail
            )
        if self.outcome.violation is not None:
            self._say(f"BROKEN {self.outcome.violation}")
        return self.outcome

    def _next(self) -> None:
        deadline_s = self._schedule.next_deadline_s()
        if self._heap and (deadline_s is None or self._heap[0][0] <= deadline_s):
            at_s, _, life, what = heapq.heappop(self._heap)
            if life in (_ALWAYS, self._life):
                self._now_s = max(self._now_s, at_s)
                what()
            return
        if deadline_s is None:
            raise ViolationError("no deadlock", self._schedule.waits())
        self._now_s = max(self._now_s, deadline_s)
        self._deliver(ev.Tick(self._now_s))
        later_s = self._schedule.next_deadline_s()
        if later_s is not None and later_s <= self._now_s:
            raise ViolationError("each wait ends by its deadline", "a tick ends none")

    # --- the driver -------------------------------------------------------------------

    def _begin_life(self, resumed: Fault | None) -> None:
        settings = self.scenario.settings(resumed)
        self._schedule = Schedule(settings)
        self.processes: dict[Worker, Process] = {}
        # The checkpoint may now hold answers sampled under other settings.
        self.ledger.may_drop_stale |= settings != self.ledger.settings
        self.ledger.begin_life(settings)
        state = None
        self.rows: dict[int, Rows] = self.ledger.go_back(
            None if self._durable is None else self._durable[1]
        )
        # A new driver knows nothing of steps beyond its checkpoint.
        self.ledger.furthest = self.ledger.books.step
        if self._durable is not None:
            state = json.loads(self._durable[0])
            self._schedule.load_state_dict(state)
        self._log = EventLog(settings, state)
        if self._tells:
            self.outcome.logs.append(self._log)
        self._deliver(ev.Begin(self._now_s))

    def _deliver(self, event: ev.Event) -> None:
        self.outcome.num_events += 1
        if self.outcome.num_events > _MAX_EVENTS:
            raise ViolationError("no deadlock", "the run does not come to its end")
        self._say(tell(event))
        self._note(event)
        if self._tells:
            actions = self._log.record(self._schedule, event)
        else:
            actions = self._schedule.on(event)
        for action in actions:
            self._say("    " + tell(action))
            if self.outcome.end is not None:
                raise ViolationError("nothing follows the end", tell(action))
            self.ledger.check(action, self._now_s, self.processes, self.rows)
            self._carry_out(action)
        self.ledger.credit(event, self.rows)
        if self.outcome.end is None:
            self.ledger.after(self._now_s, self.processes, self.rows)

    def _note(self, event: ev.Event) -> None:
        worker: Worker | None = getattr(event, "worker", None)
        incarnation: int | None = getattr(event, "incarnation", None)
        if incarnation is not None and worker is None:
            worker = TRAINER
        if worker is None:
            return
        process = self.processes[worker]
        if process.incarnation == incarnation and not process.has_failed:
            self.ledger.note(event, process, self.rows)
        if isinstance(event, ev.WorkerFailed) and process.incarnation == incarnation:
            process.has_failed = process.is_silent = True

    def _say(self, line: str) -> None:
        if self._tells:
            self.outcome.story.append(f"{self._now_s:8.2f} s  {line}")

    def _carry_out(self, action: act.Action) -> None:
        match action:
            case act.StartWorker():
                self._start(action)
            case act.StopWorker(worker):
                process = self.processes[worker]
                process.is_silent = process.has_failed = True
            case act.LoadWeights():
                self._after(_NET_S, lambda: self._load(action))
            case act.Sample():
                self._after(_NET_S, lambda: self._sample(action))
            case act.Score():
                self._after(_NET_S, lambda: self._score(action))
            case act.Discard(rows):
                self.rows.pop(rows, None)
            case act.Train():
                self._train(action)
            case act.SaveCheckpoint():
                self._save(action)
            case act.Finish() | act.Fail():
                self.outcome.end = action

    # --- workers ----------------------------------------------------------------------

    def _start(self, action: act.StartWorker) -> None:
        worker = action.worker
        process = self.processes[worker] = Process(worker, action.incarnation)
        delay_s = process.delay(self._rng, 0.5, 2.0)
        if worker in self._bad_starts | self._never_starts:
            self._bad_starts.discard(worker)
            if self._rng.random() < 0.5:
                self._fails(process, "it did not start", delay_s)
            process.is_silent = True
            return
        if worker == TRAINER:
            self._after(delay_s, lambda: self._restore(process))
        else:
            self._send(process, delay_s, lambda at_s: ev.WorkerReady(
                at_s, worker, action.incarnation))  # fmt: skip

    def _restore(self, trainer: Process) -> None:
        if trainer.is_silent:
            return
        state = None
        if trainer.incarnation:
            durable = self._durable
            state = None if durable is None else json.loads(durable[0])
            saved = self.ledger.go_back(None if durable is None else durable[1])
            # The driver has the rows of the checkpoint, beside those that it keeps.
            self.rows = {**self.rows, **saved}
            self.ledger.is_going_back = True
        trainer.weights = (trainer.incarnation, self.ledger.books.step)
        self._deliver(ev.TrainerReady(self._now_s, trainer.incarnation, state))

    def _send(
        self, process: Process, delay_s: float, make: Callable[[float], ev.Event]
    ) -> None:
        """Deliver a message from a process later, unless it is silent by then."""

        def say() -> None:
            if not process.is_silent:
                # Messages in flight arrive, whatever happens to their sender.
                self._after(_NET_S, lambda: self._deliver(make(self._now_s)))

        self._after(delay_s, say)

    def _fails(self, process: Process, reason: str, delay_s: float) -> None:
        """Report a failure."""
        worker, incarnation = process.worker, process.incarnation

        def notice() -> None:
            self._deliver(ev.WorkerFailed(self._now_s, worker, incarnation, reason))

        self._after(delay_s, notice)

    def _current(self, worker: Worker, incarnation: int) -> Process | None:
        process = self.processes[worker]
        if process.incarnation != incarnation or process.is_silent:
            return None
        return process

    def _load(self, action: act.LoadWeights) -> None:
        process = self._current(action.worker, action.incarnation)
        if process is None:
            return
        weights: Weights = (action.trainer, action.version)
        process.loads.append(weights)

        def done() -> None:
            if process.is_silent:
                return
            process.loads.remove(weights)
            if process.use("old") and process.weights is not None:
                process.lies = True
            else:
                process.weights = weights
            event = ev.WeightsLoaded(
                self._now_s, action.worker, action.incarnation, *weights
            )
            self._deliver(event)

        begin_s = max(self._now_s, process.loads_until_s)
        process.loads_until_s = begin_s + process.delay(self._rng, 0.3, 0.8)
        self._at(process.loads_until_s, done)

    def _sample(self, action: act.Sample) -> None:
        process = self._current(action.worker, action.incarnation)
        if process is None:
            return
        begun = process.weights
        delay_s = process.delay(self._rng, 0.5, 3.0)
        if process.use("late"):
            delay_s += self._schedule.settings.limits.answer_s
        self._after(delay_s, lambda: self._sampled(action, process, begun))

    def _sampled(
        self, action: act.Sample, process: Process, begun: Weights | None
    ) -> None:
        if process.is_silent or begun is None or process.weights is None:
            return
        number, worker = action.prompt.number, action.worker
        if process.use("raises") or (number in self._poison and worker.rank % 2):
            key = (self._now_s, worker, action.incarnation, action.task)
            self._deliver(ev.AnswerFailed(*key, "it raised"))
            return
        oldest, newest = sorted((begun, process.weights))
        for _ in range(1 + process.use("twice")):
            # It reaches the driver, which keeps it unless told otherwise.
            self._arrives(action, oldest, newest)

    def _arrives(self, action: act.Sample, oldest: Weights, newest: Weights) -> None:
        number, sample = action.prompt.number, action.name.sample
        if action.task not in self.rows:
            self.rows[action.task] = Rows(number, sample, oldest, newest)
        tokens = 10 + self._rng.randrange(90)
        self._deliver(ev.Answered(
            self._now_s, action.worker, action.incarnation, action.task,
            oldest[1], newest[1], tokens))  # fmt: skip

    def _score(self, action: act.Score) -> None:
        process = self._current(action.worker, action.incarnation)
        if process is None:
            return
        delay_s = process.delay(self._rng, 0.1, 0.6)
        if process.use("late"):
            delay_s += self._schedule.settings.limits.score_s
        self._after(delay_s, lambda: self._scored(action, process))

    def _scored(self, action: act.Score, process: Process) -> None:
        if process.is_silent:
            return
        rows = self.rows.get(action.rows)
        key = (self._now_s, action.worker, action.incarnation, action.task)
        if rows is not None and rows.prompt in self._poison:
            self._deliver(ev.Scored(*key, math.nan))
        elif process.use("raises"):
            self._deliver(ev.ScoreFailed(*key, "it raised"))
        else:
            if rows is not None:
                rows.is_scored = True
            for _ in range(1 + process.use("twice")):
                self._deliver(ev.Scored(*key, self._rng.random()))

    def _train(self, action: act.Train) -> None:
        process = self._current(TRAINER, action.incarnation)
        if process is None:
            return

        def done() -> None:
            if action.step in self._bad_steps and not process.is_silent:
                process.is_silent = True
                self._fails(process, "a rank ran out of memory", 0.1)
            if process.is_silent:
                return
            process.weights = (process.incarnation, action.step + 1)
            for _ in range(1 + process.use("twice")):
                event = ev.StepTrained(self._now_s, action.incarnation, action.step)
                self._deliver(event)

        self._after(process.delay(self._rng, 2.0, 2.0), done)

    def _save(self, action: act.SaveCheckpoint) -> None:
        process = self._current(TRAINER, action.incarnation)
        if process is None:
            return
        text = json.dumps(action.state)
        snapshot = self.ledger.snapshot(self.rows, action.state)

        def written() -> None:
            if process.is_silent:
                return
            self._durable = (text, snapshot)
            self.ledger.saved = snapshot
            # The driver may be killed between the two.
            self._send(process, _NET_S, lambda at_s: ev.CheckpointSaved(
                at_s, action.incarnation, action.step))  # fmt: skip

        self._after(process.delay(self._rng, 0.5, 1.5), written)

    # --- faults -----------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        self._say(f"FAULT {tell(fault)}")
        if fault.kind == "driver_killed":
            self._life += 1
            self._now_s += 1.0
            self._begin_life(fault)
            return
        if fault.worker is None:
            self._strike_run(fault)
            return
        for worker in (fault.worker, *fault.others):
            process = self.processes.get(worker)
            if process is not None and not process.is_silent:
                self._strike_process(fault, process)

    def _strike_run(self, fault: Fault) -> None:
        if fault.kind == "poison":
            self._poison.add(fault.number)
        elif fault.kind == "bad_step":
            self._bad_steps.add(fault.number)
        else:
            self.ledger.is_stopping = True
            self._deliver(ev.StopRequested(self._now_s, "somebody has asked"))

    def _strike_process(self, fault: Fault, process: Process) -> None:
        kind = fault.kind
        if kind in _SILENT:
            process.is_silent = True
            if kind in ("dies", "noticed_late"):
                late_s = 75.0 if kind == "noticed_late" else 0.0
                self._fails(process, "its process is gone", late_s + self._rng.random())
            elif kind == "node_lost" and self._rng.random() < 0.5:
                self._fails(process, "its node is gone", 10.0 * self._rng.random())
        elif kind == "slow":
            process.slowness, process.slow_left = float(fault.number), 4
        elif kind in ("starts_badly", "never_starts"):
            process.is_silent = True
            never = kind == "never_starts"
            (self._never_starts if never else self._bad_starts).add(process.worker)
            self._fails(process, "its process is gone", self._rng.random())
        else:
            name = {"answers_twice": "twice", "answers_late": "late",
                    "old_version": "old", "raises": "raises"}[kind]  # fmt: skip
            setattr(process, name, 2 if name == "raises" else 1)


def simulate(scenario: Scenario, *, tells: bool = False) -> Outcome:
    """Run a scenario; the outcome names the violated invariant, if any."""
    return World(scenario, tells=tells).run()
