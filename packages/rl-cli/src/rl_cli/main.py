"""Entry point of the `rl` command: dispatches commands and reports errors.

Commands are imported when they are called, so that `rl --help` is instant. Exit codes:
0 success, 1 failure, 2 wrong input, 128 + signal if interrupted.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, TextIO

import click

from rl_cli import __version__
from rl_distributed.suggestion import did_you_mean

EXIT_GRACE_S, SIGNAL_CODES = 10.0, 128
COMMANDS = {
    "audit": ("rl_cli.commands.audit:audit", "Verify an audit log."),
    "checkpoint": (
        "rl_cli.commands.checkpoint:checkpoint",
        "Inspect or convert a checkpoint.",
    ),
    "cluster": ("rl_cli.commands.cluster:cluster", "Generate files for batch systems."),
    "config": ("rl_cli.commands.config:config", "Show, check or explain a run."),
    "ctl": ("rl_cli.commands.ctl:ctl", "Pause, save, stop or change a run."),
    "dashboard": (
        "rl_cli.commands.dashboard:dashboard",
        "Print a Grafana dashboard of runs.",
    ),
    "diff": ("rl_cli.commands.diff:diff", "Show where two runs begin to differ."),
    "doctor": ("rl_cli.commands.doctor:doctor", "Check that this machine is ready."),
    "env": ("rl_cli.commands.env:env", "Show, build or check actor environments."),
    "envs": (
        "rl_cli.commands.envs:envs",
        "List, test, play or measure environments.",
    ),
    "eval": ("rl_cli.commands.eval:evaluate", "Evaluate a model on held-out prompts."),
    "generate": ("rl_cli.commands.generate:generate", "Sample answers from a model."),
    "init": ("rl_cli.commands.init:init", "Create a run file to start from."),
    "keys": ("rl_cli.commands.keys:keys", "Create, list and revoke access keys."),
    "plan": ("rl_cli.commands.plan:plan", "Estimate memory and layout of a run."),
    "recipes": ("rl_cli.commands.recipes:recipes", "List recipes, or print one."),
    "replay": (
        "rl_cli.commands.replay:replay",
        "Repeat the training of a recorded run.",
    ),
    "report": ("rl_cli.commands.report:report", "Write an HTML page of a run."),
    "runs": ("rl_cli.commands.runs:runs", "List runs and their state."),
    "serve": ("rl_cli.commands.serve:serve", "Serve a model over HTTP."),
    "train": ("rl_cli.commands.train:train", "Train with a recipe or an algorithm."),
    "watch": ("rl_cli.commands.watch:watch", "Show a run live, in a browser or here."),
}


class LazyGroup(click.Group):
    """A group that imports its commands only when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, suggesting the nearest one for an unknown name."""
        name = args[0]
        # An unknown option gets click's own message.
        if name not in COMMANDS and not name.startswith("-"):
            ctx.fail(f"there is no command {name!r}{did_you_mean(name, COMMANDS)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Call a command, turning an interruption into `Abort`.

        click does the same, but first writes to a terminal that may have been closed.
        """
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            with contextlib.suppress(OSError):
                # Ends the line on which the terminal has shown ^C.
                click.echo(err=True)
            raise click.exceptions.Abort from error

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            rows = [(name, COMMANDS[name][1]) for name in self.list_commands(ctx)]
            formatter.write_dl(rows)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="First run: `rl train quickstart`. Each command has --help with examples.",
)
@click.version_option(__version__, prog_name="rl")
@click.option("--debug", is_flag=True, help="Show tracebacks and debug logs.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Post-train language models, on a laptop or a cluster."""
    ctx.obj = {"debug": debug}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code.

    Args:
        argv: Arguments without the program's name; None: those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Accept `--debug` anywhere: people append it to the command that just failed.
    debug = "--debug" in arguments
    if debug:
        arguments = ["--debug", *(a for a in arguments if a != "--debug")]
    code = _run(arguments, debug)
    if code > SIGNAL_CODES and argv is None:
        _leave_at_the_latest(code)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # The terminal is closed.
            _discard(stream)
    sys.exit(code)


def _run(arguments: list[str], debug: bool) -> int:
    try:
        # Not standalone: click would exit by itself, with codes and texts of its own.
        result = cli.main(args=arguments, prog_name="rl", standalone_mode=False)
    except click.exceptions.Abort as error:
        return _report_interruption(error.__cause__)
    except KeyboardInterrupt as error:
        return _report_interruption(error)
    except click.ClickException as error:
        error.show()
        _hint_at_key(error)
        return error.exit_code
    except BrokenPipeError:
        # 128 + SIGPIPE, like programs that do not catch it, as in `rl ... | head`.
        _discard(sys.stdout)
        return 141
    except Exception as error:
        return _report(error, debug)
    return result if isinstance(result, int) else 0


def _hint_at_key(error: click.ClickException) -> None:
    """Explain how to set a key that was given as an option."""
    if not isinstance(error, click.NoSuchOption) or error.possibilities:
        return
    command = error.ctx.command if error.ctx is not None else None
    if command is None or all(p.name != "overrides" for p in command.params):
        return
    key = error.option_name.lstrip("-").replace("-", "_")
    _say(f"Keys of the configuration have no dashes: {key}=VALUE")


def _report_interruption(error: BaseException | None) -> int:
    """Report what was saved, and return the exit code of the signal."""
    code = getattr(error, "exit_code", 130)
    said = str(error) if error is not None else ""
    _say(f"{said[:1].upper()}{said[1:]}." if said else "Interrupted.")
    for note in getattr(error, "__notes__", []):
        _say(note)
    return int(code)


def _leave_at_the_latest(code: int) -> None:
    """Exit even if an interrupted library keeps the process alive.

    Ray stops its processes by itself once this one is gone.
    """
    timer = threading.Timer(EXIT_GRACE_S, os._exit, [code])
    # Python waits for other threads at its end, and would wait for this one.
    timer.daemon = True
    timer.start()


def _report(error: Exception, debug: bool) -> int:
    """Show one clear message for an error and return its exit code."""
    # Here, as `rl --help` must not wait for it.
    from rl_distributed.errors import DistributedError, UserError  # noqa: PLC0415

    if debug:
        traceback.print_exception(error)
    known = isinstance(error, DistributedError)
    name = "" if known else f"unexpected {type(error).__name__}: "
    _say(f"Error: {name}{error}")
    for note in getattr(error, "__notes__", []):
        _say(f"  {note if debug else note.splitlines()[0]}")
    if isinstance(error, UserError):
        return 2
    if not debug:
        _say("Add --debug for the traceback.")
    return 1


def _say(message: str) -> None:
    if not message:
        return
    try:
        click.echo(message, err=True)
    except OSError:
        # The terminal is closed, so only the exit code can tell.
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Drop unwritten output, on which Python would fail when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
