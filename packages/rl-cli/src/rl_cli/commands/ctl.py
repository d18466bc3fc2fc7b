"""`rl ctl`: control a run in progress."""

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

# Long, as a run looks for requests between its steps only.
_DEADLINE_S, _ANSWER_S = 600.0, 10.0
_COSTS = ("performance:", "timing:")


@click.group()
def ctl() -> None:
    """Pause, resume, checkpoint, stop or change a run in another process.

    RUN is its folder, for the owner of the run; in a run of several stages, the current
    stage is addressed. RUN may also be its address, such as https://HOST:9500, for
    anyone with an operator's key in RL_KEY, if the run was started with control. The
    run checks for requests between its steps: a command waits until it is carried out,
    or for --timeout seconds. Requests are recorded in the log of the run and, if there
    is one, in its audit log.

    \b
    Examples:
      rl ctl set runs/grpo-001 lr=5e-6 max_num_steps=400
      rl ctl pause runs/grpo-001
      RL_KEY=rlk_... rl ctl pause https://trainer:9500
    """


def _asking(command: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments shared by all commands."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        click.option("--by", help="Your name for the record; default: user@machine."),
        click.option(
            "--timeout", default=_DEADLINE_S, show_default=True, type=Number(above=0.0),
            help="Seconds to wait for the run; must exceed the time of a step.",
        ),
    ):  # fmt: skip
        command = option(command)
    run = click.argument("run", metavar="RUN")
    return run(command)


