"""Reading a report from a run folder: complete, half written, or torn."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rl_cli.report.config_rows import config_values
from rl_cli.report.metric_table import MetricTable, StepValues, thinned
from rl_cli.report.run_reader import read_run
from rl_cli.report.step_times import phase_times
from rl_distributed.errors import ConfigError
from rl_distributed.runs.folder import begin_run

MakeRun = Callable[..., Path]


def test_a_run_that_has_ended_is_read(make_run: MakeRun) -> None:
    run = read_run(make_run())
    (stage,) = run.stages
    assert (run.state, stage.name, stage.num_steps) == ("finished", "grpo", 20)
    assert stage.checkpoints == (10,)
    assert stage.metrics.points("train:reward") == (
        list(range(1, 21)),
        [step / 20 for step in range(1, 21)],
    )
    assert stage.metrics.total("train:num_dropped/stale") == 1.0
    assert stage.metrics.num_starts == 1


def test_every_cut_of_a_metrics_file_can_be_read(make_run: MakeRun) -> None:
    folder = make_run(num_steps=3)
    whole = (folder / "metrics.jsonl").read_bytes()
    steps = []
    for size in range(len(whole) + 1):
        (folder / "metrics.jsonl").write_bytes(whole[:size])
        steps.append(MetricTable.read(folder / "metrics.jsonl").last_step)
    assert steps == sorted(steps)
    assert set(steps) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "line",
    [
        "null",
        "[1]",
        '{"step": "1", "metrics": {"a": 1}}',
        '{"step": 1, "metrics": [1]}',
        '{"step": 1, "metrics": {"a": null, "b": [1], "c": "high"}}',
        '{"hyperparams": 3}',
        "\x00\xff",
    ],
)
def test_an_odd_line_is_left_out(make_run: MakeRun, line: str) -> None:
    path = make_run(num_steps=3) / "metrics.jsonl"
    before = MetricTable.read(path)
    with open(path, "a", encoding="latin-1") as file:
        file.write(line + "\n")
    assert MetricTable.read(path).columns == before.columns


def test_a_step_done_again_counts_once(make_run: MakeRun) -> None:
    path = make_run(num_steps=3) / "metrics.jsonl"
    with open(path, "a") as file:
        file.write('{"step": 2, "time": 5.0, "metrics": {"train:reward": 9}}\n')
    assert MetricTable.read(path).points("train:reward") == ([1, 2, 3], [1 / 3, 9, 1])


def test_what_is_not_finite_is_counted_and_not_drawn(make_run: MakeRun) -> None:
    path = make_run(num_steps=3) / "metrics.jsonl"
    with open(path, "a") as file:
        file.write('{"step": 4, "metrics": {"train:loss": "nan"}}\n')
    table = MetricTable.read(path)
    assert table.num_nonfinite == {"train:loss": 1}
    assert all(map(math.isfinite, table.columns["train:loss"].values()))


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "result.json", "checkpoints", "logs", "config.yaml"]
)
def test_what_is_missing_is_left_out(make_run: MakeRun, name: str) -> None:
    folder = make_run()
    path = folder / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    run = read_run(folder)
    assert run.record["name"] == "grpo"
    assert run.state == ("interrupted" if name == "result.json" else "finished")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"kind": '])
def test_without_a_record_it_is_no_run(make_run: MakeRun, text: str) -> None:
    folder = make_run()
    (folder / "run.json").write_text(text)
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        read_run(folder)


def test_a_run_that_goes_on_is_read(tmp_path: Path) -> None:
    with begin_run(tmp_path / "run"):
        (tmp_path / "run" / "run.json").write_text('{"kind": "trainer", "name": "sft"}')
        run = read_run(tmp_path / "run")
    assert (run.state, run.result, run.stages[0].num_steps) == ("running", {}, 0)


def test_stages_follow_each_other(tmp_path: Path, make_run: MakeRun) -> None:
    config = {"stages": {"warmup": {"algorithm": "sft"}, "grpo": {}, "later": {}}}
    record = {"kind": "recipe", "name": "mine", "config": config}
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(record))
    for name, steps in (("grpo", 20), ("warmup", 4)):
        shutil.move(make_run(num_steps=steps), folder / "stages" / name)
    found = [(s.name, s.algorithm, s.offset) for s in read_run(folder).stages]
    assert found == [("warmup", "sft", 0), ("grpo", "grpo", 4)]


def test_equal_warnings_come_once_and_secrets_of_no_line(make_run: MakeRun) -> None:
    def line(level: str, message: str, second: int) -> dict[str, object]:
        return {"time": f"2026-01-01T00:00:{second:02}", "level": level, "logger": "a",
                "message": message, "actor": "driver", "step": second}  # fmt: skip

    logs = [
        line("INFO", "all is well", 1),
        line("WARNING", "3 rows are late", 2),
        line("WARNING", "5 rows are late", 3),
        line("ERROR", "it broke", 4),
    ]
    folder = make_run(logs=logs)
    with open(folder / "logs" / "run.jsonl", "a") as file:
        file.write('{"time": "9", "level": "ERROR", "mess')
    found = [(n.level, n.message, n.count, n.step) for n in read_run(folder).logs.notes]
    assert found == [
        ("WARNING", "3 rows are late", 2, 2),
        ("ERROR", "it broke", 1, 4),
    ]


def test_the_configuration_has_defaults_and_no_secrets(make_run: MakeRun) -> None:
    run = read_run(make_run())
    found = {value.key: value for value in config_values(run, run.stages[0])}
    seed = found["seed"]
    assert (seed.value, seed.default, seed.origin) == ("3", "42", "set")
    assert found["mismatch.limit"].origin == "default"
    assert found["env.settings.api_key"].value == '"***"'


def test_phases_add_up_to_all_the_time(make_run: MakeRun) -> None:
    times = phase_times(read_run(make_run(num_steps=1000)).stages[0].metrics)
    assert times is not None
    assert times.totals == pytest.approx(
        {"generation": 1500, "policy_training": 250, "validation": 200, "other": 250}
    )
    assert len(times.steps) <= 240
    assert all(len(column) == len(times.steps) for column in times.phases.values())
    assert times.phases["generation"] == pytest.approx([1.5] * len(times.steps))


def test_the_total_of_a_phase_is_no_part_of_it() -> None:
    table = MetricTable()
    named = {"total_step_time": 3.0, "load/total": 2.0, "load/send": 1.5}
    metrics = {f"timing:{name}": value for name, value in named.items()}
    table.add({"step": 1, "metrics": metrics})
    times = phase_times(table)
    assert times is not None
    assert times.totals == {"load": 2.0, "other": 1.0}
    assert times.parts == {"load/send": 1.5}


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(-1e9, 1e9)), max_size=60))
def test_a_column_is_a_mapping_in_order_of_its_steps(
    pairs: list[tuple[int, float]],
) -> None:
    column, expected = StepValues(), {}
    for step, value in pairs:
        column[step] = expected[step] = value
    in_order = dict(sorted(expected.items()))
    assert column == expected
    assert list(column.items()) == list(in_order.items())
    assert list(column.values()) == list(in_order.values())
    assert [column.get(step) for step in range(42)] == [
        expected.get(step) for step in range(42)
    ]


@given(
    st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300),
    st.integers(4, 60),
)
def test_thinned_points_keep_the_outline(values: list[float], limit: int) -> None:
    points = (list(range(len(values))), values)
    steps, kept = thinned(points, limit)
    assert len(steps) <= max(limit, 4)
    assert steps == sorted(set(steps))
    assert [values[step] for step in steps] == kept
    assert (steps[0], steps[-1]) == (0, len(values) - 1)
    assert (min(kept), max(kept)) == (min(values), max(values))


def test_a_spike_of_one_step_stays() -> None:
    values = [random.Random(1).random() for _ in range(10_000)]
    values[5_003] = 50.0
    steps, kept = thinned((list(range(10_000)), values), 400)
    assert (5_003, 50.0) in zip(steps, kept, strict=True)
