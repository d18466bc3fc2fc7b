"""A short campaign of faults; `nox -s faults` plays a long one."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fault_campaign
import pytest
from fault_campaign import CampaignError, Fault, Results, Run

from rl_distributed.transfer.shared_memory import SharedMemoryLink


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_two_rounds(tmp_path: Path) -> None:
    expected = fault_campaign.undisturbed(tmp_path / "undisturbed")
    chance, results = random.Random(5), Results()
    for kind in ("synchronous", "asynchronous"):
        fault_campaign.play(tmp_path / kind, chance, kind, expected, results)
    assert results.num_faults >= 1
    assert results.counts["round: synchronous"] == 1
    assert results.counts["round: asynchronous"] == 1


def ended(console: str) -> Any:
    return SimpleNamespace(console=console)


class TestWhatAnErrorMustSay:
    def test_the_cause_and_the_way_on(self) -> None:
        run: Run = ended(
            "Error: worker 0 of group 'policy' is gone\n"
            "Continue with: rl train a.yaml --resume 'a b'\n"
        )
        faults = [Fault("policy", "kill", 3, 0.0)]
        assert fault_campaign.way_on(run, faults) == [
            "train",
            "a.yaml",
            "--resume",
            "a b",
        ]

    def test_an_error_that_names_nothing_is_found(self) -> None:
        faults = [Fault("policy", "kill", 3, 0.0)]
        with pytest.raises(CampaignError, match="does not name the cause"):
            fault_campaign.way_on(ended("Error: it failed\n"), faults)
        with pytest.raises(CampaignError, match="does not name the way on"):
            fault_campaign.way_on(ended("group 'policy' is gone\n"), faults)

    def test_a_driver_that_is_killed_says_nothing(self) -> None:
        faults = [Fault("driver", "kill", 3, 0.0)]
        assert fault_campaign.way_on(ended(""), faults) == []


def test_memory_of_a_program_that_runs_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_campaign, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(fault_campaign, "END_S", 0.1)
    SharedMemoryLink.create(parent=tmp_path)
    fault_campaign.check_shared_memory(set())
    gone = tmp_path / f"rl-transfer-1-{2**30}-1-ab"
    gone.mkdir()
    with pytest.raises(CampaignError, match=gone.name):
        fault_campaign.check_shared_memory(set())
    fault_campaign.check_shared_memory({gone.name})
