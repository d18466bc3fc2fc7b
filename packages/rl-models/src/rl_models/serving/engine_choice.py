"""Which engine serves: what the setting `auto` means."""

from __future__ import annotations

import logging

from rl_models.generation.choice import has_vllm
from rl_models.serving.config import ServeConfig

__all__ = ["with_engine"]

logger = logging.getLogger(__name__)


def with_engine(config: ServeConfig) -> ServeConfig:
    """Return the settings with an engine that is a name.

    vLLM is taken where it is installed, or where a setting needs it, which then has it
    installed.
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
