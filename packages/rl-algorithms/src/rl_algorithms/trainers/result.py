"""What a run gives back, and the history of its metrics."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_distributed.errors import RegistryError
from rl_distributed.metrics.sinks.jsonl import read_metrics

__all__ = ["History", "TrainResult"]

# Curves with so many points are drawn thin, with their mean on top.
_SMOOTH_FROM = 40
_COLOUR = "#1f5fa8"
# Names in code and config are `train:loss`; sinks group by slashes: `train/loss`.
_PREFIXES = {
    "train": "train",
    "val": "validation",
    "performance": "performance",
    "timing": "timing/train",
}


def sink_name(name: str) -> str:
    """Return the name under which the sinks have a metric."""
    prefix, _, rest = name.partition(":")
    return f"{_PREFIXES[prefix]}/{rest}"


def metric_name(sink: str) -> str | None:
    """Return the name of a metric of the sinks, or None for one of another kind."""
    for prefix, path in _PREFIXES.items():
        if sink.startswith(f"{path}/"):
            return f"{prefix}:{sink[len(path) + 1 :]}"
    return None


class History(list[dict[str, float]]):
    """One record per step: `{"step": 3, "train:loss": 0.5, "val:accuracy": 0.7, ...}`.

    It is a plain list; `to_pandas` makes a data frame of it.
    """

    def __repr__(self) -> str:
        names = {name for record in self for name in record if name != "step"}
        return f"History({len(self)} records, {len(names)} metrics)"

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Put metrics into the record of a step, which is made if need be."""
        if not self or self[-1]["step"] != step:
            self.append({"step": step})
        self[-1].update(metrics)

    def at(self, step: int) -> dict[str, float]:
        """Return the metrics of a step; {} where it has none."""
        for record in reversed(self):
            if record["step"] <= step:
                found = record if record["step"] == step else {}
                return {name: v for name, v in found.items() if name != "step"}
        return {}

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a metric, and its values."""
        found = [record for record in self if name in record]
        return [int(r["step"]) for r in found], [r[name] for r in found]

    def to_pandas(self) -> Any:
        """Return a pandas data frame: a row per step (its index), a column per metric.

        What a step did not measure is NaN.

        Raises:
            RegistryError: pandas is not installed.
        """
        pandas = _optional("pandas")
        if not self:
            return pandas.DataFrame(index=pandas.Index([], name="step"))
        return pandas.DataFrame(list(self)).set_index("step")

    @property
    def frame(self) -> Any:
        """The same as `to_pandas()`."""
        return self.to_pandas()

    @classmethod
    def read(cls, path: Path, *, up_to: int) -> History:
        """Read the file of the JSONL sink up to a step; a step done again counts last.

        Args:
            path: The file; a missing one gives an empty history.
            up_to: The last step to take.
        """
        history = cls()
        if not path.is_file():
            return history
        records: dict[int, dict[str, float]] = {}
        for step, metrics in read_metrics(path):
            named = {n: v for key, v in metrics.items() if (n := metric_name(key))}
            # Samples of the machine's load are metrics too, but none of the training.
            if named and step <= up_to:
                records.setdefault(step, {"step": step}).update(named)
        history.extend(records[step] for step in sorted(records))
        return history


@dataclass(frozen=True, repr=False)
class TrainResult:
    """The outcome of `fit` and `train`."""

    metrics: dict[str, float]
    """Newest value of every metric, such as `train:reward` and `val:accuracy`."""
    history: History
    """All metrics, one record per step."""
    checkpoint_path: Path | None
    """The checkpoint to use: the best by `checkpointing.metric_name`, else the newest;
    None when checkpoints are off."""
    run_dir: Path
    """Folder of the run: its configuration, metrics and checkpoints."""
    steps: int
    """Steps done, those of earlier processes of a resumed run included."""
    stop_reason: str
    """Why the run ended."""

    def __repr__(self) -> str:
        lines = [f"TrainResult: {self.steps} steps, {self.stop_reason or 'no end'}"]
        for name in self._default_curves():
            values = self.history.column(name)[1]
            change = f"{values[0]:.4g} -> " if len(values) > 1 else ""
            lines.append(f"  {name:<14} {change}{values[-1]:.4g}")
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
            path: The file; its ending gives the format. Default `curve.png` in the run
                folder.
            metrics: Names; default the reward, the loss and what was validated.

        Raises:
            RegistryError: matplotlib is not installed.
            ValueError: The history has none of the metrics.
        """
        target = Path(path) if path is not None else self.run_dir / "curve.png"
        names = list(metrics) if metrics is not None else self._default_curves()
        curves = {name: self.history.column(name) for name in names}
        curves = {name: curve for name, curve in curves.items() if curve[0]}
        if not curves:
            raise ValueError(
                f"plot: the history has none of {', '.join(names) or 'the metrics'}; "
                f"it has {', '.join(sorted(self.metrics)) or 'none at all'}"
            )
        _draw(curves, target)
        return target

    def _default_curves(self) -> list[str]:
        wanted = ["train:reward", "train:loss", "train:accuracy"]
        wanted += ["val:accuracy", "val:reward", "val:val_loss"]
        present = {name for record in self.history for name in record}
        return [name for name in wanted if name in present]


def _draw(curves: Mapping[str, tuple[list[int], list[float]]], target: Path) -> None:
    # The object interface draws without a display and leaves no global state behind.
    figure_module = _optional("matplotlib.figure")
    figure = figure_module.Figure(
        figsize=(7.0, 2.2 * len(curves) + 0.4), layout="tight"
    )
    axes = figure.subplots(len(curves), 1, squeeze=False, sharex=True)[:, 0]
    for ax, (name, (steps, values)) in zip(axes, curves.items(), strict=True):
        many = len(steps) >= _SMOOTH_FROM
        ax.plot(
            steps,
            values,
            color=_COLOUR,
            alpha=0.35 if many else 1.0,
            marker="" if many else "o",
            markersize=3,
        )
        if many:
            ax.plot(steps, _smooth(values), color=_COLOUR, linewidth=2)
        ax.set_title(name, loc="left", fontsize="medium")
        ax.grid(alpha=0.3)
        ax.margins(x=0.01)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)


def _smooth(values: list[float]) -> list[float]:
    """Return the mean over a window of a twentieth of the curve around each point."""
    half = max(len(values) // 40, 1)
    windows = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _optional(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise RegistryError(
            f"{name} is not installed; `pip install 'rl-algorithms[plot]'`"
        ) from None
