"""A sink for Weights & Biases, which is imported when the sink is made.

Nothing is sent but what is logged: no source code, no diffs, no console output, no
list of packages or measurements of the machine.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from rl_distributed.config import Config
from rl_distributed.errors import ConfigError
from rl_distributed.metrics.distribution import Histogram
from rl_distributed.metrics.sink import Cell
from rl_distributed.metrics.sinks.engine import import_engine
from rl_distributed.metrics.sinks.plain import grouped, plain_tree, valid_text
from rl_distributed.private_files import create_private_folder

__all__ = ["WandbSink", "WandbSinkConfig"]

_ID_FILE = "wandb_run_id.txt"


class WandbSinkConfig(Config):
    """Which run the metrics go to."""

    project: str = "runs"
    """Project of the run."""
    entity: str | None = None
    """User or team; None: the account's default."""
    name: str | None = None
    """Name that the run is shown by; None: one that the service makes up."""
    group: str | None = None
    """Runs of one group are shown together."""
    tags: list[str] = Field(default_factory=list)
    """Words to find the run by."""
    notes: str | None = None
    """A longer description."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes a folder that `wandb sync` sends later."""
    start_deadline_s: float = Field(default=90.0, gt=0)
    """Longest wait, in seconds, for the service to answer at the start, and for a key
    to be typed where none is configured."""
    end_deadline_s: float = Field(default=300.0, gt=0)
    """Longest wait, in seconds, for the last data to be sent."""


class WandbSink:
    """Logs to one run; a run that is resumed in the same folder goes on there.

    Where a killed run did steps that come again, W&B keeps the first value of each.

    Args:
        log_dir: The run's files go to its folder `wandb`.
        config: The options; None: the defaults.

    Raises:
        RegistryError: wandb is not installed.
        ConfigError: No key is configured, or it is refused.
    """

    config_class: ClassVar[type[Config]] = WandbSinkConfig

    def __init__(self, log_dir: Path, config: WandbSinkConfig | None = None) -> None:
        config = config or WandbSinkConfig()
        self._wandb = import_engine("wandb", "wandb", "wandb")
        create_private_folder(log_dir)
        errors = self._wandb.errors
        try:
            self._run = self._start(log_dir, config)
        except (errors.UsageError, errors.AuthenticationError) as error:
            raise ConfigError(
                f"logger.sink_settings.wandb: {error}; set WANDB_API_KEY, or mode: "
                "offline"
            ) from error

    def _start(self, log_dir: Path, config: WandbSinkConfig) -> Any:
        return self._wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name,
            group=config.group,
            tags=config.tags,
            notes=config.notes,
            mode=config.mode,
            dir=str(log_dir),
            id=_run_id(log_dir),
            # Offline, there is no service that could know the run.
            resume="allow" if config.mode == "online" else None,
            # The program may have another run of W&B open.
            reinit="create_new",
            settings=self._settings(config),
        )

    def _settings(self, config: WandbSinkConfig) -> Any:
        wanted = {
            "silent": True,
            "console": "off",
            "disable_git": True,
            "save_code": False,
            "disable_code": True,
            "disable_job_creation": True,
            "x_disable_meta": True,
            "x_disable_stats": True,
            "x_disable_machine_info": True,
            "x_save_requirements": False,
            "init_timeout": config.start_deadline_s,
            "login_timeout": config.start_deadline_s,
            "finish_timeout": config.end_deadline_s,
        }
        # Older releases lack some of them.
        known = self._wandb.Settings.model_fields
        return self._wandb.Settings(**{k: v for k, v in wanted.items() if k in known})

    @property
    def folder(self) -> Path:
        """The folder of the run, which `wandb sync` takes."""
        return Path(self._run.dir).parent

    def log_metrics(
        self, metrics: Mapping[str, float], step: int, time_s: float
    ) -> None:
        """Add to the row of the step."""
        self._run.log({grouped(name): v for name, v in metrics.items()}, step=step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Set the run's configuration."""
        self._run.config.update(plain_tree(params), allow_val_change=True)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Add a text to the row of the step."""
        self._run.log({name: valid_text(text)}, step=step)

    def log_histogram(
        self, name: str, histogram: Histogram, step: int, time_s: float
    ) -> None:
        """Add a histogram to the row of the step."""
        pair = (list(histogram.counts), list(histogram.edges))
        self._run.log({name: self._wandb.Histogram(np_histogram=pair)}, step=step)

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        step: int,
    ) -> None:
        """Add a table to the row of the step."""
        data = [list(row) for row in rows]
        table = self._wandb.Table(
            # A column may hold numbers and, where one is not finite, a text.
            columns=list(columns),
            data=data,
            allow_mixed_types=True,
        )
        self._run.log({name: table}, step=step)

    def log_plot(self, name: str, figure: Any, step: int) -> None:
        """Add a picture to the row of the step."""
        # Drawn here: wandb itself wants the figure to be one of pyplot's.
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
        picture = import_engine("PIL.Image", "wandb", "pillow").open(drawn)
        self._run.log({name: self._wandb.Image(picture)}, step=step)

    def flush(self) -> None:
        """Do nothing; a process of wandb writes all the time."""

    def close(self) -> None:
        """End the run, once what was logged has been written or sent."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()


def _run_id(log_dir: Path) -> str:
    """Return the identity of the run in a folder, which is made up the first time."""
    path = log_dir / _ID_FILE
    if path.is_file() and (known := path.read_text(encoding="ascii").strip()):
        return known
    made = secrets.token_hex(4)
    path.write_text(f"{made}\n", encoding="ascii")
    return made
