"""`rl watch`: a live view of a run, in a browser or on the terminal."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rl_cli.console import Terminal
from rl_cli.options import Number, Whole

if TYPE_CHECKING:
    from rl_cli.report.live_runs import LiveRuns

_PORT = 8790
_NICE = 10


@click.command(short_help="Show a run live, in a browser or a terminal.")
@click.argument(
    "runs",
    metavar="RUN [RUN ...]",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@click.option("--port", default=_PORT, show_default=True, type=Whole(0, 65_535),
              help="Port on 127.0.0.1; 0 for any free one.")  # fmt: skip
@click.option("--poll-s", default=2.0, show_default=True, type=Number(least=0.1),
              help="Seconds between reads of the files.")  # fmt: skip
@click.option("--terminal", "on_terminal", is_flag=True,
              help="Show a summary here, as over ssh, and serve no page.")  # fmt: skip
@click.option("--once", is_flag=True,
              help="Show the summary once, and exit.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True,
              help="Print the address as one JSON object.")  # fmt: skip
def watch(
    runs: tuple[Path, ...],
    port: int,
    poll_s: float,
    on_terminal: bool,
    once: bool,
    as_json: bool,
) -> None:
    """Show the page of `rl report` live, until Ctrl-C.

    RUN is the folder of a run, in progress or finished. The page is served on 127.0.0.1
    to anyone who has the printed address, which contains a token; from another machine,
    forward the port first: ssh -L 8790:127.0.0.1:8790 HOST. The run's files are only
    read.

    \b
    Examples:
      rl watch runs/quickstart-001
      rl watch runs/grpo-001 --terminal
      rl watch runs/grpo-001 --once
    """
    from rl_cli.report.live_runs import LiveRuns  # noqa: PLC0415

    if as_json and (on_terminal or once):
        raise click.UsageError("--json is for the page: drop --terminal or --once.")
    live = LiveRuns(runs, poll_s=poll_s)
    if not once:
        # If cores are scarce, training comes first.
        with contextlib.suppress(OSError):
            os.nice(_NICE)
    terminal = Terminal()
    if on_terminal or once:
        from rl_cli.report.terminal_view import show  # noqa: PLC0415

        show(live, terminal.out, once=once)
    else:
        _serve(live, port, terminal, as_json)


def _serve(live: LiveRuns, port: int, terminal: Terminal, as_json: bool) -> None:
    import asyncio  # noqa: PLC0415
    import secrets  # noqa: PLC0415

    from rl_cli.report.watch_server import (  # noqa: PLC0415
        HOST,
        bound_socket,
        serve,
        watch_app,
    )

    # Other users of this machine can connect to the port, too.
    token = secrets.token_urlsafe(24)
    # Bound before the loop starts, as port 0 gets its number here.
    listener = bound_socket(port)
    url = f"http://{HOST}:{listener.getsockname()[1]}/?token={token}"

    def ready() -> None:
        if as_json:
            terminal.raw(json.dumps({"url": url}))
        else:
            terminal.raw(url)
            terminal.note("Anyone with this address can see the run. Ctrl-C to stop.")

    asyncio.run(serve(watch_app(live, token), listener, ready))
