"""Recorded training rows of two stages: the first call and column that differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_algorithms.trainers.recording.folder import STEPS, has_recording
from rl_cli.run_diff.difference import Difference, Part, Rules, StagePair
from rl_distributed.errors import ConfigError

if TYPE_CHECKING:
    from rl_algorithms.trainers.recording.recording import RecordedCall, Recording

__all__ = ["compare_rows"]


def compare_rows(pair: StagePair, rules: Rules) -> Part:
    """Compare the rows of the steps that both stages have recorded."""
    name = pair[0].name
    if not all(has_recording(stage.folder) for stage in pair):
        reason = "no recording in both (record_training)"
        return Part("rows", name, reason=reason)
    # It imports torch, which takes seconds and is needed only for tensors.
    from rl_algorithms.trainers.recording.recording import (  # noqa: PLC0415
        Recording,
    )

    try:
        first, second = (Recording.read(stage.folder) for stage in pair)
    except ConfigError as error:
        return Part("rows", name, reason=str(error))
    shared = sorted(first.steps.keys() & second.steps.keys())
    if not shared:
        return Part("rows", name, reason="no step that both have recorded")
    sides = _Sides(first, second, rules)
    for number, step in enumerate(shared, start=1):
        found = sides.first_difference(step)
        if found is not None:
            compared = f"{number} of the {len(shared)} steps that both have recorded"
            return Part("rows", name, compared, (found,), 1)
    return Part("rows", name, f"{len(shared)} steps")


@dataclass(frozen=True)
class _Sides:
    """The recordings of two stages."""

    first: Recording
    second: Recording
    rules: Rules

    def first_difference(self, step: int) -> Difference | None:
        """Return the first difference of a step."""
        first, second = self.first.steps[step].calls, self.second.steps[step].calls
        for number, (a, b) in enumerate(zip(first, second, strict=False)):
            if a.model != b.model:
                return Difference(f"model of call {number}", a.model, b.model, step)
            place = f"call {number} ({a.model})"
            sizes = (a.global_batch_size, b.global_batch_size)
            if sizes[0] != sizes[1]:
                return Difference(f"global batch size of {place}", *sizes, step)
            found = self._columns(step, place, a, b)
            if found is not None:
                return found
        if len(first) != len(second):
            return Difference("number of calls", len(first), len(second), step)
        return None

    def _columns(
        self, step: int, place: str, a: RecordedCall, b: RecordedCall
    ) -> Difference | None:
        files = (self.first.folder / a.file, self.second.folder / b.file)
        # Digests stand for the files, unless one was changed since.
        if a.columns == b.columns and not any(map(_is_changed, files)):
            return None
        try:
            rows = (self.first.rows(a), self.second.rows(b))
        except ConfigError as error:
            return Difference(f"rows of {place}", "readable", str(error), step)
        for name in dict.fromkeys([*rows[0], *rows[1]]):
            if self.rules.ignores(name):
                continue
            found = _first_row(rows[0].get(name), rows[1].get(name), self.rules)
            if found is not None:
                where, values, details = found
                what = f"column {name} of {place}{where}"
                return Difference(what, *values, step, details)
        return None


def _is_changed(path: Path) -> bool:
    """Return whether a file is newer than the lines, which are written after it."""
    try:
        lines = path.parent / STEPS
        return path.stat().st_mtime_ns > lines.stat().st_mtime_ns
    except FileNotFoundError:
        return True


def _first_row(
    first: Any, second: Any, rules: Rules
) -> tuple[str, tuple[Any, Any], Mapping[str, Any]] | None:
    """Return the place of the first difference of two columns, and both values."""
    import torch  # noqa: PLC0415

    kinds = [_kind(each) for each in (first, second)]
    if kinds[0] != kinds[1]:
        return "", (kinds[0], kinds[1]), {}
    if not isinstance(first, torch.Tensor):
        for row, (a, b) in enumerate(zip(first, second, strict=True)):
            if not rules.same(a, b):
                return f", row {row}", (a, b), {}
        return None
    bits = [each.contiguous().view(len(each), -1) for each in (first, second)]
    differs = bits[0].view(torch.uint8) != bits[1].view(torch.uint8)
    size = first.element_size()
    differs = differs.view(len(first), -1, size).any(-1)
    if rules.tolerance and first.is_floating_point():
        a, b = bits[0].double(), bits[1].double()
        scale = torch.maximum(a.abs(), b.abs()).clamp(min=1.0)
        differs &= ~((a - b).abs() <= rules.tolerance * scale)
    places = differs.nonzero()
    if not len(places):
        return None
    row, token = places[0].tolist()
    values = [each[row, token].item() for each in bits]
    where = f", row {row}"
    if first.dim() > 1:
        # A token may have several numbers, such as a teacher's top k.
        token, number = divmod(token, math.prod(first.shape[2:]))
        where += f", token {token}" + (f", number {number}" if first.dim() > 2 else "")
    return where, (values[0], values[1]), {"num_elements": len(places)}


def _kind(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, list):
        return f"list of {len(value)}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
