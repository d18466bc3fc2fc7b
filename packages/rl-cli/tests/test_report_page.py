"""The page of a report: the file's contents, and its rendering in a browser."""

from __future__ import annotations

import html.parser
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rl_cli_chromium import Chromium, chromium_path
from rl_cli_page_checks import CONTROLS, FOCUSED, POOR_TEXTS

from rl_cli.main import _run
from rl_cli.report.page import files_folder, write_page
from rl_cli.report.page_data import page_data
from rl_cli.report.run_reader import read_run
from rl_cli.report.sample_chunks import ChunkStore, script_json

MakeRun = Callable[..., Path]
NEEDS_BROWSER = pytest.mark.skipif(
    chromium_path() is None, reason="no chromium is installed"
)
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "<!-- <script>",
    "]]></style><svg onload=alert(3)>",
    "{{script}}{{data}}{{policy}}",
    "\u2028alert(4)\u2029",
    "';alert(5);//\"\\",
    "<a href='javascript:alert(6)'>x</a>",
]


def answers(num_steps: int, per_step: int, text: str = "") -> Iterator[dict[str, Any]]:
    for step in range(1, num_steps + 1):
        for number in range(per_step):
            yield {"step": step, "prompt": f"question {number}",
                   "response": f"answer {number} of step {step} {text}",
                   "reward": number / per_step, "expected": "right"}  # fmt: skip


def page_of(*folders: Path, path: Path) -> Path:
    write_page([read_run(folder) for folder in folders], path)
    return path


