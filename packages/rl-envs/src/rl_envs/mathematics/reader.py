"""`read_answer`: parses an answer completely, or raises `Unreadable`.

A recursive descent over the tokens, from the loosest to the tightest binding:

```
several   1, 2 and 3
item      a = b < c       a relation, or
side      A \\cup B        sets, or
quantity  5\\text{ cm}     a sum with a unit
sum, term, factor         see `ExpressionReader`
```
Nothing is skipped: a part without meaning makes the whole answer unreadable, because
part of a wrong answer may equal the solution.
"""

from __future__ import annotations

import re

import sympy

from rl_envs.mathematics.expressions import ExpressionReader
from rl_envs.mathematics.names import SCALES, unit_name
from rl_envs.mathematics.tokens import lowered, tokenize
from rl_envs.mathematics.values import (
    Group,
    Quantity,
    Relation,
    SetOperation,
    Unreadable,
    Value,
    Words,
)

__all__ = ["read_answer"]

_SIGNS = {
    "=": "=",
    "==": "=",
    "<": "<",
    "<=": "<=",
    ">": ">",
    ">=": ">=",
    "!=": "!=",
    r"\le": "<=",
    r"\leq": "<=",
    r"\leqslant": "<=",
    r"\lt": "<",
    r"\ge": ">=",
    r"\geq": ">=",
    r"\geqslant": ">=",
    r"\gt": ">",
    r"\ne": "!=",
    r"\neq": "!=",
    r"\approx": "=",
    r"\equiv": "=",
    r"\in": "in",
}
_SET_SIGNS = {
    r"\cup": "union",
    r"\cap": "intersection",
    r"\setminus": "difference",
    r"\backslash": "difference",
}
_CURRENCIES = {r"\$": "dollar", "$": "dollar", "€": "euro", "£": "pound sterling"}
_JOINERS = ("and", "or")
_UNIT_PARTS = re.compile(r"[^\W\d_]+|\^?\s*\{?\s*-?\d+\s*\}?|/|°|%")
_ALPHABETIC = re.compile(r"(?:[^\W\d_]|[\s,.'\u2019!?-])+")
_RUN = re.compile(r"[^\W\d_]{3,}")
_PYTHON = re.compile(r"\*|\b[A-Z][a-zA-Z]*[a-z]\(|\b(?:sqrt|exp|log|pi|oo)\b")
_SPLIT = re.compile(r",|\b(?:and|or)\b")
_PLAIN_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mbox|mathrm)\s*\{([^{}]*)\}")
_FORMULA_WORDS = frozenset(
    [
        "and",
        "pi",
        "sin",
        "cos",
        "tan",
        "log",
        "exp",
        "sqrt",
        "abs",
        "inf",
        "infinity",
        "alpha",
        "beta",
        "gamma",
        "delta",
        "theta",
        "phi",
        "lambda",
        "sigma",
        "omega",
    ]
)


def read_answer(text: str) -> Value:
    """Read an answer in LaTeX, plain or Python notation, or in words.

    Args:
        text: The answer and nothing else, with or without delimiters such as `$`.

    Raises:
        Unreadable: It cannot be read as a whole.
    """
    # Before the words, to which x¹⁰ would belong: raised digits count as letters.
    text = lowered(_without_delimiters(text))
    if not text:
        raise Unreadable("it is empty")
    # Before the formula, in which "fox" would be a product of three letters.
    words = _words_of(text)
    if words is not None:
        return words
    # sympy prints E and I for constants that are variables in handwriting.
    python = "\\" not in text and bool(_PYTHON.search(text))
    reader = _AnswerReader(tokenize(text), python=python)
    value = reader.several()
    reader.expect_end()
    return value


def _without_delimiters(text: str) -> str:
    text = text.strip().strip("*").strip()
    # A single $ is a currency, a pair are delimiters.
    if text.count("$") - text.count(r"\$") == 1:
        text = re.sub(r"(?<!\\)\$", r"\\$", text)
    text = re.sub(r"(?<!\\)\$+", " ", text)
    text = re.sub(r"(?<!\\)\\[\[\]()]", " ", text)
    return re.sub(r"(?<!\.)[.,;]$", "", text.strip()).strip()


def _words_of(text: str) -> Value | None:
    """Return an answer of words only, with at least one of three letters or more."""
    plain = _PLAIN_TEXT.sub(r" \1 ", text).replace(r"\ ", " ").strip()
    if not _ALPHABETIC.fullmatch(plain):
        return None
    if not any(run.lower() not in _FORMULA_WORDS for run in _RUN.findall(plain)):
        return None
    parts = [_words(part) for part in _SPLIT.split(plain) if part.strip()]
    return parts[0] if len(parts) == 1 else Group("", tuple(parts))


def _words(text: str) -> Words:
    # Punctuation, case and a leading article do not change an answer in words.
    found = re.findall(r"\w+", re.sub("['\u2019]", "", text))
    folded = [word.casefold() for word in found]
    if len(folded) > 1 and folded[0] in ("the", "a", "an"):
        folded = folded[1:]
    return Words(" ".join(folded))


