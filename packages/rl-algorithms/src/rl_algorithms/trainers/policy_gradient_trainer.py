"""What GRPO and PPO have in common: a step up to its rows, and their log-probs.

```
sync weights -> sample -> [no rows: the step ends] -> learn (of the algorithm)
```
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from rl_algorithms.losses import ClippedPGLossFn
from rl_algorithms.trainers.rollout_trainer import RolloutTrainer
from rl_algorithms.trainers.sampling.mismatch import MismatchMonitor
from rl_algorithms.trainers.sampling.reward_watch import RewardWatch
from rl_algorithms.trainers.settings.policy_gradient_config import (
    PolicyGradientConfig,
    PolicyGradientSettings,
)
from rl_algorithms.trainers.setup.components import Needs
from rl_algorithms.trainers.steps.training_rows import train_metrics
from rl_distributed.batch.batched_data_dict import BatchedDataDict

__all__ = ["PolicyGradientTrainer"]

PolicyGradientConfigT = TypeVar("PolicyGradientConfigT", bound=PolicyGradientConfig)


class PolicyGradientTrainer(RolloutTrainer[PolicyGradientConfigT]):
    """Base of the trainers with `ClippedPGLossFn`; a subclass learns from rows."""

    @property
    @abstractmethod
    def _sampling(self) -> PolicyGradientSettings:
        """The algorithm's section of the configuration."""

    @abstractmethod
    def _learn(self, rows: BatchedDataDict[Any]) -> Mapping[str, Any]:
        """Train on the scored answers of a step, and return metrics.

        Args:
            rows: Columns of `RolloutResult.rows`.
        """

    def _needs(self, has_environment: bool) -> Needs:
        reference = self.config.loss_fn.needs_reference_logprobs
        return replace(super()._needs(has_environment), reference_policy=reference)

    def _build_loss(self) -> ClippedPGLossFn:
        return ClippedPGLossFn(self.config.loss_fn)

    def _setup_algorithm(self) -> None:
        super()._setup_algorithm()
        self._mismatch = MismatchMonitor(self.config.mismatch)

    def _watch_rewards(self) -> RewardWatch | None:
        settings = self._sampling
        if settings.reward_shaping is not None or self.config.loss_fn.has_kl_reward:
            return None  # equal rewards differ once they are shaped
        return RewardWatch(compares_groups=settings.compares_group)

    def _train_step(self, batch: BatchedDataDict[Any]) -> Mapping[str, Any]:
        self.sync_weights()
        rows, metrics = self._sample(batch)
        self.finish_sampling()
        return metrics if rows is None else {**metrics, **self._learn(rows)}

    def _sample(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any] | None, dict[str, Any]]:
        """Sample and score answers to a batch.

        Returns:
            The rows, None where there is nothing to learn from, and metrics.
        """
        return self._run_rollouts(batch, 0)

    def _add_logprobs(
        self, rows: BatchedDataDict[Any], *, prev: bool, reference: bool
    ) -> None:
        """Add the log-probs that are needed and not there yet."""
        policy = self.components.required.policy
        prev = prev and "prev_logprobs" not in rows
        if not prev and not reference:
            return
        with self.phase("policy_and_reference_logprobs"):
            if prev:
                rows["prev_logprobs"] = policy.get_logprobs(rows)["logprobs"]
            if reference:
                found = policy.get_reference_policy_logprobs(rows)
                rows["reference_policy_logprobs"] = found["reference_logprobs"]

    def _policy_metrics(self, output: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of what `train_policy` returned, mismatch included."""
        return self._mismatch.report(train_metrics(output))
