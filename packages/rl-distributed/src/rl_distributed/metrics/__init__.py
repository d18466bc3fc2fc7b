"""Metrics: values that reduce by type, and the sinks they go to."""

from __future__ import annotations

from rl_distributed.metrics.distribution import Distribution, Histogram
from rl_distributed.metrics.logger import LoggerConfig, LoggerFacade
from rl_distributed.metrics.sampler import ResourceSampler
from rl_distributed.metrics.sink import (
    CannotShowError,
    HistogramSink,
    MetricSink,
    PlotSink,
    ResumableSink,
    TableSink,
    sink_registry,
)
from rl_distributed.metrics.values import (
    Last,
    Max,
    Mean,
    Metric,
    MetricError,
    MetricValue,
    Min,
    Sum,
    as_metric,
    reduce_metrics,
    to_floats,
)

__all__ = [
    "Mean",
    "Sum",
    "Min",
    "Max",
    "Last",
    "Distribution",
    "Histogram",
    "Metric",
    "MetricError",
    "MetricValue",
    "as_metric",
    "reduce_metrics",
    "to_floats",
    "LoggerConfig",
    "LoggerFacade",
    "ResourceSampler",
    "CannotShowError",
    "HistogramSink",
    "MetricSink",
    "PlotSink",
    "ResumableSink",
    "TableSink",
    "sink_registry",
]
