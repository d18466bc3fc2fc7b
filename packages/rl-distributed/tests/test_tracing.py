from __future__ import annotations

import json
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from hypothesis import given, strategies as st

from rl_distributed.cluster.virtual_cluster import RayVirtualCluster
from rl_distributed.timing.timer import Timer
from rl_distributed.timing.tracing import Span, chrome_trace, export_chrome_trace
from rl_distributed.workers import RayWorkerBuilder, RayWorkerGroup

TALKER = "rl_distributed_sample_loggers.Talker"


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def names(trace: dict[str, Any], kind: str) -> dict[Any, str]:
    return {
        (e["pid"], e["tid"]) if kind == "thread_name" else e["pid"]: e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M" and e["name"] == kind
    }


def check_nesting(trace: dict[str, Any]) -> None:
    """Check that each track is named and its spans are nested or disjoint."""
    tracks: dict[Any, list[tuple[int, int]]] = {}
    for event in complete(trace):
        assert set(event) == {"name", "cat", "pid", "tid", "ts", "dur", "args", "ph"}
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        start = round(event["ts"] * 1000)
        span = (start, start + round(event["dur"] * 1000))
        tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    threads, processes = names(trace, "thread_name"), names(trace, "process_name")
    assert set(tracks) <= set(threads)
    assert {pid for pid, _ in tracks} <= set(processes)
    for spans in tracks.values():
        open_ends: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def test_a_trace_shows_spans_as_they_were(tmp_path: Path) -> None:
    timer = Timer({"run": "a"})
    before_ns = time.time_ns()
    with timer.time("step"):
        with timer.time("step/forward"):
            pass
        with timer.time("step/backward"):
            pass
        timer.mark("synchronised", {"version": 3})
    thread = threading.Thread(target=timer.record, args=("elsewhere", 1.0), name="side")
    thread.start()
    thread.join(60)
    path = timer.export_chrome_trace(tmp_path / "new" / "trace.json")
    trace = json.loads(path.read_text())
    check_nesting(trace)
    found = {event["name"]: event for event in complete(trace)}
    assert set(found) == {"step", "step/forward", "step/backward"}
    step, forward, backward = (
        found[name] for name in ("step", "step/forward", "step/backward")
    )
    assert step["ts"] == 0
    assert step["dur"] / 1e6 == pytest.approx(
        timer.get_latest_elapsed("step"), abs=1e-6
    )
    assert forward["ts"] + forward["dur"] <= backward["ts"]
    assert step["tid"] == forward["tid"] == backward["tid"]
    assert step["args"] == {"run": "a"}
    [marker] = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert (marker["name"], marker["args"]["version"]) == ("synchronised", 3)
    start_s = trace["otherData"]["start_time_s"]
    assert abs(start_s - before_ns / 1e9) < 60
    [process] = names(trace, "process_name").values()
    assert process.startswith("driver (node ")
    assert f"pid {os.getpid()})" in process
    assert [p.name for p in path.parent.iterdir()] == ["trace.json"]


def test_threads_have_tracks_of_their_own() -> None:
    timer = Timer()
    barrier = threading.Barrier(2, timeout=60)

    def work(label: str) -> None:
        with timer.time(label):
            barrier.wait()

    threads = [
        threading.Thread(target=work, args=(name,), name=name) for name in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    trace = chrome_trace(timer.get_spans())
    check_nesting(trace)
    tracks = names(trace, "thread_name")
    assert {e["name"]: tracks[e["pid"], e["tid"]] for e in complete(trace)} == {
        "a": "a",
        "b": "b",
    }


spans = st.builds(
    Span,
    label=st.sampled_from(["a", "b/c"]),
    start_ns=st.integers(0, 50),
    duration_ns=st.integers(0, 20) | st.none(),
    process=st.sampled_from(["driver", "w[0]", "w[10]", "w[9]"]),
    node=st.sampled_from(["x", "y"]),
    pid=st.integers(1, 2),
    thread_id=st.integers(1, 2),
)


@given(st.lists(spans, max_size=40))
def test_any_spans_become_tracks_that_nest(found: list[Span]) -> None:
    trace = json.loads(json.dumps(chrome_trace(found)))
    check_nesting(trace)
    moments = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert len(complete(trace)) + len(moments) == len(found)
    # Processes with the same number on two nodes are distinct, in rank order.
    wanted = {(span.process, span.node, span.pid) for span in found}
    shown = names(trace, "process_name")
    assert len(shown) == len(wanted)
    ranks = [shown[pid].partition(" ")[0] for pid in sorted(shown)]
    order = ["driver", "w[0]", "w[9]", "w[10]"]
    assert ranks == sorted(ranks, key=order.index)


def test_spans_overlapping_by_halves_get_a_second_track() -> None:
    trace = chrome_trace([Span("a", 0, 10), Span("b", 5, 10), Span("c", 12, 1)])
    check_nesting(trace)
    assert {e["name"]: e["tid"] for e in complete(trace)} == {"a": 1, "b": 2, "c": 1}
    assert chrome_trace([])["traceEvents"] == []


def test_only_the_newest_spans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_distributed.timing.timer._MOST_SPANS", 3)
    timer = Timer()
    for index in range(5):
        with timer.time(f"s{index}"):
            pass
    assert [span.label for span in timer.get_spans()] == ["s2", "s3", "s4"]
    timer.reset("s3")
    assert [span.label for span in timer.get_spans()] == ["s2", "s4"]
    timer.reset()
    assert timer.get_spans() == []


def test_spans_of_workers_are_merged(ray_cluster: None, tmp_path: Path) -> None:
    timer = Timer()
    with (
        RayVirtualCluster([2], name="trace") as cluster,
        RayWorkerGroup(
            cluster, RayWorkerBuilder(TALKER), name_prefix="traced"
        ) as group,
    ):
        with timer.time("call"):
            ray.get(group.run_all_workers_single_data("talk", text="x"), timeout=120)
        collected = ray.get(group.run_all_workers_single_data("spans"), timeout=120)
        name = group.name
    assert pickle.loads(pickle.dumps(collected)) == collected
    merged = [*timer.get_spans(), *collected[0], *collected[1]]
    path = export_chrome_trace(tmp_path / "trace.json", merged)
    trace = json.loads(path.read_text())
    check_nesting(trace)
    shown = [names(trace, "process_name")[pid].partition(" ")[0] for pid in (1, 2, 3)]
    assert shown == ["driver", f"{name}[0]", f"{name}[1]"]
    call = next(event for event in complete(trace) if event["name"] == "call")
    talks = [event for event in complete(trace) if event["name"] == "talk"]
    assert len(talks) == 2
    for talk in talks:
        # One machine has one clock, though it may be adjusted: within a minute.
        assert abs(talk["ts"] - call["ts"]) < 60e6
        assert talk["dur"] <= call["dur"]
