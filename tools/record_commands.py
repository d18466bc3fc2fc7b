"""Record what the docs show and a build cannot make: runs, and commands that need them.

`python -m tools.record_commands` trains three short runs and a whole one, which takes
some minutes, and writes `docs/recordings`: the terminal output of commands that train,
sample, serve, control a run or build an environment, two runs without their weights,
which other commands are run on while the site is built, and with Chromium pictures of
the page of the whole run (alone: `--only-pages`).
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from docs.hooks_terminal import MARKER, RECORDINGS, file_name
from tools.report_picture import ASSETS, main as draw_pages
from tools.terminal_picture import private_texts, run_as_in_terminal, terminal_command

ROOT = Path(__file__).resolve().parents[1]
RUN_S = 900
# All end early, and the third by `rl ctl stop`.
TRAIN = "rl train quickstart stages.grpo.grpo.max_num_steps=30"
SECOND = (
    "rl train quickstart stages.warmup.sft.max_num_steps=12 "
    "stages.grpo.grpo.max_num_steps=5 seed=1"
)
LIVE = "runs/quickstart-003"
THIRD = f"rl train quickstart seed=2 output_dir={LIVE}"
CONTROL = ("status", "set", "pause", "resume", "checkpoint", "stop")
"""The order in which a run can be controlled."""
WHOLE = "rl train quickstart"
"""The run whose page is drawn: it reaches its goal."""
KEPT_FILES = (
    "run.json",
    "result.json",
    "metrics.jsonl",
    "updates.jsonl",
    "validation_samples.jsonl",
    "part-*.jsonl",
)
"""What commands read of a run, but for its weights, logs and pictures."""


def recorded_commands() -> list[str]:
    """Return the commands that the pages show from recordings, as they stand there."""
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    found = [match[3] for match in MARKER.finditer(pages) if match[1] == "recorded"]
    return list(dict.fromkeys(found))


class Recorder:
    """Runs commands in one folder and keeps what they print.

    Args:
        folder: Where they run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.texts: dict[str, str] = {}

    def record(self, command: str, *, exit_code: int = 0) -> None:
        """Run a command to its end.

        Raises:
            ValueError: It ended with another code, or names this machine.
        """
        sys.stdout.write(f"$ {command}\n")
        sys.stdout.flush()
        self._keep(
            command,
            run_as_in_terminal(
                command, self._folder, exit_code=exit_code, deadline_s=RUN_S
            ),
        )

    def record_server(self, command: str) -> None:
        """Run a command until it says an address, and interrupt it.

        Raises:
            ValueError: It ended without one, or names this machine.
        """
        with self.started(command) as process:
            assert process.stdout is not None
            said: list[str] = []
            # A process that ends closes its output.
            while line := process.stdout.readline():
                said.append(line)
                if "http://" in line:
                    break
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=RUN_S)
        if not any("http://" in line for line in said):
            raise ValueError(f"{command} says no address:\n{''.join(said)}")
        self._keep(command, "".join(said).replace(str(self._folder), "~"))

    def started(self, command: str) -> subprocess.Popen[str]:
        """Start a command."""
        typed = terminal_command(command, self._folder)
        return subprocess.Popen(
            typed.arguments, cwd=self._folder, env=typed.environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _keep(self, command: str, text: str) -> None:
        if found := private_texts(text, self._folder):
            raise ValueError(f"{command} shows this machine's {found}:\n{text}")
        self.texts[command] = text


def wait_for_step(run: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a run has trained for a few steps.

    Raises:
        TimeoutError: It has not in time, or it has ended.
    """
    deadline_s = time.monotonic() + RUN_S
    metrics = run / "stages" / "warmup" / "metrics.jsonl"
    while not metrics.is_file() or metrics.read_text().count("\n") < 5:
        if time.monotonic() > deadline_s or process.poll() is not None:
            raise TimeoutError(f"{run} has trained for no five steps")
        time.sleep(0.2)


def record_control(recorder: Recorder, folder: Path, commands: list[str]) -> None:
    """Control a run in progress."""
    with recorder.started(THIRD) as process:
        try:
            wait_for_step(folder / LIVE, process)
            for command in commands:
                recorder.record(command)
            process.communicate(timeout=RUN_S)
        finally:
            process.kill()


def keep_run(run: Path, target: Path) -> None:
    """Copy a run without its weights and what names this machine."""
    for pattern in KEPT_FILES:
        for path in run.rglob(pattern):
            if "checkpoints" in path.relative_to(run).parts:
                continue
            text = path.read_text().replace(f"{run.parent.parent}/", "")
            copy = target / path.relative_to(run)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(_without_machine(text))


def hide_machine(run: Path) -> None:
    """Take what names this machine out of what a run's page shows."""
    path = run / "run.json"
    path.write_text(_without_machine(path.read_text()))


def _without_machine(text: str) -> str:
    """Return a record with the name of the operating system alone."""
    return re.sub(r'"Linux-[^"]*"', '"Linux"', text)


def record(folder: Path, recordings: Path) -> None:
    """Record everything into a folder."""
    recorder = Recorder(folder)
    commands = recorded_commands()
    live = [one for one in commands if one.startswith("rl ctl ")]
    live.sort(key=lambda command: CONTROL.index(command.split()[2]))
    recorder.record(TRAIN)
    recorder.record(SECOND)
    record_control(recorder, folder, live)
    for command in commands:
        if command.startswith("rl serve "):
            recorder.record_server(command)
        elif command not in recorder.texts:
            recorder.record(command)
    recordings.mkdir(parents=True, exist_ok=True)
    for path in recordings.glob("*.txt"):
        path.unlink()
    shutil.rmtree(recordings / "runs", ignore_errors=True)
    for command in commands:
        (recordings / f"{file_name(command)}.txt").write_text(recorder.texts[command])
    for name in ("quickstart-001", "quickstart-002"):
        keep_run(folder / "runs" / name, recordings / "runs" / name)


def main() -> None:
    """Record, and draw the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=RECORDINGS, help="Folder.")
    parser.add_argument("--pages", type=Path, default=ASSETS, help="Folder of pages.")
    parser.add_argument("--only-pages", action="store_true", help="Record nothing.")
    arguments = parser.parse_args()
    if not arguments.only_pages:
        with tempfile.TemporaryDirectory(prefix="record-") as made:
            record(Path(made), arguments.to)
    if shutil.which("chromium") is None:
        sys.exit("the pictures of a run's page are the old ones: no chromium here")
    with tempfile.TemporaryDirectory(prefix="record-") as made:
        folder, shown = Path(made), Path("runs") / "quickstart-001"
        Recorder(folder).record(WHOLE)
        hide_machine(folder / shown)
        pages = arguments.pages.resolve()
        # The page names the run as it is named from here.
        with contextlib.chdir(folder):
            draw_pages(shown, pages)


if __name__ == "__main__":
    main()
