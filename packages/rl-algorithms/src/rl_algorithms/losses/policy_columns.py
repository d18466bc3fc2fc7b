"""The columns of the clipped policy-gradient loss."""

from __future__ import annotations

from typing import Annotated, NotRequired

from torch import Tensor

from rl_algorithms.losses.columns import LossColumns
from rl_algorithms.losses.kept_rows import KeptRows

__all__ = ["COLUMNS", "ClippedPGLossDataDict"]


class ClippedPGLossDataDict(KeptRows):
    """Columns of `ClippedPGLossFn`, which says when it needs the optional ones."""

    advantages: Annotated[
        Tensor,
        "[B] or [B, S]; compute it with an estimator of rl_algorithms.advantages",
    ]
    prev_logprobs: NotRequired[
        Annotated[Tensor, "[B, S] before the step; take it from policy.get_logprobs"]
    ]
    generation_logprobs: NotRequired[
        Annotated[Tensor, "[B, S]; have generate return the column logprobs"]
    ]
    reference_policy_logprobs: NotRequired[
        Annotated[
            Tensor,
            "[B, S]; take it from policy.get_reference_policy_logprobs, or set "
            "reference_policy_kl_penalty to 0",
        ]
    ]
    nll_weights: NotRequired[
        Annotated[
            Tensor, "[B]; compute it from the rewards, or set positive_nll_coef to 0"
        ]
    ]


COLUMNS = LossColumns(ClippedPGLossDataDict, "ClippedPGLossFn")
