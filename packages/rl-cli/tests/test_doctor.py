from __future__ import annotations

import json

import pytest
import ray

import rl_distributed
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


@pytest.mark.parametrize(
    ("address", "cpus", "found"),
    [
        (None, 1, "starts; 3 CPU"),
        ("", 1, "starts; 3 CPU"),
        ("local", 1, "starts; 3 CPU"),
        ("10.0.0.1:6379", None, "joined; 3 CPU"),
    ],
)
def test_doctor_joins_the_cluster_of_the_address(
    address: str | None,
    cpus: int | None,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[int | None] = []

    def init_ray(num_cpus: int | None = None, *, deadline_s: float) -> bool:
        asked.append(num_cpus)
        return deadline_s > 0

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(rl_distributed, "init_ray", init_ray)
    monkeypatch.setattr(rl_distributed, "shutdown_ray", lambda: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 3.0})
    assert _run(["doctor", "--json"], False) == 0
    checks = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (asked, checks["Ray"]["found"]) == ([cpus], found)
