from __future__ import annotations

import json

import pytest

from rl_cli.main import _run


def test_doctor_reports_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["doctor", "--no-ray", "--json"], False) == 0
    checks = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert checks["Python"]["status"] == "ok"
    assert checks["rl-cli"]["status"] == "ok"
    assert checks["torch"]["found"]
    assert {"cores", "free memory", "temporary folder", "GPUs"} <= set(checks)


def test_doctor_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["doctor", "--no-ray"], False) == 0
    assert "transformers" in capsys.readouterr().out
