"""The PPO trainer.

```
prompts -> rollouts -> values -> log-probs -> [KL] -> GAE -> passes: critic, policy
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from rl_algorithms.grpo.rows import add_kl_penalty
from rl_algorithms.losses import ClippedPGLossFn, MseValueLossFn
from rl_algorithms.ppo.config import PPOConfig, PPOSettings
from rl_algorithms.ppo.rows import (
    add_advantages,
    add_nll_weights,
    rows_of_epoch,
    trainable_rows,
)
from rl_algorithms.rollout import unfold_branches
from rl_algorithms.trainers.rollout_trainer import RolloutTrainer
from rl_algorithms.trainers.sampling.mismatch import MismatchMonitor
from rl_algorithms.trainers.sampling.reward_watch import RewardWatch
from rl_algorithms.trainers.setup.components import Needs
from rl_algorithms.trainers.steps.training_rows import (
    count_tokens,
    join_outputs,
    pad_to_plan,
    train_metrics,
)
from rl_distributed.batch.batched_data_dict import BatchedDataDict

__all__ = ["PPOTrainer"]


class PPOTrainer(RolloutTrainer[PPOConfig]):
    """Proximal policy optimisation with a critic (Schulman, arXiv:1707.06347)."""

    algorithm: ClassVar[str] = "ppo"
    config_class: ClassVar[type[PPOConfig]] = PPOConfig

    @property
    def _sampling(self) -> PPOSettings:
        return self.config.ppo

    def _needs(self, has_environment: bool) -> Needs:
        reference = self.config.loss_fn.needs_reference_logprobs
        needs = super()._needs(has_environment)
        return replace(needs, reference_policy=reference, critic=True)

    def _build_loss(self) -> ClippedPGLossFn:
        return ClippedPGLossFn(self.config.loss_fn)

    def _setup_algorithm(self) -> None:
        super()._setup_algorithm()
        self._mismatch = MismatchMonitor(self.config.mismatch)
        self._value_loss = MseValueLossFn(self.config.value_loss_fn)

    def _watch_rewards(self) -> RewardWatch | None:
        shaped = self.config.ppo.reward_shaping is not None
        return None if shaped or self.config.loss_fn.has_kl_reward else RewardWatch()

    def _train_step(self, batch: BatchedDataDict[Any]) -> Mapping[str, Any]:
        self.sync_weights()
        sampled, metrics = self._run_rollouts(batch, 0)
        self.finish_sampling()
        rows, row_metrics = trainable_rows(sampled, self.config.ppo)
        metrics |= row_metrics
        if rows is None:
            # Every answer failed or was cut off: there is nothing to learn from.
            return metrics
        rows, global_batch_size = pad_to_plan(unfold_branches(rows), self.plan)
        metrics |= count_tokens(rows)
        with self.phase("value_inference"):
            found = self.components.critic.get_values(rows, timer=self.timer)
            rows["values"] = found["values"]
        self._add_logprobs(rows)
        with self.phase("advantage_calculation"):
            if self.config.loss_fn.has_kl_reward:
                metrics |= add_kl_penalty(rows, self.config.loss_fn)
            metrics |= add_advantages(rows, self.config.ppo)
        return metrics | self._train_models(rows, global_batch_size)

    def _add_logprobs(self, rows: BatchedDataDict[Any]) -> None:
        """Add the log-probs before the step, and those of the reference if needed."""
        policy = self.components.policy
        with self.phase("policy_and_reference_logprobs"):
            rows["prev_logprobs"] = policy.get_logprobs(rows)["logprobs"]
            if self.config.loss_fn.needs_reference_logprobs:
                reference = policy.get_reference_policy_logprobs(rows)
                rows["reference_policy_logprobs"] = reference["reference_logprobs"]

    def _train_models(
        self, rows: BatchedDataDict[Any], global_batch_size: int
    ) -> dict[str, Any]:
        """Pass over the rows several times; both models see the same order."""
        self.prepare_for_training()
        settings = self.config.ppo
        trains_policy = self.state.step >= settings.critic_warmup_steps
        values, policies = [], []
        for epoch in range(settings.ppo_epochs):
            shuffled = rows_of_epoch(
                rows, seed=self.config.seed, step=self.state.step, epoch=epoch
            )
            with self.phase("value_training"):
                values.append(
                    self.components.critic.train(
                        shuffled, self._value_loss, gbs=global_batch_size
                    )
                )
            if trains_policy:
                self._weigh_successes(shuffled, global_batch_size)
                output = self.train_policy(shuffled, self._loss, global_batch_size)
                policies.append(output)
                trains_policy = not self._has_moved_far(output)
        found = train_metrics(join_outputs(values))
        metrics: dict[str, Any] = {f"critic/{name}": v for name, v in found.items()}
        if policies:
            metrics |= self._mismatch.report(train_metrics(join_outputs(policies)))
            metrics["policy_passes"] = float(len(policies))
        return metrics

    def _weigh_successes(
        self, rows: BatchedDataDict[Any], global_batch_size: int
    ) -> None:
        if self.config.loss_fn.positive_nll_coef > 0:
            add_nll_weights(rows, self.config.ppo.positive_above, global_batch_size)

    def _has_moved_far(self, output: Mapping[str, Any]) -> bool:
        """Whether a pass over the rows left the policy that they were sampled with."""
        target = self.config.ppo.target_kl
        return target is not None and train_metrics(output)["approx_kl"].value > target
