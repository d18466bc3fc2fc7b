from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_distributed.errors import ConfigError, RegistryError
from rl_distributed.metrics import (
    LoggerConfig,
    LoggerFacade,
    Mean,
    MetricError,
    MetricSink,
    sink_registry,
)
from rl_distributed.metrics.sinks.console import ConsoleSink
from rl_distributed.metrics.sinks.jsonl import JsonlSink, read_metrics


class BrokenSink:
    """Fails while told to; supports neither histograms nor plots."""

    def __init__(self, log_dir: Path) -> None:
        self.calls = 0
        self.closed = 0
        self.fails = True

    def log_metrics(
        self, metrics: Mapping[str, float], step: int, time_s: float
    ) -> None:
        self.calls += 1
        if self.fails:
            raise OSError(28, "No space left on device")

    def log_hyperparams(self, params: Mapping[str, Any]) -> None: ...

    def log_text(self, name: str, text: str, step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed += 1


def test_json_lines_hold_what_was_logged(tmp_path: Path) -> None:
    with LoggerFacade(LoggerConfig(log_dir=str(tmp_path))) as logger:
        logger.log_hyperparams({"lr": 1e-3, "nested": {"path": tmp_path}})
        logger.log_metrics({"loss": Mean(3.0, 2.0), "none": Mean(0, 0)}, 1, "train")
        logger.log_metrics({"bad": math.nan, "far": -math.inf}, 2, step_finished=True)
        logger.log_text("sample", "häß\ud800lich", 2)
    lines = [
        json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().split("\n") if x
    ]
    assert lines[0]["hyperparams"] == {"lr": 1e-3, "nested": {"path": str(tmp_path)}}
    assert lines[1]["metrics"] == {"train/loss": 1.5}
    assert lines[1]["time"] > 1e9
    assert lines[2]["metrics"] == {"bad": "nan", "far": "-inf"}
    assert "lich" in lines[3]["text"]["sample"]
    (_, first), (step, second) = read_metrics(tmp_path / "metrics.jsonl")
    assert first == {"train/loss": 1.5}
    assert step == 2
    assert math.isnan(second["bad"])


def test_a_torn_line_of_a_killed_writer_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"metrics":{"a":1}}\n{"step":2,"met')
    sink = JsonlSink(tmp_path)
    sink.log_metrics({"a": 3.0}, 3, 0.0)
    sink.close()
    assert list(read_metrics(path)) == [(1, {"a": 1.0}), (3, {"a": 3.0})]


def test_the_console_sink_writes_log_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LoggerConfig(
        sinks=["console"], sink_settings={"console": {"only": ["train/"]}}
    )
    with caplog.at_level(logging.INFO), LoggerFacade(config, tmp_path) as logger:
        logger.log_metrics({"loss": 0.123456, "tokens": 1024.0}, 3, "train")
        logger.log_metrics({"x": 1}, 3, "other")
        logger.log_hyperparams({"a": 1})
        logger.log_text("t", "hello", 3)
    assert "step 3: train/loss=0.1235 train/tokens=1024" in caplog.text
    assert "other" not in caplog.text
    assert "hello" in caplog.text
    assert capsys.readouterr().out == ""


def test_tensorboard_files_can_be_read_back(tmp_path: Path) -> None:
    module = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(module)
    with LoggerFacade(LoggerConfig(sinks=["tensorboard"]), tmp_path) as logger:
        logger.log_metrics({"loss": 0.5}, 4, "train", step_finished=True)
        logger.log_metrics({"val:low/loss": 0.25}, 4, step_finished=True)
        logger.log_hyperparams({"a": {"b": 1}})
        logger.log_text("note", "hello", 4)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    [scalar] = events.Scalars("train/loss")
    assert (scalar.step, scalar.value) == (4, 0.5)
    # The part before the colon is a group of curves.
    assert [s.value for s in events.Scalars("val/low/loss")] == [0.25]
    assert any("hyperparams" in tag for tag in events.Tags()["tensors"])


def test_a_missing_tensorboard_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        RegistryError, match=r"pip install 'rl-distributed\[tensorboard"
    ):
        LoggerFacade(LoggerConfig(sinks=["tensorboard"]), tmp_path)


