"""`rl runs`: list runs and their state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from rl_cli.console import Terminal, table


@click.command(short_help="List runs and their state.")
@click.argument(
    "folder", required=False, default="runs", type=click.Path(path_type=Path)
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def runs(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER, oldest first; default: runs.

    A run is running while its process is alive; finished if it reached its end; stopped
    if rl ctl stop ended it; failed if it ended with an error; interrupted if a signal
    stopped it or its process was killed. The column restarts counts those by
    `rl train --supervise`.

    \b
    Examples:
      rl runs
      rl runs experiments --json
    """
    from rl_cli.run_listing import find_runs, summarize_run  # noqa: PLC0415
    from rl_distributed.errors import ConfigError  # noqa: PLC0415

    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {str(folder)!r}: give the folder that contains the "
            "runs, as in rl runs FOLDER"
        )
    found = [summarize_run(path, folder) for path in find_runs(folder)]
    found.sort(key=lambda run: (run.started or "", run.folder))
    terminal = Terminal()
    if as_json:
        terminal.raw(json.dumps([run.to_dict() for run in found]))
        return
    if not found:
        terminal.raw(f"no runs in {folder}")
        return
    columns = [
        "run", "what", "state", "stage", "steps", "best", "age", "restarts",
        "ended because",
    ]  # fmt: skip
    rows: list[tuple[Any, ...]] = [
        (run.folder, run.name, run.state, run.stage, run.steps, run.shown_best,
         run.shown_age, run.restarts, run.reason)
        for run in found
    ]  # fmt: skip
    # Columns that are mostly empty take up the width of the others.
    empty = {
        name
        for name, values in (
            ("restarts", [run.restarts for run in found]),
            ("ended because", [run.reason for run in found]),
        )
        if not any(values)
    }
    shown = [place for place, name in enumerate(columns) if name not in empty]
    columns = [columns[place] for place in shown]
    rows = [tuple(row[place] for place in shown) for row in rows]
    spare = ("stage", "what", "age")
    terminal.result(table(f"Runs in {folder}", columns, rows, spare=spare))
