"""`rl env`: manage the Python environments of actor classes."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from rl_cli.console import Terminal, table
from rl_cli.options import Number

if TYPE_CHECKING:
    from rl_distributed.actor_environments import ActorEnvironment, EnvironmentStore

MIB = 1 << 20
NAMES = click.argument("names", nargs=-1, metavar="[NAME ...]")
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")


@dataclasses.dataclass(frozen=True)
class Row:
    """One environment, as `rl env list` shows it."""

    name: str
    """Class, module or extra that declares it; empty: no longer declared."""
    way: str
    state: str
    """"ready", "building", "broken", "absent", or "wrong" if it cannot be resolved."""
    key: str = ""
    path: str = ""
    size_bytes: int = 0
    last_use: float = 0.0
    """Seconds since the epoch; 0.0: never."""
    detail: str = ""

    def shown(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        used = datetime.datetime.fromtimestamp(self.last_use) if self.last_use else None
        return (
            self.name,
            self.way,
            self.state,
            f"{self.size_bytes / MIB:.0f} MiB" if self.size_bytes else "",
            f"{used:%Y-%m-%d %H:%M}" if used else "",
            self.detail or self.key or self.path,
        )


@click.group()
def env() -> None:
    """Show, build, check or remove the Python environments of actor classes.

    A NAME is an extra, such as "rl-models[vllm-cpu]", or the path of a class or module
    with a declared environment. Environments are stored in RL_ENV_ROOT or, by default,
    in the user's cache folder; RL_ENV_CONFIG names a file that overrides declarations.

    \b
    Examples:
      rl env list
      rl env build "rl-models[vllm-cpu]"
      rl env check --json
      rl env prune --unused-days 30
    """


@env.command("list")
@JSON
def list_(as_json: bool) -> None:
    """List declared and existing environments.

    \b
    Examples:
      rl env list
      rl env list --json
    """
    from rl_distributed.actor_environments import (  # noqa: PLC0415
        EnvironmentStore,
        declared_names,
    )

    store = EnvironmentStore()
    declared = [_row(name, store) for name in declared_names()]
    # By key: a stored environment does not know which names declare it.
    known = {row.key for row in declared}
    others = [
        Row(
            "",
            stored.label,
            stored.state,
            stored.key,
            str(stored.path),
            stored.size_bytes,
            stored.last_use,
        )
        for stored in store.environments()
        if stored.key not in known
    ]
    _show([*declared, *others], f"Environments in {store.root}", as_json)


@env.command()
@NAMES
@JSON
def build(names: tuple[str, ...], as_json: bool) -> None:
    """Build environments ahead of their first use, and check them.

    Without a NAME, all declared environments are built. Existing ones are only checked.
    Workers build missing environments themselves; use this command for images, and for
    nodes that will have no network.

    \b
    Examples:
      rl env build
      rl env build "rl-models[vllm-cpu]"
    """
    from rl_distributed.actor_environments import (  # noqa: PLC0415
        EnvironmentStore,
        declared_names,
        get_environment,
    )

    terminal = Terminal()
    store = EnvironmentStore()
    rows = []
    for name in names or declared_names():
        terminal.note(f"{name} ...")
        # `recheck`: an environment that exists may have been damaged since its check.
        prepared = get_environment(name).prepare(store.root, recheck=True)
        seconds = prepared.build_s + prepared.preflight_s
        terminal.note(f"{name} is ready ({seconds:.1f} s)")
        rows.append(_row(name, store))
    _show(rows, f"Environments in {store.root}", as_json)


@env.command(short_help="Check that environments match this one.")
@NAMES
@click.option("--import", "imports", multiple=True, help="A required module.")
@JSON
def check(names: tuple[str, ...], imports: tuple[str, ...], as_json: bool) -> int:
    """Check that environments match this one: Python, Ray, rl-distributed, imports.

    Without a NAME, all declared and built environments are checked. Nothing is built.
    Exits with 0 if all match, with 1 otherwise.

    \b
    Examples:
      rl env check
      rl env check "rl-models[vllm-cpu]" --import vllm
    """
    from rl_distributed.actor_environments import (  # noqa: PLC0415
        EnvironmentStore,
        declared_names,
    )

    store = EnvironmentStore()
    rows = [_checked(name, imports, store) for name in names or declared_names()]
    if not names:
        # Nobody asked for these by name, and no command needs all extras built.
        rows = [row for row in rows if row.state != "absent"]
    _show(rows, "Checked environments", as_json)
    return 0 if all(row.state == "fits" for row in rows) else 1


@env.command()
@click.option(
    "--unused-days",
    type=Number(),
    help="Also remove environments unused for this number of days.",
)
@click.option("--all", "everything", is_flag=True, help="Remove all that are unused.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@JSON
def prune(
    unused_days: float | None, everything: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove remains of interrupted builds, and unused environments.

    Environments in use by any process are kept. Without options, only remains are
    removed.

    \b
    Examples:
      rl env prune
      rl env prune --unused-days 30 --dry-run
      rl env prune --all
    """
    from rl_distributed.actor_environments import EnvironmentStore  # noqa: PLC0415

    if everything and unused_days is not None:
        raise click.UsageError("--all and --unused-days are mutually exclusive.")
    store = EnvironmentStore()
    there = len(store.environments())
    removed = store.prune(0.0 if everything else unused_days, dry_run=dry_run)
    rows = [
        Row(
            "",
            stored.label,
            "removable" if dry_run else "removed",
            stored.key,
            str(stored.path),
            stored.size_bytes,
            stored.last_use,
        )
        for stored in removed
    ]
    _show(rows, "To be removed" if dry_run else "Removed", as_json)
    kept = there - len(removed)
    if kept and everything:
        Terminal().note(f"{kept} kept: in use, being built, or just handed to a worker")


