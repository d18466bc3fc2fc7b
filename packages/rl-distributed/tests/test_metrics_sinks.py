"""Every sink against its contract, read back with the service's own reader."""

from __future__ import annotations

import html
import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_distributed.config import Config
from rl_distributed.errors import ConfigError, RegistryError
from rl_distributed.metrics import (
    Distribution,
    Histogram,
    LoggerConfig,
    LoggerFacade,
    MetricError,
    sink_registry,
)
from rl_distributed.metrics.sinks.console import ConsoleSink
from rl_distributed.metrics.sinks.jsonl import JsonlSink, read_metrics
from rl_distributed.metrics.sinks.mlflow import MlflowSink, MlflowSinkConfig
from rl_distributed.metrics.sinks.prometheus import (
    PrometheusSink,
    PrometheusSinkConfig,
)
from rl_distributed.metrics.sinks.tensorboard import TensorboardSink
from rl_distributed.metrics.sinks.wandb import WandbSink, WandbSinkConfig
from rl_distributed.metrics.table import table_rows
from rl_distributed.testing import SinkContractError, check_metric_sink

Series = dict[str, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove variables that a sink sets for its engine, after the test."""
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_DIR", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        if name.startswith(("MLFLOW_", "WANDB_")):
            del os.environ[name]


@pytest.fixture(scope="module")
def figure() -> Any:
    module = pytest.importorskip("matplotlib.figure")
    figure = module.Figure(figsize=(1, 1))
    figure.subplots().plot([1, 2, 1])
    return figure


# Readers


def read_jsonl(sink: JsonlSink) -> Series:
    series: Series = {}
    for step, metrics in read_metrics(sink.path):
        for name, value in metrics.items():
            series.setdefault(name, []).append((step, value))
    return series


def events_of(folder: Path) -> Any:
    module = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = module.EventAccumulator(str(folder))
    events.Reload()
    return events


def read_tensorboard(sink: TensorboardSink) -> Series:
    events = events_of(Path(sink._folder))
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def read_mlflow(sink: MlflowSink) -> Series:
    client = pytest.importorskip("mlflow").MlflowClient(
        tracking_uri=sink._client.tracking_uri
    )
    names = client.get_run(sink.run_id).data.metrics
    return {
        name: [(m.step, m.value) for m in client.get_metric_history(sink.run_id, name)]
        for name in names
    }


def scrape(sink: PrometheusSink) -> dict[tuple[str, str], float]:
    """Query over HTTP and parse the answer as Prometheus does."""
    parser = pytest.importorskip("prometheus_client.parser")
    # The machine's proxies are not involved.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(sink.url, timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, sample.labels.get("metric", sample.labels.get("le", ""))): (
            sample.value
        )
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def read_prometheus(sink: PrometheusSink) -> Series:
    found = scrape(sink)
    step = int(found.pop(("run_step", "")))
    return {label: [(step, value)] for (_, label), value in found.items()}


def wandb_records(folder: Path) -> Iterator[Any]:
    """Read the file of an offline run: protobuf records in a LevelDB log."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    [path] = folder.glob("*.wandb")
    data, position, record = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position < len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        position += 7
        if position + length > len(data):
            return  # it is still being written
        record += data[position : position + length]
        position += length
        if kind in (1, 4):  # complete, or the last part
            message = messages.Record()
            message.ParseFromString(record)
            record = b""
            yield message


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    # The wandb process may still be writing when the run has finished.
    pause = threading.Event()
    for _ in range(3000):
        kinds = {record.WhichOneof("record_type") for record in wandb_records(folder)}
        if "exit" in kinds:
            break
        pause.wait(0.02)
    rows = []
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    return rows


# The contract


SINKS: dict[str, tuple[Any, Any]] = {
    "console": (ConsoleSink, None),
    "jsonl": (JsonlSink, read_jsonl),
    "tensorboard": (TensorboardSink, read_tensorboard),
    "mlflow": (MlflowSink, read_mlflow),
    "prometheus": (PrometheusSink, read_prometheus),
}


@pytest.mark.parametrize("name", SINKS)
def test_sinks_keep_their_contract(name: str, tmp_path: Path, figure: Any) -> None:
    make, read = SINKS[name]
    assert sink_registry.get(name) is make
    assert issubclass(make.config_class, Config)
    check_metric_sink(make, tmp_path / "run", read=read, figure=figure)


def test_wandb_keeps_the_contract_and_writes_an_offline_run(
    tmp_path: Path, figure: Any
) -> None:
    assert sink_registry.get("wandb") is WandbSink
    folders: list[Path] = []

    def make(folder: Path) -> WandbSink:
        sink = WandbSink(folder, WandbSinkConfig(mode="offline", project="p"))
        folders.append(sink.folder)
        return sink

    check_metric_sink(make, tmp_path / "run", figure=figure)
    [folder] = folders
    rows = wandb_history(folder)
    assert [
        (row["_step"], row["train/loss"]) for row in rows if "train/loss" in row
    ] == [(0, 2.5), (1, -1.0), (7, 1e-12)]
    # The calls of one step are one row.
    assert rows[0]["val/accuracy"] == 0.25
    assert rows[-1]["sample/text"].startswith("häß")
    assert any(key.startswith("spread/x") for key in rows[-1])
    kinds = {record.WhichOneof("record_type") for record in wandb_records(folder)}
    assert "exit" in kinds
    configs = [
        r.config
        for r in wandb_records(folder)
        if r.WhichOneof("record_type") == "config"
    ]
    assert any(u.key == "optimizer" for config in configs for u in config.update)
    # No information on the machine or the source was requested.
    assert not list(folder.rglob("*.patch"))
    assert not (folder / "files" / "wandb-metadata.json").exists()
    assert not (folder / "files" / "requirements.txt").exists()


def test_the_contract_finds_what_is_wrong(tmp_path: Path) -> None:
    class Fussy(JsonlSink):
        def log_text(self, name: str, text: str, step: int) -> None:
            if not text:
                raise ValueError("no text")

        def log_metrics(
            self, metrics: Mapping[str, float], step: int, time_s: float
        ) -> None:
            super().log_metrics(metrics, step + 1, time_s)

    with pytest.raises(SinkContractError) as caught:
        check_metric_sink(Fussy, tmp_path, read=read_jsonl)
    assert "log_text of nothing raised ValueError" in str(caught.value)
    assert "train/loss: expected [(0, 2.5)" in str(caught.value)
    with pytest.raises(SinkContractError, match="lacks a method"):
        check_metric_sink(lambda folder: object(), tmp_path)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "prometheus"])
