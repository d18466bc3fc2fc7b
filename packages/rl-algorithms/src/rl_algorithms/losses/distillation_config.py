"""Settings of the distillation loss. Imports neither torch nor a model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rl_distributed.config import Config

__all__ = ["DistillationLossConfig", "KLDirection"]

KLDirection = Literal["forward", "reverse", "mixed", "jsd"]


class DistillationLossConfig(Config):
    """Options of `DistillationLossFn`: the divergence, and the tokens that it covers.

    The teacher provides its k most likely tokens. The others are treated as follows:

    | setting | teacher | student |
    |---|---|---|
    | (none) | renormalized over the k tokens | renormalized over the k tokens |
    | `zero_outside_topk` | renormalized over the k tokens, 0 outside | all tokens |
    | `bucket_outside_topk` | the k tokens, and all others as one event | the same |
    """

    kl_type: KLDirection = "forward"
    """Divergence. `forward`: KL(teacher || student); `reverse`: KL(student || teacher);
    `mixed`: a weighted sum of both; `jsd`: the generalized Jensen-Shannon divergence of
    GKD."""
    mixed_kl_weight: float = Field(default=0.5, ge=0.0, le=1.0)
    """Weight of the forward part in `mixed` and `jsd`."""
    zero_outside_topk: bool = False
    """Whether the teacher's probability outside its k tokens counts as 0; the reverse
    part then penalizes a student that puts mass there."""
    bucket_outside_topk: bool = False
    """Whether all tokens outside count as one event, whose probability is exact for
    both; the divergence is then a lower bound of that over all tokens."""

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
