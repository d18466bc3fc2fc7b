"""Classic mistakes in policy-gradient code, and the check that catches each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_algorithms.advantages import (
    AdvantageConfig,
    GDPOAdvantageEstimator,
    GRPOAdvantageEstimator,
    ReinforcePlusPlusAdvantageEstimator,
    baselines,
    batch_normalized,
)
from rl_algorithms.losses import ClippedPGLossFn, policy_terms
from rl_algorithms.losses.columns import LossColumns
from rl_algorithms.losses.policy_terms import PolicyTerms
from rl_algorithms.testing import (
    ConformanceError,
    check_estimator,
    check_loss,
    reward_batch,
    token_batch,
)


def neighbour(name: str) -> Any:
    """Import a module of this folder."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


papers = neighbour("policy_reference")
estimators = neighbour("test_advantages_batch_normalized")
grpo = neighbour("test_testing_estimators").grpo


class MeanOverPadding(ClippedPGLossFn):
    def _aggregate(self, per_token, terms, num_seqs, num_toks):
        return (per_token * terms.tokens.mask).mean(-1).sum() / num_seqs.clamp(min=1)


class MeanOfTheMicroBatch(ClippedPGLossFn):
    def _aggregate(self, per_token, terms, num_seqs, num_toks):
        mask = terms.tokens.mask
        return (per_token * mask).sum() / mask.sum().clamp(min=1)


class MeanOfSequencesOfTheMicroBatch(ClippedPGLossFn):
    def _aggregate(self, per_token, terms, num_seqs, num_toks):
        rows = terms.tokens.sample_mask.sum()
        return super()._aggregate(per_token, terms, rows, num_toks)


class DividedByPromptTokensToo(ClippedPGLossFn):
    def __call__(self, data, num_seqs, num_toks, **inputs):
        return super().__call__(data, num_seqs, num_toks + num_seqs * 2, **inputs)


class NothingGuarded(ClippedPGLossFn):
    def _aggregate(self, per_token, terms, num_seqs, num_toks):
        return (per_token * terms.tokens.mask).sum() / num_toks


class RowsThatDoNotCountAreTrained(ClippedPGLossFn):
    def __call__(self, data, num_seqs, num_toks, **inputs):
        data = {**data, "sample_mask": torch.ones_like(data["sample_mask"])}
        return super().__call__(data, num_seqs, num_toks, **inputs)


class ToolTokensAreTrained(ClippedPGLossFn):
    def __call__(self, data, num_seqs, num_toks, **inputs):
        # All tokens from the first sampled one to the end of the row.
        mask = (data["token_mask"].cumsum(-1) > 0).double()
        place = torch.arange(mask.shape[1])
        mask = mask * (place < data["input_lengths"][:, None])
        return super().__call__(
            {**data, "token_mask": mask}, num_seqs, num_toks, **inputs
        )


class AdvantagesWhitenedInTheMicroBatch(ClippedPGLossFn):
    """Normalizes a group larger than the micro-batch in parts."""

    def __call__(self, data, num_seqs, num_toks, **inputs):
        advantages = data["advantages"]
        centred = advantages - advantages.mean()
        return super().__call__(
            {**data, "advantages": centred}, num_seqs, num_toks, **inputs
        )


class MissingLogprobsAreZero(ClippedPGLossFn):
    def __call__(self, data, num_seqs, num_toks, **inputs):
        if "generation_logprobs" not in data:
            zeros = torch.zeros_like(data["token_mask"])
            data = {**data, "generation_logprobs": zeros}
        return super().__call__(data, num_seqs, num_toks, **inputs)


class AdvantagesChangedInPlace(ClippedPGLossFn):
    def __call__(self, data, num_seqs, num_toks, **inputs):
        result = super().__call__(data, num_seqs, num_toks, **inputs)
        data["advantages"].mul_(0.5)
        return result


class InHalfPrecision(ClippedPGLossFn):
    def __call__(self, data, num_seqs, num_toks, **inputs):
        rounded = {name: value.bfloat16().double() for name, value in inputs.items()}
        return super().__call__(data, num_seqs, num_toks, **rounded)


class MetricsWithoutCounts(ClippedPGLossFn):
    def __call__(self, data, num_seqs, num_toks, **inputs):
        loss, metrics = super().__call__(data, num_seqs, num_toks, **inputs)
        return loss, {**metrics, "probs_ratio": float(metrics["probs_ratio"])}