def _row(name: str, store: EnvironmentStore) -> Row:
    """Return the environment declared for a name, and its state here."""
    from rl_distributed.actor_environments import (  # noqa: PLC0415
        BuiltEnvironment,
        get_environment,
    )
    from rl_distributed.errors import UserError  # noqa: PLC0415

    try:
        found = get_environment(name).resolve()
        if not isinstance(found, BuiltEnvironment):
            return Row(name, _way(found), "given", path=found.label)
        stored = store.find(found.key())
    except UserError as error:
        return Row(name, "", "wrong", detail=str(error))
    return Row(
        name,
        _way(found),
        stored.state,
        stored.key,
        str(stored.path),
        stored.size_bytes,
        stored.last_use,
    )


def _checked(name: str, imports: Sequence[str], store: EnvironmentStore) -> Row:
    from rl_distributed.actor_environments import get_environment  # noqa: PLC0415
    from rl_distributed.errors import UserError  # noqa: PLC0415

    row = _row(name, store)
    if row.state not in ("ready", "given"):
        remedy = row.detail or f'it is {row.state}; run: rl env build "{name}"'
        return dataclasses.replace(row, detail=remedy)
    found = get_environment(name).resolve()
    wanted = dataclasses.replace(found, imports=(*found.imports, *imports))
    try:
        wanted.prepare(store.root, recheck=True)
    except UserError as error:
        return dataclasses.replace(row, state="unfit", detail=str(error))
    return dataclasses.replace(row, state="fits")


def _way(environment: ActorEnvironment) -> str:
    return type(environment).__name__.removesuffix("Environment")


def _show(rows: Sequence[Row], title: str, as_json: bool) -> None:
    terminal = Terminal()
    if as_json:
        terminal.raw(json.dumps([dataclasses.asdict(row) for row in rows]))
    elif rows:
        columns = ["name", "way", "state", "size", "last use", "key or reason"]
        terminal.result(table(title, columns, [row.shown() for row in rows]))
    else:
        terminal.raw(f"{title}: none")
