"""`StepTools`: the tools of a step, common to all algorithms."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from rl_algorithms.trainers.callbacks import RunHooks
from rl_algorithms.trainers.recording.recorder import TrainingRecorder
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_algorithms.trainers.run.state import TrainerState
from rl_algorithms.trainers.run.throughput import Throughput
from rl_algorithms.trainers.setup.components import Components
from rl_algorithms.trainers.steps.memory_turns import MemoryTurns
from rl_distributed.batch.batched_data_dict import AnyRows
from rl_distributed.timing.timer import Timer
from rl_models.interfaces import LossFunction, PolicyInterface
from rl_models.types import TrainingRows

__all__ = ["StepTools"]

# From the start of these phases to the end of the step the weights have moved on from
# the last step, but the new step does not count yet: a checkpoint would be
# inconsistent.
_PROTECTED = frozenset({"policy_training", "value_training"})


class SteppingTrainer(Protocol):
    """A trainer with steps; components and state are read at each call."""

    state: TrainerState
    timer: Timer
    components: Components

    @property
    def samples_ahead(self) -> bool:
        """Whether the generator works while the policy is trained."""


class StepTools:
    """Times phases, alternates models on shared memory, draws batches, trains.

    Args:
        trainer: Trainer that the steps belong to.
        hooks: Callbacks, notified of each phase.
        signals: Signal guard, checked before each phase.
        throughput: Counter of trained tokens.
        on_progress: Called at the begin and the end of each phase, and with whatever
            else shows that the run goes on.
        recorder: Records training calls; None for no recording.
    """

    def __init__(
        self,
        trainer: SteppingTrainer,
        hooks: RunHooks,
        signals: SignalGuard,
        throughput: Throughput,
        on_progress: Callable[[], None] = lambda: None,
        recorder: TrainingRecorder | None = None,
    ) -> None:
        # Weak, because the trainer holds these tools: see `RunHooks`.
        self._trainer_ref = weakref.ref(trainer)
        self._hooks, self._signals, self.throughput = hooks, signals, throughput
        self.note_progress = on_progress
        """Tells the watchdog that the run goes on; may be called from any thread."""
        self._recorder = recorder
        self._memory = _memory_turns(trainer)
        self.batches: Iterator[AnyRows] = iter(())
        """Remaining batches of the pass over the data."""
        self.phase_name = "setup"
        """Current phase, or the one in which an exception was raised."""

    @property
    def _trainer(self) -> SteppingTrainer:
        trainer = self._trainer_ref()
        assert trainer is not None  # called by a method of the trainer
        return trainer

    def start_over(self) -> None:
        """Reset turns and batches after models and data were set up again."""
        self._memory = _memory_turns(self._trainer)
        self.batches = iter(())

    @contextmanager
    def phase(self, name: str, *, label: str | None = None) -> Iterator[None]:
        """See `Algorithm.phase`."""
        self._signals.check()
        self.note_progress()
        if name in _PROTECTED:
            self._signals.hold()
        around, self.phase_name = self.phase_name, name
        state, timer = self._trainer.state, self._trainer.timer
        step = min(state.step + 1, max(state.total_steps, 1))
        self._hooks.call("on_phase", name, step, state.total_steps)
        with timer.time(label or name):
            yield
        # Not in a `finally`: after an exception the name must stay, for the error
        # message.
        self.phase_name = around
        self.note_progress()

    def check(self) -> None:
        """Raise Interrupted if a signal came; for waits within a phase."""
        self._signals.check()

    def sync_weights(self) -> None:
        """See `Algorithm.sync_weights`."""
        # Checked before the phase begins, so that steps without a sync show none.
        sync, timer = self._trainer.components.sync, self._trainer.timer
        memory = self._memory
        is_stale = sync is not None and sync.is_stale
        if not is_stale and not memory.generation.must_prepare:
            return
        prefix = "prepare_for_generation"
        with self.phase(prefix, label=f"{prefix}/total"):
            # Training frees its memory first, because the new weights need the room.
            memory.training.finish()
            if sync is not None and is_stale:
                version = self._trainer.state.weight_version
                with timer.time(f"{prefix}/transfer_and_update_weights"):
                    sync.sync_weights(version=version)
            memory.generation.prepare()

    def finish_sampling(self) -> None:
        """See `Algorithm.finish_sampling`."""
        if self._memory.generation.must_finish:
            with self._trainer.timer.time("finish_generation"):
                self._memory.generation.finish()

    def prepare_for_training(self) -> None:
        """See `Algorithm.prepare_for_training`."""
        self.finish_sampling()
        if self._memory.training.must_prepare:
            with self._trainer.timer.time("prepare_for_training"):
                self._memory.training.prepare()

    def finish_training(self) -> None:
        """Free the memory of both turns, because models that were given live on."""
        self.finish_sampling()
        self._memory.training.finish()

    def train_policy(
        self,
        rows: TrainingRows,
        loss: LossFunction,
        global_batch_size: int,
    ) -> Mapping[str, Any]:
        """See `Algorithm.train_policy`."""
        trainer = self._trainer
        self.prepare_for_training()
        policy = trainer.components.required.policy
        with self.phase("policy_training"):
            output = self._train(
                "policy", policy, rows, loss, global_batch_size, timer=trainer.timer
            )
        self.throughput.note_trained(rows)
        trainer.state.weight_version += rows.size // global_batch_size
        if trainer.components.sync is not None:
            trainer.components.sync.mark_stale()
        return output

    def train_critic(
        self,
        rows: TrainingRows,
        loss: LossFunction,
        global_batch_size: int,
    ) -> Mapping[str, Any]:
        """See `Algorithm.train_critic`."""
        self.prepare_for_training()
        critic = self._trainer.components.required.critic
        with self.phase("value_training"):
            return self._train("critic", critic, rows, loss, global_batch_size)

    def _train(
        self,
        name: str,
        model: PolicyInterface,
        rows: TrainingRows,
        loss: LossFunction,
        global_batch_size: int,
        **options: Any,
    ) -> Mapping[str, Any]:
        """Train a model, and record the call."""
        recorder = self._recorder
        is_recorded = recorder is not None and recorder.is_on
        # Before the call: a model in this process may change the rows.
        copies = recorder.copied(rows) if recorder and is_recorded else ({}, {})
        output: Mapping[str, Any] = model.train(
            rows, loss, global_batch_size=global_batch_size, **options
        )
        if recorder and is_recorded:
            step = self._trainer.state.step + 1
            recorder.add_call(step, name, copies, global_batch_size, output)
        return output

    def note_answers(self, rows: AnyRows) -> None:
        """Record the order, versions and rewards of the answers of a step."""
        if self._recorder is not None:
            self._recorder.note_answers(self._trainer.state.step + 1, rows)

    def draw_batch(self) -> AnyRows | None:
        """See `Algorithm.draw_batch`."""
        with self._trainer.timer.time("data_processing"):
            batch = next(self.batches, None)
        self.note_progress()
        return batch


def _memory_turns(trainer: SteppingTrainer) -> MemoryTurns:
    parts = trainer.components
    # Models that work at the same time cannot take turns.
    generation = None if trainer.samples_ahead else parts.generation
    return MemoryTurns(parts.policy, generation, parts.critic)
