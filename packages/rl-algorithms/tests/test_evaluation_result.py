from __future__ import annotations

import json
import math
from pathlib import Path

from rl_algorithms.evaluation.result import DatasetEvaluation, EvaluationResult


def test_metrics_that_json_lacks_are_null(tmp_path: Path) -> None:
    metrics = {"reward": math.inf, "low": -math.inf, "pass@1": math.nan, "cons@2": 0.5}
    found = DatasetEvaluation("held-out", 1, 2, metrics)
    result = EvaluationResult("model", {"held-out": found}, {})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = result.save(tmp_path / "result.json").read_text()
    written = json.loads(text, parse_constant=refuse)["datasets"]["held-out"]["metrics"]
    assert written == {"reward": None, "low": None, "pass@1": None, "cons@2": 0.5}


def test_half_a_character_in_an_answer_loses_no_result(tmp_path: Path) -> None:
    samples = [{"response": "a\ud83d"}]
    found = DatasetEvaluation("held-out", 1, 1, {}, samples)
    path = EvaluationResult("model", {"held-out": found}, {}).save(tmp_path / "r.json")
    assert json.loads(path.read_bytes())["samples"] == samples
