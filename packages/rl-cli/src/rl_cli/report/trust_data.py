"""Data of the view that asks whether a run can be trusted: weights and mismatch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_algorithms.trainers.run.weight_log import WEIGHT_VERSIONS
from rl_cli.report.metric_table import MetricTable

__all__ = ["confirmed_weights", "mismatch_limit", "sampling_age"]

_NUM_NEWEST = 8
_SHORT_DIGEST = 12
_NUMBERS = ("version", "step", "processes")


def sampling_age(table: MetricTable) -> dict[str, Any] | None:
    """Return how old the weights were that sampled a step, and how old they may be.

    Args:
        table: Metrics of a stage.

    Returns:
        `found`, the worst step; `limit`; and `by`, the key that sets the limit. With
        `asynchronous.max_staleness`, both count steps from the oldest token of an
        answer to the step that trains on it, otherwise versions between the oldest and
        the newest weights of one step. None if nothing was sampled.
    """
    ages: Mapping[int, float] = table.columns.get(
        "train:asynchronous/staleness_max", {}
    )
    for section in table.config.values():
        limit = _limit(section, "asynchronous")
        if limit is not None and ages:
            found = max(ages.values())
            return {"found": found, "limit": limit, "by": "asynchronous.max_staleness"}
    spread = _version_spread(table)
    if spread is None:
        return None
    limit = _limit(table.config, "rollout")
    key = None if limit is None else "rollout.max_staleness"
    return {"found": spread, "limit": limit or 0, "by": key}


def _limit(values: Any, name: str) -> int | None:
    """Return `max_staleness` of a section; None if there is none."""
    section = values.get(name) if isinstance(values, Mapping) else None
    limit = section.get("max_staleness") if isinstance(section, Mapping) else None
    return limit if type(limit) is int else None


def _version_spread(table: MetricTable) -> float | None:
    """Return the maximum spread of weight versions that sampled a step."""
    newest: Mapping[int, float] = table.columns.get("train:weight_version_max", {})
    oldest: Mapping[int, float] = table.columns.get("train:weight_version_min", {})
    both = newest.keys() & oldest.keys()
    return max((newest[step] - oldest[step] for step in both), default=None)


def mismatch_limit(config: Mapping[str, Any]) -> float | None:
    """Return `mismatch.limit` if it applies to the 99th percentile."""
    section = config.get("mismatch")
    if not isinstance(section, Mapping) or section.get("statistic") != "p99":
        return None
    limit = section.get("limit")
    return float(limit) if isinstance(limit, int | float) else None


def confirmed_weights(folder: Path) -> dict[str, Any] | None:
    """Return the newest transfers of weights in a stage, and the number of all.

    Args:
        folder: Folder of the stage.

    Returns:
        `count`, and `newest` with [version, step, start of the digest, processes] of
        the last ones, the newest first. None if no transfer was recorded.
    """
    try:
        lines = (folder / WEIGHT_VERSIONS).read_bytes().splitlines(keepends=True)
    except OSError:
        return None
    # The last line may still be being written.
    lines = [line for line in lines if line.endswith(b"\n")]
    newest = [row for line in lines[: -_NUM_NEWEST - 1 : -1] if (row := _row(line))]
    return {"count": len(lines), "newest": newest} if newest else None


def _row(line: bytes) -> list[Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, Mapping):
        return None
    version, step, processes = (record.get(name) for name in _NUMBERS)
    digest = record.get("digest")
    are_numbers = all(type(number) is int for number in (version, step, processes))
    if not are_numbers or not isinstance(digest, str):
        return None
    return [version, step, digest[:_SHORT_DIGEST], processes]
