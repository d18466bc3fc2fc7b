"""Settings of the clipped policy-gradient loss. Imports neither torch nor a model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from rl_distributed.config import Config
from rl_distributed.errors import ConfigError

__all__ = ["ClippedPGLossConfig", "KLType", "TruncatedISType"]

KLType = Literal["k1", "k2", "k3"]
TruncatedISType = Literal["tis", "icepop", "seq-mask-tis"]


class ClippedPGLossConfig(Config):
    """Options of `ClippedPGLossFn`; combinations are checked before a model is loaded.

    | algorithm | settings |
    |---|---|
    | GRPO | `token_level_loss=False` |
    | DAPO | `ratio_clip_max=0.28`, `reference_policy_kl_penalty=0` |
    | Dr. GRPO | `token_level_loss=False`, `fixed_length_normalizer=L` |
    | RLOO | as Dr. GRPO, `disable_ppo_ratio`, `use_kl_in_reward` |
    | GSPO | `token_level_loss=False`, `sequence_level_importance_ratios` |
    | CISPO | `use_cispo` |
    | REINFORCE | `disable_ppo_ratio` |

    Papers: GRPO arXiv:2402.03300, DAPO arXiv:2503.14476, Dr. GRPO arXiv:2503.20783,
    RLOO arXiv:2402.14740, GSPO arXiv:2507.18071, CISPO arXiv:2506.13585.
    """

    ratio_clip_min: float = Field(default=0.2, ge=0.0, le=1.0)
    """Clip range below: the ratio is at least `1 - ratio_clip_min`; 1 for no bound."""
    ratio_clip_max: float = Field(default=0.2, ge=0.0)
    """Clip range above: the ratio is at most `1 + ratio_clip_max`."""
    ratio_clip_c: float | None = Field(default=None, gt=1.0)
    """Bound of the dual clip: for negative advantages the loss is at most `-A * c`
    (arXiv:1912.09729); null for none."""
    token_level_loss: bool = True
    """Whether to average over all tokens of the batch; false averages over each
    sequence first."""
    fixed_length_normalizer: PositiveInt | Literal["max_new_tokens"] | None = None
    """Constant by which Dr. GRPO divides a sequence's sum, instead of its length. In
    the configuration of a run, `max_new_tokens` stands for that setting of the
    generation."""
    sequence_level_importance_ratios: bool = False
    """Whether to use one ratio per sequence, the geometric mean of its token ratios
    (GSPO)."""
    disable_ppo_ratio: bool = False
    """Whether to use `-A * log p` without ratio and clipping (REINFORCE)."""
    force_on_policy_ratio: bool = False
    """Whether to set the ratio to 1, with the gradient of `log p`; `prev_logprobs` is
    not read then."""
    use_cispo: bool = False
    """Whether the clipped ratio only weights `log p`, so that no token loses its
    gradient (CISPO)."""

    reference_policy_kl_penalty: float = Field(default=0.01, ge=0.0)
    """Weight of the KL term; with 0, no reference policy is needed."""
    reference_policy_kl_type: KLType = "k3"
    """Estimator of KL(policy || reference), see `calculate_kl`."""
    reference_policy_kl_gradient: Literal["score_function", "direct"] = "score_function"
    """Gradient of the KL term. `score_function` adds the gradient through the sampling
    distribution, which makes k1 and k3 unbiased; `direct` differentiates the estimator
    alone, as in the GRPO paper."""
    kl_input_clamp_value: float | None = Field(default=20.0, gt=0.0)
    """Bound on the absolute difference of log-probs, before it is exponentiated."""
    kl_output_clamp_value: float | None = Field(default=10.0, gt=0.0)
    """Bound on the absolute estimate, after weighting."""
    use_on_policy_kl_approximation: bool = False
    """Whether to weight the KL estimates by policy over sampler; requires
    `generation_logprobs`."""
    use_kl_in_reward: bool = False
    """Whether to subtract the KL penalty from the rewards instead of adding it to the
    loss. The estimates then use the weights before the step and carry no gradient. Only
    k1 then has the expected gradient of the divergence."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of an entropy bonus, estimated from the sampled tokens; 0 for none."""
    positive_nll_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the negative log-likelihood of successful answers, a mean over their
    tokens (0.1 in VAPO, arXiv:2504.05118); requires `nll_weights`. 0 for none."""

    use_importance_sampling_correction: bool = False
    """Whether to weight the loss by trainer over sampler; requires
    `generation_logprobs`."""
    truncated_importance_sampling_type: TruncatedISType | None = None
    """Treatment of weights outside the bounds: `tis` clamps them, `icepop` drops the
    tokens, `seq-mask-tis` drops sequences by their geometric-mean weight."""
    truncated_importance_sampling_ratio: float | None = Field(default=None, gt=0.0)
    """Largest weight; null without truncation."""
    truncated_importance_sampling_ratio_min: float | None = Field(default=None, ge=0.0)
    """Smallest weight; null for 0, with `tis` only."""

    @model_validator(mode="after")
    def _check_ratio(self) -> Self:
        """Reject combinations of ratio options that exclude each other."""
        exclusive = {
            "disable_ppo_ratio": self.disable_ppo_ratio,
            "force_on_policy_ratio": self.force_on_policy_ratio,
            "use_cispo": self.use_cispo,
            "sequence_level_importance_ratios": self.sequence_level_importance_ratios,
        }
        chosen = [name for name, on in exclusive.items() if on]
        if len(chosen) > 1:
            raise ValueError(
                f"{' and '.join(chosen)} exclude each other: each defines the ratio; "
                "set only one of them to true"
            )
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise ValueError(
                "sequence_level_importance_ratios needs a sequence-level loss: set "
                "token_level_loss to false"
            )
        if self.ratio_clip_c is not None and (self.use_cispo or self.disable_ppo_ratio):
            raise ValueError(
                f"ratio_clip_c has no effect with {chosen[0]}: leave it out (null)"
            )
        if self.fixed_length_normalizer is not None and self.token_level_loss:
            raise ValueError(
                "fixed_length_normalizer needs a sequence-level loss: set "
                "token_level_loss to false"
            )
        if self.positive_nll_coef > 0 and not self.token_level_loss:
            raise ValueError(
                "positive_nll_coef weights a mean over tokens: set token_level_loss to "
                "true"
            )
        if self.use_cispo and not self.token_level_loss:
            raise ValueError("use_cispo needs token_level_loss: set it to true")
        return self

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        """Reject options of a KL term that does not exist."""
        if self.use_kl_in_reward and self.use_on_policy_kl_approximation:
            raise ValueError(
                "use_on_policy_kl_approximation weights a KL term in the loss: set it "
                "to false with use_kl_in_reward"
            )
        return self

    @model_validator(mode="after")
    def _check_truncation(self) -> Self:
        """Reject incomplete settings of importance-sampling truncation."""
        kind = self.truncated_importance_sampling_type
        high = self.truncated_importance_sampling_ratio
        low = self.truncated_importance_sampling_ratio_min
        if kind is None:
            if high is not None or low is not None:
                raise ValueError(
                    "truncated_importance_sampling_ratio(_min) is set without "
                    "truncated_importance_sampling_type: choose tis, icepop or "
                    "seq-mask-tis"
                )
            return self
        if not self.use_importance_sampling_correction:
            raise ValueError(
                f"truncated_importance_sampling_type={kind} needs "
                "use_importance_sampling_correction=true"
            )
        if high is None:
            raise ValueError(
                f"truncated_importance_sampling_type={kind} needs "
                "truncated_importance_sampling_ratio, for example 2.0"
            )
        if kind != "tis" and low is None:
            raise ValueError(
                f"truncated_importance_sampling_type={kind} needs "
                "truncated_importance_sampling_ratio_min, for example 0.5"
            )
        if low is not None and low > high:
            raise ValueError(
                "truncated_importance_sampling_ratio_min must be at most "
                f"truncated_importance_sampling_ratio: got {low} > {high}"
            )
        return self

    @property
    def length_normalizer(self) -> int | None:
        """`fixed_length_normalizer` as a number.

        Raises:
            ConfigError: It still stands for a setting of the generation.
        """
        value = self.fixed_length_normalizer
        if isinstance(value, str):
            raise ConfigError(
                f"fixed_length_normalizer={value} is filled in by the configuration of "
                "a run: outside of a run, give the number itself"
            )
        return value

    @property
    def needs_reference_logprobs(self) -> bool:
        """Whether log-probs of the reference policy are needed."""
        return self.reference_policy_kl_penalty > 0

    @property
    def has_kl_term(self) -> bool:
        """Whether the loss itself reads `reference_policy_logprobs`."""
        return self.needs_reference_logprobs and not self.use_kl_in_reward

    @property
    def has_kl_reward(self) -> bool:
        """Whether a KL penalty is subtracted from the rewards."""
        return self.needs_reference_logprobs and self.use_kl_in_reward

    @property
    def names_needing_generation_logprobs(self) -> list[str]:
        """Names of the settings that require `generation_logprobs`."""
        names = ("use_importance_sampling_correction", "use_on_policy_kl_approximation")
        return [name for name in names if getattr(self, name)]
