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
    """Options of `ClippedPGLossFn`; every combination is checked here, before a model.

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
    """The ratio is clipped from below at `1 - ratio_clip_min`; 1: it is not."""
    ratio_clip_max: float = Field(default=0.2, ge=0.0)
    """The ratio is clipped from above at `1 + ratio_clip_max`."""
    ratio_clip_c: float | None = Field(default=None, gt=1.0)
    """Dual clip: where the advantage is negative the loss is at most `-A * c`."""
    token_level_loss: bool = True
    """Average over all tokens of the batch; false: first over each sequence."""
    fixed_length_normalizer: PositiveInt | Literal["max_new_tokens"] | None = None
    """Dr. GRPO: divide a sequence's sum by this constant instead of by its length. In a
    run's configuration `max_new_tokens` stands for that setting of the generation."""
    sequence_level_importance_ratios: bool = False
    """GSPO: one ratio per sequence, the geometric mean of its token ratios."""
    disable_ppo_ratio: bool = False
    """REINFORCE: `-A * log p`, no ratio and no clipping."""
    force_on_policy_ratio: bool = False
    """The ratio is 1 with the gradient of `log p`; `prev_logprobs` is not read."""
    use_cispo: bool = False
    """CISPO: the clipped ratio only weights `log p`; no token loses its gradient."""

    reference_policy_kl_penalty: float = Field(default=0.01, ge=0.0)
    """Weight of the KL term; 0 needs no reference policy."""
    reference_policy_kl_type: KLType = "k3"
    """Estimator of KL(policy || reference), see `calculate_kl`."""
    reference_policy_kl_gradient: Literal["score_function", "direct"] = "score_function"
    """`score_function` adds the gradient through the sampling distribution, which makes
    k1 and k3 unbiased; `direct` differentiates the estimator alone, as GRPO's paper."""
    kl_input_clamp_value: float | None = Field(default=20.0, gt=0.0)
    """Differences of log-probs are clamped to +- this before they are exponentiated."""
    kl_output_clamp_value: float | None = Field(default=10.0, gt=0.0)
    """Estimates are clamped to +- this, after they have been weighted."""
    use_on_policy_kl_approximation: bool = False
    """Weight the KL estimates by policy over sampler; needs `generation_logprobs`."""
    use_kl_in_reward: bool = False
    """Take the KL penalty from the rewards instead of adding it to the loss: its
    estimates are those of the weights before the step, and carry no gradient. Only k1
    then pulls as the divergence does."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of an entropy bonus, estimated from the sampled tokens; 0: none."""
    positive_nll_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the negative log-likelihood of the answers that succeeded, a mean over
    their tokens (VAPO, arXiv:2504.05118, takes 0.1); needs `nll_weights`; 0: none."""

    use_importance_sampling_correction: bool = False
    """Weight the loss by trainer over sampler; needs `generation_logprobs`."""
    truncated_importance_sampling_type: TruncatedISType | None = None
    """How far-off weights are treated: `tis` clamps, `icepop` drops the tokens,
    `seq-mask-tis` drops the sequences whose geometric-mean weight is outside."""
    truncated_importance_sampling_ratio: float | None = Field(default=None, gt=0.0)
    """Largest weight."""
    truncated_importance_sampling_ratio_min: float | None = Field(default=None, ge=0.0)
    """Smallest weight; `tis` may leave it out (0)."""

    @model_validator(mode="after")
    def _check_ratio(self) -> Self:
        """Refuse combinations of ratio options that exclude each other."""
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
        """Refuse options of a KL term that is not there."""
        if self.use_kl_in_reward and self.use_on_policy_kl_approximation:
            raise ValueError(
                "use_on_policy_kl_approximation weights a KL term in the loss: set it "
                "to false with use_kl_in_reward"
            )
        return self

    @model_validator(mode="after")
    def _check_truncation(self) -> Self:
        """Refuse half-configured importance-sampling truncation."""
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
                "a run: give a loss of your own the number"
            )
        return value

    @property
    def needs_reference_logprobs(self) -> bool:
        """Whether log-probs of the reference policy are needed at all."""
        return self.reference_policy_kl_penalty > 0

    @property
    def has_kl_term(self) -> bool:
        """Whether the loss itself reads `reference_policy_logprobs`."""
        return self.needs_reference_logprobs and not self.use_kl_in_reward

    @property
    def has_kl_reward(self) -> bool:
        """Whether a KL penalty is to be taken from the rewards."""
        return self.needs_reference_logprobs and self.use_kl_in_reward

    @property
    def names_needing_generation_logprobs(self) -> list[str]:
        """Return the settings for which a batch must have `generation_logprobs`."""
        names = ("use_importance_sampling_correction", "use_on_policy_kl_approximation")
        return [name for name in names if getattr(self, name)]
