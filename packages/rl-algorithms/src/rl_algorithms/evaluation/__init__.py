"""Evaluation: samples of a model on held-out prompts, and what they are worth."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_algorithms.evaluation.config import EvalConfig
    from rl_algorithms.evaluation.estimators import (
        cons_at_k,
        mean_with_interval,
        pass_at_k,
    )
    from rl_algorithms.evaluation.evaluator import evaluate
    from rl_algorithms.evaluation.result import DatasetEvaluation, EvaluationResult
    from rl_algorithms.evaluation.target import EvaluationTarget, find_target

__all__ = [
    "DatasetEvaluation",
    "EvalConfig",
    "EvaluationResult",
    "EvaluationTarget",
    "cons_at_k",
    "evaluate",
    "find_target",
    "mean_with_interval",
    "pass_at_k",
]

_MODULES = {
    "DatasetEvaluation": "result",
    "EvalConfig": "config",
    "EvaluationResult": "result",
    "EvaluationTarget": "target",
    "cons_at_k": "estimators",
    "evaluate": "evaluator",
    "find_target": "target",
    "mean_with_interval": "estimators",
    "pass_at_k": "estimators",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
