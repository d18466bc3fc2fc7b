"""How much a quantity grows per 1,000 steps, and whether that is within its limit.

The steps after 300 are divided into sixths; the median of the samples of the last is
compared with that of the first, and with that of the fourth. A moment of much memory,
such as a checkpoint, does not change a median. What has settled in the second half does
not grow, however it got there: caches and allocators fill up, and a leak goes on.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.soak.recipe import (
    BOUNDED_PARTS,
    LINE_FILES,
    PAGE_SERVER,
    PAGE_SERVER_BYTES,
)

FIRST_STEP = 300
NUM_WINDOWS = 6
MEMORY_SHARE = 0.01
"""Maximum growth of memory and bytes per 1,000 steps, as a share."""
LEAST_BYTES = 512 << 10
"""The same for processes below 50 MiB: allocators take memory in larger pieces than a
hundredth of theirs."""
COUNT = 1.0
"""Maximum growth of open files, threads and numbers of files per 1,000 steps."""
OF_PROCESS = ("memory_bytes", "descriptors", "threads")

STORES = {"shared memory": "shared_bytes", "object store": "object_store_bytes"}
"""What holds what is in flight, and its key in a sample: more or less by chance."""

VERDICTS = ("breach", "settles", "reached", "kept")
"""Verdicts, the worst first."""

Points = list[tuple[int, float]]
"""Steps in order, and a quantity at each."""


@dataclass(frozen=True)
class Growth:
    """A quantity in the first and in the last window."""

    begin: float
    end: float
    per_1000: float
    """Growth per 1,000 steps; negative if it shrinks."""
    late_per_1000: float
    """The same in the second half."""

    @classmethod
    def of(cls, points: Sequence[tuple[int, float]]) -> Growth | None:
        """Return the growth of a quantity, or None if there are too few samples."""
        if not points:
            return None
        begin, end = points[0][0], points[-1][0]
        width = (end - begin) / NUM_WINDOWS
        parts = [
            [point for point in points if low <= point[0] <= low + width]
            for low in (begin, begin + NUM_WINDOWS // 2 * width, end - width)
        ]
        if not width or not all(parts):
            return None
        first, fourth, last = (
            (
                statistics.median(step for step, _ in part),
                statistics.median(value for _, value in part),
            )
            for part in parts
        )
        return cls(first[1], last[1], _slope(first, last), _slope(fourth, last))


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return 1000 * (other[1] - one[1]) / (other[0] - one[0])


@dataclass(frozen=True)
class Finding:
    """The growth of a quantity and what is allowed."""

    name: str
    quantity: str
    growth: Growth
    most_per_1000: float | None = None
    """Maximum growth per 1,000 steps; None: it has none."""
    most: float | None = None
    """Maximum value at the end; None: it has none."""

    @property
    def verdict(self) -> str:
        """`reached`, `breach`, `settles`, or `kept` for what a run keeps of each step.

        What settles has grown by more than its limit, but not in the second half.
        """
        if self.most is not None and self.growth.end > self.most:
            return "breach"
        if self.most_per_1000 is not None:
            if self.growth.per_1000 <= self.most_per_1000:
                return "reached"
            is_late = self.growth.late_per_1000 > self.most_per_1000
            return "breach" if is_late else "settles"
        return "kept" if self.most is None else "reached"

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "name": self.name,
            "quantity": self.quantity,
            "begin": self.growth.begin,
            "end": self.growth.end,
            "per_1000_steps": round(self.growth.per_1000, 3),
            "late_per_1000_steps": round(self.growth.late_per_1000, 3),
            "most_per_1000_steps": self.most_per_1000,
            "most": self.most,
            "verdict": self.verdict,
        }


def findings(samples: Sequence[Mapping[str, Any]], num_steps: int) -> list[Finding]:
    """Return all findings of a run, those of processes first.

    Args:
        samples: From `Sampler`, in order.
        num_steps: Number of steps of the run, whose end is left out: there the driver
            draws the curve and writes the result.
    """
    kept = [s for s in samples if FIRST_STEP < s["step"] < num_steps]
    found = []
    for (name, quantity), points in series(kept).items():
        growth = Growth.of(points)
        if growth is not None:
            allowed = (
                {"most": _early_peak(points)}
                if name in STORES
                else _allowed(name, quantity, growth)
            )
            found.append(Finding(name, quantity, growth, **allowed))
    return found


def _early_peak(points: Points) -> float:
    """Return the highest value of the first half, when nothing has piled up yet."""
    middle = (points[0][0] + points[-1][0]) / 2
    return max(value for step, value in points if step <= middle)


def series(samples: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Points]:
    """Return the points of each quantity by name and quantity."""
    counts = Counter(name for sample in samples for name in sample["processes"])
    found: dict[tuple[str, str], Points] = {}
    for name, count in counts.items():
        # Not of those that only live for a moment.
        for quantity in OF_PROCESS if 2 * count > len(samples) else ():
            found[name, quantity] = [
                (s["step"], s["processes"][name][quantity])
                for s in samples
                if name in s["processes"]
            ]
    for name, key in STORES.items():
        found[name, "bytes"] = [
            (s["step"], s[key]) for s in samples if s[key] is not None
        ]
    for part in sorted({part for sample in samples for part in sample["run_parts"]}):
        found[f"run/{part}", "bytes"] = [
            (s["step"], s["run_parts"].get(part, 0)) for s in samples
        ]
    found["run", "files"] = [(s["step"], s["run_files"]) for s in samples]
    found["Ray's session", "files"] = [(s["step"], s["session_files"]) for s in samples]
    found["Ray's session", "bytes"] = [(s["step"], s["session_bytes"]) for s in samples]
    return found


def _allowed(name: str, quantity: str, growth: Growth) -> dict[str, float]:
    if quantity in ("descriptors", "threads", "files"):
        return {"most_per_1000": COUNT}
    if name == PAGE_SERVER:
        return {"most": PAGE_SERVER_BYTES}
    part = name.removeprefix("run/")
    if part in BOUNDED_PARTS:
        return {"most": BOUNDED_PARTS[part]}
    if part in LINE_FILES or name == "Ray's session":
        return {}
    least = LEAST_BYTES if quantity == "memory_bytes" else 0
    return {"most_per_1000": max(MEMORY_SHARE * growth.begin, least)}


def table(found: Sequence[Finding]) -> str:
    """Return the findings as a table in Markdown: a row per process, then the rest."""
    by_name: dict[str, dict[str, Finding]] = {}
    for finding in found:
        by_name.setdefault(finding.name, {})[finding.quantity] = finding
    head = "| process | memory | per 1,000 steps | second half | open files | threads |"
    lines = [f"{head} verdict |", "|---|---|---|---|---|---|---|"]
    for name, one in by_name.items():
        if set(one) == set(OF_PROCESS):
            memory, *counts = (one[quantity] for quantity in OF_PROCESS)
            shares = _shares(memory.growth)
            cells = [_sizes(memory.growth, 20, "MiB"), *shares, *map(_counts, counts)]
            verdicts = {f.verdict for f in one.values()}
            worst = next(v for v in VERDICTS if v in verdicts)
            lines.append(f"| {' | '.join([f'`{name}`', *cells, worst])} |")
    head = "| files and stores | size | per 1,000 steps | second half | verdict |"
    lines += ["", head, "|---|---|---|---|---|"]
    for finding in found:
        growth = finding.growth
        slopes = growth.per_1000, growth.late_per_1000
        if finding.quantity == "files":
            cells = [
                f"{_counts(finding)} files",
                *(f"{slope:+.1f}" for slope in slopes),
            ]
        elif finding.quantity == "bytes":
            cells = [f"{slope / 1024:+,.1f} KiB" for slope in slopes]
            cells.insert(0, _sizes(growth, 10, "KiB"))
        else:
            continue
        lines.append(f"| {' | '.join([finding.name, *cells, finding.verdict])} |")
    return "\n".join(lines)


def _sizes(growth: Growth, bits: int, unit: str) -> str:
    begin, end = (f"{value / (1 << bits):,.1f}" for value in (growth.begin, growth.end))
    return f"{begin} to {end} {unit}"


def _shares(growth: Growth) -> list[str]:
    slopes = growth.per_1000, growth.late_per_1000
    return [f"{slope / growth.begin:+.2%}" for slope in slopes]


def _counts(finding: Finding) -> str:
    return f"{finding.growth.begin:g} to {finding.growth.end:g}"
