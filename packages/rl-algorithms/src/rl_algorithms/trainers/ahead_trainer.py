"""`AheadTrainer`: the step of algorithms that sample in turns or ahead of training.

```
sync weights -> sample -> [no rows: the step ends] -> learn (of the algorithm)
[asynchronous] take what was sampled ahead --------> learn -> publish weights
```
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rl_algorithms.data.types import PROMPT_ROWS, PromptRows
from rl_algorithms.data.validation_sets import Loaders
from rl_algorithms.errors import AlgorithmError
from rl_algorithms.rollout.result import TrajectoryRows
from rl_algorithms.trainers.ahead.prompts import PromptSource
from rl_algorithms.trainers.ahead.sampler import AheadSampler
from rl_algorithms.trainers.ahead.saved import SavedAhead
from rl_algorithms.trainers.ahead.scoring import for_several_threads
from rl_algorithms.trainers.ahead.start import (
    check_ahead,
    check_started,
    start_ahead,
)
from rl_algorithms.trainers.rollout_trainer import RolloutTrainer
from rl_algorithms.trainers.settings.asynchronous_config import (
    AheadConfig,
    AheadSettings,
)
from rl_algorithms.trainers.setup.components import Needs
from rl_distributed.batch.batched_data_dict import AnyRows
from rl_distributed.errors import ConfigError, DeadlineExceededError
from rl_envs.interfaces import EnvironmentInterface

__all__ = ["AheadTrainer"]

# A controller that answers at all does so in milliseconds.
_ASK_S = 2.0

AheadConfigT = TypeVar("AheadConfigT", bound=AheadConfig)


class AheadTrainer(RolloutTrainer[AheadConfigT]):
    """Base of the trainers that can sample ahead; a subclass trains on the answers."""

    _ahead: AheadSampler | None = None
    """Sampler for later steps; None without one, or before the first step."""
    _prompt_source: PromptSource | None = None
    _saved_ahead: SavedAhead | None = None
    """What the newest state for a checkpoint, or the one to resume, has of it."""
    _planned: tuple[int | None, int | None] = (None, None)
    """Limits that the sampler was created with."""

    @property
    @abstractmethod
    def _sampling(self) -> AheadSettings:
        """The algorithm's section of the configuration."""

    @abstractmethod
    def _learn(self, rows: TrajectoryRows) -> Mapping[str, Any]:
        """Train on the scored answers of a step, and return metrics.

        Args:
            rows: Columns of `RolloutResult.rows`.
        """

    @property
    def samples_ahead(self) -> bool:
        """Whether the generator works while the policy is trained."""
        return self.config.asynchronous is not None

    def _needs(self, has_environment: bool) -> Needs:
        needs = super()._needs(has_environment)
        check_ahead(self.config, self.given, needs)
        return needs

    def _load_data(self, dataset: Any, val_dataset: Any) -> Loaders:
        loaders = super()._load_data(dataset, val_dataset)
        if self.samples_ahead:
            self._prompt_source = PromptSource(loaders[0], self.plan.num_prompts)
        return loaders

    def _scorer(self) -> EnvironmentInterface[Any]:
        found = super()._scorer()
        return for_several_threads(found) if self.samples_ahead else found

    def _setup_algorithm(self) -> None:
        super()._setup_algorithm()
        if self.samples_ahead:
            check_started(self.components)

    def _train_step(self, batch: AnyRows) -> Mapping[str, Any]:
        if self.config.asynchronous is None:
            self.sync_weights()
            rows, metrics = self._sample(PROMPT_ROWS.checked(batch))
            self.finish_sampling()
        else:
            rows, metrics = self._take_ahead()
        return metrics if rows is None else {**metrics, **self._learn(rows)}

    def _sample(
        self, batch: PromptRows
    ) -> tuple[TrajectoryRows | None, dict[str, Any]]:
        """Sample and score answers to a batch.

        Returns:
            The rows, or None if there is nothing to learn from; and metrics.
        """
        return self._run_rollouts(batch, 0)

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Maximum number of epochs and of steps."""
        return super()._limits()

    def _limits(self) -> tuple[int | None, int | None]:
        if self._ahead is not None and self._planned != self.limits:
            raise ConfigError(
                "max_num_steps and max_num_epochs cannot change while an asynchronous "
                "run is in progress, because it samples up to its last step: resume it "
                "with other limits"
            )
        return self.limits

    def _take_ahead(self) -> tuple[TrajectoryRows | None, dict[str, Any]]:
        """Wait for the answers of the step, which were requested earlier."""
        if self._ahead is None:
            self._ahead = self._begin_ahead()
        with self.phase("generation"):
            result, metrics = self._ahead.next_step()
        if result is None:
            self.request_stop(str(self._ahead.end_reason))
            return None, {}
        rows, found = self._note_rollout(result)
        return rows, {**found, **metrics}

    def _begin_ahead(self) -> AheadSampler:
        asynchronous, prompts = self.config.asynchronous, self._prompt_source
        if asynchronous is None or prompts is None:
            raise AlgorithmError(
                "with asynchronous, a step needs prompts beyond its own batch: call "
                "fit, or set asynchronous to null"
            )
        # Synchronous this once: nothing trains yet, so a probe can compare the
        # weights of both sides.
        super().sync_weights()
        self._planned = self.limits
        # Handed over: its answers must not fill memory beside those of the sampler.
        saved, self._saved_ahead = self._saved_ahead, None
        return start_ahead(
            self, asynchronous, prompts, self._rollouts, self._at_work, saved
        )

    def sync_weights(self) -> None:
        """Give the generator the policy's weights; see `Algorithm.sync_weights`."""
        if self._ahead is None or not self._ahead.wait_for_weights():
            super().sync_weights()

    def _end_step(self) -> None:
        if self._ahead is not None:
            # Before anything else of the end: the generator can load the new weights
            # while the loop logs and validates.
            self._ahead.end_step(self.state.weight_version)
        super()._end_step()

    def _note_pause(self, is_paused: bool) -> None:
        if self._ahead is not None:
            self._ahead.hold(is_paused)
        super()._note_pause(is_paused)

    def _note_loss(self, reason: str) -> None:
        ahead = self._ahead
        if ahead is not None and not ahead.lose_trainer(reason):
            # Its schedule had come to its end, and cannot go back.
            self._ahead = None
            ahead.close()
        # The rest of a checkpoint that was not completed.
        self._saved_ahead = None
        super()._note_loss(reason)

    def _own_state(self) -> dict[str, Any]:
        if self._ahead is not None:
            self._saved_ahead = self._ahead.state()
        saved = self._saved_ahead
        return {} if saved is None else {"asynchronous": saved.state}

    def _write_own(self, checkpoint: Path) -> None:
        if self._saved_ahead is not None:
            self._saved_ahead.write(checkpoint)
        if self._ahead is not None:
            # Its answers are used up by later steps, and would fill memory until the
            # next checkpoint.
            self._saved_ahead = None

    def _restore_own(self, state: Mapping[str, Any], checkpoint: Path | None) -> None:
        saved = state.get("asynchronous")
        if saved and saved["groups"] and not self.samples_ahead:
            raise ConfigError(
                f"the checkpoint has {len(saved['groups'])} prompts in flight, which a "
                "run without asynchronous would leave out: resume it with asynchronous "
                "(max_staleness=0 for the synchronous order)"
            )
        found = SavedAhead.read(saved, checkpoint) if saved else None
        if self._ahead is None:
            self._saved_ahead = found
        else:
            self._ahead.trainer_is_back(found, self.state.weight_version)

    def _waits(self) -> Sequence[str]:
        ahead = self._ahead
        if ahead is None:
            return ()
        try:
            return [f"schedule: {ahead.waits(_ASK_S)}"]
        except DeadlineExceededError as error:
            return [str(error)]

    def _close(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
        self._prompt_source = self._saved_ahead = None
        super()._close()
