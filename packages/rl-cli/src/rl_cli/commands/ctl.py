"""`rl ctl`: what can be asked of a run while it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl_cli.console import Terminal
from rl_cli.options import Number

if TYPE_CHECKING:
    from rl_algorithms.trainers.run.control_requests import ControlAction

_DEADLINE_S = 600.0


@click.group()
def ctl() -> None:
    """Pause, resume, save, stop or change a run that another process carries out.

    RUN is its folder; of a run of several stages, the stage that runs is asked. The run
    looks between its steps: a command waits until it is done, or for --timeout seconds.
    Only the user of the run may ask. All of it is in the log of the run, and in its
    audit log where there is one.

    \b
    Examples:
      rl ctl set runs/grpo-001 lr=5e-6 max_num_steps=400
      rl ctl pause runs/grpo-001
    """


def _asking(command: Callable[..., None]) -> Callable[..., None]:
    """Add what all commands take."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        click.option("--by", help="Your name for the record; default: user@machine."),
        click.option(
            "--timeout", default=_DEADLINE_S, show_default=True, type=Number(above=0.0),
            help="Seconds to wait for the run; longer than one of its steps.",
        ),
    ):  # fmt: skip
        command = option(command)
    run = click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
    return run(command)


@ctl.command(short_help="Hold a run before its next step.")
@_asking
def pause(run: Path, timeout: float, by: str | None, as_json: bool) -> None:
    """Hold RUN after the present step, with its validation and checkpoint.

    Its workers stay, with their memory. It goes on at rl ctl resume.

    \b
    Example:
      rl ctl pause runs/grpo-001
    """
    _control(run, "pause", "paused", timeout, by, as_json)


@ctl.command(short_help="Let a paused run go on.")
@_asking
def resume(run: Path, timeout: float, by: str | None, as_json: bool) -> None:
    """Let RUN go on that rl ctl pause holds.

    A run that has ended goes on by rl train NAME --resume RUN.

    \b
    Example:
      rl ctl resume runs/grpo-001
    """
    _control(run, "resume", "goes on", timeout, by, as_json)


@ctl.command(short_help="Have a run write a checkpoint now.")
@_asking
def checkpoint(run: Path, timeout: float, by: str | None, as_json: bool) -> None:
    """Have RUN write a checkpoint after the present step; prints its folder.

    Old ones are deleted by the rules of the run, as after any checkpoint.

    \b
    Example:
      rl ctl checkpoint runs/grpo-001
    """
    _control(run, "checkpoint", "saved", timeout, by, as_json)


@ctl.command(short_help="End a run after the present step.")
@_asking
def stop(run: Path, timeout: float, by: str | None, as_json: bool) -> None:
    """End RUN after the present step, with a checkpoint and its result.

    Stages that would follow do not begin. rl train NAME --resume RUN goes on with it.

    \b
    Example:
      rl ctl stop runs/grpo-001
    """
    _control(run, "stop", "stopped", timeout, by, as_json)


@ctl.command("set", short_help="Change keys of a run that goes on.")
@_asking
@click.argument("changes", metavar="KEY=VALUE...", nargs=-1, required=True)
def set_keys(
    run: Path,
    changes: tuple[str, ...],
    timeout: float,
    by: str | None,
    as_json: bool,
) -> None:
    """Change the configuration of RUN, all keys or none, before its next step.

    Some keys may change while a run goes on, such as lr, max_num_steps, val_period and
    save_period; rl config explain KEY says whether one may.

    \b
    Example:
      rl ctl set runs/grpo-001 lr=5e-6 max_num_steps=400
    """
    from rl_algorithms.trainers.settings.config_updates import (  # noqa: PLC0415
        update_run,
    )

    values = _values(changes)
    with _naming_the_option():
        update = update_run(run, values, by=by, deadline_s=timeout)
    terminal = Terminal()
    if as_json:
        terminal.raw(json.dumps(update.to_dict()))
        return
    for key, value in update.changes.items():
        terminal.raw(f"{key}: {update.before.get(key)} -> {value}")
    terminal.note(f"from step {update.step + 1} on")


def _control(
    run: Path,
    action: ControlAction,
    done: str,
    timeout: float,
    by: str | None,
    as_json: bool,
) -> None:
    from rl_algorithms.trainers.run.control_requests import (  # noqa: PLC0415
        control_run,
    )

    with _naming_the_option():
        answer = control_run(run, action, by=by, deadline_s=timeout)
    terminal = Terminal()
    kept = None if answer.checkpoint is None else str(answer.checkpoint)
    if as_json:
        shown = {"action": action, "run": str(run), "step": answer.step}
        terminal.raw(json.dumps({**shown, "checkpoint": kept}))
        return
    terminal.note(f"{done}, after step {answer.step}")
    if kept is not None:
        terminal.raw(kept)


def _values(texts: Sequence[str]) -> dict[str, Any]:
    """Return the new values by key.

    Raises:
        ConfigError: A text is no key=value, or a key is given twice.
    """
    from rl_distributed.config.overrides import parse_overrides  # noqa: PLC0415
    from rl_distributed.errors import ConfigError  # noqa: PLC0415

    values: dict[str, Any] = {}
    for override in parse_overrides(texts):
        key = ".".join(override.path)
        if override.action != "set":
            raise ConfigError(
                f"a run that goes on has all of its keys: got {override.text!r}; give "
                f"{key}=VALUE"
            )
        if key in values:
            raise ConfigError(f"{key} is given twice: give it once")
        values[key] = override.value
    return values


@contextmanager
def _naming_the_option() -> Iterator[None]:
    """Name the option for the time to wait, where that was not enough."""
    from rl_distributed.errors import DeadlineExceededError  # noqa: PLC0415

    try:
        yield
    except DeadlineExceededError as error:
        error.add_note("On the command line that is --timeout SECONDS.")
        raise
