"""The actor time line on the page: its data, its script, and in a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from rl_cli_chromium import Chromium, chromium_path

from rl_cli.report.actor_timeline import read_stage_timeline
from rl_cli.report.live_runs import LiveRuns
from rl_cli.report.page import files_folder, write_page
from rl_cli.report.run_reader import read_run
from rl_distributed.timing.timeline_file import TimelineFile

MakeRun = Callable[..., Path]
NODE = shutil.which("node")
NEEDS_NODE = pytest.mark.skipif(NODE is None, reason="no node is installed")
NEEDS_BROWSER = pytest.mark.skipif(
    chromium_path() is None, reason="no chromium is installed"
)
START_S = 1.7e9
HOSTILE = "<img src=x onerror=alert(1)></script>"


def row(name: str, calls: list[list[int]], **fields: Any) -> dict[str, Any]:
    return {"name": name, "node": "10.0.0.7", "pid": 7, "calls": calls, "summed": {},
            "memory_bytes": 1 << 30, "gpu_memory_bytes": None, **fields}  # fmt: skip


def record(step: int, rows: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return a two-second step; the policy works for half of it."""
    usual = [
        row("driver", [[0, 0, 2_000_000]]),
        row("policy[0]", [[1, 0, 600_000], [2, 1_000_000, 400_000]]),
    ]
    return {"step": step, "is_start": step == 0, "start_s": START_S + 2 * step,
            "seconds": 2.0, "methods": ["policy_training", "train", HOSTILE],
            "rows": usual if rows is None else rows}  # fmt: skip


def with_timeline(folder: Path, records: Iterator[dict[str, Any]] | list) -> Path:
    file = TimelineFile(folder / "timeline.jsonl")
    for one in records:
        file.append(one)
    file.close()
    return folder


def page_data_of(page: Path) -> dict[str, Any]:
    text = page.read_text().partition('<script type="application/json" id="data">')[2]
    data: dict[str, Any] = json.loads(text.partition("</script>")[0])
    return data


def test_a_page_has_the_first_and_the_newest_steps(
    make_run: MakeRun, tmp_path: Path
) -> None:
    folder = with_timeline(make_run(), (record(step) for step in range(100)))
    write_page([read_run(folder)], tmp_path / "page.html")
    data = page_data_of(tmp_path / "page.html")
    found = data["runs"][0]["stages"][0]["timeline"]
    steps = [step for step, *_ in found["steps"]]
    assert steps == [*range(10), *range(70, 100)]
    assert (found["key"], found["stored"]) == ("r0s0l", 100)
    step, is_start, number, seconds = found["steps"][-1]
    assert (step, is_start, seconds) == (99, False, 2.0)
    [chunk] = data["chunks"][f"r0s0l-{number}"]
    assert chunk["rows"][1]["calls"] == [[1, 0, 600_000], [2, 1_000_000, 400_000]]


def test_a_run_without_a_time_line_shows_averages(
    make_run: MakeRun, tmp_path: Path
) -> None:
    write_page([read_run(make_run())], tmp_path / "page.html")
    [run] = page_data_of(tmp_path / "page.html")["runs"]
    assert run["stages"][0]["timeline"] is None
    assert run["stages"][0]["phases"] is not None


@pytest.mark.parametrize(
    "damage",
    [
        {"rows": None},
        {"start_s": "soon"},
        {"start_s": float("nan")},
        {"rows": [row("a", [[9, 0, 1]])]},
        {"rows": [row("a", [[0, 1]])]},
        {"rows": [{"name": "a"}]},
        {"methods": 3},
    ],
)
def test_damaged_records_are_left_out(tmp_path: Path, damage: dict[str, Any]) -> None:
    with_timeline(tmp_path, [record(1), {**record(2), **damage}, record(3)])
    found = read_stage_timeline(tmp_path)
    assert [one["step"] for one in found.records.values()] == [1, 3]


