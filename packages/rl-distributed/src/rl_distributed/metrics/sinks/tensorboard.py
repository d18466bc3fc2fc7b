"""A sink for TensorBoard, which is imported when the sink is made."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rl_distributed.config import Config
from rl_distributed.metrics.distribution import Histogram
from rl_distributed.metrics.sink import Cell
from rl_distributed.metrics.sinks.engine import import_engine
from rl_distributed.metrics.sinks.plain import flattened, grouped, valid_text

__all__ = ["TensorboardSink", "TensorboardSinkConfig"]


class TensorboardSinkConfig(Config):
    """Where the event files go."""

    subfolder: str = "tensorboard"
    """Folder below the run's folder."""


class TensorboardSink:
    """Writes scalars, texts, histograms and plots as TensorBoard event files.

    Args:
        log_dir: The event files go to a folder below it.
        config: The options; None: the defaults.

    Raises:
        RegistryError: TensorBoard is not installed.
    """

    config_class: ClassVar[type[Config]] = TensorboardSinkConfig

    def __init__(
        self, log_dir: Path, config: TensorboardSinkConfig | None = None
    ) -> None:
        config = config or TensorboardSinkConfig()
        # `torch` alone does not bring TensorBoard.
        engine = import_engine("torch.utils.tensorboard", "tensorboard", "tensorboard")
        self._make = engine.SummaryWriter
        self._folder = str(log_dir / config.subfolder)
        self._writer = self._make(log_dir=self._folder)

    def log_metrics(
        self, metrics: Mapping[str, float], step: int, time_s: float
    ) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(
                grouped(name), value, global_step=step, walltime=time_s
            )

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write a table; TensorBoard's own plug-in wants a final metric with it."""
        rows = [f"| {key} | {value} |" for key, value in flattened(params).items()]
        table = "\n".join(["| key | value |", "| --- | --- |", *rows])
        self._writer.add_text("hyperparams", table, global_step=0)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Write a text summary."""
        self._writer.add_text(name, valid_text(text), global_step=step)

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        step: int,
    ) -> None:
        """Write a text summary with a table."""
        head, *body = ([_escaped(cell) for cell in row] for row in (columns, *rows))
        lines = [head, ["---"] * len(columns), *body]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        self._writer.add_text(name, table, global_step=step)

    def log_histogram(
        self, name: str, histogram: Histogram, step: int, time_s: float
    ) -> None:
        """Write a histogram with the same bins."""
        edges, counts = histogram.edges, histogram.counts
        # The observations are not kept, so their squares are estimated
        # from bin centres.
        middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
        squares = sum(c * m * m for c, m in zip(counts, middles, strict=True))
        self._writer.add_histogram_raw(
            name,
            min=edges[0],
            max=edges[-1],
            num=int(sum(counts)),
            sum=histogram.total,
            sum_squares=squares,
            bucket_limits=list(edges[1:]),
            bucket_counts=list(counts),
            global_step=step,
            walltime=time_s,
        )

    def log_plot(self, name: str, figure: Any, step: int) -> None:
        """Write a picture."""
        self._writer.add_figure(name, figure, global_step=step, close=False)

    def resume_at(self, step: int) -> None:
        """Have TensorBoard hide what older files hold of later steps."""
        self._writer.close()
        # Event files are never rewritten: a marker in a new file hides
        # later steps of old ones.
        self._writer = self._make(log_dir=self._folder, purge_step=step + 1)

    def flush(self) -> None:
        """Flush the event file."""
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _escaped(cell: Cell) -> str:
    """Return a cell as Markdown that shows the text as it is.

    TensorBoard would load pictures and follow links of a text that holds Markdown.
    """
    text = "" if cell is None else str(cell)
    # Of the entities that stand for them, Markdown and HTML see none as their own.
    plain = re.sub(r"[^\w\s]", lambda found: f"&#{ord(found[0])};", text)
    # `_` is a word character, and a line of its own would end the table.
    return "<br>".join(plain.replace("_", "&#95;").splitlines())
