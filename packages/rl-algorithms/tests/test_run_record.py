from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import yaml

from rl_algorithms.trainers.run.machine import command_line, machine_facts
from rl_algorithms.trainers.run.record import write_run_record
from rl_distributed.security.audit import disable_audit, enable_audit


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
    assert record["command"].split()
    assert record["machine"] == json.loads(json.dumps(machine_facts()))
    assert record["audit_log"] is None


def test_it_names_the_audit_log(tmp_path: Path) -> None:
    enable_audit(tmp_path / "audit.jsonl")
    try:
        write_run_record(tmp_path, {"kind": "trainer", "name": "grpo", "config": {}})
    finally:
        disable_audit()
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["audit_log"] == str((tmp_path / "audit.jsonl").resolve())


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["/a/bin/rl", "train", "grpo", "lr=1e-5"], "rl train grpo lr=1e-5"),
        (["rl", "data=a b"], "rl 'data=a b'"),
        (["rl", "env.settings.api_key=hush"], "rl 'env.settings.api_key=***'"),
        (["rl", "--api-key", "hush", "x"], "rl --api-key '***' x"),
        (["rl", "--api-key=hush", "x"], "rl '--api-key=***' x"),
        (["rl", "--key-file", "path"], "rl --key-file path"),
        (["rl", "url=http://me:hush@host/"], "rl 'url=http://me:***@host/'"),
        (["rl", "value=of-environment"], "rl 'value=***'"),
        ([""], "python"),
    ],
)
def test_a_command_line_has_no_secrets(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], shown: str
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "of-environment")
    assert command_line(arguments) in (shown, shown.replace("'", ""))


def test_the_machine_is_described(tmp_path: Path) -> None:
    for number, text in enumerate(("Model: \t NVIDIA H200\nIRQ: 3\n", "IRQ: 3\n")):
        (tmp_path / f"0000:0{number}").mkdir()
        (tmp_path / f"0000:0{number}" / "information").write_text(text)
    found = machine_facts(tmp_path)
    assert found["gpus"] == ["NVIDIA H200", "unknown"]
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 1 << 28
    assert found["system"]
    assert machine_facts(tmp_path / "none")["gpus"] == []
