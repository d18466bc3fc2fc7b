"""`Unscored`: the environment of answers that are not scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_envs.interfaces import EnvironmentInterface, EnvironmentReturn, MessageLog

__all__ = ["Unscored"]


class Unscored(EnvironmentInterface[Any]):
    """Ends each conversation after its first answer; all rewards are 0."""

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Any]
    ) -> EnvironmentReturn[Any]:
        """End the conversations."""
        size = len(message_log_batch)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * size,
            metadata=list(metadata),
            next_stop_strings=[None] * size,
            rewards=torch.zeros(size),
            # Without an environment nobody could respond to an answer.
            terminateds=torch.ones(size, dtype=torch.bool),
            answers=None,
        )
