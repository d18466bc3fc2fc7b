"""`Training`: steps, checkpoints, and recovery after the trainer has failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_algorithms.asynchronous.actions import (
    Discard,
    Finish,
    SaveCheckpoint,
    Train,
    TrainedGroup,
)
from rl_algorithms.asynchronous.checkpoint_state import to_dict
from rl_algorithms.asynchronous.deadlines import Wait
from rl_algorithms.asynchronous.drops import drop_too_old, stop_tasks
from rl_algorithms.asynchronous.events import (
    CheckpointSaved,
    StepTrained,
    TrainerReady,
)
from rl_algorithms.asynchronous.going_back import go_back
from rl_algorithms.asynchronous.state import RunState
from rl_algorithms.asynchronous.workers import TRAINER, WorkerPhase

__all__ = ["Training"]


class Training:
    """Directs the trainer.

    Args:
        state: State shared by the parts of the schedule.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._began_with: Mapping[str, Any] = {}
        self._saved_at_begin: int | None = None

    def begin(self) -> None:
        """Keep the initial state: a trainer without a checkpoint returns to it."""
        self._began_with = to_dict(self._state)
        self._saved_at_begin = self._state.saved_step

    def proceed(self) -> None:
        """Begin a step or a checkpoint, or end the run, if one of them is due."""
        state = self._state
        trainer = state.workers[TRAINER]
        if trainer.phase is not WorkerPhase.READY or state.in_training or state.saving:
            return
        drop_too_old(state)
        if state.end is not None:
            return
        over = state.over
        if self._save_is_due(over):
            self._save(trainer.incarnation)
        elif over is not None:
            # Answers still being sampled belong to no step any more.
            stop_tasks(state)
            state.finish(Finish(state.step, over))
        else:
            self._train(trainer.incarnation)

    def _save_is_due(self, over: str | None) -> bool:
        state = self._state
        if state.saved_step == state.step:
            return False
        period = state.settings.checkpoint_period
        return over is not None or (
            period is not None and state.step > 0 and state.step % period == 0
        )

    def _save(self, incarnation: int) -> None:
        # No step begins before the checkpoint is complete, so that its weights match
        # its state.
        state = self._state
        state.saving = True
        end_s = state.now_s + state.settings.limits.save_s
        state.deadlines.set(Wait("save", TRAINER, incarnation), end_s)
        state.actions.append(SaveCheckpoint(incarnation, state.step, to_dict(state)))

    def _train(self, incarnation: int) -> None:
        state = self._state
        groups = state.buffer.take(state.step, is_last=state.order.is_used_up)
        if groups is None:
            return
        state.in_training = groups
        self._expect_step(incarnation)
        trained = tuple(TrainedGroup(group.number, group.rows) for group in groups)
        state.actions.append(Train(incarnation, state.step, trained))

    # --- results ----------------------------------------------------------------------

    def step_trained(self, event: StepTrained) -> None:
        """Count a step and publish its weights."""
        state = self._state
        # A second report of a step must not count twice.
        if not state.in_training or event.step != state.step:
            return
        state.deadlines.clear(Wait("step", TRAINER, event.incarnation))
        for group in state.in_training:
            for rows in group.rows:
                state.kept.discard(rows)
                state.actions.append(Discard(rows))
        state.in_training = []
        state.step += 1
        state.versions.publish(event.incarnation, state.step)
        # Only a new furthest step is progress. Otherwise a step that fails each time it
        # is reached would reset the count of restarts forever.
        if state.step > state.furthest_step:
            state.furthest_step = state.step
            state.workers[TRAINER].failures_in_row = 0
            self.expect_progress()

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        """Record a complete checkpoint; the next step may begin."""
        state = self._state
        if not state.saving or event.step != state.step:
            return
        state.deadlines.clear(Wait("save", TRAINER, event.incarnation))
        state.saving, state.saved_step = False, event.step

    def expect_progress(self) -> None:
        """Restart the deadline for the next step that was never reached before."""
        state = self._state
        if state.is_paused:
            return
        end_s = state.now_s + state.settings.limits.progress_s
        state.deadlines.set(Wait("progress"), end_s)

    def _expect_step(self, incarnation: int) -> None:
        """Wait for the step that is trained."""
        state = self._state
        if state.is_paused:
            return
        end_s = state.now_s + state.settings.limits.step_s
        state.deadlines.set(Wait("step", TRAINER, incarnation), end_s)

    def hold(self, is_paused: bool) -> None:
        """Expect no step while the trainer is held; from then on as from its start."""
        state = self._state
        state.is_paused = is_paused
        incarnation = state.workers[TRAINER].incarnation
        if is_paused:
            state.deadlines.clear(Wait("progress"))
            state.deadlines.clear(Wait("step", TRAINER, incarnation))
            return
        self.expect_progress()
        if state.in_training:
            self._expect_step(incarnation)

    def abandon(self) -> None:
        """Withdraw the weights of a lost trainer; groups in training wait again."""
        state = self._state
        for group in state.in_training:
            state.buffer.add(group)
        state.in_training = []
        state.saving = False
        state.versions.withdraw()
        # Confirmations of withdrawn weights are ignored when they come, so waiting for
        # them would end in a false alarm.
        for generator in state.workers.generators:
            wait = Wait("load", generator.worker, generator.incarnation)
            state.deadlines.clear(wait)

    def ready(self, event: TrainerReady) -> None:
        """Continue with the weights that the trainer has restored."""
        state = self._state
        # The first incarnation starts from the state that is already loaded.
        if event.incarnation > 0:
            first = event.state is None
            go_back(state, self._began_with if event.state is None else event.state)
            state.saved_step = self._saved_at_begin if first else state.step
        state.versions.publish(event.incarnation, state.step)