def test_a_missing_package_names_the_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {
        "tensorboard": "torch.utils.tensorboard",
        "prometheus": "prometheus_client",
    }
    monkeypatch.setitem(sys.modules, module.get(name, name), None)
    with pytest.raises(RegistryError, match=rf"pip install 'rl-distributed\[{name}\]'"):
        LoggerFacade(LoggerConfig(sinks=[name]), tmp_path)


def test_engines_are_imported_only_when_used() -> None:
    code = (
        "import sys, rl_distributed\n"
        "from rl_distributed.metrics import LoggerFacade, sink_registry\n"
        "for name in sink_registry.names(): sink_registry.get(name)\n"
        "engines = ('wandb', 'trackio', 'mlflow', 'prometheus_client', 'torch',\n"
        "           'tensorboard', 'ray', 'pynvml', 'matplotlib')\n"
        "print(sink_registry.names(), [m for m in engines if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    names = [
        "console", "jsonl", "mlflow", "prometheus", "tensorboard", "trackio", "wandb"
    ]  # fmt: skip
    assert done.stdout.strip() == f"{names} []", done.stderr


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("wandb", {"projekt": "x"}, r"projekt .*'project'\? \(.*sink_settings\.wandb"),
        ("mlflow", {"request_deadline_s": -1}, r"sink_settings\.mlflow"),
        ("prometheus", {"port": 70000}, r"sink_settings\.prometheus"),
        ("prometheus", {"labels": {"metric": "x"}}, r"not 'metric'"),
        ("tensorboard", {"folder": "x"}, r"folder .*sink_settings\.tensorboard"),
        ("console", {"only": 3}, r"sink_settings\.console"),
    ],
)
def test_wrong_options_are_named(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = LoggerConfig(sinks=[name], sink_settings={name: settings})
    with pytest.raises(ConfigError, match=message):
        LoggerFacade(config, tmp_path)


# Single sinks


def test_prometheus_answers_and_gives_the_port_back(tmp_path: Path) -> None:
    config = PrometheusSinkConfig(namespace="job", labels={"run": "a"})
    sink = PrometheusSink(tmp_path, config)
    sink.log_metrics({"train/loss": 0.5, "train_loss": 7.0, "step": 1.0}, 3, 0.0)
    sink.log_metrics({"train/loss": math.nan}, 4, 0.0)
    sink.log_histogram("len", Histogram((0.0, 1.0, 2.0), (3.0, 1.0), 4.5), 4, 0.0)
    found = scrape(sink)
    assert math.isnan(found[("job_train_loss", "train/loss")])
    assert found[("job_train_loss", "train_loss")] == 7.0
    assert found[("job_step", "")] == 4
    assert found[("job_len_distribution_gsum", "len")] == 4.5
    address, port = "127.0.0.1", sink.port
    with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}"):
        PrometheusSink(tmp_path, PrometheusSinkConfig(port=port))
    sink.close()
    assert not [t for t in threading.enumerate() if t.name == "http metrics"]
    with (
        pytest.raises(OSError, match=r"refused"),
        socket.create_connection((address, port), timeout=10),
    ):
        pass


