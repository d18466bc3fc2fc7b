"""`rl keys`: keys with roles for everything that listens."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl_cli.console import Terminal, table

if TYPE_CHECKING:
    from rl_distributed.access.client import ListenerClient

_ROLES = ["viewer", "user", "operator", "admin"]


@click.group()
def keys() -> None:
    """Create, list and revoke keys for servers, pages, metrics and runs.

    A key has a role: a viewer may look at metrics, pages and states; a user may use a
    model as well; an operator may change what runs (weights, pause, stop); an admin may
    make keys. Only a digest of a key is stored, in a file that is yours alone:
    --file, else RL_KEYS_FILE, else ~/.config/rl/keys.json. Listeners that are given the
    file (rl serve --keys FILE, rl watch --keys FILE) use it as it is at each request.

    \b
    Examples:
      rl keys create --name alice --role viewer --expires 30d
      rl keys revoke alice
    """


def _where(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options shared by all commands."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option(
            "--url", metavar="URL",
            help="Ask a server or a run at this address, with an admin's key in "
            "RL_KEY, in place of a file.",
        ),
        click.option(
            "--file", "path", type=click.Path(path_type=Path), metavar="FILE",
            help="File of keys; default: RL_KEYS_FILE, else ~/.config/rl/keys.json.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@keys.command(short_help="Create a key, and show it once.")
@click.option("--name", "key_name", required=True, help="The key's owner.")
@click.option(
    "--role", required=True, type=click.Choice(_ROLES), help="The key's role."
)
@click.option("--expires", metavar="TIME",
              help="Lifetime, such as 30d, 12h or 90min; default: until it is revoked."
              )  # fmt: skip
@click.option("--rate", metavar="NUMBER/UNIT",
              help="Maximum rate of requests to each listener, such as 60/min; "
              "default: unlimited.")  # fmt: skip
@_where
def create(
    key_name: str,
    role: str,
    expires: str | None,
    rate: str | None,
    path: Path | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Create a key. It is printed once, and cannot be shown again.

    \b
    Examples:
      rl keys create --name alice --role viewer --expires 30d
      rl keys create --name nightly --role user --rate 60/min --json
    """
    from rl_distributed.access.access_key import parse_lifetime  # noqa: PLC0415
    from rl_distributed.access.rate_limit import RateLimit  # noqa: PLC0415
    from rl_distributed.access.roles import role_named  # noqa: PLC0415

    # Checked here also for --url: a typo is refused without a request.
    lifetime = None if expires is None else parse_lifetime(expires)
    limit = None if rate is None else RateLimit.parse(rate)
    client = _client(url, path)
    if client is not None:
        body = {"name": key_name, "role": role, "expires": expires, "rate": rate}
        shown = client.ask("POST", "/rl/keys", body)
        key = str(shown.pop("key"))
    else:
        file = _file(path)
        stored, key = file.create(
            key_name, role_named(role), lifetime=lifetime, rate=limit
        )
        shown = stored.public()
    terminal = Terminal()
    if as_json:
        terminal.raw(json.dumps({**shown, "key": key}))
        return
    # Alone on standard output, so that a script can capture it; the note goes to
    # standard error.
    terminal.raw(key)
    terminal.note(
        f"This is the only time that the key is shown. Its id is {shown['id']}; rl "
        f"keys revoke {key_name} ends it."
    )


@keys.command("list", short_help="List keys, without their secrets.")
@_where
def list_keys(path: Path | None, url: str | None, as_json: bool) -> None:
    """List all keys: id, name, role, state, when they expire, and their rate.

    \b
    Example:
      rl keys list
    """
    client = _client(url, path)
    if client is not None:
        found = list(client.ask("GET", "/rl/keys")["keys"])
    else:
        found = [key.public() for key in _file(path).read()]
    terminal = Terminal()
    if as_json:
        terminal.raw(json.dumps(found))
        return
    if not found:
        terminal.raw("no keys yet; rl keys create makes one")
        return
    columns = ["id", "name", "role", "state", "expires", "rate"]
    rows = [
        (key["id"], key["name"], key["role"], key["state"], _left(key["expires"]),
         key["rate"] or "any")
        for key in found
    ]  # fmt: skip
    terminal.result(table("Keys", columns, rows))


@keys.command(short_help="Revoke a key.")
@click.argument("key", metavar="NAME|ID")
@_where
def revoke(key: str, path: Path | None, url: str | None, as_json: bool) -> None:
    """Revoke a key. Listeners refuse it from the next request on.

    \b
    Example:
      rl keys revoke alice
    """
    client = _client(url, path)
    if client is not None:
        shown = client.ask("POST", "/rl/keys/revoke", {"key": key})
    else:
        shown = _file(path).revoke(key).public()
    terminal = Terminal()
    if as_json:
        terminal.raw(json.dumps(shown))
    else:
        terminal.raw(f"revoked: {shown['id']} ({shown['name']}, {shown['role']})")


def _file(path: Path | None) -> Any:
    from rl_distributed.access.key_file import (  # noqa: PLC0415
        KeyFile,
        default_key_file,
    )

    return KeyFile(default_key_file() if path is None else path)


def _client(url: str | None, path: Path | None) -> ListenerClient | None:
    from rl_distributed.access.client import ListenerClient  # noqa: PLC0415

    if url is None:
        return None
    if path is not None:
        raise click.UsageError("give --file or --url, not both.")
    return ListenerClient(url)


def _left(expires: str | None) -> str:
    if expires is None:
        return "never"
    left = datetime.fromisoformat(expires) - datetime.now(UTC)
    seconds = left.total_seconds()
    if seconds <= 0:
        return expires[:10]
    for size, unit in ((86_400, "d"), (3_600, "h")):
        if seconds >= size:
            return f"in {seconds / size:.0f} {unit}"
    return f"in {seconds / 60:.0f} min"
