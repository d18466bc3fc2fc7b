"""`rl report`: write an HTML page that shows or compares runs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rl_cli.console import Terminal

_MOST_BYTES = 200
"""Size of the names of the runs in the name of a page."""


@click.command(short_help="Write an HTML page of a run, or compare runs.")
@click.argument(
    "runs",
    metavar="RUN [RUN ...]",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="HTML file; default: report.html in the folder of the run, of several runs "
    "report-NAME-NAME.html beside the first one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def report(runs: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    """Write one HTML page that shows a run, or compares several.

    RUN is the folder of a run, whether finished, in progress or failed. The page shows
    curves, the answers kept by the run, where the time went, possible problems, and the
    configuration; it needs no network. If there are too many answers for one file, they
    are stored in a folder NAME_files beside the page: keep the two together.

    \b
    Examples:
      rl report runs/quickstart-001
      rl report runs/grpo-001 runs/grpo-002 --output compared.html
    """
    from rl_cli.report.page import write_page  # noqa: PLC0415
    from rl_cli.report.run_reader import read_run  # noqa: PLC0415

    found = [read_run(path) for path in runs]
    path = output or _default_page(runs)
    store = write_page(found, path)
    files = store.folder if store.in_files else None
    terminal = Terminal()
    if as_json:
        told = {"page": str(path), "files": None if files is None else str(files)}
        terminal.raw(json.dumps(told))
        return
    terminal.raw(str(path))
    if files is not None:
        terminal.note(f"answers in {files}: keep it beside the page")


def _default_page(runs: tuple[Path, ...]) -> Path:
    """Return the page of runs; that of several replaces the page of none of them."""
    if len(runs) == 1:
        return runs[0] / "report.html"
    folders = [path.resolve() for path in runs]
    joined = "-".join(folder.name for folder in folders)
    # A file system takes 255 bytes, and the folder of the answers has a longer name.
    short = joined if len(joined.encode()) <= _MOST_BYTES else f"{len(runs)}-runs"
    return folders[0].parent / f"report-{short}.html"
