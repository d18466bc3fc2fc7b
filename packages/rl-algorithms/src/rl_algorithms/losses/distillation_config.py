"""Settings of the loss of distillation. Imports neither torch nor a model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rl_distributed.config import Config

__all__ = ["DistillationLossConfig", "KLDirection"]

KLDirection = Literal["forward", "reverse", "mixed", "jsd"]


class DistillationLossConfig(Config):
    """Options of `DistillationLossFn`: which divergence, and over what.

    The teacher gives its k most probable tokens. What becomes of the others:

    | setting | teacher | student |
    |---|---|---|
    | (none) | renormalised over the k tokens | renormalised over the k tokens |
    | `zero_outside_topk` | renormalised over the k tokens, 0 outside | all tokens |
    | `bucket_outside_topk` | the k tokens, and all others as one | the same |
    """

    kl_type: KLDirection = "forward"
    """`forward`: KL(teacher || student); `reverse`: KL(student || teacher); `mixed`:
    both, weighted; `jsd`: the generalised Jensen-Shannon divergence of GKD."""
    mixed_kl_weight: float = Field(default=0.5, ge=0.0, le=1.0)
    """Weight of the forward part in `mixed` and `jsd`."""
    zero_outside_topk: bool = False
    """The teacher never says what is not among its k tokens: a student that does pays
    for it in the reverse part."""
    bucket_outside_topk: bool = False
    """The tokens outside count as one token, whose probability both have exactly; the
    divergence is then a lower bound of the one over all tokens."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.zero_outside_topk and self.bucket_outside_topk:
            raise ValueError(
                "zero_outside_topk and bucket_outside_topk exclude each other: each "
                "says what the tokens outside the top k are worth; set one of them"
            )
        if self.kl_type == "jsd" and self.mixed_kl_weight in (0.0, 1.0):
            raise ValueError(
                "mixed_kl_weight must be between 0 and 1 for kl_type=jsd, which is 0 "
                f"at both ends: got {self.mixed_kl_weight}; use forward or reverse"
            )
        return self

    @property
    def needs_entropy(self) -> bool:
        """Whether the student's entropy over all tokens is needed."""
        return self.zero_outside_topk and self.kl_type in ("reverse", "mixed")
