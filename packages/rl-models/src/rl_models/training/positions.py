"""The positions of a micro-batch whose results are needed.

Letters in shapes: b rows, S columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_models.types import (
    InputRows,
)

__all__ = ["needed_for_logprobs", "needed_for_values"]


def needed_for_logprobs(part: InputRows) -> Tensor:
    """Return [b, S - 1] where log-probs are needed: the mask, or else every token."""
    if "token_mask" in part:
        wanted: Tensor = part["token_mask"][:, 1:] != 0
        return wanted
    columns = torch.arange(1, part.columns["input_ids"].shape[1])
    return columns < part.columns["input_lengths"][:, None]


def needed_for_values(part: InputRows) -> Tensor:
    """Return [b, S] where values are needed: the mask, before trained tokens, or all.

    See `PolicyInterface.get_values`.
    """
    if "value_mask" in part:
        wanted: Tensor = part["value_mask"] != 0
        return wanted
    if "token_mask" in part:
        # The value of the state in which a token is chosen stands at the token before.
        before = part["token_mask"][:, 1:] != 0
        return torch.nn.functional.pad(before, (0, 1))
    columns = torch.arange(part.columns["input_ids"].shape[1])
    return columns < part.columns["input_lengths"][:, None]
