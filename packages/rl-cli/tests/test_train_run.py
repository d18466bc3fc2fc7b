from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_algorithms import Interrupted
from rl_algorithms.trainers.run.signals import SignalGuard
from rl_cli import run_stages as compose
from rl_cli.commands import train_run as running
from rl_cli.console import Terminal
from rl_cli.report import samples, summary
from rl_cli.run_place import find_place
from rl_distributed.errors import ConfigError, WorkerDiedError
from rl_envs import RewardCallError


@pytest.mark.parametrize("saved", ["step_4", None])
def test_an_interrupted_run_names_the_command_that_goes_on(
    saved: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*parts: Any, **options: Any) -> Any:
        raise Interrupted(2, saved)

    monkeypatch.setattr(compose, "carry_out", interrupted)
    monkeypatch.setattr(running, "configure_logging", lambda *_, **__: None)
    folder = tmp_path / "mine"
    with pytest.raises(Interrupted) as caught, SignalGuard() as guard:
        running.run_and_report(
            "quickstart",
            None,
            [f"output_dir={folder}"],
            guard,
            found=None,
            terminal=Terminal(quiet=True),
            as_json=False,
            debug=False,
        )
    command = f"Continue with: rl train quickstart --resume {folder}"
    assert notes_of(caught.value) == ([command] if saved else [])


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize(
    ("error", "progress", "tells"),
    [
        # A run without progress cannot be continued.
        (WorkerDiedError("gone"), None, False),
        (WorkerDiedError("gone"), "stages/grpo/checkpoints/step_4/x", True),
        (RewardCallError("raised KeyError"), None, False),
        (OSError("No space left on device"), "stages/warmup.json", True),
        (MemoryError(), "stages/warmup.json", True),
        (KeyboardInterrupt(), "stages/grpo/checkpoints/step_4/x", True),
        (ConfigError("lr must be positive"), None, False),
        (ConfigError("lr must be positive"), "stages/warmup.json", True),
        (ConfigError("lr must be positive"), "stages/grpo/checkpoints/step_4/x", True),
    ],
)
def test_an_error_names_the_command_that_goes_on(
    error: BaseException,
    progress: str | None,
    tells: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "a folder; with 'signs'"

    def failing(*parts: Any, **options: Any) -> Any:
        if progress is not None:
            (folder / progress).parent.mkdir(parents=True, exist_ok=True)
            (folder / progress).write_text("")
        raise error

    monkeypatch.setattr(compose, "carry_out", failing)
    monkeypatch.setattr(running, "configure_logging", lambda *_, **__: None)
    options = {"terminal": Terminal(quiet=True), "as_json": False, "debug": False}
    start = [f"output_dir={folder}"]
    with pytest.raises(type(error)) as caught, SignalGuard() as guard:
        running.run_and_report("quickstart", None, start, guard, found=None, **options)
    commands = [n for n in notes_of(caught.value) if n.startswith("Continue with: ")]
    assert len(commands) == tells
    for command in commands:
        words = shlex.split(command.removeprefix("Continue with: "))
        assert words == ["rl", "train", "quickstart", "--resume", str(folder)]
        with find_place(words[2], None, [], words[4]) as found:  # type: ignore[union-attr]
            assert found.path == folder.resolve()


def test_an_error_of_the_report_names_the_command_that_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*parts: Any, **options: Any) -> Any:
        (tmp_path / "out" / "stages" / "grpo.json").write_text("{}")
        raise OSError("No space left on device")

    outcome = SimpleNamespace(stopped_by=None)
    monkeypatch.setattr(compose, "carry_out", lambda *_, **__: outcome)
    monkeypatch.setattr(running, "configure_logging", lambda *_, **__: None)
    monkeypatch.setattr(samples, "answer", full)
    monkeypatch.setattr(summary, "result_of", lambda *_, **__: {})
    options = {"terminal": Terminal(quiet=True), "as_json": False, "debug": False}
    start = [f"output_dir={tmp_path / 'out'}"]
    with pytest.raises(OSError, match="No space") as caught, SignalGuard() as guard:
        running.run_and_report("quickstart", None, start, guard, found=None, **options)
    assert notes_of(caught.value) == [
        f"Continue with: rl train quickstart --resume {tmp_path / 'out'}"
    ]
