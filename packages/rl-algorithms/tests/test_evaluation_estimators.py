"""The estimators against enumeration of all subsets."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st

from rl_algorithms.evaluation import cons_at_k, mean_with_interval, pass_at_k
from rl_distributed.errors import ConfigError


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    subsets = list(combinations(correct, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(share)


def majority(answers, correct):
    """Return the credit of one subset, by definition."""
    votes = Counter(answer for answer, _ in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    tied = [answer for answer, count in votes.items() if count == most]
    return sum(correct[answer] for answer in tied) / len(tied)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.data(),
)
def test_cons_at_k_is_the_mean_over_subsets(samples, data):
    k = data.draw(st.integers(1, len(samples)))
    judged = {
        answer: [right for other, right in samples if other == answer]
        for answer, _ in samples
    }
    worth = {answer: sum(rights) / len(rights) for answer, rights in judged.items()}
    subsets = list(combinations(samples, k))
    mean = sum(majority(subset, worth) for subset in subsets) / len(subsets)
    answers, correct = zip(*samples, strict=True)
    assert cons_at_k(answers, correct, k) == pytest.approx(mean)


def test_known_values():
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 0, 10) == 0
    assert pass_at_k(10, 8, 3) == 1, "three samples cannot all be wrong"
    answers = ["7", "7", "8", "9"]
    assert cons_at_k(answers, [True, True, False, False], 4) == 1
    assert cons_at_k(answers, [False, False, True, True], 4) == 0
    assert cons_at_k(["7", "8"], [True, False], 2) == 0.5, "a tie is drawn by lot"
    assert cons_at_k([None, None, "7"], [False, False, True], 3) == 1
    assert cons_at_k([None, None], [False, False], 2) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_one_vote_is_one_attempt(samples):
    answers, correct = zip(*samples, strict=True)
    expected = pass_at_k(len(samples), sum(correct), 1)
    assert cons_at_k(answers, correct, 1) == pytest.approx(expected)


def test_many_samples_are_no_burden():
    answers = [str(i % 7) for i in range(64)]
    value = cons_at_k(answers, [a == "0" for a in answers], 32)
    # Ten of 64 are "0", the six others nine each: "0" wins slightly more often.
    assert 1 / 7 < value < 0.5


def test_subsets_that_are_more_than_a_float_can_count():
    # One of 1,200 is right, and the others say nothing: it has to be drawn.
    answers = ["7", *[None] * 1199]
    right = [True, *[False] * 1199]
    assert cons_at_k(answers, right, 600) == pytest.approx(0.5)
    few = [*["a"] * 3, None, "b"]
    expected = cons_at_k(few, [a == "a" for a in few], 3)
    # Ten bits are few enough for any sum to be weighted.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_algorithms.evaluation.estimators._MOST_BITS", 0)
        assert cons_at_k(few, [a == "a" for a in few], 3) == pytest.approx(expected)


def test_intervals():
    interval = mean_with_interval([0.0, 1.0, 1.0, 0.0])
    assert interval.mean == 0.5
    half = 1.959964 * math.sqrt(1 / 3 / 4)
    assert interval.high - 0.5 == pytest.approx(half, rel=1e-6)
    assert 0.5 - interval.low == pytest.approx(half, rel=1e-6)
    assert mean_with_interval([2.0]).low == 2.0
    assert math.isnan(mean_with_interval([]).mean)


@pytest.mark.parametrize("k", [0, 4])
def test_impossible_sizes_are_named(k):
    with pytest.raises(ConfigError, match=f"k must be from 1 to .*3.*: got {k}"):
        pass_at_k(3, 1, k)
    with pytest.raises(ConfigError, match=f"got {k}"):
        cons_at_k(["a"] * 3, [True] * 3, k)
    with pytest.raises(ConfigError, match="num_correct must be from 0 to 3: got 4"):
        pass_at_k(3, 4, 1)
