"""The summary of a finished run: accuracy if there is one, else reward."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from rl_algorithms.trainers.run.figures import Figures
from rl_cli.console import Terminal
from rl_cli.report import curve, samples, summary
from rl_cli.run_stages import RunOutcome


class Folder:
    """A run folder of finished stages; `stages` has metrics by stage and step."""

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
        return {
            "run_dir": str(self.path / name),
            "steps": len(steps) - 1,
            "checkpoint": f"somewhere/step_{len(steps) - 1}",
        }

    def run(self) -> Any:
        stages = [SimpleNamespace(name=name) for name in self._stages]
        return SimpleNamespace(stages=stages, name="test", seed=1)


def test_the_curve_of_all_stages_is_one_picture(tmp_path: Path) -> None:
    warmup = [{"validation/loss": 2.0}, {"validation/accuracy": 0.25}]
    grpo = [{"val:accuracy": 0.25}, {"train:reward": 0.5, "val:accuracy": 0.75}]
    folder = Folder(tmp_path, {"warmup": warmup, "grpo": grpo})
    assert curve.draw(folder.run(), folder) == tmp_path / "curve.png"  # type: ignore[arg-type]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    folder = Folder(tmp_path, {"grpo": [{}, {"timing:total_step_time": 1.0}]})
    assert curve.draw(folder.run(), folder) is None  # type: ignore[arg-type]
    assert not (tmp_path / "curve.png").exists()


def table_of(stages: dict[str, Any], figures: dict[str, Figures]) -> str:
    text = io.StringIO()
    terminal = Terminal()
    terminal.out = Console(file=text, width=160)
    outcome = RunOutcome(Path("run"), Path("model"), 1.0, stages)
    result = {
        "run_dir": "run",
        "checkpoint": "model",
        "wall_s": 1.0,
        "warnings": summary.warnings_of(outcome),
    }
    summary.show(terminal, outcome, result, figures, [], None, aside=False)
    return text.getvalue()


STAGE = {"metrics": {}, "steps": 3, "stop_reason": "done"}


def test_the_end_of_a_run_says_what_to_do_next() -> None:
    text = table_of({"improve": STAGE}, {"improve": Figures(None)})
    assert "See it: rl report run\n" in text
    assert "Try it: rl generate model PROMPT\n" in text
    asked = summary._prompt_of([samples.Answer("max 1 = ", "1", "2", "1")])
    assert asked == "'max 1 = '"
    long = samples.Answer("why? " * 20, "1", "2", "1")
    assert summary._prompt_of([long]) == "PROMPT"
    assert summary._prompt_of([samples.Answer("a\nb", "1", "2", "1")]) == "PROMPT"


def test_the_table_names_what_was_measured() -> None:
    text = table_of(
        dict.fromkeys(("imitate", "improve", "sort"), STAGE),
        {
            "imitate": Figures("val:val_loss", 0.5, 1, 0.125, 3, 0.125),
            "improve": Figures("val:reward", -1.5, 0, 2.5, 3, 2.5),
            "sort": Figures("val:accuracy", 0.25, 0, 0.75, 2, 0.5),
        },
    )
    rows = {
        line.split()[0]: line.split()
        for line in text.replace("│", " ").replace("|", " ").splitlines()
        if line.split() and line.split()[0] in ("imitate", "improve", "sort")
    }
    # A metric not measured before the first step says nothing about that time.
    assert rows["imitate"] == ["imitate", "3", "val:val_loss", "0.125", "done"]
    assert rows["improve"] == ["improve", "3", "val:reward", "-1.5", "2.5", "done"]
    assert rows["sort"] == ["sort", "3", "val:accuracy", "25.0%", "50.0%", "done"]
    assert "val:accuracy 75.0% at step 2" in text
    assert "Nothing was learnt" not in text


def test_the_report_says_where_nothing_was_learnt() -> None:
    said = "Nothing was learnt: val:reward is 1 at the start and 1 at best afterwards."
    figures = Figures("val:reward", 1.0, 0, 1.0, 0, 1.0, said)
    assert said in table_of({"grpo": STAGE}, {"grpo": figures})


def test_the_report_says_what_the_run_was_warned_of() -> None:
    warned = {**STAGE, "warnings": ["the data are odd"]}
    figures = dict.fromkeys(("one", "two"), Figures("val:reward", 1.0, 0, 2.0, 1, 2.0))
    assert "warned      the data are odd" in table_of({"one": warned}, figures)
    text = table_of({"one": STAGE, "two": warned}, figures)
    assert text.count("warned ") == 1
    assert "warned      two: the data are odd" in text


def test_the_result_begins_with_a_few_figures() -> None:
    last = {
        **STAGE,
        "metrics": {"val:reward": 2.5, "train:reward": 1.5},
        "checkpoint": "stages/grpo/checkpoints/step_2",
        "warnings": ["odd data"],
    }
    outcome = RunOutcome(
        Path("run"), Path("model"), 1.0, {"imitate": STAGE, "grpo": last}
    )
    figures = Figures("val:reward", 1.0, 0, 3.0, 2, 2.5)
    found = summary.result_of(
        SimpleNamespace(seed=4), outcome, {"grpo": figures}, 1.234
    )  # type: ignore[arg-type]
    first = {key: found[key] for key in list(found)[:9]}
    assert first == {
        "measure": "val:reward",
        "start": 1.0,
        "start_step": 0,
        "best": 3.0,
        "best_step": 2,
        "end": 2.5,
        "nothing_learnt": None,
        "steps": 3,
        "wall_s": 1.23,
    }
    assert found["best_checkpoint"] == "stages/grpo/checkpoints/step_2"
    assert (found["checkpoint"], found["seed"]) == ("model", 4)
    assert found["warnings"] == ["grpo: odd data"]
    assert found["metrics"] == {"val:reward": 2.5, "train:reward": 1.5}
