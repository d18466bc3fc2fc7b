"""A sink for MLflow, which is imported when the sink is made."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from rl_distributed.config import Config
from rl_distributed.metrics.distribution import Histogram
from rl_distributed.metrics.sink import Cell
from rl_distributed.metrics.sinks.engine import import_engine
from rl_distributed.metrics.sinks.plain import (
    flattened,
    grouped,
    plain_tree,
    valid_text,
)
from rl_distributed.private_files import create_private_folder

__all__ = ["MlflowSink", "MlflowSinkConfig"]

_ID_FILE = "mlflow_run_id.txt"
# Limits of the service's REST interface.
_BATCH = 100
_LONGEST_VALUE = 500
# Names the artifacts that MLflow shows as tables; a tag may not be longer than 5,000
# characters.
_TABLES_TAG = "mlflow.loggedArtifacts"
_MOST_TABLES_SHOWN = 20


class MlflowSinkConfig(Config):
    """Which run the metrics go to."""

    tracking_uri: str | None = None
    """Address of the tracking server or store; None: the variable
    `MLFLOW_TRACKING_URI`, else the folder `mlruns` below the run's folder."""
    experiment_name: str = "runs"
    """Experiment of the run; made if need be."""
    run_name: str | None = None
    """Name that the run is shown by; None: one that MLflow makes up."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the run."""
    request_deadline_s: float = Field(default=10.0, gt=0)
    """Longest wait, in seconds, for an answer of a server; each request is tried
    twice. Variables of MLflow that are set already win."""


class MlflowSink:
    """Logs to one run; a run that is resumed in the same folder goes on there.

    MLflow cannot drop values. Where a killed run did steps that come again, the first
    value of each stays and the later one is left out.

    Args:
        log_dir: The local store, and the file that names the run, are below it.
        config: The options; None: the defaults.

    Raises:
        RegistryError: MLflow is not installed.
    """

    config_class: ClassVar[type[Config]] = MlflowSinkConfig

    def __init__(self, log_dir: Path, config: MlflowSinkConfig | None = None) -> None:
        config = config or MlflowSinkConfig()
        self._engine = import_engine("mlflow", "mlflow", "mlflow-skinny")
        create_private_folder(log_dir)
        _limit_requests(config.request_deadline_s)
        uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            uri = (log_dir / "mlruns").resolve().as_uri()
        if uri.startswith("file:"):
            # A folder is the one store that needs no database package.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = self._engine.MlflowClient(tracking_uri=uri)
        self.run_id = self._find_or_create_run(log_dir / _ID_FILE, config)
        self._done: dict[str, int] = {}

    def _find_or_create_run(self, path: Path, config: MlflowSinkConfig) -> str:
        running = self._engine.entities.RunStatus.to_string(1)
        if path.is_file() and (known := path.read_text(encoding="ascii").strip()):
            # A closed run counts as finished until it is reopened.
            self._client.update_run(known, status=running)
            return known
        experiment = self._client.get_experiment_by_name(config.experiment_name)
        experiment_id = (
            self._client.create_experiment(config.experiment_name)
            if experiment is None
            else experiment.experiment_id
        )
        run = self._client.create_run(
            experiment_id, run_name=config.run_name, tags=dict(config.tags)
        )
        # So that a resumed run continues here.
        path.write_text(f"{run.info.run_id}\n", encoding="ascii")
        return str(run.info.run_id)

    def log_metrics(
        self, metrics: Mapping[str, float], step: int, time_s: float
    ) -> None:
        """Write a batch."""
        make = self._engine.entities.Metric
        entities = [
            make(name, value, int(time_s * 1000), step)
            for name, value in (
                (_valid_name(grouped(n)), v) for n, v in metrics.items()
            )
            if step > self._done.get(name, -1)
        ]
        for batch in _batches(entities):
            self._client.log_batch(self.run_id, metrics=batch)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write parameters with dotted names, and the tree as an artifact."""
        make = self._engine.entities.Param
        present = self._client.get_run(self.run_id).data.params
        # A parameter cannot be changed: a resumed run keeps its first ones.
        entities = [
            make(_valid_name(name), value[:_LONGEST_VALUE])
            for name, value in flattened(params).items()
            if _valid_name(name) not in present
        ]
        for batch in _batches(entities):
            self._client.log_batch(self.run_id, params=batch)
        # Also as a tree, because parameters are truncated and have dotted names.
        self._client.log_dict(self.run_id, plain_tree(params), "hyperparams.yaml")

    def log_text(self, name: str, text: str, step: int) -> None:
        """Write a text artifact."""
        path = _artifact("texts", name, step, "txt")
        self._client.log_text(self.run_id, valid_text(text), path)

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        step: int,
    ) -> None:
        """Write an artifact of the form that `mlflow.load_table` reads."""
        # MLflow's own `log_table` needs pandas, and rewrites the whole table with each
        # step that is added to it.
        path = _artifact("tables", name, step, "json")
        shown = {"columns": list(columns), "data": [list(row) for row in rows]}
        self._client.log_dict(self.run_id, shown, path)
        tags = self._client.get_run(self.run_id).data.tags
        tables = json.loads(tags.get(_TABLES_TAG, "[]"))
        entry = {"path": path, "type": "table"}
        tables = [known for known in tables if known != entry] + [entry]
        newest = json.dumps(tables[-_MOST_TABLES_SHOWN:])
        self._client.set_tag(self.run_id, _TABLES_TAG, newest)

    def log_histogram(
        self, name: str, histogram: Histogram, step: int, time_s: float
    ) -> None:
        """Write edges and counts as an artifact."""
        shown = {"edges": list(histogram.edges), "counts": list(histogram.counts)}
        path = _artifact("histograms", name, step, "json")
        self._client.log_dict(self.run_id, shown, path)

    def log_plot(self, name: str, figure: Any, step: int) -> None:
        """Write a picture as an artifact."""
        path = _artifact("plots", name, step, "png")
        self._client.log_figure(self.run_id, figure, path)

    def resume_at(self, step: int) -> None:
        """Ask what the run holds of later steps; that is not written again."""
        for name in self._client.get_run(self.run_id).data.metrics:
            history = self._client.get_metric_history(self.run_id, name)
            self._done[name] = max(entry.step for entry in history)

    def flush(self) -> None:
        """Do nothing; every call has been answered."""

    def close(self) -> None:
        """Mark the run as finished."""
        if self._client is not None:
            client, self._client = self._client, None
            client.set_terminated(self.run_id)


def _limit_requests(deadline_s: float) -> None:
    """Bound MLflow's own waiting, which is 2 minutes seven times over."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(max(1, round(deadline_s))))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")


def _valid_name(name: str) -> str:
    """Return a name that MLflow takes: word characters, `-`, `.`, space, `:`, `/`."""
    kept = "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)
    # MLflow uses names as paths, and refuses those that normalising would change.
    parts = [part.strip() for part in kept.split("/")]
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


def _artifact(kind: str, name: str, step: int, suffix: str) -> str:
    file = _valid_name(name).replace(":", "_").replace(" ", "_")
    return f"{kind}/{file}/{step:09d}.{suffix}"


def _batches(entities: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(entities), _BATCH):
        yield entities[start : start + _BATCH]
