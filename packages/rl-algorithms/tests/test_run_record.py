from __future__ import annotations

import json
import platform
from pathlib import Path

import yaml

from rl_algorithms.trainers.run.record import write_run_record


def test_it_says_what_the_run_is_and_with_what_it_was_made(tmp_path: Path) -> None:
    config = {"lr": 0.5, "env": {"settings": {"api_key": "hush"}}}
    write_run_record(tmp_path, {"kind": "trainer", "name": "grpo", "config": config})
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["kind"], record["name"]) == ("trainer", "grpo")
    assert record["config"] == {"lr": 0.5, "env": {"settings": {"api_key": "***"}}}
    assert record["hidden"] == ["env.settings.api_key"]
    assert record["versions"]["python"] == platform.python_version()
    assert {"rl-algorithms", "torch", "ray"} <= set(record["versions"])
    assert record["started"].endswith("+00:00")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == record["config"]
    for name in ("run.json", "config.yaml"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
