"""Finding the answer in a response: candidate texts, the best first."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["answers_in", "boxed_answer", "boxed_answers"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
# Text between two boxes that form one answer.
_JOINED = re.compile(r"[\s$.]*(?:,|;|and|or|\\text\{\s*(?:and|or)\s*\})[\s$]*|[\s$]*")
_MARK = re.compile(r"####|(?i:\banswer(?:\s+is\b|\s*[:=]|\s+would be\b)\s*:?)")
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$(?!\s*\d[\d,.]*\s+[A-Za-z])((?:\\.|[^$\\\n])+)\$"
    r"|\\\[(.+?)\\\]|\\\((.+?)\\\)",
    re.DOTALL,
)
_PAIR_JOIN = re.compile(r"\s*(?:,|;|,?\s*\band\b|,?\s*\bor\b)\s*")
_SENTENCE_END = re.compile(r"(?<=[\w)}\]$%*!])[.?!](?:\s|\*|$)")
_CLAUSE_END = re.compile(
    r",?\s+(?:because|since|so|which|where|as|but|when|if|for|by)\b|\s\(|,\s+[a-z]"
)
_NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?(?:[$€£]\s?)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.?\d+)"
    r"(?:\s*[-+*/^\u00d7\u00f7]\s*\d+(?:\.\d+)?|[eE][-+]?\d+)*\s*(?:%|percent\b)?"
)
# Limits for hostile responses: the work stays linear in their length.
_MAX_LINE = 200
_MAX_BOXES = 100


def answers_in(response: str) -> Iterator[tuple[str, bool]]:
    """Yield candidate texts, each with True if words count as an answer there.

    A boxed answer is the only candidate. Otherwise the candidates are the text after
    "answer is" or, without it, a short response as a whole and the last formula or, if
    there is none, the last number.
    """
    boxed = boxed_answer(response)
    if boxed is not None:
        yield boxed, True
        return
    if _BOX.search(response):
        # The response was cut off within its box, so there is no final answer.
        return
    marks = list(_MARK.finditer(response))
    if marks:
        yield from _after_mark(response[marks[-1].end() :])
        return
    line = response.strip()
    if len(line) <= _MAX_LINE and "\n" not in line:
        yield line, True
    formula = _last_formula(response)
    if formula is not None:
        yield formula, True
        return
    numbers = [match.group() for match in _NUMBER.finditer(response)]
    if numbers:
        yield numbers[-1], False


def boxed_answer(text: str) -> str | None:
    """Return the content of the last box, joined with those directly before it."""
    starts = list(_BOX.finditer(text))[-_MAX_BOXES:]
    boxes = [box for start in starts if (box := _box_at(text, start)) is not None]
    if not boxes:
        return None
    first, last = len(boxes) - 1, boxes[-1]
    contents = [last[2]]
    while first and _JOINED.fullmatch(text[boxes[first - 1][1] : boxes[first][0]]):
        first -= 1
        contents.insert(0, boxes[first][2])
    # A repeated box is one answer.
    return ", ".join(dict.fromkeys(contents))


def boxed_answers(text: str) -> list[str]:
    """Return the content of each of the last boxes that are complete, in order."""
    starts = list(_BOX.finditer(text))[-_MAX_BOXES:]
    found = (_box_at(text, start) for start in starts)
    return [box[2] for box in found if box is not None]


def _box_at(text: str, start: re.Match[str]) -> tuple[int, int, str] | None:
    # By counting, as a regular expression cannot match nested braces.
    depth = 0
    for place in range(start.end(), len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if not depth:
                return start.start(), place + 1, text[start.end() + 1 : place].strip()
    return None


def _after_mark(rest: str) -> Iterator[tuple[str, bool]]:
    """Yield the text after "answer is" as line, sentence, clause and number."""
    rest = rest.strip().lstrip("*:").strip()
    line = rest.partition("\n")[0].strip().strip("*").strip()
    sentence = _SENTENCE_END.split(line, maxsplit=1)[0]
    clause = _CLAUSE_END.split(sentence, maxsplit=1)[0]
    for text in dict.fromkeys((line, sentence, clause)):
        yield text, True
    formula = _last_formula(rest)
    if formula is not None:
        yield formula, True
        return
    number = _NUMBER.search(sentence)
    if number:
        yield number.group(), False


def _last_formula(text: str) -> str | None:
    found = [
        (match.start(), match.end(), next(part for part in match.groups() if part))
        for match in _FORMULA.finditer(text)
    ]
    if not found:
        return None
    # "$x = 1$ and $y = 2$" is one answer.
    first = len(found) - 1
    contents = [found[first][2]]
    while first and _PAIR_JOIN.fullmatch(text[found[first - 1][1] : found[first][0]]):
        first -= 1
        contents.insert(0, found[first][2])
    return ", ".join(contents)