def test_ten_thousand_steps_of_many_actors_stay_small(
    make_run: MakeRun, tmp_path: Path
) -> None:
    rows = [
        row(f"policy[{n}]", [[1, 1000 * k, 900] for k in range(20)]) for n in range(80)
    ]
    folder = with_timeline(make_run(), (record(step, rows) for step in range(10_000)))
    assert (folder / "timeline.jsonl").stat().st_size < 5 << 20
    began_s = time.process_time()
    write_page([read_run(folder)], tmp_path / "page.html")
    assert time.process_time() - began_s < 10
    page = tmp_path / "page.html"
    parts = list(files_folder(page).iterdir())
    assert page.stat().st_size < 1 << 20
    assert sum(path.stat().st_size for path in parts) < 4 << 20
    assert len(parts) == 40


def test_a_live_page_asks_for_steps(make_run: MakeRun) -> None:
    folder = with_timeline(make_run(finished=False), [record(0), record(1)])
    live = LiveRuns([folder], poll_s=0.0, now_s=iter(range(0, 10**6, 100)).__next__)
    [stage] = live.page()[1]["runs"][0]["stages"]
    assert [step for step, *_ in stage["timeline"]["steps"]] == [0, 1]
    number = stage["timeline"]["steps"][-1][2]
    [found] = json.loads(live.chunk(f"r0s0l-{number}") or "null")
    assert found["step"] == 1
    assert live.chunk(f"r0s0l-{number + 1}") is None
    assert live.chunk("r0s0l-../../1") is None
    with_timeline(folder, [record(2)])
    [stage] = live.page()[1]["runs"][0]["stages"]
    assert [step for step, *_ in stage["timeline"]["steps"]] == [0, 1, 2]
    # An open page may still show an earlier step.
    assert live.chunk(f"r0s0l-{number}") is not None


