import itertools

import numpy as np
from hypothesis import given, settings, strategies as st

from rl_models.generation.huggingface.prompts import plan_prompts
from rl_models.policy.row_sharding import split_rows

PROMPTS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=4), min_size=1)


def as_batch(prompts):
    lengths = np.array([len(prompt) for prompt in prompts])
    ids = np.full((len(prompts), lengths.max()), 9)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    return ids, lengths


@given(PROMPTS)
@settings(deadline=None)
def test_plan_keeps_every_row_and_finds_equal_prompts(prompts):
    ids, lengths = as_batch(prompts)
    plan = plan_prompts(ids, lengths)
    assert sorted(plan.order_B.tolist()) == list(range(len(prompts)))
    assert len(plan.lengths_P) == len({tuple(prompt) for prompt in prompts})
    assert (np.diff(plan.lengths_P) <= 0).all()
    assert (np.diff(plan.prompt_B) >= 0).all()
    for row, prompt in zip(plan.order_B, plan.prompt_B, strict=True):
        assert prompts[plan.row_of_prompt_P[prompt]] == prompts[row]


@given(PROMPTS, st.integers(1, 10))
@settings(deadline=None)
def test_chunks_cover_all_prompts_and_rows(prompts, max_tokens):
    plan = plan_prompts(*as_batch(prompts))
    chunks = list(plan.chunks(max_tokens, 0, len(plan.prompt_B)))
    seen = [p for prompt, _ in chunks for p in range(prompt.start, prompt.stop)]
    assert seen == list(range(len(plan.lengths_P)))
    rows = [r for _, row in chunks for r in range(row.start, row.stop)]
    assert rows == list(range(len(prompts)))
    for prompt, row in chunks:
        assert set(plan.prompt_B[row]) == set(range(prompt.start, prompt.stop))
        size = plan.lengths_P[prompt].sum()
        assert size <= max_tokens or prompt.stop - prompt.start == 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 5))
@settings(deadline=None)
def test_replicas_share_rows_nearly_evenly(sizes, parts):
    ids = np.repeat(np.arange(len(sizes)), sizes)[:, None]
    borders = split_rows(ids, parts)
    assert borders[0][0] == 0
    assert borders[-1][1] == len(ids)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(borders))
    assert all(end - start <= 2 * len(ids) / parts + 1 for start, end in borders)


def test_groups_stay_together():
    ids = np.repeat(np.arange(6), 8)[:, None]
    assert split_rows(ids, 4) == [(0, 8), (8, 24), (24, 32), (32, 48)] or all(
        start % 8 == 0 for start, _ in split_rows(ids, 4)
    )
    assert split_rows(np.zeros((10, 1)), 2) == [(0, 5), (5, 10)]
    assert split_rows(np.zeros((1, 1)), 3)[0][0] == 0