@ctl.command(short_help="Show state, step and newest metrics of a run.")
@click.argument("run", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(run: str, as_json: bool) -> None:
    """Show state, step and newest metrics of RUN, also after its end.

    At an address a viewer's key is enough. rl watch shows more of a folder.

    \b
    Examples:
      rl ctl status runs/grpo-001
      RL_KEY=rlk_... rl ctl status https://trainer:9500
    """
    from rl_distributed.access.client import ListenerClient, is_address  # noqa: PLC0415

    if is_address(run):
        found = ListenerClient(run).ask("GET", "/rl/run")
    else:
        found = _status_of_folder(Path(run))
    terminal = Terminal()
    if as_json:
        terminal.raw(json.dumps(found))
        return
    total = "" if found["total_steps"] is None else f" of {found['total_steps']}"
    terminal.raw(f"{found['state']}, step {found['step']}{total}")
    metrics = found["metrics"]
    # How well it learns comes before what that costs.
    for name in sorted(metrics, key=lambda name: (name.startswith(_COSTS), name)):
        terminal.raw(f"{name}: {metrics[name]:g}")


def _status_of_folder(folder: Path) -> dict[str, Any]:
    """Return what a run answers at its address, from its files.

    Raises:
        ConfigError: It is not the folder of a run.
    """
    from rl_cli.report.run_reader import read_run  # noqa: PLC0415

    run = read_run(folder)
    # None before the first stage has logged anything.
    stage = run.stages[-1] if run.stages else None
    columns = {} if stage is None else stage.metrics.columns
    result = {} if stage is None else stage.result
    return {
        "state": run.state,
        "step": 0 if stage is None else stage.num_steps,
        "total_steps": None if stage is None else stage.total_steps,
        "stop_reason": run.reason or result.get("stop_reason"),
        "metrics": {name: steps[max(steps)] for name, steps in columns.items()},
    }


@ctl.command(short_help="Pause a run before its next step.")
@_asking
def pause(run: str, timeout: float, by: str | None, as_json: bool) -> None:
    """Pause RUN after the current step, including its validation and checkpoint.

    Its workers keep running and keep their memory. rl ctl resume continues it.

    \b
    Example:
      rl ctl pause runs/grpo-001
    """
    _control(run, "pause", "paused", timeout, by, as_json)


@ctl.command(short_help="Continue a paused run.")
@_asking
def resume(run: str, timeout: float, by: str | None, as_json: bool) -> None:
    """Continue RUN after rl ctl pause.

    To continue a run that has ended, use rl train NAME --resume RUN.

    \b
    Example:
      rl ctl resume runs/grpo-001
    """
    _control(run, "resume", "resumed", timeout, by, as_json)


@ctl.command(short_help="Save a checkpoint of a run now.")
@_asking
def checkpoint(run: str, timeout: float, by: str | None, as_json: bool) -> None:
    """Save a checkpoint of RUN after the current step, and print its folder.

    Old checkpoints are deleted according to the run's settings, as always.

    \b
    Example:
      rl ctl checkpoint runs/grpo-001
    """
    _control(run, "checkpoint", "saved", timeout, by, as_json)


@ctl.command(short_help="Stop a run after the current step.")
@_asking
def stop(run: str, timeout: float, by: str | None, as_json: bool) -> None:
    """Stop RUN after the current step, saving a checkpoint and its result.

    Later stages do not start. rl train NAME --resume RUN continues it.

    \b
    Example:
      rl ctl stop runs/grpo-001
    """
    _control(run, "stop", "stopped", timeout, by, as_json)


@ctl.command("set", short_help="Change keys of a run in progress.")
@_asking
@click.argument("changes", metavar="KEY=VALUE...", nargs=-1, required=True)
def set_keys(
    run: str,
    changes: tuple[str, ...],
    timeout: float,
    by: str | None,
    as_json: bool,
) -> None:
    """Change the configuration of RUN before its next step, all keys or none.

    Only some keys may change during a run, such as lr, max_num_steps, val_period and
    save_period; rl config explain KEY tells which.

    \b
    Example:
      rl ctl set runs/grpo-001 lr=5e-6 max_num_steps=400
    """
    from rl_algorithms.trainers.settings.config_updates import (  # noqa: PLC0415
        ConfigUpdate,
        update_run,
    )
    from rl_distributed.access.client import is_address  # noqa: PLC0415

    # Before a run is asked: a typo is then refused at once.
    values = _values(changes)
    with _naming_the_option():
        if is_address(run):
            update = ConfigUpdate.from_dict(
                _asked(run, "update", timeout, by, {"changes": values})
            )
        else:
            update = update_run(run, values, by=by, deadline_s=timeout)
    terminal = Terminal()
    if as_json:
        terminal.raw(json.dumps(update.to_dict()))
        return
    for key, value in update.changes.items():
        terminal.raw(f"{key}: {update.before.get(key)} -> {value}")
    terminal.note(f"from step {update.step + 1} on")


def _asked(
    url: str, action: str, timeout: float, by: str | None, body: dict[str, Any]
) -> dict[str, Any]:
    """Ask a run at its address."""
    from rl_distributed.access.client import ListenerClient  # noqa: PLC0415

    if by is not None:
        raise click.UsageError(
            "--by is for the folder of a run: at an address the key has a name."
        )
    return ListenerClient(url).ask(
        "POST",
        f"/rl/run/{action}",
        {**body, "deadline_s": timeout},
        # The run's own deadline comes first, whose message says more.
        deadline_s=timeout + _ANSWER_S,
    )


def _control(
    run: str,
    action: ControlAction,
    done: str,
    timeout: float,
    by: str | None,
    as_json: bool,
) -> None:
    from rl_algorithms.trainers.run.control_requests import (  # noqa: PLC0415
        ControlAnswer,
        control_run,
    )
    from rl_distributed.access.client import is_address  # noqa: PLC0415

    with _naming_the_option():
        if is_address(run):
            answer = ControlAnswer.from_dict(_asked(run, action, timeout, by, {}))
        else:
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
        ConfigError: A text is not key=value, or a key is given twice.
    """
    from rl_distributed.config.overrides import parse_overrides  # noqa: PLC0415
    from rl_distributed.errors import ConfigError  # noqa: PLC0415

    values: dict[str, Any] = {}
    for override in parse_overrides(texts):
        key = ".".join(override.path)
        if override.action != "set":
            raise ConfigError(
                "keys cannot be added to or removed from a run in progress: got "
                f"{override.text!r}; give {key}=VALUE"
            )
        if key in values:
            raise ConfigError(f"{key} is given twice: give it once")
        values[key] = override.value
    return values


@contextmanager
def _naming_the_option() -> Iterator[None]:
    """Name the option that sets the deadline if it is exceeded."""
    from rl_distributed.errors import DeadlineExceededError  # noqa: PLC0415

    try:
        yield
    # The library does not know that its deadline came from an option.
    except DeadlineExceededError as error:
        error.add_note("On the command line, set it with --timeout SECONDS.")
        raise
