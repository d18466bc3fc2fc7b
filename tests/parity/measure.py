"""The distance of a cell from its reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from parity.cells import LAYOUTS, Outcome, reference, run_rank
from parity.ranks import RankProcesses

__all__ = ["Difference", "Matrix"]

# Some gradients are 0 in theory, such as the key bias's.
_SMALLEST_GRADIENT = 1e-3
LIMITS = {"loss": 1e-6, "grad_norm": 1e-5, "gradients": 1e-5, "weights": 1e-6}


@dataclass(frozen=True)
class Difference:
    """Largest differences of a cell from plain transformers."""

    loss: float
    grad_norm: float
    """Relative."""
    gradients: float
    """Relative to the largest entry of each gradient."""
    weights: float

    @classmethod
    def of(cls, found: Outcome, wanted: Outcome) -> Difference:
        """Compare; every parameter must exist under its name."""
        assert found.gradients.keys() == wanted.gradients.keys()
        assert found.weights.keys() == wanted.weights.keys()
        gradients = [
            (found.gradients[name] - value).abs().max()
            / value.abs().max().clamp(min=_SMALLEST_GRADIENT)
            for name, value in wanted.gradients.items()
        ]
        weights = [
            (found.weights[name] - value).abs().max()
            for name, value in wanted.weights.items()
        ]
        return cls(
            abs(found.loss - wanted.loss),
            abs(found.grad_norm / wanted.grad_norm - 1),
            float(max(gradients)),
            float(max(weights)),
        )

    @classmethod
    def worst(cls, found: Iterable[Difference]) -> Difference:
        """Return the element-wise maximum."""
        rows = [tuple(getattr(one, name) for name in LIMITS) for one in found]
        return cls(*(max(column) for column in zip(*rows, strict=True)))

    def complaint(self) -> str | None:
        """Return the differences outside their limits; None if there are none."""
        outside = [
            f"{name} {getattr(self, name):.1e} (limit {limit:g})"
            for name, limit in LIMITS.items()
            if not getattr(self, name) <= limit
        ]
        return ", ".join(outside) or None


class Matrix:
    """Cells of one family.

    Args:
        folder: Its model.
        ranks: Processes that the cells run on.
    """

    def __init__(self, folder: Path, ranks: RankProcesses) -> None:
        self.folder = str(folder)
        self._ranks = ranks
        self._references: dict[tuple[str, bool, bool], Outcome] = {}

    def difference(self, layout: str, loss: str) -> Difference:
        """Run a cell."""
        chosen = LAYOUTS[layout]
        key = loss, chosen.has_adapters, chosen.trains_ends
        if key not in self._references:
            self._references[key] = reference(
                self.folder,
                loss,
                has_adapters=chosen.has_adapters,
                trains_ends=chosen.trains_ends,
            )
        found = self._ranks.run(chosen.num_ranks, run_rank, self.folder, chosen, loss)
        return Difference.of(found, self._references[key])
