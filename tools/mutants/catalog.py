"""The list of mutants: each change, and the tests that must fail.

It is in `changes/*.toml`, one file per theme. A group is a source file with the tests
that cover it; each of its mutants replaces a text that occurs there once:

```toml
[[group]]
file = "packages/rl-algorithms/src/rl_algorithms/losses/kl.py"
tests = ["packages/rl-algorithms/tests/test_losses_kl.py"]

[[group.mutant]]
name = "kl-k1-sign"
old = "return -log_ratio"
new = "return log_ratio"
subset = true  # also in the short run of CI
```
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Mutant", "load_mutants", "problems"]

_GROUP_KEYS = {"file", "tests", "mutant"}
_KEYS = {"name", "old", "new", "tests", "subset"}


@dataclass(frozen=True)
class Mutant:
    """One small change of the sources."""

    name: str
    """Name by which it is selected."""
    file: str
    """The changed file, relative to the root of the repository."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    """The replacement."""
    tests: tuple[str, ...]
    """Files or pytest node ids, one of which must fail."""
    subset: bool = False
    """Whether it is part of CI's short run."""

    def apply(self, source: str) -> str:
        """Return the source with the change."""
        return source.replace(self.old, self.new)


def load_mutants(folder: Path) -> list[Mutant]:
    """Read all files of a folder.

    Raises:
        ValueError: A group or a mutant has an unknown key, or lacks one.
    """
    return [
        mutant
        for path in sorted(folder.glob("*.toml"))
        for group in tomllib.loads(path.read_text()).get("group", [])
        for mutant in _of_group(group, path.name)
    ]


def _of_group(group: dict[str, Any], source: str) -> Iterator[Mutant]:
    _check_keys(group, _GROUP_KEYS, {"file", "mutant"}, f"{source}: a group")
    for entry in group["mutant"]:
        what = f"{source}: mutant {entry.get('name')!r}"
        _check_keys(entry, _KEYS, {"name", "old", "new"}, what)
        tests = entry.get("tests", group.get("tests"))
        if not tests:
            raise ValueError(f"{what} names no tests, and neither does its group")
        yield Mutant(
            entry["name"],
            group["file"],
            entry["old"],
            entry["new"],
            tuple(tests),
            entry.get("subset", False),
        )


def _check_keys(
    entry: dict[str, Any], known: set[str], needed: set[str], what: str
) -> None:
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"{what} has no key {unknown[0]!r}; it has {sorted(known)}")
    if missing := sorted(needed - set(entry)):
        raise ValueError(f"{what} lacks {', '.join(missing)}")


def problems(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """Return a line for each mutant that no longer matches the sources.

    Args:
        mutants: The list.
        root: The root of the repository.
    """
    names = Counter(mutant.name for mutant in mutants)
    found = [f"{n}: {count} mutants have this name" for n, count in names.items()
             if count > 1]  # fmt: skip
    for mutant in mutants:
        found += [f"{mutant.name}: {text}" for text in _problems_of(mutant, root)]
    return found


def _problems_of(mutant: Mutant, root: Path) -> Iterator[str]:
    for test in mutant.tests:
        if not (root / test.partition("::")[0]).is_file():
            yield f"there is no test file {test.partition('::')[0]}"
    path = root / mutant.file
    if not path.is_file():
        yield f"there is no file {mutant.file}"
        return
    source = path.read_text()
    count = source.count(mutant.old)
    if count != 1:
        yield (
            f"its old text must stand exactly once in {mutant.file}: it stands there "
            f"{count} times; bring it up to what the code says now: {mutant.old!r}"
        )
        return
    try:
        changed = ast.dump(ast.parse(mutant.apply(source)))
    except SyntaxError as error:
        yield f"what it makes of {mutant.file} is no Python: {error}"
        return
    if changed == ast.dump(ast.parse(source)):
        yield f"its new text says the same as the old one: {mutant.new!r}"
