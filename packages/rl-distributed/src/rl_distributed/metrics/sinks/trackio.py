"""A sink for Trackio, which is imported when the sink is made.

Trackio 0.43 wants an older pillow than the rest of this project is tested with, so no
extra brings it: `pip install trackio`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from rl_distributed.config import Config
from rl_distributed.errors import MissingExtraError
from rl_distributed.metrics.distribution import Histogram
from rl_distributed.metrics.sink import Cell
from rl_distributed.metrics.sinks.plain import grouped, plain_tree, valid_text
from rl_distributed.private_files import create_private_folder

__all__ = ["TrackioSink", "TrackioSinkConfig"]

_NAME_FILE = "trackio_run_name.txt"


class TrackioSinkConfig(Config):
    """Which run the metrics go to."""

    project: str = Field(default="runs", min_length=1)
    """Project of the run."""
    name: str | None = None
    """Name that the run is shown by; None: one that Trackio makes up."""
    group: str | None = None
    """Runs of one group are shown together."""
    space_id: str | None = None
    """Space of Hugging Face to send to, `USER/NAME`; it is public unless `private`.
    None: the variable `TRACKIO_SPACE_ID`, else nothing is sent."""
    private: bool = True
    """Whether a Space that is made is private."""
    server_url: str | None = None
    """Address of a Trackio server of your own to send to; its token belongs in the
    variable `TRACKIO_WRITE_TOKEN`. None: `TRACKIO_SERVER_URL`, else nothing is sent."""


class TrackioSink:
    """Logs to one run; a run that is resumed in the same folder goes on there.

    Trackio keeps its data in the folder that the variable `TRACKIO_DIR` names, by
    default in Hugging Face's cache; `trackio show` shows it. It cannot drop values:
    steps that come again after a crash are there twice.

    Args:
        log_dir: The file that names the run is in it.
        config: The options; None: the defaults.

    Raises:
        MissingExtraError: Trackio is not installed.
    """

    config_class: ClassVar[type[Config]] = TrackioSinkConfig

    def __init__(self, log_dir: Path, config: TrackioSinkConfig | None = None) -> None:
        config = config or TrackioSinkConfig()
        self._trackio = _import_trackio()
        create_private_folder(log_dir)
        path = log_dir / _NAME_FILE
        known = path.read_text(encoding="utf-8").strip() if path.is_file() else None
        # It prints its address, and standard output may be read by a program.
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = self._trackio.init(
                project=config.project,
                name=known or config.name,
                group=config.group,
                space_id=config.space_id,
                server_url=config.server_url,
                private=config.private,
                resume="allow" if known else "never",
                embed=False,
                # Only what is logged; `logger.sample_resources_every_s` measures.
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        # Else Trackio would end the run at the program's next `trackio.init`, and once
        # more when the process ends.
        self._trackio.context_vars.current_run.set(None)
        if known is None:
            # So that a resumed run continues here.
            path.write_text(f"{self._run.name}\n", encoding="utf-8")

    def log_metrics(
        self, metrics: Mapping[str, float], step: int, time_s: float
    ) -> None:
        """Add numbers to the step."""
        self._log({grouped(name): value for name, value in metrics.items()}, step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Set the run's configuration, which goes out with the first values."""
        self._run.config.update(plain_tree(params))

    def log_text(self, name: str, text: str, step: int) -> None:
        """Add a text to the reports of the run."""
        # Its page reads it as Markdown without links, pictures or HTML.
        self._log({name: self._trackio.Markdown(valid_text(text))}, step)

    def log_histogram(
        self, name: str, histogram: Histogram, step: int, time_s: float
    ) -> None:
        """Add a histogram to the step."""
        pair = (list(histogram.counts), list(histogram.edges))
        self._log({name: self._trackio.Histogram(np_histogram=pair)}, step)

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        step: int,
    ) -> None:
        """Add a table to the step."""
        data = [list(row) for row in rows]
        table = self._trackio.Table(columns=list(columns), data=data)
        self._log({name: table}, step)

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._run.log(values, step=step)

    def flush(self) -> None:
        """Do nothing; a thread of Trackio writes all the time."""

    def close(self) -> None:
        """End the run, once what was logged has been written or sent."""
        if self._run is not None:
            run, self._run = self._run, None
            with contextlib.redirect_stdout(io.StringIO()):
                run.finish()


def _import_trackio() -> Any:
    try:
        return importlib.import_module("trackio")
    except ImportError as error:
        raise MissingExtraError(
            "logger.sinks: 'trackio' needs the package trackio, which cannot be "
            f"imported ({error}); pip install trackio"
        ) from error
