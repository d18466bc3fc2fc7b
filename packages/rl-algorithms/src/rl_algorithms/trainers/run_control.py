"""Control of a run from other processes, between its steps.

```
requests/ --> update -----------> LiveConfig          (and HTTP, by `ControlAddress`)
          --> pause, resume ----> holds the run before its next step
          --> checkpoint -------> saves the state after the last step
          --> stop -------------> ends the run; answered when it is saved
```

| part          | consumes | produces | waits for             | unblocked by         |
|---------------|----------|----------|-----------------------|----------------------|
| `RunControl`  | requests | answers  | a resume, when paused | resume, stop, signal |
| `control_run` | answers  | requests | the next step         | its deadline         |
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from rl_algorithms.trainers.algorithm import Algorithm, ConfigT
from rl_algorithms.trainers.callbacks import RunHooks
from rl_algorithms.trainers.live_config import LiveConfig
from rl_algorithms.trainers.outputs import RunOutputs
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_algorithms.trainers.run.state import TrainerState
from rl_algorithms.trainers.settings.config_updates import Moment
from rl_distributed.errors import ConfigError, DistributedError
from rl_distributed.logs.logging import get_logger
from rl_distributed.runs.control_config import ControlConfig
from rl_distributed.runs.ending import forget_pause, note_pause, run_state
from rl_distributed.runs.requests import RunRequest, RunRequests
from rl_distributed.security.audit import audit

if TYPE_CHECKING:
    from rl_distributed.runs.control_address import ControlAddress

__all__ = ["RunControl"]

_logger = get_logger(__name__)

_LOOK_EVERY_S = 0.1
"""Interval at which a paused run looks for requests."""

Save = Callable[[], Path]


class RunControl(Generic[ConfigT]):
    """Serves requests of other processes between the steps of a run.

    Args:
        trainer: Trainer of the run.
        updates: Changes of its configuration.
        outputs: Outputs with its checkpoints.
        hooks: Callbacks, notified of a pause.
        signals: Signal guard; a signal ends a pause.
        on_progress: Called while a run is paused, which is no stall.
    """

    def __init__(
        self,
        trainer: Algorithm[ConfigT],
        updates: LiveConfig[ConfigT],
        outputs: RunOutputs,
        hooks: RunHooks,
        signals: SignalGuard,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._trainer, self._outputs = trainer, outputs
        self._on_progress = on_progress
        self.updates = updates
        """Changes of the configuration."""
        self._hooks, self._signals = hooks, signals
        self._open: list[RunRequest] = []
        """Requests that are answered once they are completed."""
        self._paused_by: str | None = None

    def begin(self, closing: ExitStack) -> None:
        """Start to read requests.

        Args:
            closing: Exit stack that ends it.
        """
        trainer = self._trainer
        if trainer.config.control is not None:
            # Closed after the requests, whose answers it still sends.
            closing.callback(
                _listen(trainer.run_dir, trainer.config.control, trainer.state).close
            )
        self._requests = closing.enter_context(RunRequests(trainer.run_dir))
        # Registered later, so that it runs before the requests are closed.
        closing.callback(self._refuse_open)
        # Left over where the process of a paused run was killed.
        forget_pause(trainer.run_dir)

    def apply(self, moment: Moment, save: Save) -> None:
        """Serve the requests that are due; hold a paused run before its next step.

        Args:
            moment: Point within the step.
            save: Saves a checkpoint of the last step.

        Raises:
            Interrupted: A signal came while the run was paused.
        """
        self.updates.apply(moment)
        self._take(moment)
        if moment == "step_begin":
            self.save_if_asked(save)
            if self._paused_by is not None:
                self._hold(save)

    def go_back(self) -> None:
        """Keep a request to stop in force after the run has gone back."""
        if self.ends_run:
            self._trainer.request_stop(self._stopped())

    @property
    def ends_run(self) -> bool:
        """Whether a request has asked for the end of the run."""
        return self._trainer.state.stopped_by is not None

    def save_if_asked(self, save: Save) -> None:
        """Serve requests for a checkpoint of the last step."""
        wanted = self._pop("checkpoint")
        if not wanted:
            return
        state = self._trainer.state
        try:
            if self._outputs.checkpoints.saved_at != state.step:
                save()
        except (DistributedError, OSError) as error:
            # Only the request fails: the run itself does not need this checkpoint.
            for request in wanted:
                self._refuse(request, str(error))
        else:
            for request in wanted:
                self._answer(request, checkpoint=state.last_checkpoint)

    def end(self) -> None:
        """Answer requests to stop, now that everything is saved."""
        kept = self._trainer.state.last_checkpoint
        for request in self._pop("stop"):
            self._answer(request, checkpoint=kept)

    # Requests --------------------------------------------------------------------

    def _take(self, moment: Moment) -> None:
        # Not an attribute: bound methods in it would be a reference cycle, which keeps
        # the trainer and its cluster alive until the garbage collector runs.
        kinds: dict[str, Callable[[RunRequest], None]] = {
            "pause": self._note_pause,
            "resume": self._resume,
            "checkpoint": self._note_checkpoint,
            "stop": self._note_stop,
        }
        for request in self._requests.take():
            if request.kind == "update":
                self.updates.answer(request, moment)
            elif request.kind in kinds:
                kinds[request.kind](request)
            else:
                known = ", ".join(["update", *kinds])
                request.refuse(
                    f"unknown request {request.kind!r}: the run accepts {known}"
                )

    def _note_pause(self, request: RunRequest) -> None:
        if self._paused_by is not None:
            self._refuse(request, f"the run is paused already, by {self._paused_by}")
        elif self.ends_run:
            self._refuse(request, self._stopped())
        else:
            self._paused_by = request.by
            self._open.append(request)

    def _resume(self, request: RunRequest) -> None:
        if self._paused_by is None:
            self._refuse(request, "the run is not paused: nothing to resume")
            return
        self._paused_by = None
        with suppress(OSError):
            forget_pause(self._trainer.run_dir)
        # The run was not held yet: both requests came within one step.
        for pause in self._pop("pause"):
            self._refuse(pause, f"the run was resumed already, by {request.by}")
        self._answer(request)

    def _note_checkpoint(self, request: RunRequest) -> None:
        if self._trainer.config.checkpointing.enabled:
            self._open.append(request)
        else:
            self._refuse(
                request,
                "the run writes no checkpoints: it was started with "
                "checkpointing.enabled=false",
            )

    def _note_stop(self, request: RunRequest) -> None:
        state = self._trainer.state
        self._open.append(request)
        if state.stopped_by is not None:
            return
        state.stopped_by = request.by
        self._trainer.request_stop(self._stopped())
        self._paused_by = None
        for pause in self._pop("pause"):
            self._refuse(pause, self._stopped())

    def _stopped(self) -> str:
        return f"stopped by {self._trainer.state.stopped_by}"

    # Pause -----------------------------------------------------------------------

    def _hold(self, save: Save) -> None:
        """Wait for a resume, and serve other requests meanwhile."""
        state, checkpoints = self._trainer.state, self._outputs.checkpoints
        self._hooks.call("on_phase", "paused", state.step, state.total_steps)
        look = threading.Event()
        folder = self._trainer.run_dir
        # Before the answer: whoever has that finds the run paused.
        with suppress(OSError):  # only lists of runs read it
            note_pause(folder, str(self._paused_by))
        self._trainer._note_pause(True)
        for request in self._pop("pause"):
            self._answer(request)
        try:
            while self._paused_by is not None:
                self._signals.check()
                look.wait(_LOOK_EVERY_S)
                self._on_progress()
                self._take("step_begin")
                self.save_if_asked(save)
                unsaved = state.step > 0 and checkpoints.saved_at != state.step
                # The time limit of the job also counts while a run is paused.
                if unsaved and checkpoints.is_late():
                    save()
        finally:
            self._trainer._note_pause(False)
            with suppress(OSError):
                forget_pause(folder)
        # The pause is not part of a step's duration.
        checkpoints.begin_step()

    # Answers ---------------------------------------------------------------------

    def _pop(self, kind: str) -> list[RunRequest]:
        found = [request for request in self._open if request.kind == kind]
        self._open = [request for request in self._open if request.kind != kind]
        return found

    def _answer(self, request: RunRequest, **result: Any) -> None:
        step, folder = self._trainer.state.step, str(self._trainer.run_dir)
        _logger.info("%s by %s, after step %d", request.kind, request.by, step)
        audit(f"run.{request.kind}", folder, by=request.by, step=step, **result)
        request.answer({"step": step, **result})

    def _refuse(self, request: RunRequest, reason: str) -> None:
        _logger.warning("%s by %s was refused: %s", request.kind, request.by, reason)
        folder = str(self._trainer.run_dir)
        audit(f"run.{request.kind}", folder, "refused", by=request.by, error=reason)
        request.refuse(reason)

    def _refuse_open(self) -> None:
        for request in self._open:
            self._refuse(
                request, "the run ended before it served the request: see its log"
            )
        self._open = []


def _listen(
    run_dir: Path, config: ControlConfig, state: TrainerState
) -> ControlAddress:
    """Answer at an address; it refers to the state alone, and not to the trainer.

    Raises:
        ConfigError: The port is taken, or aiohttp is not installed.
        SecurityError: The keys or the certificate cannot be used.
    """
    try:
        # Only a run that listens needs an HTTP server.
        from rl_distributed.runs.control_address import (  # noqa: PLC0415
            ControlAddress,
        )
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"control needs the package {error.name!r}: run pip install {error.name}"
        ) from error

    def status() -> dict[str, Any]:
        metrics = {k: v for k, v in dict(state.metrics).items() if math.isfinite(v)}
        return {
            "state": run_state(run_dir),
            "step": state.step,
            "total_steps": state.total_steps,
            "stop_reason": state.stop_reason,
            "metrics": metrics,
        }

    return ControlAddress(run_dir, config, status)
