"""The trainer of reward models.

```
pairs -> rows, chosen and rejected alternating -> value at each last token -> train
```
"""

from __future__ import annotations

from typing import ClassVar

import torch

from rl_algorithms.losses import PreferenceLossFn
from rl_algorithms.rm.config import RMConfig, RMSettings
from rl_algorithms.trainers.pair_trainer import PairTrainer
from rl_models.types import TrainingRows

__all__ = ["RMTrainer"]


class RMTrainer(PairTrainer[RMConfig]):
    """Reward models with the Bradley-Terry likelihood (Ouyang, arXiv:2203.02155)."""

    algorithm: ClassVar[str] = "rm"
    config_class: ClassVar[type[RMConfig]] = RMConfig

    @property
    def _pairs(self) -> RMSettings:
        return self.config.rm

    def _build_loss(self) -> PreferenceLossFn:
        return PreferenceLossFn(self.config.loss_fn)

    def _complete(self, rows: TrainingRows) -> None:
        columns = torch.arange(rows["input_ids"].shape[1])
        is_last = columns == rows["input_lengths"][:, None] - 1
        rows["value_mask"] = is_last.to(torch.float32)
