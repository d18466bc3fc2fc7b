"""`nox -s commands`: run every `rl` command that the pages show.

The commands of a page run in order, in a folder of its own with what the page assumes.
Each has a deadline; it must exit with the right code, show no traceback and leave no
process. Logs are in `.cache/commands`. `rules.py` defines additions.

Usage: `nox -s commands`, `nox -s commands -- --only serve.md` (a regular expression,
searched in `PAGE: COMMAND`; commands that need earlier ones need their page).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from tools.page_commands import kit
from tools.page_commands.helpers import HELPERS, START_S
from tools.page_commands.pages import ROOT, PageCommand, page_commands
from tools.page_commands.processes import (
    END_S,
    CommandError,
    ShellCommand,
    kill_all,
)
from tools.page_commands.rules import QUICKSTART_TO_STOP, Ending, Rule, rule_of

LOGS = ROOT / ".cache" / "commands"
ENVIRONMENTS = LOGS / "environments"
"""Cache of built actor environments, which take minutes to build."""
IN_ENVIRONMENT = r"rl env |backend=vllm|openenv|verifiers"
"""Commands whose page gets this cache; other pages find none, as on a new machine."""
TERMINAL = f"{sys.executable} {Path(__file__).with_name('terminal.py')}"


def environment(home: Path) -> dict[str, str]:
    """Return the variables of a reader's shell."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RL_", "RAY_"))}
    for name in ("COLUMNS", "NO_COLOR", "CI", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT"):
        kept.pop(name, None)
    # Downloads and settings of package tools remain the user's.
    for name in (".cache/uv", ".config/uv", ".config/pip", ".pip"):
        source, link = Path.home() / name, home / name
        if source.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source)
    return kept | {
        "HOME": str(home),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]]),
        "RL_ENV_ROOT": str(home / "environments"),
        # Do not wait for an unreachable hub.
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


class Page:
    """The commands of a page, in a folder of their own.

    Args:
        name: The page.
        folder: Its folder, which its helper writes into too.
        variables: Environment of all commands.
    """

    def __init__(self, name: str, folder: Path, variables: dict[str, str]) -> None:
        self.folder = folder
        self._variables = variables
        self._log = LOGS / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.log"
        self._log.unlink(missing_ok=True)
        self._beside: list[ShellCommand] = []
        self._helper = HELPERS.get(name)
        self._said: dict[str, str] = {}

    def start(self, line: str) -> ShellCommand:
        """Start a command that continues beside others."""
        self._beside.append(self._command(line, {}))
        return self._beside[-1]

    def run(self, line: str, deadline_s: float = START_S) -> str:
        """Run a command to completion, and return its output.

        Raises:
            CommandError: It fails.
        """
        command = self._command(line, {})
        command.end(deadline_s, 0)
        return command.text

    def try_command(
        self, command: PageCommand, rule: Rule, folder_of_kit: Path
    ) -> None:
        """Run a command of the page by its rule.

        Raises:
            CommandError: It does not do what the page says.
        """
        if self._helper and re.search(self._helper[0], command.line):
            begin, self._helper = self._helper[1], None
            self._said = begin(self)
        if rule.interrupted:
            self._interrupt_a_run()
        said = {**self._said, "folder": str(self.folder), "kit": str(folder_of_kit)}
        line = command.line
        for old, new in rule.replace:
            line = line.replace(old, _filled(new, said))
        found = re.search(rule.pattern, command.title)
        assert found is not None
        added = _filled(rule.add, {**said, **found.groupdict()})
        line, to_file, target = line.partition(" > ")
        line = f"{line} {added}".strip() + to_file + target
        if rule.in_terminal:
            line = f"printf {shlex.quote(rule.typed)} | {TERMINAL} {line}"
        own = {name: _filled(value, said) for name, value in rule.settings}
        settings = {**dict(command.settings), **own}
        running = self._command(line, settings, command.folder)
        if rule.ending is Ending.ITSELF:
            running.end(rule.deadline_s, rule.exit_code)
            return
        running.wait_for(rule.says, rule.deadline_s)
        if rule.ending is Ending.PAGE:
            self._beside.append(running)
            return
        running.press_ctrl_c()
        running.end(END_S, rule.exit_code)

    def close(self) -> None:
        """Stop the processes beside the page."""
        for command in reversed(self._beside):
            command.press_ctrl_c()
            with suppress(CommandError):
                command.end(END_S, 0)
            command.kill()

    def _interrupt_a_run(self) -> None:
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
        run = self._command(QUICKSTART_TO_STOP, {})
        metrics = self.folder / "runs/quickstart-001/stages/grpo/metrics.jsonl"
        run.wait_until(metrics.is_file, "a step of GRPO", START_S)
        run.press_ctrl_c()
        run.end(END_S, 130)

    def _command(
        self, line: str, settings: dict[str, str], folder: str = "."
    ) -> ShellCommand:
        variables = self._variables | settings
        return ShellCommand(line, self.folder / folder, variables, self._log)


