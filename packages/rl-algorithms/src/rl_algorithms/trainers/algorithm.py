"""`Algorithm`: what a step is, and what it may use; the loop asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from rl_algorithms.data.loader import Loader
from rl_algorithms.data.validation_sets import Loaders
from rl_algorithms.errors import AlgorithmError
from rl_algorithms.trainers.live_config import LiveConfig, nothing_runs
from rl_algorithms.trainers.run.history import History
from rl_algorithms.trainers.run.state import TrainerState
from rl_algorithms.trainers.sampling.validation import ValidationResult
from rl_algorithms.trainers.schedule import EarlyStop, ValidationSchedule
from rl_algorithms.trainers.settings.batch_plan import BatchPlan
from rl_algorithms.trainers.settings.config import TrainerConfig
from rl_algorithms.trainers.settings.run_settings import RunSettings
from rl_algorithms.trainers.setup.components import Components, Needs
from rl_algorithms.trainers.step_tools import StepTools
from rl_algorithms.trainers.steps.loss import StaticLoss
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_distributed.timing.timer import Timer
from rl_models.interfaces import LossFunction

__all__ = ["Algorithm", "ConfigT"]

ConfigT = TypeVar("ConfigT", bound=TrainerConfig)


class Algorithm(ABC, Generic[ConfigT]):
    """What a step is, and what it may use.

    The methods that a trainer overrides begin with one underscore; only `_load_data`
    and `_train_step` have no default. The others are called by steps and callbacks.

    Args:
        config: The run's configuration.
        given: Components to use instead of making them.
    """

    algorithm: ClassVar[str]
    """Name of the algorithm."""
    config_class: ClassVar[type[TrainerConfig]]
    """Class of its configuration."""

    sample_prompt: Mapping[str, Any] | None = None
    """A processed prompt on which the reward function is tried."""

    @property
    def samples_ahead(self) -> bool:
        """Whether the generator works while the policy is trained."""
        return False

    def __init__(self, config: ConfigT, given: Components) -> None:
        self.config = config
        self.given = given
        self.components = given
        """Policy, generation, environment, tokenizer: there from `_setup_algorithm` on.
        """
        self.needs = Needs()
        self.state = TrainerState()
        """Counters of the run; `stop_reason` ends it after the step."""
        self.history = History()
        """Metrics of every step so far."""
        self.validation: ValidationResult | None = None
        """The last validation."""
        self.timer = Timer()
        self.run_name = self.algorithm
        """What a new folder is named after, where the configuration names none."""
        self.run_dir = Path(config.output_dir or f"runs/{self.run_name}")
        self._tools: StepTools | None = None
        self._updates: LiveConfig[ConfigT] | None = None
        self.plan = self._plan_batches()

    # What a step uses ------------------------------------------------------------

    def _equip(self, tools: StepTools) -> None:
        """Take what steps use, and make what the algorithm adds to it."""
        self._tools = tools
        self._setup_algorithm()

    @property
    def _at_work(self) -> StepTools:
        if self._tools is None:
            raise AlgorithmError(
                f"{type(self).__name__} has no workers yet, and its steps use them: "
                "call fit, or the default _train_step, first"
            )
        return self._tools

    def phase(
        self, name: str, *, label: str | None = None
    ) -> AbstractContextManager[None]:
        """Measure a part of a step, and tell callbacks that it begins.

        Args:
            name: Name of the phase.
            label: Name of the timer, where it is another one.
        """
        return self._at_work.phase(name, label=label)

    def request_stop(self, reason: str) -> None:
        """End the run after the current step, with a checkpoint."""
        self.state.stop_reason = reason

    def sync_weights(self) -> None:
        """Give generation the policy's weights, if it lacks them, and its memory.

        Call it before anything is sampled, and `finish_sampling` afterwards.
        """
        self._at_work.sync_weights()

    def finish_sampling(self) -> None:
        """Free what only generation needs; log-probs and training follow.

        Not called after an error: the workers may be gone, and the next turn, also that
        of a later run with the same models, begins by freeing what is left.
        """
        self._at_work.finish_sampling()

    def prepare_for_training(self) -> None:
        """Give the memory of the devices to the models that are trained."""
        self._at_work.prepare_for_training()

    def train_policy(
        self,
        rows: BatchedDataDict[Any],
        loss: LossFunction,
        global_batch_size: int,
    ) -> Mapping[str, Any]:
        """Train the policy on rows, and note that its weights are new.

        Returns:
            What `PolicyInterface.train` returns.
        """
        return self._at_work.train_policy(rows, loss, global_batch_size)

    def draw_batch(self) -> BatchedDataDict[Any] | None:
        """Return the next batch of the epoch, or None at its end."""
        return self._at_work.draw_batch()

    def update_config(self, changes: Mapping[str, Any], *, by: str = "program") -> None:
        """Change the configuration of the run that goes on.

        ```python
        class Halve(Callback):
            def on_validation_end(self, trainer, *_):
                if stuck():
                    trainer.update_config({"lr": 5e-6}, by="Halve")
        ```

        It is checked here, and has its effect between two optimizer steps: what a hook
        `on_step_end` asks for, before the validation and the checkpoint that follow the
        step; anything else, before the next step. All keys change, or none.

        Args:
            changes: New values by name (`lr`), dotted path (`policy.optimizer.kwargs.
                lr`) or section (`{"grpo": {"val_period": 5}}`).
            by: The person or the program, for `updates.jsonl`.

        Raises:
            ConfigError: A key is unknown or cannot change, a value is wrong, nothing
                runs, or another thread than that of the run calls.
        """
        if self._updates is None:
            raise nothing_runs()
        self._updates.update(changes, by)

    # What an algorithm is --------------------------------------------------------

    @abstractmethod
    def _train_step(self, batch: BatchedDataDict[Any]) -> Mapping[str, Any]:
        """Do one step and return its metrics, names without prefix.

        `num_samples`, `num_tokens` and `num_valid_tokens` also feed the counters of the
        state and the figures per second.
        """

    def _take_answers(self) -> Sequence[Mapping[str, Any]]:
        """Return some answers of the step that has ended, as JSON values, to be kept.

        Called once after each step.
        """
        return ()

    def _end_step(self) -> None:
        """React to the end of a step, after the callbacks."""

    def _own_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps besides models, data and counters, as JSON."""
        return {}

    def _restore_own(self, state: Mapping[str, Any]) -> None:
        """Go on with what `_own_state` gave; comes before a step, mostly the first.

        Raises:
            ConfigError: It does not fit the configuration.
        """

    def _close(self) -> None:
        """End what steps have begun; comes once, before the workers are closed."""

    def _build_loss(self) -> LossFunction:
        """Return the loss that the policy trains with.

        Default: the static method `_compute_loss` of the class.
        """
        return StaticLoss(self._compute_loss)

    @staticmethod
    def _compute_loss(
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **inputs: Tensor,
    ) -> tuple[Tensor, Mapping[str, Any]]:
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
