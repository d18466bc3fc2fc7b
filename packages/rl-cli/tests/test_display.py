from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rl_cli.console import Terminal, table
from rl_cli.display import RunDisplay


class Recorder(Terminal):
    """A terminal that keeps what is printed."""

    def __init__(self, *, plain: bool) -> None:
        super().__init__()
        self.text = io.StringIO()
        self.err = Console(file=self.text, width=160, force_terminal=not plain)
        self.plain = plain


def state(step: int, total: int) -> Any:
    return SimpleNamespace(step=step, total_steps=total)


@pytest.mark.parametrize("plain", [True, False])
def test_display_shows_phase_step_reward_accuracy_speed_and_time_left(
    plain: bool,
) -> None:
    terminal = Recorder(plain=plain)
    display = RunDisplay(terminal)
    with display.running():
        display.begin_stage("grpo", 10)
        display.on_phase(None, state(0, 10), "policy_training", 1, 10)
        display.on_step_begin(None, state(0, 10))
        display.on_step_end(
            None,
            state(1, 10),
            {"train:reward": 0.5, "performance:tokens_per_sec": 1234.0},
        )
        display.on_validation_end(None, state(1, 10), {"val:accuracy": 0.25})
        line = display.shown(9)
        display.end_stage("max_num_steps reached")
    for part in ("policy training", "reward 0.50", "accuracy 25.0%", "1,234", "left"):
        assert part in line
    shown = terminal.text.getvalue()
    assert "grpo" in shown
    assert "1/10" in shown
    assert "max_num_steps reached" in shown


def test_display_shows_the_held_out_reward_where_there_is_no_accuracy() -> None:
    display = RunDisplay(Terminal(quiet=True, plain=True))
    display.begin_stage("grpo", 10)
    display.on_validation_end(None, state(1, 10), {"val:reward": 3.25})
    assert "held-out reward 3.25" in display.shown()
    display.on_validation_end(None, state(2, 10), {"val:accuracy": 0.5})
    assert "reward" not in display.shown()
    assert "accuracy 50.0%" in display.shown()


def test_quiet_prints_nothing() -> None:
    terminal = Terminal(quiet=True, plain=True)
    terminal.err.file = io.StringIO()
    display = RunDisplay(terminal)
    with display.running():
        display.begin_stage("grpo", 10)
    assert terminal.err.file.getvalue() == ""


def test_table_shows_text_that_looks_like_markup_as_it_is() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(table("t", ["a", "b"], [("[bold]x", 0.123456), ("y", None)]))
    text = console.file.getvalue()
    assert "[bold]x" in text
    assert "0.1235" in text
