"""Learning curves as a picture: rewards and accuracy, or losses, over the steps."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.run.figures import Figures
from rl_algorithms.trainers.run.history import History, optional_module

__all__ = ["Mark", "draw_curves"]

# From this number of points on, single steps are drawn thin below a moving average.
_SMOOTH_FROM = 40
_WIDTH_IN, _HEIGHT_IN, _DPI = 8.0, 3.4, 130
_COLOURS = {"train": "tab:orange", "val": "tab:blue", "performance": "tab:green"}
_LABELS = {
    "reward": "reward (mean per answer)",
    "accuracy": "accuracy (share of answers)",
    "val_loss": "loss (nats per token)",
    "loss": "loss (mean of the batch)",
    "grad_norm": "gradient norm",
}
_ENDINGS = (
    ("tokens_per_sec", "tokens per second"),
    ("samples_per_sec", "samples per second"),
    ("_utilization", "share of the peak rate"),
    ("length", "tokens"),
    ("lengths", "tokens"),
    ("_rate", "share"),
)


@dataclass(frozen=True)
class Mark:
    """Position of the best checkpoint of a run."""

    stage: str
    """Name of the stage."""
    step: int
    """Step within the stage."""


def draw_curves(
    stages: Mapping[str, History],
    path: Path,
    *,
    title: str,
    metrics: Iterable[str] | None = None,
    best: Mark | None = None,
) -> Path | None:
    """Draw curves into a picture, with the stages one after another.

    Args:
        stages: Histories by the name of their stage.
        path: The file; its ending gives the format.
        title: Title of the picture.
        metrics: Names, each drawn separately; None for rewards and validation metrics,
            or for losses if nothing was rewarded.
        best: Checkpoint to mark.

    Returns:
        The path, or None if no history has any of the metrics.

    Raises:
        RegistryError: matplotlib is not installed.
    """
    panels = _panels(stages, metrics)
    if not panels:
        return None
    # Not pyplot, which needs a display and keeps global state.
    figure = optional_module("matplotlib.figure").Figure(
        figsize=(_WIDTH_IN, _HEIGHT_IN * len(panels) + 0.6), layout="constrained"
    )
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for ax, panel in zip(axes, panels, strict=True):
        _draw_panel(ax, panel, stages, best)
    _name_stages(axes, stages)
    axes[-1].set_xlabel("training step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    learnt = Figures.of(list(stages.values())[-1])
    said = "" if learnt.nothing_learnt is None else f"\n{learnt.nothing_learnt}"
    figure.suptitle(textwrap.fill(title, 90) + said, x=0.01, ha="left", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    return path


def _panels(
    stages: Mapping[str, History], metrics: Iterable[str] | None
) -> list[list[str]]:
    """Return the names to draw, grouped by common scale."""
    present = {name for history in stages.values() for name in history.names}
    if metrics is not None:
        return [[name] for name in metrics if name in present]
    rewards: list[str] = [n for n in ("train:reward", "val:reward") if n in present]
    shares: list[str] = [n for n in ("train:accuracy", "val:accuracy") if n in present]
    for share in list(shares):
        # With rewards of 0 and 1 both curves are the same: draw one.
        reward = share.replace("accuracy", "reward")
        if _shows(stages, share, reward):
            rewards = [name for name in rewards if name != reward]
        elif _shows(stages, reward, share):
            shares.remove(share)
    losses: list[str] = [n for n in ("train:loss", "val:val_loss") if n in present]
    if not (rewards or shares):
        return [losses] if losses else []
    if rewards and shares and _within_unit(stages, [*rewards, *shares]):
        return [[*rewards, *shares]]
    return [panel for panel in (rewards, shares) if panel]


def _shows(stages: Mapping[str, History], one: str, other: str) -> bool:
    """Return whether one curve contains all points of another."""
    return all(
        set(zip(*history.column(other), strict=True))
        <= set(zip(*history.column(one), strict=True))
        for history in stages.values()
    )


def _within_unit(stages: Mapping[str, History], names: Sequence[str]) -> bool:
    values = [v for h in stages.values() for name in names for v in h.column(name)[1]]
    return all(0 <= value <= 1 for value in values)


def _draw_panel(
    ax: Any, names: Sequence[str], stages: Mapping[str, History], best: Mark | None
) -> None:
    for name in names:
        _draw_curve(ax, name, stages)
    if best is not None and best.stage in stages:
        _draw_mark(ax, names[-1], stages, best)
    ax.set_ylabel(_axis_label(names))
    if all(_kind(n) in ("reward", "accuracy") for n in names) and _within_unit(
        stages, names
    ):
        ax.set_ylim(-0.02, 1.02)
    ax.grid(alpha=0.3)
    ax.margins(x=0.02)
    ax.legend(loc="best", fontsize=8)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _draw_curve(ax: Any, name: str, stages: Mapping[str, History]) -> None:
    prefix = name.partition(":")[0]
    colour = "tab:green" if name == "val:accuracy" else _COLOURS.get(prefix, "tab:gray")
    label: str | None = name  # labelled once, however many stages have it
    offset = 0
    for history in stages.values():
        steps, values = history.column(name)
        places = [offset + step for step in steps]
        offset += _length(history)
        if not places:
            continue
        thin = prefix != "val" and len(places) >= _SMOOTH_FROM
        style = {"color": colour, "linewidth": 1.0 if prefix != "val" else 2.0}
        if thin:
            ax.plot(places, values, alpha=0.35, **style)
            values, style["linewidth"] = _smooth(values), 2.0
        marker = "" if thin else "o"
        ax.plot(places, values, label=label, marker=marker, markersize=3, **style)
        label = None


def _draw_mark(ax: Any, name: str, stages: Mapping[str, History], best: Mark) -> None:
    """Mark the best checkpoint with a line, and a star if the curve has a value."""
    offset = 0
    for stage, history in stages.items():
        if stage == best.stage:
            place = offset + best.step
            label = f"best checkpoint (step {best.step})"
            value = history.at(best.step).get(name)
            ax.axvline(place, color="0.4", linestyle=":", linewidth=1.2,
                       label=label if value is None else None)  # fmt: skip
            if value is not None:
                ax.plot([place], [value], "*", color="tab:red", markersize=12,
                        linestyle="none", label=label, zorder=5)  # fmt: skip
        offset += _length(history)


def _name_stages(axes: Sequence[Any], stages: Mapping[str, History]) -> None:
    if len(stages) < 2:
        return
    offset = 0
    for index, (stage, history) in enumerate(stages.items()):
        end = offset + _length(history)
        for ax in axes:
            ax.axvspan(
                offset, end, alpha=0.09 if index == 0 else 0.04, color="gray", lw=0
            )
        axes[0].annotate(
            stage,
            ((offset + end) / 2, 1.02),
            ha="center",
            xycoords=("data", "axes fraction"),
            fontsize=9,
        )
        offset = end


def _length(history: History) -> int:
    return int(history[-1]["step"]) if history else 0


def _kind(name: str) -> str:
    return name.rpartition(":")[2].rpartition("/")[2]


def _axis_label(names: Sequence[str]) -> str:
    """Return the quantity with its unit."""
    if len({_kind(name) for name in names}) > 1:
        if all(_kind(name) in ("reward", "accuracy") for name in names):
            return "reward, accuracy (mean per answer)"
        return "loss (mean, nats)"
    (name, *_) = names
    if name.startswith("timing:"):
        return f"{name.removeprefix('timing:')} (s)"
    kind = _kind(name)
    if kind in _LABELS:
        return _LABELS[kind]
    unit = next((unit for ending, unit in _ENDINGS if kind.endswith(ending)), None)
    return kind if unit is None else f"{kind} ({unit})"


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the moving average over a twentieth of the curve."""
    half = max(len(values) // 40, 1)
    windows = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
