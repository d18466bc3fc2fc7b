"""A game of many turns: imitation of shortest ways, then practice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.learning.experiment import Curve, curve_of, train, with_model
from rl_algorithms import KeptWorkers
from rl_distributed import load_config
from rl_distributed.config import merge_configs
from rl_models import build_model
from rl_models.build.model import ModelBuildConfig

__all__ = ["sliding_puzzle"]

_RECIPE: Mapping[str, Any] = load_config(
    Path(__file__).with_name("sliding_puzzle.yaml")
)


def _stage(name: str) -> dict[str, Any]:
    stage = dict(merge_configs(_RECIPE["common"], _RECIPE["stages"][name]))
    del stage["algorithm"]
    return stage


def sliding_puzzle(folder: Path, seed: int, pool: KeptWorkers) -> Curve:
    """Return the share of held-out boards that are solved, over the steps of GRPO."""
    model = folder / "random"
    build_model(ModelBuildConfig.from_dict(_RECIPE["model"]), model, seed=seed)
    warmup = with_model(_stage("warmup"), model)
    start = train("sft", warmup, folder / "warmup", seed, pool).model_path
    assert start is not None
    settings = with_model(_stage("grpo"), Path(start))
    result = train("grpo", settings, folder / "run", seed, pool)
    return curve_of(result, "val:accuracy")
