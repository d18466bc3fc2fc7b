"""A run's state according to its folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_distributed.runs.ending import (
    ENDED,
    forget_pause,
    note_pause,
    read_ending,
    run_state,
)
from rl_distributed.runs.folder import begin_run, own_run_folder


class Stopped(KeyboardInterrupt):
    """An interruption as raised by trainers."""


def end_by(folder: Path, error: BaseException) -> None:
    def carry_out() -> None:
        with begin_run(folder):
            (folder / "metrics.jsonl").write_text("")
            raise error

    with pytest.raises(type(error)):
        carry_out()


def test_an_ending_keeps_the_first_line_of_each_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-value-of-a-key")
    error = RuntimeError("bad")
    error.add_note("in step 5: training\nmore lines")
    error.add_note("key s3cret-value-of-a-key")
    end_by(tmp_path / "run", error)
    found = read_ending(tmp_path / "run")
    assert found is not None
    assert found.notes[0] == "in step 5: training"
    assert "s3cret" not in found.notes[1]
    # Files of earlier versions have none.
    old = {"state": "failed", "reason": "E: bad", "time": ""}
    (tmp_path / "run" / ENDED).write_text(json.dumps(old))
    found = read_ending(tmp_path / "run")
    assert found is not None
    assert found.notes == ()


def test_a_run_that_is_carried_out_is_running(tmp_path: Path) -> None:
    with begin_run(tmp_path / "run"):
        assert run_state(tmp_path / "run") == "running"


def test_a_run_with_a_result_is_finished(tmp_path: Path) -> None:
    with begin_run(tmp_path):
        (tmp_path / "result.json").write_text("{}")
    assert run_state(tmp_path) == "finished"


@pytest.mark.parametrize(
    ("result", "state"),
    [
        ('{"stopped_by": "alice"}', "stopped"),
        ('{"stopped_by": null}', "finished"),
        ('{"stopped_by"', "finished"),
        ("[]", "finished"),
    ],
)
def test_a_run_that_somebody_ended_is_stopped(
    result: str, state: str, tmp_path: Path
) -> None:
    with begin_run(tmp_path):
        (tmp_path / "result.json").write_text(result)
    assert run_state(tmp_path) == state


def test_an_error_is_noted_without_secrets(tmp_path: Path) -> None:
    end_by(tmp_path, RuntimeError("no answer of http://me:hunter22@host"))
    found = read_ending(tmp_path)
    assert run_state(tmp_path) == "failed"
    assert found is not None
    assert found.reason == "RuntimeError: no answer of http://me:***@host"


@pytest.mark.parametrize("said", ["", "interrupted by SIGINT; saved in step_3"])
def test_a_signal_interrupts(said: str, tmp_path: Path) -> None:
    end_by(tmp_path, Stopped(*([said] if said else [])))
    assert run_state(tmp_path) == "interrupted"
    ending = read_ending(tmp_path)
    assert ending is not None
    # The message says that it was interrupted; the class would repeat that.
    assert ending.reason == (said or "Stopped")


def test_a_resumed_run_forgets_why_it_had_stopped(tmp_path: Path) -> None:
    end_by(tmp_path, RuntimeError("no"))
    with own_run_folder(tmp_path):
        assert run_state(tmp_path) == "running"
        assert read_ending(tmp_path) is None
        (tmp_path / "result.json").write_text("{}")
    assert run_state(tmp_path) == "finished"


def test_a_killed_run_is_interrupted(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from rl_distributed.runs.folder import begin_run\n"
        "claim = begin_run(Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")], check=False, timeout=60
    )
    assert done.returncode == -9
    assert run_state(tmp_path / "run") == "interrupted"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", json.dumps({"state": "odd", "reason": "", "time": ""})]
)
def test_a_torn_note_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / ENDED).write_text(text)
    assert read_ending(tmp_path) is None
    assert run_state(tmp_path) == "interrupted"


@pytest.mark.parametrize("place", ["", "stages/01-sft"])
def test_a_run_that_is_held_is_paused(tmp_path: Path, place: str) -> None:
    stage = tmp_path / place
    stage.mkdir(parents=True, exist_ok=True)
    note_pause(stage, "alice")
    # A killed process has left it.
    assert run_state(tmp_path) == "interrupted"
    with begin_run(tmp_path):
        assert run_state(tmp_path) == "paused"
        forget_pause(stage)
        forget_pause(stage)
        assert run_state(tmp_path) == "running"
