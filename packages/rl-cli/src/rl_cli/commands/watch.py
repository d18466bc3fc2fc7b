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
    import socket

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
@click.option("--host", default="127.0.0.1", show_default=True,
              help="Address; another one needs --keys and --tls.")  # fmt: skip
@click.option("--port", type=Whole(0, 65_535),
              help=f"Port; 0 for any free one. Default: {_PORT}; if that is taken, "
              "any free one on 127.0.0.1.")  # fmt: skip
@click.option("--keys", "keys_file", metavar="FILE",
              help="Key file of rl keys create: admits viewers in place of a "
              "token.")  # fmt: skip
@click.option("--tls", is_flag=True,
              help="Encrypt, with a certificate that is created here.")  # fmt: skip
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
    *,
    host: str,
    port: int | None,
    keys_file: str | None,
    tls: bool,
    poll_s: float,
    on_terminal: bool,
    once: bool,
    as_json: bool,
) -> None:
    """Show the page of `rl report` live, until Ctrl-C.

    RUN is the folder of a run, in progress or finished. The page is served on 127.0.0.1
    to anyone who has the printed address, which contains a token; from another machine,
    forward the port first: ssh -L 8790:127.0.0.1:8790 HOST. To share it with others,
    use keys: --host 0.0.0.0 --keys FILE --tls. The run's files are only read.

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
        _serve(live, (host, port), keys_file, tls, terminal, as_json)


def _serve(
    live: LiveRuns,
    place: tuple[str, int | None],
    keys_file: str | None,
    tls: bool,
    terminal: Terminal,
    as_json: bool,
) -> None:
    import asyncio  # noqa: PLC0415
    import secrets  # noqa: PLC0415

    from rl_cli.report.watch_server import (  # noqa: PLC0415
        serve,
        watch_app,
        watch_door,
    )
    from rl_distributed.access.bound_socket import url_of  # noqa: PLC0415
    from rl_distributed.access.door import is_loopback  # noqa: PLC0415
    from rl_distributed.access.key_file import KeyFile  # noqa: PLC0415
    from rl_distributed.access.listener_tls import server_context  # noqa: PLC0415

    host, port = place
    if not is_loopback(host) and (keys_file is None or not tls):
        raise click.UsageError(
            f"--host {host} lets others reach the page: add --keys FILE (see rl keys "
            "create) and --tls."
        )
    keys = None if keys_file is None else KeyFile(keys_file)
    if keys is not None:
        # Now, instead of refusing every viewer later.
        keys.check()
    context = server_context(tls, host)
    # Other users of this machine can connect to the port, too.
    token = None if keys is not None else secrets.token_urlsafe(24)
    # Bound before the loop starts, as port 0 gets its number here.
    listener = _listener(host, port)
    url = f"{url_of(listener, tls=tls)}/?token={token or 'KEY'}"
    door = watch_door(token, key_file=keys, is_loopback=is_loopback(host))

    def ready() -> None:
        if as_json:
            terminal.raw(json.dumps({"url": url}))
            return
        terminal.raw(url)
        terminal.note(
            "Anyone with this address can see the run. Ctrl-C to stop."
            if keys is None
            else "Replace KEY by a key of rl keys create. Ctrl-C to stop."
        )

    asyncio.run(serve(watch_app(live, door), door, listener, ready, tls=context))


def _listener(host: str, port: int | None) -> socket.socket:
    """Return a bound socket; None as port: the usual one, or any if it is taken.

    Raises:
        ConfigError: The port that was asked for is taken, or the host is another one.
    """
    from rl_distributed.access.bound_socket import bound_socket  # noqa: PLC0415
    from rl_distributed.access.door import is_loopback  # noqa: PLC0415
    from rl_distributed.errors import ConfigError  # noqa: PLC0415

    if port is not None:
        return bound_socket(host, port)
    try:
        return bound_socket(host, _PORT)
    except ConfigError:
        # A second page, as of another run, must not need an option. Where others are to
        # reach it, a firewall or a link depends on the port.
        if not is_loopback(host):
            raise
        return bound_socket(host, 0)
