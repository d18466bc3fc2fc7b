"""What is shown of a run that has ended: accuracy where there is one, else reward."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib import pyplot
from rich.console import Console

from rl_cli.compose import RunOutcome
from rl_cli.console import Terminal
from rl_cli.report import curve, summary


class Folder:
    """A run folder whose stages have ended; `stages` has metrics by stage and step."""

    def __init__(self, path: Path, stages: dict[str, list[dict[str, float]]]) -> None:
        self.path, self._stages = path, stages
        for name, steps in stages.items():
            (path / name).mkdir()
            lines = [
                json.dumps({"step": step, "metrics": found})
                for step, found in enumerate(steps)
            ]
            (path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    def stage_result(self, name: str) -> dict[str, Any]:
        steps = self._stages[name]
        return {"run_dir": str(self.path / name), "steps": len(steps) - 1}

    def run(self) -> Any:
        stages = [SimpleNamespace(name=name) for name in self._stages]
        return SimpleNamespace(stages=stages, name="test", seed=1)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    return figures


def labels_of(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_the_curve_is_of_accuracy_where_any_stage_has_it(
    tmp_path: Path, drawn: list[Any]
) -> None:
    warmup = [{"validation/loss": 2.0}, {"validation/accuracy": 0.25}]
    grpo = [
        {"validation/accuracy": 0.25, "validation/reward": 0.25},
        {"train/reward": 0.5, "validation/accuracy": 0.75, "validation/reward": 0.75},
    ]
    folder = Folder(tmp_path, {"warmup": warmup, "grpo": grpo})
    assert curve.draw(folder.run(), folder) == tmp_path / "curve.png"  # type: ignore[arg-type]
    (figure,) = drawn
    assert labels_of(figure) == ["held-out accuracy", "training reward"]
    assert figure.axes[0].get_ylim() == (-0.02, 1.02)
    assert [text.get_text() for text in figure.axes[0].texts] == ["warmup", "grpo"]
    # The stages lie one behind the other on the axis of steps.
    places = [list(line.get_xdata()) for line in figure.axes[0].get_lines()]
    assert sorted(places) == [[1], [1, 2], [2]]


def test_the_curve_of_a_reward_function_is_of_rewards_and_not_cut(
    tmp_path: Path, drawn: list[Any]
) -> None:
    steps = [{"validation/reward": -3.0}, {"train/reward": 0.5}]
    steps.append({"train/reward": 4.0, "validation/reward": 5.0})
    folder = Folder(tmp_path, {"grpo": steps})
    curve.draw(folder.run(), folder)  # type: ignore[arg-type]
    (figure,) = drawn
    assert labels_of(figure) == ["training reward", "held-out reward"]
    low, high = figure.axes[0].get_ylim()
    assert low < -3
    assert high > 5


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    folder = Folder(tmp_path, {"grpo": [{}, {"train/loss": 1.0}]})
    assert curve.draw(folder.run(), folder) is None  # type: ignore[arg-type]
    assert not (tmp_path / "curve.png").exists()


def table_of(stages: dict[str, Any], starts: dict[str, dict[str, float]]) -> str:
    text = io.StringIO()
    terminal = Terminal()
    terminal.out = Console(file=text, width=160)
    outcome = RunOutcome(Path("run"), Path("model"), 1.0, stages)
    result = {"run_dir": "run", "checkpoint": "model", "wall_s": 1.0}
    summary.show(terminal, outcome, result, starts, [], None, aside=False)
    return text.getvalue()


def stage(**metrics: float) -> dict[str, Any]:
    named = {f"val:{name}": value for name, value in metrics.items()}
    return {"metrics": named, "steps": 3, "stop_reason": "done"}


def test_the_table_names_what_was_measured() -> None:
    text = table_of(
        {
            "imitate": stage(val_loss=0.125),
            "improve": stage(reward=2.5),
            "sort": stage(accuracy=0.5, reward=0.75),
        },
        {"improve": {"val:reward": -1.5}, "sort": {"val:accuracy": 0.25}},
    )
    rows = {
        line.split()[0]: line.split()
        for line in text.replace("│", " ").replace("|", " ").splitlines()
        if line.split() and line.split()[0] in ("imitate", "improve", "sort")
    }
    assert rows["imitate"] == ["imitate", "3", "val_loss", "0.125", "done"]
    assert rows["improve"] == ["improve", "3", "reward", "-1.5", "2.5", "done"]
    assert rows["sort"] == ["sort", "3", "accuracy", "25.0%", "50.0%", "done"]
    assert "accuracy before" not in text


def test_flat_metrics_have_the_reward_and_no_invented_accuracy() -> None:
    outcome = RunOutcome(Path("run"), Path("model"), 1.0, {"grpo": stage(reward=2.5)})
    found = summary.flat_metrics(outcome, {"val:reward": 1.0})
    assert found == {"reward": 2.5, "reward_start": 1.0, "steps": 3}


def test_flat_metrics_are_those_of_the_last_stage() -> None:
    last = stage(reward=2.5)
    last["metrics"]["train:reward"] = 1.5
    stages = {"imitate": {**stage(accuracy=0.25), "steps": 9}, "grpo": last}
    outcome = RunOutcome(Path("run"), Path("model"), 1.0, stages)
    found = summary.flat_metrics(outcome, {})
    assert found == {"reward": 2.5, "train_reward": 1.5, "steps": 3}
