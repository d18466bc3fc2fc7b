"""Against float64 references, each written row by row from its paper's formula."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_algorithms.errors import LossInputError
from rl_algorithms.losses.clipped_pg import ClippedPGLossFn
from rl_distributed.metrics.values import Max, Mean, Min, reduce_metrics
from rl_models.interfaces import LossFunction
from rl_models.types import LossType

NUM_ROWS, WIDTH = 6, 9


def make_batch(seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Return a batch and current log-probs [B, S-1]; some ratios are out of bounds."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float, *shape: int) -> Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64)
    for row in range(NUM_ROWS):
        mask[row, 2 : 4 + row] = 1
    sample_mask = torch.ones(NUM_ROWS, dtype=torch.float64)
    sample_mask[4] = 0
    prev = -2 + normal(0.5, NUM_ROWS, WIDTH)
    data = {
        "token_mask": mask,
        "sample_mask": sample_mask,
        "advantages": normal(1.0, NUM_ROWS),
        "prev_logprobs": prev,
        "generation_logprobs": prev + normal(0.3, NUM_ROWS, WIDTH),
        "reference_policy_logprobs": prev + normal(0.5, NUM_ROWS, WIDTH),
    }
    current = prev[:, 1:] + normal(0.4, NUM_ROWS, WIDTH - 1)
    return data, (current * mask[:, 1:]).requires_grad_()


def counts(data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    toks = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
    return data["sample_mask"].sum(), toks


def run(settings: dict[str, Any], data: dict[str, Tensor], current: Tensor):
    return ClippedPGLossFn({"reference_policy_kl_penalty": 0.0, **settings})(
        data, *counts(data), next_token_logprobs=current
    )


def tokens_of(data: dict[str, Tensor], current: Tensor):
    """Yield per valid row: advantage and lists of (new, old, sampler, reference)."""
    for row in range(NUM_ROWS):
        if not data["sample_mask"][row]:
            continue
        places = [t for t in range(WIDTH - 1) if data["token_mask"][row, t + 1]]
        yield (
            data["advantages"][row],
            [
                (
                    current[row, t],
                    data["prev_logprobs"][row, t + 1],
                    data["generation_logprobs"][row, t + 1],
                    data["reference_policy_logprobs"][row, t + 1],
                )
                for t in places
            ],
        )


def clip(value: Tensor, low: float, high: float) -> Tensor:
    bounds = torch.tensor([low, high], dtype=torch.float64)
    return torch.minimum(torch.maximum(value, bounds[0]), bounds[1])


def check(settings: dict[str, Any], reference, *, seed: int = 0) -> None:
    """Compare value and gradient; `reference(data, current)` returns a scalar loss."""
    data, current = make_batch(seed)
    loss, _ = run(settings, data, current)
    (grad,) = torch.autograd.grad(loss, current)
    twin = current.detach().clone().requires_grad_()
    want = reference(data, twin)
    (want_grad,) = torch.autograd.grad(want, twin)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, want_grad, rtol=1e-10, atol=1e-12)


def ppo_token(adv, new, old, low=0.2, high=0.2):
    """Return PPO's loss of a token (1707.06347, eq. 7)."""
    ratio = (new - old).exp()
    return -torch.minimum(ratio * adv, clip(ratio, 1 - low, 1 + high) * adv)


def token_mean(rows):
    flat = [loss for losses in rows for loss in losses]
    return torch.stack(flat).sum() / len(flat)


def sequence_mean(rows):
    return torch.stack([torch.stack(losses).mean() for losses in rows]).mean()


