"""What a loss may declare about itself, and what holds where it does not."""

from __future__ import annotations

from dataclasses import dataclass

from rl_models.declared import Declared
from rl_models.types import LossInputType

__all__ = ["LossTraits"]


@dataclass(frozen=True)
class LossTraits(Declared):
    """The optional attributes of a `LossFunction`, by the same names.

    A plain function declares none of them.
    """

    input_type: LossInputType = LossInputType.LOGPROB
    """The output of the model that it is computed from."""
    rows_per_group: int = 1
    """Number of consecutive rows that reach it together, in order, as the two of a
    pair."""
    needs_entropy: bool = False
    """Whether a distillation loss reads `student_entropy`."""
