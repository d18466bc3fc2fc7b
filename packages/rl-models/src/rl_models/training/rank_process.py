"""The process of a rank, before its model is loaded."""

from __future__ import annotations

import torch
from transformers.utils import logging as transformers_logging

from rl_models.config import PolicyConfig
from rl_models.training.process_group import Ranks

__all__ = ["prepare_process"]


def prepare_process(config: PolicyConfig) -> Ranks:
    """Set threads and output of this process; return its place among the ranks."""
    ranks = Ranks.from_environment()
    transformers_logging.disable_progress_bar()
    if config.num_threads is not None and ranks.device.type == "cpu":
        torch.set_num_threads(config.num_threads)
    return ranks
