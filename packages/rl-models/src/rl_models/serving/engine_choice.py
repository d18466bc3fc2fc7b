"""The choice of a server's engine for the setting `auto`."""

from __future__ import annotations

import logging

from rl_models.generation.choice import has_vllm
from rl_models.serving.config import ServeConfig

__all__ = ["with_engine"]

logger = logging.getLogger(__name__)


def with_engine(config: ServeConfig) -> ServeConfig:
    """Return the settings with `auto` replaced by an engine's name.

    vLLM is chosen if it is installed, or if a setting needs it, in which case it will
    be installed.
    """
    if config.engine != "auto":
        return config
    if config.of_vllm_alone() or has_vllm():
        return config.model_copy(update={"engine": "vllm"})
    logger.warning(
        "vLLM is not installed, so the engine huggingface serves, slower and with "
        "fewer features; --engine vllm installs vLLM first"
    )
    return config.model_copy(update={"engine": "huggingface"})
