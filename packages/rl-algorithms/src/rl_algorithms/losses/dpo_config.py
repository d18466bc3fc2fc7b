"""Settings of the DPO loss. Imports neither torch nor a model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rl_distributed.config import Config

__all__ = ["DPOLossConfig"]


class DPOLossConfig(Config):
    """Options of `DPOLossFn`.

    | variant | settings |
    |---|---|
    | DPO (arXiv:2305.18290) | the defaults |
    | cDPO (ericmitchell.ai/cdpo.pdf) | `label_smoothing=0.1` |
    | IPO (arXiv:2310.12036) | `preference_loss=ipo` |
    | length-normalized DPO (arXiv:2411.15124) | `preference_average_log_probs` |
    | plus a term of the chosen, as RPO (arXiv:2404.19733) | `sft_loss_weight=1` |
    """

    reference_policy_kl_penalty: float = Field(default=0.05, gt=0.0)
    """Beta (tau in IPO); larger values keep the policy closer to the reference."""
    preference_loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """Form of the loss. `sigmoid`: the log-sigmoid of the margin; `ipo`: the squared
    distance of the margin to a target, which keeps it finite for answers that are
    always preferred."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Probability that a label is wrong (cDPO); for `sigmoid` only."""
    preference_average_log_probs: bool = False
    """Whether to average log-probs over an answer's tokens instead of summing them, so
    that the length of an answer does not matter."""
    preference_loss_weight: float = Field(default=1.0, ge=0.0)
    """Weight of the preference loss."""
    sft_loss_weight: float = Field(default=0.0, ge=0.0)
    """Weight of the negative log-likelihood of the chosen answers."""
    sft_average_log_probs: bool = False
    """Whether to average that over each answer's tokens instead of summing it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.preference_loss == "ipo" and self.label_smoothing:
            raise ValueError(
                "label_smoothing is defined for preference_loss=sigmoid only: got "
                f"{self.label_smoothing} with ipo; set it to 0"
            )
        if not self.preference_loss_weight and not self.sft_loss_weight:
            raise ValueError(
                "preference_loss_weight and sft_loss_weight are both 0: nothing would "
                "be learned; raise one of them"
            )
        return self
