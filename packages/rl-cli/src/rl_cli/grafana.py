"""A Grafana dashboard of runs scraped by a Prometheus server.

```
PANELS -> queries by the names that the sink `prometheus` exposes -> dashboard's JSON
```
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from rl_distributed.metrics.sinks.prometheus import prometheus_name

__all__ = ["PANELS", "Panel", "grafana_dashboard"]

# Schema of Grafana 10; newer releases upgrade it on import.
_SCHEMA_VERSION = 38
_MOST_UID = 40
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_ANY = "*"


@dataclass(frozen=True)
class Panel:
    """A chart of a few metrics over time.

    Args:
        title: Title of the chart.
        metrics: Names of logged metrics; `*` stands for a number, such as a GPU's.
        unit: Grafana's name of the unit; "short" for a plain number.
        row: Heading of its row.
    """

    title: str
    metrics: tuple[str, ...]
    unit: str
    row: str


_LEARNING, _SPEED, _TRUST, _MACHINE = (
    "Does it learn?",
    "Where does the time go?",
    "Can it be trusted?",
    "The machine (logger.sample_resources_every_s)",
)
PANELS = (
    Panel("Reward", ("train:reward", "val:reward"), "short", _LEARNING),
    Panel("Accuracy", ("val:accuracy",), "percentunit", _LEARNING),
    Panel("Loss", ("train:loss",), "short", _LEARNING),
    Panel(
        "Divergence from the reference, entropy",
        ("train:kl_penalty", "train:approx_entropy"),
        "short",
        _LEARNING,
    ),
    Panel("Norm of the gradient", ("train:grad_norm",), "short", _LEARNING),
    Panel(
        "Answer length, tokens",
        ("train:mean_gen_tokens_per_sample", "val:mean_gen_tokens_per_sample"),
        "short",
        _LEARNING,
    ),
    Panel("Step, seconds", ("timing:total_step_time",), "s", _SPEED),
    Panel(
        "Phases, seconds",
        (
            "timing:generation",
            "timing:policy_and_reference_logprobs",
            "timing:policy_training",
            "timing:prepare_for_generation/total",
        ),
        "s",
        _SPEED,
    ),
    Panel(
        "Tokens per second",
        ("performance:tokens_per_sec", "performance:generation_tokens_per_sec"),
        "short",
        _SPEED,
    ),
    Panel(
        "Sampler against trainer",
        ("train:gen_kl_error", "train:js_divergence_error"),
        "short",
        _TRUST,
    ),
    Panel(
        "Clipped, cut off, without a signal",
        ("train:clip_fraction", "train:truncation_rate", "train:zero_variance_rate"),
        "percentunit",
        _TRUST,
    ),
    Panel(
        "Failed answers, skipped steps",
        (
            "train:environment_error_rate",
            "train:infrastructure_error_rate",
            "train:skipped_steps",
        ),
        "short",
        _TRUST,
    ),
    Panel(
        "Processors and memory in use",
        ("system/cpu_percent", "system/memory_percent"),
        "percent",
        _MACHINE,
    ),
    Panel("GPUs in use", ("system/gpu*/utilization_percent",), "percent", _MACHINE),
    Panel("GPU memory in use", ("system/gpu*/memory_percent",), "percent", _MACHINE),
)


def grafana_dashboard(namespace: str = "run") -> dict[str, Any]:
    """Return the dashboard in the form that Grafana imports.

    Args:
        namespace: `logger.sink_settings.prometheus.namespace` of the runs.
    """
    return {
        "title": "RL runs",
        "uid": _uid(namespace),
        "tags": ["rl"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables(namespace)},
        "panels": _panels(namespace),
    }


def _uid(namespace: str) -> str:
    """Return an identifier of the length that Grafana accepts."""
    uid = f"rl-runs-{namespace}"
    if len(uid) > _MOST_UID:
        digest = hashlib.sha256(namespace.encode()).hexdigest()
        uid = f"rl-runs-{digest}"[:_MOST_UID]
    return uid


def _variables(namespace: str) -> list[dict[str, Any]]:
    step = prometheus_name(namespace)
    return [
        {"name": "datasource", "label": "Prometheus", "type": "datasource",
         "query": "prometheus"},
        {"name": "instance", "label": "Run", "type": "query", "multi": True,
         "includeAll": True, "datasource": _DATASOURCE, "refresh": 2,
         "query": {"query": f"label_values({step}, instance)", "refId": "instance"}},
    ]  # fmt: skip


def _panels(namespace: str) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = [
        {
            "id": 1,
            "type": "stat",
            "title": "Newest step",
            "datasource": _DATASOURCE,
            "gridPos": {"x": 0, "y": 0, "w": 3 * _WIDTH, "h": 4},
            "targets": [_target(prometheus_name(namespace), "", "A")],
        }
    ]
    top, place, row = 4, 0, ""
    for panel in PANELS:
        if panel.row != row:
            top += _HEIGHT if place else 0
            row, place = panel.row, 0
            at = {"x": 0, "y": top, "w": 3 * _WIDTH, "h": 1}
            shown.append(
                {"id": len(shown) + 1, "type": "row", "title": row, "gridPos": at}
            )
            top += 1
        elif place == _COLUMNS:
            top, place = top + _HEIGHT, 0
        at = {"x": place * _WIDTH, "y": top, "w": _WIDTH, "h": _HEIGHT}
        shown.append(_chart(panel, namespace, len(shown) + 1, at))
        place += 1
    return shown


def _chart(
    panel: Panel, namespace: str, number: int, place: dict[str, int]
) -> dict[str, Any]:
    targets = [
        _target(prometheus_name(namespace, name), name, chr(ord("A") + i))
        if _ANY not in name
        else _target_of_any(namespace, name, chr(ord("A") + i))
        for i, name in enumerate(panel.metrics)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": targets,
    }


def _target(exposed: str, name: str, ref: str) -> dict[str, Any]:
    # Different names may map to the same one in Prometheus; the label tells them apart.
    of_name = f', metric="{name}"' if name else ""
    return {
        "refId": ref,
        "datasource": _DATASOURCE,
        "expr": f'{exposed}{{instance=~"$instance"{of_name}}}',
        "legendFormat": f"{{{{instance}}}} {name}".strip(),
    }


def _target_of_any(namespace: str, name: str, ref: str) -> dict[str, Any]:
    before, after = name.split(_ANY)
    # Convert the whole name, as the ends of a part would be stripped.
    exposed = prometheus_name(namespace, f"{before}0{after}")
    head = prometheus_name(namespace, before)
    pattern = f"{head}[0-9]+{exposed[len(head) + 1 :]}"
    return {
        "refId": ref,
        "datasource": _DATASOURCE,
        "expr": f'{{__name__=~"{pattern}", instance=~"$instance"}}',
        "legendFormat": "{{instance}} {{metric}}",
    }