class Scripts(html.parser.HTMLParser):
    """Collects the scripts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.contents: list[str] = []
        self.tags: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = tag == "script"
        if self._inside:
            self.found.append(dict(attrs))
            self.contents.append("")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.contents[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = False


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_html(make_run: MakeRun, tmp_path: Path, text: str) -> None:
    sample = {"step": 1, "prompt": text, "response": text, "reward": 1.0}
    log = {"level": "ERROR", "message": text, "logger": text, "time": text}
    rollout = {
        **sample, "tokens": [text], "logprobs": [-1.0], "rewards": {text: 1.0},
        "messages": [{"role": text, "content": text}], "versions": [[1, 1]],
    }  # fmt: skip
    folder = make_run(samples=[sample], logs=[log], rollouts=[rollout])
    quiet = page_of(make_run("quiet"), path=tmp_path / "quiet.html").read_text()
    text_of_page = page_of(folder, path=tmp_path / "page.html").read_text()
    page = Scripts(text_of_page)
    assert page.tags == Scripts(quiet).tags
    data = json.loads(page.contents[0])
    assert data["chunks"]["r0s0h-0"][0]["response"] == text
    assert data["chunks"]["r0s0t-0"][0] == {**rollout, "messages": [[text, text]]}
    assert data["runs"][0]["logs"]["notes"][0]["message"] == text
    assert not re.search("[<>&\u2028\u2029]", page.contents[0])


def test_the_page_is_whole_without_a_network(make_run: MakeRun, tmp_path: Path) -> None:
    text = page_of(make_run(), path=tmp_path / "page.html").read_text()
    assert "default-src &#x27;none&#x27;" in text
    assert "unsafe" not in text.partition("<title>")[0]
    page = Scripts(text)
    assert not {"link", "img", "iframe", "base", "object"} & set(page.tags)
    assert [set(found) for found in page.found] == [{"type", "id"}, set()]
    assert not files_folder(tmp_path / "page.html").exists()


def test_the_page_says_what_started_the_run(make_run: MakeRun, tmp_path: Path) -> None:
    page = Scripts(page_of(make_run(), path=tmp_path / "page.html").read_text())
    run = json.loads(page.contents[0])["runs"][0]
    assert run["started_by"] == "rl train grpo seed=3"
    assert run["machine"] == "2 cores, 8 GiB, 2 x NVIDIA H200, Linux"


def test_script_json_is_json() -> None:
    assert json.loads(script_json(HOSTILE)) == HOSTILE


def test_script_json_can_be_written_with_half_a_character() -> None:
    text = script_json({"answer": "a\ud83d"})
    assert json.loads(text.encode("utf-8")) == {"answer": "a\ud83d"}


def test_secrets_stay_concealed(make_run: MakeRun, tmp_path: Path) -> None:
    page = page_of(make_run(), path=tmp_path / "page.html")
    assert "hunter2" not in page.read_text()


@pytest.mark.parametrize(
    ("name", "started_by", "given"),
    [
        ("run", "rl train tasks/run.yaml seed=3", "tasks/run.yaml"),
        ("run", "rl train 'my tasks/run.yaml'", "'my tasks/run.yaml'"),
        ("grpo", "rl train grpo --config grpo.yaml", "grpo"),
        ("grpo", "rl train grpo note='[redacted]", "grpo"),
        ("grpo", "", "grpo"),
    ],
)
def test_the_command_to_continue_names_the_file_and_the_folder(
    make_run: MakeRun, started_by: str, name: str, given: str
) -> None:
    folder = make_run("runs/run-001")
    record = json.loads((folder / "run.json").read_text())
    record |= {"name": name, "command": started_by, "hidden": ["env.settings.api_key"]}
    (folder / "run.json").write_text(json.dumps(record))
    [run] = page_data([read_run(folder)], lambda stage, key: [])["runs"]
    assert run["command"] == (
        f"rl train {given} --resume {folder} env.settings.api_key=VALUE"
    )
    record["kind"] = "trainer"
    (folder / "run.json").write_text(json.dumps(record))
    [run] = page_data([read_run(folder)], lambda stage, key: [])["runs"]
    assert run["command"] is None


def test_many_answers_lie_beside_the_page(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run(samples=answers(50, 40, "word " * 150))
    page = page_of(folder, path=tmp_path / "page.html")
    chunks = sorted(files_folder(page).iterdir())
    assert len(chunks) > 4
    assert page.stat().st_size < 1_000_000
    total = 0
    for chunk in chunks:
        name, _, records = chunk.read_text()[len("rlReport.chunk(") : -3].partition(",")
        assert chunk.name == f"chunk-{json.loads(name)}.js"
        total += len(json.loads(records))
    assert total == 2000
    (folder / "validation_samples.jsonl").unlink()
    page_of(folder, path=page)
    assert list(files_folder(page).glob("*")) == []


def test_chunks_stay_in_the_page_while_they_are_few(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "files", inline_bytes=10)
    store.add("a-0", ["1", "2"])
    assert (store.inline, store.in_files) == ({"a-0": "[1,2]"}, False)
    store.add("a-1", ["3", "4", "5"])
    assert (store.inline, store.in_files) == ({}, True)
    assert (tmp_path / "files" / "chunk-a-0.js").read_text() == (
        'rlReport.chunk("a-0",[1,2]);\n'
    )


def test_the_command_says_where_the_page_is(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run()
    assert _run(["report", str(folder), "--json"], False) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"page": str(folder / "report.html"), "files": None}
    assert (folder / "report.html").is_file()


def test_a_comparison_leaves_the_pages_of_its_runs_alone(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = make_run("first"), make_run("second")
    (first / "report.html").write_text("mine")
    assert _run(["report", str(first), str(second)], False) == 0
    page = first.parent / "report-first-second.html"
    assert capsys.readouterr().out.strip() == str(page)
    assert page.is_file()
    assert (first / "report.html").read_text() == "mine"
    assert _run(["report", *[str(first)] * 60], False) == 0
    assert (first.parent / "report-60-runs.html").is_file()


def test_a_page_that_cannot_be_written_is_a_user_error(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run()
    target = folder / "run.json" / "page.html"
    assert _run(["report", str(folder), "-o", str(target)], False) == 2
    assert "--output FILE" in capsys.readouterr().err


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as found:
        yield found


@NEEDS_BROWSER
def test_hostile_texts_are_shown_and_not_run(
    make_run: MakeRun, tmp_path: Path, browser: Chromium
) -> None:
    samples = [{"step": 1, "prompt": t, "response": t, "reward": 1.0} for t in HOSTILE]
    rollouts = [{**s, "tokens": [s["prompt"]], "logprobs": [-1]} for s in samples]
    logs = [{"level": "ERROR", "message": text} for text in HOSTILE]
    folder = make_run("<b>bold<", samples=samples, logs=logs, rollouts=rollouts)
    page = page_of(folder, path=tmp_path / "page.html")
    browser.events.clear()
    for view in ("learning", "samples", "timing", "trust", "setup"):
        browser.open(page, view)
        browser.call("Page.reload")
        browser.wait("document.querySelector('main table, main article') !== null")
        shown = browser.text()
        if view in ("samples", "trust"):
            plain = [t for t in HOSTILE if "\u2028" not in t]
            assert [t for t in plain if t not in shown] == []
        assert browser.evaluate("document.querySelectorAll('img, svg, b').length") == 0
    assert browser.complaints() == []
    assert {url.partition("#")[0] for url in browser.requests()} == {page.as_uri()}


@NEEDS_BROWSER
def test_curves_of_two_runs_are_drawn(
    make_run: MakeRun, tmp_path: Path, browser: Chromium
) -> None:
    page = page_of(make_run("one"), make_run("two"), path=tmp_path / "page.html")
    browser.events.clear()
    browser.open(page)
    browser.wait("document.querySelectorAll('.chart[data-drawn] canvas').length > 2")
    label = browser.evaluate(
        "document.querySelector('.chart .plot').getAttribute('aria-label')"
    )
    assert label == (
        "Reward. one train:reward: from 0.05 to 1 at 20; "
        "two train:reward: from 0.05 to 1 at 20"
    )
    colours = browser.evaluate("""(() => {
      const canvas = document.querySelector('.chart canvas');
      const {data} = canvas.getContext('2d')
        .getImageData(0, 0, canvas.width, canvas.height);
      const found = new Set();
      for (let i = 0; i < data.length; i += 4) {
        if (data[i + 3] > 250) found.add(data.slice(i, i + 3).join());
      }
      return [...found];
    })()""")
    assert "11,102,179" in colours or "196,78,0" in colours  # --c0, with --c1 on top
    assert browser.complaints() == []


@NEEDS_BROWSER
def test_an_axis_has_room_for_its_numbers(
    make_run: MakeRun, tmp_path: Path, browser: Chromium
) -> None:
    run = make_run()
    path = run / "metrics.jsonl"
    # Ratios close to 1 differ in their sixth digit.
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[1:]:
        line["metrics"]["train:reward"] = 1 + 1e-6 * line["step"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    browser.open(page_of(run, path=tmp_path / "page.html"))
    browser.wait("document.querySelectorAll('.chart[data-drawn] canvas').length > 1")
    widths = browser.evaluate(
        "[...document.querySelectorAll('.chart .u-wrap')].map("
        "(chart) => chart.querySelector('.u-over').offsetLeft)"
    )
    # "1.000020" at 12 pixels needs about 58, and its tick 15 more.
    assert widths[0] >= 73
    assert 62 <= min(widths) < widths[0]


@NEEDS_BROWSER
def test_tabs_follow_the_arrow_keys(
    make_run: MakeRun, tmp_path: Path, browser: Chromium
) -> None:
    browser.open(page_of(make_run(), path=tmp_path / "page.html"))
    browser.click("#tab-learning")
    seen = []
    for key in ("ArrowRight", "End", "ArrowRight", "ArrowLeft", "Home"):
        browser.press(key)
        seen.append(browser.evaluate("document.activeElement.id.slice(4)"))
        assert browser.evaluate(
            "[...document.querySelectorAll('[role=tabpanel]:not([hidden])')]"
            ".map((view) => view.id.slice(5))"
        ) == [seen[-1]]
    assert seen == ["samples", "setup", "learning", "setup", "learning"]
    assert browser.evaluate(
        "[...document.querySelectorAll('input, select')].every((e) => e.labels.length)"
    )


@NEEDS_BROWSER
def test_a_chart_follows_the_keys(
    make_run: MakeRun, tmp_path: Path, browser: Chromium
) -> None:
    browser.events.clear()
    browser.open(page_of(make_run(), path=tmp_path / "page.html"))
    browser.wait("document.querySelector('.chart[data-drawn]') !== null")
    part = "(({ min, max }) => [min, max])([...charts][0].plot().scales.x)"
    browser.evaluate("document.querySelector('.chart .plot').focus()")
    hint = "getComputedStyle(document.querySelector('.chart .keys')).display"
    assert browser.evaluate(hint) == "block"
    for key, shown in (
        ("+", [5.75, 15.25]), ("ArrowLeft", [3.375, 12.875]), ("Escape", [1, 20])
    ):  # fmt: skip
        browser.press(key)
        browser.wait(f"{part}.join() === '{','.join(map(str, shown))}'")
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.textContent") == "train:reward"
    pressed = "document.activeElement.getAttribute('aria-pressed')"
    for expected in ("false", "true"):
        browser.press("Enter")
        assert browser.evaluate(pressed) == expected
        shows = browser.evaluate("[...charts][0].plot().series[1].show")
        assert str(shows).lower() == expected
    assert browser.complaints() == []


def groups(num_steps: int) -> Iterator[dict[str, Any]]:
    for step in range(1, num_steps + 1):
        for number in range(4):
            yield {"step": step, "reward": number % 2 - 0.5, "group": number // 2,
                   "prompt": f"question {number // 2}", "response": f"yes {number}",
                   "tokens": ["yes", f" {number}"], "logprobs": [-0.01, -3.0],
                   "advantage": number % 2 - 0.5, "versions": [[step - 1, 2]],
                   "outcome": "ok", "rewards": {"form": 0.25}}  # fmt: skip


@NEEDS_BROWSER
def test_the_best_and_the_worst_of_a_group_stand_side_by_side(
    make_run: MakeRun, tmp_path: Path, browser: Chromium
) -> None:
    page = page_of(make_run(rollouts=groups(3)), path=tmp_path / "page.html")
    browser.events.clear()
    browser.open(page, "samples")
    browser.wait("document.querySelectorAll('article').length === 4")
    assert "Step 3: 4 answers, mean reward 0" in browser.text()
    assert "form 0.25" in browser.text()
    assert "weights 2" in browser.text()
    classes = "[...document.querySelectorAll('.tokens span')].map((s) => s.className)"
    assert browser.evaluate(classes) == ["t0", "t3"] * 4
    browser.evaluate("""(() => {
      const choice = [...document.querySelectorAll('select')]
        .find((s) => [...s.options].some((o) => o.value === 'advantage'));
      choice.value = 'advantage';
      choice.dispatchEvent(new Event('change'));
    })()""")
    browser.wait("document.querySelectorAll('.tokens .p2').length === 4")
    assert browser.evaluate(classes) == ["t2", "t2", "p2", "p2"] * 2
    browser.click("#view-samples input[type=checkbox]")
    browser.wait("document.querySelectorAll('.pair').length === 2")
    pairs = browser.evaluate(
        "[...document.querySelectorAll('.pair')].map((pair) => "
        "[...pair.querySelectorAll('.tokens')].map((t) => t.textContent))"
    )
    assert pairs == [["yes 1", "yes 0"], ["yes 3", "yes 2"]]
    assert browser.complaints() == []


@NEEDS_BROWSER
def test_answers_come_from_files_when_they_are_looked_at(
    make_run: MakeRun, tmp_path: Path, browser: Chromium
) -> None:
    page = page_of(
        make_run(samples=answers(60, 40, "word " * 150)), path=tmp_path / "page.html"
    )
    browser.events.clear()
    browser.open(page, "samples")
    browser.wait("document.querySelectorAll('article').length === 40")
    assert "Step 60: 40 answers" in browser.text()
    chunks = [url for url in browser.requests() if "chunk-" in url]
    assert 1 <= len(chunks) <= 2
    browser.click("[aria-label='Step before']")
    browser.wait("document.querySelector('[role=status]').textContent.includes('59:')")
    browser.click("input[type=search]")
    browser.type("answer 7 of")
    browser.wait("document.querySelectorAll('article').length === 1")
    assert browser.text("article mark") == "answer 7 of"
    browser.click("article button")
    browser.wait("document.querySelector('[role=status]').textContent.includes('by')")
    browser.wait("document.querySelectorAll('article').length === 60")
    assert browser.text("article header").split("\n")[0].startswith("step 1")
    assert browser.complaints() == []


@NEEDS_BROWSER
def test_a_missing_folder_is_told(
    make_run: MakeRun, tmp_path: Path, browser: Chromium
) -> None:
    page = page_of(
        make_run(samples=answers(60, 40, "word " * 150)), path=tmp_path / "page.html"
    )
    files_folder(page).rename(tmp_path / "elsewhere")
    browser.open(page, "samples")
    browser.wait(
        "document.querySelector('[role=status]').textContent.includes("
        "'keep the folder page_files beside this page')"
    )


@NEEDS_BROWSER
def test_a_long_run_is_seen_at_once(
    make_run: MakeRun, tmp_path: Path, browser: Chromium
) -> None:
    began_s = time.monotonic()
    page = page_of(make_run(num_steps=10_000), path=tmp_path / "page.html")
    assert time.monotonic() - began_s < 20
    assert page.stat().st_size < 3_000_000
    browser.open(page)
    browser.wait("document.querySelector('.chart[data-drawn]') !== null")
    assert browser.evaluate("performance.now()") < 20_000


@NEEDS_BROWSER
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_narrow_window_needs_no_sideways_scrolling_and_has_contrast(
    make_run: MakeRun, tmp_path: Path, dark: bool
) -> None:
    page = page_of(make_run(samples=answers(2, 3)), path=tmp_path / "page.html")
    with Chromium(width=360, height=740, dark=dark) as narrow:
        for view in ("learning", "samples", "timing", "trust", "setup"):
            narrow.open(page, view)
            narrow.call("Page.reload")
            narrow.wait("document.querySelector('main table, main article') !== null")
            assert narrow.evaluate("document.documentElement.scrollWidth") <= 360, view
        assert narrow.evaluate(CONTRASTS) == []


@NEEDS_BROWSER
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_has_contrast_and_every_control_the_focus(
    make_run: MakeRun, tmp_path: Path, dark: bool
) -> None:
    runs = [
        make_run(name, samples=answers(2, 3), rollouts=groups(2)) for name in ("a", "b")
    ]
    page = page_of(*runs, path=tmp_path / "page.html")
    with Chromium(dark=dark) as browser:
        for view in ("learning", "samples", "timing", "trust", "setup"):
            browser.open(page, view)
            browser.call("Page.reload")
            browser.wait("document.querySelector('main table, main article') !== null")
            found = browser.evaluate(POOR_TEXTS)
            assert found["checked"] > 20, view
            assert found["poor"] == [], view
            # Those below the window too, whose curves are also buttons.
            browser.evaluate(
                "charts.forEach("
                "(one) => one.visible || (one.visible = true, one.draw()))"
            )
            wanted = set(browser.evaluate(CONTROLS))
            assert browser.evaluate("document.activeElement.tagName") == "BODY"
            reached: dict[int, bool] = {}
            for _ in range(len(wanted) + 2):
                browser.press("Tab")
                number, is_shown = browser.evaluate(FOCUSED)
                reached.setdefault(number, is_shown)
            assert wanted <= reached.keys(), view
            assert all(reached[number] for number in wanted), view


@NEEDS_BROWSER
def test_the_pictures_of_the_guide_can_be_drawn(
    make_run: MakeRun, tmp_path: Path
) -> None:
    root = Path(__file__).parents[3]
    run = make_run(samples=answers(2, 3), rollouts=groups(2))
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    subprocess.run(
        [sys.executable, root / "tools" / "report_picture.py", run, "--to", pictures],
        check=True, timeout=240,
    )  # fmt: skip
    drawn = {path.name for path in pictures.iterdir()}
    # Every picture differs, so each view, and dark mode, was drawn.
    assert len({path.read_bytes() for path in pictures.iterdir()}) == len(drawn) == 7
    guide = (root / "docs" / "guides" / "see-a-run.md").read_text()
    assert set(re.findall(r"assets/([\w-]+\.png)", guide)) == drawn


CONTRASTS = """(() => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const hex = style.getPropertyValue(name).trim();
    const parts = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255);
    const [r, g, b] = parts.map(
      (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const texts = ["--fg", "--muted", "--accent", "--good", "--bad", "--look"];
  const lines = [0, 1, 2, 3, 4, 5, 6, 7].map((i) => `--c${i}`);
  const poor = [];
  for (const ground of ["--bg", "--card"]) {
    for (const name of texts) if (ratio(name, ground) < 4.5) poor.push(name + ground);
    for (const name of lines) if (ratio(name, ground) < 3) poor.push(name + ground);
  }
  return poor;
})()"""
