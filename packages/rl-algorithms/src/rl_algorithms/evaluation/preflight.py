"""What can be known to be wrong about an evaluation before anything is loaded."""

from __future__ import annotations

from rl_algorithms.evaluation.config import EvalConfig
from rl_distributed.errors import ConfigError
from rl_models.registry import check_generation_backend

__all__ = ["check_evaluation"]


def check_evaluation(
    config: EvalConfig, *, has_scorer: bool = False, has_data: bool = False
) -> None:
    """Check what needs neither a model nor data; it imports neither torch nor Ray.

    Args:
        config: What is asked, and how.
        has_scorer: Whether a function or an object scores the answers.
        has_data: Whether prompts are given beside the configuration.

    Raises:
        ConfigError: Nothing scores the answers, or nothing is asked.
        RegistryError: There is no generation backend of that name.
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
