"""Progress display of a run: phase, step, rewards, accuracy, tokens/s, time left.

| where                               | how it is shown                              |
|-------------------------------------|----------------------------------------------|
| a terminal                          | drawn in place                               |
| a notebook that has ipywidgets      | drawn in place, in the output of the cell    |
| anywhere else: a pipe, the log of CI | a line per step, at most one every 10 s     |

Everything goes to standard error, so that other programs can read what a program
prints. Nothing heavy is imported, because the first line comes before anything loads.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from rl_algorithms.trainers.callbacks import Callback
from rl_algorithms.trainers.trainer_interface import RunningTrainer
from rl_distributed.logs.terminal_stream import TerminalStream

__all__ = ["ProgressDisplay", "showing"]

_LINE_PERIOD_S = 10.0
_SMOOTHING = 0.9
_STARTING = {
    "data": "loading the data",
    "setup": "starting the workers and loading the model",
    "validation": "validating the model before the first step",
}
"""Descriptions of the phases before the first step."""
_SHOWN = (
    ("train:reward", "{:.2f}"),
    ("train:loss", "{:.3f}"),
    ("val:accuracy", "{:.1%}"),
    ("val:reward", "{:.2f}"),
    ("val:val_loss", "{:.3f}"),
)
_INSTEAD = {"train:loss": "train:reward", "val:reward": "val:accuracy"}
"""Metrics that replace another one, if they exist."""


class _Bars(Progress):
    """The bars of the stages, and below them the latest numbers in full width."""

    numbers = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        """Return the parts to draw."""
        yield self.make_tasks_table(self.tasks)
        if self.numbers:
            yield Text(f"  {self.numbers}", no_wrap=True, overflow="ellipsis")


class ProgressDisplay(Callback):
    """Shows the progress of a run; one display can show several trainings in turn.

    Args:
        console: Console to write to; None for standard error.
        quiet: Whether to show nothing.
        in_place: Whether to draw in place; None for wherever that is possible.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        quiet: bool = False,
        in_place: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = _standard_error() if console is None else console
        self._quiet = quiet or self._console.quiet
        can_draw = _can_draw(self._console) if in_place is None else in_place
        self._in_place = can_draw and not self._quiet
        self._clock = clock
        self._bars = _Bars(
            TextColumn("[bold]{task.fields[title]}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[doing]}"),
            TimeElapsedColumn(),
            console=self._console,
            # Standard output may be a result that goes to a file or a pipe. It is
            # redirected only on a terminal, where it would run across the bars.
            redirect_stdout=_is_terminal(sys.stdout),
        )
        self._bar: TaskID | None = None
        self._title = self._doing = self._count = ""
        self._reset()

    def _reset(self) -> None:
        self._values: dict[str, float] = {}
        self._saved: int | None = None
        self._step = self._total = 0
        self._step_s: float | None = None
        self._began_s = self._step_began_s = self._clock()
        self._last_line_s: float | None = None

    @contextmanager
    def running(self) -> Iterator[ProgressDisplay]:
        """Draw while the block runs; the last state stays on the screen."""
        if not self._in_place:
            yield self
            return
        with self._bars:
            yield self

    @property
    def has_begun(self) -> bool:
        """Whether a training has begun and not ended."""
        return self._bar is not None

    def begin(self, title: str, doing: str = "starting") -> None:
        """Begin to show a training.

        Args:
            title: Name of the training, such as an algorithm or a stage.
            doing: Description of its first activity.
        """
        self._reset()
        self._title, self._doing, self._count = title, doing, ""
        self._bar = self._bars.add_task(
            title, title=title, count="", doing=doing, total=None
        )
        self._bars.numbers = ""
        self._line(f"{title} | {doing}")

    def on_phase(
        self,
        trainer: RunningTrainer,
        steps_done: int,
        phase: str,
        step: int,
        total: int,
    ) -> None:
        """Show the start of a phase."""
        self._total = total
        words = _STARTING.get(phase) if not steps_done else None
        self._doing = words or phase.replace("_", " ")
        self._draw()
        if words is not None and self.has_begun:
            self._line(f"{self._title} | {words}")

    def on_step_begin(self, trainer: RunningTrainer, step: int) -> None:
        """Start the clock of the step."""
        self._step_began_s = self._clock()

    def on_step_end(
        self, trainer: RunningTrainer, step: int, metrics: Mapping[str, float]
    ) -> None:
        """Show the numbers of a step."""
        now_s = self._clock()
        took_s = now_s - self._step_began_s
        old_s = took_s if self._step_s is None else self._step_s
        # Smoothed, so that one step with a slow answer does not make the time left
        # jump.
        self._step_s = _SMOOTHING * old_s + (1 - _SMOOTHING) * took_s
        self._step, self._total = step, trainer.state.total_steps
        self._values.update(metrics)
        self._draw()
        last_s = self._last_line_s
        if last_s is None or now_s - last_s >= _LINE_PERIOD_S:
            self._last_line_s = now_s
            self._line(self._state())

    def on_validation_end(
        self, trainer: RunningTrainer, step: int, metrics: Mapping[str, float]
    ) -> None:
        """Show the numbers of a validation."""
        self._values.update(metrics)
        self._draw()
        if not step:
            self._line(self._state())

    def on_checkpoint(self, trainer: RunningTrainer, step: int, path: Path) -> None:
        """Show which step was saved."""
        self._saved = step
        self._draw()

    def on_train_end(self, trainer: RunningTrainer, step: int) -> None:
        """Show the end of the training."""
        if self._bar is None:
            return
        self._step, self._total = step, trainer.state.total_steps
        reason = trainer.state.stop_reason
        self._doing = f"done: {reason}" if reason else "done"
        self._step_s = None
        self._draw()
        took_s = self._clock() - self._began_s
        self._line(f"{self._state()} | {self._doing}, {took_s:.0f} s")
        self._bars.stop_task(self._bar)
        self._bar = None

    def numbers(self) -> str:
        """Return the current numbers as one line."""
        values = self._values
        parts = [
            f"{name} {form.format(values[name])}"
            for name, form in _SHOWN
            if name in values and _INSTEAD.get(name) not in values
        ]
        rate = values.get("performance:tokens_per_sec")
        if rate is not None:
            parts.append(f"{rate:,.0f} tok/s")
        if self._saved is not None:
            parts.append(f"saved step {self._saved}")
        if self._step_s is not None and self._total > self._step:
            parts.append(f"{(self._total - self._step) * self._step_s:.0f} s left")
        return " | ".join(parts)

    def _state(self) -> str:
        count = f"{self._step}/{self._total}" if self._total else f"{self._step}"
        return " | ".join(
            part for part in (f"{self._title} {count}", self.numbers()) if part
        )

    def _draw(self) -> None:
        if self._bar is None:
            return
        count = f"{self._step}/{self._total}" if self._total else ""
        self._bars.numbers = self.numbers()
        self._bars.update(
            self._bar,
            completed=self._step,
            total=self._total or None,
            count=count,
            doing=self._doing,
        )

    def _line(self, text: str) -> None:
        """Print a line, or refresh the drawing at once."""
        if self._in_place:
            self._bars.refresh()
        elif not self._quiet:
            self._console.print(Text(text), soft_wrap=True)


@contextmanager
def showing(progress: bool | ProgressDisplay) -> Iterator[ProgressDisplay]:
    """Yield the display for an argument `progress`, and draw it.

    Args:
        progress: True for a display, False for one that shows nothing; a display is
            used as it is and left open.
    """
    if isinstance(progress, ProgressDisplay):
        yield progress
        return
    with ProgressDisplay(quiet=not progress).running() as display:
        yield display


def _standard_error() -> Console:
    # A closed pipe or terminal must not end the training that writes to it.
    stream = TerminalStream(lambda: sys.stderr, ignored=(errno.EIO, errno.EPIPE))
    return Console(file=cast("IO[str]", stream), highlight=False)


def _can_draw(console: Console) -> bool:
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None
    # Not rich's own notion of a terminal, which FORCE_COLOR extends to logs of CI.
    return _is_terminal(console.file) and not console.is_dumb_terminal


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # none, or closed
        return False
