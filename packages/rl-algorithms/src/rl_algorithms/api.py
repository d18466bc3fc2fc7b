"""`train()`: one call from a model and a dataset to a better model.

Imports nothing heavy: what a call begins with is shown before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rl_algorithms.presets import find_preset, preset_names
from rl_algorithms.trainers.callbacks import Callback
from rl_algorithms.trainers.progress import showing
from rl_distributed.config import Config
from rl_distributed.errors import ConfigError, RegistryError
from rl_distributed.registry import Registry
from rl_distributed.suggestion import nearest

if TYPE_CHECKING:
    from rl_algorithms.trainers.base import BaseTrainer
    from rl_algorithms.trainers.result import TrainResult
    from rl_algorithms.trainers.run_folder import Resume
    from rl_envs.reward_lists import RewardFns

__all__ = [
    "algorithm_names",
    "algorithm_settings",
    "get_algorithm",
    "register_algorithm",
    "suggest_algorithm",
    "train",
]

_ALGORITHMS: Registry[type[BaseTrainer[Any]]] = Registry("rl.algorithms", "algorithm")
TrainerT = TypeVar("TrainerT", bound="type[BaseTrainer[Any]]")


def register_algorithm(name: str) -> Callable[[TrainerT], TrainerT]:
    """Make a trainer class known as `name`, as a decorator.

    Other packages use the entry-point group `rl.algorithms`.
    """
    return _ALGORITHMS.register(name)


def get_algorithm(name: str) -> type[BaseTrainer[Any]]:
    """Return the trainer class of an algorithm, or of the algorithm of a preset.

    Raises:
        RegistryError: The name is unknown, or its package is missing.
        ConfigError: What is registered is no trainer.
    """
    # It loads torch and Ray, which takes seconds: `train` has said so by then.
    from rl_algorithms.trainers.base import BaseTrainer  # noqa: PLC0415

    preset = None if name in _ALGORITHMS else find_preset(name)
    if preset is None and name not in _ALGORITHMS:
        raise RegistryError(
            f"unknown algorithm {name!r}{suggest_algorithm(name)} (algorithms: "
            f"{', '.join(algorithm_names())}; presets: {', '.join(preset_names())})"
        )
    found: Any = _ALGORITHMS.get(name if preset is None else preset.algorithm)
    if not (isinstance(found, type) and issubclass(found, BaseTrainer)):
        raise ConfigError(
            f"algorithm {name!r} must be a subclass of BaseTrainer: got {found!r}"
        )
    return found


def algorithm_settings(
    name: str, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a tree of settings with those of the preset `name` beneath it.

    Where `name` is an algorithm and no preset, the settings are what they are.
    """
    preset = None if name in _ALGORITHMS else find_preset(name)
    if preset is not None:
        return preset.under(settings or {})
    # A document keeps where each key was written.
    return settings if isinstance(settings, dict) else dict(settings or {})


def suggest_algorithm(name: str, others: Iterable[str] = ()) -> str:
    """Say which names are near `name`, or nothing where none is.

    Args:
        name: What is no algorithm and no preset.
        others: Names of other things that may be meant.
    """
    groups = ([*others, *algorithm_names()], preset_names())
    near = [found for group in groups if (found := nearest(name, group))]
    names = " or ".join(map(repr, near))
    return f"; did you mean {names}?" if near else ""


def algorithm_names() -> list[str]:
    """Return the names of all algorithms, those of other packages included.

    `rl_algorithms.presets.preset_names` returns those of the presets.
    """
    return list(_ALGORITHMS.names())


def train(
    model: str | Path,
    dataset: Any = None,
    reward_fn: RewardFns | None = None,
    *,
    algorithm: str = "grpo",
    val_dataset: Any = None,
    environment: Any = None,
    callbacks: Iterable[Callback] = (),
    resume: Resume = False,
    progress: bool = True,
    **settings: Any,
) -> TrainResult:
    """Train a model.

    ```python
    result = train("my-model", rows, lambda prompt, response: float("yes" in response))
    result.metrics, result.checkpoint_path, result.history
    ```

    Args:
        model: Folder or hub name of a Hugging Face causal language model.
        dataset: A list of dicts, a data set, a file, a folder or a hub name.
        reward_fn: Rewards an answer, `fn(prompt, response)` or with further columns of
            the data set; or several, as a list or with weights. It is tried on one row
            before the model is loaded.
        algorithm: An algorithm (`grpo`, `sft`, ...) or a preset (`dapo`, `rloo`, ...).
        val_dataset: Held-out data.
        environment: An environment object instead of a function.
        callbacks: Hooks.
        resume: See `BaseTrainer.fit`.
        progress: Show the progress on standard error; see `BaseTrainer.fit`.
        **settings: Keys of the configuration, see `BaseTrainer.from_pretrained`.

    Raises:
        UserError: Something that you can mend; the message says how.
        Interrupted: A signal came; the run is saved.
    """
    with showing(progress) as display:
        display.begin(algorithm, f"training {Path(model).name}: loading the libraries")
        trainer_class = get_algorithm(algorithm)
        config = settings.pop("config", None)
        if not isinstance(config, Config):  # which would be complete
            config = algorithm_settings(algorithm, config)
        trainer = trainer_class.from_pretrained(model, config=config, **settings)
        return trainer.fit(
            dataset,
            val_dataset=val_dataset,
            reward_fn=reward_fn,
            environment=environment,
            callbacks=callbacks,
            resume=resume,
            progress=display,
        )
