"""Worker calls as they appear on the driver's time line."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.errors import WorkerDiedError
from rl_distributed.timing.timeline import Timeline
from rl_distributed.timing.timeline_file import TimelineFile, read_timeline
from rl_distributed.timing.timer import Timer
from rl_distributed.workers import FailFast, RayWorkerGroup
from rl_distributed.workers.call_collector import CallCollector, deliver
from rl_distributed.workers.call_recorder import CallRecorder, CallReport, TimedCall

SAMPLE = "rl_distributed_sample_workers.Sample"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def row_of(record: dict[str, Any], name: str) -> dict[str, Any]:
    [row] = [row for row in record["rows"] if row["name"] == name]
    return row


def calls_of(record: dict[str, Any], name: str) -> list[tuple[str, float, float]]:
    """Return method, start and end of each call, in seconds since the line began."""
    return [
        (record["methods"][method], start / 1e6, (start + length) / 1e6)
        for method, start, length in row_of(record, name)["calls"]
    ]


def wait_until(condition, timeout_s=60.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.02)


class TestRecorder:
    def test_reports_what_ended_and_what_runs(self):
        now_s = time.monotonic()
        running = [("train", now_s - 2, "id")]
        recorder = CallRecorder("10.0.0.7", lambda: running)
        recorder.add("load", now_s - 3)
        line = recorder.take_line()
        report = CallReport.of_fields(json.loads(line)["calls"])
        assert (report.node, report.pid) == ("10.0.0.7", os.getpid())
        [load], [train] = report.ended, report.running
        assert (load.method, train.method) == ("load", "train")
        assert load.seconds == pytest.approx(3, abs=0.5)
        assert load.end_s == pytest.approx(time.time(), abs=0.5)
        assert train.start_s - load.start_s == pytest.approx(1, abs=0.01)
        assert report.memory_bytes > 1 << 20
        assert report.gpu_memory_bytes is None

    def test_says_nothing_where_nothing_is_new(self):
        recorder = CallRecorder("node", list)
        assert recorder.take_line() is not None
        assert recorder.take_line() is None
        recorder.add("step", time.monotonic())
        assert recorder.take_line() is not None

    def test_a_report_of_many_calls_is_bounded_and_loses_no_time(self):
        recorder = CallRecorder("node", list)
        now_s = time.monotonic()
        for number in range(30_000):
            is_long = number == 29_000
            recorder.add("long" if is_long else "short", now_s - 1 - 99 * is_long)
        line = recorder.take_line()
        assert len(line) < 50_000
        report = CallReport.of_fields(json.loads(line)["calls"])
        number, seconds = report.summed.pop("short")
        assert "long" in [call.method for call in report.ended]
        assert not report.summed
        # Older calls are dropped, so that an unreachable worker's memory does not grow.
        assert number + len(report.ended) == 20_000
        assert seconds >= number

    def test_memory_of_gpus_is_asked_for_only_where_they_are_used(self, monkeypatch):
        recorder = CallRecorder("node", list)
        cuda = SimpleNamespace(
            is_initialized=lambda: False,
            device_count=lambda: 2,
            max_memory_allocated=lambda device: 100 + device,
        )
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

        def reported():
            recorder._gpu_due_s = 0.0
            recorder.add("step", time.monotonic())
            fields = json.loads(recorder.take_line())["calls"]
            return CallReport.of_fields(fields).gpu_memory_bytes

        assert reported() is None
        cuda.is_initialized = lambda: True
        assert reported() == 201

        def fail(device):
            raise RuntimeError("the device has failed")

        cuda.max_memory_allocated = fail
        assert reported() is None

    def test_a_call_costs_microseconds(self):
        recorder = CallRecorder("node", list)
        began_s = time.perf_counter()
        for _ in range(10_000):
            recorder.add("step", began_s)
        assert (time.perf_counter() - began_s) / 10_000 < 20e-6


class TestCollector:
    @staticmethod
    def report(at_s: float, **fields: Any) -> CallReport:
        return CallReport("node", 7, at_s, memory_bytes=10, **fields)

    def test_a_call_over_two_windows_is_in_both(self):
        collector = CallCollector()
        running = (TimedCall("train", 100.0, 5.0),)
        deliver("group", 0, self.report(105.0, running=running))
        [worker] = collector.take(99.0, 104.0)
        assert worker.name == "group[0]"
        assert worker.calls == (TimedCall("train", 100.0, 4.0),)
        ended = (TimedCall("train", 100.0, 7.0), TimedCall("save", 107.0, 0.5))
        deliver("group", 0, self.report(108.0, ended=ended))
        [worker] = collector.take(104.0, 107.2)
        assert worker.calls[0] == ended[0]
        assert worker.calls[1].method == "save"
        assert worker.calls[1].end_s == pytest.approx(107.2)
        [worker] = collector.take(107.2, 110.0)
        assert worker.calls == ended[1:]

    def test_a_worker_that_reports_no_more_is_left_out(self):
        collector = CallCollector()
        running = (TimedCall("train", 100.0, 1.0),)
        deliver("group", 0, self.report(101.0, running=running))
        [worker] = collector.take(102.0, 103.0)
        assert worker.calls == ()
        assert collector.take(130.0, 131.0) == []

    def test_each_collector_gets_everything(self):
        first, second = CallCollector(), CallCollector()
        deliver("group", 1, self.report(1.0, ended=(TimedCall("load", 0.0, 1.0),)))
        assert first.take(0.0, 2.0) == second.take(0.0, 2.0) != []


class TestFile:
    def record(self, step: int, size: int = 100) -> dict[str, Any]:
        return {"step": step, "rows": ["x" * size]}

    def test_ten_thousand_steps_stay_small(self, tmp_path):
        path = tmp_path / "timeline.jsonl"
        file = TimelineFile(path, max_bytes=100_000, num_first=20)
        for step in range(10_000):
            file.append(self.record(step))
            if step % 500 == 0:
                assert path.stat().st_size <= 100_000
        file.close()
        steps = [record["step"] for record in read(path)]
        assert steps[:20] == list(range(20))
        assert steps[20:] == list(range(10_000 - len(steps) + 20, 10_000))
        assert len(steps) > 200
        assert path.stat().st_mode & 0o777 == 0o600

    def test_large_records_leave_the_newest(self, tmp_path):
        file = TimelineFile(tmp_path / "timeline.jsonl", max_bytes=10_000)
        for step in range(9):
            file.append(self.record(step, 50_000))
        file.close()
        assert [record["step"] for record in read(file.path)] == [8]

    def test_a_resumed_run_appends_behind_its_step(self, tmp_path):
        path = tmp_path / "timeline.jsonl"
        file = TimelineFile(path)
        for step in range(5):
            file.append(self.record(step))
        file.close()
        with path.open("a") as torn:
            torn.write('{"step": 5, "ro')
        file = TimelineFile(path)
        file.drop_after(2)
        file.append(self.record(3, 5))
        file.close()
        assert [record["step"] for record in read(path)] == [0, 1, 2, 3]
        assert read(path)[-1] == self.record(3, 5)

    def test_reads_the_first_and_the_newest(self, tmp_path):
        path = tmp_path / "timeline.jsonl"
        assert read_timeline(path, num_first=2, num_newest=3) == ([], 0)
        file = TimelineFile(path)
        for step in range(4):
            file.append(self.record(step))
        for first, newest, steps in [
            (1, 1, [0, 3]), (2, 3, [0, 1, 2, 3]), (9, 9, [0, 1, 2, 3]), (0, 1, [3]),
        ]:  # fmt: skip
            found, number = read_timeline(path, num_first=first, num_newest=newest)
            assert ([r["step"] for r in found], number) == (steps, 4)
        file.close()


class TestTimeline:
    def test_a_file_that_cannot_be_written_ends_nothing(self, tmp_path, caplog):
        timeline = Timeline(tmp_path / "timeline.jsonl", settle_s=0.0)
        timeline._file._file.close()
        for step in range(1, 4):
            timeline.begin_step(step)
        timeline.close()
        timeline.close()
        warnings = [r for r in caplog.records if "time line" in r.message]
        assert len(warnings) == 1

    def test_steps_that_come_again(self, tmp_path):
        path = tmp_path / "timeline.jsonl"
        timeline = Timeline(path, settle_s=60.0)
        for step in range(1, 5):
            timeline.begin_step(step)
        timeline.resume_at(2)
        timeline.begin_step(3)
        timeline.begin_step(3)
        timeline.close()
        found = [(record["step"], record["is_start"]) for record in read(path)]
        assert found == [(0, True), (1, False), (2, False), (2, True), (3, False)]

    def test_spans_of_the_driver(self, tmp_path):
        path = tmp_path / "timeline.jsonl"
        timeline, timer = Timeline(path), Timer()
        timeline.begin_step(1)
        with timer.time("compute"), timer.time("compute/inner"):
            time.sleep(0.02)
        timer.mark("no span")
        timeline.close(timer.get_spans())
        record = read(path)[-1]
        [outer, inner] = calls_of(record, "driver")
        assert (outer[0], inner[0]) == ("compute", "compute/inner")
        assert 0 <= outer[1] <= inner[1] < inner[2] <= outer[2] <= record["seconds"]
        assert row_of(record, "driver")["memory_bytes"] > 1 << 20

    def test_many_calls_are_bounded(self, tmp_path):
        path = tmp_path / "timeline.jsonl"
        timeline = Timeline(path)
        now_s = time.time()
        for _ in range(30):
            calls = tuple(TimedCall("step", now_s, 0.001) for _ in range(500))
            deliver("group", 0, CallReport("node", 7, now_s, calls))
        timeline.close()
        [record] = read(path)
        row = row_of(record, "group[0]")
        number, seconds = row["summed"]["step"]
        assert number + len(row["calls"]) == 15_000
        assert seconds == pytest.approx(number / 1000, rel=0.01)
        assert path.stat().st_size < 150_000


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    with RayVirtualCluster([2], max_colocated_worker_groups=1, name="timed") as made:
        yield made


@pytest.fixture
def group(cluster):
    made = RayWorkerGroup(
        cluster,
        SAMPLE,
        name_prefix="timed",
        failure_policy=FailFast(heartbeat_limit_s=None),
    )
    yield made
    made.shutdown(force=True)


def test_calls_of_two_workers_overlap_and_keep_their_order(group, tmp_path):
    path = tmp_path / "timeline.jsonl"
    timeline = Timeline(path)
    timeline.begin_step(1)
    group.get_all_worker_results(group.call_workers("wait", None, {"seconds": 0.3}))
    group.get_all_worker_results(group.call_workers("add", None, {"value": 1}))
    ready = group.call_workers("count", [1], {"up_to": 3})
    group.get_all_worker_results(ready)
    timeline.close()
    record = read(path)[-1]
    first, second = (calls_of(record, f"timed[{rank}]") for rank in range(2))
    assert [call[0] for call in first if call[1] >= 0] == ["wait", "add"]
    assert [call[0] for call in second if call[1] >= 0] == ["wait", "add", "count"]
    for (_, start, end), *_ in (first[-2:], second[-3:]):
        assert end - start == pytest.approx(0.3, abs=0.25)
        assert 0 <= start < end <= record["seconds"]
    # At the same time, each in a process of its own.
    assert max(first[-2][1], second[-3][1]) < min(first[-2][2], second[-3][2])
    rows = [row_of(record, f"timed[{rank}]") for rank in range(2)]
    assert [row["pid"] for row in rows] == group.worker_pids
    assert all(row["memory_bytes"] > 1 << 20 for row in rows)


def test_start_of_the_workers_is_there(cluster, tmp_path):
    path = tmp_path / "timeline.jsonl"
    timeline = Timeline(path)
    group = RayWorkerGroup(cluster, SAMPLE, name_prefix="timed")
    try:
        timeline.close()
    finally:
        group.shutdown(force=True)
    [record] = read(path)
    for rank in range(2):
        names = [name for name, *_ in calls_of(record, f"timed[{rank}]")]
        assert names == ["import", "__init__"]


def test_a_busy_worker_delays_nothing_and_is_shown_busy(group, tmp_path):
    path, go_on = tmp_path / "timeline.jsonl", tmp_path / "go-on"
    timeline = Timeline(path, settle_s=2.5)
    timeline.begin_step(1)
    call = group.call_workers(
        "return_when_there", [0], {"path": str(go_on), "value": 3}
    )
    group.get_all_worker_results(group.call_workers("wait", [1], {"seconds": 1.5}))
    began_s = time.monotonic()
    timeline.begin_step(2)
    assert time.monotonic() - began_s < 0.5
    wait_until(lambda: len(read(path)) >= 2)
    record = read(path)[1]
    assert record["step"] == 1
    [(name, start, end)] = [c for c in calls_of(record, "timed[0]") if c[2] > 0]
    assert name == "return_when_there"
    assert end == pytest.approx(record["seconds"], abs=1e-3)
    go_on.touch()
    assert group.get_all_worker_results(call) == [3]
    timeline.close()
    record, last = read(path)[1:]
    [again] = [c for c in calls_of(last, "timed[0]") if c[0] == name]
    assert again[1] + last["start_s"] == pytest.approx(start + record["start_s"], 1e-4)


@pytest.mark.parametrize("ending", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stopped_or_killed_worker_delays_nothing(group, tmp_path, ending):
    path = tmp_path / "timeline.jsonl"
    timeline = Timeline(path, settle_s=0.0)
    timeline.begin_step(1)
    group.get_all_worker_results(group.call_workers("add", None, {"value": 1}))
    os.kill(group.worker_pids[0], ending)
    began_s = time.monotonic()
    for step in range(2, 5):
        timeline.begin_step(step)
    assert time.monotonic() - began_s < 0.5
    if ending == signal.SIGKILL:
        with pytest.raises(WorkerDiedError):
            group.get_all_worker_results(group.call_workers("add", None, {"value": 1}))
    else:
        done = group.call_workers("add", [1], {"value": 1})
        assert group.get_all_worker_results(done) == [1]
    timeline.close()
    # One second for reports; this worker has none.
    assert time.monotonic() - began_s < 30
    found = read(path)
    assert [record["step"] for record in found] == [0, 1, 2, 3, 4]
    names = {name for record in found for name, *_ in calls_of_any(record, "timed[1]")}
    assert "add" in names


def calls_of_any(record, name):
    """Return the same for records that may lack the worker."""
    has_row = any(row["name"] == name for row in record["rows"])
    return calls_of(record, name) if has_row else []
