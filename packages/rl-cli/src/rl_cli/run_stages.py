"""Execution of a run: builds the model and trains one stage after another.

A finished stage is never trained again: its result is in the run folder, and the next
stage starts from the weights that it kept, in the same processes. An interrupted stage
continues from its own last checkpoint.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_algorithms import (
    BaseTrainer,
    Interrupted,
    KeptWorkers,
    TrainResult,
    get_algorithm,
)
from rl_algorithms.trainers.progress import ProgressDisplay
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_cli.run_config import Run, Stage
from rl_cli.run_folder import RunFolder
from rl_distributed.config import merge_configs

__all__ = ["RunOutcome", "carry_out"]


@dataclass(frozen=True)
class RunOutcome:
    """Result of a run."""

    run_dir: Path
    checkpoint: Path
    """Hugging Face folder of the last stage's weights."""
    wall_s: float
    """Wall time of this process's part of the run, in seconds."""
    stages: dict[str, dict[str, Any]]
    """Metrics, checkpoint, steps and stop reason of every trained stage."""

    @property
    def stopped_by(self) -> str | None:
        """Person or program that requested the end of the run; None: nobody."""
        by: str | None = next(reversed(self.stages.values())).get("stopped_by")
        return by

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last stage."""
        return dict(next(reversed(self.stages.values()))["metrics"])


def carry_out(
    run: Run,
    folder: RunFolder,
    display: ProgressDisplay,
    guard: SignalGuard,
    *,
    resume: bool,
) -> RunOutcome:
    """Train every unfinished stage, until the run is stopped.

    Args:
        run: The run.
        folder: Its folder, with results of finished stages.
        display: Progress display.
        guard: Signal guard, checked between stages.
        resume: Continue an interrupted stage from its last checkpoint.

    Raises:
        Interrupted: A signal arrived; it names the newest checkpoint of the run.
    """
    began_s = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    kept: Path | None = None
    try:
        with KeptWorkers() as pool:
            model = _built_model(run, folder)
            for stage in run.stages:
                guard.raise_pending()
                result = folder.stage_result(stage.name)
                if result is None:
                    trainer = _trainer(stage, folder, model, pool)
                    result = _train(stage, trainer, display, resume=resume)
                    if result["stopped_by"] is None:
                        folder.end_stage(stage.name, result)
                results[stage.name] = result
                kept = Path(result["checkpoint"])
                model = Path(result["model"])
                if result.get("stopped_by") is not None:
                    # Later stages must not start, as a resume continues this one.
                    break
    except Interrupted as error:
        # Interrupted between two stages: the last finished one has the newest
        # checkpoint.
        if error.checkpoint_path is None:
            raise error.with_checkpoint(kept) from None
        raise
    # There is at least one stage.
    assert model is not None
    return RunOutcome(folder.path, model, time.monotonic() - began_s, results)


def _built_model(run: Run, folder: RunFolder) -> Path | None:
    """Build the run's model once, discarding an unfinished one."""
    if run.model is None:
        return None
    if not folder.model.exists():
        # Imports modeling code, which other runs need in the workers only.
        from rl_models import build_model  # noqa: PLC0415

        temporary = folder.model.with_name("model.tmp")
        # Renamed when complete, so that `model` never holds half a model; what is left
        # here was interrupted.
        shutil.rmtree(temporary, ignore_errors=True)
        build_model(run.model, temporary, seed=run.seed)
        temporary.rename(folder.model)
    return folder.model


def _trainer(
    stage: Stage, folder: RunFolder, model: Path | None, pool: KeptWorkers
) -> BaseTrainer[Any]:
    changes: dict[str, Any] = {"output_dir": str(folder.stage(stage.name))}
    data = stage.config.to_dict()
    if model is not None:
        changes |= _with_model(data, str(model))
    data = merge_configs(data, changes)
    cls = get_algorithm(stage.algorithm)
    config = cls.config_type().from_dict(data, source=f"stage {stage.name}")
    return cls.from_config(config, pool=pool, claim=folder.claim)


def _with_model(data: dict[str, Any], model: str) -> dict[str, Any]:
    """Set the model in each section that uses the policy's, such as a critic."""
    name = data["policy"]["model_name"]
    return {
        key: {"model_name": model}
        for key, section in data.items()
        if isinstance(section, dict) and section.get("model_name") == name
    }


def _train(
    stage: Stage, trainer: BaseTrainer[Any], display: ProgressDisplay, *, resume: bool
) -> dict[str, Any]:
    display.begin(stage.name)
    result: TrainResult = trainer.fit(
        progress=display, resume="auto" if resume else False
    )
    if result.checkpoint_path is None:
        raise RuntimeError(f"stage {stage.name} kept no checkpoint")
    return {
        "algorithm": stage.algorithm,
        "metrics": dict(result.metrics),
        "steps": result.steps,
        "run_dir": str(result.run_dir),
        "stop_reason": result.stop_reason,
        "stopped_by": result.stopped_by,
        "warnings": list(result.warnings),
        "checkpoint": str(result.checkpoint_path),
        "model": str(result.model_path),
    }