@pytest.mark.parametrize("seed", range(4))
def test_ppo_and_dapo_average_over_tokens(seed):
    """DAPO (2503.14476), eq. 8: two clip bounds, mean over all tokens."""
    check(
        {"ratio_clip_max": 0.28},
        lambda data, cur: token_mean(
            [ppo_token(adv, n, o, 0.2, 0.28) for n, o, _, _ in toks]
            for adv, toks in tokens_of(data, cur)
        ),
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(4))
def test_grpo_averages_over_sequences_with_direct_k3(seed):
    """GRPO (2402.03300), eq. 3 and 4."""

    def token(adv, new, old, ref):
        kl = (ref - new).exp() - (ref - new) - 1
        return ppo_token(adv, new, old) + 0.04 * kl

    check(
        {
            "token_level_loss": False,
            "reference_policy_kl_penalty": 0.04,
            "reference_policy_kl_gradient": "direct",
        },
        lambda data, cur: sequence_mean(
            [token(adv, n, o, r) for n, o, _, r in toks]
            for adv, toks in tokens_of(data, cur)
        ),
        seed=seed,
    )


def test_dr_grpo_divides_by_a_constant():
    """Dr. GRPO (2503.20783): sum over tokens, a constant instead of the length."""
    check(
        {"token_level_loss": False, "fixed_length_normalizer": 7},
        lambda data, cur: torch.stack(
            [
                torch.stack([ppo_token(adv, n, o) for n, o, _, _ in toks]).sum() / 7
                for adv, toks in tokens_of(data, cur)
            ]
        ).mean(),
    )


def test_gspo_has_one_ratio_per_sequence():
    """GSPO (2507.18071), eq. 5 and 7."""

    def sequence(adv, toks):
        log_ratio = torch.stack([n - o for n, o, _, _ in toks]).mean()
        ratio = log_ratio.exp()
        return -torch.minimum(ratio * adv, clip(ratio, 0.8, 1.2) * adv)

    check(
        {"token_level_loss": False, "sequence_level_importance_ratios": True},
        lambda data, cur: torch.stack(
            [sequence(adv, toks) for adv, toks in tokens_of(data, cur)]
        ).mean(),
    )


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    """CISPO (2506.13585), eq. 4."""

    def token(adv, new, old):
        weight = clip((new - old).exp(), 0.8, 1.2).detach()
        return -weight * adv * new

    check(
        {"use_cispo": True},
        lambda data, cur: token_mean(
            [token(adv, n, o) for n, o, _, _ in toks]
            for adv, toks in tokens_of(data, cur)
        ),
    )


def test_reinforce():
    check(
        {"disable_ppo_ratio": True},
        lambda data, cur: token_mean(
            [-adv * n for n, _, _, _ in toks] for adv, toks in tokens_of(data, cur)
        ),
    )


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    """Dual-clip PPO (1912.09729), eq. 8."""

    def token(adv, new, old):
        loss = ppo_token(adv, new, old)
        return torch.minimum(loss, -adv * 1.1) if adv < 0 else loss

    check(
        {"ratio_clip_c": 1.1},
        lambda data, cur: token_mean(
            [token(adv, n, o) for n, o, _, _ in toks]
            for adv, toks in tokens_of(data, cur)
        ),
    )


IS = {"use_importance_sampling_correction": True}


@pytest.mark.parametrize(
    ("settings", "weight"),
    [
        (IS, lambda w, mean: w),
        (
            IS
            | {
                "truncated_importance_sampling_type": "tis",
                "truncated_importance_sampling_ratio": 1.1,
            },
            lambda w, mean: min(w, 1.1),
        ),
        (
            IS
            | {
                "truncated_importance_sampling_type": "icepop",
                "truncated_importance_sampling_ratio": 1.2,
                "truncated_importance_sampling_ratio_min": 0.9,
            },
            lambda w, mean: w if 0.9 <= w <= 1.2 else 0.0,
        ),
        (
            IS
            | {
                "truncated_importance_sampling_type": "seq-mask-tis",
                "truncated_importance_sampling_ratio": 1.05,
                "truncated_importance_sampling_ratio_min": 0.95,
            },
            lambda w, mean: w if 0.95 <= mean <= 1.05 else 0.0,
        ),
    ],
)
def test_importance_correction_of_the_sampler(settings, weight):
    """TIS: the loss is weighted by a truncated trainer / sampler ratio."""

    def sequence(adv, toks):
        mean = math.exp(sum(float(o - g) for _, o, g, _ in toks) / len(toks))
        return [
            ppo_token(adv, n, o) * weight(math.exp(float(o - g)), mean)
            for n, o, g, _ in toks
        ]

    check(
        settings,
        lambda data, cur: token_mean(
            sequence(adv, toks) for adv, toks in tokens_of(data, cur)
        ),
    )