class _AnswerReader(ExpressionReader):
    """Reads everything that binds looser than a sum."""

    _depth = 0

    def several(self, *ends: str) -> Value:
        """Read values up to one of the signs, or the end."""
        items = self.items(*ends)
        return items[0] if len(items) == 1 else Group("", tuple(items))

    def items(self, *ends: str) -> list[Value]:
        """Read values separated by commas, "and" or "or"."""
        found: list[Value] = []
        # Known to `_item`: a double sign within brackets is not split there.
        self._depth += 1
        # `[` closes an interval such as `]1, 2[`, but may also open a value.
        while self.peek().kind not in ("end", "finish") and (
            self.peek().text not in ends or self.peek().text == "["
        ):
            found.extend(self._item())
            if not self._separator():
                break
        self._depth -= 1
        return found

    def _separator(self) -> bool:
        seen = False
        while True:
            token = self.peek()
            is_word = token.kind in ("words", "text")
            joins = is_word and token.text.strip(", ").lower() in _JOINERS
            if not joins and token.text not in (",", ";"):
                return seen
            self.take()
            seen = True

    def _item(self) -> list[Value]:
        """Read one value, or two if it has a sign such as `\\pm`."""
        if self._depth > 1:
            # Within brackets, a double sign belongs to the value around them.
            return [self._relation()]
        start, self.num_double_signs = self.place, 0
        first = self._relation()
        if not self.num_double_signs:
            return [first]
        # Read the same tokens again with the lower signs.
        end, self.place = self.place, start
        self.double_sign = -1
        second = self._relation()
        self.double_sign, self.num_double_signs = 1, 0
        # The second reading must consume the same tokens, or the text has two meanings.
        if self.place != end:
            raise Unreadable("it has a double sign in a wrong place")
        return [first, second]

    def _relation(self) -> Value:
        sides, signs = [self._labelled_side()], []
        while self.peek().text in _SIGNS and self.peek().kind in ("sign", "command"):
            signs.append(_SIGNS[self.take().text])
            sides.append(self._side())
        if signs:
            return Relation(tuple(signs), tuple(sides))
        if self.peek().text != ":":
            return sides[0]
        while self.accept(":"):
            sides.append(self._side())
        return Group(":", tuple(sides))

    def _labelled_side(self) -> Value:
        """Read a side, taking `f(x)` before `=` as a name."""
        start = self.place
        if self.peek().kind == "letter" and self.peek(1).text == "(":
            name = self.take().text
            while self.peek().text not in (")", "") and self.peek().kind != "end":
                name += self.take().text
            if self.accept(")") and self.peek().text == "=":
                return sympy.Symbol(f"{name})")
            # It was a product: go back and read it as one.
            self.place = start
        return self._side()

    def _side(self) -> Value:
        value = self._quantity()
        while True:
            token = self.peek()
            name = _SET_SIGNS.get(token.text)
            # Between sets, a capital U stands for the union.
            if token.text == "U" and isinstance(value, Group | SetOperation):
                name = "union"
            if name is None:
                return value
            self.take()
            value = SetOperation(name, (value, self._quantity()))

    def _quantity(self) -> Value:
        token = self.peek()
        if token.text in _CURRENCIES:
            self.take()
            return Quantity(self._scaled(self.sum()), _CURRENCIES[token.text])
        if token.kind == "sign" and token.text == "-" and self.peek(1).text == r"\$":
            self.take()
            self.take()
            return Quantity(-self._scaled(self.sum()), "dollar")
        if token.kind in ("text", "words") and not self.is_call():
            return self._label()
        value = self._scaled(self.sum())
        unit = self._unit()
        return Quantity(value, unit) if unit else value

    def _scaled(self, value: Value) -> Value:
        while (scale := SCALES.get(self.peek().text.lower())) is not None:
            self.take()
            value = self.scalar(value) * scale
        return value

    def _label(self) -> Value:
        """Read leading words: an answer in words, or a name before `=`."""
        parts = []
        while self.peek().kind in ("text", "words", "letter", "number", "name"):
            if self.peek().text.strip(", ").lower() in _JOINERS:
                break
            parts.append(self.take().text)
            self.accept("-")
        label = " ".join(parts).strip()
        letter = label.strip("() ")
        if len(letter) == 1 and letter.isalpha():
            return sympy.Symbol(letter)
        if letter.isdigit():
            return sympy.Integer(letter)
        words = _words(label)
        if not words.text:
            raise Unreadable("a part of it is empty")
        return words

    def _unit(self) -> str:
        parts: list[str] = []
        while True:
            token, after = self.peek(), self.peek(1)
            if token.text == "%" or token.kind in ("words", "text"):
                if token.text.strip(", ").lower() in _JOINERS:
                    break
                parts.extend(_UNIT_PARTS.findall(self.take().text))
            elif self.is_degree():
                self.take_degree()
                parts.append("degree")
            elif parts and token.text == "^" and after.kind == "number":
                self.take()
                parts.append("^" + self.take().text)
            elif parts and token.text == "^" and after.text == "{":
                parts.append(self._braced_power())
            elif parts and token.text == "/":
                parts.append(self.take().text)
            elif parts and (parts[-1] == "/" or "degree" in parts):
                if token.kind != "letter":
                    break
                parts.append(self.take().text)
            else:
                break
        return unit_name([re.sub(r"[\s{}]", "", part) for part in parts])

    def _braced_power(self) -> str:
        self.take()
        return "^" + self.raw_group()
