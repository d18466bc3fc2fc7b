"""`check_estimator`: check advantages against a reference and for independence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.testing.batches import RewardBatch
from rl_algorithms.testing.examples import ConformanceError, for_examples

__all__ = ["ESTIMATOR_CHECKS", "check_estimator"]

Reference = Callable[[RewardBatch], Any]
_JUNK = 1e9


class _Case:
    """An estimator under test."""

    def __init__(
        self, estimator: Any, reference: Reference, tolerance: float, local: bool
    ) -> None:
        self.reference, self.tolerance, self.local = reference, tolerance, local
        self._estimator = estimator

    def run(self, batch: RewardBatch) -> Tensor:
        """Return the advantages, [N] or [N, S]."""
        found: Tensor = self._estimator.compute_advantage(
            batch.rewards, batch.group_index, batch.valid_mask, **batch.extra
        )
        return found.double()

    def close(self, check: str, message: str, got: Tensor, want: Any) -> None:
        """Raise ConformanceError unless the two agree."""
        wanted = torch.as_tensor(want, dtype=torch.float64)
        near = got.shape == wanted.shape and torch.allclose(
            got, wanted, rtol=self.tolerance, atol=self.tolerance
        )
        if not near:
            raise ConformanceError(
                check, f"{message}: got {got.tolist()}, not {wanted.tolist()}"
            )


def check_estimator(
    estimator: Any,
    make_batch: Callable[[int], RewardBatch],
    reference: Reference,
    *,
    checks: Collection[str] | None = None,
    local: bool = True,
    tolerance: float = 1e-6,
    num_examples: int = 40,
) -> None:
    """Check an advantage estimator against its paper's formula and for independence.

    Args:
        estimator: Object with `compute_advantage`, see `AdvantageEstimator`.
        make_batch: Function of a seed that returns rewards; see `reward_batch`.
        reference: Function that returns the advantages of a batch as a list with an
            entry (or a list) per row, computed row by row in float64, 0 for invalid
            rows.
        checks: Names from `ESTIMATOR_CHECKS`; default all.
        local: Whether a group's advantages depend on that group alone; false if they
            are normalised over the batch.
        tolerance: Absolute and relative tolerance.
        num_examples: Number of batches per check.

    Raises:
        ConformanceError: A check failed; `.check` names it.
    """
    case = _Case(estimator, reference, tolerance, local)
    for name in ESTIMATOR_CHECKS if checks is None else checks:
        check = _CHECKS[name]
        for_examples(
            lambda seed, random, check=check: check(case, make_batch(seed), random),  # type: ignore[misc]
            num_examples,
        )


def _value(case: _Case, batch: RewardBatch, random: Random) -> None:
    """Check that the advantages are those of the reference."""
    message = "the advantages are not those of the reference"
    case.close("value", message, case.run(batch), case.reference(batch))


def _row_order(case: _Case, batch: RewardBatch, random: Random) -> None:
    """Check that the order of rows has no effect."""
    order = list(range(len(batch.rewards)))
    random.shuffle(order)
    index = torch.tensor(order)
    got = case.run(batch.rows(index))
    message = "the advantages depend on the order of rows"
    case.close("row_order", message, got, case.run(batch)[index])


def _group_names(case: _Case, batch: RewardBatch, random: Random) -> None:
    """Check that the numbering of the groups has no effect."""
    names = random.sample(range(-50, 1000), int(batch.group_index.max()) + 1)
    renamed = torch.tensor(names)[batch.group_index]
    other = RewardBatch(batch.rewards, renamed, batch.valid_mask, batch.extra)
    message = "the advantages depend on the numbers of the groups"
    case.close("group_names", message, case.run(other), case.run(batch))


def _other_groups(case: _Case, batch: RewardBatch, random: Random) -> None:
    """Check that a group's advantages do not depend on the rest of the batch."""
    if not case.local:
        return
    group = random.randrange(int(batch.group_index.max()) + 1)
    index = (batch.group_index == group).nonzero().flatten()
    message = "the advantages of a group depend on the other groups"
    got = case.run(batch.rows(index))
    case.close("other_groups", message, got, case.run(batch)[index])


def _rows_that_do_not_count(case: _Case, batch: RewardBatch, random: Random) -> None:
    """Check that invalid rows have advantage 0 and rewards without effect."""
    out = batch.valid_mask == 0
    got = case.run(batch.map_rewards(lambda r: torch.where(out, _JUNK, r)))
    message = "rows that do not count take part"
    case.close("rows_that_do_not_count", message, got, case.run(batch))
    if bool(got[out].any()):
        raise ConformanceError(
            "rows_that_do_not_count",
            f"rows that do not count must have advantage 0: got {got[out].tolist()}",
        )


def _all_masked(case: _Case, batch: RewardBatch, random: Random) -> None:
    """Check that every advantage is exactly 0 if no row is valid."""
    none = torch.zeros_like(batch.valid_mask)
    empty = RewardBatch(batch.rewards, batch.group_index, none, batch.extra)
    got = case.run(empty)
    if not bool((got == 0).all()):
        raise ConformanceError(
            "all_masked",
            f"where no row counts all advantages must be 0: got {got.tolist()}",
        )


def _equal_rewards(case: _Case, batch: RewardBatch, random: Random) -> None:
    """Check that equal rewards, rounding included, give finite advantages."""
    # 0.1 and -3.3 have no exact binary form, so their means are rounded.
    value = random.choice([0.0, 0.1, 1.0, -3.3, 1e6])
    got = case.run(batch.map_rewards(lambda r: torch.full_like(r, value)))
    if not bool(got.isfinite().all()):
        raise ConformanceError(
            "equal_rewards",
            f"where all rewards are {value} advantages must be finite: got "
            f"{got.tolist()}",
        )


_CHECKS: Mapping[str, Callable[[_Case, RewardBatch, Random], None]] = {
    "value": _value,
    "row_order": _row_order,
    "group_names": _group_names,
    "other_groups": _other_groups,
    "rows_that_do_not_count": _rows_that_do_not_count,
    "all_masked": _all_masked,
    "equal_rewards": _equal_rewards,
}
ESTIMATOR_CHECKS = tuple(_CHECKS)
"""Names of the checks of `check_estimator`, in order."""
