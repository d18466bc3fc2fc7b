"""Which answers are sent to trackers as tables, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_algorithms.trainers.sampling.answer_tables import AnswerTables
from rl_distributed.metrics import LoggerConfig, LoggerFacade, sink_registry
from rl_distributed.metrics.sinks.jsonl import JsonlSink

ANSWER = {"reward": 1.0, "group": 0, "prompt": "1+1=", "response": "2", "tokens": ["2"]}


class Tables(JsonlSink):
    """Keeps the tables that it receives."""

    def __init__(self, log_dir: Path) -> None:
        super().__init__(log_dir)
        self.given: list[tuple[str, int, Sequence[str], Any]] = []

    def log_table(self, name: str, columns: Any, rows: Any, step: int) -> None:
        self.given.append((name, step, columns, rows))


# Its factory takes only a folder.
Tables.config_class = None  # type: ignore[assignment]


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[LoggerFacade]:
    sink_registry.register("tables_for_test", replace=True)(Tables)
    with LoggerFacade(LoggerConfig(sinks=["tables_for_test"]), tmp_path) as metrics:
        yield metrics
    del sink_registry._registered["tables_for_test"]


def given(metrics: LoggerFacade) -> list[tuple[str, int, Sequence[str], Any]]:
    sink = metrics.sinks["tables_for_test"]
    assert isinstance(sink, Tables)
    return sink.given


def test_the_first_step_and_each_whose_turn_it_is(metrics: LoggerFacade) -> None:
    tables = AnswerTables(metrics, 3)
    for step in range(1, 8):
        tables.add_rollouts(step, [ANSWER])
    tables.add_rollouts(9, [])
    assert [step for _, step, _, _ in given(metrics)] == [1, 3, 6]


def test_columns_are_those_that_something_is_in(metrics: LoggerFacade) -> None:
    call = {"function": {"name": "add"}}
    messages = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    answers = [ANSWER, {**ANSWER, "messages": messages, "rewards": {"exact": 1.0}}]
    AnswerTables(metrics, 1).add_rollouts(2, answers)
    [(name, step, columns, rows)] = given(metrics)
    assert (name, step) == ("train/rollouts", 2)
    assert columns == [
        *("step", "group", "prompt", "response", "conversation", "reward", "rewards")
    ]
    said = 'user: 1+1=\n\nassistant: \n{"function": {"name": "add"}}'
    assert rows == [
        [2, 0, "1+1=", "2", None, 1.0, None],
        [2, 0, "1+1=", "2", said, 1.0, '{"exact": 1.0}'],
    ]


def test_each_validation_is_a_table(metrics: LoggerFacade) -> None:
    sample = {"prompt": "p", "response": "r", "reward": 0.0, "dataset": "held-out"}
    AnswerTables(metrics, 10).add_samples(7, [sample])
    [(name, step, columns, rows)] = given(metrics)
    assert (name, step) == ("val/samples", 7)
    assert dict(zip(columns, rows[0], strict=True)) == {"step": 7, **sample}


def test_none_are_logged_if_none_are_wanted(metrics: LoggerFacade) -> None:
    tables = AnswerTables(metrics, 0)
    tables.add_rollouts(1, [ANSWER])
    tables.add_samples(1, [ANSWER])
    assert given(metrics) == []
