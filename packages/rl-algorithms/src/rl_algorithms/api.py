"""`train()`: one call from a model and a dataset to a better model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from rl_algorithms.trainers.base import BaseTrainer
from rl_algorithms.trainers.callbacks import Callback
from rl_algorithms.trainers.result import TrainResult
from rl_algorithms.trainers.run_folder import Resume
from rl_distributed.errors import ConfigError
from rl_distributed.registry import Registry

__all__ = ["algorithm_names", "get_algorithm", "register_algorithm", "train"]

_ALGORITHMS: Registry[type[BaseTrainer[Any]]] = Registry("rl.algorithms", "algorithm")
TrainerT = TypeVar("TrainerT", bound=type[BaseTrainer[Any]])


def register_algorithm(name: str) -> Callable[[TrainerT], TrainerT]:
    """Make a trainer class known as `name`, as a decorator.

    Other packages use the entry-point group `rl.algorithms`.
    """
    return _ALGORITHMS.register(name)


def get_algorithm(name: str) -> type[BaseTrainer[Any]]:
    """Return the trainer class of an algorithm.

    Raises:
        RegistryError: The name is unknown, or its package is missing.
        ConfigError: What is registered is no trainer.
    """
    found: Any = _ALGORITHMS.get(name)
    if not (isinstance(found, type) and issubclass(found, BaseTrainer)):
        raise ConfigError(
            f"algorithm {name!r} must be a subclass of BaseTrainer: got {found!r}"
        )
    return found


def algorithm_names() -> list[str]:
    """Return the names of all algorithms, those of other packages included."""
    return list(_ALGORITHMS.names())


def train(
    model: str | Path,
    dataset: Any = None,
    reward_fn: Callable[..., Any] | None = None,
    *,
    algorithm: str = "grpo",
    val_dataset: Any = None,
    environment: Any = None,
    callbacks: Iterable[Callback] = (),
    resume: Resume = False,
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
            the data set; it is tried on one row before the model is loaded.
        algorithm: A registered name: `grpo`, `sft`, ...
        val_dataset: Held-out data.
        environment: An environment object instead of a function.
        callbacks: Hooks.
        resume: See `BaseTrainer.fit`.
        **settings: Keys of the configuration, see `BaseTrainer.from_pretrained`.

    Raises:
        UserError: Something that you can mend; the message says how.
        Interrupted: A signal came; the run is saved.
    """
    trainer = get_algorithm(algorithm).from_pretrained(model, **settings)
    return trainer.fit(
        dataset,
        val_dataset=val_dataset,
        reward_fn=reward_fn,
        environment=environment,
        callbacks=callbacks,
        resume=resume,
    )
