"""`MathFormatEnvironment`: rejects answers built to match more than one solution."""

from __future__ import annotations

import re

from pydantic import Field

from rl_distributed.config import Config
from rl_envs.mathematics.extraction import boxed_answers
from rl_envs.registry import register_env
from rl_envs.worlds.verdict import Columns, Given, Verdict, VerdictEnvironment

__all__ = ["MathFormatConfig", "MathFormatEnvironment"]

_ALTERNATIVES = re.compile(r"\b(?:or|either|perhaps|maybe)\b|\\lor\b|\\vee\b|\?")


class MathFormatConfig(Config):
    """Settings of the math_format environment."""

    max_answer_chars: int = Field(default=80, ge=1)
    """Maximum length of the answer in the box, in characters."""
    max_chars_after: int = Field(default=80, ge=0)
    """Maximum number of characters after the box."""


@register_env("math_format")
class MathFormatEnvironment(VerdictEnvironment[None]):
    r"""Rewards 1 for a response with one final answer in `\boxed{}`, else 0.

    The content is not compared: this is the second check of a reward that compares it,
    such as `math`. Several boxes must have equal contents, and the last one must be
    short, near the end, and without alternatives such as "4 or 5".

    Args:
        config: The settings.
    """

    config_class = MathFormatConfig

    def __init__(self, config: MathFormatConfig | None = None) -> None:
        self.config = config or MathFormatConfig()

    def read_row(self, columns: Columns, row: int) -> None:
        """Return nothing: no column is needed."""

    def check(self, given: Given[None]) -> Verdict:
        """Return 1 for one final answer, else 0 with the broken rule."""
        boxes = boxed_answers(given.response)
        problem = self._problem(given.response, boxes)
        answer = boxes[-1] if boxes else None
        return Verdict(float(problem is None), problem or "one final answer", answer)

    def _problem(self, response: str, boxes: list[str]) -> str | None:
        if not boxes:
            return "no answer in a box"
        if len({"".join(box.split()) for box in boxes}) > 1:
            return f"{len(boxes)} boxes with different answers"
        answer = boxes[-1]
        if not answer or len(answer) > self.config.max_answer_chars:
            return f"an answer of {len(answer)} characters"
        if _ALTERNATIVES.search(answer):
            return "an answer with alternatives"
        after = response[response.rindex(answer) + len(answer) :].strip("} \n$.")
        if len(after) > self.config.max_chars_after:
            return f"{len(after)} characters after the answer"
        return None
