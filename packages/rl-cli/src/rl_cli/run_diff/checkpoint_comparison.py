"""Checkpoints of two stages: the first step and the first tensor that differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_cli.run_diff.difference import Difference, Part, Rules, StagePair
from rl_cli.run_diff.metric_comparison import is_measured
from rl_distributed.checkpoint import FileEntry, read_manifest, verify
from rl_distributed.errors import CheckpointError

__all__ = ["compare_checkpoints"]

_MANIFEST, _INFO, _STATE = "manifest.json", "training_info.json", "state.json"
# The configuration is compared by its keys.
_LEFT_OUT = ("config.yaml",)
_MOST = 5
Files = Mapping[str, FileEntry]
Plain = Callable[[str], str]


def compare_checkpoints(
    pair: StagePair, rules: Rules, plain: tuple[Plain, Plain]
) -> Part:
    """Compare the steps that both stages have kept, up to the first that differs.

    Args:
        pair: The stages.
        rules: What counts as a difference.
        plain: For each run, a function that replaces its folder in a text.
    """
    name = pair[0].name
    places = [stage.checkpoint_paths for stage in pair]
    shared = sorted(places[0].keys() & places[1].keys())
    if not shared:
        return Part("checkpoints", name, reason="no step that both have kept")
    whole = [step for step in shared if any(_is_readable(p[step]) for p in places)]
    if not whole:
        reason = "those that both have kept are incomplete in both"
        return Part("checkpoints", name, reason=reason)
    for number, step in enumerate(whole, start=1):
        sides = _Sides(places[0][step], places[1][step], step, rules, plain)
        found = list(_compare_step(sides))
        if found:
            compared = f"{number} of the {len(whole)} kept by both"
            return Part("checkpoints", name, compared, tuple(found), len(found))
    steps = ", ".join(str(step) for step in whole[-_MOST:])
    more = "..., " if len(whole) > _MOST else ""
    return Part("checkpoints", name, f"kept by both: step {more}{steps}")


@dataclass(frozen=True)
class _Sides:
    """The checkpoints of one step."""

    first: Path
    second: Path
    step: int
    rules: Rules
    plain: tuple[Plain, Plain]


def _compare_step(both: _Sides) -> Iterator[Difference]:
    first, second, step = both.first, both.second, both.step
    states = [_state_of(folder) for folder in (first, second)]
    if not (_is_readable(first) and _is_readable(second)):
        yield Difference("state of the checkpoint", states[0], states[1], step)
        return
    sides = [read_manifest(folder) for folder in (first, second)]
    changed = list(_changed(first, second, *sides))
    # Weights first, then training state: names sort the other way round.
    folders = dict.fromkeys(
        str(Path(name).parent)
        for name in sorted(changed, reverse=True)
        if name.endswith(".safetensors")
    )
    for folder in folders:
        yield from _tensors(both, folder)
    for name in changed:
        file = Path(name)
        if file.name in (_INFO, _STATE):
            yield from _leaves_of(both, name)
        elif file.suffix != ".safetensors" and not file.name.startswith("rank_"):
            shown = ["its bytes" if name in side else "absent" for side in sides]
            other = "other bytes" if shown[0] == shown[1] else shown[1]
            yield Difference(f"file {name}", shown[0], other, step)
    # Last: that a tensor was changed tells more than that its file no longer fits.
    if states[0] != states[1]:
        yield Difference("state of the checkpoint", states[0], states[1], step)


def _is_readable(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


def _state_of(folder: Path) -> str:
    try:
        # Sizes only: digests would read all weights.
        verify(folder, digests=False)
    except CheckpointError as error:
        return str(error)
    return "whole"


def _changed(first: Path, second: Path, a: Files, b: Files) -> Iterator[str]:
    """Yield the names of files that may differ."""
    trusted = _is_untouched(first, a) and _is_untouched(second, b)
    for name in sorted(a.keys() | b.keys()):
        if name in _LEFT_OUT:
            continue
        same = name in a and name in b and a[name] == b[name]
        if same and not trusted and not name.endswith(".safetensors"):
            same = _content(first / name) == _content(second / name)
        elif same and not trusted:
            same = False
        if not same:
            yield name


def _is_untouched(folder: Path, files: Files) -> bool:
    """Return whether the digests in a manifest can stand for the files.

    It is written last: a file that is newer was changed or copied since, and is read.
    """
    written = (folder / _MANIFEST).stat().st_mtime_ns
    try:
        return all((folder / name).stat().st_mtime_ns <= written for name in files)
    except FileNotFoundError:
        return False


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _tensors(both: _Sides, name: str) -> Iterator[Difference]:
    # torch takes seconds to import, and is needed only for tensors.
    from rl_models.checkpoint.comparison import compare_tensors  # noqa: PLC0415

    step, rules = both.step, both.rules
    try:
        found = compare_tensors(
            both.first / name, both.second / name, tolerance=rules.tolerance
        )
    except CheckpointError as error:
        yield Difference(f"tensors of {name}", "not readable", str(error), step)
        return
    kept = [d for d in found.differences if not rules.ignores(d.name)]
    if not kept:
        return
    head = kept[0]
    most = max((d.largest for d in kept if d.largest is not None), default=None)
    yield Difference(
        f"tensor {head.name} of {name}",
        head.first,
        head.second,
        step,
        {
            "num_elements": head.num_elements,
            "largest_difference": head.largest,
            "num_tensors": len(kept),
            "num_all_tensors": found.num_tensors,
            "largest_difference_of_all": most,
        },
    )


def _leaves_of(both: _Sides, name: str) -> Iterator[Difference]:
    """Yield the first value that differs in two JSON files."""
    rules = both.rules
    a, b = (
        {key: plain(value) if isinstance(value, str) else value
         for key, value in _leaves(_read(folder / name))}
        for folder, plain in zip((both.first, both.second), both.plain, strict=True)
    )  # fmt: skip
    for key in dict.fromkeys([*a, *b]):
        if rules.ignores(key[-1]) or any(map(_is_clock, key)):
            continue
        if key not in a or key not in b or not rules.same(a[key], b[key]):
            what = f"{'.'.join(key)} of {name}"
            yield Difference(what, a.get(key), b.get(key), both.step)
            return


def _is_clock(part: str) -> bool:
    # The state of asynchronous training has times such as `sent_s`.
    return part.endswith("_s") or (":" in part and is_measured(part))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _leaves(tree: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    pairs: Any = ()
    if isinstance(tree, dict):
        pairs = tree.items()
    elif isinstance(tree, list):
        pairs = enumerate(tree)
    if not pairs or not tree:
        yield above, tree
    else:
        for key, value in pairs:
            yield from _leaves(value, (*above, str(key)))