def with_loss(change: Callable[[ClippedPGLossFn, PolicyTerms], Tensor]) -> type:
    """Return a loss whose policy term is `change(loss_fn, terms)`."""

    class Changed(ClippedPGLossFn):
        def _policy_loss(self, terms: PolicyTerms) -> Tensor:
            return change(self, terms)

    return Changed


def right(loss: ClippedPGLossFn, terms: PolicyTerms) -> Tensor:
    return ClippedPGLossFn._policy_loss(loss, terms)


def not_pessimistic(loss, t):
    return torch.minimum(-t.advantages * t.ratio, -t.advantages * t.clipped_ratio)


def clipped_only(loss, t):
    return -t.advantages * t.clipped_ratio


def unclipped_gradient(loss, t):
    """Keep the correct value with the gradient of the unclipped ratio."""
    unclipped = -t.advantages * t.ratio
    return right(loss, t).detach() + unclipped - unclipped.detach()


def dual_clip_of_good_tokens_too(loss, t):
    return torch.minimum(clipped_loss(t), -t.advantages * loss.config.ratio_clip_c)


def clipped_loss(t):
    return torch.maximum(-t.advantages * t.ratio, -t.advantages * t.clipped_ratio)


def cispo_without_detach(loss, t):
    return -t.advantages * t.clipped_ratio * t.tokens.blank(t.tokens.logprobs)


def weights_with_gradient(loss, t):
    weights = (t.tokens.blank(t.tokens.logprobs - t.generation)).exp()
    return clipped_loss(t) * weights


def weights_upside_down(loss, t):
    return clipped_loss(t) / t.weights


def entropy_of_the_wrong_mask(terms: PolicyTerms) -> Tensor:
    """Apply the mask of the preceding tokens."""
    shifted = torch.nn.functional.pad(terms.tokens.token_mask[:, :-1], (1, 0))
    return -terms.tokens.logprobs * shifted


def entropy_without_weight(terms: PolicyTerms) -> Tensor:
    return -terms.tokens.blank(terms.tokens.logprobs)


def patched(**changes: Any) -> Callable[[pytest.MonkeyPatch], type]:
    """Return the correct loss with other functions beneath it."""

    def apply(monkeypatch: pytest.MonkeyPatch) -> type:
        for name, value in changes.items():
            monkeypatch.setattr(policy_terms, name, value)
        return ClippedPGLossFn

    return apply


def shifted_column(value, name, like):
    return value[:, :-1].to(like.dtype)


def zero_where_missing(monkeypatch: pytest.MonkeyPatch) -> type:
    """Return the correct loss, on batches that are filled up with zeros."""

    def read(columns, data):
        per_token = torch.zeros(data["input_ids"].shape)
        zeros = dict.fromkeys(columns._required, per_token)
        return zeros | {"sample_mask": per_token[:, 0]} | dict(data)

    monkeypatch.setattr(LossColumns, "read", read)
    return ClippedPGLossFn


def reversed_kl(logprobs, reference, *rest):
    return right_kl(reference, logprobs, *rest)


def unweighted_kl(logprobs, reference, kind, low, high, weights=None):
    return right_kl(logprobs, reference, kind, low, high)


right_kl = policy_terms.calculate_kl
right_ratios = policy_terms._ratios


def summed_ratio(tokens, prev, config):
    """Use the ratio of the whole answer instead of its tokens' geometric mean."""
    total = (tokens.blank(tokens.logprobs - prev) * tokens.mask).sum(-1, keepdim=True)
    ratio = total.expand_as(prev).exp()
    return ratio, ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)


def mean_over_width(tokens, prev, config):
    mean = tokens.blank(tokens.logprobs - prev).mean(-1, keepdim=True)
    ratio = mean.expand_as(prev).exp()
    return ratio, ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)


def one_clip_bound(tokens, prev, config):
    ratio, _ = right_ratios(tokens, prev, config)
    return ratio, ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_min)


def old_with_gradient(tokens, prev, config):
    """Leave the old log-probs attached on-policy: no gradient remains."""
    return right_ratios(tokens, tokens.logprobs, config)


