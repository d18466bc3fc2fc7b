"""Several reward functions called as one, each with a named reward.

```python
FunctionalRewardWrapper([correct, (short, 0.1)])    # reward/correct, reward/short
```
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rl_envs.errors import RewardError, RewardValueError
from rl_envs.rewards.call import RewardCall, Score
from rl_envs.rewards.rows import RewardRows
from rl_envs.rewards.signature import RewardFn

__all__ = ["RewardFns", "RewardList", "build_reward_call"]

RewardFns: TypeAlias = (
    RewardFn | Sequence[RewardFn | tuple[RewardFn, float]] | Mapping[RewardFn, float]
)
"""A function, a list of functions (each with or without a weight), or weights by
function."""


class RewardList:
    """Calls several reward functions on the same rows.

    A row's score maps each function's name to its weighted reward, or `name.key` if a
    function returns several, so that the sum over names is the weighted sum. A None
    means that this reward does not apply to the row; if none applies, the row is not
    scored. Functions with the same name are numbered.

    Args:
        fns: The functions.
        **settings: As for `RewardCall`.

    Raises:
        RewardError: There is none, or a weight is not finite.
        RewardSignatureError: A function's parameters cannot be filled.
    """

    def __init__(self, fns: RewardFns, **settings: Any) -> None:
        self._parts = _named_parts(_pairs(fns), settings)
        self.name = "+".join(self._parts)

    @property
    def batched(self) -> bool:
        """True if any function takes lists."""
        return any(call.batched for call, _ in self._parts.values())

    @property
    def needs_messages(self) -> bool:
        """True if any function may need messages instead of texts."""
        return any(call.needs_messages for call, _ in self._parts.values())

    @property
    def taken(self) -> frozenset[str]:
        """Columns that all functions receive as prompt or response."""
        return frozenset.intersection(*(call.taken for call, _ in self._parts.values()))

    def __call__(self, rows: RewardRows) -> list[Score]:
        """Score a batch; one score per row.

        Raises:
            RewardError: As `RewardCall`.
        """
        results: list[dict[str, float | None]] = [{} for _ in range(len(rows))]
        for name, (call, weight) in self._parts.items():
            scores = call(rows)
            # The keys of all rows: an unscored row must have the same names as the
            # others.
            keys = dict.fromkeys(k for s in scores if isinstance(s, dict) for k in s)
            for result, score in zip(results, scores, strict=True):
                result.update(_weighted(name, list(keys), score, weight))
        return list(results)


def _weighted(
    name: str, keys: Sequence[str], score: Score, weight: float
) -> dict[str, float | None]:
    """Return the rewards of one function for one row, by name."""
    if not keys and not isinstance(score, dict):
        return {name: None if score is None else weight * score}
    if isinstance(score, float):
        raise RewardValueError(
            f"reward function {name!r} returned numbers for some rows and mappings for "
            "others; return one kind"
        )
    parts = dict.fromkeys(keys) if score is None else score
    return {
        f"{name}.{key}": None if part is None else weight * part
        for key, part in parts.items()
    }


def _pairs(fns: RewardFns) -> list[tuple[RewardFn, float]]:
    if isinstance(fns, Mapping):
        return list(fns.items())
    given = fns if isinstance(fns, Sequence) else [fns]
    return [item if isinstance(item, tuple) else (item, 1.0) for item in given]


def _named_parts(
    pairs: Sequence[tuple[RewardFn, float]], settings: Mapping[str, Any]
) -> dict[str, tuple[RewardCall, float]]:
    if not pairs:
        raise RewardError(
            "reward functions must be at least one: got an empty list; give functions, "
            "or (function, weight) pairs"
        )
    parts: dict[str, tuple[RewardCall, float]] = {}
    for fn, weight in pairs:
        call = RewardCall(fn, **settings)
        # A bool is an int, but as a weight it is a mistake.
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not (number and math.isfinite(weight)):
            raise RewardError(
                f"the weight of reward function {call.name!r} must be a finite number: "
                f"got {weight!r}"
            )
        name, count = call.name, 2
        while name in parts:
            name, count = f"{call.name}_{count}", count + 1
        parts[name] = (call, float(weight))
    return parts


def build_reward_call(
    fn: RewardFns, name: str | None = None, **settings: Any
) -> RewardCall | RewardList:
    """Create a callable that scores rows with one or more functions.

    Args:
        fn: The function or functions.
        name: Name in messages and metrics; None: derived from the functions.
        **settings: As for `RewardCall`.

    Raises:
        RewardError: They cannot be called as reward functions.
    """
    # A text is a sequence, too; as a single function it gets the better message.
    if isinstance(fn, (Mapping, Sequence)) and not isinstance(fn, str):
        calls = RewardList(fn, **settings)
        calls.name = name or calls.name
        return calls
    return RewardCall(fn, name, **settings)
