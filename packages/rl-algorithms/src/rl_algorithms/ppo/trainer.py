"""The PPO trainer.

```
prompts -> rollouts -> values -> log-probs -> [KL] -> GAE -> passes: critic, policy
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from rl_algorithms.advantages.kl_in_reward import add_kl_penalty
from rl_algorithms.losses import MseValueLossFn
from rl_algorithms.ppo.config import PPOConfig, PPOSettings
from rl_algorithms.ppo.rows import (
    add_advantages,
    add_nll_weights,
    rows_of_epoch,
    trainable_rows,
)
from rl_algorithms.rollout import unfold_branches
from rl_algorithms.rollout.result import TrajectoryRows
from rl_algorithms.trainers.policy_gradient_trainer import PolicyGradientTrainer
from rl_algorithms.trainers.setup.components import Needs
from rl_algorithms.trainers.steps.training_rows import (
    count_tokens,
    join_outputs,
    pad_to_plan,
    train_metrics,
)
from rl_models.interfaces import LossFunction
from rl_models.types import TrainingRows

__all__ = ["PPOTrainer"]


class PPOTrainer(PolicyGradientTrainer[PPOConfig]):
    """Proximal policy optimization with a critic (Schulman, arXiv:1707.06347)."""

    algorithm: ClassVar[str] = "ppo"
    config_class: ClassVar[type[PPOConfig]] = PPOConfig

    @property
    def _sampling(self) -> PPOSettings:
        return self.config.ppo

    def _needs(self, has_environment: bool) -> Needs:
        return replace(super()._needs(has_environment), critic=True)

    def _losses(self) -> Mapping[str, LossFunction]:
        critic = MseValueLossFn(self.config.value_loss_fn)
        return {**super()._losses(), "critic": critic}

    def _setup_algorithm(self) -> None:
        super()._setup_algorithm()
        self._value_loss = self._losses()["critic"]

    def _learn(self, rows: TrajectoryRows) -> Mapping[str, Any]:
        train_rows, metrics = trainable_rows(rows, self.config.ppo)
        if train_rows is None:
            # All answers failed or were cut off, so there is nothing to learn from.
            return metrics
        train_rows = unfold_branches(train_rows)
        train_rows, global_batch_size = pad_to_plan(train_rows, self.plan)
        metrics |= count_tokens(train_rows)
        with self.phase("value_inference"):
            found = self.components.required.critic.get_values(
                train_rows, timer=self.timer
            )
            train_rows["values"] = found["values"]
        loss_config = self.config.loss_fn
        reference = loss_config.needs_reference_logprobs
        # Always: over several passes the ratio is to the policy before the first of
        # them.
        self._add_logprobs(train_rows, prev=True, reference=reference)
        with self.phase("advantage_calculation"):
            if loss_config.has_kl_reward:
                metrics |= add_kl_penalty(train_rows, loss_config)
            metrics |= add_advantages(train_rows, self.config.ppo)
        self._kept.note_training(train_rows)
        return metrics | self._train_models(train_rows, global_batch_size)

    def _train_models(
        self, rows: TrainingRows, global_batch_size: int
    ) -> dict[str, Any]:
        """Make several passes over the rows, in the same order for both models."""
        settings = self.config.ppo
        # An untrained critic gives advantages of noise, so the policy waits for it.
        trains_policy = self.state.step >= settings.critic_warmup_steps
        values, policies = [], []
        for epoch in range(settings.ppo_epochs):
            shuffled = rows_of_epoch(
                rows, seed=self.config.seed, step=self.state.step, epoch=epoch
            )
            values.append(
                self.train_critic(shuffled, self._value_loss, global_batch_size)
            )
            if trains_policy:
                # In each pass: the weights are normalized within the rows of an
                # optimizer step, which the new order changes.
                self._weigh_successes(shuffled, global_batch_size)
                output = self.train_policy(shuffled, self._loss, global_batch_size)
                policies.append(output)
                # Decided after a whole pass: all rows then had the same number of
                # updates.
                trains_policy = not self._has_moved_far(output)
        found = train_metrics(join_outputs(values))
        metrics: dict[str, Any] = {f"critic/{name}": v for name, v in found.items()}
        if policies:
            metrics |= self._policy_metrics(join_outputs(policies))
            metrics["policy_passes"] = float(len(policies))
        return metrics

    def _weigh_successes(self, rows: TrainingRows, global_batch_size: int) -> None:
        if self.config.loss_fn.positive_nll_coef > 0:
            add_nll_weights(rows, self.config.ppo.positive_above, global_batch_size)

    def _has_moved_far(self, output: Mapping[str, Any]) -> bool:
        """Return whether a pass moved the policy further than `target_kl`."""
        target = self.config.ppo.target_kl
        return target is not None and train_metrics(output)["approx_kl"].value > target