def mean_weights(log_ratio, *, sequence_level, mask):
    """Average the tokens' log-ratios instead of summing them."""
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    mean = (log_ratio * mask).sum(-1, keepdim=True) / count
    return mean.expand_as(log_ratio).exp()


def dropped_instead_of_clamped(weights, log_ratio, mask, config):
    outside = weights > config.truncated_importance_sampling_ratio
    return weights.masked_fill(outside, 0.0), outside


SEQUENCE = {"token_level_loss": False}
GSPO = {**SEQUENCE, "sequence_level_importance_ratios": True}
KL = {"reference_policy_kl_penalty": 0.1}
CORRECTION = {"use_importance_sampling_correction": True}
TIS = {
    **CORRECTION,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": 1.1,
}
ON_POLICY = {"force_on_policy_ratio": True}
DUAL = {"ratio_clip_c": 1.1}

LOSS_MUTANTS: dict[str, tuple[dict[str, Any], Any, str]] = {
    # The divisor of the loss.
    "mean over padding": (SEQUENCE, MeanOverPadding, "padding"),
    "mean of the micro-batch": ({}, MeanOfTheMicroBatch, "micro_batches"),
    "mean of the rank": ({}, MeanOfTheMicroBatch, "data_parallel"),
    "mean of the packed bin": ({}, MeanOfTheMicroBatch, "packing"),
    "sequences of the micro-batch": (
        SEQUENCE,
        MeanOfSequencesOfTheMicroBatch,
        "micro_batches",
    ),
    "prompt tokens in the divisor": ({}, DividedByPromptTokensToo, "value"),
    "nan if nothing counts": ({}, NothingGuarded, "all_masked"),
    # Which tokens count.
    "rows that do not count": ({}, RowsThatDoNotCountAreTrained, "all_masked"),
    "tokens of tools": ({}, ToolTokensAreTrained, "value"),
    "columns shifted by one": ({}, patched(next_tokens=shifted_column), "value"),
    "entropy of the wrong mask": (
        {"entropy_coef": 0.3},
        patched(_entropy=entropy_of_the_wrong_mask),
        "gradient",
    ),
    # Sources of the columns.
    "group larger than micro-batch": (
        {},
        AdvantagesWhitenedInTheMicroBatch,
        "micro_batches",
    ),
    "missing log-probs are 0": (CORRECTION, MissingLogprobsAreZero, "missing_columns"),
    "any missing column is 0": (
        {},
        zero_where_missing,
        "missing_columns",
    ),
    "advantages changed in place": ({}, AdvantagesChangedInPlace, "pure"),
    "half precision": ({}, InHalfPrecision, "value"),
    "metrics without counts": ({}, MetricsWithoutCounts, "micro_batches"),
    # The ratio and its clip.
    "maximum for minimum": ({}, with_loss(not_pessimistic), "value"),
    "no unclipped branch": ({}, with_loss(clipped_only), "value"),
    "gradient of clipped tokens": ({}, with_loss(unclipped_gradient), "gradient"),
    "one bound for both sides": (
        {"ratio_clip_max": 0.5},
        patched(_ratios=one_clip_bound),
        "value",
    ),
    "sum for mean in the ratio": (GSPO, patched(_ratios=summed_ratio), "value"),
    "ratio over the width": (GSPO, patched(_ratios=mean_over_width), "padding"),
    "dual clip of good tokens": (
        DUAL,
        with_loss(dual_clip_of_good_tokens_too),
        "value",
    ),
    "old log-probs not detached": (
        ON_POLICY,
        patched(_ratios=old_with_gradient),
        "gradient",
    ),
    "cispo weight not detached": (
        {"use_cispo": True},
        with_loss(cispo_without_detach),
        "gradient",
    ),
    # Importance weights.
    "weights carry gradient": (
        CORRECTION,
        with_loss(weights_with_gradient),
        "gradient",
    ),
    "weights upside down": (CORRECTION, with_loss(weights_upside_down), "value"),
    "mean for sum in the weights": (
        {**GSPO, **CORRECTION},
        patched(importance_weights=mean_weights),
        "value",
    ),
    "dropped instead of clamped": (
        TIS,
        patched(truncate_weights=dropped_instead_of_clamped),
        "value",
    ),
    # The KL term.
    "kl of the other direction": (KL, patched(calculate_kl=reversed_kl), "value"),
    "kl without weights": (
        {**KL, "use_on_policy_kl_approximation": True},
        patched(calculate_kl=unweighted_kl),
        "value",
    ),
    "kl without score function": (
        KL,
        patched(_score_function=torch.ones_like),
        "gradient",
    ),
    "entropy without weights": (
        {"entropy_coef": 0.3},
        patched(_entropy=entropy_without_weight),
        "value",
    ),
}