def test_gspo_weights_sequences_as_a_whole():
    def sequence(adv, toks):
        log_ratio = torch.stack([n - o for n, o, _, _ in toks]).mean()
        ratio = log_ratio.exp()
        weight = math.exp(sum(float(o - g) for _, o, g, _ in toks))
        return -torch.minimum(ratio * adv, clip(ratio, 0.8, 1.2) * adv) * weight

    check(
        IS | {"token_level_loss": False, "sequence_level_importance_ratios": True},
        lambda data, cur: torch.stack(
            [sequence(adv, toks) for adv, toks in tokens_of(data, cur)]
        ).mean(),
    )


def test_on_policy_kl_approximation_weights_by_policy_over_sampler():
    def token(adv, new, old, gen, ref):
        kl = (ref - new).exp() - (ref - new) - 1
        return ppo_token(adv, new, old) + 0.1 * (new - gen).exp() * kl

    check(
        {"reference_policy_kl_penalty": 0.1, "use_on_policy_kl_approximation": True},
        lambda data, cur: token_mean(
            [token(adv, n, o, g, r) for n, o, g, r in toks]
            for adv, toks in tokens_of(data, cur)
        ),
    )


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_score_function_gradient_of_the_kl_is_the_exact_one(kind):
    """Averaged over the policy, it is the gradient of the KL itself."""
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.5, 0.2], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(
        (logp.exp() * (logp - reference)).sum(), logits, retain_graph=True
    )
    weights = logp.exp().detach()
    # Each possible token is a row of its own, weighted by its probability.
    data = {
        "token_mask": torch.tensor([[0.0, 1.0]] * 3, dtype=torch.float64),
        "sample_mask": torch.ones(3, dtype=torch.float64),
        "advantages": torch.zeros(3, dtype=torch.float64),
        "reference_policy_logprobs": torch.stack([reference * 0, reference], 1),
    }
    loss_fn = ClippedPGLossFn(
        {"reference_policy_kl_penalty": 1.0, "reference_policy_kl_type": kind}
    )
    total = sum(
        weights[i]
        * loss_fn(
            {name: value[i : i + 1] for name, value in data.items()},
            torch.tensor(1.0),
            torch.tensor(1.0),
            next_token_logprobs=logp[i].reshape(1, 1),
        )[0]
        for i in range(3)
    )
    (grad,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(grad, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_entropy_bonus_is_the_exact_entropy_on_average(shift):
    """Averaged over the old policy, value and gradient match those of the entropy."""
    logits = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64, requires_grad=True)
    old = (logits.detach() + torch.tensor([shift, 0.0, -shift])).log_softmax(0)
    logp = logits.log_softmax(0)
    exact = -(logp.exp() * logp).sum()
    (exact_grad,) = torch.autograd.grad(exact, logits, retain_graph=True)
    loss_fn = ClippedPGLossFn({"reference_policy_kl_penalty": 0, "entropy_coef": 0.5})
    total = torch.zeros((), dtype=torch.float64)
    for i in range(3):
        data = {
            "token_mask": torch.tensor([[0.0, 1.0]], dtype=torch.float64),
            "sample_mask": torch.ones(1, dtype=torch.float64),
            "advantages": torch.zeros(1, dtype=torch.float64),
            "prev_logprobs": torch.stack([old[i] * 0, old[i]])[None],
        }
        one = torch.tensor(1.0)
        loss, metrics = loss_fn(
            data, one, one, next_token_logprobs=logp[i].reshape(1, 1)
        )
        assert "entropy_bonus" in metrics
        total = total + old[i].exp() * loss
    (grad,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(total, -0.5 * exact)
    torch.testing.assert_close(grad, -0.5 * exact_grad, rtol=1e-10, atol=1e-12)


def test_on_policy_is_the_plain_policy_gradient():
    """Without previous log-probs, the ratio is 1 with the gradient of log p."""
    data, current = make_batch()
    del data["prev_logprobs"]
    loss, metrics = run({}, data, current)
    (grad,) = torch.autograd.grad(loss, current)
    _, toks = counts(data)
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    want = -data["advantages"][:, None] * mask / toks
    torch.testing.assert_close(grad, want)
    assert float(metrics["probs_ratio"]) == 1.0
    forced, _ = run({"force_on_policy_ratio": True}, make_batch()[0], current)
    torch.testing.assert_close(forced, loss)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"token_level_loss": False},
        {"token_level_loss": False, "sequence_level_importance_ratios": True},
        {"reference_policy_kl_penalty": 0.1},
        {"use_cispo": True},
        IS,
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_add_up(settings, size):
    data, current = make_batch()
    whole, metrics = run(settings, data, current)
    (grad,) = torch.autograd.grad(whole, current)
    loss_fn = ClippedPGLossFn({"reference_policy_kl_penalty": 0.0, **settings})
    parts, found = [], []
    for start in range(0, NUM_ROWS, size):
        part = {name: value[start : start + size] for name, value in data.items()}
        loss, numbers = loss_fn(
            part, *counts(data), next_token_logprobs=current[start : start + size]
        )
        parts.append(loss)
        found.append(numbers)
    (grad_of_parts,) = torch.autograd.grad(torch.stack(parts).sum(), current)
    torch.testing.assert_close(torch.stack(parts).sum(), whole)
    torch.testing.assert_close(grad_of_parts, grad)
    reduced = reduce_metrics(found)
    assert set(reduced) == set(metrics)
    for name, value in metrics.items():
        assert float(reduced[name]) == pytest.approx(float(value), rel=1e-9), name


def test_metrics_have_types_and_right_values():
    data, current = make_batch()
    _, metrics = run({"reference_policy_kl_penalty": 0.1}, data, current)
    old, sampler, new, ratios = [], [], [], []
    for _, toks in tokens_of(data, current.detach()):
        for n, o, g, _ in toks:
            new.append(float(n))
            old.append(float(o))
            sampler.append(float(g))
            ratios.append(math.exp(float(n - o)))
    count = len(old)

    def mean(values):
        return pytest.approx(math.fsum(values) / count, rel=1e-9)

    pairs = list(zip(old, sampler, strict=True))
    assert float(metrics["token_mult_prob_error"]) == mean(
        math.exp(abs(g - o)) for o, g in pairs
    )
    assert float(metrics["gen_kl_error"]) == mean(
        math.exp(o - g) - (o - g) - 1 for o, g in pairs
    )
    ratios_of_sampler = [math.exp(o - g) for o, g in pairs]
    assert float(metrics["policy_kl_error"]) == mean(
        u * math.log(u) - u + 1 for u in ratios_of_sampler
    )
    assert float(metrics["js_divergence_error"]) == mean(
        0.5 * (u * math.log(2 * u / (1 + u)) + math.log(2 / (1 + u)))
        for u in ratios_of_sampler
    )
    assert float(metrics["sampling_importance_ratio"]) == mean(
        math.exp(o - g) for o, g in pairs
    )
    assert float(metrics["approx_entropy"]) == mean(
        -math.exp(n - g) * n for n, g in zip(new, sampler, strict=True)
    )
    assert float(metrics["approx_kl"]) == mean(
        math.exp(n - o) - (n - o) - 1 for n, (o, _) in zip(new, pairs, strict=True)
    )
    assert float(metrics["probs_ratio"]) == mean(ratios)
    assert float(metrics["clip_fraction"]) == mean(
        float(not 0.8 <= r <= 1.2) for r in ratios
    )
    assert isinstance(metrics["probs_ratio_min"], Min)
    assert isinstance(metrics["probs_ratio_max"], Max)
    assert float(metrics["probs_ratio_min"]) == pytest.approx(min(ratios))
    assert float(metrics["probs_ratio_max"]) == pytest.approx(max(ratios))
    assert isinstance(metrics["kl_penalty"], Mean)
    assert float(metrics["num_valid_samples"]) == 5.0


def test_a_batch_without_valid_rows_is_finite():
    data, current = make_batch()
    data["sample_mask"] = torch.zeros(NUM_ROWS, dtype=torch.float64)
    for settings in ({}, {"token_level_loss": False}):
        loss, metrics = run(settings, data, current)
        (grad,) = torch.autograd.grad(loss, current)
        assert loss.item() == 0.0
        assert not grad.any()
        assert "probs_ratio_min" not in metrics
        assert all(
            value.is_empty or math.isfinite(float(value)) for value in metrics.values()
        )


def test_extreme_differences_stay_finite():
    data, current = make_batch()
    wild = current.detach().clone()
    wild[0, 1], wild[1, 1] = 900.0, -900.0
    wild.requires_grad_()
    data["prev_logprobs"][:, 0] = torch.nan  # the position that is never read
    data["generation_logprobs"][2, 2] = -torch.inf
    loss, metrics = run({**IS, "reference_policy_kl_penalty": 0.1}, data, wild)
    (grad,) = torch.autograd.grad(loss, wild)
    assert bool(loss.isfinite())
    assert bool(grad.isfinite().all())
    assert all(math.isfinite(float(value)) for value in metrics.values())


def test_junk_behind_the_mask_changes_nothing():
    data, current = make_batch()
    settings = {**IS, "reference_policy_kl_penalty": 0.1}
    want, _ = run(settings, data, current)
    out = data["token_mask"] == 0
    for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        data[name] = data[name].masked_fill(out, torch.nan)
    got, _ = run(settings, data, current)
    (grad,) = torch.autograd.grad(got, current)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert bool(grad.isfinite().all())


def test_advantages_may_be_per_token():
    data, current = make_batch()
    want, _ = run({}, data, current)
    data["advantages"] = data["advantages"][:, None].expand(-1, WIDTH).clone()
    got, _ = run({}, data, current)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_missing_columns_are_named():
    data, current = make_batch()
    data.pop("generation_logprobs")
    run({}, data, current)
    with pytest.raises(LossInputError, match="generation_logprobs"):
        run(IS, data, current)
    data.pop("reference_policy_logprobs")
    with pytest.raises(LossInputError, match="'reference_policy_logprobs'"):
        run({"reference_policy_kl_penalty": 0.1}, data, current)
    data["advantages"] = torch.zeros(NUM_ROWS, 3)
    with pytest.raises(LossInputError, match="'advantages' must be"):
        run({}, data, current)


def test_it_is_a_loss_function_that_travels():
    loss_fn = ClippedPGLossFn({"token_level_loss": False})
    assert isinstance(loss_fn, LossFunction)
    assert loss_fn.loss_type is LossType.SEQUENCE_LEVEL
    assert pickle.loads(pickle.dumps(loss_fn)).config == loss_fn.config


def test_an_advantage_of_a_token_reaches_that_token_alone() -> None:
    data, current = make_batch()
    advantages = torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64)
    advantages[1, 3] = 1.0
    loss, _ = run({"force_on_policy_ratio": True}, {**data, "advantages": advantages},
                  current)  # fmt: skip
    loss.backward()
    assert current.grad is not None
    # Entry i of the log-probs is that of token i + 1.
    assert current.grad.nonzero().tolist() == [[1, 2]]


def test_the_entropy_bonus_takes_the_noise_out_of_its_gradient() -> None:
    data, current = make_batch()
    data["advantages"] = torch.zeros(NUM_ROWS, dtype=torch.float64)
    loss, _ = run({"entropy_coef": 0.5}, data, current)
    loss.backward()
    trained = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    new = current.detach()
    weight = (new - data["prev_logprobs"][:, 1:]).exp()
    wanted = 0.5 * weight * new * trained / trained.sum()
    assert current.grad is not None
    torch.testing.assert_close(current.grad, wanted)
