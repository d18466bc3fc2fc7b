"""Actions that the schedule returns; the driver carries them out without blocking."""

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

    The trainer restores the newest complete checkpoint, or the state that the run began
    with, and answers with `TrainerReady`; the driver then keeps the rows of that
    checkpoint as well.
    """

    worker: Worker
    incarnation: int


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Terminate whatever is left of a worker (for the trainer: all of its ranks).

    The worker gets no more work and its messages are ignored. `StartWorker` follows, at
    once or after a pause, or else `RetireWorker`.
    """

    worker: Worker
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class RetireWorker:
    """Report that a worker will not be restarted."""

    worker: Worker
    reason: str


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Load a weight version into a generator; answered by `WeightsLoaded`.

    A generator loads one version at a time, in the order of these actions.
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
    """Version that the generator confirmed last."""


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
    """Stop working on a task; a result that still arrives is ignored."""

    worker: Worker
    incarnation: int
    task: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Release the rows of a sampling task."""

    rows: int


class TrainedGroup(NamedTuple):
    """A group of a step."""

    prompt: int
    """Number of the prompt."""
    rows: tuple[int, ...]
    """Tasks that sampled the answers, by sample index."""


@dataclass(frozen=True, slots=True)
class Train:
    """Run an optimizer step on these groups; answered by `StepTrained`."""

    incarnation: int
    step: int
    groups: tuple[TrainedGroup, ...]


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Write weights, optimizer, this state and the rows that it names to a checkpoint.

    The checkpoint counts once it is complete and answered by `CheckpointSaved`.
    """

    incarnation: int
    step: int
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DropGroup:
    """Report a prompt that will not be trained on."""

    prompt: Prompt
    reason: str
    attempts: int
    """Largest number of attempts of any answer."""
    age: int
    """Steps by which the oldest token lags behind the next step; 0 without tokens."""
    num_tokens: int
    """Number of tokens sampled for the group."""
    mean_reward: float | None
    """Mean over the answers that were scored; None if none was."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The run has finished."""

    step: int
    """Number of completed steps."""
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The run cannot continue."""

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
