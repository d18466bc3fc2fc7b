"""A driver whose workers never fail and answer in the order that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from rl_algorithms.asynchronous import actions as act, events as ev
from rl_algorithms.asynchronous.event_log import EventLog
from rl_algorithms.asynchronous.schedule import Schedule
from rl_algorithms.asynchronous.settings import ScheduleSettings
from rl_algorithms.asynchronous.workers import TRAINER

Choose = Callable[[Sequence[act.Action]], int]


def settings(**changes) -> ScheduleSettings:
    """Return settings of a small run."""
    values = {
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "prompts_per_epoch": 8,
        "num_generators": 2,
        "answers_per_generator": 2,
        "answers_per_environment": 2,
    }
    return ScheduleSettings(**{**values, **changes})


def worker_of(action):
    """Return the worker that an action addresses."""
    return getattr(action, "worker", TRAINER)


class Driver:
    """Carries out a schedule's actions; each event takes a second.

    `asked` holds the unanswered actions, `done` all actions so far.
    """

    def __init__(self, settings, state=None):
        self.schedule = Schedule(settings)
        if state is not None:
            self.schedule.load_state_dict(state)
        self.log = EventLog(settings, state)
        self.now_s = 0.0
        self.asked: list[act.Action] = []
        self.done: list[act.Action] = []
        self.durable = state
        self.weights: dict = {}

    def tell(self, event):
        """Pass an event to the schedule; return its actions."""
        actions = self.log.record(self.schedule, event)
        self.done += actions
        for action in actions:
            if isinstance(action, act.Cancel):
                self.asked = [
                    a for a in self.asked if getattr(a, "task", None) != action.task
                ]
            elif isinstance(action, act.StopWorker):
                self.asked = [a for a in self.asked if worker_of(a) != action.worker]
            elif isinstance(
                action,
                act.StartWorker
                | act.LoadWeights
                | act.Sample
                | act.Score
                | act.Train
                | act.SaveCheckpoint,
            ):
                self.asked.append(action)
        return actions

    def begin(self):
        return self.tell(ev.Begin(self.now_s))

    def answer(self, action, **changes):
        """Complete an action successfully; `changes` override fields of its result."""
        self.asked.remove(action)
        self.now_s += 1.0
        return self.tell(self.event_for(action, **changes))

    def event_for(self, action, **changes):
        at_s = self.now_s
        match action:
            case act.StartWorker(worker, incarnation) if worker.kind == "trainer":
                state = self.durable if incarnation else None
                return ev.TrainerReady(at_s, incarnation, state)
            case act.StartWorker(worker, incarnation):
                return ev.WorkerReady(at_s, worker, incarnation)
            case act.LoadWeights(worker, incarnation, trainer, version):
                self.weights[worker] = version
                return ev.WeightsLoaded(at_s, worker, incarnation, trainer, version)
            case act.Sample(worker=worker, incarnation=incarnation, task=task):
                versions = {
                    "oldest_version": action.version,
                    "newest_version": self.weights[worker],
                    "num_tokens": 7,
                    **changes,
                }
                return ev.Answered(at_s, worker, incarnation, task, **versions)
            case act.Score(worker=worker, incarnation=incarnation, task=task):
                reward = changes.get("reward", 1.0)
                return ev.Scored(at_s, worker, incarnation, task, reward)
            case act.Train(incarnation, step):
                return ev.StepTrained(at_s, incarnation, step)
            case act.SaveCheckpoint(incarnation, step, state):
                self.durable = json.loads(json.dumps(state))
                return ev.CheckpointSaved(at_s, incarnation, step)
        raise AssertionError(action)

    def run(self, choose: Choose = lambda asked: 0, max_events=2_000):
        """Start, and complete all requested actions in the chosen order."""
        if not self.log.entries:
            self.begin()
        for _ in range(max_events):
            if self.schedule.end is not None:
                return self
            self.answer(self.asked[choose(self.asked)])
        raise AssertionError("the run does not end")

    def of(self, kind):
        """Return all actions of a kind."""
        return [action for action in self.done if isinstance(action, kind)]

    def answer_all(self, kind):
        """Complete all requested actions of a kind, including those that follow."""
        while found := [a for a in self.asked if isinstance(a, kind)]:
            self.answer(found[0])

    @property
    def trained(self):
        """Prompts by step."""
        return [[g.prompt for g in action.groups] for action in self.of(act.Train)]


def ready(**changes):
    """Return a driver with running workers and generators that have weights."""
    driver = Driver(settings(**changes))
    driver.begin()
    driver.answer_all(act.StartWorker)
    driver.answer_all(act.LoadWeights)
    return driver


def one_worker(**changes):
    """Return such a driver with one generator that samples one answer at a time."""
    small = {
        "num_generators": 1,
        "num_generations_per_prompt": 1,
        "answers_per_generator": 1,
    }
    return ready(**{**small, "num_prompts_per_step": 1, **changes})


def finish(driver, sample):
    """Have an answer sampled and scored."""
    driver.answer(sample)
    driver.answer_all(act.Score)
