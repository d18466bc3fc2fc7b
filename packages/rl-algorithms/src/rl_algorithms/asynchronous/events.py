"""What can happen to a run, as the driver says it to the schedule.

Times are seconds of one clock of the driver that does not go back. Messages of a worker
carry the number of the incarnation that sent them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_algorithms.asynchronous.workers import Worker

__all__ = [
    "AnswerFailed",
    "Answered",
    "Begin",
    "CheckpointSaved",
    "Event",
    "ScoreFailed",
    "Scored",
    "StepTrained",
    "StopRequested",
    "Tick",
    "TrainerReady",
    "WeightsLoaded",
    "WorkerFailed",
    "WorkerReady",
]


@dataclass(frozen=True, slots=True)
class Begin:
    """The run begins, or goes on where `load_state_dict` has put it."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """The time `next_deadline_s` has come, and all that had arrived was passed on."""

    at_s: float


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The run is to end after the step under way."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A generator or an environment has started."""

    at_s: float
    worker: Worker
    incarnation: int


@dataclass(frozen=True, slots=True)
class TrainerReady:
    """All ranks of the trainer have started."""

    at_s: float
    incarnation: int
    state: Mapping[str, Any] | None = None
    """State of the schedule in the checkpoint that they have restored; None: they have
    the weights with which this driver began."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker has died, hangs or has lost its node; the trainer: any of its ranks."""

    at_s: float
    worker: Worker
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A generator has sampled an answer; the driver keeps its rows."""

    at_s: float
    worker: Worker
    incarnation: int
    task: int
    oldest_version: int
    newest_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerFailed:
    """A generator could not sample an answer, and goes on."""

    at_s: float
    worker: Worker
    incarnation: int
    task: int
    reason: str


@dataclass(frozen=True, slots=True)
class Scored:
    """An environment has scored an answer; a reward that is not finite is none."""

    at_s: float
    worker: Worker
    incarnation: int
    task: int
    reward: float


@dataclass(frozen=True, slots=True)
class ScoreFailed:
    """An environment could not score an answer, and goes on."""

    at_s: float
    worker: Worker
    incarnation: int
    task: int
    reason: str


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """A generator has loaded weights and samples with nothing else from here on."""

    at_s: float
    worker: Worker
    incarnation: int
    trainer: int
    """Incarnation of the trainer that they are from."""
    version: int


@dataclass(frozen=True, slots=True)
class StepTrained:
    """The trainer has done a step; a copy of its new weights can be loaded."""

    at_s: float
    incarnation: int
    step: int


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is complete and survives the end of every process."""

    at_s: float
    incarnation: int
    step: int


Event = (
    Begin
    | Tick
    | StopRequested
    | WorkerReady
    | TrainerReady
    | WorkerFailed
    | Answered
    | AnswerFailed
    | Scored
    | ScoreFailed
    | WeightsLoaded
    | StepTrained
    | CheckpointSaved
)
