"""A sink that answers Prometheus, whose client is imported when the sink is made."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from rl_distributed.config import Config
from rl_distributed.metrics.distribution import Histogram
from rl_distributed.metrics.sink import CannotShowError
from rl_distributed.metrics.sinks.engine import import_engine
from rl_distributed.metrics.sinks.plain import valid_text
from rl_distributed.security.tls_files import TlsFiles

__all__ = ["PrometheusSink", "PrometheusSinkConfig", "prometheus_name"]


class PrometheusSinkConfig(Config):
    """Where the metrics can be asked for."""

    address: str = "127.0.0.1"
    """Address to listen on. Another one lets anybody who reaches it read the metrics,
    unless `keys_file` names keys."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0: a free one, which the log names."""
    keys_file: str | None = None
    """File of `rl keys create`: whoever reads needs a key of the role `viewer`, sent
    as `Authorization: Bearer KEY`; null: none is needed."""
    tls: bool | TlsFiles = False
    """Encrypt: true, with certificates that are made for this user's listeners on this
    machine, or the three files to use."""
    namespace: str = Field(default="run", pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$")
    """What every name begins with: `train/loss` is `run_train_loss`."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of every value, such as the name of the run."""

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, labels: dict[str, str]) -> dict[str, str]:
        wrong = [n for n in labels if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", n)]
        if wrong or "metric" in labels:
            raise ValueError(
                f"must have names of letters, digits and _, and not 'metric': got "
                f"{wrong or 'metric'}"
            )
        return labels


class PrometheusSink:
    """Serves the newest value of every metric at `http://ADDRESS:PORT/metrics`.

    Each value has the label `metric` with its full name, so that two names that
    Prometheus cannot tell apart stay two values. `run_step` is the newest step.

    Args:
        log_dir: Unused; every sink is given it.
        config: The options; None: the defaults.

    Raises:
        RegistryError: The client or aiohttp is not installed.
        ConfigError: The port is not free, or the address is not this machine's.
        SecurityError: The keys or the certificate cannot be used.
    """

    config_class: ClassVar[type[Config]] = PrometheusSinkConfig

    def __init__(
        self, log_dir: Path, config: PrometheusSinkConfig | None = None
    ) -> None:
        config = config or PrometheusSinkConfig()
        engine = import_engine("prometheus_client", "prometheus", "prometheus-client")
        self._families = import_engine(
            "prometheus_client.metrics_core", "prometheus", "prometheus-client"
        )
        self._config = config
        # The server answers in its own threads while the run keeps logging.
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}
        self._step = 0
        # Its own registry: the values of one run, and none of the process's.
        registry = engine.CollectorRegistry()
        registry.register(self)
        import_engine("aiohttp", "prometheus", "aiohttp")
        # It needs aiohttp, which only this sink brings.
        from rl_distributed.metrics.sinks.scraped import MetricsServer  # noqa: PLC0415

        exposition = import_engine(
            "prometheus_client.exposition", "prometheus", "prometheus-client"
        )

        def answer(accepts: str) -> tuple[str, bytes]:
            encode, content_type = exposition.choose_encoder(accepts)
            return content_type, encode(registry)

        self._server = MetricsServer(
            config.address, config.port, answer, config.keys_file, config.tls
        )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.port

    @property
    def url(self) -> str:
        """The address for Prometheus to scrape."""
        return f"{self._server.url}/metrics"

    def log_metrics(
        self, metrics: Mapping[str, float], step: int, time_s: float
    ) -> None:
        """Replace the values that it answers with."""
        with self._lock:
            self._values.update(metrics)
            self._step = step

    def log_histogram(
        self, name: str, histogram: Histogram, step: int, time_s: float
    ) -> None:
        """Replace the histogram that it answers with."""
        with self._lock:
            self._histograms[name] = histogram

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Refuse: Prometheus holds numbers."""
        raise CannotShowError("Prometheus holds numbers")

    def log_text(self, name: str, text: str, step: int) -> None:
        """Refuse: Prometheus holds numbers."""
        raise CannotShowError("Prometheus holds numbers")

    def collect(self) -> Iterator[Any]:
        """Make the answer; the client calls this in a thread of its server."""
        with self._lock:
            # Copied under the lock, so that a slow reader does not block the run.
            values, histograms = dict(self._values), dict(self._histograms)
            step = self._step
        names = ["metric", *self._config.labels]
        labels = [valid_text(text) for text in self._config.labels.values()]
        families: dict[str, Any] = {}
        for name, value in values.items():
            full = self._name(name)
            if full not in families:
                families[full] = self._families.GaugeMetricFamily(
                    full, valid_text(name), labels=names
                )
            families[full].add_metric([valid_text(name), *labels], value)
        for name, histogram in histograms.items():
            full = f"{self._name(name)}_distribution"
            if full not in families:
                # Of one step alone: its counts fall again.
                families[full] = self._families.GaugeHistogramMetricFamily(
                    full, valid_text(name), labels=names
                )
            families[full].add_metric(
                [valid_text(name), *labels], _buckets(histogram), histogram.total
            )
        yield from families.values()
        family = self._families.GaugeMetricFamily(
            prometheus_name(self._config.namespace), "newest step", labels=names[1:]
        )
        family.add_metric(labels, step)
        yield family

    def describe(self) -> list[Any]:
        """Name nothing in advance: what there is depends on what is logged."""
        return []

    def _name(self, name: str) -> str:
        return prometheus_name(self._config.namespace, name)

    def flush(self) -> None:
        """Do nothing; the next question is answered with the newest values."""

    def close(self) -> None:
        """Stop answering and give back the port."""
        self._server.close()


def prometheus_name(namespace: str, name: str | None = None) -> str:
    """Return the name by which Prometheus knows a metric.

    Args:
        namespace: `PrometheusSinkConfig.namespace`.
        name: Name of the metric as it is logged; None: the newest step.
    """
    if name is None:
        return f"{namespace}_step"
    plain = re.sub(r"[^a-zA-Z0-9_]+", "_", name).strip("_") or "unnamed"
    # The bare name of the step is taken.
    plain = "step_metric" if plain == "step" else plain
    return f"{namespace}_{plain}"


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return (upper border, how many are below it) as Prometheus wants them."""
    total, buckets = 0.0, []
    for edge, count in zip(histogram.edges[1:], histogram.counts, strict=True):
        total += count
        buckets.append((repr(edge), total))
    return [*buckets, ("+Inf", total)]
