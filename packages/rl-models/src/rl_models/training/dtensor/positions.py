"""The positions of a micro-batch whose results are needed.

Letters in shapes: b rows, S columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["needed_for_logprobs", "needed_for_values"]


def needed_for_logprobs(part: Any) -> Tensor:
    """Return [b, S - 1] where log-probs are needed: the mask, or else every token."""
    if "token_mask" in part:
        wanted: Tensor = part["token_mask"][:, 1:] != 0
        return wanted
    columns = torch.arange(1, part["input_ids"].shape[1])
    within: Tensor = columns < part["input_lengths"][:, None]
    return within


def needed_for_values(part: Any) -> Tensor:
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
    columns = torch.arange(part["input_ids"].shape[1])
    within: Tensor = columns < part["input_lengths"][:, None]
    return within
