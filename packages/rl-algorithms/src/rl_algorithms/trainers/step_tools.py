"""`StepTools`: what a step asks for, whatever the algorithm makes of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from rl_algorithms.trainers.callbacks import RunHooks
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_algorithms.trainers.run.state import TrainerState
from rl_algorithms.trainers.run.throughput import Throughput
from rl_algorithms.trainers.setup.components import Components
from rl_algorithms.trainers.steps.memory_turns import MemoryTurns
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.timing.timer import Timer
from rl_models.interfaces import LossFunction

__all__ = ["StepTools"]

# From the begin of these phases to the end of the step the weights are no longer those
# of the last step, and the step is not counted yet: nothing could be saved.
_PROTECTED = frozenset({"policy_training", "value_training"})


class SteppingTrainer(Protocol):
    """Whose steps they are; components and state are asked for at each call."""

    state: TrainerState
    timer: Timer
    components: Components

    @property
    def samples_ahead(self) -> bool:
        """Whether the generator works while the policy is trained."""


class StepTools:
    """Measures phases, has models take turns, draws batches, trains the policy.

    Args:
        trainer: Whose steps they are.
        hooks: Called when a phase begins.
        signals: Asked before each phase.
        throughput: Counts what is trained on.
    """

    def __init__(
        self,
        trainer: SteppingTrainer,
        hooks: RunHooks,
        signals: SignalGuard,
        throughput: Throughput,
    ) -> None:
        # The trainer holds these tools: see `RunHooks`.
        self._trainer_ref = weakref.ref(trainer)
        self._hooks, self._signals, self.throughput = hooks, signals, throughput
        self._memory = _memory_turns(trainer)
        self.batches: Iterator[BatchedDataDict[Any]] = iter(())
        """What is left of the pass over the data."""
        self.phase_name = "setup"
        """The phase that goes on, or in which something was raised."""

    @property
    def _trainer(self) -> SteppingTrainer:
        trainer = self._trainer_ref()
        assert trainer is not None  # whose method calls
        return trainer

    def start_over(self) -> None:
        """Forget what models and data were doing: they have been set up again."""
        self._memory = _memory_turns(self._trainer)
        self.batches = iter(())

    @contextmanager
    def phase(self, name: str, *, label: str | None = None) -> Iterator[None]:
        """See `Algorithm.phase`."""
        self._signals.check()
        if name in _PROTECTED:
            self._signals.hold()
        around, self.phase_name = self.phase_name, name
        state, timer = self._trainer.state, self._trainer.timer
        step = min(state.step + 1, max(state.total_steps, 1))
        self._hooks.call("on_phase", name, step, state.total_steps)
        with timer.time(label or name):
            yield
        # Left as it is by what raises: the error names the phase it came from.
        self.phase_name = around

    def check(self) -> None:
        """Raise Interrupted when a signal came: for whoever waits within a phase."""
        self._signals.check()

    def sync_weights(self) -> None:
        """See `Algorithm.sync_weights`."""
        sync, timer = self._trainer.components.sync, self._trainer.timer
        memory = self._memory
        is_stale = sync is not None and sync.is_stale
        if not is_stale and not memory.generation.must_prepare:
            return
        prefix = "prepare_for_generation"
        with self.phase(prefix, label=f"{prefix}/total"):
            # First of all: the new weights need the room.
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
        """Free the memory of both turns, as models that were given live on."""
        self.finish_sampling()
        self._memory.training.finish()

    def train_policy(
        self,
        rows: BatchedDataDict[Any],
        loss: LossFunction,
        global_batch_size: int,
    ) -> Mapping[str, Any]:
        """See `Algorithm.train_policy`."""
        trainer = self._trainer
        self.prepare_for_training()
        with self.phase("policy_training"):
            output: Mapping[str, Any] = trainer.components.required.policy.train(
                rows, loss, global_batch_size=global_batch_size, timer=trainer.timer
            )
        self.throughput.note_trained(rows)
        trainer.state.weight_version += rows.size // global_batch_size
        if trainer.components.sync is not None:
            trainer.components.sync.mark_stale()
        return output

    def draw_batch(self) -> BatchedDataDict[Any] | None:
        """See `Algorithm.draw_batch`."""
        with self._trainer.timer.time("data_processing"):
            return next(self.batches, None)


def _memory_turns(trainer: SteppingTrainer) -> MemoryTurns:
    parts = trainer.components
    # Those that work at the same time cannot take turns.
    generation = None if trainer.samples_ahead else parts.generation
    return MemoryTurns(parts.policy, generation, parts.critic)
