from .config import EvalConfig as EvalConfig
from .estimators import (
    cons_at_k as cons_at_k,
    mean_with_interval as mean_with_interval,
    pass_at_k as pass_at_k,
)
from .evaluator import evaluate as evaluate
from .result import (
    DatasetEvaluation as DatasetEvaluation,
    EvaluationResult as EvaluationResult,
)
from .target import EvaluationTarget as EvaluationTarget, find_target as find_target
