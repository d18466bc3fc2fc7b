"""What an algorithm says about itself; the loop asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from rl_algorithms.data.loader import Loader
from rl_algorithms.data.validation_sets import Loaders
from rl_algorithms.trainers.sampling.validation import ValidationResult
from rl_algorithms.trainers.schedule import EarlyStop, ValidationSchedule
from rl_algorithms.trainers.settings.batch_plan import BatchPlan
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.settings.run_settings import RunSettings
from rl_algorithms.trainers.setup.components import Components, Needs
from rl_algorithms.trainers.steps.loss import StaticLoss
from rl_distributed.batch.batched_data_dict import BatchedDataDict

__all__ = ["Algorithm", "ConfigT"]

ConfigT = TypeVar("ConfigT", bound=TrainerConfig)


class Algorithm(ABC, Generic[ConfigT]):
    """The methods that a trainer overrides: all begin with one underscore.

    Only `_load_data` and `_train_step` have no default.
    """

    algorithm: ClassVar[str]
    """Name of the algorithm."""
    config_class: ClassVar[type[TrainerConfig]]
    """Class of its configuration."""

    config: ConfigT
    components: Components
    """Policy, generation, environment, tokenizer: there from `_setup_algorithm` on."""
    needs: Needs
    sample_prompt: Mapping[str, Any] | None = None
    """A processed prompt on which the reward function is tried."""

    @abstractmethod
    def _train_step(self, batch: BatchedDataDict[Any]) -> Mapping[str, Any]:
        """Do one step and return its metrics, names without prefix.

        `num_samples`, `num_tokens` and `num_valid_tokens` also feed the counters of the
        state and the figures per second.
        """

    def _build_loss(self) -> Any:
        """Return the `LossFunction` that the policy trains with.

        Default: the static method `_compute_loss` of the class.
        """
        return StaticLoss(self._compute_loss)

    @staticmethod
    def _compute_loss(
        data: Any, global_valid_seqs: Any, global_valid_toks: Any, **inputs: Any
    ) -> tuple[Any, Mapping[str, Any]]:
        """Return a micro-batch's share of the loss, and metrics that add up.

        It runs in the training workers, so it is static. `inputs` has
        `next_token_logprobs` [B, S-1].
        """
        raise NotImplementedError(
            "a trainer overrides _compute_loss (a static method) or _build_loss"
        )

    def _setup_algorithm(self) -> None:
        """Make what the steps need; all components are there."""

    def _needs(self, has_environment: bool) -> Needs:
        """Say which components the algorithm uses.

        Args:
            has_environment: Whether anything was given that scores answers.
        """
        return Needs()

    def _plan_batches(self) -> BatchPlan:
        """Return the batch sizes; impossible ones raise ConfigError."""
        return self.config.plan_batches()

    @abstractmethod
    def _load_data(self, dataset: Any, val_dataset: Any) -> Loaders:
        """Return the loader of training batches and that of validation, or None.

        It may set `sample_prompt`, a row on which the reward function is tried.
        """

    @property
    def _settings(self) -> RunSettings:
        """The section of the configuration that says how long to train.

        Default: the one section that is a `RunSettings`; without it one pass over the
        data, and no validation.
        """
        values = (getattr(self.config, name) for name in type(self.config).model_fields)
        found = [value for value in values if isinstance(value, RunSettings)]
        return found[0] if len(found) == 1 else RunSettings(val_period=0)

    def _validation_schedule(self) -> ValidationSchedule:
        """Say when to validate."""
        s = self._settings
        return ValidationSchedule(
            s.val_period, s.val_start_at, s.val_at_start, s.val_at_end
        )

    def _early_stop(self) -> EarlyStop:
        """Say which validation ends the run."""
        s = self._settings
        metric, goal = s.stop_at_validation_metric, s.stop_at_validation_threshold
        if metric is None or goal is None:
            return EarlyStop()
        return EarlyStop(metric, goal, higher_is_better="loss" not in metric)

    def _validate(self, loader: Loader) -> ValidationResult:
        """Measure the policy on the batches of a loader, without training."""
        raise NotImplementedError(f"{type(self).__name__} has no validation")

    def _limits(self) -> tuple[int | None, int | None]:
        """Return the largest number of epochs and of steps."""
        return self._settings.epoch_limit, self._settings.max_num_steps
