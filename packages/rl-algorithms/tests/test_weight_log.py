"""The record of the weights that a generator held."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_algorithms.trainers.run.weight_log import WeightLog
from rl_models.weight_request import ConfirmedWeights


def test_each_transfer_is_a_line(tmp_path: Path) -> None:
    versions = WeightLog(tmp_path)
    versions.add(0, [])
    assert not versions.path.exists()
    versions.add(0, [ConfirmedWeights(0, "a1", 2)])
    versions.add(1, [ConfirmedWeights(4, "b2", 2), ConfirmedWeights(4, "b2", 1)])
    assert list(WeightLog(tmp_path).read()) == [
        {"step": 0, "version": 0, "digest": "a1", "processes": 2},
        {"step": 1, "version": 4, "digest": "b2", "processes": 2},
        {"step": 1, "version": 4, "digest": "b2", "processes": 1},
    ]
    assert versions.path.stat().st_mode & 0o077 == 0


def test_a_resumed_run_repeats_its_transfers(tmp_path: Path) -> None:
    versions = WeightLog(tmp_path)
    versions.resume_at(3)  # nothing exists yet
    for step in range(4):
        versions.add(step, [ConfirmedWeights(step, "a1", 2)])
    with open(versions.path, "ab") as file:
        file.write(b'{"step": 1, "ver')  # as left by a killed run
    versions.resume_at(1)
    versions.add(2, [ConfirmedWeights(2, "b2", 2)])
    found = [(r["step"], r["digest"]) for r in versions.read()]
    assert found == [(0, "a1"), (1, "a1"), (2, "b2")]


def test_a_full_disk_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    versions = WeightLog(tmp_path / "missing")
    for step in range(3):
        versions.add(step, [ConfirmedWeights(step, "a1", 2)])
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "versions of the weights are no longer recorded" in warning
