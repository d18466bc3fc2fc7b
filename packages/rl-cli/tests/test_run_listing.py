"""`rl runs`: existing runs and their states."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rl_cli.main import _run
from rl_cli.report.page import write_page
from rl_cli.report.run_reader import read_run
from rl_cli.run_listing import find_runs, summarize_run
from rl_distributed.runs.ending import forget_pause, note_pause
from rl_distributed.runs.folder import begin_run, own_run_folder

MakeRun = Callable[..., Path]
STARTED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert _run(["runs", str(folder), "--json"], False) == 0
    found = json.loads(capsys.readouterr().out)
    return {run["folder"]: run for run in found}


def test_runs_are_listed_with_their_states(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("finished")
    make_run("killed", finished=False)
    failed, running = make_run("failed"), make_run("a/b/running", finished=False)

    def fail() -> None:
        with own_run_folder(failed):
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        fail()
    with own_run_folder(running):
        found = listed(tmp_path, capsys)
    assert {name: run["state"] for name, run in found.items()} == {
        "finished": "finished",
        "killed": "interrupted",
        "failed": "failed",
        "a/b/running": "running",
    }
    assert found["failed"]["reason"] == "RuntimeError: the disk is full"
    assert found["finished"]["reason"] is None


def test_a_stopped_run_says_who_stopped_it(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run("stopped")
    result = {"stopped_by": "alice", "stop_reason": "stopped by alice"}
    (folder / "result.json").write_text(json.dumps(result))
    found = listed(tmp_path, capsys)["stopped"]
    assert (found["state"], found["reason"]) == ("stopped", "stopped by alice")
    read = read_run(folder)
    assert (read.state, read.reason) == ("stopped", "stopped by alice")


def test_a_list_has_one_line_for_each_run_in_80_columns(
    make_run: MakeRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"grpo-instruct-{number:03d}" for number in range(3)]
    for name in names:
        make_run(name)
    assert _run(["runs", str(tmp_path)], False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for name in names:
        (line,) = (line for line in lines if name in line)
        assert "finished" in line
        assert "50.0%" in line


def test_a_supervised_run_shows_its_starts(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, restarted = make_run("plain"), make_run("twice")
    assert _run(["runs", str(tmp_path)], False) == 0
    assert "restarts" not in capsys.readouterr().out
    (restarted / "logs").mkdir(exist_ok=True)
    (restarted / "logs" / "restarts.jsonl").write_text('{"restart": 1}\n' * 2)
    found = listed(tmp_path, capsys)
    assert {name: run["restarts"] for name, run in found.items()} == {
        plain.name: 0,
        restarted.name: 2,
    }
    assert _run(["runs", str(tmp_path)], False) == 0
    assert "restarts" in capsys.readouterr().out


def test_a_paused_run_is_shown_as_such_everywhere(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run("held", finished=False)
    with own_run_folder(folder):
        for noted, state in ((True, "paused"), (False, "running")):
            if noted:
                note_pause(folder, "alice")
            else:
                forget_pause(folder)
            assert listed(tmp_path, capsys)["held"]["state"] == state
            assert _run(["runs", str(tmp_path)], False) == 0
            assert state in capsys.readouterr().out
            assert _run(["watch", str(folder), "--terminal", "--once"], False) == 0
            shown = capsys.readouterr().out.split()
            assert shown[1:3] == ["grpo", state]
            page = tmp_path / "page.html"
            write_page([read_run(folder)], page)
            assert f'"state":"{state}"' in page.read_text()


def test_a_run_has_steps_best_value_and_age(make_run: MakeRun, tmp_path: Path) -> None:
    run = summarize_run(make_run(), tmp_path, STARTED + timedelta(hours=3))
    assert (run.steps, run.measure, run.best, run.best_step) == (
        20,
        "val:accuracy",
        0.5,
        20,
    )
    assert (run.shown_best, run.shown_age) == ("val:accuracy 50.0%", "3 h")


def test_a_long_run_tells_the_same_without_being_read_as_a_whole(
    make_run: MakeRun, tmp_path: Path
) -> None:
    folder = make_run(num_steps=12_000)
    assert (folder / "metrics.jsonl").stat().st_size > 1 << 21
    run = summarize_run(folder, tmp_path)
    assert (run.steps, run.best, run.best_step) == (12_000, 0.5, 12_000)


def test_the_steps_of_stages_add_up(tmp_path: Path, make_run: MakeRun) -> None:
    with begin_run(tmp_path / "runs" / "mine"):
        pass
    folder = tmp_path / "runs" / "mine"
    config = {"stages": {"warmup": {}, "grpo": {}}}
    record = {"kind": "recipe", "name": "mine", "config": config}
    (folder / "run.json").write_text(json.dumps(record))
    for name, steps in (("warmup", 5), ("grpo", 7)):
        shutil.move(make_run(num_steps=steps), folder / "stages" / name)
    assert list(find_runs(tmp_path)) == [folder]
    run = summarize_run(folder, tmp_path)
    assert (run.steps, run.stage, run.age_s) == (12, "grpo", None)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "result.json"])
def test_torn_files_do_not_end_the_list(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = make_run("torn") / name
    path.write_bytes(path.read_bytes()[:-20])
    make_run("whole")
    found = listed(tmp_path, capsys)
    assert set(found) == {"torn", "whole"}
    assert found["whole"]["steps"] == 20


def test_people_get_a_table(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("mine")
    assert _run(["runs", str(tmp_path)], False) == 0
    shown = capsys.readouterr().out
    assert "mine" in shown
    assert "finished" in shown
    assert "val:accuracy 50.0%" in shown


def test_no_runs_and_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["runs", str(tmp_path)], False) == 0
    assert "no runs in" in capsys.readouterr().out
    assert _run(["runs", str(tmp_path / "gone")], False) == 2
    assert "there is no folder" in capsys.readouterr().err
