"""Events of a run, as the driver reports them to the schedule.

Times are seconds of one monotonic clock of the driver. Messages from a worker carry the
number of the incarnation that sent them.
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
    "RunPaused",
    "RunResumed",
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
    """The run begins, or continues from the state given to `load_state_dict`."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """The time `next_deadline_s` has come, and every earlier event was passed on."""

    at_s: float


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The run is to end after the current step."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class RunPaused:
    """The trainer is held on purpose, for any length of time."""

    at_s: float


@dataclass(frozen=True, slots=True)
class RunResumed:
    """The trainer goes on."""

    at_s: float


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
    """State of the schedule in the checkpoint that the ranks restored; None if they
    hold the weights that this driver began with."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker (for the trainer: any rank) has died, hangs or has lost its node."""

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
    """A generator could not sample an answer, but remains usable."""

    at_s: float
    worker: Worker
    incarnation: int
    task: int
    reason: str


@dataclass(frozen=True, slots=True)
class Scored:
    """An environment has scored an answer; a non-finite reward counts as a failure."""

    at_s: float
    worker: Worker
    incarnation: int
    task: int
    reward: float


@dataclass(frozen=True, slots=True)
class ScoreFailed:
    """An environment could not score an answer, but remains usable."""

    at_s: float
    worker: Worker
    incarnation: int
    task: int
    reason: str


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """A generator has loaded weights and samples only with these from now on."""

    at_s: float
    worker: Worker
    incarnation: int
    trainer: int
    """Incarnation of the trainer that published them."""
    version: int


@dataclass(frozen=True, slots=True)
class StepTrained:
    """The trainer has completed a step; a copy of its new weights can be loaded."""

    at_s: float
    incarnation: int
    step: int


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is complete and survives the death of any process."""

    at_s: float
    incarnation: int
    step: int


Event = (
    Begin
    | Tick
    | StopRequested
    | RunPaused
    | RunResumed
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
