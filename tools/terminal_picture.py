"""Run a command as in a terminal, and draw its output as an SVG picture.

```
command -> run_as_in_terminal -> text with colours -> draw_terminal -> SVG
```
The docs build draws commands that take a second or so; `tools/record_commands.py`
records the text of those that train or serve, which the build draws too.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

__all__ = [
    "Shown",
    "TerminalCommand",
    "draw_terminal",
    "private_texts",
    "run_all_as_in_terminal",
    "run_as_in_terminal",
    "terminal_command",
]

DEADLINE_S = 120
_INHERITED = (
    "PATH",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPYCACHEPREFIX",
    "LANG",
    "TMPDIR",
)
_PRELOADED = ("rl_cli.run_config", "rl_cli.plan_run", "rl_envs.testing")
_ROOT = Path(__file__).resolve().parents[1]
# Light on dark in either mode of the site; each colour has a contrast above 4.5 to 1.
_THEME = TerminalTheme(
    (22, 27, 34),
    (220, 225, 230),
    [
        (139, 148, 158),
        (255, 139, 130),
        (126, 211, 134),
        (226, 192, 97),
        (121, 184, 255),
        (210, 168, 255),
        (118, 214, 214),
        (220, 225, 230),
    ],
    [
        (160, 168, 178),
        (255, 166, 158),
        (150, 226, 157),
        (240, 210, 130),
        (150, 203, 255),
        (226, 194, 255),
        (150, 230, 230),
        (255, 255, 255),
    ],
)
# Without the fonts that rich's own template loads from elsewhere.
_FORM = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px;
  line-height: {line_height}px;
}}
.{unique_id}-title {{ font-family: sans-serif; font-size: 16px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})"
 clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def run_as_in_terminal(
    command: str,
    folder: Path,
    *,
    width: int = 80,
    exit_code: int = 0,
    environment: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> str:
    """Run an `rl` command; return its output, with colours and `~` for its home.

    Args:
        command: Command line, split as by a shell; it begins with `rl`.
        folder: Working directory, which is also its home folder.
        width: Columns of the terminal.
        exit_code: The expected exit code.
        environment: Further variables.
        deadline_s: Seconds after which it is killed.

    Raises:
        ValueError: It is not an `rl` command, or it exited with another code.
        TimeoutExpired: It took longer than `deadline_s`.
    """
    typed = terminal_command(command, folder, width=width)
    with typed.source.open() as source:
        done = subprocess.run(
            typed.arguments,
            cwd=folder,
            env={**typed.environment, **(environment or {})},
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline_s,
        )
    if done.returncode != exit_code:
        raise ValueError(
            f"{command}: exit code {done.returncode}, not {exit_code}:\n{done.stdout}"
        )
    return done.stdout.replace(str(folder), "~")


@dataclass(frozen=True)
class TerminalCommand:
    """A command line as parsed by a shell."""

    arguments: list[str]
    """Program and arguments."""
    environment: dict[str, str]
    """All of its environment variables."""
    source: Path
    """File for standard input, empty unless the line ends with `< FILE`."""


def terminal_command(command: str, folder: Path, *, width: int = 80) -> TerminalCommand:
    """Return an `rl` command as a shell in `folder` understands it.

    Raises:
        ValueError: It is not an `rl` command.
    """
    program, *arguments = shlex.split(command)
    if program != "rl":
        raise ValueError(f"only rl commands are run for pictures: got {command!r}")
    source = Path(os.devnull)
    if arguments[-2:-1] == ["<"]:
        source = folder / arguments[-1]
        arguments = arguments[:-2]
    # A person's shell environment, without what this process was started with.
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    # By its name, which the run records as its command.
    environment = {
        **kept,
        "HOME": str(folder),
        "COLUMNS": str(width),
        "LINES": "50",
        "TERM": "xterm-256color",
        "FORCE_COLOR": "1",
        # Lines of both streams in the order in which they were written.
        "PYTHONUNBUFFERED": "1",
    }
    rl = str(Path(sys.executable).with_name("rl"))
    return TerminalCommand([rl, *arguments], environment, source)


@dataclass(frozen=True)
class Shown:
    """A command whose output is shown."""

    command: str
    """Command line; it begins with `rl`."""
    width: int = 80
    """Columns of the terminal."""
    exit_code: int = 0
    """The expected exit code."""


def run_all_as_in_terminal(
    shown: Sequence[Shown], folder: Path, *, num_processes: int = 2
) -> list[str]:
    """Run commands, none of which trains; return the output of each.

    Each has a process of its own, forked after the common imports, which are most of a
    command's time.

    Args:
        shown: The commands.
        folder: Working directory, which is also their home folder.
        num_processes: How many run at once.

    Raises:
        ValueError: One exited with another code.
        TimeoutError: One took longer than `DEADLINE_S`.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["tools.terminal_picture", *_PRELOADED])
    with ProcessPoolExecutor(
        num_processes, mp_context=context, max_tasks_per_child=1
    ) as pool:
        waiting = [pool.submit(_run_in_this_process, one, folder) for one in shown]
        return [one.result(DEADLINE_S) for one in waiting]


