"""The comparison of two runs: its parts, and where they begin to differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rl_cli.report.run_reader import ReadRun, ReadStage
from rl_cli.run_diff.answer_comparison import compare_answers
from rl_cli.run_diff.checkpoint_comparison import compare_checkpoints
from rl_cli.run_diff.difference import PARTS, Difference, Part, Rules, StagePair
from rl_cli.run_diff.event_comparison import compare_events
from rl_cli.run_diff.metric_comparison import compare_metrics
from rl_cli.run_diff.row_comparison import compare_rows
from rl_cli.run_diff.setup_comparison import (
    compare_configuration,
    compare_data,
    compare_environment,
    without_root,
)

__all__ = ["Comparison", "compare_runs"]


@dataclass(frozen=True)
class Comparison:
    """Two runs, part by part."""

    runs: tuple[ReadRun, ReadRun]
    rules: Rules
    parts: tuple[Part, ...]

    @property
    def is_same(self) -> bool:
        """Whether no difference was found."""
        return not any(part.differences for part in self.parts)

    def first(self) -> tuple[Part, Difference] | None:
        """Return the first difference within a step; None: there is none."""
        stages = {stage.name: i for i, stage in enumerate(self.runs[0].stages)}
        found = [
            (stages.get(part.stage or "", 0), difference.step, order, part, difference)
            for order, part in enumerate(self._by_order())
            for difference in part.differences
            if difference.step is not None
        ]
        if not found:
            return None
        # By the numbers only: parts and differences have no order.
        *_, part, difference = min(found, key=lambda each: each[:3])
        return part, difference

    def _by_order(self) -> list[Part]:
        return sorted(self.parts, key=lambda part: PARTS.index(part.name))

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        first = self.first()
        shown = None
        if first is not None:
            shown = {"part": first[0].name, "stage": first[0].stage, **asdict(first[1])}
        return {
            "same": self.is_same,
            "runs": [str(run.folder) for run in self.runs],
            "tolerance": self.rules.tolerance,
            "ignored": list(self.rules.ignored),
            "first": shown,
            "parts": [part.to_dict() for part in self.parts],
        }


def compare_runs(
    first: ReadRun, second: ReadRun, rules: Rules, skipped: Collection[str] = ()
) -> Comparison:
    """Compare two runs.

    Args:
        first: A run, in progress or ended.
        second: Another one.
        rules: What counts as a difference.
        skipped: Names of `PARTS` not to compare.
    """
    parts = tuple(_parts((first, second), rules, frozenset(skipped)))
    return Comparison((first, second), rules, parts)


def _parts(
    runs: tuple[ReadRun, ReadRun], rules: Rules, skipped: frozenset[str]
) -> Iterator[Part]:
    pairs = _pairs(*runs)
    if "configuration" not in skipped:
        yield from compare_configuration(runs, pairs, rules)
    if "environment" not in skipped:
        yield compare_environment(runs, rules)
    if "data" not in skipped:
        whole = len({tuple(s.name for s in run.stages) for run in runs}) == 1
        yield compare_data(runs, whole=whole)
    for pair in pairs:
        for name, compare in _stage_parts(runs, pair, rules).items():
            if name not in skipped:
                yield compare()
    if "length" not in skipped:
        yield from _lengths(runs, pairs)


def _stage_parts(
    runs: tuple[ReadRun, ReadRun], pair: StagePair, rules: Rules
) -> dict[str, Callable[[], Part]]:
    """Return the comparisons of a stage by the names of their parts."""
    ended = all(
        stage.result or run.state in ("finished", "stopped")
        for run, stage in zip(runs, pair, strict=True)
    )
    # Otherwise one log is longer, because one run went further.
    alike = ended and pair[0].num_steps == pair[1].num_steps
    plain = [functools.partial(without_root, run=run) for run in runs]
    return {
        "events": lambda: compare_events(pair, ended=alike),
        "answers": lambda: compare_answers(pair, rules),
        "rows": lambda: compare_rows(pair, rules),
        "metrics": lambda: compare_metrics(pair, rules, ended=ended),
        "checkpoints": lambda: compare_checkpoints(pair, rules, (plain[0], plain[1])),
    }


def _pairs(first: ReadRun, second: ReadRun) -> list[StagePair]:
    """Return the stages that both have; a run without stages is paired as a whole."""
    # Also of different names: a recipe of one stage against a run without stages.
    if len(first.stages) == len(second.stages) == 1:
        return [(first.stages[0], second.stages[0])]
    others = {stage.name: stage for stage in second.stages}
    return [(s, others[s.name]) for s in first.stages if s.name in others]


def _lengths(runs: tuple[ReadRun, ReadRun], pairs: list[StagePair]) -> Iterator[Part]:
    """Yield which stages and how many steps each run has."""
    for pair in pairs:
        steps = [stage.num_steps for stage in pair]
        found: tuple[Difference, ...] = ()
        if steps[0] != steps[1]:
            shown = [_ending(*each) for each in zip(runs, pair, strict=True)]
            found = (Difference("end of the run", shown[0], shown[1], min(steps) + 1),)
        compared = f"{max(steps)} steps"
        yield Part("length", pair[0].name, compared, found, len(found))
    paired = {id(stage) for pair in pairs for stage in pair}
    for place, run in enumerate(runs):
        for stage in run.stages:
            if id(stage) not in paired:
                shown = ["absent", "absent"]
                shown[place] = f"{stage.num_steps} steps"
                found = (Difference(f"stage {stage.name}", shown[0], shown[1], 0),)
                yield Part("length", stage.name, "", found, 1)


def _ending(run: ReadRun, stage: ReadStage) -> str:
    return f"{stage.num_steps} steps ({'ended' if stage.result else run.state})"
