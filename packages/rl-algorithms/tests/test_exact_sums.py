"""Every estimator that a page explains, against exact sums over all outcomes.

A batch has one row per possible outcome, and `sample_mask` holds its probability. So a
mean over the rows is an expectation, and an unbiased estimator is exact up to rounding.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_algorithms.advantages import GRPOAdvantageEstimator
from rl_algorithms.advantages.config import AdvantageConfig
from rl_algorithms.advantages.kl_in_reward import add_kl_penalty
from rl_algorithms.evaluation import cons_at_k, mean_with_interval, pass_at_k
from rl_algorithms.losses.clipped_pg import ClippedPGLossFn
from rl_algorithms.losses.config import ClippedPGLossConfig
from rl_algorithms.losses.distillation import DistillationLossFn
from rl_distributed.batch.batched_data_dict import BatchedDataDict

V = 5
POLICIES = ("sampler", "old", "new", "reference")
ONE = torch.ones((), dtype=torch.float64)


def drawn_logits(seed: int, far: float = 1.0) -> dict[str, Tensor]:
    """Return logits [V] of four policies over one token; `far` is their spread."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(V, generator=generator, dtype=torch.float64)
    return {
        name: common + far * torch.randn(V, generator=generator, dtype=torch.float64)
        for name in POLICIES
    }


