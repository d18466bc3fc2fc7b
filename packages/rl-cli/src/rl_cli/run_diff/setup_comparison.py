"""Configuration, versions, machine and data of two runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_cli.report.config_rows import whole_values
from rl_cli.report.run_reader import ReadRun, ReadStage
from rl_cli.run_diff.difference import Difference, Part, Rules, StagePair

__all__ = [
    "compare_configuration",
    "compare_data",
    "compare_environment",
    "without_root",
]

# The size of the memory varies with the kernel, and does not change a result.
_MACHINE = ("system", "cores", "gpus")


def compare_configuration(
    runs: tuple[ReadRun, ReadRun], pairs: list[StagePair], rules: Rules
) -> Iterator[Part]:
    """Compare kind and recipe of the runs, and the configuration of their stages.

    Folders of the runs themselves count as the same.
    """
    first, second = (_recipe(run) for run in runs)
    yield _keys_part("configuration", None, first, second, rules)
    for pair in pairs:
        values = [
            {key: without_root(text, run) for key, text in whole_values(run, stage)}
            for run, stage in zip(runs, pair, strict=True)
        ]
        part = _keys_part("configuration", pair[0].name, values[0], values[1], rules)
        yield _with_updates(part, pair, rules)


def compare_environment(runs: tuple[ReadRun, ReadRun], rules: Rules) -> Part:
    """Compare versions of packages and machines, as recorded when the runs began."""
    first, second = (_environment(run) for run in runs)
    return _keys_part("environment", None, first, second, rules)


def compare_data(runs: tuple[ReadRun, ReadRun], *, whole: bool) -> Part:
    """Compare the fingerprints and numbers of rows that the runs have logged.

    Args:
        runs: The runs.
        whole: Whether both runs have begun the same stages; otherwise, the shorter log
            only needs to be the beginning of the longer one.
    """
    found = [
        # Once each: a resumed run logs its data again.
        list(dict.fromkeys(without_root(line, run) for line in run.logs.data))
        for run in runs
    ]
    lacking = [side for side, lines in zip("AB", found, strict=True) if not lines]
    if lacking:
        return Part("data", reason=f"no record of the data in {' and '.join(lacking)}")
    num = max(map(len, found)) if whole else min(map(len, found))
    pairs = [tuple(_at(lines, place) for lines in found) for place in range(num)]
    differences = tuple(
        Difference(f"record {place} of the data", a, b)
        for place, (a, b) in enumerate(pairs, start=1)
        if a != b
    )
    return Part(
        "data",
        compared=f"{num} records with numbers of rows and fingerprints",
        differences=differences,
        num_different=len(differences),
    )


def _at(lines: list[str], place: int) -> str | None:
    return lines[place] if place < len(lines) else None


def _keys_part(
    name: str,
    stage: str | None,
    first: Mapping[str, str],
    second: Mapping[str, str],
    rules: Rules,
) -> Part:
    keys = list(dict.fromkeys([*first, *second]))
    left_out = tuple(key for key in keys if rules.ignores(key))
    differences = tuple(
        Difference(key, first.get(key), second.get(key))
        for key in keys
        if key not in left_out and first.get(key) != second.get(key)
    )
    lacking = [side for side, had in (("A", first), ("B", second)) if not had]
    if lacking:
        reason = f"no {name} recorded in {' and '.join(lacking)}"
        return Part(name, stage, reason=reason)
    num = len(keys) - len(left_out)
    return Part(name, stage, f"{num} keys", differences, len(differences),
                left_out=left_out)  # fmt: skip


def _recipe(run: ReadRun) -> dict[str, str]:
    values = {"kind": str(run.record.get("kind")), "name": str(run.record.get("name"))}
    values |= {key: without_root(text, run) for key, text in whole_values(run, None)}
    return values


def _environment(run: ReadRun) -> dict[str, str]:
    versions, machine = run.record.get("versions"), run.record.get("machine")
    found: dict[str, str] = {}
    if isinstance(versions, Mapping):
        found |= {f"versions.{name}": str(value) for name, value in versions.items()}
    if isinstance(machine, Mapping):
        named = {name: machine[name] for name in _MACHINE if name in machine}
        found |= {f"machine.{name}": str(value) for name, value in named.items()}
    return found


def _with_updates(part: Part, pair: StagePair, rules: Rules) -> Part:
    """Add the first change of the configuration during a stage that differs."""
    first, second = (_updates(stage, rules) for stage in pair)
    for place in range(max(len(first), len(second))):
        a, b = (each[place] if place < len(each) else None for each in (first, second))
        if a == b:
            continue
        step = min(update[0] for update in (a, b) if update is not None)
        shown = [None if each is None else each[1] for each in (a, b)]
        found = Difference(
            f"change {place + 1} during the run", shown[0], shown[1], step=step
        )
        return Part(
            part.name,
            part.stage,
            part.compared,
            (*part.differences, found),
            part.num_different + 1,
            left_out=part.left_out,
        )
    return part


def _updates(stage: ReadStage, rules: Rules) -> list[tuple[int, str]]:
    """Return step and text of the changes during a stage."""
    found = []
    for update in stage.updates:
        changes, step = update.get("changes"), update.get("step")
        if isinstance(changes, Mapping) and isinstance(step, int):
            kept = {k: v for k, v in changes.items() if not rules.ignores(str(k))}
            shown = ", ".join(f"{key}={value}" for key, value in kept.items())
            found.append((step, f"after step {step}: {shown}"))
    return found


def without_root(text: str, run: ReadRun) -> str:
    """Replace the folder of a run in a text by `RUN`, since each run has its own."""
    return _roots(run).sub("RUN", text)


def _roots(run: ReadRun) -> re.Pattern[str]:
    named: list[Any] = [str(run.folder.absolute()), run.result.get("run_dir")]
    for config in (run.record.get("config"), *(s.metrics.config for s in run.stages)):
        named.append(config.get("output_dir") if isinstance(config, Mapping) else None)
    roots = {
        str(above)
        for name in named
        if isinstance(name, str) and Path(name).name
        for path in (Path(name),)
        for above in [path.parent.parent if _is_stage(path) else path]
    }
    # The longest first, since a folder may lie in another one.
    ordered = sorted(map(re.escape, roots), key=len, reverse=True)
    return re.compile(rf"(?<![\w./-])(?:{'|'.join(ordered)})(?=$|[\s/:'\",)\]}}])")


def _is_stage(path: Path) -> bool:
    return path.parent.name == "stages"
