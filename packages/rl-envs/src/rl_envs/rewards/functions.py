"""Built-in reward functions, for `FunctionalRewardWrapper` or direct calls.

Functions with settings are frozen objects, so that they can be pickled and printed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from rl_envs.errors import RewardError
from rl_envs.rewards.call import RewardCall, Score
from rl_envs.rewards.rows import RewardRows
from rl_envs.rewards.signature import RewardFn

__all__ = [
    "CombinedReward",
    "FormatReward",
    "LengthPenalty",
    "NumericMatch",
    "combine_reward_functions",
    "exact_match",
    "extract_number",
    "numeric_match",
]

# Limits on digits keep the comparison fast, whatever the text.
_NUMBER = re.compile(
    r"[-+]?(?:\d{1,3}(?:,\d{3}){1,20}|\d{1,60})(?:\.\d{1,60})?(?:[eE][-+]?\d{1,3})?"
    r"(?:\s?/\s?\d{1,60})?|[-+]?\.\d{1,60}"
)

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
# Signs of a formula, or a variable next to the number, here replaced by 0.
_FORMULA = re.compile(r"[*^=_<>+/()\[\]{}\\]|0\s?[A-Za-z]\b|\b[A-Za-z]\s?-?0|[-+]\s+0")


def exact_match(response: str, answer: str) -> float:
    """Return 1 if response and answer are equal up to surrounding whitespace."""
    return float(response.strip() == answer.strip())


def extract_number(text: str) -> Decimal | None:
    """Return the last number of a text: `1,234.5`, `-2e3`, `.5` or `3/4`; or None."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    numerator, _, denominator = found[-1].replace(",", "").partition("/")
    try:
        number = Decimal(numerator.strip())
        return number / Decimal(denominator.strip()) if denominator else number
    except (InvalidOperation, ZeroDivisionError):
        return None


def _answer_number(text: str) -> Decimal | None:
    """Return the number in an answer; None: it is no single number."""
    text = _BOXED.sub(r"\1", text.rpartition("####")[2]).replace("$", "")
    numbers = list(_NUMBER.finditer(text))
    if len(numbers) != 1 or _FORMULA.search(_NUMBER.sub("0", text)):
        return None
    return extract_number(numbers[0].group())


@dataclass(frozen=True, slots=True)
class NumericMatch:
    """Returns 1 if the last number of the response is the answer's.

    The answer is a single number, possibly with words or a unit, or follows `####` as
    in GSM8K. Otherwise the row is not scored: 1 is not the answer in `x**2 + 1`.
    """

    tolerance: float = 0.0
    """Maximum difference, relative to the answer, or absolute if it is below 1."""

    def __call__(self, response: str, answer: str | float) -> float | None:
        """Score one response."""
        expected = _answer_number(str(answer))
        if expected is None:
            return None
        found = extract_number(response)
        if found is None:
            return 0.0
        # Decimal throughout: in floats 0.1 + 0.2 would not equal 0.3.
        limit = Decimal(str(self.tolerance)) * max(abs(expected), Decimal(1))
        return float(abs(found - expected) <= limit)


def numeric_match(response: str, answer: str | float) -> float | None:
    """Return 1 if the last number of the response equals the answer's number."""
    return NumericMatch()(response, answer)


@dataclass(frozen=True, slots=True)
class FormatReward:
    """Returns 1 if the stripped response matches a pattern as a whole."""

    pattern: str
    """Regular expression; a dot also matches a newline."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise RewardError(
                f"FormatReward.pattern is not a regular expression: {error} in "
                f"{self.pattern!r}"
            ) from error

    def __call__(self, response: str) -> float:
        """Score one response."""
        return float(bool(re.fullmatch(self.pattern, response.strip(), re.DOTALL)))


@dataclass(frozen=True, slots=True)
class LengthPenalty:
    """Returns 0 up to a length, then falls linearly to -1."""

    free_chars: int
    """Number of characters without a penalty."""
    max_chars: int
    """Number of characters at which the reward reaches -1."""

    def __post_init__(self) -> None:
        if not 0 <= self.free_chars < self.max_chars:
            raise RewardError(
                "LengthPenalty must satisfy 0 <= free_chars < max_chars: got "
                f"{self.free_chars} and {self.max_chars}"
            )

    def __call__(self, response: str) -> float:
        """Score one response."""
        over = (len(response) - self.free_chars) / (self.max_chars - self.free_chars)
        return -min(max(over, 0.0), 1.0)


class CombinedReward:
    """Weighted mean of reward functions; created by `combine_reward_functions`."""

    def __init__(self, parts: Sequence[tuple[RewardCall, float]]) -> None:
        self._parts = list(parts)
        self.__name__ = "+".join(call.name for call, _ in self._parts)

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        """Score a batch.

        Raises:
            RewardError: A part raised, or did not return a single number.
        """
        rows = RewardRows(
            prompts=prompts,
            responses=responses,
            columns=[
                {name: values[row] for name, values in columns.items()}
                for row in range(len(responses))
            ],
            messages=[
                [
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": response},
                ]
                for prompt, response in zip(prompts, responses, strict=True)
            ],
        )
        scores = [(call, weight, call(rows)) for call, weight in self._parts]
        return [
            _weighted([(call.name, w, column[row]) for call, w, column in scores])
            for row in range(len(responses))
        ]


def _weighted(parts: Sequence[tuple[str, float, Score]]) -> float | None:
    total = weights = 0.0
    for name, weight, score in parts:
        if score is None:
            continue
        if isinstance(score, dict):
            raise RewardError(
                f"reward function {name!r} returned several rewards {sorted(score)}; "
                "only functions that return one number can be combined"
            )
        total += weight * score
        weights += weight
    return total / weights if weights else None


def combine_reward_functions(
    reward_functions: Mapping[RewardFn, float] | Sequence[tuple[RewardFn, float]],
) -> CombinedReward:
    """Combine reward functions of any kind into one.

    The result is the weighted mean over the functions that scored the row. A row that
    none of them scored is not scored.

    Args:
        reward_functions: Functions with their weights.

    Raises:
        RewardError: There is none, or a weight is not positive and finite.
    """
    items = reward_functions
    pairs = list(items.items() if isinstance(items, Mapping) else items)
    if not pairs:
        raise RewardError("reward_functions must hold at least one function: got none")
    parts = []
    for fn, weight in pairs:
        call = RewardCall(fn)
        # The result is a mean, which a weight of zero or below would turn around or
        # divide by zero.
        if not (math.isfinite(weight) and weight > 0):
            raise RewardError(
                f"the weight of reward function {call.name!r} must be positive and "
                f"finite: got {weight!r}"
            )
        parts.append((call, float(weight)))
    return CombinedReward(parts)
