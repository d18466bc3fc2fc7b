"""`PolicyGradientTrainer`: what GRPO and PPO share besides sampling."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from rl_algorithms.losses import ClippedPGLossFn
from rl_algorithms.losses.kept_rows import KEPT_LOGPROBS
from rl_algorithms.trainers.ahead_trainer import AheadTrainer
from rl_algorithms.trainers.sampling.mismatch import MismatchMonitor
from rl_algorithms.trainers.sampling.reward_watch import RewardWatch
from rl_algorithms.trainers.settings.policy_gradient_config import (
    PolicyGradientConfig,
    PolicyGradientSettings,
)
from rl_algorithms.trainers.setup.components import Needs
from rl_algorithms.trainers.steps.training_rows import train_metrics
from rl_models.types import InputRows

__all__ = ["PolicyGradientTrainer"]

PolicyGradientConfigT = TypeVar("PolicyGradientConfigT", bound=PolicyGradientConfig)


class PolicyGradientTrainer(AheadTrainer[PolicyGradientConfigT]):
    """Base of the trainers with `ClippedPGLossFn`; a subclass trains on the rows."""

    @property
    @abstractmethod
    def _sampling(self) -> PolicyGradientSettings:
        """The algorithm's section of the configuration."""

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
            return None  # shaping makes equal rewards differ
        return RewardWatch(compares_groups=settings.compares_group)

    def _add_logprobs(self, rows: InputRows, *, prev: bool, reference: bool) -> None:
        """Add the log-probs that are needed and still missing."""
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
        """Return the metrics of `train_policy`, including the mismatch."""
        metrics = train_metrics(output)
        # Before the report, which may end the run: its last answers show why.
        if (found := metrics.pop(KEPT_LOGPROBS, None)) is not None:
            self._kept.note_logprobs(found.values)
        return self._mismatch.report(metrics)
