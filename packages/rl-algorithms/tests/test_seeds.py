from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from rl_algorithms.seeds import mix, permutation, row_seeds, splitmix64


def test_splitmix64_gives_its_published_sequence():
    """The first outputs of the generator seeded with 1234567."""
    gamma = 0x9E3779B97F4A7C15
    states = [(1234567 + k * gamma) % 2**64 for k in range(3)]
    assert splitmix64(np.array(states, np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_parts_and_their_order_matter():
    values = [mix(1, 2), mix(2, 1), mix(1), mix(1, 2, 0), mix(-1, 2), mix(1, 3)]
    assert len({int(value) for value in values}) == len(values)


INT64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), INT64), min_size=1, max_size=6))
def test_a_single_row_gets_the_seed_it_has_among_others(parts):
    one, two = (
        mix(*(np.repeat(part, n) if is_array else part for is_array, part in parts))
        for n in (1, 2)
    )
    assert one.dtype == two.dtype == np.uint64
    assert set(one.ravel().tolist()) == set(two.ravel().tolist())


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(-(2**40), 2**40), st.integers(0, 9))
def test_permutations(num_rows, seed, epoch):
    order = permutation(num_rows, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(num_rows))
    assert (order == permutation(num_rows, seed=seed, epoch=epoch)).all()


def test_epochs_differ():
    first, second = (permutation(100, seed=1, epoch=e).tolist() for e in (0, 1))
    assert first != second != list(range(100))


def test_row_seeds_do_not_depend_on_the_batch():
    prompts, samples = np.repeat(np.arange(8), 4), np.tile(np.arange(4), 8)
    seeds = row_seeds(5, 3, prompts, samples)
    assert seeds.dtype == np.int64
    assert (seeds >= 0).all()
    assert len(set(seeds.tolist())) == 32
    assert row_seeds(5, 3, prompts[7:9], samples[7:9]).tolist() == seeds[7:9].tolist()
    assert not set(seeds.tolist()) & set(row_seeds(5, 4, prompts, samples).tolist())
    assert not set(seeds.tolist()) & set(row_seeds(5, 3, prompts, samples, 1).tolist())