def run(
    settings: dict[str, Any],
    weights: Tensor,
    tokens: Tensor,
    logprobs: dict[str, Tensor],
    advantages: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of answers of one token each, weighted, and its metrics.

    Args:
        settings: Of the loss.
        weights: [N] probability of each row.
        tokens: [N] the token of each row.
        logprobs: [V] of the policies by name; without "sampler" the batch has none.
        advantages: [N]; default 0.
        dtype: Type of the log-probs.
    """
    names = {
        "old": "prev_logprobs",
        "sampler": "generation_logprobs",
        "reference": "reference_policy_logprobs",
    }
    zeros = torch.zeros(len(tokens), 1, dtype=dtype)

    def column(values: Tensor) -> Tensor:
        return torch.cat([zeros, values[tokens].to(dtype)[:, None]], 1)

    data = {
        "token_mask": torch.tensor([[0.0, 1.0]]).expand(len(tokens), 2),
        "sample_mask": weights,
        "advantages": torch.zeros(len(tokens)) if advantages is None else advantages,
    } | {names[k]: column(v).detach() for k, v in logprobs.items() if k in names}
    loss, metrics = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0, **settings})(
        data, ONE, ONE, next_token_logprobs=column(logprobs["new"])[:, 1:]
    )
    return loss, {name: float(value) for name, value in metrics.items()}


def over_tokens(
    settings: dict[str, Any], by: str, logprobs: dict[str, Tensor], **more: Any
) -> tuple[Tensor, dict[str, float]]:
    """Return the same for one answer of one token, sampled by one of the policies."""
    weights = logprobs[by].detach().exp()
    return run(settings, weights, torch.arange(V), logprobs, **more)


def logprobs_of(logits: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values.log_softmax(-1) for name, values in logits.items()}


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) of log-probs."""
    return (p.exp() * (p - q)).sum()


def entropy(p: Tensor) -> Tensor:
    return -(p.exp() * p).sum()


def js_divergence(p: Tensor, q: Tensor) -> Tensor:
    middle = ((p.exp() + q.exp()) / 2).log()
    return 0.5 * (kl(p, middle) + kl(q, middle))


# Metrics -----------------------------------------------------------------------------


@pytest.mark.parametrize("far", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_metrics_of_tokens_of_the_sampler(seed, far):
    found = logprobs_of(drawn_logits(seed, far))
    sampler, old, new = found["sampler"], found["old"], found["new"]
    _, metrics = over_tokens({}, "sampler", found)
    exact = {
        "gen_kl_error": kl(sampler, old),
        "policy_kl_error": kl(old, sampler),
        "js_divergence_error": js_divergence(old, sampler),
        "approx_entropy": entropy(new),
        "sampling_importance_ratio": 1.0,
        "token_mult_prob_error": (sampler.exp() * (old - sampler).abs().exp()).sum(),
    }
    for name, value in exact.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-9), name


@pytest.mark.parametrize("seed", range(3))
def test_metrics_of_tokens_of_the_policy_before_the_step(seed):
    found = logprobs_of(drawn_logits(seed))
    old, new = found["old"], found["new"]
    # With and without log-probs of the sampler, which is the same policy here.
    for given in ({}, {"sampler": old}):
        columns = {"old": old, "new": new, "reference": found["reference"], **given}
        loss, metrics = over_tokens({"entropy_coef": 1.0}, "old", columns)
        exact = {
            "approx_entropy": entropy(new),
            "approx_kl": kl(old, new),
            "entropy_bonus": entropy(new),
            "probs_ratio": 1.0,
        }
        for name, value in exact.items():
            assert metrics[name] == pytest.approx(float(value), rel=1e-9), name
        assert loss.item() == pytest.approx(-entropy(new).item(), rel=1e-9)


@pytest.mark.parametrize("far", [1e-2, 1e-3])
def test_divergences_near_0_survive_float32(far):
    found = logprobs_of(drawn_logits(3, far))
    # Compare the values as float32 holds them.
    rounded = {name: value.float().double() for name, value in found.items()}
    _, exact = over_tokens({}, "sampler", rounded)
    _, metrics = over_tokens({}, "sampler", rounded, dtype=torch.float32)
    for name in ("gen_kl_error", "policy_kl_error", "js_divergence_error"):
        assert exact[name] > 0
        assert metrics[name] == pytest.approx(exact[name], rel=0.01), name


def test_the_weight_of_an_answer_is_the_product_over_its_tokens():
    """GSPO with a correction: the mean weight over answers of the sampler is 1."""
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(2, *shape, generator=generator, dtype=torch.float64).log_softmax(-1)
        for shape in ((3,), (3, 3))
    )
    answers = torch.tensor(list(itertools.product(range(3), repeat=2)))
    sampler, old = (
        torch.stack(
            [
                torch.zeros(9, dtype=torch.float64),
                first[who][answers[:, 0]],
                second[who][answers[:, 0], answers[:, 1]],
            ],
            1,
        )
        for who in (0, 1)
    )
    data = {
        "token_mask": torch.tensor([[0.0, 1.0, 1.0]]).expand(9, 3),
        "sample_mask": sampler.sum(1).exp(),
        "advantages": torch.zeros(9),
        "prev_logprobs": old,
        "generation_logprobs": sampler,
    }
    loss_fn = ClippedPGLossFn(
        {
            "reference_policy_kl_penalty": 0.0,
            "sequence_level_importance_ratios": True,
            "token_level_loss": False,
            "use_importance_sampling_correction": True,
        }
    )
    _, metrics = loss_fn(data, ONE, ONE, next_token_logprobs=old[:, 1:])
    assert float(metrics["sampling_importance_ratio"]) == pytest.approx(1.0)


# The KL term and the entropy bonus ----------------------------------------------------


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    return found


def kl_term(kind: str, way: str, logits: dict[str, Tensor], **settings: Any) -> Any:
    """Return value and gradient of the KL term of an on-policy step."""
    new = logits["new"].clone().requires_grad_()
    found = logprobs_of({**logits, "new": new})
    options = {
        "reference_policy_kl_penalty": 1.0,
        "reference_policy_kl_type": kind,
        "reference_policy_kl_gradient": way,
        "kl_input_clamp_value": None,
        "kl_output_clamp_value": None,
        **settings,
    }
    by = "new"
    columns = {"new": found["new"], "reference": found["reference"]}
    if settings.get("use_on_policy_kl_approximation"):
        by, columns = "sampler", found
    loss, metrics = over_tokens(options, by, columns)
    exact = kl(found["new"], found["reference"])
    got = gradient(loss, new)
    return metrics["kl_penalty"], got, exact.item(), gradient(exact, new)


