"""What the schedule has the driver do; none of it is waited for in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rl_algorithms.asynchronous.groups import AnswerName
from rl_algorithms.asynchronous.prompt_order import Prompt
from rl_algorithms.asynchronous.workers import Worker

__all__ = [
    "Action",
    "Cancel",
    "Discard",
    "DropGroup",
    "Fail",
    "Finish",
    "LoadWeights",
    "RetireWorker",
    "Sample",
    "SaveCheckpoint",
    "Score",
    "StartWorker",
    "StopWorker",
    "Train",
    "TrainedGroup",
]


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker that was never started or was stopped; answered by `WorkerReady`.

    The trainer restores the newest complete checkpoint, or what the run began with, and
    answers by `TrainerReady`; the driver then keeps the rows of that checkpoint.
    """

    worker: Worker
    incarnation: int


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End what is left of a worker; of the trainer: of all its ranks.

    It is given no work, and no message of it counts. `StartWorker` follows at once or
    after a pause, or `RetireWorker`.
    """

    worker: Worker
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class RetireWorker:
    """Report that a worker is not started again."""

    worker: Worker
    reason: str


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Load a version into a generator; answered by `WeightsLoaded`.

    A generator loads one version after the other, in the order of these actions.
    """

    worker: Worker
    incarnation: int
    trainer: int
    version: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample an answer; answered by `Answered` or `AnswerFailed`."""

    worker: Worker
    incarnation: int
    task: int
    prompt: Prompt
    name: AnswerName
    version: int
    """Version that the generator has confirmed last."""


@dataclass(frozen=True, slots=True)
class Score:
    """Score an answer; answered by `Scored` or `ScoreFailed`."""

    worker: Worker
    incarnation: int
    task: int
    rows: int
    """Task that sampled the answer."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Work on a task no longer; what comes of it is not used."""

    worker: Worker
    incarnation: int
    task: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Keep the rows of a sampling task no longer."""

    rows: int


class TrainedGroup(NamedTuple):
    """A group of a step."""

    prompt: int
    """Its number."""
    rows: tuple[int, ...]
    """Tasks that sampled its answers, by sample index."""


@dataclass(frozen=True, slots=True)
class Train:
    """Make an optimizer step of these groups; answered by `StepTrained`."""

    incarnation: int
    step: int
    groups: tuple[TrainedGroup, ...]


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Write weights, optimizer, this state and the rows that it names to a checkpoint.

    It counts once it is complete: `CheckpointSaved`.
    """

    incarnation: int
    step: int
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DropGroup:
    """Report a prompt that is not trained on."""

    prompt: Prompt
    reason: str
    attempts: int
    """The most attempts that an answer had."""
    age: int
    """Steps that its oldest token lies behind the next step; 0 without tokens."""
    num_tokens: int
    """Tokens of the answers that were sampled."""
    mean_reward: float | None
    """Of the answers that were scored; None: none was."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is done."""

    step: int
    """Steps done."""
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The run cannot go on."""

    reason: str


Action = (
    StartWorker
    | StopWorker
    | RetireWorker
    | LoadWeights
    | Sample
    | Score
    | Cancel
    | Discard
    | Train
    | SaveCheckpoint
    | DropGroup
    | Finish
    | Fail
)
