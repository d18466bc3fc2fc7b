"""What can be known to be wrong about a configuration before anything is loaded."""

from __future__ import annotations

from rl_algorithms.data.sources import check_sources
from rl_algorithms.trainers.config import TrainerConfig
from rl_envs.registry import EnvironmentSpec
from rl_models.checkpoint.model_folder import check_model_folder
from rl_models.config import PolicyConfig
from rl_models.policy.preflight import check_training_settings
from rl_models.registry import check_generation_backend

__all__ = ["check_names"]


def check_names(config: TrainerConfig) -> None:
    """Find names that nothing has, and settings that do not fit what they are for.

    It loads no model, starts nothing and imports neither torch nor Ray where the
    settings are those of this project, so a mistake is told at once, also one of the
    last stage of several.

    Raises:
        UserError: A model folder, a backend, an optimizer, a schedule, an environment,
            a world of tasks or a data file.
    """
    for name in ("policy", "critic", "teacher"):
        section = getattr(config, name, None)
        if isinstance(section, PolicyConfig):
            check_model_folder(section.model_name)
            check_training_settings(section)
    generation = config.policy.generation
    if generation is not None and generation.backend != "auto":
        check_generation_backend(generation.backend)
    if config.env is not None:
        EnvironmentSpec.of(config.env.name, config.env.settings)
        config.env.passed()
    check_sources(config.data.sources)