def run_script(code: str, *values: Any) -> Any:
    """Return the value of an expression over `timeline.js` and values v0, v1 ..."""
    source = resources.files("rl_cli.report").joinpath("assets", "timeline.js")
    given = "".join(f"const v{i} = {json.dumps(v)};" for i, v in enumerate(values))
    script = f"{source.read_text()};{given}console.log(JSON.stringify({code}))"
    assert NODE is not None
    done = subprocess.run(
        [NODE, "-"], input=script, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@NEEDS_NODE
class TestScript:
    def test_shares_of_a_worker(self) -> None:
        joined, busy, sums = run_script(
            "(() => { const j = joinRecords(v0); const r = j.rows[1];"
            "return [j, busySeconds(r, j.start, j.end),"
            "methodSums(r, j.start, j.end)]; })()",
            [record(3), record(4)],
        )
        assert [found["name"] for found in joined["rows"]] == ["driver", "policy[0]"]
        assert (joined["start"], joined["end"]) == (0, 4)
        assert [mark["text"] for mark in joined["marks"]] == ["step 3", "step 4"]
        assert busy == pytest.approx(2.0)
        assert [[m, n] for m, (n, _) in sums] == [["train", 2], [HOSTILE, 2]]

    def test_a_call_over_two_steps_is_one(self) -> None:
        first = record(1, [row("policy[0]", [[1, 1_500_000, 500_000]])])
        second = record(2, [row("policy[0]", [[1, -500_000, 1_200_000]])])
        joined = run_script("joinRecords(v0)", [first, second])
        [call] = joined["rows"][0]["calls"]
        assert call["start"] == pytest.approx(1.5)
        assert call["end"] == pytest.approx(2.7)
        # If only the second is shown, it is busy from its start.
        busy = run_script("busySeconds(joinRecords(v0).rows[0], 0, 2)", [second])
        assert busy == pytest.approx(0.7)

    def test_calls_at_the_same_time_get_lanes_of_their_own(self) -> None:
        calls = [{"start": a, "end": b} for a, b in [(0, 4), (1, 2), (2, 3), (4, 5)]]
        assert run_script("lanesOf(v0)", calls) == [0, 1, 1, 0]
        many = [{"start": 0, "end": 1}] * 50
        assert max(run_script("lanesOf(v0)", many)) == 5
        busy = run_script("busySeconds({calls: v0, summed: {}}, 0.5, 10)", calls)
        assert busy == pytest.approx(4.5)

    def test_the_trace_has_the_calls_of_all_actors(self) -> None:
        events = run_script(
            "actorEvents(v0.map((r) => ({ origin: r.start_s,"
            "joined: joinRecords([r]) })))",
            [record(1), record(9)],
        )
        names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
        assert names == ["driver (node 10.0.0.7, pid 7)",
                         "policy[0] (node 10.0.0.7, pid 7)"]  # fmt: skip
        slices = [event for event in events if event["ph"] == "X"]
        trains = [event for event in slices if event["name"] == "train"]
        assert [event["ts"] for event in trains] == [0, 16e6]
        assert {event["dur"] for event in trains} == {600_000}
        assert len({event["pid"] for event in slices}) == 2

    def test_steps_that_are_not_there_end_the_window(self) -> None:
        steps = [
            [n, False, round(1000 * (START_S + 2 * n)), 2.0] for n in (1, 2, 9, 10)
        ]
        for place, most, expected in [
            (3, 10, [2, 3]), (1, 10, [0, 1]), (3, 1, [3, 3]), (0, 3, [0, 0]),
        ]:  # fmt: skip
            found = run_script("placesUpTo(v0, v1, v2)", steps, place, most)
            assert found == expected

    def test_no_script_has_a_mistake_of_syntax(self) -> None:
        for name in ("timeline.js", "timing.js"):
            path = resources.files("rl_cli.report").joinpath("assets", name)
            assert NODE is not None
            subprocess.run([NODE, "--check", str(path)], check=True, timeout=60)


DRAWN = "document.querySelector('.chart[data-drawn] .timeline canvas') !== null"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as found:
        yield found


@NEEDS_BROWSER
def test_a_browser_shows_actors_and_zooms(
    make_run: MakeRun, tmp_path: Path, browser: Chromium
) -> None:
    folder = with_timeline(make_run(), (record(step) for step in range(60)))
    write_page([read_run(folder)], tmp_path / "page.html")
    browser.events.clear()
    browser.open(tmp_path / "page.html", "timing")
    browser.wait(DRAWN)
    shown = browser.text().replace("\u00a0", " ")
    for text in ("policy[0]", "50.0 %", "train 30.0 %", "1.0 GiB", HOSTILE):
        assert text in shown
    label = browser.evaluate(
        "document.querySelector('.timeline').getAttribute('aria-label')"
    )
    assert (
        label.replace("\u00a0", " ")
        == "Who worked when: run. 2 s. policy[0] busy 50.0 %"
    )
    browser.evaluate("document.querySelector('.timeline').focus()")
    browser.press("+")
    zoomed = "[...document.querySelectorAll('.zoom span')].map((s) => s.textContent)"
    assert "seconds 0.5 to 1.5" in browser.evaluate(zoomed)
    browser.press("Escape")
    assert "seconds 0.5 to 1.5" not in browser.evaluate(zoomed)
    size = browser.evaluate(
        "(() => { const c = document.querySelector('.timeline canvas');"
        "return [c.clientWidth, document.querySelector('.timeline').clientWidth]; })()"
    )
    assert 50 < size[0] <= size[1]
    browser.evaluate("document.querySelector('[aria-label^=\"Step before\"]').click()")
    browser.wait("document.querySelector('.tools select').value === '38'")
    assert browser.evaluate("document.querySelectorAll('img, svg').length") == 0
    assert browser.complaints() == []


@NEEDS_BROWSER
def test_a_browser_says_that_a_trace_is_of_averages(
    make_run: MakeRun, tmp_path: Path, browser: Chromium
) -> None:
    write_page([read_run(make_run())], tmp_path / "page.html")
    browser.open(tmp_path / "page.html", "timing")
    browser.wait("document.querySelector('.chart[data-drawn] canvas') !== null")
    assert "no time line of the actors was stored" in browser.text()
