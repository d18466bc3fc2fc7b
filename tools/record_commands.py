"""Record what the docs show and a build cannot produce: runs, and their commands.

`python -m tools.record_commands` trains three short runs and a complete one, which
takes some minutes, and writes `docs/recordings`: the terminal output of commands that
train, sample, serve, control a run or build an environment, two runs without weights as
input of other commands during the site build, and the complete run without weights,
whose page is drawn then (`docs/hooks_pages.py`). With Chromium it draws them into
`docs/assets` too, for builds without one; `--only-pages` does the whole run alone.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from docs.hooks_pages import RUN_OF_THE_PAGE, drawn_pages
from docs.hooks_terminal import MARKER, RECORDINGS, file_name
from tools.report_picture import ASSETS
from tools.terminal_picture import private_texts, run_as_in_terminal, terminal_command

from rl_algorithms.trainers.run.weight_log import WEIGHT_VERSIONS
from rl_distributed.runs.ending import ENDED
from rl_distributed.timing.timeline_file import TIMELINE

ROOT = Path(__file__).resolve().parents[1]
RUN_S = 900
# All stop early, the third by `rl ctl stop`.
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
"""Files that commands read from a run, without weights, logs and pictures."""
PAGE_FILES = (
    *KEPT_FILES,
    TIMELINE,
    WEIGHT_VERSIONS,
    "samples.json",
    "run.jsonl",
    ENDED,
)
"""Files that a run's page shows."""


def recorded_commands() -> list[str]:
    """Return the commands shown from recordings, exactly as on the pages."""
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    found = [match[3] for match in MARKER.finditer(pages) if match[1] == "recorded"]
    return list(dict.fromkeys(found))


class Recorder:
    """Runs commands in one folder and keeps their output.

    Args:
        folder: Where they run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.texts: dict[str, str] = {}

    def record(self, command: str, *, exit_code: int = 0) -> None:
        """Run a command to completion.

        Raises:
            ValueError: It exited with another code, or names this machine.
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
        """Run a command until it prints an address, and interrupt it.

        Raises:
            ValueError: It ended without one, or names this machine.
        """
        with self.started(command) as process:
            assert process.stdout is not None
            said: list[str] = []
            # An exiting process closes its output.
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


def keep_run(run: Path, target: Path, patterns: Sequence[str] = KEPT_FILES) -> None:
    """Copy a run without its weights and anything that names this machine.

    Raises:
        ValueError: The copy names this machine.
    """
    for pattern in patterns:
        for path in run.rglob(pattern):
            if "checkpoints" in path.relative_to(run).parts:
                continue
            text = path.read_text().replace(f"{run.parent.parent}/", "")
            text = _without_machine(text)
            if found := private_texts(text, run.parent.parent):
                raise ValueError(f"{path.name} of {run} shows this machine's {found}")
            copy = target / path.relative_to(run)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)


def record_page(folder: Path, archive: Path) -> None:
    """Train the complete run, and keep the files that its page shows.

    Args:
        folder: Where it is trained.
        archive: Where it is kept.
    """
    Recorder(folder).record(WHOLE)
    shown = Path("runs") / "quickstart-001"
    with tempfile.TemporaryDirectory(prefix="page-") as made:
        keep_run(folder / shown, Path(made) / shown, PAGE_FILES)
        # Curves mark the checkpoints, of which only the steps are needed.
        for checkpoint in (folder / shown).rglob("checkpoints/step_*"):
            (Path(made) / checkpoint.relative_to(folder)).mkdir(parents=True)
        with tarfile.open(archive, "w:xz") as packed:
            packed.add(Path(made) / shown, shown, filter=_without_owner)


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _without_machine(text: str) -> str:
    """Return a record with only the operating system's name, and no node's."""
    text = re.sub(rf'("node": ?)"{re.escape(socket.gethostname())}"', r'\1"node"', text)
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
    archive = arguments.to / RUN_OF_THE_PAGE.name
    with tempfile.TemporaryDirectory(prefix="record-") as made:
        record_page(Path(made), archive)
    if shutil.which("chromium") is None:
        sys.exit(f"the pictures in {arguments.pages} are the old ones: no chromium")
    for name, content in drawn_pages(archive).items():
        (arguments.pages / name).write_bytes(content)


if __name__ == "__main__":
    main()