# Which estimates match the value of KL(policy || reference), and which its gradient;
# the table in docs/algorithms/grpo.md agrees.
UNBIASED = {
    ("k1", "score_function"): (True, True),
    ("k2", "score_function"): (False, False),
    ("k3", "score_function"): (True, True),
    ("k1", "direct"): (True, False),
    ("k2", "direct"): (False, True),
    ("k3", "direct"): (True, False),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("kind", "way"), UNBIASED)
def test_values_and_gradients_of_the_kl_term(kind, way, weighted):
    for seed in range(3):
        value, got, exact, wanted = kl_term(
            kind, way, drawn_logits(seed), use_on_policy_kl_approximation=weighted
        )
        has_value, has_gradient = UNBIASED[kind, way]
        assert (value == pytest.approx(exact, rel=1e-9)) is has_value
        assert torch.allclose(got, wanted, rtol=1e-9, atol=1e-12) is has_gradient


def test_the_direct_gradients_are_those_of_other_quantities():
    for seed in range(3):
        logits = drawn_logits(seed)
        _, k1, *_ = kl_term("k1", "direct", logits)
        torch.testing.assert_close(k1, torch.zeros_like(k1), rtol=0, atol=1e-12)
        _, k3, *_ = kl_term("k3", "direct", logits)
        new = logits["new"].clone().requires_grad_()
        forward = kl(logits["reference"].log_softmax(-1), new.log_softmax(-1))
        torch.testing.assert_close(k3, gradient(forward, new))


def test_weighted_kl_estimates_are_bounded():
    """A token that the sampler almost never emits has a large weight."""
    settings = {
        "reference_policy_kl_penalty": 1.0,
        "use_on_policy_kl_approximation": True,
        "kl_output_clamp_value": 10.0,
    }
    new = torch.tensor([0.0], dtype=torch.float64, requires_grad=True)
    found = {"new": new, "old": new.detach(), "reference": new.detach() + 2.0}
    found["sampler"] = new.detach() - 5.0
    weight = torch.ones(1, dtype=torch.float64)
    for way, wanted in (("score_function", 10.0), ("direct", 0.0)):
        loss, metrics = run(
            {**settings, "reference_policy_kl_gradient": way},
            weight,
            torch.tensor([0]),
            found,
        )
        assert metrics["kl_penalty"] == 10.0
        assert loss.item() == 10.0
        assert gradient(loss, new).item() == pytest.approx(wanted)


def test_the_entropy_bonus_has_the_gradient_of_the_entropy():
    for seed in range(3):
        logits = drawn_logits(seed)
        new = logits["new"].clone().requires_grad_()
        found = logprobs_of({"old": logits["old"], "new": new})
        loss, _ = over_tokens({"entropy_coef": 1.0}, "old", found)
        wanted = gradient(entropy(found["new"]), new)
        torch.testing.assert_close(gradient(loss, new), -wanted)


# Policy gradients ---------------------------------------------------------------------

REWARDS = torch.tensor([1.0, 0.0, 0.3, -0.5, 2.0], dtype=torch.float64)


