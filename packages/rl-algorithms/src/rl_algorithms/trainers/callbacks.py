"""Hooks into the trainer loop."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.callback_number import CountWithState, takes_state_only
from rl_algorithms.trainers.trainer_interface import RunningTrainer
from rl_distributed.errors import ConfigError
from rl_distributed.logs.logging import get_logger

__all__ = [
    "Callback",
    "CallbackList",
    "LoggingCallback",
    "RunHooks",
    "with_plain_names",
]


class Callback:
    """Base of all callbacks; override what you need.

    Every hook gets the trainer and a number: that of the step or, in the hooks of an
    epoch, that of the epoch, both counted from 1. `trainer.state` (`TrainerState`) has
    more. A hook may call `trainer.request_stop("why")`, which ends the run after the
    current step. An exception in a hook ends the run; its message names the hook.

    ```python
    class Progress(Callback):
        def on_step_end(self, trainer, step, metrics):
            if step % 100 == 0:
                print(f"Step {step}: loss={metrics['loss']:.4f}")
    ```

    Order: `on_train_begin`, then per epoch `on_epoch_begin`, per step `on_step_begin`,
    any number of `on_phase`, `on_step_end`, then (when due) `on_validation_begin`,
    `on_validation_end` and `on_checkpoint`, then `on_epoch_end`, and finally
    `on_train_end`. After an exception, `on_exception` replaces the remaining hooks.
    """

    def on_train_begin(self, trainer: RunningTrainer, step: int) -> None:
        """React to the start of the loop, after `step` steps of earlier processes."""

    def on_train_end(self, trainer: RunningTrainer, step: int) -> None:
        """React to the end of the loop after `step` steps.

        The policy still exists.
        """

    def on_epoch_begin(self, trainer: RunningTrainer, epoch: int) -> None:
        """React to the start of a pass over the data, also after a resume."""

    def on_epoch_end(
        self, trainer: RunningTrainer, epoch: int, metrics: Mapping[str, float]
    ) -> None:
        """React to the end of a pass over the data.

        `metrics` has the latest value of each metric of the run; those of training also
        without prefix: `train:loss` and `loss`.
        """

    def on_step_begin(self, trainer: RunningTrainer, step: int) -> None:
        """React to the start of a step."""

    def on_step_end(
        self, trainer: RunningTrainer, step: int, metrics: Mapping[str, float]
    ) -> None:
        """React to the end of a step.

        `metrics` has names such as `train:loss` and `performance:tokens_per_sec`; those
        of training also without prefix: `loss`, which is nan if the step had nothing to
        train on.
        """

    def on_phase(
        self,
        trainer: RunningTrainer,
        steps_done: int,
        phase: str,
        step: int,
        total: int,
    ) -> None:
        """React to the start of a phase of step `step`; for progress displays.

        Phases are `setup`, `generation`, `policy_training`, `validation`, ...: the
        names of the timers.
        """

    def on_validation_begin(self, trainer: RunningTrainer, step: int) -> None:
        """React to the start of a validation, after `step` steps."""

    def on_validation_end(
        self, trainer: RunningTrainer, step: int, metrics: Mapping[str, float]
    ) -> None:
        """React to the end of a validation.

        `metrics` has names such as `val:accuracy`, also without prefix.
        """

    def on_checkpoint(self, trainer: RunningTrainer, step: int, path: Path) -> None:
        """React to a complete checkpoint of step `step`, which `resume` would find."""

    def on_exception(
        self, trainer: RunningTrainer, step: int, error: BaseException
    ) -> None:
        """React to an exception that ends the run, including `Interrupted`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, as JSON values; {} for none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned in an earlier run."""


class CallbackList:
    """Calls a hook of every callback, in order."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = list(callbacks)
        for index, callback in enumerate(self._callbacks):
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"callbacks[{index}] must be a rl_algorithms.Callback: got "
                    f"{type(callback).__name__}; pass an instance of a subclass"
                )

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def call(
        self, hook: str, trainer: RunningTrainer, number: int, *arguments: Any
    ) -> None:
        """Call one hook; an exception gets a note that names it.

        Args:
            hook: Name of the method.
            trainer: Its first argument.
            number: Number of the step or the epoch.
            *arguments: Further arguments of the hook.
        """
        count = CountWithState(number, trainer.state)
        for callback in self._callbacks:
            with _blame(callback, hook):
                method = getattr(callback, hook)
                if hook == "on_epoch_end" and takes_state_only(method):
                    method(trainer, count)
                else:
                    method(trainer, count, *arguments)

    def state_dict(self) -> dict[str, Any]:
        """Return the states, by class name and position among that class."""
        return {name: callback.state_dict() for name, callback in self._named()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of each callback; those without one start fresh."""
        for name, callback in self._named():
            if name in state:
                callback.load_state_dict(state[name])

    def _named(self) -> Iterator[tuple[str, Callback]]:
        counts: dict[str, int] = {}
        for callback in self._callbacks:
            name = type(callback).__name__
            counts[name] = counts.get(name, 0) + 1
            # Numbered, because a run may have several callbacks of one class.
            yield f"{name}/{counts[name]}", callback


class RunHooks:
    """Calls the hooks of a run's callbacks with its trainer."""

    def __init__(self, callbacks: CallbackList, trainer: RunningTrainer) -> None:
        self.callbacks = callbacks
        # Weak, because the trainer holds these hooks. In a reference cycle it would
        # wait for the garbage collector, and with it its cluster and workers.
        self._trainer = weakref.ref(trainer)

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook with the number of completed steps."""
        trainer = self._trainer()
        if trainer is not None:
            self.callbacks.call(hook, trainer, trainer.state.step, *arguments)

    def call_numbered(self, hook: str, number: int, *arguments: Any) -> None:
        """Call a hook with the number of a step or an epoch."""
        trainer = self._trainer()
        if trainer is not None:
            self.callbacks.call(hook, trainer, number, *arguments)


def with_plain_names(
    metrics: Mapping[str, float], prefix: str = "train"
) -> dict[str, float]:
    """Return metrics, adding those of one prefix without it: `train:loss` as `loss`.

    A step without anything to train on has no `train:loss`, and nan as `loss`.
    """
    start = f"{prefix}:"
    plain = {
        name.removeprefix(start): value
        for name, value in metrics.items()
        if name.startswith(start)
    }
    unknown = {"loss": math.nan} if prefix == "train" else {}
    return {**unknown, **plain, **metrics}


@contextmanager
def _blame(callback: Callback, hook: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        # Interruptions too, which may have been raised within a hook.
        error.add_note(f"raised by {type(callback).__name__}.{hook}")
        raise


class LoggingCallback(Callback):
    """Writes one log line per step, validation and checkpoint.

    Args:
        every_n_steps: Number of steps between two lines.
        metrics: Names to show, without their prefix; those that a step lacks are
            omitted.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        metrics: tuple[str, ...] = (
            "loss",
            "val_loss",
            "reward",
            "accuracy",
            "grad_norm",
            "tokens_per_sec",
        ),
    ) -> None:
        if every_n_steps < 1:
            raise ConfigError(
                "LoggingCallback: every_n_steps must be at least 1: got "
                f"{every_n_steps}"
            )
        self._every_n_steps = every_n_steps
        self._metrics = metrics
        self._logger = get_logger("rl_algorithms.training")
        self._started_s = time.monotonic()

    def on_train_begin(self, trainer: RunningTrainer, step: int) -> None:
        """Start the clock."""
        self._started_s = time.monotonic()
        self._logger.info("run folder %s", trainer.run_dir)

    def on_step_end(
        self, trainer: RunningTrainer, step: int, metrics: Mapping[str, float]
    ) -> None:
        """Write the step's line."""
        if step % self._every_n_steps:
            return
        shown = self._show(metrics, "train", "performance")
        elapsed_s = time.monotonic() - self._started_s
        self._logger.info(
            "step %d/%d  %s  (%.1f s)",
            step,
            trainer.state.total_steps,
            shown,
            elapsed_s,
        )

    def on_validation_end(
        self, trainer: RunningTrainer, step: int, metrics: Mapping[str, float]
    ) -> None:
        """Write the validation's line."""
        shown = self._show(metrics, "val")
        self._logger.info("validation at step %d  %s", step, shown)

    def on_checkpoint(self, trainer: RunningTrainer, step: int, path: Path) -> None:
        """Write where the checkpoint is."""
        self._logger.info("checkpoint %s", path)

    def _show(self, metrics: Mapping[str, float], *prefixes: str) -> str:
        return "  ".join(
            f"{name} {metrics[key]:.4g}"
            for name in self._metrics
            for key in (f"{prefix}:{name}" for prefix in prefixes)
            if key in metrics
        )
