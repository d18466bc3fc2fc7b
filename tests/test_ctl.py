"""`rl ctl` on a two-stage run in another process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import kill_session
from small_run import recipe, write_recipe

from rl_cli.main import _run

DEADLINE_S = 240.0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_is_paused_changed_saved_and_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = {"max_num_steps": 1_000_000, "max_num_epochs": 1_000_000, "val_period": 0}
    data = recipe(warmup={"sft": endless})
    data["stages"]["warmup"]["checkpointing"] = {"save_period": 1_000_000}
    write_recipe(tmp_path, data)
    run = tmp_path / "mine"

    def ctl(*arguments: str) -> tuple[int, dict[str, Any], str]:
        action, *rest = arguments
        code = _run(["ctl", action, str(run), *rest, "--json"], False)
        said = capsys.readouterr()
        return code, json.loads(said.out) if code == 0 else {}, said.err

    command = [sys.executable, "-m", "rl_cli", "train", "small.yaml"]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [*command, f"output_dir={run}"],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        try:
            metrics = run / "stages" / "warmup" / "metrics.jsonl"
            _wait_until(metrics.exists, process, "a first step")
            paused: dict[str, Any] = {}

            def is_paused() -> bool:
                code, found, err = ctl("pause")
                # Its metrics may appear before it accepts requests.
                assert code == 0 or "it is starting" in err, err
                paused.update(found)
                return code == 0

            _wait_until(is_paused, process, "an answer of the run")
            code, _, err = ctl("pause")
            assert (code, "the run is paused already, by " in err) == (2, True), err
            code, update, _ = ctl("set", "lr=5e-4", "max_num_steps=900000")
            assert code == 0
            assert update["changes"]["policy.optimizer.kwargs.lr"] == 5e-4
            assert update["step"] == paused["step"]
            for change, message in (
                ("lrr=1", "did you mean"),
                ("lr=fast", "lr"),
                ("seed=3", "seed cannot change while the run goes on"),
            ):
                code, _, err = ctl("set", change)
                assert (code, message in err) == (2, True), err
            code, saved, _ = ctl("checkpoint")
            assert saved["step"] == paused["step"]
            assert (Path(saved["checkpoint"]) / "training_info.json").is_file()
            assert ctl("resume")[0] == 0
            code, stopped, _ = ctl("stop", "--by", "alice")
            assert stopped["step"] >= saved["step"]
            assert process.wait(DEADLINE_S) == 0
        finally:
            kill_session(process)
    shown = (tmp_path / "output").read_text()
    assert "Stopped by alice.\nContinue with: rl train small.yaml --resume" in shown
    result = json.loads((run / "result.json").read_text())
    assert (result["steps"], result["stopped_by"]) == (stopped["step"], "alice")
    # It continues with this stage, and the next one has not begun.
    assert not (run / "stages" / "warmup.json").exists()
    assert not (run / "stages" / "grpo").exists()
    code, _, err = ctl("pause")
    assert (code, "no process carries out the run" in err) == (2, True), err


def _wait_until(
    is_there: Callable[[], bool], process: subprocess.Popen[str], what: str
) -> None:
    until, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while not is_there():
        assert process.poll() is None, "the run ended before"
        assert time.monotonic() < until, f"{what} did not come"
        pause.wait(0.05)