def _filled(text: str, said: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda name: said.get(name[1], name[0]), text)


class Report:
    """A line for each command, and the failures."""

    def __init__(self) -> None:
        self.num_run = 0
        self.failed: list[str] = []
        self.left_out: list[str] = []
        self._began_s = time.monotonic()

    def say(self, state: str, title: str, took_s: float, why: str = "") -> None:
        """Write a line."""
        end = f": {why}" if why else ""
        sys.stdout.write(f"{state:8} {took_s:6.1f} s  {title}{end}\n")
        sys.stdout.flush()

    def end(self) -> int:
        """Write the totals, and return the exit status."""
        took_s = time.monotonic() - self._began_s
        sys.stdout.write(
            f"{self.num_run} run, {len(self.failed)} of them failed, "
            f"{len(self.left_out)} left out, in {took_s / 60:.1f} min; "
            f"logs in {LOGS.relative_to(ROOT)}\n"
        )
        for title in self.failed:
            sys.stdout.write(f"failed: {title}\n")
        return 1 if self.failed else 0


def make_runs(shell: Page, names: Sequence[str], report: Report) -> None:
    """Train the runs that pages assume."""
    for name, line in kit.RUNS.items():
        if name not in names:
            continue
        began_s, why = time.monotonic(), ""
        try:
            shell.run(line, 600)
            kit.finish_run(shell.folder, name)
        except CommandError as error:
            why = str(error)
            report.failed.append(line)
        report.say("failed" if why else "made", name, time.monotonic() - began_s, why)


def run_page(
    page: Page, commands: list[PageCommand], made: Path, report: Report
) -> None:
    """Run a page's commands in order."""
    try:
        for command in commands:
            rule = rule_of(command)
            if rule.left_out:
                report.left_out.append(command.title)
                report.say("left out", command.title, 0.0, rule.left_out)
                continue
            began_s, why = time.monotonic(), ""
            report.num_run += 1
            try:
                page.try_command(command, rule, made)
            except CommandError as error:
                why = str(error)
                report.failed.append(command.title)
            took_s = time.monotonic() - began_s
            report.say("failed" if why else "ok", command.title, took_s, why)
    finally:
        page.close()


def main() -> int:
    """Run the commands selected on the command line."""
    parser = argparse.ArgumentParser(
        prog="nox -s commands --",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--only", metavar="PATTERN", default="", help="run these")
    pattern = parser.parse_args().only
    wanted = [one for one in page_commands() if re.search(pattern, one.title)]
    LOGS.mkdir(parents=True, exist_ok=True)
    report = Report()
    with tempfile.TemporaryDirectory(prefix="commands-") as name:
        home, made = Path(name) / "home", Path(name) / "kit"
        home.mkdir()
        variables = environment(home)
        kit.write_kit(made)
        pages = [(page, list(found)) for page, found in groupby(wanted, _page_of)]
        runs = {run for page, found in pages for run in kit.needed_runs(page, found)}
        make_runs(Page("kit", made, variables), sorted(runs), report)
        for number, (page, found) in enumerate(pages):
            folder = Path(name) / str(number)
            kit.give(made, folder, page, found)
            folder.mkdir(exist_ok=True)
            own = variables
            if any(re.search(IN_ENVIRONMENT, one.line) for one in found):
                own = variables | {"RL_ENV_ROOT": str(ENVIRONMENTS)}
            run_page(Page(page, folder, own), found, made, report)
    return report.end()


def _page_of(command: PageCommand) -> str:
    return command.page


if __name__ == "__main__":
    # Even if a shell started it in the background, which ignores Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        status = main()
    except KeyboardInterrupt:
        status = 130
    finally:
        kill_all()
    raise SystemExit(status)
