"""`Algorithm`: the interface between an algorithm's step and the training loop."""

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
from rl_distributed.batch.batched_data_dict import AnyRows
from rl_distributed.timing.timer import Timer
from rl_models.interfaces import LossFunction
from rl_models.types import TrainingRows

__all__ = ["Algorithm", "ConfigT"]

ConfigT = TypeVar("ConfigT", bound=TrainerConfig)


class Algorithm(ABC, Generic[ConfigT]):
    """The step of an algorithm, and the tools that it may use.

    Methods for trainers to override begin with one underscore; only `_load_data` and
    `_train_step` have no default. The public methods are called by steps and callbacks.

    Args:
        config: The run's configuration.
        given: Components to use instead of creating them.
    """

    algorithm: ClassVar[str]
    """Name of the algorithm."""
    config_class: ClassVar[type[TrainerConfig]]
    """Class of the algorithm's configuration."""

    sample_prompt: Mapping[str, Any] | None = None
    """Processed prompt on which the reward function is tried before the start."""

    @property
    def samples_ahead(self) -> bool:
        """Whether the generator works while the policy is trained."""
        return False

    def __init__(self, config: ConfigT, given: Components) -> None:
        self.config = config
        self.given = given
        self.components = given
        """Policy, generation, environment and tokenizer; complete from
        `_setup_algorithm` on."""
        self.needs = Needs()
        self.state = TrainerState()
        """Counters of the run; `stop_reason` ends it after the step."""
        self.history = History()
        """Metrics of every step so far."""
        self.validation: ValidationResult | None = None
        """Result of the latest validation."""
        self.timer = Timer()
        self.run_name = self.algorithm
        """Name of a new run folder, if the configuration names none."""
        self.run_dir = Path(config.output_dir or f"runs/{self.run_name}")
        self._tools: StepTools | None = None
        self._updates: LiveConfig[ConfigT] | None = None
        self.plan = self._plan_batches()

    # What a step uses ------------------------------------------------------------

    def _equip(self, tools: StepTools) -> None:
        """Set the tools of the steps, and create what the algorithm itself needs."""
        self._tools = tools
        self._setup_algorithm()

    @property
    def _at_work(self) -> StepTools:
        if self._tools is None:
            raise AlgorithmError(
                f"{type(self).__name__} has no workers yet, and its steps need them: "
                "call fit, or the default _train_step, first"
            )
        return self._tools

    def phase(
        self, name: str, *, label: str | None = None
    ) -> AbstractContextManager[None]:
        """Time a part of a step, and announce it to callbacks.

        Args:
            name: Name of the phase.
            label: Name of the timer, if it differs.
        """
        return self._at_work.phase(name, label=label)

    def request_stop(self, reason: str) -> None:
        """End the run after the current step, with a checkpoint."""
        self.state.stop_reason = reason

    def sync_weights(self) -> None:
        """Give the generator the policy's weights, if they are newer, and its memory.

        Call it before sampling, and `finish_sampling` afterwards.
        """
        self._at_work.sync_weights()

    def finish_sampling(self) -> None:
        """Free the memory that only generation needs; log-probs and training follow.

        It need not be called after an error: the workers may be gone, and the next
        turn, even in a later run with the same models, begins by freeing the rest.
        """
        self._at_work.finish_sampling()

    def prepare_for_training(self) -> None:
        """Give the memory of the devices to the models being trained."""
        self._at_work.prepare_for_training()

    def train_policy(
        self,
        rows: TrainingRows,
        loss: LossFunction,
        global_batch_size: int,
    ) -> Mapping[str, Any]:
        """Train the policy on rows, and mark the generator's weights as stale.

        Returns:
            The result of `PolicyInterface.train`.
        """
        return self._at_work.train_policy(rows, loss, global_batch_size)

    def train_critic(
        self,
        rows: TrainingRows,
        loss: LossFunction,
        global_batch_size: int,
    ) -> Mapping[str, Any]:
        """Train the critic on rows.

        Returns:
            The result of `PolicyInterface.train`.
        """
        return self._at_work.train_critic(rows, loss, global_batch_size)

    def draw_batch(self) -> AnyRows | None:
        """Return the next batch of the epoch, or None at its end."""
        return self._at_work.draw_batch()

    def update_config(self, changes: Mapping[str, Any], *, by: str = "program") -> None:
        """Change the configuration of a running `fit`.

        ```python
        class Halve(Callback):
            def on_validation_end(self, trainer, *_):
                if stuck():
                    trainer.update_config({"lr": 5e-6}, by="Halve")
        ```

        The change is checked here and takes effect between two optimizer steps: if
        requested in `on_step_end`, before the validation and the checkpoint that follow
        the step; otherwise before the next step. Either all keys change or none.

        Args:
            changes: New values by name (`lr`), dotted path (`policy.optimizer.kwargs.
                lr`) or section (`{"grpo": {"val_period": 5}}`).
            by: Name of the person or program, for `updates.jsonl`.

        Raises:
            ConfigError: A key is unknown or cannot change, a value is wrong, no run is
                in progress, or the call comes from another thread than the run's.
        """
        if self._updates is None:
            raise nothing_runs()
        self._updates.update(changes, by)

    # What an algorithm is --------------------------------------------------------

    @abstractmethod
    def _train_step(self, batch: AnyRows) -> Mapping[str, Any]:
        """Run one step and return its metrics, by names without prefix.

        `num_samples`, `num_tokens` and `num_valid_tokens` also feed the counters of the
        state and the throughput metrics.
        """

    def _take_answers(self) -> Sequence[Mapping[str, Any]]:
        """Return some answers of the step as JSON values, to be stored with the run.

        Called once after each step.
        """
        return ()

    def _end_step(self) -> None:
        """React to the end of a step, after the callbacks."""

    def _note_pause(self, is_paused: bool) -> None:
        """Note that the run is held before its next step, or goes on."""

    def _note_loss(self, reason: str) -> None:
        """Note that workers are lost; `_restore_own` follows when they are back.

        Args:
            reason: What became of them, in one line.
        """

    def _own_state(self) -> dict[str, Any]:
        """Return the algorithm's own state for checkpoints, as JSON values."""
        return {}

    def _write_own(self, checkpoint: Path) -> None:
        """Write files that belong to the state that `_own_state` returned last.

        Args:
            checkpoint: Folder of the checkpoint that is being written.
        """

    def _restore_own(self, state: Mapping[str, Any], checkpoint: Path | None) -> None:
        """Restore what `_own_state` returned, as the run resumes or goes back.

        Args:
            state: The state.
            checkpoint: Folder with what `_write_own` wrote; None if the run goes back
                to its beginning.

        Raises:
            ConfigError: The state does not fit the configuration.
        """

    def _waits(self) -> Sequence[str]:
        """Return lines on what a step waits for, for the report of a stall.

        Called in another thread than the steps, which may hang.
        """
        return ()

    def _close(self) -> None:
        """Release what steps have started; called once, before the workers close."""

    def _build_loss(self) -> LossFunction:
        """Return the policy's loss; by default, the static method `_compute_loss`."""
        return StaticLoss(self._compute_loss)

    def _losses(self) -> Mapping[str, LossFunction]:
        """Return the loss of each model that steps train, by its component's name.

        They are those that the steps use; a replay of the run trains with them.
        """
        return {"policy": self._build_loss()}

    @staticmethod
    def _compute_loss(
        data: TrainingRows,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **inputs: Tensor,
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """Return a micro-batch's share of the loss, and metrics that add up.

        It is static because it runs in the training workers, without the trainer.
        `inputs` has `next_token_logprobs` [B, S-1].
        """
        raise NotImplementedError(
            "a trainer overrides _compute_loss (a static method) or _build_loss"
        )

    def _setup_algorithm(self) -> None:
        """Create what the steps need; all components exist by now."""

    def _needs(self, has_environment: bool) -> Needs:
        """Return the components that the algorithm uses.

        Args:
            has_environment: Whether a reward function or an environment was given.
        """
        return Needs()

    def _plan_batches(self) -> BatchPlan:
        """Return the batch sizes; impossible ones raise ConfigError."""
        return self.config.plan_batches()

    @abstractmethod
    def _load_data(self, dataset: Any, val_dataset: Any) -> Loaders:
        """Return the loader of training batches, and that of validation or None.

        It may set `sample_prompt`, a row on which the reward function is tried.
        """

    @property
    def _settings(self) -> RunSettings:
        """The section of the configuration with the limits of the run.

        By default, the only section that is a `RunSettings`; without one, a single pass
        over the data and no validation.
        """
        values = (getattr(self.config, name) for name in type(self.config).model_fields)
        found = [value for value in values if isinstance(value, RunSettings)]
        return found[0] if len(found) == 1 else RunSettings(val_period=0)

    def _validation_schedule(self) -> ValidationSchedule:
        """Return the steps at which to validate."""
        s = self._settings
        return ValidationSchedule(
            s.val_period, s.val_start_at, s.val_at_start, s.val_at_end
        )

    def _early_stop(self) -> EarlyStop:
        """Return the validation goal that ends the run."""
        s = self._settings
        metric, goal = s.stop_at_validation_metric, s.stop_at_validation_threshold
        if metric is None or goal is None:
            return EarlyStop()
        # A loss falls; rewards and accuracies rise.
        return EarlyStop(metric, goal, higher_is_better="loss" not in metric)

    def _validate(self, loader: Loader) -> ValidationResult:
        """Measure the policy on the batches of a loader, without training."""
        raise NotImplementedError(f"{type(self).__name__} has no validation")

    def _limits(self) -> tuple[int | None, int | None]:
        """Return the maximum number of epochs and of steps; None for no limit."""
        return self._settings.epoch_limit, self._settings.max_num_steps
