"""The format environment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from rl_distributed.config import Config
from rl_distributed.errors import ConfigError
from rl_envs.errors import MessageLogError
from rl_envs.registry import register_env
from rl_envs.worlds.verdict import (
    Columns,
    Given,
    Verdict,
    VerdictEnvironment,
    visible,
)

__all__ = ["FormatConfig", "FormatEnvironment", "FormatRow"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
# Maximum graded reward for sections; text outside of them costs the rest.
_FOR_SECTIONS = 0.9


class FormatConfig(Config):
    """Settings of the format environment."""

    credit: Literal["exact", "graded"] = "exact"
    """Scoring of wrong formats. `exact`: reward 1 for the right format, else 0.
    `graded`: 0.9 times the share of correct sections if anything is wrong."""
    style: Literal["tags", "headings"] = "tags"
    """Syntax of sections. `tags`: `<name>...</name>`. `headings`: from a line `# name`
    to the next such line."""
    sections: tuple[str, ...] = ()
    """Sections of rows without a column `sections`."""
    allow_outside: bool = False
    """Permission for other text before, between and after the sections."""
    allow_empty: bool = False
    """Permission for blank sections."""


@dataclass(frozen=True, slots=True)
class FormatRow:
    """Requirements of a row."""

    sections: tuple[str, ...]
    """Names, in order."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """Required content of sections, by name."""


@dataclass(frozen=True, slots=True)
class _Found:
    """One section of a response."""

    name: str
    content: str
    begin: int
    end: int


@register_env("format")
class FormatEnvironment(VerdictEnvironment[FormatRow]):
    """Checks that a response has the sections of its row in order, each once.

    A row has the column `sections`, a list of names, unless the settings have it, and
    optionally `contents`, texts by name, which the stripped sections must equal.
    Without `allow_outside`, no other text is allowed; a section never contains the tag
    or heading of another one.

    Args:
        config: The settings.

    Raises:
        ConfigError: The settings have an invalid name, or a name twice.
    """

    config_class = FormatConfig

    def __init__(self, config: FormatConfig | None = None) -> None:
        self.config = config or FormatConfig()
        self._is_graded = self.config.credit == "graded"
        self._find = _tags if self.config.style == "tags" else _headings
        self._allow_outside = self.config.allow_outside
        self._allow_empty = self.config.allow_empty
        self._sections = self.config.sections
        wrong = _wrong_names(self._sections) if self._sections else ""
        if wrong:
            raise ConfigError(f"sections of environment 'format' {wrong}")

    def read_row(self, columns: Columns, row: int) -> FormatRow:
        """Return the names of sections and their required contents.

        Raises:
            MessageLogError: There are none, or a name is invalid.
        """
        given = columns if isinstance(columns, Mapping) else {}
        names = given.get("sections")
        names = self._sections if names is None else names
        wrong = _wrong_names(names)
        if wrong:
            raise MessageLogError(
                f"metadata[{row}]['sections'] {wrong}; the setting sections is for "
                "rows without the column"
            )
        contents = given.get("contents") or {}
        texts = isinstance(contents, Mapping) and all(
            # Data sets with different names per row fill the missing ones with None.
            name in names or text is None
            for name, text in contents.items()
        )
        kept = {n: t for n, t in contents.items() if t is not None} if texts else {}
        if not texts or not all(isinstance(text, str) for text in kept.values()):
            raise MessageLogError(
                f"metadata[{row}]['contents'] must be texts by names of its sections "
                f"{list(names)}: got {contents!r:.80}"
            )
        return FormatRow(tuple(names), kept)

    def check(self, given: Given[FormatRow]) -> Verdict:
        """Compare the sections of a response with the required ones."""
        task, text = given.task, given.response
        found = list(self._find(text, task.sections))
        wrong = dict(self._wrong_sections(task, found))
        rest = "" if self._allow_outside else _outside(text, found)
        if not wrong and not rest:
            return Verdict(1.0, "correct", _shown(found))
        reasons = [*wrong.values(), *([rest] if rest else [])]
        share = 1.0 - len(wrong) / len(task.sections)
        score = _FOR_SECTIONS * share if self._is_graded else 0.0
        return Verdict(score, f"incorrect: {reasons[0]}", _shown(found))

    def _wrong_sections(
        self, task: FormatRow, found: Sequence[_Found]
    ) -> Iterator[tuple[str, str]]:
        """Yield the wrong sections, each with the reason."""
        reached = 0
        for name in task.sections:
            here = [section for section in found if section.name == name]
            if len(here) != 1:
                yield name, f"section {name!r} must occur once: found {len(here)}"
                continue
            section = here[0]
            if section.begin < reached:
                yield name, f"section {name!r} must come after those before it"
                continue
            reached = section.end
            content = section.content.strip()
            wanted = task.contents.get(name)
            if wanted is not None and content != wanted.strip():
                yield name, f"section {name!r} must hold what was asked for"
            elif wanted is None and not self._allow_empty and not visible(content):
                yield name, f"section {name!r} is empty"


def _tags(text: str, names: Sequence[str]) -> Iterator[_Found]:
    """Yield the sections of a text; unclosed or nested tags form none."""
    marks = list(re.finditer(f"<(/?)({'|'.join(map(re.escape, names))})>", text))
    paired: set[int] = set()
    for place, (first, second) in enumerate(pairwise(marks)):
        opens, name = first.group(1) == "", first.group(2)
        if opens and second.group(1) and second.group(2) == name:
            paired |= {place, place + 1}
            content = text[first.end() : second.start()]
            yield _Found(name, content, first.start(), second.end())
    for place, mark in enumerate(marks):
        if place not in paired:
            # A stray tag counts as an extra section, so that it makes the format wrong.
            yield _Found(mark.group(2), "", mark.start(), mark.start())


def _headings(text: str, names: Sequence[str]) -> Iterator[_Found]:
    """Yield the sections of a text; each ends where the next heading begins."""
    named = "|".join(map(re.escape, names))
    marks = list(re.finditer(rf"^# ({named})[ \t]*$", text, re.MULTILINE))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    for mark, end in zip(marks, ends, strict=True):
        yield _Found(mark.group(1), text[mark.end() : end], mark.start(), end)


def _outside(text: str, found: Sequence[_Found]) -> str:
    """Return the problem with text outside of sections; empty: none."""
    at = 0
    for section in sorted(found, key=lambda section: section.begin):
        if text[at : section.begin].strip():
            return "there is text outside of the sections"
        at = max(at, section.end)
    return "there is text outside of the sections" if text[at:].strip() else ""


def _shown(found: Sequence[_Found]) -> str | None:
    return found[-1].content.strip() if found else None


def _wrong_names(names: Any) -> str:
    """Return the problem with the names of sections; empty: none."""
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or not names or not all(isinstance(name, str) for name in names):
        return f"must be a list of names, at least one: got {names!r:.80}"
    for name in names:
        if not _NAME.fullmatch(name):
            return f"must be names of letters, digits, - and _: got {name!r:.80}"
    if len(set(names)) < len(names):
        return f"must have each name once: got {list(names)!r:.80}"
    return ""