def group_gradient(
    size: int,
    loss: dict[str, Any],
    estimator: dict[str, Any],
    logits: dict[str, Tensor],
) -> Tensor:
    """The expected gradient over all groups of `size` answers, with the KL's reward."""
    new = logits["new"].clone().requires_grad_()
    found = logprobs_of({**logits, "new": new})
    groups = torch.tensor(list(itertools.product(range(V), repeat=size)))
    tokens = groups.flatten()
    # Each answer counts for 1 / size of its group.
    weights = found["new"].detach()[groups].sum(1).exp().repeat_interleave(size) / size
    columns: dict[str, Any] = {}
    config = ClippedPGLossConfig(**loss)
    if config.has_kl_reward:
        ends = torch.tensor([[0.0, 1.0]], dtype=torch.float64).expand(len(tokens), 2)
        rows = BatchedDataDict(
            token_mask=ends,
            sample_mask=weights,
            prev_logprobs=ends * found["new"].detach()[tokens][:, None],
            reference_policy_logprobs=ends * found["reference"][tokens][:, None],
        )
        add_kl_penalty(rows, config)
        columns = {"kl_penalty": rows["kl_penalty"]}
    advantages = GRPOAdvantageEstimator(AdvantageConfig(**estimator)).compute_advantage(
        REWARDS[tokens],
        torch.arange(len(groups)).repeat_interleave(size),
        **columns,
    )
    value, _ = run(loss, weights, tokens, {"new": found["new"]}, advantages)
    return -gradient(value, new)


def objective_gradient(logits: dict[str, Tensor], kl_weight: float = 0.0) -> Tensor:
    new = logits["new"].clone().requires_grad_()
    found = new.log_softmax(-1)
    reference = logits["reference"].log_softmax(-1)
    return gradient(
        (found.exp() * REWARDS).sum() - kl_weight * kl(found, reference), new
    )


@pytest.mark.parametrize("size", [2, 3])
def test_rloo_has_the_gradient_of_reward_and_kl(size):
    rloo = {
        "disable_ppo_ratio": True,
        "token_level_loss": False,
        "fixed_length_normalizer": 1,
        "use_kl_in_reward": True,
        "reference_policy_kl_penalty": 0.3,
        "kl_output_clamp_value": None,
    }
    estimator = {"normalize_rewards": False}
    logits = drawn_logits(1)
    wanted = objective_gradient(logits, 0.3)
    got = {
        kind: group_gradient(
            size, {**rloo, "reference_policy_kl_type": kind}, estimator, logits
        )
        for kind in ("k1", "k2", "k3")
    }
    torch.testing.assert_close(got["k1"], wanted)
    # As a reward it must be k1.
    assert not torch.allclose(got["k2"], wanted, rtol=1e-2)
    assert not torch.allclose(got["k3"], wanted, rtol=1e-2)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_as_a_reward_other_estimates_than_k1_are_too_weak_near_the_reference(kind):
    logits = drawn_logits(1, far=0.01)
    settings = {"disable_ppo_ratio": True, "use_kl_in_reward": True}

    def pull(name):
        """Return the gradient of the KL alone, without the reward's."""
        penalties = (
            {**settings, "reference_policy_kl_penalty": weight}
            for weight in (1.0, 1e-9)
        )
        with_kl, without = (
            group_gradient(
                2,
                {**penalty, "reference_policy_kl_type": name},
                {"normalize_rewards": False},
                logits,
            )
            for penalty in penalties
        )
        return (with_kl - without).norm()

    assert pull(kind) < 0.05 * pull("k1")


@pytest.mark.parametrize("size", [2, 3])
def test_drgrpo_scales_the_gradient_and_the_mean_of_the_others_does_not(size):
    loss = {
        "token_level_loss": False,
        "fixed_length_normalizer": 1,
        "reference_policy_kl_penalty": 0.0,
    }
    logits = drawn_logits(2)
    wanted = objective_gradient(logits)
    for leave_one_out, factor in ((True, 1.0), (False, (size - 1) / size)):
        estimator = {
            "normalize_rewards": False,
            "use_leave_one_out_baseline": leave_one_out,
        }
        got = group_gradient(size, loss, estimator, logits)
        torch.testing.assert_close(got, factor * wanted)