@pytest.fixture
def broken() -> Iterator[str]:
    sink_registry.register("broken_for_test", replace=True)(BrokenSink)
    yield "broken_for_test"
    del sink_registry._registered["broken_for_test"]


def test_a_sink_that_fails_is_tried_again_and_the_others_go_on(
    broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LoggerFacade(LoggerConfig(sinks=[broken, "jsonl"]), tmp_path) as logger:
        for step in (1, 2, 3):
            logger.log_metrics({"a": step}, step)
        assert logger.num_failures == {broken: 3, "jsonl": 0}
        sink = logger.sinks[broken]
        assert isinstance(sink, BrokenSink)
        sink.fails = False  # the disk has space again
        logger.log_metrics({"a": 4}, 4)
    assert sink.calls == 4
    assert sink.closed == 1
    assert [step for step, _ in read_metrics(tmp_path / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
    ]
    assert caplog.text.count("the run goes on, and the sink is tried again") == 1
    assert caplog.text.count("Traceback") == 1
    assert "No space left" in caplog.text
    assert "failed 3 times" in caplog.text


def test_a_sink_that_only_fails_is_left_out_in_the_end(
    broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LoggerFacade(LoggerConfig(sinks=[broken]), tmp_path) as logger:
        sink = logger.sinks[broken]
        assert isinstance(sink, BrokenSink)
        for step in range(50):
            logger.log_metrics({"a": step}, step, step_finished=True)
        assert logger.sinks == {}
    assert sink.calls == 20
    assert sink.closed == 1
    assert "is left out from now on (failures: 20)" in caplog.text


def test_a_sink_that_fails_can_be_left_out_at_once(
    broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LoggerConfig(sinks=[broken, "jsonl"], on_sink_failure="drop")
    with LoggerFacade(config, tmp_path) as logger:
        logger.log_metrics({"a": 1}, 1)
        logger.log_metrics({"a": 2}, 2)
        assert list(logger.sinks) == ["jsonl"]
    assert [step for step, _ in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert caplog.text.count("failed and is left out") == 1


def test_a_sink_that_fails_can_end_the_run(broken: str, tmp_path: Path) -> None:
    config = LoggerConfig(sinks=[broken], on_sink_failure="raise")
    with (
        LoggerFacade(config, tmp_path) as logger,
        pytest.raises(OSError, match="No space"),
    ):
        logger.log_metrics({"a": 1}, 1)


def test_a_sink_that_cannot_be_made_gives_back_the_others(
    broken: str, tmp_path: Path
) -> None:
    made: list[BrokenSink] = []

    def make(log_dir: Path) -> BrokenSink:
        made.append(BrokenSink(log_dir))
        return made[-1]

    sink_registry.register(broken, replace=True)(make)
    with pytest.raises(ConfigError):
        LoggerFacade(
            LoggerConfig(sinks=[broken, "jsonl"], sink_settings={"jsonl": {"x": 1}}),
            tmp_path,
        )
    assert made[0].closed == 1


def test_what_a_sink_cannot_show_is_said_once(
    broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LoggerConfig(sinks=[broken, "prometheus"])
    with caplog.at_level(logging.INFO), LoggerFacade(config, tmp_path) as logger:
        for step in (1, 2):
            logger.log_histogram([1.0, 2.0], step, "spread")
            logger.log_text("note", "hello", step)
        with pytest.raises(MetricError, match="must be a matplotlib figure: got str"):
            logger.log_plot("picture", 2, "p")
        assert logger.num_failures == {broken: 0, "prometheus": 0}
    assert caplog.text.count(f"{broken!r} cannot show histograms") == 1
    assert caplog.text.count("'prometheus' cannot show texts") == 1


def test_steps_never_go_back(tmp_path: Path) -> None:
    with LoggerFacade(LoggerConfig(), tmp_path) as logger:
        logger.resume_at(4)
        logger.log_between_steps({"cpu_percent": 5.0}, "system")
        logger.log_metrics({"a": 1}, 5)
        logger.log_metrics({"b": 1}, 5)
        logger.log_between_steps({"cpu_percent": 6.0}, "system")
        for call in (
            lambda: logger.log_metrics({"a": 1}, 4),
            lambda: logger.log_text("a", "b", 4),
            lambda: logger.log_histogram([1], 4, "x"),
            lambda: logger.resume_at(3),
        ):
            with pytest.raises(MetricError, match=r"must not go back: got \d after 5"):
                call()
        assert logger.step == 5
    assert [step for step, _ in read_metrics(tmp_path / "metrics.jsonl")] == [
        4,
        5,
        5,
        5,
    ]


def test_a_run_that_goes_back_records_no_step_twice(tmp_path: Path) -> None:
    with LoggerFacade(LoggerConfig(), tmp_path) as logger:
        for step in (1, 2, 3):
            logger.log_metrics({"a": step}, step)
        for wrong in (-1, 4):
            with pytest.raises(MetricError, match=r"a step from 0 to 3.* got -?\d"):
                logger.go_back_to(wrong)
        logger.go_back_to(1)
        assert logger.step == 1
        logger.log_metrics({"a": 20}, 2)
    recorded = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [(step, values["a"]) for step, values in recorded] == [(1, 1), (2, 20)]


def test_secrets_of_the_configuration_stay_here(tmp_path: Path) -> None:
    with LoggerFacade(LoggerConfig(), tmp_path) as logger:
        logger.log_hyperparams(
            {"env_vars": {"HF_TOKEN": "hf_abc", "OMP": "1"}, "prompt_key": "question"}
        )
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "hf_abc" not in text
    assert '"prompt_key":"question"' in text


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"logger\.log_dir must name a folder"):
        LoggerFacade(LoggerConfig())
    with pytest.raises(RegistryError, match="jsonl"):
        LoggerFacade(LoggerConfig(sinks=["jsnol"]), tmp_path)
    with pytest.raises(ConfigError, match="more than once"):
        LoggerFacade(LoggerConfig(sinks=["jsonl", "jsonl"]), tmp_path)
    with pytest.raises(ConfigError, match=r"sink_settings.*consol"):
        LoggerFacade(LoggerConfig(sink_settings={"consol": {}}), tmp_path)
    with pytest.raises(ConfigError, match=r"colour .*sink_settings\.jsonl"):
        LoggerFacade(LoggerConfig(sink_settings={"jsonl": {"colour": 1}}), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        LoggerFacade(LoggerConfig(), tmp_path / "file" / "sub")


def test_wrong_metrics_are_named(tmp_path: Path) -> None:
    with LoggerFacade(LoggerConfig(), tmp_path) as logger:
        with pytest.raises(MetricError, match="step must not be negative"):
            logger.log_metrics({"a": 1}, -1)
        with pytest.raises(MetricError, match="'a' must be a number"):
            logger.log_metrics({"a": None}, 1)


def test_tables_are_written_as_json_lines(tmp_path: Path) -> None:
    with LoggerFacade(LoggerConfig(), tmp_path) as logger:
        path = logger.log_batched_dict_as_jsonl(
            {"text": ["a", "b"], "x": np.array([1.5, 2.5])}, "tables/t.jsonl"
        )
        with pytest.raises(MetricError, match="one length"):
            logger.log_batched_dict_as_jsonl({"a": [1], "b": [1, 2]}, "u.jsonl")
        texts = logger.log_string_list_as_jsonl(["x", "y"], "s.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"text": "a", "x": 1.5}, {"text": "b", "x": 2.5}]
    assert json.loads(texts.read_text().splitlines()[1]) == {"content": "y"}


def test_the_sinks_fit_their_protocol(tmp_path: Path) -> None:
    for sink in (ConsoleSink(tmp_path), JsonlSink(tmp_path)):
        assert isinstance(sink, MetricSink)
        sink.flush()
        sink.close()
