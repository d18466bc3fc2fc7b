"""`train()`: one call from a model and a dataset to a better model.

Nothing heavy is imported here, so that a call shows its first line before torch loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_algorithms.registry import (
    algorithm_settings,
    get_algorithm,
    get_config_class,
)
from rl_algorithms.trainers.callbacks import Callback
from rl_algorithms.trainers.progress import showing
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_algorithms.trainers.settings.keywords import build_config
from rl_algorithms.trainers.setup.early_ray import loaded_beside_ray
from rl_distributed.config import Config
from rl_models.checkpoint.model_folder import check_model_folder

if TYPE_CHECKING:
    from rl_algorithms.trainers.base import BaseTrainer
    from rl_algorithms.trainers.run.result import TrainResult
    from rl_algorithms.trainers.run.resume import Resume
    from rl_envs.interfaces import EnvironmentInterface
    from rl_envs.rewards.lists import RewardFns

__all__ = ["train"]


def train(
    model: str | Path,
    dataset: Any = None,
    reward_fn: RewardFns | None = None,
    *,
    algorithm: str = "grpo",
    val_dataset: Any = None,
    environment: EnvironmentInterface[Any] | None = None,
    callbacks: Iterable[Callback] = (),
    resume: Resume = False,
    overwrite: bool = False,
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
        reward_fn: Function that rewards an answer, `fn(prompt, response)`, optionally
            with further columns of the data set; or several functions, as a list or
            with weights. It is tried on one row before the model is loaded.
        algorithm: An algorithm (`grpo`, `sft`, ...) or a preset (`dapo`, `rloo`, ...).
        val_dataset: Held-out data.
        environment: An environment object, instead of a reward function.
        callbacks: Callbacks of the trainer.
        resume: See `BaseTrainer.fit`.
        overwrite: Whether to delete the run in `output_dir` and start over.
        progress: Whether to show progress on standard error; see `BaseTrainer.fit`.
        **settings: Keys of the configuration, see `BaseTrainer.from_pretrained`.

    Raises:
        UserError: A mistake in the input; the message says how to correct it.
        Interrupted: A signal came; the run is saved.
    """
    with showing(progress) as display, ExitStack() as closing:
        display.begin(algorithm, f"training {Path(model).name}: loading the libraries")
        config = settings.pop("config", None)
        if not isinstance(config, Config):  # a Config object is complete already
            config = algorithm_settings(algorithm, config)
        trainer_class = closing.enter_context(
            _loaded_trainer(algorithm, model, config, settings)
        )
        trainer = trainer_class.from_pretrained(model, config=config, **settings)
        trainer.run_name = algorithm
        return trainer.fit(
            dataset,
            val_dataset=val_dataset,
            reward_fn=reward_fn,
            environment=environment,
            callbacks=callbacks,
            resume=resume,
            overwrite=overwrite,
            progress=display,
        )


@contextmanager
def _loaded_trainer(
    algorithm: str,
    model: str | Path,
    config: Config | Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Iterator[type[BaseTrainer[Any]]]:
    """Import the trainer while Ray starts, unless given components need no new Ray."""
    sections = {
        k: v for k, v in settings.items() if k not in ("generation", "tokenizer")
    }
    given = [settings.get(name) for name in ("cluster", "policy", "generation")]
    if any(not isinstance(part, Mapping | Config | None) for part in given):
        yield get_algorithm(algorithm)
        return
    values = {"policy.model_name": str(model), **sections}
    built = build_config(get_config_class(algorithm), values, base=config)
    check_model_folder(built.policy.model_name)
    with ExitStack() as closing:
        with SignalGuard() as signals:
            # An exception raised by a signal would leave a half-imported module or a
            # half-started Ray, so signals are held until both are done.
            signals.hold()
            loaded = closing.enter_context(
                loaded_beside_ray(
                    lambda: get_algorithm(algorithm), built.cluster, signals
                )
            )
        yield loaded
