"""Check an evaluation before anything is loaded."""

from __future__ import annotations

from rl_algorithms.evaluation.config import EvalConfig
from rl_distributed.errors import ConfigError
from rl_models.registry import check_generation_backend

__all__ = ["check_evaluation"]


def check_evaluation(
    config: EvalConfig, *, has_scorer: bool = False, has_data: bool = False
) -> None:
    """Check the configuration without a model or data, importing neither torch nor Ray.

    Args:
        config: Configuration of the evaluation.
        has_scorer: Whether a function or an object scores the answers.
        has_data: Whether prompts are given besides the configuration.

    Raises:
        ConfigError: Nothing scores the answers, or there are no prompts.
        RegistryError: The generation backend is unknown.
    """
    if not has_scorer and config.env is None:
        raise ConfigError(
            "an evaluation needs something that rewards answers: pass reward_fn or "
            "environment, or name an environment in the section env (--env)"
        )
    if not has_data and not config.datasets:
        raise ConfigError(
            "there is nothing to ask: pass a dataset, or name one in the section "
            "datasets (--data)"
        )
    if config.generation.backend != "auto":
        check_generation_backend(config.generation.backend)
