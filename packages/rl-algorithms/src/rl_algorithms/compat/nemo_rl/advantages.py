"""Baselines, estimators and rewards with the signatures of NeMo RL."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.advantages import batch_normalized, estimators, overlong, rewards
from rl_algorithms.advantages.baselines import (
    calculate_baseline_and_std_per_prompt as _baseline_and_std,
)
from rl_algorithms.advantages.config import (
    AdvantageConfig,
    RewardScalingConfig,
    RewardShapingConfig,
)
from rl_algorithms.advantages.whitening import whiten
from rl_algorithms.compat.nemo_rl.differences import warn_difference
from rl_algorithms.compat.nemo_rl.options import as_keys, take_only
from rl_algorithms.errors import LossInputError
from rl_distributed.errors import ConfigError

__all__ = [
    "GDPOAdvantageEstimator",
    "GRPOAdvantageEstimator",
    "RawRewardAdvantageEstimator",
    "ReinforcePlusPlusAdvantageEstimator",
    "apply_reward_shaping",
    "calculate_baseline_and_std_per_prompt",
    "scale_rewards",
]

_PREFIX = "reward/"
Batch = MutableMapping[str, Any]


def calculate_baseline_and_std_per_prompt(
    prompts: Tensor,
    rewards: Tensor,
    valid_mask: Tensor,
    leave_one_out_baseline: bool = True,
    std_rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `rl_algorithms.calculate_baseline_and_std_per_prompt`; warns of differences.

    Args:
        prompts: [N, S] prompt tokens, or [N] indices of prompts.
        rewards: [N].
        valid_mask: [N] 1 where the row counts.
        leave_one_out_baseline: Leave a row out of its own baseline.
        std_rewards: [N] rewards whose spread is returned; default `rewards`.
    """
    # [N, 1] for indices, so that both forms are compared by row.
    rows = prompts.reshape(len(prompts), -1)
    if leave_one_out_baseline:
        spread = rewards if std_rewards is None else std_rewards
        _tell_of_single_rewards(rows, spread, valid_mask)
    if bool((valid_mask == 0).any()):
        warn_difference(
            "rows with valid_mask 0 take part in no baseline; in nemo_rl they count "
            "among the others of the leave-one-out baseline"
        )
    return _baseline_and_std(
        rows, rewards, valid_mask, leave_one_out_baseline, std_rewards
    )


def _tell_of_single_rewards(rows: Tensor, rewards: Tensor, valid: Tensor) -> None:
    """Warn if all but one row of a group have the same reward."""
    _, groups = torch.unique(rows, dim=0, return_inverse=True)
    for group in torch.unique(groups):
        of_group = rewards[(groups == group) & (valid != 0)]
        values, counts = torch.unique(of_group, return_counts=True)
        # Two values, one of them once: the others agree without that row.
        if len(values) == 2 and int(counts.min()) == 1:
            warn_difference(
                "a group whose rewards agree but for one: that row is divided by the "
                "spread of the whole group; nemo_rl does not divide it"
            )
            return


class _Estimator:
    """Arguments and result shape that the estimators share."""

    def __init__(self, estimator_config: Any = None, loss_config: Any = None) -> None:
        self._keys = as_keys(estimator_config)
        self._loss = as_keys(loss_config)
        names = ("use_leave_one_out_baseline", "normalize_rewards")
        self._options = take_only(self._keys, names)

    @staticmethod
    def _groups(prompt_ids: Tensor, rewards: Tensor) -> Tensor:
        """Return [N] the group of each row, by equal prompts."""
        if len(prompt_ids) != len(rewards):
            raise LossInputError(
                f"prompt_ids must have a row for each of {len(rewards)} rewards: got "
                f"{len(prompt_ids)}"
            )
        rows = prompt_ids.reshape(len(prompt_ids), -1)
        groups: Tensor = torch.unique(rows, dim=0, return_inverse=True)[1]
        return groups

    def _tell(self, prompt_ids: Tensor, rewards: Tensor, valid: Tensor | None) -> None:
        keys = self._options
        by_others = keys.get("use_leave_one_out_baseline", True)
        if by_others and keys.get("normalize_rewards", True):
            valid = torch.ones_like(rewards) if valid is None else valid
            rows = prompt_ids.reshape(len(prompt_ids), -1)
            _tell_of_single_rewards(rows, rewards, valid)


