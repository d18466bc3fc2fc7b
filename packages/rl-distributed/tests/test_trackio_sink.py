"""The sink `trackio`: its calls, and the package's own records if it is installed.

The lock lacks Trackio, whose bound on pillow is older than the version used here. So
the calls are checked against its documented functions, and the last test runs where it
is installed: `pip install trackio`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rl_distributed.errors import ConfigError, MissingExtraError
from rl_distributed.metrics import LoggerConfig, LoggerFacade, sink_registry
from rl_distributed.metrics.sinks.trackio import TrackioSink, TrackioSinkConfig
from rl_distributed.testing import check_metric_sink

TEXT = "<b>![x](http://a.invalid/p.png)\n| a"


class Run:
    """A stand-in for `trackio.Run`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.config: dict[str, Any] = {}
        self.logged: list[tuple[int | None, dict[str, Any]]] = []
        self.num_finished = 0

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        assert not self.num_finished
        self.logged.append((step, metrics))

    def finish(self) -> None:
        sys.stdout.write("* Run finished. Uploading logs\n")
        self.num_finished += 1


class Markdown:
    def __init__(self, text: str = "") -> None:
        self.text = text


class Histogram:
    def __init__(
        self, sequence: Any = None, np_histogram: Any = None, num_bins: int = 64
    ) -> None:
        self.counts, self.edges = np_histogram


class Table:
    def __init__(
        self, columns: list[str] | None = None, data: list[list[Any]] | None = None
    ) -> None:
        self.columns, self.data = columns, data


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Replace the package by one with its documented parameters."""
    module: Any = ModuleType("trackio")
    module.runs, module.options = {}, []

    def init(
        project: str,
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        server_url: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str = "never",
        private: bool | None = None,
        embed: bool = True,
        auto_log_gpu: bool | None = None,
        auto_log_cpu: bool | None = None,
    ) -> Run:
        module.options.append(locals())
        sys.stdout.write(f"* Trackio project initialized: {project}\n")
        # "never" starts another run, with another name if that one is taken.
        name = name or f"dainty-{len(module.runs)}"
        if resume == "never" and name in module.runs:
            name += "-2"
        run = module.runs.setdefault(name, Run(name))
        current.set(run)
        return run

    current: ContextVar[Run | None] = ContextVar("current_run", default=None)
    module.context_vars = SimpleNamespace(current_run=current)
    module.init, module.Markdown = init, Markdown
    module.Histogram, module.Table = Histogram, Table
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module  # type: ignore[no-any-return]


def test_it_keeps_the_contract(trackio: Any, tmp_path: Path) -> None:
    assert sink_registry.get("trackio") is TrackioSink
    check_metric_sink(TrackioSink, tmp_path)
    [run] = trackio.runs.values()
    assert run.num_finished == 1
    assert [(step, m["train/loss"]) for step, m in run.logged if "train/loss" in m] == [
        (0, 2.5), (1, -1.0), (7, 1e-12)
    ]  # fmt: skip


def test_every_option_reaches_it_and_nothing_else_is_measured(
    trackio: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "project": "p",
        "name": "n",
        "group": "g",
        "space_id": "me/space",
        "private": False,
        "server_url": "https://mine.invalid",
    }
    TrackioSink(tmp_path, TrackioSinkConfig.from_dict(settings)).close()
    [options] = trackio.options
    assert settings.items() <= options.items()
    assert options["auto_log_gpu"] is options["auto_log_cpu"] is False
    assert options["embed"] is False
    # The program's own run does not end this one.
    assert trackio.context_vars.current_run.get() is None
    # The program's output may be parsed, so nothing is printed.
    assert capsys.readouterr().out == ""


def test_rollouts_are_tables_and_texts_are_reports(
    trackio: Any, tmp_path: Path
) -> None:
    config = LoggerConfig(sinks=["trackio"])
    with LoggerFacade(config, tmp_path) as logger:
        assert logger.shows_tables
        logger.log_hyperparams({"grpo": {"seed": 3}})
        logger.log_table("train/rollouts", ("prompt", "r"), [[TEXT, math.nan]], 3)
        logger.log_text("sample", TEXT, 3)
        logger.log_histogram([1.0, 2.0], 3, "spread")
        assert logger.num_failures == {"trackio": 0}
    [run] = trackio.runs.values()
    assert run.config == {"grpo": {"seed": 3}}
    logged = {name: value for _, row in run.logged for name, value in row.items()}
    assert {step for step, _ in run.logged} == {3}
    assert logged["train/rollouts"].columns == ["prompt", "r"]
    assert logged["train/rollouts"].data == [[TEXT, "nan"]]
    assert logged["sample"].text == TEXT
    assert sum(logged["spread"].counts) == 2


def test_a_resumed_run_goes_on(trackio: Any, tmp_path: Path) -> None:
    for step in (1, 2):
        sink = TrackioSink(tmp_path / "a")
        [name] = trackio.runs
        trackio.runs[name].num_finished = 0
        sink.log_metrics({"train:loss": 0.5}, step, 0.0)
        sink.close()
        sink.close()
    assert [step for step, _ in trackio.runs[name].logged] == [1, 2]
    assert [options["resume"] for options in trackio.options] == ["never", "allow"]
    TrackioSink(tmp_path / "b").close()
    assert len(trackio.runs) == 2


def test_a_missing_package_and_a_wrong_option_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingExtraError, match=r"pip install trackio$"):
        LoggerFacade(LoggerConfig(sinks=["trackio"]), tmp_path)
    wrong = LoggerConfig(sinks=["trackio"], sink_settings={"trackio": {"projekt": "x"}})
    with pytest.raises(ConfigError, match=r"projekt .*sink_settings\.trackio"):
        LoggerFacade(wrong, tmp_path)


LOG = """
import sys
from pathlib import Path
from rl_distributed.metrics.sinks.trackio import TrackioSink

folder, *steps = sys.argv[1:]
sink = TrackioSink(Path(folder))
sink.log_hyperparams({"seed": 3})
for step in map(int, steps):
    sink.log_metrics({"train:loss": step / 2}, step, 0.0)
    sink.log_table("train/rollouts", ("prompt", "reward"), [["a<b>", 1.0]], step)
sink.close()
"""
READ = """
import json
from trackio.sqlite_storage import SQLiteStorage

[run] = SQLiteStorage.get_runs("runs")
print(json.dumps(SQLiteStorage.get_logs("runs", run)))
"""


def in_another_process(folder: Path, code: str, *arguments: Sequence[str] | str) -> str:
    """Run a program in another process: Trackio reads its folder on import."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "TRACKIO_DIR": str(folder)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(
    importlib.util.find_spec("trackio") is None, reason="needs: pip install trackio"
)
def test_the_package_keeps_numbers_and_tables(tmp_path: Path) -> None:
    store, run = tmp_path / "store", str(tmp_path / "run")
    assert in_another_process(store, LOG, run, "1", "2") == ""
    assert in_another_process(store, LOG, run, "3") == ""
    rows = json.loads(in_another_process(store, READ))
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert losses == {1: 0.5, 2: 1.0, 3: 1.5}
    tables = {
        row["step"]: row["train/rollouts"] for row in rows if "train/rollouts" in row
    }
    assert sorted(tables) == [1, 2, 3]
    assert tables[2]["_type"] == "trackio.table"
    assert tables[2]["_value"] == [{"prompt": "a<b>", "reward": 1.0}]