@pytest.mark.parametrize("corrected", [True, False])
def test_the_correction_makes_answers_of_the_sampler_count_as_the_policys(corrected):
    settings = {"use_importance_sampling_correction": corrected}
    logits = drawn_logits(4)
    new = logits["new"].clone().requires_grad_()
    found = logprobs_of({"sampler": logits["sampler"], "new": new})
    loss, _ = over_tokens(settings, "sampler", found, advantages=REWARDS)
    got, wanted = -gradient(loss, new), objective_gradient(logits)
    assert torch.allclose(got, wanted, rtol=1e-9) is corrected


# Distillation -------------------------------------------------------------------------


@pytest.mark.parametrize("outside", [{}, {"bucket_outside_topk": True}])
@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed", "jsd"])
def test_divergences_over_a_whole_vocabulary(kind, outside):
    """If the teacher's k tokens are the whole vocabulary, nothing is estimated."""
    logits = drawn_logits(5)
    teacher, student = logits["old"], logits["new"]
    p, q = teacher.log_softmax(-1), student.log_softmax(-1)
    middle = (0.3 * p.exp() + 0.7 * q.exp()).log()
    exact = {
        "forward": kl(p, q),
        "reverse": kl(q, p),
        "mixed": 0.3 * kl(p, q) + 0.7 * kl(q, p),
        "jsd": 0.3 * kl(p, middle) + 0.7 * kl(q, middle),
    }
    settings = {"kl_type": kind, "mixed_kl_weight": 0.3, **outside}
    loss, _ = DistillationLossFn(settings)(
        {
            "token_mask": torch.tensor([[0.0, 1.0]]),
            "sample_mask": torch.ones(1),
            "topk_logits": teacher.expand(1, 2, V),
            "topk_log_normalizer": teacher.logsumexp(-1).expand(1, 2),
        },
        ONE,
        ONE,
        student_topk_logits=student.expand(1, 1, V),
        student_log_normalizer=student.logsumexp(-1).expand(1, 1),
    )
    # The bucket of all other tokens has a probability of at least 1e-8.
    assert loss.item() == pytest.approx(float(exact[kind]), rel=1e-6)


# Evaluation ---------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_pass_at_k_is_that_of_k_fresh_answers(k):
    n, p = 5, 0.3
    mean = sum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k)
        for c in range(n + 1)
    )
    assert mean == pytest.approx(1 - (1 - p) ** k, rel=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_cons_at_k_is_that_of_k_fresh_answers(k):
    chances = {"7": 0.45, "8": 0.35, None: 0.2}

    def expected(number: int, value: Any) -> float:
        return sum(
            math.prod(chances[answer] for answer in answers) * value(answers)
            for answers in itertools.product(chances, repeat=number)
        )

    def wins(answers: Any) -> float:
        votes = Counter(answer for answer in answers if answer is not None)
        most = max(votes.values(), default=0)
        tied = [answer for answer, count in votes.items() if count == most]
        return tied.count("7") / len(tied) if tied else 0.0

    got = expected(
        4, lambda answers: cons_at_k(answers, [a == "7" for a in answers], k)
    )
    assert got == pytest.approx(expected(k, wins), rel=1e-12)


def test_intervals_have_the_variance_of_the_mean():
    values, chances = (0.0, 0.5, 1.0), (0.5, 0.2, 0.3)
    drawn = list(itertools.product(range(3), repeat=3))
    weights = [math.prod(chances[i] for i in chosen) for chosen in drawn]
    found = [mean_with_interval([values[i] for i in chosen]) for chosen in drawn]
    mean = sum(p * x for p, x in zip(chances, values, strict=True))
    variance = sum(p * (x - mean) ** 2 for p, x in zip(chances, values, strict=True))
    assert sum(
        w * f.mean for w, f in zip(weights, found, strict=True)
    ) == pytest.approx(mean)
    squares = sum(
        w * ((f.high - f.mean) / 1.959963984540054) ** 2
        for w, f in zip(weights, found, strict=True)
    )
    assert squares == pytest.approx(variance / 3)