class GRPOAdvantageEstimator(_Estimator):
    """See `rl_algorithms.GRPOAdvantageEstimator`; [N, S] by the mask.

    Args:
        estimator_config: `use_leave_one_out_baseline`, `normalize_rewards`.
        loss_config: Not used.
    """

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        valid_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return [N, S] advantages.

        Args:
            prompt_ids: [N, S'] prompt tokens, or [N]; equal rows are one group.
            rewards: [N].
            mask: [N, S], whose shape the answer has.
            valid_mask: [N] 1 where the row counts; the others get 0.
            kwargs: Not used.
        """
        groups = self._groups(prompt_ids, rewards)
        self._tell(prompt_ids, rewards, valid_mask)
        ours = estimators.GRPOAdvantageEstimator(AdvantageConfig(**self._options))
        advantages = ours.compute_advantage(rewards, groups, valid_mask)
        return advantages.unsqueeze(-1).expand(mask.shape)


class GDPOAdvantageEstimator(_Estimator):
    """See `rl_algorithms.advantages`; weights in order of the sorted reward names."""

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        repeated_batch: Batch,
        valid_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return [N, S] advantages.

        Args:
            prompt_ids: [N, S'] prompt tokens, or [N]; equal rows are one group.
            rewards: [N]; not used.
            mask: [N, S], whose shape the answer has.
            repeated_batch: Columns `reward/<name>` [N].
            valid_mask: [N] 1 where the row counts.
            kwargs: Not used.

        Raises:
            ConfigError: The number of weights differs from that of the rewards.
        """
        names = sorted(key for key in repeated_batch if key.startswith(_PREFIX))
        named = {name: repeated_batch[name] for name in names}
        weights = self._keys.get("reward_weights")
        if weights is not None and len(weights) != len(names):
            raise ConfigError(
                f"reward_weights must have one weight for each of {names}: got "
                f"{len(weights)}"
            )
        by_name = dict(zip(names, weights, strict=True)) if weights else None
        for values in named.values():
            self._tell(prompt_ids, values, valid_mask)
        config = AdvantageConfig(name="gdpo", reward_weights=by_name, **self._options)
        groups = self._groups(prompt_ids, rewards)
        ours = batch_normalized.GDPOAdvantageEstimator(config)
        advantages = ours.compute_advantage(
            rewards, groups, valid_mask, named_rewards=named
        )
        return advantages.unsqueeze(-1).expand(mask.shape)


class ReinforcePlusPlusAdvantageEstimator(_Estimator):
    """See `rl_algorithms.advantages`; `minus_baseline` is true by default, as there."""

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        *,
        valid_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return [N, S] advantages, normalised over the tokens of the mask.

        Args:
            prompt_ids: [N, S'] prompt tokens, or [N]; equal rows are one group.
            rewards: [N].
            mask: [N, S] 1 on sampled tokens.
            valid_mask: [N] 1 where the row counts.
            kwargs: Log-probs for a KL penalty, which is not supported.

        Raises:
            ConfigError: A KL penalty in the reward is requested.
        """
        if self._loss.get("use_kl_in_reward"):
            raise ConfigError(
                "use_kl_in_reward: here a token's return pays for the KL of all tokens "
                "from it on, in nemo_rl for its own; use "
                "rl_algorithms.advantages.kl_in_reward"
            )
        warn_difference(
            "ReinforcePlusPlusAdvantageEstimator divides by the spread with N - 1 in "
            "the denominator, nemo_rl with N"
        )
        config = AdvantageConfig(
            name="reinforce_plus_plus",
            minus_baseline=bool(self._keys.get("minus_baseline", True)),
            use_leave_one_out_baseline=False,
        )
        groups = self._groups(prompt_ids, rewards)
        ours = batch_normalized.ReinforcePlusPlusAdvantageEstimator(config)
        advantages = ours.compute_advantage(
            rewards, groups, valid_mask, token_mask=mask
        )
        return advantages.unsqueeze(-1).expand(mask.shape)


class RawRewardAdvantageEstimator(_Estimator):
    """The reward of the row on each token, whitened with `normalize_advantages`."""

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Return [N, S] advantages, and no returns.

        Args:
            prompt_ids: Not used.
            rewards: [N].
            mask: [N, S] 1 on sampled tokens.
            kwargs: Not used.
        """
        advantages = rewards.unsqueeze(-1).expand(mask.shape)
        if self._keys.get("normalize_advantages", True):
            warn_difference(
                "RawRewardAdvantageEstimator divides by the spread with N - 1 in the "
                "denominator, nemo_rl with N; entries that the mask leaves out are 0"
            )
            advantages = whiten(advantages, mask.to(torch.float64))
        return advantages, None


def scale_rewards(repeated_batch: Batch, reward_scaling_cfg: Any) -> Batch:
    """Map the column `total_reward` from one range to another.

    Args:
        repeated_batch: Column `total_reward` [N], modified in place.
        reward_scaling_cfg: `enabled`, `source_min`, `source_max`, `target_min` and
            `target_max`.
    """
    keys = as_keys(reward_scaling_cfg)
    if not keys.pop("enabled", False):
        return repeated_batch
    config = RewardScalingConfig.from_dict(keys, source="reward_scaling")
    scaled, clamped = rewards.scale_rewards(repeated_batch["total_reward"], config)
    if clamped:
        warn_difference(f"scale_rewards clamps rewards outside of {config}")
    repeated_batch["total_reward"] = scaled
    return repeated_batch


def apply_reward_shaping(batch: Batch, cfg: Any) -> Batch:
    """Lower the rewards of long or truncated answers.

    Args:
        batch: Columns `total_reward` [N], `message_log` or `response_token_lengths`,
            and `truncated` [N] for `stop_properly_penalty_coef`; modified in place.
        cfg: `enabled`, and the settings of `RewardShapingConfig`.
    """
    keys = as_keys(cfg)
    if not keys.pop("enabled", False):
        return batch
    known = tuple(RewardShapingConfig.model_fields)
    if keys.get("stop_properly_penalty_coef") is not None:
        known = ("stop_properly_penalty_coef",)
    config = RewardShapingConfig.from_dict(
        take_only(keys, known), source="reward_shaping"
    )
    total = batch["total_reward"]
    lengths = _response_lengths(batch, len(total), config)
    truncated = batch.get("truncated", torch.zeros(len(total), dtype=torch.bool))
    batch["unshaped_total_reward"] = total.clone()
    batch["total_reward"] = overlong.shape_rewards(
        total, lengths, torch.as_tensor(truncated), config
    )
    return batch


def _response_lengths(batch: Batch, size: int, config: RewardShapingConfig) -> Tensor:
    """Return [N], the number of tokens of each answer; 0 if no penalty reads them."""
    if config.max_response_length is None:
        return torch.zeros(size, dtype=torch.int64)
    given = batch.get("response_token_lengths")
    if given is None:
        answers = [
            [len(m["token_ids"]) for m in log if m["role"] == "assistant"]
            for log in batch["message_log"]
        ]
        if any(len(turns) > 1 for turns in answers):
            warn_difference(
                "apply_reward_shaping counts all turns of an answer, nemo_rl the first"
            )
        given = [sum(turns) for turns in answers]
    lengths = torch.as_tensor(given)
    if bool((lengths > config.max_response_length).any()):
        warn_difference(
            "apply_reward_shaping: the penalty is full at max_response_length; in "
            "nemo_rl it grows without end beyond"
        )
    return lengths