def test_mlflow_keeps_histograms_texts_and_plots(tmp_path: Path, figure: Any) -> None:
    config = MlflowSinkConfig(experiment_name="e", run_name="r", tags={"t": "1"})
    sink = MlflowSink(tmp_path, config)
    client = sink._client
    sink.log_hyperparams({"a": {"b": 1}})
    sink.log_histogram("h", Histogram((0.0, 1.0), (3.0,)), 2, 0.0)
    sink.log_plot("p", figure, 2)
    sink.close()
    run = client.get_run(sink.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "r")
    assert (run.data.params, run.data.tags["t"]) == ({"a.b": "1"}, "1")
    [stored] = (tmp_path / "mlruns").rglob("histograms/h/000000002.json")
    assert json.loads(stored.read_text()) == {"edges": [0.0, 1.0], "counts": [3.0]}
    [picture] = (tmp_path / "mlruns").rglob("plots/p/000000002.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tensorboard_shows_histograms_and_plots(tmp_path: Path, figure: Any) -> None:
    with LoggerFacade(LoggerConfig(sinks=["tensorboard"]), tmp_path) as logger:
        logger.log_histogram([1.0, 2.0, 2.0], 3, "spread")
        logger.log_plot(figure, 3, "picture")
    events = events_of(tmp_path / "tensorboard")
    [histogram] = events.Histograms("spread")
    assert histogram.histogram_value.num == 3
    assert histogram.histogram_value.sum == 5
    assert events.Tags()["images"] == ["picture"]


def test_json_lines_hold_histograms_and_plots(tmp_path: Path, figure: Any) -> None:
    with LoggerFacade(LoggerConfig(), tmp_path) as logger:
        logger.log_histogram(Distribution.of([1.0, 3.0]), 3, "spread")
        logger.log_plot(figure, 3, "a/b c")
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").open()]
    assert sum(lines[0]["histograms"]["spread"]["counts"]) == 2
    assert lines[1]["plots"] == {"a/b c": "plots/a-b-c-3.png"}
    assert (tmp_path / "plots/a-b-c-3.png").read_bytes().startswith(b"\x89PNG")


# Tables

COLUMNS = ("prompt", "reward", "note")
HOSTILE = "![x](http://a.invalid/p.png)<script>1</script>|`a`\n# *b* _c_ [d](e) &amp;"
ROWS = [[HOSTILE, 1.0, None], ["", math.nan, {"a": [1]}]]


def log_a_table(folder: Path, name: str) -> Any:
    settings = {name: {"mode": "offline"}} if name == "wandb" else {}
    config = LoggerConfig(sinks=[name], sink_settings=settings)
    with LoggerFacade(config, folder) as logger:
        assert logger.shows_tables
        sink = logger.sinks[name]
        logger.log_metrics({"loss": 1.0}, 3, step_finished=True)
        logger.log_table("train/rollouts", COLUMNS, ROWS, 3)
        assert logger.num_failures == {name: 0}
    return sink


def test_tensorboard_shows_tables_whose_texts_are_text(tmp_path: Path) -> None:
    log_a_table(tmp_path, "tensorboard")
    events = events_of(tmp_path / "tensorboard")
    [event] = events.Tensors("train/rollouts/text_summary")
    assert event.step == 3
    # As its page renders it, and a browser after that.
    render = pytest.importorskip("tensorboard.plugin_util").markdown_to_safe_html
    page = render(event.tensor_proto.string_val[0])
    assert set(re.findall(r"<(\w+)", page)) == {
        *("table", "thead", "tbody", "tr", "th", "td", "br")
    }
    cells = [
        html.unescape(cell.replace("<br>", "\n"))
        for cell in re.findall(r"<td>(.*?)</td>", page, re.DOTALL)
    ]
    assert cells == [HOSTILE, "1.0", "", "", "nan", '{"a": [1]}']


def test_mlflow_reads_its_tables_back(tmp_path: Path) -> None:
    sink = log_a_table(tmp_path, "mlflow")
    [stored] = (tmp_path / "mlruns").rglob("tables/train/rollouts/000000003.json")
    assert json.loads(stored.read_text()) == {
        "columns": list(COLUMNS),
        "data": [[HOSTILE, 1.0, None], ["", "nan", '{"a": [1]}']],
    }
    for step in range(4, 40):
        sink = MlflowSink(tmp_path) if step == 4 else sink
        sink.log_table("train/rollouts", COLUMNS, [["p", step, ""]], step)
    sink.close()
    shown = sink._engine.MlflowClient(tracking_uri=_store(tmp_path)).get_run(
        sink.run_id
    )
    tagged = json.loads(shown.data.tags["mlflow.loggedArtifacts"])
    assert [entry["type"] for entry in tagged] == ["table"] * 20
    assert tagged[-1]["path"] == "tables/train/rollouts/000000039.json"


def _store(folder: Path) -> str:
    return (folder / "mlruns").resolve().as_uri()


def test_mlflow_finds_a_table_as_one_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    sink = log_a_table(tmp_path, "mlflow")
    mlflow = sink._engine
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(_store(tmp_path))
    try:
        path = "tables/train/rollouts/000000003.json"
        client = mlflow.MlflowClient()
        experiment = client.get_run(sink.run_id).info.experiment_id
        table = client.load_table(experiment, path, run_ids=[sink.run_id])
    finally:
        mlflow.set_tracking_uri(before)
    assert list(table.columns) == list(COLUMNS)
    assert table["prompt"][0] == HOSTILE


def test_wandb_writes_tables_of_mixed_cells(tmp_path: Path) -> None:
    sink = log_a_table(tmp_path, "wandb")
    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    [row] = [r for r in wandb_history(folder) if r["_step"] == 3]
    found = {key: value for key, value in row.items() if "rollouts" in key}
    assert "table-file" in str(found)
    [stored] = folder.rglob("*.table.json")
    table = json.loads(stored.read_text())
    assert table["columns"] == list(COLUMNS)
    assert table["data"] == [[HOSTILE, 1.0, None], ["", "nan", '{"a": [1]}']]
    assert sink is not None


def test_tables_are_bounded_and_checked(tmp_path: Path) -> None:
    rows = table_rows("t", ["a"], [["x" * 20_000]] * 2000)
    assert (len(rows), len(str(rows[0][0]))) == (1000, 10_000)
    with LoggerFacade(LoggerConfig(), tmp_path) as logger:
        assert not logger.shows_tables
        with pytest.raises(MetricError, match=r"got 2 cells for 1 columns \['a'\]"):
            logger.log_table("t", ["a"], [[1, 2]], 1)
        for wrong in ([], ["a", "a"]):
            with pytest.raises(MetricError, match="columns of different names"):
                logger.log_table("t", wrong, [], 1)
        logger.log_table("t", ["a"], [[1]], 2)
        with pytest.raises(MetricError, match="must not go back"):
            logger.log_table("t", ["a"], [[1]], 1)


# Going on


def run_until(folder: Path, name: str, steps: range, resume: int | None) -> Any:
    """Log some steps and exit without closing, as a killed run does."""
    settings = {name: {"mode": "offline"}} if name == "wandb" else {}
    logger = LoggerFacade(LoggerConfig(sinks=[name], sink_settings=settings), folder)
    if resume is not None:
        logger.resume_at(resume)
    for step in steps:
        logger.log_metrics({"loss": step / 2}, step, step_finished=True)
    return logger.sinks[name]


@pytest.mark.parametrize("name", ["jsonl", "tensorboard", "mlflow"])
def test_a_resumed_run_has_no_step_twice(name: str, tmp_path: Path) -> None:
    first = run_until(tmp_path, name, range(1, 8), None)
    # The checkpoint was of step 4; steps 5 to 7 are repeated.
    second = run_until(tmp_path, name, range(5, 11), 4)
    series = SINKS[name][1](second)["loss"]
    assert series == [(step, step / 2) for step in range(1, 11)]
    for sink in (first, second):
        sink.close()


def test_a_killed_resume_does_not_cost_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = run_until(tmp_path, "jsonl", range(1, 8), None)
    sink.close()
    before = sink.path.read_bytes()

    def fail(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    again = JsonlSink(tmp_path)
    with pytest.raises(OSError, match="No space"):
        again.resume_at(4)
    assert sink.path.read_bytes() == before
    again.log_metrics({"loss": 1.0}, 8, 0.0)
    again.close()
    assert len(list(read_metrics(sink.path))) == 8


def test_wandb_goes_on_with_the_same_run(tmp_path: Path) -> None:
    first = run_until(tmp_path, "wandb", range(1, 3), None)
    identity = first._run.id
    first.close()
    second = run_until(tmp_path, "wandb", range(3, 4), 2)
    assert second._run.id == identity
    second.close()


def test_a_full_disk_tears_at_most_one_line(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)

    class FullDisk:
        def __init__(self, file: Any) -> None:
            self.file = file
            self.room = 60

        def write(self, data: Any) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            part = bytes(data)[: self.room]
            self.room -= len(part)
            return int(self.file.write(part))

    whole, sink._file = sink._file, FullDisk(sink._file)  # type: ignore[assignment]
    sink.log_metrics({"a": 1.0}, 1, 0.0)
    with pytest.raises(OSError, match="No space"):
        sink.log_metrics({"a": 2.0}, 2, 0.0)
    sink._file = whole
    sink.log_metrics({"a": 3.0}, 3, 0.0)
    sink.close()
    assert list(read_metrics(sink.path)) == [(1, {"a": 1.0}), (3, {"a": 3.0})]


def test_threads_may_log_at_the_same_time(tmp_path: Path) -> None:
    with LoggerFacade(LoggerConfig(), tmp_path) as logger:

        def log() -> None:
            for _ in range(50):
                logger.log_between_steps({"x": 1.0}, "system")

        threads = [threading.Thread(target=log) for _ in range(4)]
        for thread in threads:
            thread.start()
        for step in range(50):
            logger.log_metrics({"y": 1.0}, step)
        for thread in threads:
            thread.join(60)
    steps = [step for step, _ in read_metrics(tmp_path / "metrics.jsonl")]
    assert len(steps) == 250
    assert steps == sorted(steps)


def test_a_service_that_does_not_answer_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        settings = {
            "tracking_uri": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "request_deadline_s": 1,
        }
        config = LoggerConfig(
            sinks=["mlflow", "jsonl"], sink_settings={"mlflow": settings}
        )
        with LoggerFacade(config, tmp_path) as logger:
            assert list(logger.sinks) == ["jsonl"]
            logger.log_metrics({"loss": 1.0}, 1)
    assert "'mlflow' cannot be made and is left out" in caplog.text