def _run_in_this_process(shown: Shown, folder: Path) -> str:
    """Run a command in a process that does nothing else afterwards."""
    from rl_cli.main import main  # noqa: PLC0415

    typed = terminal_command(shown.command, folder, width=shown.width)
    os.environ.clear()
    os.environ.update(typed.environment)
    os.chdir(folder)
    with tempfile.TemporaryFile("w+") as output, typed.source.open() as source:
        os.dup2(source.fileno(), sys.stdin.fileno())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(output.fileno(), stream.fileno())
        # As with PYTHONUNBUFFERED, which Python reads when it starts.
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        try:
            main(typed.arguments[1:])
        except SystemExit as end:
            code = end.code
        output.seek(0)
        text = output.read()
    if code != shown.exit_code:
        raise ValueError(
            f"{shown.command}: exit code {code}, not {shown.exit_code}:\n{text}"
        )
    return text.replace(str(folder), "~")


def draw_terminal(
    command: str,
    output: str,
    *,
    width: int = 80,
    most_lines: int = 30,
    last_lines: int = 0,
) -> str:
    """Return the SVG of a terminal with a command and its output.

    Args:
        command: Command line, shown after a prompt.
        output: Its output; ANSI colour codes are kept.
        width: Columns.
        most_lines: Lines shown; the others are only counted.
        last_lines: How many of those shown are the last ones.
    """
    # Recorded for the picture, and written nowhere.
    screen = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True,
        color_system="truecolor", legacy_windows=False, _environ={},
    )  # fmt: skip
    screen.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
    text = Text.from_ansi(output.rstrip("\n").expandtabs())
    lines = list(text.wrap(screen, width))
    if (num_hidden := len(lines) - most_lines) > 0:
        hidden = Text(f"... {num_hidden} more lines", style="bright_black")
        begin = most_lines - last_lines
        lines[begin : begin + num_hidden] = [hidden]
    for line in lines:
        line.rstrip()
        screen.print(line, no_wrap=True, overflow="crop")
    # The last line would be cut off below the baseline.
    screen.print()
    return screen.export_svg(
        title="", theme=_THEME, code_format=_FORM, unique_id="terminal"
    )


def private_texts(picture: str, folder: Path) -> list[str]:
    """Return texts of this machine that must not be in a picture but are.

    Args:
        picture: SVG, or the text that it is drawn from.
        folder: Working directory of the command.
    """
    # "/" and "localhost" reveal nothing about a machine.
    paths = {str(folder), str(_ROOT), str(Path.home())} - {"/", ""}
    found = {path for path in paths if path in picture}
    name = socket.gethostname()
    # A random key holds the two letters of a short name as part of a word.
    as_word = rf"(?<![\w-]){re.escape(name)}(?![\w-])"
    if name not in {"localhost", ""} and re.search(as_word, picture):
        found.add(name)
    return sorted(found)
