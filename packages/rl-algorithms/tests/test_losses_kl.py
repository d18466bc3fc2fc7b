from __future__ import annotations

import math

import pytest
import torch

from rl_algorithms.errors import LossInputError
from rl_algorithms.losses.kl import calculate_kl


@pytest.mark.parametrize(
    ("kind", "want"), [("k1", 1.0), ("k2", 0.5), ("k3", math.exp(-1) - 1 + 1)]
)
def test_values_of_the_three_estimators(kind, want):
    got = calculate_kl(torch.tensor([-1.0]), torch.tensor([-2.0]), kind)
    assert float(got) == pytest.approx(want, rel=1e-6)


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative():
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    q = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    exact = float((p * (p / q).log()).sum())
    for kind in ("k1", "k3"):
        kl = calculate_kl(p.log(), q.log(), kind)
        assert float((p * kl).sum()) == pytest.approx(exact, rel=1e-12)
    assert bool((calculate_kl(p.log(), q.log(), "k3") >= 0).all())


def test_clamps_and_weights():
    far = torch.tensor([-100.0])
    near = torch.tensor([0.0])
    assert float(calculate_kl(near, far, "k1", 20.0, None)) == 20.0
    assert float(calculate_kl(near, far, "k1", 20.0, 10.0)) == 10.0
    assert float(calculate_kl(near, far, "k1", None, None)) == 100.0
    weights = torch.tensor([0.5])
    assert float(calculate_kl(near, far, "k1", None, None, weights)) == 50.0
    assert float(calculate_kl(near, far, "k1", None, 10.0, weights)) == 10.0
    assert math.isfinite(float(calculate_kl(far, near, "k3", 20.0, 10.0)))


def test_an_unknown_kind_is_named():
    with pytest.raises(LossInputError, match="k1, k2, k3: got 'k9'"):
        calculate_kl(torch.zeros(1), torch.zeros(1), "k9")  # type: ignore[arg-type]
