"""The result of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.run.curves import Mark, draw_curves
from rl_algorithms.trainers.run.figures import Figures
from rl_algorithms.trainers.run.history import History
from rl_distributed.metrics.sinks.plain import plain_tree
from rl_distributed.private_files import write_private_text

__all__ = ["RESULT", "TrainResult", "result_record", "write_result"]

RESULT = "result.json"


def result_record(
    figures: Figures,
    *,
    steps: int,
    wall_s: float,
    best_checkpoint: Path | str | None,
    stop_reason: str,
    run_dir: Path | str,
    model: Path | str | None,
    seed: int,
    metrics: Mapping[str, float],
    warnings: Iterable[str] = (),
    stopped_by: str | None = None,
) -> dict[str, Any]:
    """Return the content of `result.json`, the most important facts first.

    Args:
        figures: Key figures of the run, or of its last stage.
        steps: Number of steps of the run, or of its last stage.
        wall_s: Wall time in seconds.
        best_checkpoint: Folder of the checkpoint to use.
        stop_reason: Why the run ended.
        run_dir: Folder of the run.
        model: Hugging Face folder of that checkpoint's weights.
        seed: Seed of the run.
        metrics: Latest value of every metric.
        warnings: Warnings of the run.
        stopped_by: The person or program that requested the end.
    """
    return {
        **figures.to_dict(),
        "steps": steps,
        "wall_s": wall_s,
        "best_checkpoint": _text(best_checkpoint),
        "stop_reason": stop_reason,
        "stopped_by": stopped_by,
        "warnings": list(warnings),
        "seed": seed,
        "run_dir": str(run_dir),
        "checkpoint": _text(model),
        "metrics": dict(metrics),
    }


def write_result(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Write `result.json` into the folder of a run, atomically."""
    # Metrics may be NaN or infinite, which JSON lacks.
    text = json.dumps(plain_tree(record), indent=1, ensure_ascii=False) + "\n"
    write_private_text(run_dir / RESULT, text)


def _text(path: Path | str | None) -> str | None:
    return None if path is None else str(path)


@dataclass(frozen=True, repr=False)
class TrainResult:
    """The outcome of `fit` and `train`."""

    metrics: dict[str, float]
    """Latest value of every metric, such as `train:reward` and `val:accuracy`."""
    history: History
    """All metrics, one record per step."""
    checkpoint_path: Path | None
    """The checkpoint to use: the best by `checkpointing.metric_name`, or the newest
    without one; None if checkpoints are disabled."""
    run_dir: Path
    """Folder of the run, with configuration, metrics and checkpoints."""
    steps: int
    """Number of completed steps, including earlier processes of a resumed run."""
    stop_reason: str
    """Why the run ended."""
    wall_s: float = 0.0
    """Wall time of this process's part of the run in seconds."""
    warnings: tuple[str, ...] = ()
    """Warnings of the run, each once, as logged."""
    stopped_by: str | None = None
    """The person or program that requested the end (`control_run`), from where a resume
    continues; None for nobody."""

    def __repr__(self) -> str:
        lines = [f"TrainResult: {self.steps} steps, {self.stop_reason or 'no end'}"]
        for name in self._default_curves():
            values = self.history.column(name)[1]
            change = f"{values[0]:.4g} -> " if len(values) > 1 else ""
            lines.append(f"  {name:<14} {change}{values[-1]:.4g}")
        if (said := self.figures.nothing_learnt) is not None:
            lines.append(f"  {said}")
        lines += [f"  warned: {warning}" for warning in self.warnings]
        lines.append(f"  {'history':<14} {self.history!r}")
        lines.append(f"  {'checkpoint':<14} {self.checkpoint_path or 'none'}")
        return "\n".join(lines)

    @property
    def model_path(self) -> Path | None:
        """Folder that `AutoModelForCausalLM.from_pretrained` loads."""
        if self.checkpoint_path is None:
            return None
        return self.checkpoint_path / "policy" / "weights"

    def plot(
        self, path: str | Path | None = None, *, metrics: Iterable[str] | None = None
    ) -> Path:
        """Draw curves into a picture.

        Args:
            path: The file; its ending gives the format. By default, `curve.png` in the
                run folder.
            metrics: Names, each drawn separately; by default rewards and validation
                metrics, or losses if nothing was rewarded.

        Raises:
            RegistryError: matplotlib is not installed.
            ValueError: The history has none of the metrics.
        """
        target = Path(path) if path is not None else self.run_dir / "curve.png"
        names = None if metrics is None else list(metrics)
        drawn = draw_curves(
            {"": self.history},
            target,
            title=f"{self.run_dir.name}: {self.steps} steps, {self.stop_reason}",
            metrics=names,
            best=self._mark(),
        )
        if drawn is None:
            raise ValueError(
                f"plot: the history has none of {', '.join(names or ['the metrics'])}; "
                f"it has {', '.join(sorted(self.metrics)) or 'none at all'}"
            )
        return drawn

    @property
    def figures(self) -> Figures:
        """The most telling measure at the start, at best and at the end."""
        return Figures.of(self.history)

    def to_dict(self, *, seed: int) -> dict[str, Any]:
        """Return the content of `result.json`."""
        return result_record(
            self.figures,
            steps=self.steps,
            wall_s=self.wall_s,
            best_checkpoint=self.checkpoint_path,
            stop_reason=self.stop_reason,
            run_dir=self.run_dir,
            model=self.model_path,
            seed=seed,
            metrics=self.metrics,
            warnings=self.warnings,
            stopped_by=self.stopped_by,
        )

    def _mark(self) -> Mark | None:
        if self.checkpoint_path is None:
            return None
        return Mark("", int(self.checkpoint_path.name.removeprefix("step_")))

    def _default_curves(self) -> list[str]:
        wanted = ["train:reward", "train:loss", "train:accuracy"]
        wanted += ["val:accuracy", "val:reward", "val:val_loss"]
        present = self.history.names
        return [name for name in wanted if name in present]
