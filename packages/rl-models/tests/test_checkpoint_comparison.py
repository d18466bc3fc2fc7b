from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from rl_models.checkpoint.comparison import compare_tensors

INF = torch.inf


@pytest.mark.parametrize(
    ("first", "second", "num_elements"),
    [(1.0, INF, 1), (INF, 1.0, 1), (-INF, INF, 1), (1.0, torch.nan, 1), (INF, INF, 0)],
)
def test_what_is_not_finite_is_near_to_nothing(tmp_path, first, second, num_elements):
    for name, value in (("a", first), ("b", second)):
        (tmp_path / name).mkdir()
        tensors = {"w": torch.tensor([value, 2.0])}
        save_file(tensors, tmp_path / name / "model.safetensors")
    found = compare_tensors(tmp_path / "a", tmp_path / "b", tolerance=0.1)
    assert sum(one.num_elements for one in found.differences) == num_elements
