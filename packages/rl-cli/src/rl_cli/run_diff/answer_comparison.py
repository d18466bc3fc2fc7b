"""Kept answers of two stages: the first group, row and token that differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from rl_algorithms.trainers.sampling.rollout_files import RolloutFiles
from rl_cli.report.answer_index import KINDS, answer_files
from rl_cli.report.run_reader import ReadStage
from rl_cli.run_diff.difference import Difference, Part, Rules, StagePair
from rl_distributed.metrics.sinks.jsonl import read_records

__all__ = ["compare_answers"]

# In the order in which they come about: a prompt is chosen, sampled from, and scored.
_ORDER = ("group", "prompt", "expected", "versions", "tokens", "response", "logprobs",
          "messages", "outcome", "ending", "length", "reward", "rewards", "advantage",
          "advantages", "trainer_logprobs")  # fmt: skip
_LISTS = ("tokens", "logprobs", "advantages", "versions", "trainer_logprobs")
Steps = Iterator[tuple[int, list[dict[str, Any]]]]


def compare_answers(pair: StagePair, rules: Rules) -> Part:
    """Compare the kept answers of the steps of which both stages have some."""
    num_answers, steps, found = 0, 0, []
    for kind in KINDS:
        first, second = (_steps(stage, kind) for stage in pair)
        for step, a, b in _joined(first, second):
            steps, num_answers = steps + 1, num_answers + max(len(a), len(b))
            difference = _first_difference(step, kind, a, b, rules)
            if difference is not None:
                found.append(_with_seed(difference, pair))
                # Later answers follow from weights that differ.
                break
    if not steps:
        return Part("answers", pair[0].name, reason="no step of which both kept some")
    found.sort(key=lambda each: each.step or 0)
    compared = f"{num_answers} answers of {steps} step{'s' * (steps > 1)}"
    return Part("answers", pair[0].name, compared, tuple(found), len(found))


def _steps(stage: ReadStage, kind: str) -> Steps:
    """Yield the answers of a stage by step; one file of at most 16 MiB is in memory."""
    records: Iterable[dict[str, Any]]
    if kind == "training":
        records = RolloutFiles(stage.folder, 0).read()
    else:
        found = (r for f in answer_files(stage.folder, kind) for r in read_records(f))
        records = (r for r in found if isinstance(r.get("step"), int))
    for step, group in groupby(records, key=lambda record: record["step"]):
        yield step, list(group)


def _joined(
    first: Steps, second: Steps
) -> Iterator[tuple[int, list[dict[str, Any]], list[dict[str, Any]]]]:
    """Yield the steps that both have; each may have thinned out others."""
    a, b = next(first, None), next(second, None)
    while a is not None and b is not None:
        if a[0] == b[0]:
            yield a[0], a[1], b[1]
            a, b = next(first, None), next(second, None)
        elif a[0] < b[0]:
            a = next(first, None)
        else:
            b = next(second, None)


def _first_difference(
    step: int,
    kind: str,
    first: list[dict[str, Any]],
    second: list[dict[str, Any]],
    rules: Rules,
) -> Difference | None:
    for row, (a, b) in enumerate(zip(first, second, strict=False)):
        for name in _fields(a, b):
            if rules.ignores(name) or _same(a.get(name), b.get(name), rules):
                continue
            group = a.get("group")
            place = f"{kind} answer {row}"
            place += "" if group is None else f" (group {group})"
            what, values = _where(name, a.get(name), b.get(name), rules)
            details = {
                "kind": kind,
                "row": row,
                "group": group,
                "prompt": a.get("prompt"),
                "versions": [a.get("versions"), b.get("versions")],
            }
            return Difference(f"{what} of {place}", *values, step, details)
    if len(first) != len(second):
        what = f"number of {kind} answers"
        return Difference(what, len(first), len(second), step, {"kind": kind})
    return None


def _fields(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*first, *second])
    return [*(n for n in _ORDER if n in names), *(n for n in names if n not in _ORDER)]


def _same(first: Any, second: Any, rules: Rules) -> bool:
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(
            _same(a, b, rules) for a, b in zip(first, second, strict=True)
        )
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _same(value, second[key], rules) for key, value in first.items()
        )
    return rules.same(first, second)


def _where(
    name: str, first: Any, second: Any, rules: Rules
) -> tuple[str, tuple[Any, Any]]:
    """Return the place within a field, and both values there."""
    texts = isinstance(first, str) and isinstance(second, str)
    lists = isinstance(first, list) and isinstance(second, list)
    if not (texts or (lists and name in _LISTS)):
        return name, (first, second)
    length = min(len(first), len(second))
    place = next(
        (i for i in range(length) if not _same(first[i], second[i], rules)), length
    )
    if texts:
        begin = max(place - 20, 0)
        values = (first[begin : place + 40], second[begin : place + 40])
        return f"{name} from character {place} on", values
    at = [each[place] if place < len(each) else None for each in (first, second)]
    return f"{name.removesuffix('s')} {place}", (at[0], at[1])


def _with_seed(difference: Difference, pair: StagePair) -> Difference:
    seeds = [stage.metrics.config.get("seed") for stage in pair]
    details = {**difference.details, "seeds": seeds}
    return Difference(
        difference.what, difference.first, difference.second, difference.step, details
    )
