from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_algorithms import Interrupted
from rl_algorithms.trainers.signals import SignalGuard
from rl_cli.commands import running


@pytest.mark.parametrize("saved", ["step_4", None])
def test_an_interrupted_run_names_the_command_that_goes_on(
    saved: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*parts: Any, **options: Any) -> Any:
        raise Interrupted(2, saved)

    monkeypatch.setattr(running, "carry_out", interrupted)
    monkeypatch.setattr(running, "configure_logging", lambda *_, **__: None)
    folder = tmp_path / "mine"
    with pytest.raises(Interrupted) as caught, SignalGuard() as guard:
        running.run_and_report(
            "quickstart",
            None,
            [f"output_dir={folder}"],
            guard,
            resume=None,
            quiet=True,
            as_json=False,
            debug=False,
        )
    notes = getattr(caught.value, "__notes__", [])
    command = f"Go on with: rl train quickstart --resume {folder}"
    assert notes == ([command] if saved else [])
