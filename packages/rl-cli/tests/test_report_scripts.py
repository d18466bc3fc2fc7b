"""The output of a page's script, run in Node without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_cli.report.page import write_page
from rl_cli.report.run_reader import read_run

MakeRun = Callable[..., Path]
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no node is installed")


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that runs a run's page and evaluates an expression in it."""

    def evaluate(folder: Path, view: str, expression: str) -> Any:
        page = tmp_path / "page.html"
        write_page([read_run(folder)], page)
        driver = Path(__file__).with_name("rl_cli_page_in_node.js")
        done = subprocess.run(
            [str(NODE), str(driver), str(page), expression, view],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return evaluate


def answers(**columns: Any) -> Iterator[dict[str, Any]]:
    yield {"step": 1, "reward": 1.0, "prompt": "q", "response": "a <b>",
           "tokens": ["a", " <b>", "\n"], "logprobs": [-1.0, -0.5, -0.25],
           "advantage": 0.5, "versions": [[0, 2], [1, 1]], **columns}  # fmt: skip


CHOOSE = """(() => {
  const found = document.querySelectorAll("select")
    .find((one) => one.querySelector("option[value=mismatch]"));
  found.value = "mismatch";
  found.send("change");
})(), await new Promise((resolve) => setTimeout(resolve, 0))"""


def test_tokens_are_coloured_by_the_mismatch(
    make_run: MakeRun, ask: Callable[..., Any]
) -> None:
    run = make_run(rollouts=answers(trainer_logprobs=[-1.01, -0.7, None]))
    tokens = "document.querySelectorAll('.tokens span')"
    found = ask(
        run,
        "samples",
        f"({CHOOSE}, {tokens}.map((s) => [s.className, s.getAttribute('title')]))",
    )
    assert found == [
        ["t0", "difference 0.01: log-prob -1.01 by the trainer, -1 by the sampler"],
        ["t2", "difference 0.2: log-prob -0.7 by the trainer, -0.5 by the sampler"],
        ["t0", "difference unknown"],
    ]


def test_without_log_probs_of_the_trainer_the_page_says_why(
    make_run: MakeRun, ask: Callable[..., Any]
) -> None:
    shown = "document.getElementById('view-samples').textContent"
    counted = "document.querySelectorAll('.tokens').length"
    why = "No answer here has the trainer's log-probs"
    script = f"await (async (...before) => ({CHOOSE}, [...before, {shown}, {counted}]))"
    before, num_before, after, num_after = ask(
        make_run(rollouts=answers()), "samples", f"{script}({shown}, {counted})"
    )
    assert why not in before
    assert why in after
    assert (num_before, num_after) == (1, 0)


def test_the_arrow_keys_say_what_is_known_of_a_token(
    make_run: MakeRun, ask: Callable[..., Any]
) -> None:
    run = make_run(rollouts=answers(trainer_logprobs=[-1.01, -0.7, None]))
    script = """((box) => [
      ["Tab", "ArrowRight", "ArrowRight", "End", "ArrowRight", "Home"].map(
        (key) => [box.press(key), box.parent.children[1].textContent]),
      box.querySelectorAll("[data-current]").length,
      box.attributes.tabindex, box.attributes.role,
    ])(document.querySelector(".tokens"))"""
    said, num_current, *attributes = ask(run, "samples", script)
    assert said == [
        [False, ""],
        [True, 'token 1 of 3: "a"; probability 36.79 %; difference 0.01: log-prob '
         "-1.01 by the trainer, -1 by the sampler; advantage 0.5; weight version 0"],
        [True, 'token 2 of 3: " <b>"; probability 60.65 %; difference 0.2: log-prob '
         "-0.7 by the trainer, -0.5 by the sampler; advantage 0.5; weight version 0"],
        *[[True, 'token 3 of 3: "\\n"; probability 77.88 %; advantage 0.5; '
           "weight version 1"]] * 2,
        [True, said[1][1]],
    ]  # fmt: skip
    assert num_current == 1
    assert attributes == ["0", "group"]


CHART = "document.querySelectorAll('.chart')[0]"
PLOT = "[...charts][0].plot()"


def test_a_chart_is_zoomed_by_keys(make_run: MakeRun, ask: Callable[..., Any]) -> None:
    script = f"""((box, part) => [
      ...["ArrowRight", "+", "=", "ArrowLeft", "ArrowRight", "ArrowRight", "ArrowRight",
          "-", "0", "+", "Escape", "x"]
        .map((key) => [key, box.press(key), ...part()]),
      ["Ctrl +", box.press("+", {{ ctrlKey: true }}), ...part()],
    ])({CHART}.querySelector(".plot"),
       () => [{PLOT}.scales.x.min, {PLOT}.scales.x.max])"""
    # Steps 1 to 20; keys that a chart does not use are left to the browser.
    assert ask(make_run(), "learning", script) == [
        ["ArrowRight", False, 1, 20],
        ["+", True, 5.75, 15.25],
        ["=", True, 8.125, 12.875],
        ["ArrowLeft", True, 6.9375, 11.6875],
        ["ArrowRight", True, 8.125, 12.875],
        ["ArrowRight", True, 9.3125, 14.0625],
        ["ArrowRight", True, 10.5, 15.25],
        ["-", True, 8.125, 17.625],
        ["0", True, 1, 20],
        ["+", True, 5.75, 15.25],
        ["Escape", True, 1, 20],
        ["x", False, 1, 20],
        ["Ctrl +", False, 1, 20],
    ]


def test_a_part_never_leaves_the_axis(
    make_run: MakeRun, ask: Callable[..., Any]
) -> None:
    moves = ["in", "in", "in", "left", "left", "left", "left", "out", "out", "right"]
    script = f"""((part) => {json.dumps(moves)}.map(
      (move) => (part = zoomedPart([0, 8], part, move))))(null)"""
    assert ask(make_run(), "learning", script) == [
        [2, 6], [3, 5], [3.5, 4.5], [3.25, 4.25], [3, 4], [2.75, 3.75], [2.5, 3.5],
        [2, 4], [1, 5], [2, 6],
    ]  # fmt: skip
    edges = """[zoomedPart([0, 8], [0.5, 2.5], "left"),
      zoomedPart([0, 8], [0, 2], "left"), zoomedPart([0, 8], [0, 2], "out"),
      zoomedPart([0, 8], [0, 5], "out"), zoomedPart([3, 3], null, "in")]"""
    assert ask(make_run("other"), "learning", edges) == [
        [0, 2], [0, 2], [0, 4], None, None
    ]  # fmt: skip


def test_buttons_and_keys_zoom_all_charts_and_a_new_drawing_keeps_it(
    make_run: MakeRun, ask: Callable[..., Any]
) -> None:
    script = f"""(() => {{
      const parts = () => [...charts].map(({{ plot }}) => plot().scales.x)
        .map(({{ min, max }}) => [min, max]);
      const buttons = {CHART}.querySelectorAll(".zoom button");
      buttons[0].send("click");
      redrawCharts();
      const zoomed = parts(), said = {CHART}.querySelector(".zoom span").textContent;
      buttons[4].send("click");
      return [zoomed, said, parts(), {CHART}.querySelector(".zoom span").textContent,
        buttons.map((one) => one.getAttribute("aria-label"))];
    }})()"""
    zoomed, said, whole, reset, names = ask(make_run(), "learning", script)
    assert len(zoomed) > 1
    assert {tuple(part) for part in zoomed} == {(5.75, 15.25)}
    assert (said, reset) == ("steps 5.75 to 15.25", "")
    assert {tuple(part) for part in whole} <= {(1, 20), (5, 20)}
    assert names[0] == "Zoom in: Reward"


def test_names_of_curves_are_buttons(
    make_run: MakeRun, ask: Callable[..., Any]
) -> None:
    script = f"""(() => {{
      const find = () => {CHART}.querySelectorAll(".u-legend button");
      const state = () => find().map(
        (one) => [one.textContent, one.attributes["aria-pressed"]]);
      const before = state();
      find()[0].focus();
      find()[0].send("click");
      const hidden = state(), shows = {PLOT}.series.map((one) => one.show);
      redrawCharts();
      return [before, hidden, shows, state(), {PLOT}.series.map((one) => one.show),
        document.activeElement === find()[0],
        {CHART}.querySelectorAll("tr button").length];
    }})()"""
    before, hidden, shows, again, still, has_focus, count = ask(
        make_run(), "learning", script
    )
    assert before == [["train:reward", "true"]]
    assert hidden == again == [["train:reward", "false"]]
    assert shows == still == [True, False]
    assert has_focus
    assert count == 1, "steps are no curve"


def test_a_chart_says_how_it_is_used(
    make_run: MakeRun, ask: Callable[..., Any]
) -> None:
    role, tabindex, label, hint = ask(
        make_run(),
        "learning",
        f"""((box) => [box.attributes.role, box.attributes.tabindex,
          box.attributes["aria-label"],
          document.getElementById(box.attributes["aria-describedby"]).textContent,
        ])({CHART}.querySelector(".plot"))""",
    )
    assert (role, tabindex) == ("group", "0")
    assert label == "Reward. train:reward: from 0.05 to 1 at 20"
    assert "0 or Escape resets" in hint


def checks(ask: Callable[..., Any], run: Path) -> dict[str, list[str]]:
    rows = ask(
        run,
        "trust",
        "document.querySelectorAll('tbody tr').map("
        "(row) => row.children.map((cell) => cell.textContent))",
    )
    return {row[0]: row[1:] for row in rows}


def rewrite(run: Path, config: dict[str, Any], metrics: dict[str, Any]) -> Path:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["hyperparams"] |= config
    for line in lines[1:]:
        line["metrics"] |= metrics
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.mark.parametrize(
    ("config", "metrics", "found"),
    [
        ({}, {}, "✓ one version"),
        ({}, {"train:weight_version_max": 21.0}, "▲ 21 versions apart"),
        ({"rollout": {"max_staleness": 30}}, {"train:weight_version_max": 21.0},
         "✓ 21 versions apart"),
        ({"grpo": {"asynchronous": {"max_staleness": 2}}},
         {"train:weight_version_max": 21.0, "train:asynchronous/staleness_max": 2.0},
         "✓ 2 steps old at most"),
        ({"grpo": {"asynchronous": {"max_staleness": 2}}},
         {"train:asynchronous/staleness_max": 3.0}, "▲ 3 steps old at most"),
        ({"grpo": {"asynchronous": {"max_staleness": 2}}},
         {"train:asynchronous/staleness_max": 0.0}, "✓ of the step itself"),
        ({"grpo": {"asynchronous": None}, "rollout": {"max_staleness": None}}, {},
         "✓ one version"),
    ],
)  # fmt: skip
def test_weights_of_a_batch_are_as_old_as_the_run_allows(
    make_run: MakeRun,
    ask: Callable[..., Any],
    config: dict[str, Any],
    metrics: dict[str, Any],
    found: str,
) -> None:
    rows = checks(ask, rewrite(make_run(num_steps=3), config, metrics))
    assert rows["Weights of one batch"][0] == found
    if "asynchronous" in str(metrics):
        assert "asynchronous.max_staleness is 2" in rows["Weights of one batch"][1]


def test_the_mismatch_is_shown_by_position(
    make_run: MakeRun, ask: Callable[..., Any]
) -> None:
    names = {
        "pos_64_255": 0.5,
        "pos_1024_4095": 1.0,
        "pos_0_63": 0.25,
        "pos_4096_up": 2,
    }
    metrics = {
        f"train:mismatch/logprob_diff/{name}/{q}": value * share
        for name, value in names.items()
        for q, share in (("p50", 0.1), ("p99", 1.0), ("max", 2.0))
    }
    run = rewrite(make_run(num_steps=3), {}, metrics)
    rows = checks(ask, run)
    assert {n: row for n, row in rows.items() if n[0].isdigit() or " 4096" in n} == {
        "0 to 63": ["3", "0.025", "0.25", "0.5"],
        "64 to 255": ["3", "0.05", "0.5", "1"],
        "1024 to 4095": ["3", "0.1", "1", "2"],
        "from 4096": ["3", "0.2", "2", "4"],
    }
    curves = ask(
        run,
        "trust",
        "document.querySelectorAll('.plot').map((box) => box.attributes['aria-label'])"
        ".find((label) => label.includes('by position'))",
    )
    assert curves.startswith(
        "Difference of log-probs by position of the token in its row, p99. "
        "tokens 0 to 63: from 0.25 to 0.25 at 3; tokens 64 to 255: from"
    )


def test_the_newest_weights_are_shown_with_their_digests(
    make_run: MakeRun, ask: Callable[..., Any]
) -> None:
    run = make_run()
    text = "document.getElementById('view-trust').textContent"
    assert "weights of the generator" not in ask(run, "trust", text)
    lines = [
        {
            "step": n,
            "version": 2 * n,
            "digest": f"{n:032x}"[::-1],
            "processes": 1 + n % 2,
        }
        for n in range(20)
    ]
    odd = ["null", '{"step": 3}', '{"step": "<b>", "version": 1}']
    (run / "weight_versions.jsonl").write_text(
        "\n".join([*map(json.dumps, lines[:14]), *odd, *map(json.dumps, lines[14:])])
        + '\n{"step": 20, "ver'
    )
    assert "23 transfers in all" in ask(run, "trust", text)
    cells = ask(
        run,
        "trust",
        "document.querySelectorAll('table')"
        ".find((one) => one.textContent.includes('digest of all'))"
        ".querySelectorAll('tbody tr')"
        ".map((row) => row.children.map((cell) => cell.textContent))",
    )
    assert cells[0] == ["grpo", "38", "19", "310000000000", "2 processes"]
    assert [row[1] for row in cells] == ["38", "36", "34", "32", "30", "28"]
