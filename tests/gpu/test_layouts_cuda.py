"""Cells of the parity matrix over NCCL, one GPU per rank; processes without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from parity.cells import LAYOUTS, layouts_of
from parity.families import build_family
from parity.measure import Matrix
from parity.ranks import RankProcesses

_FAMILY = "qwen3_moe"
# A GPU sums in a different order; a wrong split is off by tenths.
_LIMITS = {"loss": 1e-4, "grad_norm": 1e-3, "gradients": 1e-3, "weights": 1e-4}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    ranks = RankProcesses(4)
    folder: Path = tmp_path_factory.mktemp("parity") / _FAMILY
    yield Matrix(build_family(_FAMILY, folder), ranks)
    ranks.close()


@pytest.mark.parametrize("layout", layouts_of(_FAMILY))
def test_ranks_compute_what_one_process_computes(matrix: Matrix, layout: str) -> None:
    needed, there = LAYOUTS[layout].num_ranks, torch.cuda.device_count()
    if needed > there:
        pytest.skip(f"needs {needed} GPUs: there are {there}")
    found = matrix.difference(layout, "GRPO")
    for name, limit in _LIMITS.items():
        assert getattr(found, name) <= limit, name
