"""The training loop: steps, epochs, validation, checkpoints and the end.

```
[validate] -> epoch: draw -> update? -> _train_step -> count -> log
           -> update? -> validate? -> checkpoint?
training workers lost -> restarted -> back to the newest snapshot or checkpoint
nodes came            -> after a checkpoint, more workers go on from it

update? also serves other requests: pause, checkpoint, stop (`RunControl`)
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic

from rl_algorithms.data.loader import SinglePassLoader
from rl_algorithms.data.validation_sets import Loaders
from rl_algorithms.trainers.algorithm import Algorithm, ConfigT
from rl_algorithms.trainers.callbacks import RunHooks, with_plain_names
from rl_algorithms.trainers.outputs import RunOutputs
from rl_algorithms.trainers.run.signals import Interrupted, SignalGuard
from rl_algorithms.trainers.run_control import RunControl
from rl_algorithms.trainers.sampling.validation import validate_parts
from rl_algorithms.trainers.schedule import RunPlan
from rl_algorithms.trainers.setup.own_policy import OwnPolicy
from rl_algorithms.trainers.step_tools import StepTools
from rl_algorithms.trainers.worker_recovery import Recovery, StartingPoint
from rl_distributed.batch.batched_data_dict import (
    AnyRows,
)
from rl_distributed.logs.logging import get_logger, log_context
from rl_distributed.metrics import to_floats
from rl_distributed.process.gc_pause import gc_frozen
from rl_distributed.timing.timer import Timer
from rl_models.policy.training_policy import TrainingPolicy

__all__ = ["TrainingLoop"]

_logger = get_logger(__name__)


class _NodesCame(Exception):
    """More training workers can go on from the checkpoint that was just saved."""


class TrainingLoop(Generic[ConfigT]):
    """Repeats the step of an algorithm; `TrainingRun` builds and closes its parts.

    The time of a step, `total_step_time`, covers drawing its batch (`data_processing`)
    and `_train_step`, but not logging, validation and checkpoints.

    Args:
        trainer: Algorithm that defines the step, the validations and the end.
        loaders: Loaders of training batches and of validation batches, or None.
        tools: Tools of the steps.
        outputs: Outputs for metrics, samples and checkpoints.
        control: Requests of other processes, served between steps.
        hooks: The callbacks.
        signals: Signal guard, released after each step.
        plan: Returns the plan of the run for its current configuration.
    """

    def __init__(
        self,
        trainer: Algorithm[ConfigT],
        loaders: Loaders,
        tools: StepTools,
        outputs: RunOutputs,
        control: RunControl[ConfigT],
        hooks: RunHooks,
        signals: SignalGuard,
        plan: Callable[[], RunPlan],
    ) -> None:
        self._trainer = trainer
        self._loader, self._val_loader = loaders
        self._tools, self._outputs, self._control = tools, outputs, control
        self._hooks, self._signals, self._plan = hooks, signals, plan
        self._recovery = Recovery(trainer, outputs, control.updates)
        # State as of the last completed step: a checkpoint taken in the middle of a
        # step must not skip the batch that this step has already drawn.
        self._loader_state = self._loader.state_dict()

    def run(self) -> None:
        """Train until a limit, a validation or a request ends the run."""
        # The run returns to this state if workers are lost before the first checkpoint.
        self._recovery.begin(self._info())
        self._hooks.call("on_train_begin")
        with gc_frozen():
            while not self._train_to_end():
                pass
        self._control.end()
        self._hooks.call("on_train_end")
        self._tools.finish_training()

    def _train_to_end(self) -> bool:
        """Train; return False if the run went back because workers were lost."""
        try:
            self._train()
        except _NodesCame as error:
            point = self._recovery.grow()
            reason = str(error)
        except Exception as error:
            if not self._recovery.can_mend(error):
                raise
            point = self._recovery.start_again(error)
            reason = str(error).strip().splitlines()[0]
        else:
            return True
        # Hold signals: while the models are rebuilt there is nothing to save.
        self._signals.hold()
        self._go_back(reason, point)
        self._signals.release()
        return False

    def _train(self) -> None:
        state = self._trainer.state
        if state.step == 0:
            self._validate_if_due()
        elif state.validated_at == state.step:
            # Saved after a validation, whose goal may have ended the run.
            self._stop_early(state.metrics)
        while not self._finished():
            self._hooks.call_numbered("on_epoch_begin", state.epoch + 1)
            self._tools.batches = iter(self._loader)
            while (batch := self._next_batch()) is not None:
                self._run_step(batch)
                if self._finished():
                    break
            else:
                # Only a complete pass counts.
                state.epoch += 1
                state.step_in_epoch = 0
                self._loader_state = self._loader.state_dict()
                self._hooks.call_numbered(
                    "on_epoch_end", state.epoch, with_plain_names(state.metrics)
                )
        if state.validated_at != state.step:
            # A stream ended, so the last step was not known to be the last.
            self._validate_if_due()
        checkpoints = self._outputs.checkpoints
        unsaved = checkpoints.saved_at != state.step
        if unsaved and checkpoints.due(state.step, last=True, best=False):
            self._save_checkpoint()

    def _finished(self) -> bool:
        max_epochs, max_steps = self._trainer._limits()
        state = self._trainer.state
        if state.stop_reason is None:
            if max_steps is not None and state.step >= max_steps:
                self._end_at(f"max_num_steps ({max_steps}) reached")
            elif max_epochs is not None and state.epoch >= max_epochs:
                self._end_at(f"max_num_epochs ({max_epochs}) reached")
            elif isinstance(self._loader, SinglePassLoader) and self._loader.is_used_up:
                self._end_at(
                    "the training data are used up: an iterator can be consumed only "
                    "once; give the function that creates it for further passes"
                )
        return state.stop_reason is not None

    def _end_at(self, limit: str) -> None:
        """End the run at a limit, and report a goal that was missed."""
        trainer = self._trainer
        missed = trainer._early_stop().shortfall(trainer.state.metrics)
        trainer.request_stop(f"{limit}; {missed}" if missed else limit)

    def _next_batch(self) -> AnyRows | None:
        # Not at the end of a step: what lies between two is on the time line, too.
        self._outputs.begin_step(self._trainer.state.step + 1, self._trainer.timer)
        self._trainer.timer.reset()
        # Drawing counts as part of the step, so that slow data become visible.
        with self._trainer.timer.time("total_step_time"):
            return self._tools.draw_batch()

    def _run_step(self, batch: AnyRows) -> None:
        trainer = self._trainer
        number = trainer.state.step + 1
        with log_context(step=number):
            self._hooks.call_numbered("on_step_begin", number)
            self._control.apply("step_begin", self._save_before_step)
            # Checked again: a request to stop may have come since the end of the last
            # step, or during a pause.
            if self._control.ends_run:
                # The batch was drawn for a step that will not come.
                return
            with trainer.timer.time("total_step_time"):
                metrics = to_floats(trainer._train_step(batch))
            self._note_weights()
            self._advance(metrics)
            # From here on the step counts, so that an interruption can save it.
            self._signals.release()
            self._control.apply("step_end", self._save_checkpoint)
            self._after_step()

    def _note_weights(self) -> None:
        """Record the weights that the generator got since the last call."""
        sync, state = self._trainer.components.sync, self._trainer.state
        if sync is not None:
            self._outputs.weights.add(state.step, sync.take_confirmed())

    def _advance(self, metrics: Mapping[str, float]) -> None:
        trainer = self._trainer
        state = trainer.state
        state.step += 1
        state.step_in_epoch += 1
        state.consumed_samples += int(metrics.get("num_samples", 0))
        state.total_valid_tokens += int(metrics.get("num_valid_tokens", 0))
        self._loader_state = self._loader.state_dict()
        timing = trainer.timer.get_timing_metrics("sum")
        named = {f"train:{name}": value for name, value in metrics.items()}
        named |= {f"timing:{name}": value for name, value in timing.items()}
        rates = self._tools.throughput.take(metrics, timing)
        named |= {f"performance:{name}": value for name, value in rates.items()}
        self._record(named)
        self._outputs.recorder.end_step(state.step, state.weight_version)
        answers = trainer._take_answers()
        self._outputs.rollouts.add(state.step, answers)
        self._outputs.tables.add_rollouts(state.step, answers)
        self._hooks.call("on_step_end", with_plain_names(named))
        trainer._end_step()

    def _after_step(self) -> None:
        checkpoints = self._outputs.checkpoints
        # Before the validation, whose time must not count as part of a step: the
        # deadline for checkpoints is extrapolated from the duration of steps.
        checkpoints.mark_step()
        # Before the checkpoint, which the result ranks.
        best = self._validate_if_due()
        step, last = self._trainer.state.step, self._last_step()
        if checkpoints.due(step, last=last, best=best):
            self._save_checkpoint()
        self._control.save_if_asked(self._save_checkpoint)
        self._take_snapshot_if_due()
        if checkpoints.saved_at == step and not last and self._recovery.can_grow():
            raise _NodesCame("nodes have come for more training workers")

    def _last_step(self) -> bool:
        state = self._trainer.state
        return state.stop_reason is not None or state.step >= state.total_steps

    def _record(self, named: Mapping[str, float]) -> None:
        step = self._trainer.state.step
        self._trainer.state.metrics.update(named)
        self._trainer.history.add(step, named)
        self._outputs.metrics.log_metrics(named, step, step_finished=True)

    def _validate_if_due(self) -> bool:
        """Validate if it is due; return whether the ranking metric improved."""
        trainer, outputs, plan = self._trainer, self._outputs, self._plan()
        state, last = trainer.state, self._last_step()
        if self._val_loader is None or not plan.validations.due(state.step, last=last):
            return False
        self._hooks.call("on_validation_begin")
        timer = Timer()
        with self._tools.phase("validation"), timer.time("validation"):
            found = validate_parts(self._val_loader, trainer._validate)
        self._note_weights()
        trainer.validation = found
        metrics = {f"val:{k}": v for k, v in to_floats(found.metrics).items()}
        ranked_by = trainer.config.checkpointing.metric_name or ""
        _, earlier = trainer.history.column(ranked_by)
        best = outputs.checkpoints.is_best(metrics, earlier)
        # Part of the saved state: a resumed run must not validate this step again.
        state.validated_at = state.step
        outputs.samples.add(state.step, found.samples)
        outputs.tables.add_samples(state.step, found.samples)
        self._record({**metrics, "timing:validation": timer.reduce("validation")})
        self._plan().patience.observe(state, metrics)
        self._hooks.call("on_validation_end", with_plain_names(metrics, "val"))
        self._stop_early(metrics)
        return best

    def _stop_early(self, metrics: Mapping[str, float]) -> None:
        """End the run if the latest validation reached its goal or patience ran out."""
        trainer, patience = self._trainer, self._plan().patience
        reason = trainer._early_stop().reason(metrics) or patience.reason(trainer.state)
        if reason is not None:
            trainer.request_stop(reason)

    def _save_checkpoint(self) -> Path:
        trainer = self._trainer
        state = trainer.state
        # Signals wait: half a checkpoint is worth less than a late end.
        with self._signals.protected(), self._tools.phase("checkpointing"):
            # A run that resumes from it must have recorded all steps before it.
            self._outputs.recorder.flush()
            path = self._outputs.checkpoints.save(
                state,
                trainer.components.required.policy,
                trainer.history.at(state.step),
                run_config=trainer.config.to_dict(),
                dataloader=self._loader_state,
                callbacks=self._hooks.callbacks.state_dict(),
                own=trainer._own_state(),
                write_own=trainer._write_own,
                critic=trainer.components.critic,
            )
            state.last_checkpoint = str(path)
        self._record({"timing:checkpointing": trainer.timer.reduce("checkpointing")})
        self._hooks.call("on_checkpoint", path)
        return path

    def _take_snapshot_if_due(self) -> None:
        if self._last_step() or not self._recovery.snapshot_is_due():
            return
        timer = self._trainer.timer
        with self._signals.protected(), timer.time("snapshot"):
            self._recovery.take_snapshot(self._info())
        self._record({"timing:snapshot": timer.reduce("snapshot")})
        # Of no step: it would show up in the next one.
        timer.reset("snapshot")

    def _save_before_step(self) -> Path:
        path = self._save_checkpoint()
        # This time belongs to no step, and would show up in the next one.
        self._trainer.timer.reset("checkpointing")
        return path

    def keep_checkpoint(self, *, can_save: bool) -> None:
        """Save the progress of an interrupted run, if possible.

        Args:
            can_save: Whether the workers can be reached.
        """
        step = self._trainer.state.step
        try:
            unsaved = self._outputs.checkpoints.saved_at != step
            if can_save and unsaved and not self._signals.held:
                self._save_checkpoint()
        except Interrupted:
            # Another signal: only what was written completely counts.
            self._signals.acknowledge()
        except Exception:
            _logger.exception("no checkpoint of step %d", step)

    def restore(self, checkpoint: Path, info: Mapping[str, Any]) -> None:
        """Continue from a checkpoint.

        Args:
            checkpoint: Its folder.
            info: Its content besides weights and optimizer state.
        """
        self._restore(checkpoint, info)
        self._trainer.history = self._outputs.resume_at(self._trainer.state.step)

    def _go_back(
        self, reason: str, workers: AbstractContextManager[StartingPoint]
    ) -> None:
        """Continue from the newest state that is kept, with other training workers.

        Args:
            reason: Why, in one line.
            workers: Starts them; see `Recovery`.
        """
        trainer = self._trainer
        trainer._take_answers()  # drop those of the step that failed
        trainer._note_loss(reason)
        with workers as point:
            self._tools.start_over()
            self._restore(point.checkpoint, point.info)
            # That of a snapshot is no checkpoint of the run.
            trainer.state.last_checkpoint = point.last_checkpoint
        trainer.state.stop_reason = None
        self._control.go_back()
        trainer.history = self._outputs.go_back_to(trainer.state.step)

    def _info(self) -> dict[str, Any]:
        """Return the state of a checkpoint besides the models."""
        return {
            "state": self._trainer.state.to_dict(),
            "dataloader": self._loader_state,
            "callbacks": self._hooks.callbacks.state_dict(),
            "own": self._trainer._own_state(),
        }

    def _restore(self, checkpoint: Path | None, info: Mapping[str, Any]) -> None:
        trainer = self._trainer
        trainer.state.restore(info["state"])
        # A policy that samples with its own weights writes their version into its rows.
        if isinstance(trainer.components.policy, OwnPolicy | TrainingPolicy):
            trainer.components.policy.go_on_at(trainer.state.weight_version)
        trainer.state.last_checkpoint = None if checkpoint is None else str(checkpoint)
        self._loader.load_state_dict(info["dataloader"])
        self._loader_state = self._loader.state_dict()
        trainer._restore_own(info.get("own", {}), checkpoint)
        self._hooks.callbacks.load_state_dict(info["callbacks"])
