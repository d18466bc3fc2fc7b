"""`rl audit verify` on an intact audit log and on a broken one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_cli.main import _run
from rl_distributed.security import create_audit_key, enable_audit
from rl_distributed.security.audit import audit, disable_audit

MakeRun = Callable[..., Path]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return create_audit_key(tmp_path / "audit.key")


@pytest.fixture
def log(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("RL_AUDIT_KEY_FILE", raising=False)
    path = tmp_path / "audit.jsonl"
    enable_audit(path, key_file=key)
    for number in range(4):
        audit("test", str(number))
    yield path
    disable_audit()


def verify(*arguments: str | Path) -> int:
    return _run(["audit", "verify", *map(str, arguments)], False)


def test_a_whole_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = [json.loads(line)["time"] for line in log.read_text().splitlines()]
    assert verify(log) == 0
    whole, entries, digest = capsys.readouterr().out.splitlines()
    assert whole == f"whole: {log} (chain; no key was given)"
    assert entries == f"entries: 4, {times[0]} to {times[-1]}"
    audit("later")
    assert verify(log, "--last-digest", digest.split()[-1]) == 0


def test_a_program_gets_json(
    log: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(log, "--key", key, "--min-entries", "4", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["num_entries"], found["is_authentic"]) == (True, 4, True)
    assert found["first_time"] < found["last_time"]
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[1:]))
    assert verify(log, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["line"]) == (False, 1)
    assert found["reason"] == (
        "does not follow: the line before it was changed or taken out"
    )
    assert verify(log, "--min-entries", "4", "--last-digest", "0" * 64) == 1


def test_a_broken_log(log: Path, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_bytes(log.read_bytes().replace(b'"3"', b'"9"'))
    assert verify(log, "--key", key) == 1
    assert capsys.readouterr().out == (
        f"broken: audit log {log}, line 4 was changed, or was written with another "
        "key\n"
    )
    # No line refers to the last one as its predecessor.
    assert verify(log) == 0
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:2]))
    assert verify(log, "--min-entries", "4") == 1
    assert "has 2 entries, and there were at least 4" in capsys.readouterr().out


def test_the_log_of_a_run(
    make_run: MakeRun, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    assert verify(run) == 2
    assert "set RL_AUDIT_LOG=FILE for the next" in capsys.readouterr().err
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "audit_log": str(log)}))
    assert verify(run) == 0
    assert str(log) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.jsonl"], "audit log gone.jsonl cannot be read: No such file"),
        (["."], "is not the folder of a run"),
        (["pipe"], "audit log pipe cannot be read: it is not a file"),
        (["audit.jsonl", "--key", "gone"], "audit key gone cannot be read"),
        (["audit.jsonl", "--key", "short"], "holds 3 bytes, and at least 16"),
        (["audit.jsonl", "--last-digest", "abc"], "64 hexadecimal digits"),
        (["audit.jsonl", "--min-entries", "-1"], "must be an integer from 0"),
    ],
)
def test_wrong_input(
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(log.parent)
    (log.parent / "short").write_text("abc")
    os.mkfifo(log.parent / "pipe")
    assert verify(*arguments) == 2
    assert message in capsys.readouterr().err
