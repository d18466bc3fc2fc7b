"""Checks of a configuration before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from rl_algorithms.data.preflight import check_data
from rl_algorithms.data.sources import check_sources
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_distributed.errors import ConfigError
from rl_envs.registry import EnvironmentSpec
from rl_models.checkpoint.model_folder import check_model_folder
from rl_models.config import PolicyConfig
from rl_models.generation.traits import get_generation_traits
from rl_models.policy.preflight import check_policy, check_training_settings
from rl_models.registry import check_generation_backend

__all__ = ["check_names", "check_start", "check_updates_in_flight"]


def check_start(config: TrainerConfig) -> None:
    """Find all mistakes in a run that can be found before anything is loaded.

    This is for a run described by its configuration alone, without data, a reward
    function or an environment passed in from Python.

    Raises:
        UserError: Any error of `check_names`; an impossible size; data or one of their
            columns are missing; nothing scores the answers.
    """
    check_names(config)
    config.plan_batches()
    for section in _policies(config):
        check_policy(section, config.num_workers)
    config.check_scorer(is_given=config.env is not None)
    check_data(config.data, config.kind_of_data())


def check_names(config: TrainerConfig) -> None:
    """Find unknown names and settings that do not fit their component.

    No model is loaded, nothing is started, and for settings of this project neither
    torch nor Ray is imported. A mistake is therefore reported at once, even in the last
    of several stages.

    Raises:
        UserError: A model folder, a backend, an optimizer, a schedule, an environment,
            a world of tasks or a data file is wrong.
    """
    for section in _policies(config):
        check_model_folder(section.model_name)
        check_training_settings(section)
    generation = config.policy.generation
    if generation is not None and generation.backend != "auto":
        check_generation_backend(generation.backend)
    check_updates_in_flight(config)
    if config.env is not None:
        EnvironmentSpec.of(config.env.name, config.env.settings)
        config.env.passed()
    check_sources(config.data.sources)


def check_updates_in_flight(config: TrainerConfig) -> None:
    """Refuse a backend that must take weights while it samples, and cannot.

    What `auto` stands for is not known yet: that is checked when it is chosen.

    Raises:
        ConfigError: The backend cannot.
    """
    generation = config.policy.generation
    if not config.updates_in_flight or generation is None:
        return
    if generation.backend == "auto":
        return
    traits = get_generation_traits(generation.backend)
    obstacle = traits.in_flight_obstacle(generation)
    if obstacle is not None:
        raise ConfigError(
            "asynchronous.weight_updates=between_tokens needs a generator that loads "
            f"weights while it samples, and {obstacle}, or set weight_updates to "
            "between_answers"
        )


def _policies(config: TrainerConfig) -> Iterator[PolicyConfig]:
    for name in ("policy", "critic", "teacher"):
        section = getattr(config, name, None)
        if isinstance(section, PolicyConfig):
            yield section
