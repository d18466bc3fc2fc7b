import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rl_distributed.errors import ConfigError
from rl_models.generation.noise import derive_seeds, noise_streams, uniform_noise
from rl_models.generation.sampling import (
    check_sampling_params,
    greedy_tokens,
    sample_tokens,
    truncate_logits,
)
from rl_models.types import SamplingParams


def reference_distribution(logits, temperature, top_k, top_p):
    """Return probabilities by sorting, one row, in float64."""
    logits = np.asarray(logits, dtype=np.float64) / temperature
    keep = np.ones(len(logits), dtype=bool)
    if top_k is not None and top_k < len(logits):
        keep = logits >= np.sort(logits)[-top_k]
    weights = np.where(keep, np.exp(logits - logits.max()), 0)
    probs = weights / weights.sum()
    if top_p < 1:
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        dropped = order[(before >= top_p) & (np.arange(len(order)) > 0)]
        probs[dropped] = 0
        probs /= probs.sum()
    return probs


@given(
    seed=st.integers(0, 2**31),
    size=st.integers(2, 40),
    top_k=st.none() | st.integers(1, 45),
    top_p=st.floats(0.05, 1.0),
    temperature=st.floats(0.2, 3.0),
)
@settings(max_examples=60, deadline=None)
def test_truncation_agrees_with_a_float64_reference(
    seed, size, top_k, top_p, temperature
):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(3, size)) * 3)
    kept = truncate_logits(logits / temperature, top_k, top_p)
    probs = kept.softmax(-1).numpy()
    for row in range(3):
        expected = reference_distribution(logits[row], temperature, top_k, top_p)
        # A set whose probability equals p up to rounding may have one more token.
        if abs(np.cumsum(np.sort(expected)[::-1]) - top_p).min() < 1e-6:
            continue
        np.testing.assert_allclose(probs[row], expected, atol=1e-6)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=5),
        SamplingParams(top_p=0.6),
        SamplingParams(temperature=1.5, top_k=6, top_p=0.8),
    ],
)
def test_samples_follow_the_distribution(params):
    count = 40_000
    logits = torch.tensor(np.random.default_rng(1).normal(size=8) * 1.5).float()
    expected = reference_distribution(
        logits, params.temperature, params.top_k, params.top_p
    )
    noise = noise_block(derive_seeds(7, 0, count), 0, 1)[0]
    tokens, logprobs = sample_tokens(logits.expand(count, -1), noise, params)
    counts = np.bincount(tokens.numpy(), minlength=8)
    assert (counts[expected == 0] == 0).all()
    real = expected > 0
    chi2 = ((counts - count * expected)[real] ** 2 / (count * expected[real])).sum()
    # 99.99 % quantile of chi-square with at most 7 degrees of freedom.
    assert chi2 < 30
    np.testing.assert_allclose(
        logprobs.numpy(), np.log(expected[tokens.numpy()]), atol=1e-5
    )


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((3, 50), -torch.inf)
    logits[:, 20] = 0.0
    noise = torch.tensor([2.0**-23, 0.5, 1 - 2.0**-23])
    tokens, logprobs = sample_tokens(logits, noise, SamplingParams())
    assert tokens.tolist() == [20, 20, 20]
    assert logprobs.tolist() == [0.0, 0.0, 0.0]


def test_greedy_takes_the_best_token():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 0.0]])
    tokens, logprobs = greedy_tokens(logits)
    assert tokens.tolist() == [1, 0]
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(logprobs, expected)


def noise_block(seeds, start, count):
    """[count, B]"""
    return uniform_noise(noise_streams(seeds), start + np.arange(count)[:, None])


def test_noise_is_a_function_of_seed_and_index():
    seeds = torch.tensor([3, -5, 2**62])
    block = noise_block(seeds, 0, 10)
    assert torch.equal(block[4:], noise_block(seeds, 4, 6))
    assert torch.equal(block[:, 1:2], noise_block(seeds[1:2], 0, 10))
    # Each row at a token of its own.
    mixed = uniform_noise(noise_streams(seeds), np.array([7, 0, 9]))
    assert mixed.tolist() == [block[7, 0], block[0, 1], block[9, 2]]


def test_noise_is_uniform_and_uncorrelated():
    noise = noise_block(torch.arange(2000), 0, 50).double()
    assert 0 < noise.min() < noise.max() < 1
    histogram = torch.histc(noise, bins=20, min=0, max=1)
    assert ((histogram - 5000) ** 2 / 5000).sum() < 60
    rows = torch.corrcoef(noise.t()[:40]).fill_diagonal_(0)
    assert rows.abs().max() < 0.75
    shifted = ((noise[:, 1:] - 0.5) * (noise[:, :-1] - 0.5)).mean() * 12
    assert abs(shifted) < 0.02


def test_derived_seeds_differ_by_call_and_row():
    seeds = torch.cat([derive_seeds(s, c, 50) for s in (0, 1) for c in (0, 1)])
    assert len(seeds.unique()) == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.0), ("top_p", 0.0), ("top_p", 1.5), ("top_k", 0)],
)
def test_settings_that_define_no_distribution_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"SamplingParams.{field} must .*{value}"):
        check_sampling_params(SamplingParams(**{field: value}))


def test_noise_lies_strictly_between_0_and_1():
    # The seeds of the smallest and the largest number.
    noise = noise_block(torch.tensor([3598214, 808280]), 0, 1)[0]
    assert noise.tolist() == [2.0**-23, 1 - 2.0**-23]


def test_the_temperature_comes_before_the_truncation():
    # At temperature 2 the probabilities .64, .32, .04 become .51, .36, .13.
    logits = torch.tensor([[0.64, 0.32, 0.04]]).log()
    params = SamplingParams(temperature=2.0, top_p=0.6)
    token, logprob = sample_tokens(logits, torch.tensor([0.9]), params)
    assert token.tolist() == [1]
    share = 0.32**0.5 / (0.64**0.5 + 0.32**0.5)
    assert logprob.exp().item() == pytest.approx(share)
