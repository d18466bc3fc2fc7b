"""The live display of a run: phase, step, rewards, accuracy, tokens/s, time left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rl_algorithms import BaseTrainer, Callback
from rl_algorithms.trainers.state import TrainerState
from rl_cli.console import Terminal

__all__ = ["RunDisplay"]

PLAIN_PERIOD_S = 5.0
SMOOTHING = 0.9
_INSTEAD = {"train:loss": "train:reward", "val:reward": "val:accuracy"}
"""What is shown instead of a number, where it is there."""


class RunDisplay(Callback):
    """Shows where a run is: drawn in place on a terminal, else a line now and then.

    Args:
        terminal: Where it is shown.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._progress = Progress(
            TextColumn("[bold]{task.fields[stage]:<8}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:>4}/{task.total}"),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            console=terminal.err,
        )
        self._task: Any = None
        self._stage = ""
        self._phase = ""
        self._values: dict[str, float] = {}
        self._step_s: float | None = None
        self._step_began_s = 0.0
        self._last_line_s = 0.0

    @contextmanager
    def running(self) -> Iterator[RunDisplay]:
        """Draw while the block runs; the last state stays on the screen."""
        if self._terminal.plain or self._terminal.quiet:
            yield self
            return
        with self._progress:
            yield self

    def begin_stage(self, name: str, total_steps: int) -> None:
        """A stage of the run begins."""
        self._stage, self._phase = name, "starting"
        self._values, self._step_s = {}, None
        self._task = self._progress.add_task(
            name, stage=name, total=total_steps, shown="starting"
        )
        self._draw(force=True)

    def on_phase(
        self,
        trainer: BaseTrainer[Any],
        state: TrainerState,
        phase: str,
        step: int,
        total: int,
    ) -> None:
        """A phase begins."""
        self._phase = phase.replace("_", " ")
        self._progress.update(self._task, total=total)
        self._draw()

    def on_step_begin(self, trainer: BaseTrainer[Any], state: TrainerState) -> None:
        """Start the clock of the step."""
        self._step_began_s = time.monotonic()

    def on_step_end(
        self,
        trainer: BaseTrainer[Any],
        state: TrainerState,
        metrics: Mapping[str, float],
    ) -> None:
        """Take over the step's numbers."""
        took_s = time.monotonic() - self._step_began_s
        old_s = took_s if self._step_s is None else self._step_s
        self._step_s = SMOOTHING * old_s + (1 - SMOOTHING) * took_s
        self._values.update(metrics)
        self._progress.update(self._task, completed=state.step, total=state.total_steps)
        self._draw(left=state.total_steps - state.step)

    def on_validation_end(
        self,
        trainer: BaseTrainer[Any],
        state: TrainerState,
        metrics: Mapping[str, float],
    ) -> None:
        """Take over the validation's numbers."""
        self._values.update(metrics)
        self._draw(force=True, left=state.total_steps - state.step)

    def on_checkpoint(
        self, trainer: BaseTrainer[Any], state: TrainerState, path: Path
    ) -> None:
        """Say where it is, where nothing is drawn in place."""
        if self._terminal.plain:
            self._terminal.note(f"{self._stage}: checkpoint {path}")

    def end_stage(self, reason: str) -> None:
        """The stage has ended."""
        self._phase = f"done ({reason})"
        self._draw(force=True)

    def shown(self, left: int | None = None) -> str:
        """Return the numbers of the present moment as one line."""
        parts = [self._phase]
        for key, label, form in (
            ("train:reward", "reward", "{:.2f}"),
            ("train:loss", "loss", "{:.3f}"),
            ("val:accuracy", "accuracy", "{:.1%}"),
            ("val:reward", "held-out reward", "{:.2f}"),
            ("performance:tokens_per_sec", "tok/s", "{:,.0f}"),
        ):
            if _INSTEAD.get(key) in self._values:
                continue
            if key in self._values:
                parts.append(f"{label} {form.format(self._values[key])}")
        if left and self._step_s is not None:
            parts.append(f"left {left * self._step_s:.0f} s")
        return " | ".join(parts)

    def _draw(self, *, force: bool = False, left: int | None = None) -> None:
        if self._task is None:
            return
        if left is None:
            task = self._progress.tasks[self._task]
            left = int((task.total or 0) - task.completed)
        line = self.shown(left)
        self._progress.update(self._task, shown=line)
        now_s = time.monotonic()
        if self._terminal.plain and (
            force or now_s - self._last_line_s >= PLAIN_PERIOD_S
        ):
            self._last_line_s = now_s
            task = self._progress.tasks[self._task]
            step = f"{int(task.completed)}/{int(task.total or 0)}"
            self._terminal.note(f"{self._stage} {step} | {line}")
