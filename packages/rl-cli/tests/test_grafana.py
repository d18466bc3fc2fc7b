"""The dashboard for Grafana: its form, and names that Prometheus would take."""

from __future__ import annotations

import json
import re

import pytest

from rl_cli.grafana import PANELS, grafana_dashboard
from rl_cli.main import _run
from rl_distributed.metrics.sinks.prometheus import prometheus_name


def test_it_is_printed_as_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["dashboard", "--namespace", "team"], False) == 0
    assert json.loads(capsys.readouterr().out) == grafana_dashboard("team")
    assert _run(["dashboard", "--namespace", "a b"], False) == 2
    assert "namespace" in capsys.readouterr().err


def test_panels_neither_overlap_nor_leave_the_page() -> None:
    board = grafana_dashboard()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    shown = [panel["title"] for panel in panels if panel["type"] == "timeseries"]
    assert shown == [panel.title for panel in PANELS]


def test_every_gpu_is_shown() -> None:
    found = {
        re.findall(r'__name__=~"(.*?)"', target["expr"])[0]
        for panel in grafana_dashboard()["panels"]
        for target in panel.get("targets", ())
        if "__name__" in target["expr"]
    }
    for measure in ("utilization_percent", "memory_percent"):
        name = prometheus_name("run", f"system/gpu12/{measure}")
        assert sum(re.fullmatch(pattern, name) is not None for pattern in found) == 1
