"""A description of what a run is waiting for, for the error that ends a stalled run."""

from __future__ import annotations

from collections.abc import Iterator

from rl_algorithms.asynchronous.groups import AnswerPhase, Group
from rl_algorithms.asynchronous.state import RunState
from rl_algorithms.asynchronous.workers import TRAINER, WorkerPhase

__all__ = ["describe_waits"]

# Enough to see a pattern; a line per group of a large run would bury it.
_SHOWN = 4


def describe_waits(state: RunState) -> str:
    """Return what the next step is waiting for."""
    parts = [*_trainer(state), *_groups(state), *_workers(state)]
    return "; ".join(parts)


def _trainer(state: RunState) -> Iterator[str]:
    if state.workers[TRAINER].phase is not WorkerPhase.READY:
        yield f"the trainer is {state.workers[TRAINER].phase.value}"
    elif state.in_training:
        yield f"the trainer is working on step {state.step}"
    elif state.saving:
        yield f"the trainer is writing the checkpoint of step {state.step}"
    else:
        finished = sum(group.is_finished for group in state.buffer)
        needed = state.settings.num_prompts_per_step
        yield f"step {state.step} has {finished} of {needed} finished groups"


def _groups(state: RunState) -> Iterator[str]:
    waiting = [group for group in state.buffer if not group.is_finished]
    for group in waiting[:_SHOWN]:
        yield f"prompt {group.number} has {_answers(group)}"
    if len(waiting) > _SHOWN:
        yield f"{len(waiting) - _SHOWN} more groups are unfinished"


def _answers(group: Group) -> str:
    counts = {
        phase.value: sum(answer.phase is phase for answer in group.answers)
        for phase in AnswerPhase
    }
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def _workers(state: RunState) -> Iterator[str]:
    for record in state.workers:
        if record.worker != TRAINER and record.phase is not WorkerPhase.READY:
            yield f"{record.worker} is {record.phase.value}"
