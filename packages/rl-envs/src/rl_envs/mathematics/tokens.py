"""Tokenizer shared by LaTeX, plain and Python notation."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from rl_envs.mathematics.names import (
    CONSTANTS,
    FUNCTIONS,
    GREEK,
    SHORT_WORDS,
    SYMPY_NAMES,
)
from rl_envs.mathematics.values import Unreadable

__all__ = ["Token", "lowered", "tokenize"]

# No answer is longer, and some of the expressions below are quadratic.
_MAX_CHARACTERS = 4000
_REPLACED = {
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\N{MULTIPLICATION SIGN}": r"\times ",
    "\N{MIDDLE DOT}": r"\cdot ",
    "\N{DOT OPERATOR}": r"\cdot ",
    "\N{DIVISION SIGN}": "/",
    "\N{GREEK SMALL LETTER PI}": r"\pi ",
    "\N{GREEK SMALL LETTER THETA}": r"\theta ",
    "\N{SQUARE ROOT}": r"\sqrt ",
    "\N{INFINITY}": r"\infty ",
    "\N{LESS-THAN OR EQUAL TO}": "<=",
    "\N{GREATER-THAN OR EQUAL TO}": ">=",
    "\N{NOT EQUAL TO}": "!=",
    "\N{UNION}": r"\cup ",
    "\N{INTERSECTION}": r"\cap ",
    "\N{ELEMENT OF}": r"\in ",
    "\N{PLUS-MINUS SIGN}": r"\pm ",
    "\N{EMPTY SET}": r"\emptyset ",
    "\N{DEGREE SIGN}": r"^\circ ",
    "\N{DOUBLE-STRUCK CAPITAL R}": r"\mathbb{R}",
    "**": "^",
    r"\%": "%",
}
_REPLACE = re.compile("|".join(map(re.escape, sorted(_REPLACED, key=len)[::-1])))
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,|\\ )(?=\d{3}(?!\d))")
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_RAISED_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_ROW = "¶"
# Commands without an effect on the meaning.
_LAYOUT = re.compile(
    r"\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr)(?![a-zA-Z])\.?"
    r"|\\(?:displaystyle|textstyle|quad|qquad|limits|nolimits)(?![a-zA-Z])"
    r"|\\[,;:!]|\\ |~|\\(?:phantom|hspace|vspace)\{[^{}]*\}"
    r"|\\(?:mathbf|boldsymbol|mathit|bf|bm|mathsf)(?![a-zA-Z])"
)
_TEXT = r"\\(?:text(?:bf|it|rm|sf|normal|tt)?|mbox|hbox|mathrm|operatorname)\*?"
_TOKEN = re.compile(
    rf"(?P<space>\s+)|(?P<text>{_TEXT}\s*\{{(?:[^{{}}]*)\}})"
    r"|\\(?P<begin>begin\{[a-zA-Z]+\*?\}(?:\{[clr|]+\})?)"
    r"|\\(?P<finish>end\{[a-zA-Z]+\*?\})"
    r"|(?P<number>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?"
    r"|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<command>\\[a-zA-Z]+)|(?P<word>[^\W\d_]+)"
    rf"|(?P<sign>\\[{{}}$|]|<=|>=|!=|==|[-+*/^_!()\[\]{{}}|,;:=<>'%$€£¢&.\"{_ROW}])"
)
_OPENING, _CLOSING = ("(", "[", r"\{"), (")", "]", r"\}")
_KNOWN = GREEK | FUNCTIONS.keys() | CONSTANTS.keys()
_MAX_PRODUCT_LETTERS = 3


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of text and its kind."""

    kind: str
    """`number`, `letter` (one variable), `name` (a function or constant), `words` (no
    formula), `command`, `text`, `begin`, `finish`, `sign` or `end`."""
    text: str
    spaced: bool = False
    """True if preceded by a space."""


def tokenize(text: str) -> list[Token]:
    """Split an answer without delimiters into tokens; the last is `end`.

    Raises:
        Unreadable: A character is unknown, or there are too many.
    """
    if len(text) > _MAX_CHARACTERS:
        raise Unreadable(f"it is longer than {_MAX_CHARACTERS} characters")
    tokens: list[Token] = []
    place, spaced, depth = 0, False, 0
    text = _prepared(text)
    while place < len(text):
        found = _TOKEN.match(text, place)
        # Not skipped: an answer must be understood as a whole.
        if found is None:
            raise Unreadable(f"{text[place]!r} is not known in an answer")
        kind, piece, place = found.lastgroup or "", found.group(), found.end()
        if kind == "space":
            spaced = True
            continue
        if kind == "number" and "," in piece:
            # Within brackets a comma separates values; outside it groups thousands.
            if depth:
                piece = piece.partition(",")[0]
                place = found.start() + len(piece)
            piece = piece.replace(",", "")
        depth += _depth(piece, tokens)
        tokens.extend(_classified(kind, piece, spaced))
        spaced = False
    tokens.append(Token("end", "", spaced))
    return tokens


def lowered(text: str) -> str:
    """Write raised characters as powers: `x^2` for x², `10^{12}` for 10¹²."""
    return _RAISED_RUN.sub(_power, text)


def _power(run: re.Match[str]) -> str:
    # One exponent for all, as ^1^2 is ^1; braces cannot stand within `\text{cm²}`.
    digits = run.group().translate(_RAISED)
    return f"^{digits}" if len(digits) == 1 else f"^{{{digits}}}"


def _prepared(text: str) -> str:
    # NFC and not NFKC, which would turn x² into x2.
    text = unicodedata.normalize("NFC", text)
    text = _THOUSANDS.sub(",", text)
    if r"\begin" not in text:
        # Commands with a doubled backslash, as after two rounds of JSON escaping.
        text = re.sub(r"\\\\(?=[a-zA-Z])", lambda _: "\\", text)
    # A sign of its own, since `\\` would be taken for the start of a command.
    text = text.replace("\\\\", f" {_ROW} ")
    text = _REPLACE.sub(lambda match: _REPLACED[match.group()], text)
    return _LAYOUT.sub(" ", text)


def _depth(piece: str, before: list[Token]) -> int:
    if piece in _OPENING:
        return 1
    if piece in _CLOSING:
        return -1
    # A plain brace is a group after a command, `^` or `_`, and a set otherwise.
    starts = not before or before[-1].text in (",", "=", "(", "[", "{", r"\in")
    return int(piece == "{" and starts)


def _classified(kind: str, piece: str, spaced: bool) -> list[Token]:
    if kind == "word":
        return _word(piece, spaced)
    if kind == "text":
        kind, piece = _text(piece)
    elif kind in ("begin", "finish"):
        piece = piece[piece.index("{") + 1 : piece.index("}")].rstrip("*")
    return [Token(kind, piece, spaced)]


def _text(piece: str) -> tuple[str, str]:
    """Return the kind and the content of an upright text."""
    inner = piece[piece.index("{") + 1 : -1].strip()
    if inner in FUNCTIONS:
        return "name", inner
    # Upright e and i are the constants.
    if inner in ("e", "i") and piece.startswith(r"\mathrm"):
        return "letter", inner
    return "text", inner


def _word(piece: str, spaced: bool) -> list[Token]:
    if piece in _KNOWN:
        return [Token("name", piece, spaced)]
    if (
        len(piece) > _MAX_PRODUCT_LETTERS
        or piece.lower() in SHORT_WORDS
        or piece in SYMPY_NAMES
    ):
        return [Token("words", piece, spaced)]
    # Adjacent letters are a product of variables.
    others = [Token("letter", letter) for letter in piece[1:]]
    return [Token("letter", piece[0], spaced), *others]
