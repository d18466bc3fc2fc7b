"""The soak benchmark: what counts as growth, and what it samples."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.soak.growth import Growth, findings, table
from benchmarks.soak.recipe import KINDS, soak_recipe
from benchmarks.soak.sampling import (
    folder_parts,
    last_values,
    process_usage,
    worker_names,
)

from rl_cli.run_config import RecipeConfig

MIB = 1 << 20


def sample(step: int, **changes: Any) -> dict[str, Any]:
    """A sample of a run that does not grow."""
    driver = {"memory_bytes": 400 * MIB, "descriptors": 50, "threads": 20}
    return {
        "step": step,
        "processes": {"driver": driver | changes.pop("driver", {})},
        "shared_bytes": MIB,
        "object_store_bytes": 5000.0,
        "run_files": 40,
        "run_parts": {"checkpoints": MIB, "metrics.jsonl": 5000 * step},
        "session_files": 30,
        "session_bytes": 10_000 + step,
    } | changes


def breaches(**growing: Any) -> list[tuple[str, str]]:
    """Breaches of a run in which some values are functions of the step."""
    samples = [
        sample(s, **{name: value(s) for name, value in growing.items()})
        for s in range(1, 3001, 10)
    ]
    return [
        (f.name, f.quantity) for f in findings(samples, 3000) if f.verdict == "breach"
    ]


def test_a_run_that_does_not_grow_has_no_breach() -> None:
    assert breaches() == []


@pytest.mark.parametrize(("share", "found"), [(0.009, 0), (0.011, 1)])
def test_memory_may_grow_by_a_hundredth(share: float, found: int) -> None:
    def driver(step: int) -> dict[str, float]:
        return {"memory_bytes": 400 * MIB * (1 + share * (step - 500) / 1000)}

    assert breaches(driver=driver) == [("driver", "memory_bytes")] * found


def test_a_leaked_file_per_400_steps_is_a_breach() -> None:
    def driver(step: int) -> dict[str, int]:
        return {"descriptors": 50 + step // 400}

    assert breaches(driver=driver) == [("driver", "descriptors")]


def test_peaks_and_a_start_that_grows_are_none() -> None:
    rng = random.Random(3)

    def driver(step: int) -> dict[str, int]:
        peak = 200 * MIB if rng.random() < 0.3 else 0
        return {"memory_bytes": min(step, 300) * MIB + peak}

    assert breaches(driver=driver) == []


def test_what_fills_up_settles() -> None:
    samples = [
        sample(s, driver={"memory_bytes": (300 + min(s / 10, 150)) * MIB})
        for s in range(1, 3001, 10)
    ]
    found = {(f.name, f.quantity): f for f in findings(samples, 3000)}
    memory = found["driver", "memory_bytes"]
    assert memory.growth.per_1000 > 0.1 * memory.growth.begin
    assert (memory.growth.late_per_1000, memory.verdict) == (0.0, "settles")


def test_the_object_store_may_hold_what_it_held_before() -> None:
    def in_flight(step: int) -> float:
        return 100.0 * (step % 7)

    assert breaches(object_store_bytes=in_flight) == []
    piled_up = [("object store", "bytes")]
    assert breaches(object_store_bytes=lambda s: in_flight(s) + s) == piled_up


def test_files_are_bounded_or_keep_a_line_per_step() -> None:
    def parts(step: int) -> dict[str, int]:
        return {"timeline.jsonl": 2000 * step, "recording": 100 * step}

    # The time line has passed 4 MiB, and nothing says that recordings are kept.
    expected = [("run/recording", "bytes"), ("run/timeline.jsonl", "bytes")]
    assert breaches(run_parts=parts) == expected
    assert breaches(run_files=lambda step: step // 100) == [("run", "files")]


def test_growth_needs_samples_of_several_steps() -> None:
    assert Growth.of([]) is None
    assert Growth.of([(400, 1.0)] * 12) is None
    assert Growth.of([(400, 1.0), (401, 1.0), (1000, 1.0)]) is None
    points = [(step, 2.0 * step) for step in range(0, 1200, 100)]
    assert Growth.of(points) == Growth(100.0, 2100.0, 2000.0, 2000.0)


def test_the_table_has_a_row_per_process() -> None:
    shown = table(findings([sample(s) for s in range(1, 3000, 10)], 3000))
    cells = "400.0 to 400.0 MiB | +0.00% | +0.00% | 50 to 50 | 20 to 20 | reached"
    assert f"| `driver` | {cells} |" in shown.splitlines()
    assert "| run/metrics.jsonl | " in shown


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipe_is_valid(kind: str) -> None:
    assert RecipeConfig.from_dict(soak_recipe(kind, 3000), source=kind)


def test_own_memory_is_private_memory() -> None:
    usage = process_usage(psutil.Process())
    before = usage["memory_bytes"]
    block = os.urandom(32 * MIB)
    grown = process_usage(psutil.Process())["memory_bytes"] - before
    assert len(block) <= grown < 2 * len(block)


def test_files_of_a_run_are_read(tmp_path: Path) -> None:
    logs, stage = tmp_path / "logs", tmp_path / "stages" / "grpo"
    for folder in (logs, stage / "rollouts"):
        folder.mkdir(parents=True)
    lines = [
        {"actor": "policy", "rank": 1, "pid": 7},
        {"actor": "policy", "rank": None, "pid": 8},
    ]
    text = "\n".join(map(json.dumps, lines)) + '\n{"actor": "pol'
    (logs / "run-policy-1.jsonl").write_text(text)
    assert worker_names(logs) == {7: "policy[1]"}
    metrics = stage / "metrics.jsonl"
    assert last_values(metrics) == (0, None)
    stored = {"system/object_store_used_bytes": 9.0}
    written = [{"step": 3, "metrics": stored}, {"step": 4, "metrics": {}}]
    metrics.write_text("\n".join(map(json.dumps, written)) + '\n{"step": 5')
    assert last_values(metrics) == (4, 9.0)
    (stage / "rollouts" / "part-00000.jsonl").write_text("12345")
    parts = folder_parts(tmp_path)
    assert parts["rollouts"] == (1, 5)
    assert {*parts} == {"logs", "metrics.jsonl", "rollouts"}
