"""The Grafana dashboard: its structure, and metric names that Prometheus accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

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


@pytest.mark.parametrize("namespace", ["run", "team_" + "a" * 60, "b" * 33])
def test_grafana_takes_its_form(namespace: str) -> None:
    board = grafana_dashboard(namespace)
    assert isinstance(board["title"], str)
    # Grafana rejects longer ones: "uid too long, max 40 characters".
    assert re.fullmatch(r"[\w-]{1,40}", board["uid"], re.ASCII)
    # Since Grafana 8: the structure of panels and variables that this file uses.
    assert 27 < board["schemaVersion"] < 100
    source, instance = board["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == (
        "datasource", "datasource", "prometheus"
    )  # fmt: skip
    assert (instance["name"], instance["type"]) == ("instance", "query")
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert instance["datasource"] == chosen
    for panel in board["panels"]:
        assert panel["id"] > 0
        assert min(panel["gridPos"][side] for side in "wh") > 0
        assert min(panel["gridPos"][side] for side in "xy") >= 0
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == chosen
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(set(refs)) == len(refs)
        assert all(target["datasource"] == chosen for target in panel["targets"])


def test_dashboards_of_two_namespaces_are_two() -> None:
    names = ("run", "c" * 50, "c" * 51)
    assert len({grafana_dashboard(name)["uid"] for name in names}) == 3


def targets(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        yield from panel.get("targets", ())


SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?\{(.*)\}")
MATCHER = re.compile(
    r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*("(?:[^"\\\n]|\\.)*")\s*(?:,|$)'
)


def parsed(query: str) -> tuple[str | None, list[tuple[str, str, str]]]:
    """Parse an instant vector selector of PromQL, the only form of query here.

    Raises:
        ValueError: Prometheus would reject it.
    """
    whole = SELECTOR.fullmatch(query.strip())
    if whole is None:
        raise ValueError(f"no selector: {query}")
    name, inside = whole.groups()
    matchers: list[tuple[str, str, str]] = []
    end = 0
    while end < len(inside):
        found = MATCHER.match(inside, end)
        if found is None:
            raise ValueError(f"no matcher of a label: {inside[end:]}")
        label, operator, quoted = found.groups()
        value = json.loads(quoted)
        if operator in ("=~", "!~"):
            re.compile(value.replace("$instance", "a|b"))
        matchers.append((label, operator, value))
        end = found.end()
    # Prometheus rejects a selector that the empty string would match.
    if name is None and not any(
        (operator == "=" and value)
        or (operator == "=~" and not re.fullmatch(value, ""))
        for _, operator, value in matchers
    ):
        raise ValueError(f"selects everything: {query}")
    return name, matchers


@pytest.mark.parametrize(
    "query",
    ["a b{}", "{}", 'a{b="c}', 'a{b~"c"}', 'a{0="c"}', 'a{b=~"("}', '{b=~".*"}'],
)
def test_the_parser_refuses_what_prometheus_refuses(query: str) -> None:
    with pytest.raises((ValueError, re.error)):
        parsed(query)


def test_every_query_parses_and_names_a_metric() -> None:
    found = list(targets(grafana_dashboard("team")))
    assert len(found) > 25
    for target in found:
        name, matchers = parsed(target["expr"])
        by_label = {label: (operator, value) for label, operator, value in matchers}
        assert len(by_label) == len(matchers)
        assert by_label["instance"] == ("=~", "$instance")
        if name is None:
            name = by_label["__name__"][1].replace("[0-9]+", "0")
        # The label holds the name before it was made valid for Prometheus.
        if "metric" in by_label:
            assert by_label["metric"][0] == "="
            assert name == prometheus_name("team", by_label["metric"][1])
        assert name.startswith("team_")


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
