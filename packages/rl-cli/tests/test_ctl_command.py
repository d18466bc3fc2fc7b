"""`rl ctl`: what is sent to a run, and what is said of its answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_cli.main import _run
from rl_distributed.runs.requests import RunRequest, RunRequests

UPDATE = {"number": 1, "step": 7, "moment": "step_begin", "by": "me", "time": "now",
          "changes": {"policy.optimizer.kwargs.lr": 5e-6},
          "before": {"policy.optimizer.kwargs.lr": 1e-5}}  # fmt: skip


class Reader(threading.Thread):
    """A run between two steps, which answers all that is asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._requests = RunRequests(folder)
        self._ended = threading.Event()
        self.seen: list[RunRequest] = []
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.005):
            for request in self._requests.take():
                self.seen.append(request)
                saves = request.kind in ("checkpoint", "stop")
                kept = {"checkpoint": "checkpoints/step_7"} if saves else {}
                is_update = request.kind == "update"
                request.answer(UPDATE if is_update else {"step": 7, **kept})

    def close(self) -> None:
        self._ended.set()
        self.join()
        self._requests.close()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    (tmp_path / "run").mkdir()
    found = Reader(tmp_path / "run")
    yield found
    found.close()


@pytest.mark.parametrize(
    ("action", "out", "err"),
    [
        ("pause", "", "paused, after step 7\n"),
        ("resume", "", "resumed, after step 7\n"),
        ("checkpoint", "checkpoints/step_7\n", "saved, after step 7\n"),
        ("stop", "checkpoints/step_7\n", "stopped, after step 7\n"),
    ],
)
def test_what_is_asked_and_said(
    reader: Reader,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    action: str,
    out: str,
    err: str,
) -> None:
    run = str(tmp_path / "run")
    assert _run(["ctl", action, run, "--by", "alice"], False) == 0
    assert tuple(capsys.readouterr()) == (out, err)
    (request,) = reader.seen
    assert (request.kind, request.body, request.by) == (action, {}, "alice")
    assert _run(["ctl", action, run, "--json"], False) == 0
    assert json.loads(capsys.readouterr().out) == {
        "action": action, "run": run, "step": 7, "checkpoint": out.strip() or None,
    }  # fmt: skip
    assert "@" in reader.seen[1].by


def test_keys_are_typed_as_overrides_are(
    reader: Reader, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["lr=5e-6", "grpo.max_num_steps=400", "logger.level=info", "early_stop=null"]
    assert _run(["ctl", "set", str(tmp_path / "run"), *keys], False) == 0
    assert reader.seen[0].body["changes"] == {
        "lr": 5e-6, "grpo.max_num_steps": 400, "logger.level": "info",
        "early_stop": None,
    }  # fmt: skip
    assert tuple(capsys.readouterr()) == (
        "policy.optimizer.kwargs.lr: 1e-05 -> 5e-06\n",
        "from step 8 on\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pause", "gone"], "there is no run in gone"),
        (["pause", "."], "no process carries out the run in . now"),
        (["pause", "run", "--timeout", "0"], "must be a number greater than 0"),
        (["set", "run"], "Missing argument 'KEY=VALUE...'"),
        (["set", "run", "lr"], "has no '='"),
        (["set", "run", "+lr=1"], "got '+lr=1'; give lr=VALUE"),
        (["set", "run", "~lr"], "got '~lr'; give lr=VALUE"),
        (["set", "run", "lr=1", "lr=2"], "lr is given twice"),
    ],
)
def test_wrong_input(
    reader: Reader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run(["ctl", *arguments], False) == 2
    assert message in capsys.readouterr().err
    assert reader.seen == []


def test_a_run_that_does_not_answer_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunRequests(tmp_path):
        assert _run(["ctl", "stop", str(tmp_path), "--timeout", "0.05"], False) == 1
    said = capsys.readouterr().err
    assert "the run did not answer within 0.05 s (it was taken back" in said
    assert "--timeout SECONDS" in said
