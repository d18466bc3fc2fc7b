"""Run the test suites, two at a time, and show each one's output when it ends.

`python tools/suites.py [SUITE ...] [--coverage] [--matrix] [argument of pytest ...]`.
The tests wait for processes about half of their time, so two suites fill two cores. A
single suite runs in the foreground. Matrix cells covered by others, marked `matrix`,
run only with `--matrix`, and then alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".cache" / "suites"
# The longest first: short ones fill the end.
SUITES = [
    "rl-models",
    "rl-distributed",
    "workspace",
    "rl-algorithms",
    "rl-envs",
    "rl-cli",
]
AT_ONCE = 2
# pytest kills a test that hangs; this kills a suite whose pytest hangs.
DEADLINE_S = 75 * 60.0
NEWS_S = 60.0


@dataclass(frozen=True)
class Options:
    """What to run of each suite."""

    coverage: bool
    """Also measure coverage."""
    matrix: bool
    """Only the matrix cells that CI covers by others."""

    def status(self, code: int) -> int:
        """Return pytest's exit status; a suite may have no matrix cell."""
        nothing_to_run = self.matrix and code == pytest.ExitCode.NO_TESTS_COLLECTED
        return 0 if nothing_to_run else code


@dataclass(frozen=True)
class Suite:
    """A suite: the tests of a package, or those that cross packages (`workspace`)."""

    name: str

    @property
    def log(self) -> Path:
        """The file of its output."""
        return LOGS / f"{self.name}.log"

    def command(self, extra: list[str], options: Options) -> list[str]:
        """Return the command that runs it."""
        is_workspace = self.name == "workspace"
        folder = "tests" if is_workspace else f"packages/{self.name}/tests"
        arguments = [
            "-m",
            "matrix" if options.matrix else "not matrix",
            # The same examples each time: a change is judged by its own effect. Plain
            # pytest keeps looking for new ones.
            "--hypothesis-profile=ci",
            # Real processes on a busy machine: a failure is retried once, and both
            # attempts are shown, so that a test that needs it is visible.
            "--reruns=1",
            "--max-suite-reruns=5",
            "--rerun-show-tracebacks",
            "-rfER",
            # Time is short in CI: the slowest tests are listed.
            "--durations=15",
            "--durations-min=5",
        ]
        if is_workspace:
            arguments.append("--ignore=tests/gpu")
        elif options.coverage:
            module = self.name.replace("-", "_")
            arguments += [f"--cov={module}", "--cov-report=term"]
        return [sys.executable, "-m", "pytest", folder, *arguments, *extra]

    def environment(self) -> dict[str, str]:
        """Return its variables: concurrent suites must not write to the same file."""
        return os.environ | {
            "COVERAGE_FILE": str(LOGS / f"{self.name}.coverage"),
            "PYTHONUNBUFFERED": "1",
        }

    def progress(self) -> str:
        """Return its progress, such as `rl-envs 43%`."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        shares = [line.rsplit("[", 1)[1] for line in lines if line.endswith("%]")]
        return f"{self.name} {shares[-1].strip(' ]') if shares else '0%'}"


def run_alone(suite: Suite, extra: list[str], options: Options) -> int:
    """Run a suite in the foreground and return its exit status."""
    command = suite.command(extra, options)
    done = subprocess.run(command, cwd=ROOT, env=suite.environment())
    return options.status(done.returncode)


def run_logged(suite: Suite, extra: list[str], options: Options) -> int:
    """Run a suite with its output in its log, and return its exit status."""
    with suite.log.open("w") as log:
        process = subprocess.Popen(
            suite.command(extra, options),
            cwd=ROOT,
            env=suite.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            return options.status(process.wait(DEADLINE_S))
        except subprocess.TimeoutExpired:
            process.kill()
            log.write(f"\nended: not done after {DEADLINE_S / 60:.0f} minutes\n")
            return process.wait() or 1


def run_all(suites: list[Suite], extra: list[str], options: Options) -> int:
    """Run suites in parallel, each to completion whatever the others find."""
    began = time.monotonic()
    failed: list[str] = []

    def say(text: str) -> None:
        minutes = (time.monotonic() - began) / 60
        sys.stdout.write(f"suites, {minutes:.0f} min: {text}\n")
        sys.stdout.flush()

    with ThreadPoolExecutor(AT_ONCE) as lanes:
        running = {
            lanes.submit(run_logged, suite, extra, options): suite for suite in suites
        }
        try:
            while running:
                ended = wait(running, NEWS_S, FIRST_COMPLETED).done
                for one in ended:
                    suite, status = running.pop(one), one.result()
                    sys.stdout.write(suite.log.read_text(errors="replace"))
                    say(f"{suite.name} ended with status {status}")
                    failed += [suite.name] if status else []
                if not ended:
                    begun = [running[one] for one in running if one.running()]
                    say(", ".join(suite.progress() for suite in begun))
        except KeyboardInterrupt:
            # Running ones get the same signal from the terminal.
            lanes.shutdown(cancel_futures=True)
            raise
    say(f"failed: {', '.join(sorted(failed))}" if failed else "all passed")
    return 1 if failed else 0


def main() -> int:
    """Run what the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--coverage", action="store_true", help="also count lines")
    parser.add_argument("--matrix", action="store_true", help="only cells of matrices")
    asked, rest = parser.parse_known_args()
    options = Options(coverage=asked.coverage, matrix=asked.matrix)
    names = []
    while rest and rest[0] in SUITES:
        names.append(rest.pop(0))
    suites = [Suite(name) for name in SUITES if name in (names or SUITES)]
    LOGS.mkdir(parents=True, exist_ok=True)
    if len(suites) == 1:
        return run_alone(suites[0], rest, options)
    return run_all(suites, rest, options)


if __name__ == "__main__":
    raise SystemExit(main())
