"""`check_metric_sink`: the contract of `MetricSink` as a test."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_distributed.errors import DistributedError
from rl_distributed.metrics.distribution import Histogram
from rl_distributed.metrics.sink import CannotShowError, MetricSink

__all__ = ["SinkContractError", "check_metric_sink"]

Written = Mapping[str, Sequence[tuple[int, float]]]
_TIME_S = 1.7e9


class SinkContractError(DistributedError, AssertionError):
    """A metrics sink breaks its contract; the message lists how."""


class _Report:
    def __init__(self) -> None:
        self.problems: list[str] = []

    def call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except CannotShowError:
            return None
        except Exception as error:
            # Whatever a sink raises is a finding, not an end.
            self.problems.append(f"{what} raised {type(error).__name__}: {error}")
            return None


# Values that a sink must take, by the step that they belong to. Names have slashes, as
# all of ours, and what else people write.
_STEPS: tuple[tuple[int, Mapping[str, float]], ...] = (
    (0, {"train/loss": 2.5, "performance/tokens_per_s": 0.0}),
    (0, {"val/accuracy": 0.25}),
    (1, {"train/loss": -1.0, "timing/a b:c%": 3.0}),
    (1, {}),
    (7, {"train/loss": 1e-12, "train/größe": 1e12}),
    (7, {"odd/nan": math.nan, "odd/inf": math.inf, "odd/minus_inf": -math.inf}),
)
_PARAMS: Mapping[str, Any] = {
    "seed": 1,
    "optimizer": {"lr": 1e-5, "betas": [0.9, 0.999], "name": None},
    "path": Path("some") / "where",
    "text": "häßlich\n\ud800 " + "x" * 2000,
    "empty": {},
    "on": True,
}
_COLUMNS = ("text", "a|b", "mixed")
_ROWS = [["häß|<b>\n\n![x](y)", 1, 0.5], ["", True, "nan"], [None, None, None]]


def check_metric_sink(
    make: Callable[[Path], MetricSink],
    folder: Path,
    *,
    read: Callable[[MetricSink], Written] | None = None,
    figure: Any = None,
) -> None:
    """Check that a sink does what `LoggerFacade` expects of it.

    Args:
        make: Makes a sink that writes below a folder, usually its class.
        folder: An empty folder, which need not exist.
        read: Reads back what a sink wrote, as (step, value) by name, after a flush;
            names may be changed as the service needs it. Only `train/loss`, or the one
            name that ends in `loss`, is compared. None: there is no way.
        figure: A matplotlib figure, for sinks that show them.

    Raises:
        SinkContractError: It does not; the message lists everything found.
    """
    report = _Report()
    sink = report.call("making the sink", make, folder)
    if sink is None:
        raise SinkContractError("; ".join(report.problems))
    if not isinstance(sink, MetricSink):
        report.problems.append(f"{type(sink).__name__} lacks a method of MetricSink")
    else:
        _use(report, sink, figure)
        if read is not None:
            _compare(report, report.call("reading back", read, sink))
        for turn in ("first", "second"):
            report.call(f"the {turn} close", sink.close)
    if report.problems:
        raise SinkContractError(f"{type(sink).__name__}: " + "; ".join(report.problems))


def _use(report: _Report, sink: MetricSink, figure: Any) -> None:
    report.call("log_hyperparams", sink.log_hyperparams, _PARAMS)
    for step, metrics in _STEPS:
        what = f"log_metrics({dict(metrics)}, {step})"
        report.call(what, sink.log_metrics, metrics, step, _TIME_S + step)
    report.call("log_text", sink.log_text, "sample/text", "häß\ud800lich\n", 7)
    report.call("log_text of nothing", sink.log_text, "sample/empty", "", 7)
    log_histogram = getattr(sink, "log_histogram", None)
    if log_histogram is not None:
        histogram = Histogram.of([1.0, 2.0, 2.0, 5.0], num_bins=4)
        report.call(
            "log_histogram", log_histogram, "spread/x", histogram, 7, _TIME_S + 7
        )
    log_table = getattr(sink, "log_table", None)
    if log_table is not None:
        for rows in (_ROWS, []):
            report.call("log_table", log_table, "samples/x", _COLUMNS, rows, 7)
    log_plot = getattr(sink, "log_plot", None)
    if log_plot is not None and figure is not None:
        report.call("log_plot", log_plot, "plots/x", figure, 7)
    for turn in ("first", "second"):
        report.call(f"the {turn} flush", sink.flush)


def _compare(report: _Report, written: Written | None) -> None:
    if written is None:
        return
    expected = [(step, m["train/loss"]) for step, m in _STEPS if "train/loss" in m]
    names = [name for name in written if name.endswith("loss")]
    if len(names) != 1:
        report.problems.append(f"train/loss is not among {sorted(written)}")
        return
    found = [(step, value) for step, value in written[names[0]]]
    # A service may hold only the newest value, and numbers of 32 bits.
    tail = expected[-len(found) :] if found else expected
    same = len(tail) == len(found) and all(
        a[0] == b[0] and math.isclose(a[1], b[1], rel_tol=1e-6)
        for a, b in zip(tail, found, strict=False)
    )
    if not same:
        report.problems.append(f"train/loss: expected {expected}, found {found}")
