"""`Ledger`: the invariants at each event, from independent bookkeeping.

It sees the actions, what actually happens in the simulated workers, and the messages to
the schedule. It never looks inside the schedule.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from tools.simulate.processes import Process, Rows
from tools.simulate.scenario import Scenario

from rl_algorithms.asynchronous import actions as act, events as ev
from rl_algorithms.asynchronous.settings import ScheduleSettings
from rl_algorithms.asynchronous.workers import TRAINER, Worker

__all__ = ["Books", "Ledger", "ViolationError"]

_MARGIN_S = 1e-6


class ViolationError(Exception):
    """An invariant does not hold.

    Args:
        rule: Short name of the invariant.
        detail: What was found.
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule, self.detail = rule, detail


@dataclass
class Books:
    """The state of the prompts in the history of the current weights."""

    trained: dict[int, int] = field(default_factory=dict)
    """The training step of each prompt."""
    dropped: dict[int, str] = field(default_factory=dict)
    """The reason why each prompt was dropped."""
    live: set[int] = field(default_factory=set)
    """Prompts that are being sampled, waiting or in training."""
    tries: dict[tuple[int, int], int] = field(default_factory=dict)
    """Failures of each answer, by prompt and sample."""
    seeds: dict[tuple[int, int], int] = field(default_factory=dict)
    """Failures of each answer that require another seed."""
    step: int = 0
    """Number of completed steps."""


