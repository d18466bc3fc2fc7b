"""Metrics of two stages, step by step."""

from __future__ import annotations

from collections.abc import Iterator

from rl_algorithms.trainers.run.history import metric_name
from rl_cli.report.metric_table import MetricTable
from rl_cli.run_diff.difference import Difference, Part, Rules, StagePair

__all__ = ["compare_metrics", "is_measured"]

_MEASURED = ("timing:", "performance:")


def is_measured(name: str) -> bool:
    """Return whether a metric measures time or load, which no seed determines.

    These are `timing:...`, `performance:...` and the samples of the machine's load.
    """
    return name.startswith(_MEASURED) or metric_name(name) is None


def compare_metrics(pair: StagePair, rules: Rules, *, ended: bool) -> Part:
    """Compare the metrics of the steps that both stages have.

    Args:
        pair: The stages.
        rules: What counts as a difference.
        ended: Whether both stages have ended. In the last step of one that has not,
            metrics may be missing.

    Returns:
        The metrics that differ in the first step with a difference.
    """
    first, second = (stage.metrics for stage in pair)
    last = min(first.last_step, second.last_step)
    names = list(dict.fromkeys([*_names(first), *_names(second)]))
    left_out = [name for name in names if is_measured(name) or rules.ignores(name)]
    names = [name for name in names if name not in set(left_out)]
    shown = tuple(_groups(left_out))
    if not last or not names:
        lacking = " and ".join(
            side for side, table in zip("AB", (first, second), strict=True)
            if not table.last_step
        )  # fmt: skip
        reason = f"no metrics in {lacking}" if lacking else "all are left out"
        return Part("metrics", pair[0].name, reason=reason, left_out=shown)
    found: list[Difference] = []
    differing: set[str] = set()
    for step in range(last + 1):
        may_lack = step == last and not ended
        here = list(_at_step(first, second, step, names, rules, may_lack))
        differing |= {difference.what for difference in here}
        found = found or here
    return Part(
        "metrics",
        pair[0].name,
        f"{len(names)} metrics of {last} step{'s' * (last > 1)}",
        tuple(found),
        len(differing),
        left_out=shown,
    )


def _at_step(
    first: MetricTable,
    second: MetricTable,
    step: int,
    names: list[str],
    rules: Rules,
    may_lack: bool,
) -> Iterator[Difference]:
    for name in names:
        a, b = first.value(name, step), second.value(name, step)
        lacks = a is None or b is None
        if (lacks and (may_lack or a is b)) or (not lacks and rules.same(a, b)):
            continue
        yield Difference(name, a, b, step)


def _names(table: MetricTable) -> list[str]:
    return [*table.columns, *table.nonfinite]


def _groups(names: list[str]) -> Iterator[str]:
    """Yield the beginnings of the names that were left out, with their numbers."""
    groups: dict[str, int] = {}
    for name in names:
        start = next((part for part in ":/" if part in name), "")
        group = f"{name.partition(start)[0]}{start}*" if start else name
        key = group if is_measured(name) else name
        groups[key] = groups.get(key, 0) + 1
    for group, count in groups.items():
        yield f"{group} ({count})" if count > 1 or group.endswith("*") else group
