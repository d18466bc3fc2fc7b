"""Configuration files of NeMo RL as plain mappings."""

from __future__ import annotations

import os
from typing import Any

from rl_distributed import config
from rl_distributed.config.origins import plain_copy

__all__ = ["load_config", "register_omegaconf_resolvers"]


def load_config(config_path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML file with its `defaults`, and resolve every `${...}`."""
    data: dict[str, Any] = plain_copy(config.load_config(config_path))
    return data


def register_omegaconf_resolvers() -> None:
    """Do nothing: the resolvers `add`, `mul`, `div`, `max` and `min` are built in."""
