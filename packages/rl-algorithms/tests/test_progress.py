"""The progress display of a run: where it is drawn, and its lines."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rl_algorithms import api
from rl_algorithms.trainers import progress
from rl_algorithms.trainers.progress import ProgressDisplay

_SPEC = importlib.util.spec_from_file_location(
    "toy_trainer", Path(__file__).with_name("toy_trainer.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
toy = importlib.util.module_from_spec(_SPEC)
sys.modules["toy_trainer"] = toy
_SPEC.loader.exec_module(toy)


def trainer(total: int = 10, reason: str | None = None) -> Any:
    return SimpleNamespace(state=SimpleNamespace(total_steps=total, stop_reason=reason))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Watched(ProgressDisplay):
    """A display with readable text and steps of a known duration."""

    def __init__(self, *, in_place: bool = False, quiet: bool = False) -> None:
        self.text = io.StringIO()
        self.clock = Clock()
        console = Console(file=self.text, width=80, force_terminal=in_place)
        super().__init__(console, in_place=in_place, quiet=quiet, clock=self.clock)

    def step(self, number: int, total: int, took_s: float, **metrics: float) -> None:
        self.on_step_begin(trainer(total), number)
        self.clock.now_s += took_s
        named = {key.replace("_", ":", 1): value for key, value in metrics.items()}
        self.on_step_end(trainer(total), number, named)

    @property
    def lines(self) -> list[str]:
        return self.text.getvalue().splitlines()


@pytest.mark.parametrize("in_place", [True, False])
def test_it_shows_phase_step_reward_accuracy_speed_and_time_left(
    in_place: bool,
) -> None:
    display = Watched(in_place=in_place)
    with display.running():
        display.begin("grpo")
        display.on_phase(trainer(), 0, "setup", 0, 10)
        display.step(1, 10, 2.0, train_reward=0.5, performance_tokens_per_sec=1234.0)
        display.on_validation_end(trainer(), 1, {"val:accuracy": 0.25})
        display.step(2, 10, 2.0, train_reward=0.5)
        numbers = display.numbers()
        display.on_train_end(trainer(reason="max_num_steps (10) reached"), 10)
    for part in ("train:reward 0.50", "val:accuracy 25.0%", "1,234 tok/s", "16 s left"):
        assert part in numbers
    shown = display.text.getvalue()
    for part in ("grpo", "starting the workers", "10/10", "max_num_steps (10) reached"):
        assert part in shown
    assert "0/0" not in shown


def test_fast_steps_give_a_line_every_ten_seconds() -> None:
    display = Watched()
    display.begin("grpo")
    for number in range(1, 41):
        display.step(number, 40, 1.0, train_loss=1.0)
    steps = [line.split()[1] for line in display.lines if "/40" in line]
    assert steps == ["1/40", "11/40", "21/40", "31/40"]


def test_slow_steps_give_a_line_each() -> None:
    display = Watched()
    display.begin("grpo")
    for number in range(1, 4):
        display.on_phase(trainer(), number, "generation", number, 3)
        display.step(number, 3, 60.0, train_loss=1.0)
        display.on_validation_end(trainer(), number, {"val:loss": 1.0})
        display.on_checkpoint(trainer(), number, None)  # type: ignore[arg-type]
    steps = [line.split()[1] for line in display.lines if "/3" in line]
    assert steps == ["1/3", "2/3", "3/3"]
    assert "saved step 2" in display.lines[-1]


def test_it_shows_the_held_out_reward_where_there_is_no_accuracy() -> None:
    display = Watched(quiet=True)
    display.begin("grpo")
    display.on_validation_end(trainer(), 1, {"val:reward": 3.25})
    assert "val:reward 3.25" in display.numbers()
    display.on_validation_end(trainer(), 2, {"val:accuracy": 0.5})
    assert "reward" not in display.numbers()
    assert "val:accuracy 50.0%" in display.numbers()
    assert display.text.getvalue() == ""


def test_the_steps_of_a_stream_have_no_total() -> None:
    display = Watched()
    display.begin("sft")
    display.step(1, 0, 1.0, train_loss=1.0)
    assert display.lines[-1] == "sft 1 | train:loss 1.000"


def test_in_80_columns_every_number_is_on_the_screen() -> None:
    display = Watched(in_place=True)
    with display.running():
        display.begin("reinforce_plus_plus_baseline"[:16])
        values = {"train_reward": 0.5, "performance_tokens_per_sec": 12345.0}
        display.step(1, 200, 100.0, **values)
        display.on_validation_end(trainer(200), 1, {"val:accuracy": 0.25})
        display.on_phase(trainer(), 1, "policy_training", 2, 200)
    last = display.text.getvalue()
    assert "12,345 tok/s | 19900 s left" in last
    assert "policy training" in last
    assert "…" not in last


# Where it is drawn --------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn_in_place(console: Console) -> bool:
    return ProgressDisplay(console)._in_place


def test_it_draws_on_a_terminal_and_not_in_the_log_of_ci(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert drawn_in_place(Console(file=Terminal()))
    assert not drawn_in_place(Console(file=io.StringIO()))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not drawn_in_place(Console(file=io.StringIO()))
    monkeypatch.setenv("TERM", "dumb")
    assert not drawn_in_place(Console(file=Terminal()))


def test_a_notebook_draws_where_it_has_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"ipywidgets": object()}
    monkeypatch.setattr(progress, "find_spec", found.get)
    assert drawn_in_place(Console(file=io.StringIO(), force_jupyter=True))
    found.clear()
    assert not drawn_in_place(Console(file=io.StringIO(), force_jupyter=True))


def test_what_a_program_prints_for_another_one_stays_on_standard_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with Watched(in_place=True).running() as display:
        display.begin("grpo")
        sys.stdout.write("a result\n")
    assert out.getvalue() == "a result\n"


# In Python ----------------------------------------------------------------------------


def fit(tmp_path: Any, **arguments: Any) -> None:
    config = {"policy": toy.POLICY, "output_dir": str(tmp_path / "run")}
    trainer = toy.ToyTrainer(config, policy=toy.ToyPolicy(), tokenizer=object())
    trainer.fit(list(range(6)), **arguments)


def test_fit_shows_its_progress_on_standard_error(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0] == "toy | starting"
    assert "toy | loading the data" in lines
    assert any(line.startswith("toy 1/6 | train:loss") for line in lines)
    assert "done: max_num_epochs (2) reached" in lines[-1]


def test_fit_without_progress_shows_nothing(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, progress=False)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_fit_uses_a_display_that_has_begun(tmp_path: Any) -> None:
    display = Watched()
    for name in ("warmup", "grpo"):
        display.begin(name)
        fit(tmp_path / name, progress=display)
    assert not display.has_begun
    ends = [line.split(" | ")[0] for line in display.lines if "done:" in line]
    assert ends == ["warmup 6/6", "grpo 6/6"]


def test_train_says_what_it_does_before_it_loads_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def get_algorithm(name: str) -> Any:
        said.append(capsys.readouterr().err)
        raise KeyError(name)

    monkeypatch.setattr(api, "get_algorithm", get_algorithm)
    with pytest.raises(KeyError):
        api.train("models/tiny", [], algorithm="sft")
    with pytest.raises(KeyError):
        api.train("models/tiny", [], algorithm="sft", progress=False)
    assert said == ["sft | training tiny: loading the libraries\n", ""]


def test_train_is_there_before_torch_and_ray_are_loaded() -> None:
    code = (
        "import sys, rl_algorithms; rl_algorithms.train; "
        "sys.exit(','.join({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""


def test_a_closed_pipe_does_not_end_a_run() -> None:
    code = (
        "import os, sys\n"
        "from rl_algorithms.trainers.progress import ProgressDisplay\n"
        "reader, writer = os.pipe(); os.dup2(writer, 2); os.close(reader)\n"
        "ProgressDisplay().begin('grpo')\n"
        "print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "went on\n"
