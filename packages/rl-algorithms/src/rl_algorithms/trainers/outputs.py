"""The outputs of a run: metrics, samples, checkpoints and the result."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from rl_algorithms.trainers.checkpoints import RunCheckpoints
from rl_algorithms.trainers.recording.recorder import TrainingRecorder
from rl_algorithms.trainers.run.history import History
from rl_algorithms.trainers.run.result import RESULT, TrainResult, write_result
from rl_algorithms.trainers.run.state import TrainerState
from rl_algorithms.trainers.run.weight_log import WeightLog
from rl_algorithms.trainers.sampling.answer_tables import AnswerTables
from rl_algorithms.trainers.sampling.rollout_files import RolloutFiles
from rl_algorithms.trainers.sampling.validation_samples import ValidationSamples
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.settings.rollout_config import RolloutTrainerConfig
from rl_distributed.logs.logging import get_logger
from rl_distributed.metrics import LoggerFacade
from rl_distributed.runs.folder import CHECKPOINTS
from rl_distributed.timing.timeline import Timeline
from rl_distributed.timing.timeline_file import TIMELINE
from rl_distributed.timing.timer import Timer
from rl_distributed.timing.tracing import Span

__all__ = ["RunOutputs"]

_logger = get_logger(__name__)
# It spans all others of a step, and says nothing besides them.
_WHOLE_STEP = "total_step_time"


class RunOutputs:
    """Opens the outputs of a run.

    Args:
        config: The run's configuration.
        run_dir: Folder of the run.
        algorithm: Name of the algorithm.
        closing: Exit stack that closes the outputs.
    """

    def __init__(
        self, config: TrainerConfig, run_dir: Path, algorithm: str, closing: ExitStack
    ) -> None:
        self._run_dir = run_dir
        # As a context manager, so that a sink that fails to close cannot hide the error
        # that ended the run.
        self.metrics = closing.enter_context(LoggerFacade(config.logger, run_dir))
        """Metrics of all steps, and their sinks."""
        self.metrics.log_hyperparams(config.to_dict())
        self.samples = ValidationSamples(run_dir)
        """Sample answers of every validation."""
        limit = tables_every = 0
        if isinstance(config, RolloutTrainerConfig):
            limit = config.rollout.kept_max_bytes
            tables_every = config.rollout.tables_every
        self.rollouts = RolloutFiles(run_dir, limit)
        """Sample answers of every training step."""
        self.tables = AnswerTables(self.metrics, tables_every)
        """Tables of both kinds of samples, for experiment trackers."""
        self.weights = WeightLog(run_dir)
        """Weights that the generator had, by version."""
        self.recorder = TrainingRecorder(run_dir, is_on=config.record_training)
        """Rows of every training call, if they are recorded."""
        closing.callback(self.recorder.close)
        self._timeline = _open_timeline(run_dir) if config.logger.timeline else None
        if self._timeline is not None:
            closing.callback(self._timeline.close)
        # A run that had ended and continues now has no result yet.
        (run_dir / RESULT).unlink(missing_ok=True)
        folder = run_dir / CHECKPOINTS
        self.checkpoints = RunCheckpoints(config.checkpointing, folder, algorithm)
        """Checkpoints of the run."""
        closing.callback(self.checkpoints.close)

    def begin_step(self, step: int, timer: Timer) -> None:
        """Begin a step on the time line, with the spans since the last one."""
        if self._timeline is not None:
            self._timeline.begin_step(step, _phases(timer))

    def close_timeline(self, timer: Timer) -> None:
        """End the time line while the workers can still report."""
        if self._timeline is not None:
            self._timeline.close(_phases(timer))

    def resume_at(self, step: int) -> History:
        """Remove output written after a step; return the metrics up to that step."""
        self.metrics.resume_at(step)
        return self._cut_off(step)

    def go_back_to(self, step: int) -> History:
        """Do the same within a running process that has done later steps."""
        self.metrics.go_back_to(step)
        return self._cut_off(step)

    def _cut_off(self, step: int) -> History:
        self.samples.resume_at(step)
        self.rollouts.resume_at(step)
        self.weights.resume_at(step)
        self.recorder.resume_at(step)
        if self._timeline is not None:
            self._timeline.resume_at(step)
        return History.read(self.metrics.log_dir / "metrics.jsonl", up_to=step)

    def write_result(
        self,
        config: TrainerConfig,
        state: TrainerState,
        history: History,
        began_s: float,
    ) -> TrainResult:
        """Write `result.json` and return the result.

        Args:
            config: The run's configuration, including its updates.
            state: The final state.
            history: Metrics of every step.
            began_s: Start of the run by `time.monotonic`.
        """
        best = self.checkpoints.best() if config.checkpointing.enabled else None
        result = TrainResult(
            metrics=dict(state.metrics),
            history=history,
            checkpoint_path=best,
            run_dir=self._run_dir,
            steps=state.step,
            stop_reason=state.stop_reason or "",
            wall_s=round(time.monotonic() - began_s, 2),
            warnings=tuple(state.warnings),
            stopped_by=state.stopped_by,
        )
        write_result(self._run_dir, result.to_dict(seed=config.seed))
        return result


def _open_timeline(run_dir: Path) -> Timeline | None:
    try:
        return Timeline(run_dir / TIMELINE)
    except OSError as error:
        # Of use to a reader only, so the run goes on without it.
        _logger.warning("no time line is recorded: %s", error)
        return None


def _phases(timer: Timer) -> list[Span]:
    return [span for span in timer.get_spans() if span.label != _WHOLE_STEP]
