"""The regex environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rl_envs.errors import MessageLogError
from rl_envs.limited_calls import Server
from rl_envs.registry import register_env
from rl_envs.worlds.limited_verdict import LimitedConfig, LimitedVerdictEnvironment
from rl_envs.worlds.verdict import Columns, Given, Verdict, last_tagged

__all__ = ["RegexConfig", "RegexEnvironment", "RegexRow"]

_SERVER = Server(
    Path(__file__).with_name("match_process.py"), "tries regular expressions"
)
_SHOWN = 60


class RegexConfig(LimitedConfig):
    """Settings of the regex environment."""

    mode: Literal["fullmatch", "search"] = "fullmatch"
    """Kind of match. `fullmatch`: of the whole text. `search`: of a part of it."""
    max_pattern_characters: int = Field(1000, ge=1)
    """Maximum length of an expression in a response; a longer one earns nothing, as it
    may just list all texts of its task."""


@dataclass(frozen=True, slots=True)
class RegexRow:
    """Requirements of a row."""

    pattern: str | None
    """Expression that the response must match; None: the response is one itself."""
    matches: tuple[str, ...] = ()
    """Texts that the response's expression must match."""
    rejects: tuple[str, ...] = ()
    """Texts that the response's expression must not match."""


@register_env("regex")
class RegexEnvironment(LimitedVerdictEnvironment[RegexRow]):
    """Tries a regular expression on texts, one of which is the response.

    A row has the column `pattern`, and the answer must be a text that it matches; or it
    has `matches` and optionally `rejects`, lists of texts, and the answer must be an
    expression that matches all of the former and none of the latter. The answer is the
    stripped content of the last `<answer>` tag or, without one, of the response.
    Expressions are those of Python's `re`; they run in processes with limits on time
    and memory, because some take forever.

    Args:
        config: The settings.
    """

    config_class = RegexConfig

    def __init__(self, config: RegexConfig | None = None) -> None:
        settings = config or RegexConfig()
        super().__init__(settings, _SERVER)
        self._whole = settings.mode == "fullmatch"
        self._max_characters = settings.max_pattern_characters

    def read_row(self, columns: Columns, row: int) -> RegexRow:
        """Return the expression, or the texts.

        Raises:
            MessageLogError: There is neither.
        """
        given = columns if isinstance(columns, Mapping) else {}
        pattern = given.get("pattern")
        if isinstance(pattern, str):
            return RegexRow(pattern)
        matches, rejects = given.get("matches"), given.get("rejects")
        rejects = () if rejects is None else rejects
        if pattern is None and _are_texts(matches) and matches and _are_texts(rejects):
            return RegexRow(None, tuple(matches), tuple(rejects))
        raise MessageLogError(
            f"metadata[{row}] must have the column 'pattern', a text, or 'matches', a "
            "list of texts, at least one, and optionally 'rejects': got "
            f"{pattern!r:.80}, {matches!r:.80} and {rejects!r:.80}"
        )

    def request(self, given: Given[RegexRow]) -> Mapping[str, Any]:
        """Return the request to try a response."""
        task, answer = given.task, _answer_in(given.response)
        if task.pattern is not None:
            return self._try(task.pattern, [answer], from_row=True)
        texts = [*task.matches, *task.rejects]
        if len(answer) > self._max_characters:
            # Sent all the same, as each response needs a reply; `verdict` rejects it by
            # its length.
            answer, texts = "", []
        return self._try(answer, texts, from_row=False)

    def row_request(self, task: RegexRow) -> Mapping[str, Any] | None:
        """Return the request to compile the row's expression."""
        if task.pattern is None:
            return None
        return self._try(task.pattern, [], from_row=True)

    def _try(
        self, pattern: str, texts: Sequence[str], *, from_row: bool
    ) -> Mapping[str, Any]:
        return {
            "pattern": pattern,
            "texts": list(texts),
            "whole": self._whole,
            "from_row": from_row,
        }

    def verdict(self, given: Given[RegexRow], reply: Mapping[str, Any]) -> Verdict:
        """Judge whether exactly the required texts are matched."""
        task, answer = given.task, _answer_in(given.response)
        if task.pattern is not None:
            (found,) = reply["found"]
            reason = "correct" if found else "incorrect: the expression does not match"
            return Verdict(float(found), reason, answer)
        if len(answer) > self._max_characters:
            reason = (
                f"incorrect: an expression has at most {self._max_characters} "
                f"characters: got {len(answer)}"
            )
            return Verdict(0.0, reason, answer)
        if "broken" in reply:
            return Verdict(0.0, f"incorrect: {reply['broken']}", answer)
        texts = [(t, True) for t in task.matches] + [(t, False) for t in task.rejects]
        for (text, wanted), found in zip(texts, reply["found"], strict=True):
            if found != wanted:
                said = "matches" if found else "does not match"
                shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
                return Verdict(0.0, f"incorrect: it {said} {shown!r}", answer)
        return Verdict(1.0, "correct", answer)


def _are_texts(given: Any) -> bool:
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    return is_list and all(isinstance(text, str) for text in given)


def _answer_in(response: str) -> str:
    tagged = last_tagged(response)
    return (response if tagged is None else tagged).strip()
