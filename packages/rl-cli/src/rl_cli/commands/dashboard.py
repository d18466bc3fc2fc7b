"""`rl dashboard`: generate a Grafana dashboard of runs."""

from __future__ import annotations

import json

import click

from rl_cli.console import Terminal


@click.command(short_help="Print a Grafana dashboard of runs.")
@click.option(
    "--namespace",
    default="run",
    show_default=True,
    metavar="NAME",
    help="Prefix of the runs' metrics in Prometheus, "
    "logger.sink_settings.prometheus.namespace.",
)
def dashboard(namespace: str) -> None:
    """Print a Grafana dashboard of the runs scraped by a Prometheus server.

    Runs expose metrics with logger.sinks='[jsonl,prometheus]'. In Grafana, choose
    Dashboards, New, Import and upload the file.

    \b
    Examples:
      rl dashboard > dashboard.json
      rl dashboard --namespace team > dashboard.json
    """
    from rl_cli.grafana import grafana_dashboard  # noqa: PLC0415
    from rl_distributed.metrics.sinks.prometheus import (  # noqa: PLC0415
        PrometheusSinkConfig,
    )

    checked = PrometheusSinkConfig.from_dict(
        {"namespace": namespace}, source="--namespace"
    )
    Terminal().raw(json.dumps(grafana_dashboard(checked.namespace), indent=2))
