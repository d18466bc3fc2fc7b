"""The plot of a run: what is drawn, labelled and marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from rl_algorithms.trainers.run.curves import Mark, draw_curves
from rl_algorithms.trainers.run.history import History


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def history(**columns: list[float | None]) -> History:
    """Return a history by metric, `val_reward=[...]`, one value per step from 0."""
    num_steps = max((len(values) for values in columns.values()), default=0)
    found = History()
    for step in range(num_steps):
        record: dict[str, float] = {}
        for name, values in columns.items():
            value = values[step] if step < len(values) else None
            if value is not None:
                record[name.replace("_", ":", 1)] = value
        found.add(step, record)
    return found


def labels_of(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def draw(path: Path, *stages: History, **options: Any) -> Path | None:
    named = {f"stage {i}": stage for i, stage in enumerate(stages)}
    return draw_curves(named, path / "curve.png", title="a run", **options)


def test_axes_say_what_they_show_and_in_what_unit(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    assert draw(tmp_path, history(train_reward=[None, 3.0], val_reward=[-3.0, 5.0]))
    ((axes,),) = [figure.axes for figure in drawn]
    assert axes.get_xlabel() == "training step"
    assert axes.get_ylabel() == "reward (mean per answer)"
    assert labels_of(axes) == ["train:reward", "val:reward"]
    low, high = axes.get_ylim()
    assert low < -3
    assert high > 5


def test_a_curve_that_equals_another_one_is_not_drawn(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    same = [0.25, 0.5]
    draw(tmp_path, history(val_accuracy=same, val_reward=same, train_reward=same))
    draw(tmp_path, history(val_accuracy=same, val_reward=[0.25, 0.75]))
    draw(tmp_path, history(val_accuracy=[None, 0.5], val_reward=same))
    draw(
        tmp_path,
        history(val_accuracy=same),
        history(val_accuracy=same, val_reward=same),
    )
    labels = [labels_of(figure.axes[0]) for figure in drawn]
    assert labels == [
        ["train:reward", "val:accuracy"],
        ["val:reward", "val:accuracy"],
        ["val:reward"],
        ["val:accuracy"],
    ]


def test_rewards_beyond_0_and_1_do_not_share_the_axis_of_accuracy(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    draw(tmp_path, history(train_reward=[1.0, 7.0], val_accuracy=[0.25, 0.5]))
    labels = [axes.get_ylabel() for axes in drawn[0].axes]
    assert labels == ["reward (mean per answer)", "accuracy (share of answers)"]
    assert drawn[0].axes[1].get_ylim() == (-0.02, 1.02)


def test_losses_are_drawn_where_nothing_is_rewarded(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    draw(tmp_path, history(train_loss=[2.0, 1.0], val_val_loss=[2.0, 1.5]))
    draw(tmp_path, history(train_loss=[2.0, 1.0], train_reward=[0.0, 1.0]))
    assert labels_of(drawn[0].axes[0]) == ["train:loss", "val:val_loss"]
    assert labels_of(drawn[1].axes[0]) == ["train:reward"]


def test_the_best_checkpoint_is_marked_in_its_stage(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    warmup = history(val_reward=[0.0, 0.1, 0.2])
    trained = history(val_reward=[0.2, 0.8, 0.5])
    draw(tmp_path, warmup, trained, best=Mark("stage 1", 1))
    axes = drawn[0].axes[0]
    (star,) = (line for line in axes.get_lines() if line.get_marker() == "*")
    assert (list(star.get_xdata()), list(star.get_ydata())) == ([3], [0.8])
    assert labels_of(axes)[-1] == "best checkpoint (step 1)"
    named = [text.get_text() for text in axes.texts]
    assert named == ["stage 0", "stage 1"]


def test_the_curve_of_a_stage_begins_where_the_one_before_ended(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    draw(tmp_path, history(val_reward=[0.0, 0.1, 0.2]), history(val_reward=[0.3, 0.4]))
    places = [list(line.get_xdata()) for line in drawn[0].axes[0].get_lines()]
    assert places == [[0, 1, 2], [2, 3]]


def test_a_checkpoint_that_was_not_measured_is_marked_too(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    draw(tmp_path, history(val_reward=[0.0, None, 0.2]), best=Mark("stage 0", 1))
    assert "best checkpoint (step 1)" in labels_of(drawn[0].axes[0])


def test_a_sentence_says_that_nothing_was_learnt(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    draw(tmp_path, history(val_reward=[1.0, 0.5]))
    draw(tmp_path, history(val_reward=[0.5, 1.0]))
    titles = [figure._suptitle.get_text() for figure in drawn]  # type: ignore[attr-defined]
    assert titles[0].endswith(
        "Nothing was learnt: val:reward is 1 at the start and 0.5 at best afterwards."
    )
    assert titles[1] == "a run"


def test_named_metrics_have_an_axis_each_with_its_unit(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    columns = {"timing_generation": [1.0], "performance_tokens_per_sec": [5.0]}
    names = ["timing:generation", "performance:tokens_per_sec", "train:none"]
    draw(tmp_path, history(**columns), metrics=names)
    labels = [axes.get_ylabel() for axes in drawn[0].axes]
    assert labels == ["generation (s)", "tokens_per_sec (tokens per second)"]


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert draw(tmp_path, history(timing_total=[1.0])) is None
    assert not (tmp_path / "curve.png").exists()