@pytest.mark.parametrize("name", LOSS_MUTANTS)
def test_each_mistake_in_a_loss_is_caught(name, monkeypatch):
    settings, mutant, check = LOSS_MUTANTS[name]
    settings = {"reference_policy_kl_penalty": 0.0, **settings}
    loss = mutant if isinstance(mutant, type) else mutant(monkeypatch)
    with pytest.raises(ConformanceError) as caught:
        check_loss(
            loss(settings),
            token_batch,
            papers.reference(settings),
            checks=[check],
            optional=["prev_logprobs"] if "missing log" in name else (),
        )
    assert caught.value.check == check


def whitened_with_nan(values: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum()
    deviation = torch.where(weights != 0, values - (values * weights).sum() / total, 0)
    return deviation / ((deviation.square() * weights).sum() / total).sqrt()


class Mutant:
    """An estimator with changed rewards, groups or results."""

    def __init__(self, estimator: Any, before: Any = None, after: Any = None) -> None:
        self._estimator, self._before, self._after = estimator, before, after

    def compute_advantage(self, rewards, groups, valid, **columns):
        if self._before is not None:
            rewards, groups, valid, columns = self._before(
                rewards, groups, valid, columns
            )
        found = self._estimator.compute_advantage(rewards, groups, valid, **columns)
        return found if self._after is None else self._after(found)


def grpo_estimator(**settings: Any) -> GRPOAdvantageEstimator:
    return GRPOAdvantageEstimator(AdvantageConfig(**settings))


def leave_one_out(batch):
    """RLOO with the spread of the others; in a group of two, of both rows."""
    result = []
    for row in range(len(batch.rewards)):
        members = estimators.members(batch, row)
        whole = torch.tensor([float(batch.rewards[i]) for i in members])
        others = torch.tensor([float(batch.rewards[i]) for i in members if i != row])
        if not batch.valid_mask[row] or len(others) == 0:
            result.append(0.0)
            continue
        std = float(others.std()) if len(others) > 1 else 0.0
        std = std or (float(whole.std()) if len(whole) > 1 else 0.0) or 1.0
        result.append((float(batch.rewards[row]) - float(others.mean())) / std)
    return result


def not_normalised_in_pairs(monkeypatch):
    """The other's reward alone has no spread, so a pair is not normalized."""
    right_std = baselines._GroupMoments.std

    def std(self, rewards, leave_one_out):
        return torch.where(
            self._count == 2, 0.0, right_std(self, rewards, leave_one_out)
        )

    monkeypatch.setattr(baselines._GroupMoments, "std", std)
    return grpo_estimator(), reward_batch, leave_one_out, True


def itself_in_its_baseline(monkeypatch):
    return (
        grpo_estimator(use_leave_one_out_baseline=False),
        reward_batch,
        leave_one_out,
        True,
    )


def population_std(monkeypatch):
    """Divide by n instead of n - 1."""

    def std(self, rewards, leave_one_out):
        _, deviation = self._centre(rewards)
        return (self._sum(deviation.square()) / self._count.clamp(min=1)).sqrt()

    monkeypatch.setattr(baselines._GroupMoments, "std", std)
    estimator = grpo_estimator(use_leave_one_out_baseline=False)
    return estimator, reward_batch, grpo, True


def failed_rows_in_the_mean(monkeypatch):
    def count_all(rewards, groups, valid, columns):
        return rewards, groups, torch.ones_like(valid), columns

    estimator = grpo_estimator(use_leave_one_out_baseline=False)
    return Mutant(estimator, count_all), reward_batch, grpo, True


def groups_by_equal_reward(monkeypatch):
    """Group rows by content: equal rows of two groups become one group."""

    def merge(rewards, groups, valid, columns):
        return rewards, groups // 2, valid, columns

    estimator = grpo_estimator(use_leave_one_out_baseline=False)
    return Mutant(estimator, merge), reward_batch, grpo, True


def large_epsilon(monkeypatch):
    estimator = grpo_estimator(use_leave_one_out_baseline=False)
    return Mutant(estimator, after=lambda a: a / 1.01), reward_batch, grpo, True


def reinforce(kl=True, **changes):
    estimator = ReinforcePlusPlusAdvantageEstimator(
        AdvantageConfig(name="reinforce_plus_plus")
    )
    return (
        estimators.PerToken(Mutant(estimator, **changes)),
        lambda seed: estimators.with_tokens(seed, kl=kl),
        lambda batch: estimators.reinforce_plus_plus(batch, False),
        False,
    )


def nan_if_nothing_counts(monkeypatch):
    def finish(advantages, rewards, valid, config):
        return advantages * valid  # nan x 0 is nan

    monkeypatch.setattr(batch_normalized, "whiten", whitened_with_nan)
    monkeypatch.setattr(batch_normalized, "finish_advantages", finish)
    return reinforce(kl=False)


def mean_over_rows(monkeypatch):
    """Normalize over answers instead of tokens."""
    right_whiten = batch_normalized.whiten

    def whiten(values, weights):
        per_row = weights / weights.sum(-1, keepdim=True).clamp(min=1)
        return right_whiten(values, per_row)

    monkeypatch.setattr(batch_normalized, "whiten", whiten)
    return reinforce()


def with_kl(change: Callable[[Tensor], Tensor]):
    def before(rewards, groups, valid, columns):
        changed = {**columns, "kl_penalty": change(columns["kl_penalty"])}
        return rewards, groups, valid, changed

    return lambda monkeypatch: reinforce(before=before)


def added_before_normalised(monkeypatch):
    class Summed(GDPOAdvantageEstimator):
        def compute_advantage(self, rewards, groups, valid, **columns):
            named = columns["named_rewards"]
            total = sum(
                self._weights(named)[k] * v.nan_to_num() for k, v in named.items()
            )
            relative = self._relative(total, groups, valid)
            return batch_normalized.whiten(relative, valid)

    return gdpo(Summed)


def weights_by_position(monkeypatch):
    class Positional(GDPOAdvantageEstimator):
        def _weights(self, named):
            found = super()._weights(named)
            return dict(zip(found, reversed(found.values()), strict=True))

    return gdpo(Positional)


def gdpo(cls):
    config = AdvantageConfig(
        name="gdpo",
        use_leave_one_out_baseline=False,
        reward_weights={"reward/short": 0.5},
    )
    return cls(config), estimators.several_rewards, estimators.gdpo, False


ESTIMATOR_MUTANTS: dict[str, tuple[Any, str]] = {
    "leave-one-out of two": (not_normalised_in_pairs, "value"),
    "itself in its baseline": (itself_in_its_baseline, "value"),
    "n instead of n - 1": (population_std, "value"),
    "failed rows in the mean": (failed_rows_in_the_mean, "rows_that_do_not_count"),
    "two prompts in one group": (groups_by_equal_reward, "other_groups"),
    "large epsilon": (large_epsilon, "value"),
    "nan if nothing counts": (nan_if_nothing_counts, "all_masked"),
    "nan if all are equal": (nan_if_nothing_counts, "equal_rewards"),
    "normalised over answers": (mean_over_rows, "value"),
    "kl of the wrong sign": (with_kl(lambda kl: -kl), "value"),
    "kl of the tokens before": (with_kl(lambda kl: kl.flip(-1)), "value"),
    "kl of one token only": (
        with_kl(lambda kl: kl - kl.roll(-1, -1)),
        "value",
    ),
    "rewards added, then normalised": (added_before_normalised, "value"),
    "weights of the wrong rewards": (weights_by_position, "value"),
}


@pytest.mark.parametrize("name", ESTIMATOR_MUTANTS)
def test_each_mistake_in_an_estimator_is_caught(name, monkeypatch):
    mutant, check = ESTIMATOR_MUTANTS[name]
    estimator, make_batch, reference, local = mutant(monkeypatch)
    with pytest.raises(ConformanceError) as caught:
        check_estimator(estimator, make_batch, reference, checks=[check], local=local)
    assert caught.value.check == check


def test_leave_one_out_itself_passes():
    check_estimator(grpo_estimator(), reward_batch, leave_one_out)
