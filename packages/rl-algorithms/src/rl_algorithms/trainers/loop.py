"""The loop itself: steps, epochs, validation, checkpoints, the end.

```
[validate] -> epoch: draw -> update? -> _train_step -> count -> log
           -> update? -> validate? -> checkpoint?
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_algorithms.data.loader import Loader
from rl_algorithms.data.validation_sets import ValidationParts
from rl_algorithms.trainers.algorithm import ConfigT
from rl_algorithms.trainers.callbacks import CallbackList, with_plain_names
from rl_algorithms.trainers.checkpoints import RunCheckpoints
from rl_algorithms.trainers.live_config import LiveConfig
from rl_algorithms.trainers.run.history import History
from rl_algorithms.trainers.run.signals import Interrupted, SignalGuard
from rl_algorithms.trainers.run.state import TrainerState
from rl_algorithms.trainers.run.throughput import Throughput
from rl_algorithms.trainers.sampling.validation import ValidationResult, validate_parts
from rl_algorithms.trainers.sampling.validation_samples import ValidationSamples
from rl_algorithms.trainers.schedule import Patience, ValidationSchedule
from rl_algorithms.trainers.setup.own_policy import OwnPolicy
from rl_algorithms.trainers.steps.memory_turns import MemoryTurns
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.logs.logging import get_logger, log_context
from rl_distributed.metrics import LoggerFacade, to_floats
from rl_distributed.timing.timer import Timer

__all__ = ["TrainerLoop"]

_logger = get_logger(__name__)

# From the begin of these phases to the end of the step the weights are no longer those
# of the last step, and the step is not counted yet: nothing could be saved.
_PROTECTED = frozenset({"policy_training", "value_training"})


class TrainerLoop(LiveConfig[ConfigT]):
    """Repeats the step of an algorithm; `BaseTrainer` builds and closes what it uses.

    A step's time, `total_step_time`, is that of drawing its batch (`data_processing`)
    and of `_train_step`; logging, validation and checkpoints come on top.
    """

    state: TrainerState
    history: History
    timer: Timer
    validation: ValidationResult | None
    run_dir: Path
    _signals: SignalGuard
    _callbacks: CallbackList
    _checkpoints: RunCheckpoints
    _metrics_logger: LoggerFacade
    _samples: ValidationSamples
    _schedule: ValidationSchedule
    _patience: Patience
    _throughput: Throughput
    _memory: MemoryTurns
    _loader: Loader
    _val_loader: Loader | ValidationParts | None
    _loader_state: Mapping[str, Any]
    _phase: str
    _opened: bool

    # What a step uses ------------------------------------------------------------

    @contextmanager
    def phase(self, name: str, *, label: str | None = None) -> Iterator[None]:
        """Measure a part of a step, and tell callbacks that it begins.

        Args:
            name: Name of the phase.
            label: Name of the timer, where it is another one.
        """
        self._signals.check()
        if name in _PROTECTED:
            self._signals.hold()
        around, self._phase = self._phase, name
        step = min(self.state.step + 1, max(self.state.total_steps, 1))
        self._call("on_phase", name, step, self.state.total_steps)
        with self.timer.time(label or name):
            yield
        # Left as it is by what raises: the error names the phase it came from.
        self._phase = around

    def request_stop(self, reason: str) -> None:
        """End the run after the current step, with a checkpoint."""
        self.state.stop_reason = reason

    def sync_weights(self) -> None:
        """Give generation the policy's weights, if it lacks them, and its memory.

        Call it before anything is sampled, and `finish_sampling` afterwards.
        """
        sync, memory = self.components.sync, self._memory
        is_stale = sync is not None and sync.is_stale
        if not is_stale and not memory.generation.must_prepare:
            return
        prefix = "prepare_for_generation"
        with self.phase(prefix, label=f"{prefix}/total"):
            # First of all: the new weights need the room.
            memory.training.finish()
            if is_stale:
                with self.timer.time(f"{prefix}/transfer_and_update_weights"):
                    sync.sync_weights(version=self.state.weight_version)
            memory.generation.prepare()

    def finish_sampling(self) -> None:
        """Free what only generation needs; log-probs and training follow.

        Not called after an error: the workers may be gone, and the next turn, also that
        of a later run with the same models, begins by freeing what is left.
        """
        if self._memory.generation.must_finish:
            with self.timer.time("finish_generation"):
                self._memory.generation.finish()

    def prepare_for_training(self) -> None:
        """Give the memory of the devices to the models that are trained."""
        self.finish_sampling()
        if self._memory.training.must_prepare:
            with self.timer.time("prepare_for_training"):
                self._memory.training.prepare()

    def train_policy(
        self, rows: BatchedDataDict[Any], loss: Any, global_batch_size: int
    ) -> Mapping[str, Any]:
        """Train the policy on rows, and note that its weights are new.

        Returns:
            What `PolicyInterface.train` returns.
        """
        self.prepare_for_training()
        with self.phase("policy_training"):
            output: Mapping[str, Any] = self.components.policy.train(
                rows, loss, gbs=global_batch_size, timer=self.timer
            )
        self._throughput.note_trained(rows)
        self.state.weight_version += rows.size // global_batch_size
        if self.components.sync is not None:
            self.components.sync.mark_stale()
        return output

    def draw_batch(self) -> BatchedDataDict[Any] | None:
        """Return the next batch of the epoch, or None at its end."""
        with self.timer.time("data_processing"):
            return next(self._batches, None)

    # Steps -----------------------------------------------------------------------

    def _train(self) -> None:
        state = self.state
        self._call("on_train_begin")
        if state.step == 0:
            self._validate_if_due()
        elif state.validated_at == state.step:
            # It was saved after a validation that may have ended the run.
            self._stop_early(state.metrics)
        while not self._finished():
            self._call_numbered("on_epoch_begin", state.epoch + 1)
            self._batches = iter(self._loader)
            while (batch := self._next_batch()) is not None:
                self._run_step(batch)
                if self._finished():
                    break
            else:
                state.epoch += 1
                state.step_in_epoch = 0
                self._loader_state = self._loader.state_dict()
                self._call_numbered(
                    "on_epoch_end", state.epoch, with_plain_names(state.metrics)
                )
        if state.validated_at != state.step:
            # Nobody knew that the last step was the last: a stream has ended.
            self._validate_if_due()
        unsaved = self._checkpoints.saved_at != state.step
        if unsaved and self._checkpoints.due(state.step, last=True, best=False):
            self._save_checkpoint()
        self._call("on_train_end")
        # Models that were given to the run live on.
        self.finish_sampling()
        self._memory.training.finish()

    def _finished(self) -> bool:
        max_epochs, max_steps = self._limits()
        state = self.state
        if state.stop_reason is None:
            if max_steps is not None and state.step >= max_steps:
                self._end_at(f"max_num_steps ({max_steps}) reached")
            elif max_epochs is not None and state.epoch >= max_epochs:
                self._end_at(f"max_num_epochs ({max_epochs}) reached")
            elif getattr(self._loader, "is_used_up", False):
                self._end_at(
                    "the training data are used up: an iterator can be gone through "
                    "only once; give the function that makes it for further passes"
                )
        return state.stop_reason is not None

    def _end_at(self, limit: str) -> None:
        """End at a limit, and say so if the run has missed its goal."""
        missed = self._early_stop().shortfall(self.state.metrics)
        self.request_stop(f"{limit}; {missed}" if missed else limit)

    def _next_batch(self) -> Any:
        self.timer.reset()
        with self.timer.time("total_step_time"):
            return self.draw_batch()

    def _run_step(self, batch: BatchedDataDict[Any]) -> None:
        with log_context(step=self.state.step + 1):
            self._call_numbered("on_step_begin", self.state.step + 1)
            self._apply_updates("step_begin")
            with self.timer.time("total_step_time"):
                metrics = to_floats(self._train_step(batch))
            self._advance(metrics)
            # The step counts from here on, so an interruption can save it.
            self._signals.release()
            self._apply_updates("step_end")
            self._after_step()

    def _advance(self, metrics: Mapping[str, float]) -> None:
        state = self.state
        state.step += 1
        state.step_in_epoch += 1
        state.consumed_samples += int(metrics.get("num_samples", 0))
        state.total_valid_tokens += int(metrics.get("num_valid_tokens", 0))
        self._loader_state = self._loader.state_dict()
        timing = self.timer.get_timing_metrics("sum")
        named = {f"train:{name}": value for name, value in metrics.items()}
        named |= {f"timing:{name}": value for name, value in timing.items()}
        rates = self._throughput.take(metrics, timing)
        named |= {f"performance:{name}": value for name, value in rates.items()}
        self._record(named)
        self._call("on_step_end", with_plain_names(named))

    def _after_step(self) -> None:
        self._checkpoints.mark_step()
        best = self._validate_if_due()
        if self._checkpoints.due(self.state.step, last=self._last_step(), best=best):
            self._save_checkpoint()

    def _last_step(self) -> bool:
        state = self.state
        return state.stop_reason is not None or state.step >= state.total_steps

    def _record(self, named: Mapping[str, float]) -> None:
        step = self.state.step
        self.state.metrics.update(named)
        self.history.add(step, named)
        self._metrics_logger.log_metrics(named, step, step_finished=True)

    # Validation ------------------------------------------------------------------

    def _validate_if_due(self) -> bool:
        """Validate when it is time; return whether the ranking metric improved."""
        last = self._last_step()
        if self._val_loader is None or not self._schedule.due(
            self.state.step, last=last
        ):
            return False
        self._call("on_validation_begin")
        timer = Timer()
        with self.phase("validation"), timer.time("validation"):
            self.validation = validate_parts(self._val_loader, self._validate)
        metrics = {f"val:{k}": v for k, v in to_floats(self.validation.metrics).items()}
        _, earlier = self.history.column(self.config.checkpointing.metric_name or "")
        best = self._checkpoints.is_best(metrics, earlier)
        self.state.validated_at = self.state.step
        self._samples.add(self.state.step, self.validation.samples)
        self._record({**metrics, "timing:validation": timer.reduce("validation")})
        self._patience.observe(self.state, metrics)
        self._call("on_validation_end", with_plain_names(metrics, "val"))
        self._stop_early(metrics)
        return best

    def _stop_early(self, metrics: Mapping[str, float]) -> None:
        """End the run if the newest validation says so."""
        reason = self._early_stop().reason(metrics) or self._patience.reason(self.state)
        if reason is not None:
            self.request_stop(reason)

    # Checkpoints -----------------------------------------------------------------

    def _save_checkpoint(self) -> Path:
        state = self.state
        with self._signals.protected(), self.phase("checkpointing"):
            path = self._checkpoints.save(
                state,
                self.components.policy,
                self.history.at(state.step),
                run_config=self.config.to_dict(),
                dataloader=self._loader_state,
                callbacks=self._callbacks.state_dict(),
                critic=self.components.critic,
            )
            state.last_checkpoint = str(path)
        self._record({"timing:checkpointing": self.timer.reduce("checkpointing")})
        self._call("on_checkpoint", path)
        return path

    def _keep_checkpoint(self, *, can_save: bool = True) -> Path | None:
        """Save what an interrupted run has reached, where that is possible.

        Args:
            can_save: Whether the workers can be reached.
        """
        if not self._opened or not self.config.checkpointing.enabled:
            return None
        try:
            unsaved = self._checkpoints.saved_at != self.state.step
            if can_save and unsaved and not self._signals.held:
                self._save_checkpoint()
        except Interrupted:
            # A further signal: what was written whole counts, the rest does not.
            self._signals.acknowledge()
        except Exception:
            _logger.exception("no checkpoint of step %d", self.state.step)
        last = self.state.last_checkpoint
        return Path(last) if last else None

    def _restore(self, checkpoint: Path, info: Mapping[str, Any]) -> None:
        self.state.restore(info["state"])
        if isinstance(self.components.policy, OwnPolicy):
            self.components.policy.go_on_at(self.state.weight_version)
        self.state.last_checkpoint = str(checkpoint)
        self._loader.load_state_dict(info["dataloader"])
        self._callbacks.load_state_dict(info["callbacks"])
        self._metrics_logger.resume_at(self.state.step)
        self._samples.resume_at(self.state.step)
        path = self._metrics_logger.log_dir / "metrics.jsonl"
        self.history = History.read(path, up_to=self.state.step)

    def _call(self, hook: str, *arguments: Any) -> None:
        """Call a hook with the number of steps done."""
        self._call_numbered(hook, self.state.step, *arguments)

    def _call_numbered(self, hook: str, number: int, *arguments: Any) -> None:
        self._callbacks.call(hook, self, number, *arguments)
