"""What a loss may declare about itself, and what holds where it does not."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rl_models.types import LossInputType

__all__ = ["LossTraits"]


@dataclass(frozen=True, slots=True)
class LossTraits:
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

    @classmethod
    def of(cls, loss_fn: object) -> LossTraits:
        """Return what a loss declares, completed by the defaults."""
        # Not `isinstance` of a protocol: from Python 3.12 on it does not see what a
        # wrapper passes on, and pairs would be torn apart without an error.
        names = [field.name for field in fields(cls)]
        return cls(**{n: getattr(loss_fn, n) for n in names if hasattr(loss_fn, n)})
