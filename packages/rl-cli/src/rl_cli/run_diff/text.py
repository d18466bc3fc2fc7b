"""A comparison of two runs as text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from rl_cli.report.run_reader import ReadRun
from rl_cli.run_diff.difference import Difference, Part
from rl_cli.run_diff.run_comparison import Comparison

__all__ = ["comparison_text"]

_WIDTH = 80
_MOST = 8
"""Differences to show of one part."""
_LONGEST = 400
_NAMES = 17
_FACTS = {
    "prompt": "prompt",
    "versions": "weight versions and their tokens in A and B",
    "seeds": "seeds",
    "num_elements": "elements that differ",
    "largest_difference": "by at most",
    "num_tensors": "tensors that differ",
    "num_all_tensors": "of all",
    "largest_difference_of_all": "these by at most",
}
"""Details of a difference that are shown, in order, and how they are called."""


def comparison_text(comparison: Comparison) -> str:
    """Return lines of at most 80 columns; long words, such as paths, stay whole."""
    named = zip("AB", comparison.runs, strict=True)
    lines = [
        *(_run_line(side, run) for side, run in named),
        "",
        *_wrapped(_headline(comparison)),
        "",
    ]  # fmt: skip
    several = len({part.stage for part in comparison.parts if part.stage}) > 1
    stages = dict.fromkeys(part.stage for part in comparison.parts)
    # What is of the whole run first, then stage by stage.
    for stage in sorted(stages, key=lambda stage: stage is not None):
        if several and stage is not None:
            lines.append(f"stage {stage}")
        for part in comparison.parts:
            if part.stage == stage:
                lines += _part_lines(part, several and stage is not None)
    return "\n".join(lines)


def _run_line(side: str, run: ReadRun) -> str:
    steps = sum(stage.num_steps for stage in run.stages)
    return f"{side}  {run.folder} ({run.state}, {steps} steps)"


def _headline(comparison: Comparison) -> str:
    first = comparison.first()
    setup = [
        part
        for part in comparison.parts
        if any(difference.step is None for difference in part.differences)
    ]
    before = "; before it, they differ in " if first else "They differ in "
    named = ", ".join(dict.fromkeys(part.name for part in setup))
    if first is None and not setup:
        if any(part.name == "metrics" and part.verdict == "same"
               for part in comparison.parts):  # fmt: skip
            return "The runs are the same in everything compared."
        return "No difference was found, but no metrics were compared: see below."
    if first is None:
        return f"{before}{named}, but in no step that both have."
    part, difference = first
    where = f"step {difference.step}"
    where += f" of stage {part.stage}" if part.stage else ""
    what = f"{part.name}: {difference.what}"
    values = f"is {_shown(difference.first)} in A, {_shown(difference.second)} in B"
    if difference.first == difference.second:
        values = f"differs ({_facts(difference)})"
    more = f"{before}{named}" if setup else ""
    return f"The runs part at {where}: {what} {values}{more}."


def _part_lines(part: Part, is_indented: bool) -> Iterator[str]:
    name = f"{'  ' * is_indented}{part.name}"
    about = part.compared if part.reason is None else part.reason
    if part.differences:
        compared = f"; compared: {about}" if about else ""
        about = f"{part.num_different}{compared}"
    yield from _wrapped(f"{part.verdict}: {about}", f"{name:<{_NAMES}}", _NAMES)
    indent = " " * 4
    for difference in part.differences[:_MOST]:
        yield from _difference_lines(difference, indent)
    if len(part.differences) > _MOST:
        yield f"{indent}and {len(part.differences) - _MOST} more; --json has all"
    if part.left_out:
        yield from _wrapped(f"left out: {', '.join(part.left_out)}", indent, 4)


def _difference_lines(difference: Difference, indent: str) -> Iterator[str]:
    step = "" if difference.step is None else f"step {difference.step}: "
    yield from _wrapped(f"{step}{difference.what}", indent, 6)
    # Tensors of the same type and shape differ in their elements.
    if difference.first != difference.second:
        yield from _wrapped(_shown(difference.first), f"{indent}  A  ", 9)
        yield from _wrapped(_shown(difference.second), f"{indent}  B  ", 9)
    if facts := _facts(difference):
        yield from _wrapped(facts, f"{indent}  ", 6)


def _facts(difference: Difference) -> str:
    return "; ".join(
        f"{shown}: {_shown(difference.details[name])}"
        for name, shown in _FACTS.items()
        if difference.details.get(name) is not None
    )


def _wrapped(text: str, start: str = "", indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _shown(value: Any) -> str:
    """Return a value on one line, without the control characters of models and logs."""
    if value is None:
        return "(absent)"
    if isinstance(value, str):
        # Quoted only where it would mislead: texts of a model, with spaces at the ends.
        plain = value.isprintable() and value == value.strip() and value
        text = value if plain else json.dumps(value, ensure_ascii=True)
    elif isinstance(value, float):
        text = repr(value)
    else:
        text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
