"""Checks of a task source: its seeds, splits and rows."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from rl_envs.errors import TaskError
from rl_envs.tasks import Split, Task, TaskSource
from rl_envs.testing.findings import Finding

__all__ = ["examine_tasks"]


def examine_tasks(
    make_source: Callable[[int], TaskSource], num_tasks: int = 32, *, seed: int = 0
) -> list[Finding]:
    """Check that tasks depend on the seed alone, and that splits do not overlap.

    Args:
        make_source: Function that creates the source from a seed.
        num_tasks: Number of tasks per split.
        seed: The seed; `seed + 1` must give other tasks.

    Raises:
        TaskError: There are no tasks, or a split is too small for the sample.
    """
    if num_tasks < 1:
        raise TaskError(f"num_tasks must be at least 1: got {num_tasks}")
    source = make_source(seed)
    parts = {part: _sample(source, part, num_tasks) for part in Split}
    again = {part: _sample(make_source(seed), part, num_tasks) for part in Split}
    other = {part: _sample(make_source(seed + 1), part, num_tasks) for part in Split}
    return [
        _same_seed(parts, again),
        _other_seed(parts, other),
        _disjoint(source, parts, other),
        _prefix(make_source(seed), parts[Split.TRAIN]),
        _pickles(parts[Split.TRAIN]),
    ]


def _sample(source: TaskSource, part: Split, num_tasks: int) -> list[Task]:
    return source.sample(part, num_tasks, stream="examination", unique=False)


Parts = dict[Split, list[Task]]


def _rows(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    return [task.to_row() for task in tasks]


def _same_seed(parts: Parts, again: Parts) -> Finding:
    for part, tasks in parts.items():
        pairs = zip(_rows(tasks), _rows(again[part]), strict=True)
        for row, (first, second) in enumerate(pairs):
            if first != second:
                return Finding(
                    "same seed, same tasks",
                    "fail",
                    f"two sources with the same seed differ in the {part} split: "
                    f"{first!r:.80} and {second!r:.80}; draw from the rng of propose",
                    row,
                )
    return Finding("same seed, same tasks", "pass")


def _other_seed(parts: Parts, other: Parts) -> Finding:
    for part, tasks in parts.items():
        if len(tasks) > 1 and _rows(tasks) == _rows(other[part]):
            return Finding(
                "other seed, other tasks",
                "fail",
                f"two seeds give the same {len(tasks)} tasks of the {part} split; pass "
                "the seed on to TaskSource",
            )
    return Finding("other seed, other tasks", "pass")


def _disjoint(source: TaskSource, parts: Parts, other: Parts) -> Finding:
    """Compare keys across both seeds: splits must be disjoint between runs, too."""
    name = "train and held-out are disjoint"
    trained = {source.key(t) for t in (*parts[Split.TRAIN], *other[Split.TRAIN])}
    seen = {source.identity(t) for t in (*parts[Split.TRAIN], *other[Split.TRAIN])}
    held_out = [*parts[Split.HELD_OUT], *other[Split.HELD_OUT]]
    for row, task in enumerate(held_out):
        if source.key(task) in trained or source.identity(task) in seen:
            return Finding(
                name,
                "fail",
                f"the task {task.prompt!r:.80} with the key {source.key(task)!r:.80} "
                "is in both splits; key must depend on the task alone",
                row,
            )
    return Finding(name, "pass", f"{len(trained)} and {len(held_out)} tasks")


def _prefix(source: TaskSource, tasks: Sequence[Task]) -> Finding:
    name = "shorter samples are prefixes"
    shorter = _sample(source, Split.TRAIN, (len(tasks) + 1) // 2)
    for row, (first, second) in enumerate(
        zip(_rows(shorter), _rows(tasks), strict=False)
    ):
        if first != second:
            return Finding(
                name,
                "fail",
                f"a sample of {len(shorter)} has {first!r:.80}, one of {len(tasks)} "
                f"has {second!r:.80}; propose must not count its calls",
                row,
            )
    return Finding(name, "pass")


def _pickles(tasks: Sequence[Task]) -> Finding:
    name = "rows cross processes"
    for row, task in enumerate(tasks):
        try:
            same = pickle.loads(pickle.dumps(task.to_row())) == task.to_row()
        except Exception as error:
            # Pickling may raise anything; it is the finding.
            reason = f"a row cannot be pickled: {type(error).__name__}: {error}"
            return Finding(name, "fail", reason, row)
        if not same:
            return Finding(name, "fail", "a row differs after pickling", row)
    return Finding(name, "pass")