class Ledger:
    """Checks a simulated run.

    Args:
        scenario: What is simulated.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.books = Books()
        self.settings: ScheduleSettings = scenario.settings()
        self.saved: tuple[Books, dict[int, Rows]] | None = None
        self.furthest = 0
        self.may_drop_stale = False
        self._resumed_with = 0
        self._seeds_before: dict[tuple[int, int], int] = {}
        self.resumed = -1
        """How often the run went back to a checkpoint; each may count as an attempt."""
        self.begin_life(scenario.settings())

    def begin_life(self, settings: ScheduleSettings) -> None:
        """Forget what a new driver cannot know."""
        self.settings = settings
        self.due: dict[tuple[Any, ...], float] = {}
        self.confirmed: dict[Worker, tuple[int, int]] = {}
        self.sent: dict[Worker, tuple[int, int]] = {}
        self.restarts: dict[Worker, int] = {}
        self.under_way: dict[int, act.Sample] = {}
        self.scoring: dict[int, act.Score] = {}
        self.training: act.Train | None = None
        self.newest: tuple[int, int] | None = None
        self.sampled: set[int] = set()
        self.is_stopping = False
        self.asked: dict[int, float] = {}
        self.heard: dict[Worker, float] = {}
        self.lineage: dict[int, set[int]] = {}
        """Trainers that had the weights of each version, in the current history."""
        self.restored: set[int] = set()
        """Rows of the checkpoints that the run went back to."""
        self.is_going_back = False
        """Whether a trainer has just returned, and kept answers are being selected."""
        self.suspects: set[Worker] = set()
        """Workers with overdue work that have been silent since they got it."""

    # --- actions ----------------------------------------------------------------------

    def check(
        self,
        action: act.Action,
        now_s: float,
        processes: Mapping[Worker, Process],
        rows: Mapping[int, Rows],
    ) -> None:
        """Check an action before its execution."""
        match action:
            case act.StopWorker(worker=worker):
                self._check_stop(action, now_s, processes[worker])
            case act.StartWorker() | act.RetireWorker():
                self._check_worker(action, now_s)
            case act.LoadWeights():
                self._check_load(action, now_s)
            case act.Sample():
                self._check_sample(action, now_s, processes[action.worker])
            case act.Score():
                self._check_score(action, now_s, rows)
            case act.Cancel(worker=worker, task=task):
                self._check_cancel(worker, task, now_s)
            case act.Train():
                self._check_train(action, now_s, processes[TRAINER], rows)
            case act.SaveCheckpoint():
                self._check_save(action, now_s, rows)
            case act.Discard(task):
                self._check_discard(task, rows)
            case _:
                self._check_report(action, rows)

    def _check_report(self, action: act.Action, rows: Mapping[int, Rows]) -> None:
        match action:
            case act.DropGroup():
                self._check_drop(action)
            case act.Finish():
                self._check_finish(action, rows)
            case act.Fail(reason):
                self._check_fail(reason)

    def _check_discard(self, task: int, rows: Mapping[int, Rows]) -> None:
        """Fail if losing the trainer costs an answer of weights that still exist."""
        if not self.is_going_back or task in self.restored or task not in rows:
            return
        row = rows[task]
        key = (row.prompt, row.sample)
        is_same = self.books.seeds.get(key, 0) == self._seeds_before.get(key, 0)
        if is_same and row.prompt in self.books.live and self._exists(row):
            _fail("what still counts is kept", f"an answer to prompt {row.prompt}")

    def _exists(self, row: Rows) -> bool:
        """Return whether weights of the current history have sampled all tokens."""
        return all(
            trainer in self.lineage.get(version, ())
            for trainer, version in (row.oldest, row.newest)
        )

    def _check_cancel(self, worker: Worker, task: int, now_s: float) -> None:
        what = "score" if worker.kind == "environment" else "answer"
        overdue = now_s >= self.due.get((what, worker, task), inf)
        if overdue and self.heard.get(worker, 0.0) <= self.asked[task]:
            self.suspects.add(worker)
        self._end_task(task)

    def _check_stop(
        self, action: act.StopWorker, now_s: float, process: Process
    ) -> None:
        worker = action.worker
        overdue = any(
            due_s <= now_s for key, due_s in self.due.items() if key[1] == worker
        )
        if process.is_faultless and worker not in self.suspects and not overdue:
            _fail("nobody is ended who works", f"{worker} is, because {action.reason}")
        self._forget_worker(worker)
        self.due["restart", worker] = now_s + self.settings.restarts.max_backoff_s

    def _check_worker(
        self, action: act.StartWorker | act.RetireWorker, now_s: float
    ) -> None:
        worker, most = action.worker, self.settings.restarts.max_restarts
        self._forget_worker(worker)
        match action:
            case act.StartWorker(incarnation=incarnation):
                self.due["start", worker] = now_s + self.settings.limits.start_s
                if incarnation:
                    self.restarts[worker] = self.restarts.get(worker, 0) + 1
                    if self.restarts[worker] > most:
                        _fail("restarts are bounded", f"{worker} starts again")
            case act.RetireWorker() if self.restarts.get(worker, 0) < most:
                _fail(
                    "restarts are used up first",
                    f"{worker} is given up after {self.restarts.get(worker, 0)}",
                )

    def _forget_worker(self, worker: Worker) -> None:
        for key in [key for key in self.due if key[1] == worker]:
            del self.due[key]
        for task, sample in list(self.under_way.items()):
            if sample.worker == worker:
                del self.under_way[task]
        for task, score in list(self.scoring.items()):
            if score.worker == worker:
                del self.scoring[task]
        self.suspects.discard(worker)
        self.confirmed.pop(worker, None)
        self.sent.pop(worker, None)
        if worker == TRAINER:
            self.training, self.newest = None, None
            # Its weights are withdrawn, so nothing waits for their confirmation.
            for key in [key for key in self.due if key[0] == "load"]:
                del self.due[key]

    def _check_load(self, action: act.LoadWeights, now_s: float) -> None:
        weights = (action.trainer, action.version)
        if weights != self.newest:
            _fail("only the newest weights are sent", f"{weights} of {self.newest}")
        before = self.sent.get(action.worker)
        if before is not None and weights <= before:
            _fail(
                "versions rise",
                f"{action.worker} is to load version {action.version} again",
            )
        if self.settings.weight_updates == "between_answers" and any(
            sample.worker == action.worker for sample in self.under_way.values()
        ):
            _fail(
                "weights move between answers",
                f"{action.worker} is to load weights while it samples",
            )
        self.sent[action.worker] = weights
        self.due["load", action.worker] = now_s + self.settings.limits.load_s

    def _check_sample(self, action: act.Sample, now_s: float, process: Process) -> None:
        number, worker, books = action.prompt.number, action.worker, self.books
        if (number, self.confirmed.get(worker)) != (number, self.newest) or (
            self.newest is None or action.version != self.newest[1]
        ):
            _fail(
                "nothing is served that was not confirmed",
                f"{worker} has confirmed {self.confirmed.get(worker)} and is to sample "
                f"prompt {number} with version {action.version}",
            )
        if (process.weights != self.newest or process.loads) and not process.lies:
            _fail(
                "nothing is served that was not confirmed",
                f"{worker} really has {process.weights}, the newest is {self.newest}",
            )
        done = number in books.trained or number in books.dropped
        if done or not 0 <= number < self.scenario.num_prompts:
            _fail("each prompt is used at most once", f"prompt {number} comes again")
        place = divmod(number, self.settings.prompts_per_epoch)
        if (action.prompt.epoch, action.prompt.row) != place:
            _fail("prompts are those of the data", f"prompt {number}: {action.prompt}")
        key = (number, action.name.sample)
        self._check_name(action, key)
        if any(
            (other.prompt.number, other.name.sample) == key
            for other in self.under_way.values()
        ):
            _fail("an answer is sampled once at a time", f"answer {key} is twice")
        books.tries[key] = books.tries.get(key, -1) + 1
        if number not in books.live:
            self._check_use(number)
        books.live.add(number)
        self.under_way[action.task] = action
        self.asked[action.task] = now_s
        count = sum(s.worker == worker for s in self.under_way.values())
        if count > self.settings.answers_per_generator:
            _fail("work is bounded", f"{worker} has {count} answers under way")
        self.due["answer", worker, action.task] = now_s + self.settings.limits.answer_s

    def _check_use(self, number: int) -> None:
        """Fail if a prompt is started that no step of the run can train on."""
        limit, books = self.settings.max_num_steps, self.books
        if limit is None:
            return
        in_training = 0 if self.training is None else len(self.training.groups)
        next_step = books.step + (self.training is not None)
        places = (limit - next_step) * self.settings.num_prompts_per_step
        if len(books.live) - in_training >= places:
            _fail("nothing is sampled for no step", f"prompt {number} is")

    def _check_name(self, action: act.Sample, key: tuple[int, int]) -> None:
        name, per_step = action.name, self.settings.num_prompts_per_step
        wanted = (*divmod(key[0], per_step), key[1], self.books.seeds.get(key, 0))
        if tuple(name) != wanted:
            _fail("seeds are those of the prompt", f"{tuple(name)}, not {wanted}")
        most = self.settings.max_attempts + self.resumed
        if self.books.tries.get(key, -1) + 1 >= most:
            _fail("tries are bounded", f"answer {key} is tried again")
        if action.worker in self.suspects:
            _fail("a silent worker gets no more work", f"{action.worker} does")

    def _check_score(
        self, action: act.Score, now_s: float, rows: Mapping[int, Rows]
    ) -> None:
        if action.rows not in rows:
            _fail("rows are kept until they are used", f"rows {action.rows} are gone")
        if action.rows in self.sampled:
            key = (rows[action.rows].prompt, rows[action.rows].sample)
            self.books.tries[key] = self.books.tries.get(key, 0) + 1
        self.sampled.add(action.rows)
        self.scoring[action.task] = action
        self.asked[action.task] = now_s
        if action.worker in self.suspects:
            _fail("a silent worker gets no more work", f"{action.worker} does")
        count = sum(s.worker == action.worker for s in self.scoring.values())
        if count > self.settings.answers_per_environment:
            _fail("work is bounded", f"{action.worker} has {count} answers to score")
        self.due["score", action.worker, action.task] = (
            now_s + self.settings.limits.score_s
        )

    def _check_train(
        self,
        action: act.Train,
        now_s: float,
        trainer: Process,
        rows: Mapping[int, Rows],
    ) -> None:
        books, settings = self.books, self.settings
        if self.training is not None or ("save", TRAINER) in self.due:
            _fail("the trainer does one thing at a time", f"step {action.step}")
        real = None if trainer.weights is None else trainer.weights[1]
        if action.step != books.step or real != books.step:
            _fail(
                "steps follow each other",
                f"step {action.step} after {books.step} steps, the trainer has {real}",
            )
        numbers = [group.prompt for group in action.groups]
        for group in action.groups:
            if group.prompt in books.trained or group.prompt in books.dropped:
                _fail(
                    "each prompt is used at most once",
                    f"prompt {group.prompt} is in step {action.step} again",
                )
            self._check_group(group, action.step, rows)
        if len(set(numbers)) != len(numbers) or numbers != sorted(numbers):
            _fail("a step is in the order of the data", f"{numbers}")
        if len(numbers) > settings.num_prompts_per_step:
            _fail("steps are full", f"{len(numbers)} groups in step {action.step}")
        left = self.scenario.num_prompts - len(books.trained) - len(books.dropped)
        if len(numbers) < min(settings.num_prompts_per_step, left):
            _fail("steps are full", f"{len(numbers)} groups in step {action.step}")
        self.training = action
        self.due["step", TRAINER] = now_s + settings.limits.step_s

    def _check_group(
        self, group: act.TrainedGroup, step: int, rows: Mapping[int, Rows]
    ) -> None:
        gone = [task for task in group.rows if task not in rows]
        if gone:
            _fail("rows are kept until they are used", f"rows {gone} are gone")
        found = [rows[task] for task in group.rows]
        wanted = list(range(self.settings.num_generations_per_prompt))
        if [row.sample for row in found] != wanted or any(
            row.prompt != group.prompt for row in found
        ):
            _fail(
                "groups are whole",
                f"prompt {group.prompt} has answers {[r.sample for r in found]}",
            )
        if not all(row.is_scored for row in found):
            _fail("groups are whole", f"prompt {group.prompt} is not scored")
        for task, row in zip(group.rows, found, strict=True):
            if task not in self.restored and not self._exists(row):
                _fail(
                    "tokens are of weights that exist",
                    f"prompt {group.prompt} has {row.oldest} to {row.newest}",
                )
            age = step - row.oldest[1]
            if not 0 <= age <= self.settings.max_staleness:
                _fail(
                    "staleness is bounded",
                    f"prompt {group.prompt} is {age} steps old in step {step}, at "
                    f"most {self.settings.max_staleness} are allowed",
                )

    def _check_save(
        self, action: act.SaveCheckpoint, now_s: float, rows: Mapping[int, Rows]
    ) -> None:
        books, state = self.books, action.state
        if self.training is not None or ("save", TRAINER) in self.due:
            _fail("the trainer does one thing at a time", "a checkpoint in a step")
        if action.step != books.step or state["step"] != books.step:
            _fail("a checkpoint is of its weights", f"{action.step}, {books.step}")
        held = [entry["prompt"] for entry in state["groups"]]
        known = sorted([*held, *books.trained, *books.dropped])
        if known != list(range(state["position"])):
            _fail(
                "a checkpoint loses no prompt",
                f"it has {held} and goes on at {state['position']}, trained are "
                f"{sorted(books.trained)}, dropped {sorted(books.dropped)}",
            )
        for entry in state["groups"]:
            for answer in entry.get("answers", ()):
                if answer is None:
                    continue
                row = rows.get(answer["rows"])
                if row is None or not row.is_scored or row.prompt != entry["prompt"]:
                    _fail("a checkpoint has its rows", f"prompt {entry['prompt']}")
        self.due["save", TRAINER] = now_s + self.settings.limits.save_s

    def _check_drop(self, action: act.DropGroup) -> None:
        number, books = action.prompt.number, self.books
        if number not in books.live or not action.reason:
            _fail("each prompt is used at most once", f"prompt {number} is dropped")
        failures = max(
            (n for (prompt, _), n in books.tries.items() if prompt == number),
            default=0,
        )
        tried = failures + 1 >= self.settings.max_attempts
        stale = self.may_drop_stale and "max_staleness" in action.reason
        if not tried and not stale:
            _fail(
                "groups are not given up early",
                f"prompt {number} after {failures} failures: {action.reason}",
            )
        books.live.discard(number)
        books.dropped[number] = action.reason

    def _check_finish(self, action: act.Finish, rows: Mapping[int, Rows]) -> None:
        books = self.books
        if self.saved is None or self.saved[0].step != books.step:
            _fail("the end is saved", f"step {books.step} is not")
        if action.step != books.step:
            _fail("the end is saved", f"{action.step} of {books.step} steps")
        limit = self.settings.max_num_steps
        if self.is_stopping or (limit is not None and books.step >= limit):
            return
        lost = [
            number
            for number in range(self.scenario.num_prompts)
            if number not in books.trained and number not in books.dropped
        ]
        if lost:
            _fail("no prompt is lost", f"the run ends without prompts {lost}")
        if rows:
            _fail("memory is bounded", f"rows {sorted(rows)} are kept at the end")

    def _check_fail(self, reason: str) -> None:
        most = self.settings.restarts.max_restarts
        used_up = any(self.restarts.get(worker, 0) >= most for worker in self._places())
        if reason.startswith("no ") and "is left" in reason and used_up:
            return
        _fail("the run ends", reason)

    def _places(self) -> Iterator[Worker]:
        yield TRAINER
        yield from self.scenario.workers

    def _end_task(self, task: int) -> None:
        for what, tasks in (("answer", self.under_way), ("score", self.scoring)):
            asked: Any = tasks.pop(task, None)  # type: ignore[attr-defined]
            if asked is not None:
                self.due.pop((what, asked.worker, task), None)

    # --- events -----------------------------------------------------------------------

    def note(self, event: ev.Event, process: Process, rows: Mapping[int, Rows]) -> None:
        """Record a message sent by a current incarnation."""
        self.heard[process.worker] = event.at_s
        match event:
            case ev.WorkerReady(worker=worker):
                self.due.pop(("start", worker), None)
            case ev.TrainerReady():
                self.due.pop(("start", TRAINER), None)
                self.newest = process.weights
                assert process.weights is not None
                trainer, step = process.weights
                self.lineage = {v: who for v, who in self.lineage.items() if v <= step}
                self.lineage.setdefault(step, set()).add(trainer)
            case ev.WorkerFailed(worker=worker):
                self._forget_worker(worker)
                self.due["stop", worker] = event.at_s
            case ev.WeightsLoaded(worker=worker):
                weights = (event.trainer, event.version)
                if self.sent.get(worker) == weights:
                    self.confirmed[worker] = weights
                    self.due.pop(("load", worker), None)
            case ev.Answered() | ev.AnswerFailed() | ev.Scored() | ev.ScoreFailed():
                self._note_seed(event, rows)
                # A score that is no longer awaited is not a result.
                if event.task in self.scoring:
                    self._credit_score(event)
                self._end_task(event.task)
            case ev.StepTrained(step=step):
                self._note_step(step)
            case ev.CheckpointSaved():
                self.due.pop(("save", TRAINER), None)

    def _credit_score(self, event: ev.Event) -> None:
        if isinstance(event, ev.Scored) and isfinite(event.reward):
            self.restarts.pop(event.worker, None)

    def _note_seed(self, event: ev.Event, rows: Mapping[int, Rows]) -> None:
        """Expect another seed if an environment could not score an answer."""
        unscored = isinstance(event, ev.Scored) and not isfinite(event.reward)
        if not unscored and not isinstance(event, ev.ScoreFailed):
            return
        score = self.scoring.get(event.task)
        if score is not None and score.rows in rows:
            key = (rows[score.rows].prompt, rows[score.rows].sample)
            self.books.seeds[key] = self.books.seeds.get(key, 0) + 1

    def _note_step(self, step: int) -> None:
        books = self.books
        if self.training is None or self.training.step != step:
            return
        for group in self.training.groups:
            books.trained[group.prompt] = step
            books.live.discard(group.prompt)
        self.training = None
        books.step = step + 1
        if self.newest is not None:
            self.newest = (self.newest[0], books.step)
            self.lineage[books.step] = {self.newest[0]}
        self.due.pop(("step", TRAINER), None)
        if books.step > self.furthest:
            self.furthest = books.step
            self.restarts.pop(TRAINER, None)

    def credit(self, event: ev.Event, rows: Mapping[int, Rows]) -> None:
        """Reset the count of a worker's failures after a useful result."""
        if isinstance(event, ev.Answered) and event.task in rows:
            self.restarts.pop(event.worker, None)

    def after(
        self,
        now_s: float,
        processes: Mapping[Worker, Process],
        rows: Mapping[int, Rows],
    ) -> None:
        """Check what holds between events."""
        if self.is_going_back:
            self._note_kept(rows)
        for key, due_s in self.due.items():
            if now_s > due_s + _MARGIN_S:
                _fail(
                    "each wait ends by its deadline",
                    f"{key[0]} of {key[1]} was due at {due_s:.2f} s",
                )
        limit = self.settings.group_limit
        if len(self.books.live) > max(limit, self._resumed_with):
            _fail(
                "memory is bounded",
                f"{len(self.books.live)} groups are held, at most {limit} may be",
            )
        bound = max(limit, self._resumed_with)
        if len(rows) > bound * self.settings.num_generations_per_prompt:
            _fail("memory is bounded", f"the rows of {len(rows)} answers are kept")
        self._check_idle(processes)

    def _check_idle(self, processes: Mapping[Worker, Process]) -> None:
        """Fail if a generator is idle although a prompt could be started."""
        books, settings = self.books, self.settings
        if self.newest is None or self.is_stopping:
            return
        next_step = books.step + (self.training is not None)
        in_training = 0 if self.training is None else len(self.training.groups)
        waiting = len(books.live) - in_training
        per_step = settings.num_prompts_per_step
        used = len(books.trained) + len(books.dropped) + len(books.live)
        fits = (
            used < self.scenario.num_prompts
            and len(books.live) < settings.group_limit
            and next_step + waiting // per_step
            <= self.newest[1] + settings.max_staleness
            and (
                settings.max_num_steps is None
                or waiting < (settings.max_num_steps - next_step) * per_step
            )
        )
        if not fits:
            return
        busy = {sample.worker for sample in self.under_way.values()}
        for worker, weights in self.confirmed.items():
            loads = self.sent.get(worker) != weights
            if weights == self.newest and worker not in busy and not loads:
                _fail("nobody is idle without need", f"{worker} is")

    # --- checkpoints ------------------------------------------------------------------

    def snapshot(self, rows: Mapping[int, Rows], state: Mapping[str, Any]) -> Any:
        """Return the contents of a checkpoint started now."""
        named = {
            answer["rows"]
            for entry in state["groups"]
            for answer in entry.get("answers", ())
            if answer is not None
        }
        books = copy.deepcopy(self.books)
        books.live = {entry["prompt"] for entry in state["groups"]}
        return books, {task: copy.copy(rows[task]) for task in named}

    def go_back(
        self, snapshot: tuple[Books, dict[int, Rows]] | None
    ) -> dict[int, Rows]:
        """Go back to a checkpoint, or to the start; return its rows."""
        self._seeds_before = self.books.seeds
        if snapshot is None:
            self.books, rows = Books(), {}
        else:
            self.books = copy.deepcopy(snapshot[0])
            rows = {task: copy.copy(row) for task, row in snapshot[1].items()}
        self.sampled |= set(rows)
        self.restored |= set(rows)
        self.resumed += 1
        self._resumed_with = len(self.books.live)
        return rows

    def _note_kept(self, rows: Mapping[int, Rows]) -> None:
        """Count what was kept when a trainer went back to a checkpoint."""
        self.is_going_back = False
        kept = {
            (row.prompt, row.sample)
            for task, row in rows.items()
            if task not in self.restored
        }
        kept |= {(s.prompt.number, s.name.sample) for s in self.under_way.values()}
        for key in kept:
            # Sampled since, as it would have been again.
            self.books.tries[key] = self.books.tries.get(key, -1) + 1
            self.books.live.add(key[0])


def _fail(rule: str, detail: str) -> None:
    raise ViolationError(rule, detail)
